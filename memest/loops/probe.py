"""The probe of a run: allocated and reserved bytes, and bytes by kind, at the phases of a step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from memest.report import Phase, PhaseRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Allocated and reserved bytes of the allocator, and their peaks since the previous reading."""

    allocated_bytes: int
    peak_allocated_bytes: int  # highest since the previous reading
    reserved_bytes: int
    peak_reserved_bytes: int  # highest since the previous reading


class CudaMemory:
    """Reader of torch's caching allocator on the current CUDA device."""

    device_type = "cuda"

    def read(self) -> Reading:
        """Return current and peak bytes, and reset the peaks; do not wait for kernels."""
        import torch

        reading = Reading(
            allocated_bytes=torch.cuda.memory_allocated(),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.memory_reserved(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        )
        torch.cuda.reset_peak_memory_stats()
        return reading


@dataclass(slots=True)
class PhaseRecorder:
    """Recorder of a row of memory figures at each phase of a run, and of the run's peaks."""

    memory: CudaMemory
    num_micro_batches: int  # micro-batches of an optimizer step
    rows: list[PhaseRow] = field(default_factory=list)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    micro_batches_begun: int = 0
    on_start: Callable[[], None] = lambda: None  # called after the peaks are reset
    on_row: Callable[[], None] = lambda: None  # called after each row
    states: Any = None  # parameters, gradients, optimizer states (`States`), set before a row

    def start(self) -> None:
        """Reset the peaks, so that the peak of building the model does not count. Then call the
        field `on_start`, with which the caller can mark the start of the training."""
        self.memory.read()
        self.on_start()

    def note_peaks(self) -> Reading:
        """Read the allocator, update the run's peaks, and return the reading."""
        reading = self.memory.read()
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, reading.peak_allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reading.peak_reserved_bytes)
        return reading

    @property
    def is_last_micro_batch(self) -> bool:
        """True if an optimizer step follows the current micro-batch."""
        return self.micro_batches_begun % self.num_micro_batches == 0

    def record(self, phase: Phase, model: Any, optimizer: Any) -> None:
        """Append a row of memory figures at `phase`; `before_forward` begins a micro-batch. The row
        has the bytes of parameters, gradients and optimizer state of `model` and `optimizer`."""
        if phase is Phase.BEFORE_FORWARD:
            self.micro_batches_begun += 1
        number = max(0, self.micro_batches_begun - 1)  # a validation may precede all micro-batches
        step, micro_batch = divmod(number, self.num_micro_batches)
        reading = self.note_peaks()
        if self.states is None:
            from memest.models_meta.sharding import States

            self.states = States(model, optimizer)
        params = self._num_bytes(self.states.params())
        grads = self._num_bytes(self.states.grads())
        state = self._num_bytes(self.states.optimizer())
        place = {"step": step, "micro_batch": micro_batch, "phase": phase}
        self.rows.append(PhaseRow.of(reading, (params, grads, state), **place))
        self.on_row()

    def _num_bytes(self, values: Iterable[Any]) -> int:
        import torch

        return sum(
            v.numel() * v.element_size()
            for v in values
            if isinstance(v, torch.Tensor) and v.device.type == self.memory.device_type
        )
