"""What DeepSpeed's three ZeRO stages share: the engine around a step, and the norm of gradients.

The classes of `zero12` and `zero3` are mirrors of DeepSpeed 0.19.8: what it allocates on the GPU,
in its order and on its streams, without its arithmetic. The model's own forward and backward run
as they are. Where DeepSpeed waits for a value of the GPU, the host waits here too.

Source: DeepSpeed 0.19.8, runtime/engine.py (`_cast_module_mixed_precision`, `backward`, `step`),
runtime/utils.py (`has_inf_or_nan`, `combine_grad_norm_groups`), with the configuration that
Lightning 2.6 makes (pytorch/strategies/deepspeed.py, `_create_default_config`): `overlap_comm`,
`contiguous_gradients` and `reduce_scatter` on, `pin_memory` off, a `sub_group_size` that nothing
exceeds, no gradient clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import MAIN, StreamRecorder
from memest.plan import TrainingPlan

LOSS_SCALE = float(1 << 16)
"""Of `16-*`: Lightning's `initial_scale_power`. Its value changes nothing here; no step is skipped.
"""

UNTIMED_STEPS = 2
"""Steps before `ThroughputTimer` begins to wait for the GPU (utils/timer.py, `start_step`)."""

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


GPU = "cuda"
"""Where it makes its tensors: the virtual GPU of this rank."""


@dataclass(frozen=True, slots=True)
class HostTerm:
    """Bytes of host memory that one rank holds on purpose."""

    what: str
    num_bytes: int
    arithmetic: str
    is_pinned: bool = False


def compute_dtype(plan: TrainingPlan) -> torch.dtype:
    """What DeepSpeed casts the parameters to, accumulates and sends: `get_data_types`.

    `*-mixed` and `*-true` are the same to it: parameters in 16 bits beside 32-bit masters.
    """
    return {"3": torch.float32, "b": torch.bfloat16, "1": torch.float16}[plan.precision[0]]


def on_host(numel: int, dtype: torch.dtype) -> Tensor:
    """Stands for `numel` elements in host memory, of which one is really there."""
    with _disable_current_modes():
        return torch.zeros(1, dtype=dtype, device="cpu").expand(numel)


class HostAdam(torch.optim.Optimizer):
    """Stands for `DeepSpeedCPUAdam`, whose step takes nothing on the GPU.

    Source: DeepSpeed 0.19.8, ops/adam/cpu_adam.py (`step`).
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__(list(params), {"lr": 0.0})

    def step(self, closure: Any = None) -> Any:
        """An update on the host; `Zero.host_terms` says what it holds there."""


class ZeroOptimizer:
    """What a probe finds in `trainer.optimizers[0]`, by the names that DeepSpeed gives it."""

    def __init__(self, inner: torch.optim.Optimizer, zero_grad: Callable[[], None]) -> None:
        self.optimizer = inner
        self._zero_grad = zero_grad
        self.averaged_gradients: dict[int, list[Tensor] | None] = {}
        self.all_grad_tensors: dict[int, list[Tensor] | None] = {}
        self.grad_partitions_flat_buffer: Tensor | None = None
        self.fp32_partitioned_groups_flat: list[Tensor] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the model's own parameters."""
        self._zero_grad()

    @property
    def state(self) -> Any:
        """Of the optimizer that was given to DeepSpeed."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Likewise."""
        return self.optimizer.param_groups


class Zero:
    """DeepSpeed's engine around the step of one rank; a stage fills in the methods at the end.

    All methods run on the virtual GPU. The order of a micro-batch: `forward`, `zero_grad` (first of
    a step), `backward`, `step`; `start` comes before the first one.

    Args:
        plan: of a DeepSpeed strategy.
        recorder: of the virtual GPU.
        rank: of the plan's GPUs.
    """

    def __init__(self, plan: TrainingPlan, recorder: StreamRecorder, rank: int = 0) -> None:
        self.plan = plan
        self.recorder = recorder
        self.rank = rank
        self.world_size = plan.world_size
        self.dtype = compute_dtype(plan)
        self.is_boundary = False
        self.module: nn.Module
        self._master: Tensor
        self.zero: ZeroOptimizer
        self.trained: list[nn.Parameter] = []
        self._first_optimizer: Any = None
        self._global_grad_norm: Any = 0.0
        self._norm_of_engine: Any = 0.0
        self._num_steps = 0

    def start(self, module: nn.Module, inner: torch.optim.Optimizer) -> None:
        """Cast the parameters of `module`, over which `inner` was made, and divide them.

        The engine keeps the optimizer it was given (`basic_optimizer`), and with it the state that
        Adagrad makes at once and that is never used: it makes another Adagrad over its own masters.
        """
        self.module = module
        params = [p for p in module.parameters() if p.requires_grad]
        self._first_optimizer = inner
        for state in inner.state.values():
            self.label((v for v in state.values() if isinstance(v, Tensor)), MemKind.OPTIMIZER)
        self._cast_parameters()
        self.trained = [p for p in params if p.numel()]
        with torch.no_grad():
            self.zero = ZeroOptimizer(inner, self.zero_grad)
            self.divide()

    def masters(self) -> Iterator[Tensor]:
        """The copies that the optimizer updates, where they lie on the GPU."""
        if not self.plan.offloads:
            yield self._master

    def replace_adagrad(self, masters: Sequence[Tensor]) -> None:
        """`initialize_optimizer_states`: where the optimizer is Adagrad, another over `masters`."""
        if isinstance(self.zero.optimizer, torch.optim.Adagrad):
            with torch.device("cpu"):  # the counters
                again = torch.optim.Adagrad(list(masters), **self.zero.optimizer.defaults)
            self.zero.optimizer = again

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of a micro-batch; DeepSpeed's throughput timer waits for the GPU."""
        if self._num_steps >= UNTIMED_STEPS:
            self.wait_for_all()
        self.begin_forward()
        yield

    @contextmanager
    def linear_layers(self) -> Iterator[None]:
        """Inside, linear layers are those of the stage."""
        yield

    def zero_grad(self) -> None:
        """Forget the gradients of the model's own parameters."""
        for parameter in self.trained:
            parameter.grad = None

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """As `DeepSpeedEngine.backward`: the loss is divided and scaled once more.

        Every loss is multiplied by a scale, which is 1 without 16-bit floats (`scale_loss`).
        """
        self.is_boundary = is_last
        unscaled = loss / self.plan.accumulate_grad_batches
        scaled = unscaled * (LOSS_SCALE if self.dtype is torch.float16 else 1.0)
        scaled.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.after_backward()

    def step(self, *, is_last: bool) -> None:
        """The update, in the micro-batch that ends with a step; DeepSpeed has its own scaler."""
        if is_last:
            with torch.no_grad():
                self.update()
                self.label(self.masters(), MemKind.OPTIMIZER)  # to a step they are parameters
                self._norm_of_engine = self._global_grad_norm
                self.zero_grad()
        if self._num_steps >= UNTIMED_STEPS:
            self.wait_for_all()
        self._num_steps += is_last

    def host_terms(self) -> list[HostTerm]:
        """What this rank holds in host memory at the end of a step."""
        return []

    def divide(self) -> None:
        """Flatten, partition and make the masters."""
        raise NotImplementedError

    def begin_forward(self) -> None:
        """Before the module's forward."""

    def after_backward(self) -> None:
        """The epilogue: reduce what is left of the gradients."""
        raise NotImplementedError

    def update(self) -> None:
        """The optimizer's step and what follows it."""
        raise NotImplementedError

    def keep_norm(self, norm: Tensor, scale: float = 1.0) -> Tensor:
        """Combine the norms of one group, wait for the verdict, keep the unscaled norm; returns
        the combined one, which lives until the end of the step.
        """
        combined = combine_norms([norm])
        del norm
        is_invalid = (~torch.isfinite(combined) | (combined < 0)).any()
        self.wait(self.recorder.stream)
        del is_invalid
        self._global_grad_norm = combined / scale
        return combined

    def wait(self, stream: int = MAIN) -> None:
        """The host waits for a stream, as where it reads a value of the GPU."""
        self.recorder.host_waits(self.recorder.event(stream))

    def wait_for_all(self) -> None:
        """The host waits for every stream."""
        torch.cuda.synchronize()

    def label(self, tensors: Iterable[Tensor], kind: MemKind) -> None:
        """Say what tensors are held for."""
        for tensor in tensors:
            self.recorder.label(tensor, kind)

    def record_use(self, tensor: Tensor, stream: int) -> None:
        """As `tensor.record_stream(stream)`."""
        self.recorder.record_stream(tensor, stream)

    def _cast_parameters(self) -> None:
        """As `_cast_module_mixed_precision`: every floating parameter, frozen ones too."""
        if self.dtype is torch.float32:
            return
        for parameter in self.module.parameters():
            if parameter.dtype in _CASTABLE and parameter.dtype is not self.dtype:
                parameter.data = parameter.data.to(self.dtype)
                self.recorder.label(parameter, MemKind.PARAMS)


def when_grad_arrives(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> None:
    """`register_grad_hook`: call `hook` once the gradient of `parameter` is summed."""
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def split(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of `flat`, one after another."""
    return flat.split(list(sizes))  # type: ignore[no-any-return, no-untyped-call]


def has_inf_or_nan(tensor: Tensor) -> Tensor:
    """Whether a gradient overflowed, as a scalar on the GPU (`runtime/utils.py`)."""
    is_finite = torch.isfinite
    return is_finite(tensor.amax()).logical_and(is_finite(tensor.amin())).logical_not()


def combine_norms(norms: Sequence[Tensor]) -> Tensor:
    """`combine_grad_norm_groups` (`runtime/utils.py`)."""
    stacked = torch.stack(list(norms))
    invalid = (~torch.isfinite(stacked) | (stacked < 0)).any()
    combined = torch.linalg.vector_norm(stacked, ord=2)
    return torch.where(invalid, torch.full_like(combined, float("inf")), combined)


def mask_invalid(norm: Tensor) -> None:
    """`mask_nan_or_inf_with_val_inplace` (`runtime/utils.py`)."""
    is_inf = norm.isinf()
    is_nan = norm.isnan()
    invalid = is_nan.logical_or(is_inf)
    minus_one = torch.tensor(-1.0, device=norm.device, dtype=torch.float)
    norm.masked_fill_(invalid, minus_one)


def send(recorder: StreamRecorder, tensor: Tensor, world_size: int) -> None:
    """A collective over `tensor`, which takes its time on the stream that is current."""
    if world_size > 1:
        recorder.transfer(tensor.numel() * tensor.element_size())


def partitions_of(start: int, numel: int, size: int) -> Iterator[int]:
    """The partitions of `size` elements that `numel` elements from `start` lie in."""
    yield from range(start // size, (start + numel - 1) // size + 1)
