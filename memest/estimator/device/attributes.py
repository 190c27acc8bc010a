"""The methods of `torch.Tensor` that know devices, for tensors of a card that is not there.

torch's C++ resolves `"cuda"` before anything written in Python is asked, and a build without CUDA
refuses it. So the methods and constructors that take a device stand here once more: they turn the
device into what reaches the recorder, and the attributes say what the script expects.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.guesses import filler
from memest.estimator.device.live import LiveRecorder
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import (
    CPU,
    INSIDE,
    META,
    PLAIN,
    Place,
    host_storages,
    is_meta,
    storage_key,
    true_device,
)

CUDA = torch.device("cuda", 0)
_NOT_THERE = "CUDA error: invalid device ordinal"


def resolve(device: Any) -> Any:
    """`device` with the index that `"cuda"` stands for; None and all else as it is.

    Raises:
        RuntimeError: another GPU than the first, as torch words it.
    """
    if device is None or isinstance(device, bool | torch.dtype):
        return device
    if isinstance(device, int):
        found = torch.device("cuda", device)
    elif isinstance(device, str | torch.device):
        found = torch.device(device)
    else:
        return device
    if found.type != "cuda":
        return device
    if found.index:
        raise RuntimeError(f"{_NOT_THERE}: {found} (this run has one virtual GPU)")
    return CUDA


def install(patches: Patches, recorder: LiveRecorder) -> None:
    """Let tensors say where the recorder has put them, and go where the script sends them."""
    _install_attributes(patches, recorder)
    _install_moves(patches, recorder)
    _install_constructors(patches, recorder)
    _install_values(patches, recorder)


def _install_attributes(patches: Patches, recorder: LiveRecorder) -> None:
    live = recorder._live

    def device(tensor: Tensor) -> torch.device:
        if not is_meta(tensor):
            found: torch.device = true_device(tensor)
            return found
        if INSIDE.depth:
            return META
        try:
            key = storage_key(tensor)
        except (NotImplementedError, RuntimeError):  # a subclass without a storage
            return META
        if key in live:
            return CUDA
        return CPU if key in host_storages else META

    def says(kind: str) -> property:
        return property(lambda tensor: device(tensor).type == kind)

    kind_of = Tensor.type

    def type_(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            place = device(tensor).type
            name = kind_of(tensor)
            if is_meta(tensor) and place != "meta":
                name = name.replace("torch.meta.", "torch.cuda." if place == "cuda" else "torch.")
            return name
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            element = getattr(torch, dtype.removeprefix("torch.cuda.")).dtype
            return tensor.to(device=CUDA, dtype=element)
        if isinstance(dtype, _LegacyTensor):
            return tensor.to(device=CUDA, dtype=dtype.dtype)
        return kind_of(tensor, dtype, *args, **kwargs)

    patches.set(Tensor, "device", property(device))
    patches.set(Tensor, "is_cuda", says("cuda"))
    patches.set(Tensor, "is_meta", says("meta"))
    patches.set(Tensor, "is_cpu", says("cpu"))
    patches.set(Tensor, "get_device", lambda t: 0 if device(t).type == "cuda" else -1)
    patches.set(Tensor, "type", type_)

    def data_ptr(tensor: Tensor) -> int:
        if not is_meta(tensor):
            return true_address(tensor)
        return _address(recorder, tensor) + tensor.storage_offset() * tensor.itemsize

    true_address = Tensor.data_ptr
    patches.set(Tensor, "data_ptr", data_ptr)

    class_of_storage = torch.UntypedStorage
    true_storage_device = class_of_storage.device
    true_storage_address = class_of_storage.data_ptr

    def storage_device(storage: torch.UntypedStorage) -> torch.device:
        key = storage._cdata
        if not INSIDE.depth and key in live:
            return CUDA
        if key in host_storages and not INSIDE.depth:
            return CPU
        found: torch.device = true_storage_device.__get__(storage)  # type: ignore[attr-defined]
        return found

    def storage_address(storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if key in live or key in host_storages:
            return _address_of(recorder, key)
        return true_storage_address(storage)

    patches.set(class_of_storage, "device", property(storage_device))
    patches.set(class_of_storage, "data_ptr", storage_address)
    patches.set(
        class_of_storage,
        "is_cuda",
        property(lambda s: storage_device(s).type == "cuda"),
    )


def _address(recorder: LiveRecorder, tensor: Tensor) -> int:
    try:
        return _address_of(recorder, storage_key(tensor))
    except (NotImplementedError, RuntimeError):
        return 0


def _address_of(recorder: LiveRecorder, key: int) -> int:
    """Where the block lies on the card; of a storage of the host anything that is its own."""
    index = recorder._live.get(key)
    if index is None:
        return key
    block = recorder.blocks.get(index)
    return 0 if block is None else block.address


class _Asking(threading.local):
    """Whether a class of its own is asked what `to` does, and asks here again."""

    now = False


asking = _Asking()


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


def _install_moves(patches: Patches, recorder: LiveRecorder) -> None:
    to_ = Tensor.to

    def move(tensor: Tensor, device: Any, *rest: Any, **kwargs: Any) -> Tensor:
        """`tensor.to(device, ...)` for a device that is the script's."""
        if asking.now:
            return to_(tensor, device, *rest, **kwargs)
        device = resolve(device)
        place = recorder.place(tensor)
        if device is None or recorder.is_off:
            pass
        elif _is_there(device, place):
            if not rest and not kwargs:
                return tensor
            return to_(tensor, _dtype_of(tensor, rest, kwargs), **kwargs)
        elif torch.device(device).type == "cuda":
            device = CUDA
        elif torch.device(device).type == "meta" and place in (Place.CARD, Place.HOST):
            with _disable_current_modes():
                dtype = _dtype_of(tensor, rest, kwargs)
                return torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=dtype, device=META
                )
        if place is Place.CARD and device == META and not rest and not kwargs:
            return tensor
        if type(tensor) in PLAIN:
            return to_(tensor, device, *rest, **kwargs)
        asking.now = True
        try:
            return to_(tensor, device, *rest, **kwargs)
        finally:
            asking.now = False

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

    def cuda(
        tensor: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        where = CUDA if device is None else device
        return move(tensor, where, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return move(tensor, CPU, memory_format=memory_format)

    def record_stream(tensor: Tensor, stream: Any) -> None:
        recorder.record_stream(tensor, stream.number)

    _install_parse_to(patches)
    patches.set(Tensor, "to", to)
    patches.set(Tensor, "cuda", cuda)
    patches.set(Tensor, "cpu", cpu)
    patches.set(Tensor, "type_as", lambda tensor, other: to(tensor, other))
    patches.set(Tensor, "pin_memory", lambda tensor, device=None: recorder.pinned(tensor))
    patches.set(Tensor, "is_pinned", lambda tensor, device=None: recorder.is_pinned(tensor))
    patches.set(Tensor, "record_stream", record_stream)


def _is_there(device: Any, place: Place) -> bool:
    """Whether a tensor at `place` lies on `device` already."""
    wanted = {Place.CARD: "cuda", Place.HOST: "cpu"}.get(place)
    return wanted is not None and torch.device(device).type == wanted


def _dtype_of(tensor: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """The dtype that `to(device, *rest, **kwargs)` asks for, which is taken from `kwargs`."""
    given = kwargs.pop("dtype", None) or (rest[0] if rest else None)
    return given if isinstance(given, torch.dtype) else tensor.dtype


class _LegacyTensor:
    """`torch.cuda.FloatTensor` and its kin: a constructor, and a name for a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, *args: Any) -> Tensor:
        if len(args) == 1 and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=self.dtype, device=CUDA)
        return torch.empty(args or (0,), dtype=self.dtype, device=CUDA)


_LEGACY = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8,
    "ShortTensor": torch.int16, "IntTensor": torch.int32, "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}  # fmt: skip


def _install_constructors(patches: Patches, recorder: LiveRecorder) -> None:
    def with_device(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = resolve(kwargs["device"])
            return function(*args, **kwargs)

        return call

    def from_data(function: Callable[..., Any]) -> Callable[..., Any]:
        """torch fills such a tensor on the host and copies it."""

        @functools.wraps(function)
        def call(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            device = resolve(device if device is not None else _default_device())
            data = args[0] if args else kwargs.get("data")
            if isinstance(data, Tensor) and is_meta(data):
                moved = data if device is None else data.to(device)
                dtype = kwargs.get("dtype")
                moved = moved if dtype is None else moved.to(dtype)
                made = moved.detach().clone() if function is tensor else moved
                return made.requires_grad_() if kwargs.get("requires_grad") else made
            if device is None or torch.device(device).type != "cuda":
                return function(*args, device=device, **kwargs)
            wants_grad = kwargs.pop("requires_grad", False)
            kwargs.pop("pin_memory", None)
            moved = function(*args, device=CPU, **kwargs).to(CUDA)
            return moved.requires_grad_() if wants_grad else moved

        return call

    tensor = torch.tensor
    data_functions = {torch.tensor, torch.as_tensor, torch.asarray}
    functions = {f for f in _device_constructors() if f not in data_functions}
    functions |= {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
    functions |= {torch.rand_like, torch.randn_like, torch.randint_like}
    for name in dir(torch):
        function = getattr(torch, name)
        try:
            is_one, has_data = function in functions, function in data_functions
        except TypeError:
            continue
        if has_data:
            patches.set(torch, name, from_data(function))
        elif is_one:
            patches.set(torch, name, with_device(function))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
        patches.set(Tensor, name, with_device(getattr(Tensor, name)))

    def new_tensor(self: Tensor, data: Any, *, dtype: Any = None, **kwargs: Any) -> Tensor:
        kwargs["device"] = kwargs.get("device") or self.device
        made: Tensor = torch.tensor(data, dtype=dtype or self.dtype, **kwargs)
        return made

    patches.set(Tensor, "new_tensor", new_tensor)
    for name, dtype in _LEGACY.items():
        patches.set(torch.cuda, name, _LegacyTensor(dtype))
    _install_parameters(patches, recorder)


def _default_device() -> Any:
    """What `torch.set_default_device` and `with torch.device(...)` say."""
    if not torch._C._len_torch_function_stack():
        return None
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):  # C++ puts it there without entering it
            return mode.device
    return None


def _install_parameters(patches: Patches, recorder: LiveRecorder) -> None:
    """A parameter of the host has no data, so that it can become one of the card.

    `Module.to` replaces the data of a parameter and keeps the object, on which optimizers and tied
    weights depend; torch refuses that between a real and a meta tensor.
    """
    make = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if (
            isinstance(data, Tensor)
            and not recorder.is_off
            and type(data) in (Tensor, nn.Parameter)
            and not is_meta(data)
            and true_device(data).type == "cpu"
        ):
            with _disable_current_modes():
                bare = torch.empty_strided(
                    data.size(), data.stride(), dtype=data.dtype, device=META
                )
            recorder.put_on_host(bare)
            recorder.know(bare, data)
            data = bare
        return make(cls, data, requires_grad)

    patches.set(nn.Parameter, "__new__", staticmethod(new))
    data_of = torch._C.TensorBase.data  # type: ignore[attr-defined]

    def set_data(tensor: Tensor, value: Tensor) -> None:
        if is_meta(tensor) != is_meta(value):
            swapped = Tensor._make_subclass(type(tensor), value.detach(), tensor.requires_grad)
            vars(swapped).update(vars(tensor))  # class and attributes are swapped as well
            torch.utils.swap_tensors(tensor, swapped)
            return
        data_of.__set__(tensor, value)

    patches.set(Tensor, "data", property(data_of.__get__, set_data))
    are_alike = torch._has_compatible_shallow_copy_type

    def can_replace(tensor: Tensor, other: Tensor) -> bool:
        """Whether `Module.to` may set the data of a parameter, as between host and GPU it may."""
        if is_meta(tensor) == is_meta(other):
            return are_alike(tensor, other)
        return recorder.place(tensor if is_meta(tensor) else other) is not Place.META

    patches.set(torch, "_has_compatible_shallow_copy_type", can_replace)


def _install_values(patches: Patches, recorder: LiveRecorder) -> None:
    """What crosses from tensors to Python without an operator."""

    def on_host(tensor: Tensor) -> Tensor:
        """A real tensor in place of one without data: what is known, or the guess."""
        value = recorder.values.value_of(tensor)
        if value is not None:
            return value.clone()
        recorder.guesses.note(
            recorder.lines.current(), f"values of {str(tensor.dtype).removeprefix('torch.')}"
        )
        made = torch.full((1,), filler(tensor.dtype), dtype=tensor.dtype)
        return made.expand(tensor.shape) if tensor.dim() else made[0]

    numpy_, tolist_, repr_, array_ = (
        Tensor.numpy, Tensor.tolist, Tensor.__repr__, Tensor.__array__,
    )  # fmt: skip

    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if not is_meta(tensor):
            return numpy_(tensor, force=force)
        if recorder.place(tensor) is Place.CARD and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        if tensor.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use "
                "tensor.detach().numpy() instead."
            )
        with _disable_current_modes():
            return np.array(numpy_(on_host(tensor.detach())))

    def array(tensor: Tensor, dtype: Any = None) -> Any:
        if not is_meta(tensor):
            return array_(tensor, dtype)
        made = numpy(tensor)
        return made if dtype is None else made.astype(dtype, copy=False)

    def tolist(tensor: Tensor) -> Any:
        if not is_meta(tensor) or recorder.place(tensor) is Place.META:
            return tolist_(tensor)
        with _disable_current_modes():
            return tolist_(on_host(tensor.detach()))

    def text(tensor: Tensor, *, tensor_contents: Any = None) -> str:
        place = Place.META if not is_meta(tensor) else recorder.place(tensor)
        if place is Place.META:
            return repr_(tensor, tensor_contents=tensor_contents)
        with _disable_current_modes():
            shown = repr_(on_host(tensor.detach()), tensor_contents=tensor_contents)
        if place is Place.CARD:
            shown = f"{shown[:-1]}, device='cuda:0')"
        return shown

    patches.set(Tensor, "numpy", numpy)
    patches.set(Tensor, "tolist", tolist)
    patches.set(Tensor, "__array__", array)
    patches.set(Tensor, "__repr__", text)
