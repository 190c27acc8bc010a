"""`Tensor.to` and its kin, which send a tensor where the script wants it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD, CPU, META, PLAIN, Place, resolve

Move = Callable[..., Tensor]


class _Asking(threading.local):
    """Whether a class of its own is asked what `to` does, and asks here again."""

    now = False


_asking = _Asking()


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let tensors and modules move between the host and the virtual GPU."""
    to_: Move = Tensor.to
    move = _mover(mode, to_)
    to = _parser(move, to_)

    def cuda(
        tensor: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        where = CARD.device if device is None else device
        return move(tensor, where, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return move(tensor, CPU, memory_format=memory_format)

    def record_stream(tensor: Tensor, stream: Any) -> None:
        mode.memory.record_stream(tensor, stream.number)

    _install_parse_to(patches)
    patches.set(Tensor, "to", to)
    patches.set(Tensor, "cuda", cuda)
    patches.set(Tensor, "cpu", cpu)
    patches.set(Tensor, "type_as", lambda tensor, other: to(tensor, other))
    patches.set(
        Tensor,
        "pin_memory",
        lambda tensor, device=None: tensor if mode.is_off else mode.host.pinned(tensor),
    )
    patches.set(Tensor, "is_pinned", lambda tensor, device=None: mode.host.is_pinned(tensor))
    patches.set(Tensor, "record_stream", record_stream)


def _install_parse_to(patches: Patches) -> None:
    """Let `Module.to` take the number of a device."""
    parse_to: Any = torch._C._nn._parse_to

    def parse(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):
            args = (resolve(args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = resolve(kwargs["device"])
        return parse_to(*args, **kwargs)

    patches.set(torch._C._nn, "_parse_to", parse)


class _FromHost(torch.autograd.Function):
    """A copy to the card whose gradient goes to the host again: torch's own asks for the device of
    what was copied, and all tensors without data say the same.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_: Move, rest: tuple[Any, ...]) -> Tensor:
        """`tensor.to("cuda", *rest)`."""
        ctx.dtype = tensor.dtype
        return to_(tensor, CARD.device, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient where the tensor lies, in its type."""
        return grads[0].to(CPU, ctx.dtype), None, None


def _mover(mode: CudaSimMode, to_: Move) -> Move:
    def move(tensor: Tensor, device: Any, *rest: Any, **kwargs: Any) -> Tensor:
        """`tensor.to(device, ...)` for a device that is the script's."""
        if _asking.now:
            return to_(tensor, device, *rest, **kwargs)
        device = resolve(device)
        place = mode.host.place(tensor)
        if device is None or mode.is_off:
            pass
        elif _is_there(device, place):
            if not rest and not kwargs:
                return tensor
            return to_(tensor, _dtype_of(tensor, rest, kwargs), **kwargs)
        elif torch.device(device).type == "cuda":
            device = CARD.device
            if tensor.requires_grad and torch.is_grad_enabled() and place is not Place.CARD:
                run = functools.partial(to_, **kwargs)
                moved: Tensor = _FromHost.apply(tensor, run, rest)  # type: ignore[no-untyped-call]
                return moved
        elif torch.device(device).type == "meta" and place in (Place.CARD, Place.HOST):
            dtype = _dtype_of(tensor, rest, kwargs)
            with _disable_current_modes():
                size, stride = tensor.size(), tensor.stride()
                return torch.empty_strided(size, stride, dtype=dtype, device=META)
        if place is Place.CARD and device == META and not rest and not kwargs:
            return tensor
        if type(tensor) in PLAIN:
            return to_(tensor, device, *rest, **kwargs)
        _asking.now = True
        try:
            return to_(tensor, device, *rest, **kwargs)
        finally:
            _asking.now = False

    return move


def _parser(move: Move, to_: Move) -> Move:
    """`Tensor.to` in all its forms."""

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            other, rest = args[0], args[1:]
            return move(tensor, other.device, other.dtype, *rest, **kwargs)
        if "other" in kwargs:
            other = kwargs.pop("other")
            return move(tensor, other.device, other.dtype, **kwargs)
        if args and not isinstance(args[0], torch.dtype):
            return move(tensor, *args, **kwargs)
        if kwargs.get("device") is not None:
            device = kwargs.pop("device")
            dtype = args[0] if args else kwargs.pop("dtype", None)
            if dtype is not None:
                return move(tensor, device, dtype, *args[1:], **kwargs)
            return move(tensor, device, **kwargs)
        return to_(tensor, *args, **kwargs)

    return to


def _is_there(device: Any, place: Place) -> bool:
    """Whether a tensor at `place` lies on `device` already."""
    wanted = {Place.CARD: "cuda", Place.HOST: "cpu"}.get(place)
    return wanted is not None and torch.device(device).type == wanted


def _dtype_of(tensor: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """The dtype that `to(device, *rest, **kwargs)` asks for, which is taken from `kwargs`."""
    given = kwargs.pop("dtype", None) or (rest[0] if rest else None)
    return given if isinstance(given, torch.dtype) else tensor.dtype
