"""Functions that make tensors, replaced so that they accept the virtual GPU as their `device`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides
from torch import Tensor
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.ops.refusals import refuse_generator
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import CPU, GPU, INSIDE, is_meta, resolve
from memest.estimator.versions import makes_subclasses_under_modes

_PREFIX = "torch.cuda."

_TYPES = "Float Double Half BFloat16 Byte Char Short Int Long Bool".split()
_DTYPE_BY_TYPE = {f"{name}Tensor": getattr(torch, f"{name}Tensor").dtype for name in _TYPES}


class LegacyTensor:
    """Replacement of a legacy tensor type such as `torch.cuda.FloatTensor`, callable as a
    constructor and usable in `isinstance`."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.__module__ = "torch.cuda"
        self.dtype = _DTYPE_BY_TYPE[name]

    def __repr__(self) -> str:
        return f"<class '{_PREFIX}{self.__name__}'>"

    def __call__(self, *args: Any) -> Tensor:
        """Return a GPU tensor; `args` are its sizes, or one tensor or list of data."""
        return _legacy_tensor(args, self.dtype, GPU.device)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype is self.dtype


def _legacy_tensor(args: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor as a legacy constructor makes it from `args`: sizes, or a tensor or list."""
    data = args[0] if len(args) == 1 else None
    if data is None or isinstance(data, int | torch.Size):
        sizes = data if isinstance(data, torch.Size) else args or (0,)
        return torch.empty(sizes, dtype=dtype, device=device)
    if not isinstance(data, Tensor):
        return torch.tensor(data, dtype=dtype, device=device)
    if data.dtype is not dtype or data.device.type != device.type:
        raise TypeError(f"expected {device.type} {dtype} (got {data.device.type} {data.dtype})")
    return data.detach()  # shares the storage


def _install_legacy(patches: Patches) -> None:
    """Install `torch.cuda.FloatTensor` and similar types, which only a CUDA build of torch has."""
    for name in _DTYPE_BY_TYPE:
        patches.set(torch.cuda, name, LegacyTensor(name))

    @patches.wrap(Tensor, "type")
    def type_(true_type: Any, tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            prefix = {"cuda": _PREFIX, "cpu": "torch."}.get(tensor.device.type, "torch.meta.")
            return true_type(tensor).replace("torch.meta.", prefix)
        gpu_dtype = _dtype_on_gpu(dtype)
        if gpu_dtype is not None:
            return tensor.to(device=GPU.device, dtype=gpu_dtype)
        return true_type(tensor, dtype, *args, **kwargs)

    @patches.wrap(Tensor, "new")
    def new(true_new: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = tensor.device
        if kwargs or not is_meta(tensor) or device.type == "meta":
            return true_new(tensor, *args, **kwargs)
        return _legacy_tensor(args, tensor.dtype, device)


def _dtype_on_gpu(kind: Any) -> torch.dtype | None:
    """Return the dtype of `kind`, a `LegacyTensor` or its name; None for other values."""
    if isinstance(kind, LegacyTensor):
        return kind.dtype
    is_name = isinstance(kind, str) and kind.startswith(_PREFIX)
    return _DTYPE_BY_TYPE.get(kind.removeprefix(_PREFIX)) if is_name else None


def _install_default(patches: Patches) -> None:
    """Make `torch.set_default_tensor_type` accept GPU types. `patches.undo` also restores the
    default device."""
    set_type = torch.set_default_tensor_type
    make: Any = Tensor.__new__
    is_on_gpu = False

    def new(cls: Any, *args: Any, **kwargs: Any) -> Tensor:
        if cls is Tensor and is_on_gpu and not kwargs:
            return _legacy_tensor(args, torch.get_default_dtype(), GPU.device)
        if cls is Tensor:
            return make(cls, *args, **kwargs)
        with _disable_current_modes():  # under a mode, C++ makes a `Tensor` of the data before
            return make(cls, *args, **kwargs)

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
        is_on_gpu = dtype is not None

    def end_default() -> None:
        if _default_context() is not before:
            torch.set_default_device(None if before is None else before.device)

    before = _default_context()
    patches.set(Tensor, "__new__", staticmethod(new))  # follows the type, not the device
    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)
    patches.on_undo(end_default)


def _default_context() -> Any:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


Constructor = Callable[..., Any]


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Make functions that create tensors accept `device="cuda"` for the virtual GPU."""
    if not makes_subclasses_under_modes():  # a view, so it stays where the tensor is
        patches.within(Tensor, "as_subclass", lambda *_: _disable_current_modes())
    _install_legacy(patches)
    _install_default(patches)
    data_functions: set[Any] = {torch.tensor, torch.as_tensor, torch.asarray}
    functions: set[Any] = {f for f in _device_constructors() if f not in data_functions}
    functions |= {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
    functions |= {torch.rand_like, torch.randn_like, torch.randint_like}
    for function in data_functions:
        name = function.__name__
        patches.wrap(torch, name)(functools.partial(_from_data, copies=name == "tensor"))
    for function in functions:
        name = function.__name__
        if getattr(torch, name, None) is function:  # not one of `torch.fft`
            patches.set(torch, name, _with_device(getattr(torch, name)))
    for name in ("sparse_csr_tensor", "sparse_csc_tensor", "sparse_compressed_tensor"):
        patches.wrap(torch, name)(_from_parts)
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
        patches.set(Tensor, name, _with_device(getattr(Tensor, name)))
    patches.set(Tensor, "new_tensor", _new_tensor)


def _with_device(function: Constructor) -> Constructor:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_like = bool(args) and isinstance(args[0], Tensor)  # as `empty_like(tensor)`
        override = getattr(type(args[0]), "__torch_function__", None) if args else None
        if override is not None and not is_like:  # the class may have overridden the function
            result = override(call, (type(args[0]),), args, kwargs)
            if result is not NotImplemented:
                return result
        device = kwargs.get("device")
        if "generator" in kwargs and not is_like:
            refuse_generator(kwargs["generator"], device or _default_device())
        if device is None:
            return function(*args, **kwargs)
        kwargs["device"] = device = resolve(device)
        is_on_meta = torch.device(device).type == "meta"
        if not is_like or not is_on_meta or INSIDE.compiles:  # the compiler's modes trace the call
            return function(*args, **kwargs)
        with _disable_current_modes():  # like a tensor that may be on the GPU
            return function(*args, **kwargs)

    return call


def _from_parts(function: Constructor, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Call `function`, a factory such as `torch.sparse_csr_tensor`, with its parts moved to
    `device`: indices and values. None is the default device."""
    device = device if device is not None else _default_device()
    if device is None:
        return function(*args, **kwargs)
    parts = [torch.as_tensor(part, device=device) for part in args[:3]]
    return function(*parts, *args[3:], **kwargs)


def _from_data(
    function: Constructor, *args: Any, copies: bool, device: Any = None, **kwargs: Any
) -> Any:
    """Call `function`, a factory such as `torch.tensor`, on the host, and move the result to
    `device`. None is the default device. `copies` is False for a factory such as `torch.as_tensor`,
    which can return its argument."""
    device = resolve(device if device is not None else _default_device())
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, Tensor) and is_meta(data):
        moved = data if device is None else data.to(device)
        moved = moved.to(kwargs.get("dtype") or moved.dtype)
        tensor = moved.detach().clone() if copies else moved
        return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor
    is_pinned = kwargs.pop("pin_memory", False)  # avoids that C++ initializes CUDA
    requires_grad = kwargs.pop("requires_grad", False)
    goes_to_gpu = device is not None and torch.device(device).type == "cuda"
    tensor = function(*args, device=CPU if goes_to_gpu else device, **kwargs)
    if goes_to_gpu or is_pinned:
        tensor = tensor.to(GPU.device) if goes_to_gpu else tensor.pin_memory()
    return tensor.requires_grad_() if requires_grad else tensor


def _new_tensor(self: Tensor, data: Any, *, dtype: Any = None, **kwargs: Any) -> Tensor:
    kwargs["device"] = kwargs.get("device") or self.device
    return torch.tensor(data, dtype=dtype or self.dtype, **kwargs)


def _default_device() -> Any:
    if not torch._C._len_torch_function_stack():
        return None
    overrides: Any = torch.overrides
    for mode in reversed(overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):  # C++ puts it there without entering it
            return mode.device
    return None
