"""Types of tensors as before torch 0.4: `torch.cuda.FloatTensor`, `Tensor.type`, `Tensor.new`.

Source (torch 2.11): torch/csrc/tensor/python_tensor.cpp, torch/csrc/utils/tensor_new.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD, is_meta

_PREFIX = "torch.cuda."

_DTYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8,
    "ShortTensor": torch.int16, "IntTensor": torch.int32, "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}  # fmt: skip


class LegacyTensor:
    """`torch.cuda.FloatTensor` and the others: a constructor, a name for a dtype, a class."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.__module__ = "torch.cuda"
        self.dtype = _DTYPES[name]

    def __repr__(self) -> str:
        return f"<class '{_PREFIX}{self.__name__}'>"

    def __call__(self, *args: Any) -> Tensor:
        """Return a tensor of the data, or of the sizes, that are given."""
        return _made(args, self.dtype, CARD.device)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype is self.dtype


def _made(args: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what a constructor of old makes of its arguments: sizes, a size, a tensor, or data."""
    given = args[0] if len(args) == 1 else None
    if given is None or isinstance(given, int | torch.Size):
        sizes = given if isinstance(given, torch.Size) else args or (0,)
        return torch.empty(sizes, dtype=dtype, device=device)
    if not isinstance(given, Tensor):
        return torch.tensor(given, dtype=dtype, device=device)
    if given.dtype is not dtype or given.device.type != device.type:
        raise TypeError(f"expected {device.type} {dtype} (got {given.device.type} {given.dtype})")
    return given.detach()  # the same storage


def install(patches: Patches, device: Callable[[Tensor], torch.device]) -> None:
    """Install the types of the GPU, which only a CUDA build of torch has."""
    for name in _DTYPES:
        patches.set(torch.cuda, name, LegacyTensor(name))
    _install_methods(patches, device)
    _install_default(patches)


def _install_methods(patches: Patches, device: Callable[[Tensor], torch.device]) -> None:
    kind_of, new_of = Tensor.type, Tensor.new

    def type_(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            place = device(tensor).type
            name = kind_of(tensor)
            if is_meta(tensor) and place != "meta":
                name = name.replace("torch.meta.", _PREFIX if place == "cuda" else "torch.")
            return name
        on_gpu = _dtype_on_gpu(dtype)
        if on_gpu is not None:
            return tensor.to(device=CARD.device, dtype=on_gpu)
        return kind_of(tensor, dtype, *args, **kwargs)

    def new(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = device(tensor)
        if kwargs or not is_meta(tensor) or place.type == "meta":
            made: Tensor = new_of(tensor, *args, **kwargs)
            return made
        return _made(args, tensor.dtype, place)

    patches.set(Tensor, "type", type_)
    patches.set(Tensor, "new", new)


def _dtype_on_gpu(kind: Any) -> torch.dtype | None:
    """Return the dtype of a type of the GPU, given by name or itself; None for any other."""
    if isinstance(kind, LegacyTensor):
        return kind.dtype
    if isinstance(kind, str) and kind.startswith(_PREFIX):
        return _DTYPES.get(kind.removeprefix(_PREFIX))
    return None


def _install_default(patches: Patches) -> None:
    """`torch.set_default_tensor_type`, and a default device that ends with the virtual GPU."""
    set_type = torch.set_default_tensor_type
    make: Any = Tensor.__new__
    is_on_gpu = False

    def new(cls: Any, *args: Any, **kwargs: Any) -> Tensor:
        if cls is Tensor and is_on_gpu and not kwargs:
            return _made(args, torch.get_default_dtype(), CARD.device)
        made: Tensor = make(cls, *args, **kwargs)
        return made

    def set_default_tensor_type(kind: Any, /) -> None:
        nonlocal is_on_gpu
        dtype = _dtype_on_gpu(kind)
        if dtype is None:
            set_type(kind)
            if is_on_gpu:
                torch.set_default_device(None)
        else:
            torch.set_default_dtype(dtype)
            torch.set_default_device("cuda")
            if not is_on_gpu:  # `torch.Tensor(...)` follows the type, not the default device
                patches.set(Tensor, "__new__", staticmethod(new))
        is_on_gpu = dtype is not None

    def end_default() -> None:
        now = _default_context()
        if now is not before:
            torch.set_default_device(None if before is None else before.device)

    before = _default_context()
    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)
    patches.on_undo(end_default)


def _default_context() -> Any:
    """Return what `torch.set_default_device` has entered, or None."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
