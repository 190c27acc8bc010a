"""Every optimizer that a plan can name, made to run on meta parameters as it runs on CUDA.

The optimizers of torch are torch's own, so that their states and temporaries come out of the real
code; those of bitsandbytes, whose kernels need a GPU, are a mirror of its Python side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.optim.adam as torch_adam
import torch.optim.sgd as torch_sgd
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memest.errors import PlanError, UnsupportedError, closest
from memest.estimator.optimizers.bitsandbytes import BlockwiseOptimizer, Closure, Params


class _ItemIsOne(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads 1 from every meta scalar, for optimizers that look at a norm."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


class MetaAdafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor`, which reads norms for step sizes that allocate nothing."""

    def step(self, closure: Closure = None) -> Any:
        """One update; the norms that it reads are taken as 1."""
        with _ItemIsOne():  # type: ignore[no-untyped-call]
            return super().step(closure)  # type: ignore[no-untyped-call]


@contextmanager
def _fused_allowed_on_meta(module: ModuleType = torch_adam) -> Iterator[None]:
    """Lifts torch's check that fused parameters are on a device with fused kernels."""
    name = "_device_dtype_check_for_fused"
    original = getattr(module, name)
    setattr(module, name, lambda p, cuda_unsupported=False: None)
    try:
        yield
    finally:
        setattr(module, name, original)


class MetaFusedAdam(torch.optim.Adam):
    """`torch.optim.Adam(fused=True)`: step counters on the device, no temporaries."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        with _fused_allowed_on_meta():
            return super()._init_group(*args, **kwargs)  # type: ignore[no-untyped-call]


class MetaFusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)`: step counters on the device, no temporaries."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        with _fused_allowed_on_meta():
            return super()._init_group(*args, **kwargs)  # type: ignore[no-untyped-call]


class MetaFusedSGD(torch.optim.SGD):
    """`torch.optim.SGD(fused=True)`: momentum is made at the first step, no temporaries.

    Its kernel, which has no version for meta tensors, is passed over: it works in place.
    """

    def step(self, closure: Closure = None) -> Any:
        """One update."""
        with mock.patch.object(torch, "_fused_sgd_", return_value=None):
            return super().step(closure)

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        with _fused_allowed_on_meta(torch_sgd):
            return super()._init_group(*args, **kwargs)  # type: ignore[no-untyped-call]


class MetaGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` on meta tensors: the same scalars, and no step is ever skipped.

    It is torch's own but for the value of `found_inf`, which decides whether the step is taken.
    """

    def __init__(self) -> None:
        super().__init__(device="cpu")  # "cuda" switches itself off where there is none

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        return optimizer.step(*args, **kwargs)


def make_grad_scaler() -> torch.amp.GradScaler:
    """The loss scaler of `16-mixed`; scale it, `unscale_`, `step` and `update` as on CUDA."""
    return MetaGradScaler()


def _foreach(params: Params) -> bool:
    """Whether torch would take the multi-tensor path for `params`, were they on CUDA.

    It does unless a parameter with a gradient is of a subclass (`_default_to_fused_or_foreach`,
    torch 2.13, torch/optim/optimizer.py); meta is not in its list of devices, so it is asked here.
    """
    plain = (Tensor, torch.nn.Parameter)
    return all(type(param) in plain for param in params if param.requires_grad)


def _blockwise(
    num_moments: int, *, is_paged: bool, num_bits: int = 8
) -> Callable[..., torch.optim.Optimizer]:
    def make(params: Params, **options: Any) -> torch.optim.Optimizer:
        return BlockwiseOptimizer(
            params,
            lr=options["lr"],
            num_moments=num_moments,
            is_paged=is_paged,
            num_bits=num_bits,
        )

    return make


def _torch(
    optimizer: Callable[..., torch.optim.Optimizer],
    *accepted: str,
    foreach: bool | None = True,
    fused: bool | None = None,
) -> Callable[..., torch.optim.Optimizer]:
    def make(params: Params, **options: Any) -> torch.optim.Optimizer:
        taken = {k: v for k, v in options.items() if k in ("lr", *accepted) and v is not None}
        if not taken.get("nesterov"):
            taken.pop("nesterov", None)
        if foreach is not None:
            taken["foreach"] = foreach and _foreach(params)
        if fused:
            taken |= {"fused": True, "foreach": False}
        return optimizer(params, **taken)

    return make


_DECAY = "weight_decay"
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _torch(torch.optim.AdamW, _DECAY),
    "adam": _torch(torch.optim.Adam, _DECAY),
    "adamw_fused": _torch(MetaFusedAdamW, _DECAY, fused=True),
    "adam_fused": _torch(MetaFusedAdam, _DECAY, fused=True),
    "adamw_single": _torch(torch.optim.AdamW, _DECAY, foreach=False),
    "adam_single": _torch(torch.optim.Adam, _DECAY, foreach=False),
    "sgd": _torch(torch.optim.SGD, _DECAY, "momentum", "nesterov"),
    "sgd_fused": _torch(MetaFusedSGD, _DECAY, "momentum", "nesterov", fused=True),
    "sgd_single": _torch(torch.optim.SGD, _DECAY, "momentum", "nesterov", foreach=False),
    "rmsprop": _torch(torch.optim.RMSprop, _DECAY, "momentum"),
    "rmsprop_single": _torch(torch.optim.RMSprop, _DECAY, "momentum", foreach=False),
    "adagrad": _torch(torch.optim.Adagrad, _DECAY),
    "adagrad_single": _torch(torch.optim.Adagrad, _DECAY, foreach=False),
    # Only Adafactor takes its single-tensor path when `foreach` is left open.
    "adafactor": _torch(MetaAdafactor, _DECAY, foreach=None),
    "adafactor_foreach": _torch(MetaAdafactor, _DECAY),
    "adam_8bit": _blockwise(2, is_paged=False),
    "adamw_8bit": _blockwise(2, is_paged=False),
    "paged_adam_8bit": _blockwise(2, is_paged=True),
    "paged_adamw_8bit": _blockwise(2, is_paged=True),
    "paged_adamw_32bit": _blockwise(2, is_paged=True, num_bits=32),
    "lion_8bit": _blockwise(1, is_paged=False),
    "lion_32bit": _blockwise(1, is_paged=False, num_bits=32),
    "paged_lion_8bit": _blockwise(1, is_paged=True),
    "paged_lion_32bit": _blockwise(1, is_paged=True, num_bits=32),
}
"""A plan's name of an optimizer -> what makes it."""

_ELSEWHERE = ("deepspeed_cpu",)


def make_optimizer(
    name: str,
    params: Iterable[Tensor],
    *,
    lr: float = 1e-4,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | None = None,
) -> torch.optim.Optimizer:
    """The optimizer `name` over meta `params`, with the kernels that CUDA would choose.

    `weight_decay` None keeps the library's default; in SGD and Adam another value than 0 costs a
    passing copy of the gradients.

    Raises:
        PlanError: no optimizer has this name, or it has no momentum.
        UnsupportedError: it is known, but does not run on the GPU.
    """
    if name in _ELSEWHERE:
        raise UnsupportedError(
            f"optimizer `{name}` runs on the host, which is not modelled here",
            hint="name it together with a DeepSpeed strategy",
        )
    if name not in OPTIMIZERS:
        near = closest(name, OPTIMIZERS)
        raise PlanError(
            f"there is no optimizer `{name}`",
            hint=f"choose one of {', '.join(f'`{k}`' for k in near or OPTIMIZERS)}",
        )
    if momentum and not name.startswith(("sgd", "rmsprop")):
        raise PlanError(
            f"optimizer `{name}` has no `momentum` (it is {momentum})",
            hint="leave it out, or choose `sgd` or `rmsprop`",
        )
    with torch.device("cpu"):  # where Adagrad, which makes its state here, keeps its counters
        return OPTIMIZERS[name](
            list(params), lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
        )


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor of the state that lies on the device, each once."""
    seen: set[int] = set()
    for tensor in _state_entries(optimizer):
        if tensor.device.type != "cpu" and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state on the device, entry by entry.

        sum(numel * itemsize  for the entries of `optimizer.state` that are not on the CPU)

    This is what a reader of `optimizer.state` counts: the quantisation maps of bitsandbytes are
    shared, but counted with every parameter that refers to them, 1 KiB each. Step counters are on
    the CPU unless the optimizer is fused.
    """
    return sum(
        tensor.numel() * tensor.itemsize
        for tensor in _state_entries(optimizer)
        if tensor.device.type != "cpu"
    )


def managed_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state in CUDA managed memory, which the driver moves between host and GPU."""
    if not isinstance(optimizer, BlockwiseOptimizer):
        return 0
    return sum(
        tensor.numel() * tensor.itemsize
        for tensor in _state_entries(optimizer)
        if tensor.device.type == "cpu"
    )


def _state_entries(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
