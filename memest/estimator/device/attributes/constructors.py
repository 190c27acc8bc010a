"""The functions that make tensors, on the device that the script names or has made its default."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides
from torch import Tensor
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.patches import Patches
from memest.estimator.device.refusals import refuse_generator
from memest.estimator.device.tensors import CARD, CPU, is_meta, resolve

_Device = torch.device
Constructor = Callable[..., Any]


def install(patches: Patches) -> None:
    """Let `device="cuda"` name the virtual GPU wherever a tensor is made."""
    data_functions = {torch.tensor, torch.as_tensor, torch.asarray}
    functions = {f for f in _device_constructors() if f not in data_functions}
    functions |= {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
    functions |= {torch.rand_like, torch.randn_like, torch.randint_like}
    copies = torch.tensor
    for name in dir(torch):
        function = getattr(torch, name)
        try:
            is_one, has_data = function in functions, function in data_functions
        except TypeError:
            continue
        if has_data:
            patches.set(torch, name, _from_data(function, copies=function is copies))
        elif is_one:
            patches.set(torch, name, _with_device(function))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
        patches.set(Tensor, name, _with_device(getattr(Tensor, name)))
    patches.set(Tensor, "new_tensor", _new_tensor)


def _with_device(function: Constructor) -> Constructor:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if "generator" in kwargs and not (args and isinstance(args[0], Tensor)):
            refuse_generator(kwargs["generator"], device or _default_device())
        if device is None:
            return function(*args, **kwargs)
        kwargs["device"] = device = resolve(device)
        if not (args and isinstance(args[0], Tensor) and _Device(device).type == "meta"):
            return function(*args, **kwargs)
        with _disable_current_modes():  # in the likeness of a tensor that may be the card's
            return function(*args, **kwargs)

    return call


def _from_data(function: Constructor, *, copies: bool) -> Constructor:
    """torch fills such a tensor on the host and copies it."""

    @functools.wraps(function)
    def call(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        device = resolve(device if device is not None else _default_device())
        data = args[0] if args else kwargs.get("data")
        if args and isinstance(data, list | tuple):
            args = (_numbers(data), *args[1:])
        if isinstance(data, Tensor) and is_meta(data):
            moved = data if device is None else data.to(device)
            dtype = kwargs.get("dtype")
            moved = moved if dtype is None else moved.to(dtype)
            made = moved.detach().clone() if copies else moved
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        if device is None or torch.device(device).type != "cuda":
            return function(*args, device=device, **kwargs)
        wants_grad = kwargs.pop("requires_grad", False)
        kwargs.pop("pin_memory", None)
        moved = function(*args, device=CPU, **kwargs).to(CARD.device)
        return moved.requires_grad_() if wants_grad else moved

    return call


def _numbers(data: Any) -> Any:
    """Nested `data` with the values of the tensors in it that have none in C++, which would read
    them one by one.
    """
    if isinstance(data, Tensor):
        return data.tolist() if is_meta(data) else data
    if isinstance(data, list | tuple) and not all(map(_is_number, data)):
        return [_numbers(item) for item in data]
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _new_tensor(self: Tensor, data: Any, *, dtype: Any = None, **kwargs: Any) -> Tensor:
    kwargs["device"] = kwargs.get("device") or self.device
    made: Tensor = torch.tensor(data, dtype=dtype or self.dtype, **kwargs)
    return made


def _default_device() -> Any:
    """What `torch.set_default_device` and `with torch.device(...)` say."""
    if not torch._C._len_torch_function_stack():
        return None
    overrides: Any = torch.overrides
    for mode in reversed(overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):  # C++ puts it there without entering it
            return mode.device
    return None
