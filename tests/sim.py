"""A dispatch mode for tests of kernels: each meta tensor is a tensor of the simulated GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memest.estimator.allocator.statistics import CountingAllocator
from memest.estimator.gpu.guesses import Guesses
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.tensors.lines import ScriptLines
from memest.estimator.tensors.placement import INSIDE
from memest.estimator.tensors.storages import MemKind, Site


class NoLines(ScriptLines):
    """Finds no line, so that sites name operators alone."""

    def current(self) -> str:
        return ""


class SimGpu(TorchDispatchMode):
    """Runs each operator on the simulated GPU, wherever its tensors are."""

    def __init__(self, gpu: str | Gpu = "h200") -> None:
        super().__init__()
        found = find_gpu(gpu) if isinstance(gpu, str) else gpu
        allocator = CountingAllocator(1 << 50)
        self.mode = CudaSimMode(found, allocator, Guesses(), NoLines())
        self.memory, self.timeline = self.mode.memory, self.mode.timeline
        self.gpu, self.values, self.storages = found, self.mode.values, self.memory.storages
        self.coverage = self.mode.kernels.coverage
        self._num_taken = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        INSIDE.depth += 1
        try:
            return self.mode.run_on_gpu(func, args, kwargs or {})
        finally:
            INSIDE.depth -= 1

    @property
    def events(self) -> list[int]:
        """All events of the log."""
        self.memory.settle()
        return self.memory.log.events.tolist()

    def take_events(self) -> list[int]:
        """Events since the last call."""
        events = self.events[self._num_taken :]
        self._num_taken += len(events)
        return events

    def adopt(self, tensor: Tensor, kind: MemKind = MemKind.ACTIVATIONS, op: str = "") -> None:
        """Make a meta tensor that exists already a tensor of the GPU."""
        self.memory.allocate(tensor, Site(op, "", ""), kind)

    def id_of(self, tensor: Tensor) -> int:
        index = self.memory.id_of(tensor)
        assert index is not None
        return index
