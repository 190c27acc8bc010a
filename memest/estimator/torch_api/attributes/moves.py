"""Moves of tensors and parameters between host and virtual GPU, as by `Tensor.to`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors import placement
from memest.estimator.tensors.patches import Patches, setting
from memest.estimator.tensors.placement import CPU, GPU, INSIDE, META, Place, is_meta, resolve
from memest.estimator.tensors.storages import Site


def _install_places(patches: Patches, mode: CudaSimMode) -> None:
    """Make `device`, `is_cuda` and the like report where a real run would have a tensor."""
    live = mode.memory.live

    def device(tensor: Tensor) -> torch.device:
        tensor = placement.local_part(tensor)
        if not is_meta(tensor):
            return placement.true_device(tensor)
        if INSIDE.depth:
            return META
        try:
            key = placement.storage_key(tensor)
        except (NotImplementedError, RuntimeError):  # a subclass without a storage
            return META
        if key in live:
            return GPU.device
        return CPU if key in placement.host_storages else META

    patches.set(Tensor, "device", property(device))
    for kind in ("cuda", "meta", "cpu"):  # a subclass may have a device of its own
        patches.set(Tensor, f"is_{kind}", property(partial(lambda k, t: t.device.type == k, kind)))
    patches.set(Tensor, "get_device", lambda t: GPU.device.index if t.is_cuda else -1)
    if hasattr(Tensor, "rename"):  # torch 2.13 has none

        @patches.wrap(Tensor, "rename")
        def without_names(rename: Any, tensor: Tensor, *names: Any) -> Any:
            """Replace `Tensor.rename`, which gives names to the dims of `tensor`. `names` are the
            arguments of the call. For a meta tensor and `rename(None)`, which removes names, return
            a view of `tensor`, since torch's C++ refuses the call. In all other cases, call the
            original function, `rename`."""
            is_view = names == (None,) and is_meta(tensor)
            return torch.ops.aten.alias(tensor) if is_view else rename(tensor, *names)

    @patches.wrap(Tensor, "_make_wrapper_subclass")
    def wrap(make: Any, cls: type, *args: Any, **kwargs: Any) -> Any:
        """Create a tensor of the wrapper subclass `cls` with `make`, the original function. If the
        tensor should be on the GPU, create it on the meta device, where its inner tensors are. The
        tensor still reports the device of its first inner tensor. Without a GPU, C++ refuses
        autograd for tensors on `cuda`. Autograd reads the current stream (`InputMetadata`) and the
        device's context (the engine)."""
        device = kwargs.get("device")
        if device is not None and hasattr(cls, "__tensor_flatten__"):
            kwargs["device"] = META if torch.device(device).type == "cuda" else device
        return make(cls, *args, **kwargs)

    _install_storages(patches, mode)


def _install_storages(patches: Patches, mode: CudaSimMode) -> None:
    """Make storages report their simulated device, address and size, and tensors their address."""
    live = mode.memory.live
    class_of_storage: Any = torch.UntypedStorage
    true_device_of = class_of_storage.device

    @patches.wrap(Tensor, "data_ptr")
    def address_of_tensor(true_address: Any, tensor: Tensor) -> int:
        if not is_meta(tensor):
            return true_address(tensor)
        if placement.local_part(tensor) is not tensor:  # a DTensor has no storage of its own
            return 0
        try:
            start = _address_of(mode, placement.storage_key(tensor))
        except (NotImplementedError, RuntimeError):
            start = 0
        return start + int(tensor.storage_offset()) * tensor.itemsize

    def device(storage: torch.UntypedStorage) -> torch.device:
        key = storage._cdata
        if key in live and not INSIDE.depth:
            return GPU.device
        if key in placement.host_storages and not INSIDE.depth:
            return CPU
        return true_device_of.__get__(storage)

    @patches.wrap(class_of_storage, "data_ptr")
    def address(true_address: Any, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        is_placed = key in live or key in placement.host_storages
        return _address_of(mode, key) if is_placed else int(true_address(storage))

    @patches.wrap(class_of_storage, "resize_")
    def resize(true_resize: Any, storage: torch.UntypedStorage, num_bytes: int) -> Any:
        index = live.get(storage._cdata)
        if index is None:
            return true_resize(storage, num_bytes)
        with _disable_current_modes():
            tensor = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)
        kind, phase = mode.memory.storages.kinds[index], mode.attribution.phase()
        mode.memory.resize(tensor, num_bytes, Site("", "", phase), kind)
        return storage

    patches.set(class_of_storage, "device", property(device))


def _address_of(mode: CudaSimMode, key: int) -> int:
    """Return the address of the storage whose `storage_key` is `key`: of its block if it is on the
    GPU, else `key` itself."""
    return mode.memory.address_of(key) if key in mode.memory.live else key


Move = Callable[..., Tensor]


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Replace `to`, `cuda`, `cpu` and similar methods by moves between host and virtual GPU."""
    _install_places(patches, mode)
    to_: Move = Tensor.to
    move = _mover(mode, to_)
    to = _parser(move, to_)

    def cuda(
        tensor: Tensor, device: Any = None, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        target = GPU.device if device is None else device
        return move(tensor, target, non_blocking=non_blocking, **options)

    memory, host = mode.memory, mode.host
    methods: dict[str, Callable[..., Any]] = {
        "to": to,
        "cuda": cuda,
        "cpu": lambda tensor, **options: move(tensor, CPU, **options),
        "type_as": lambda tensor, other: to(tensor, other),
        "pin_memory": lambda t, device=None: t if mode.is_off else host.pinned(t),
        "is_pinned": lambda tensor, device=None: host.is_pinned(tensor),
        "record_stream": lambda tensor, stream: memory.record_stream(tensor, stream.number),
    }
    patches.set_all(methods, Tensor)
    _install_parse_to(patches)
    _install_parameters(patches, mode)


def _install_parse_to(patches: Patches) -> None:
    """Make `Module.to` accept the number of a device, or a GPU tensor for its device and dtype."""

    @patches.wrap(torch._C._nn, "_parse_to")
    def parse(parse_to: Any, *args: Any, **kwargs: Any) -> Any:
        if "tensor" in kwargs:
            args = (kwargs.pop("tensor"), *args)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if args and isinstance(args[0], int):
            args = (resolve(args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = resolve(kwargs["device"])
        return parse_to(*args, **kwargs)


class _FromHost(torch.autograd.Function):
    """Autograd node of a copy from host to GPU, whose backward copies the gradient to the host. The
    node of torch itself reads the device of its source, which is `meta` without data."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_: Move, args: tuple[Any, ...]) -> Tensor:
        ctx.dtype = tensor.dtype
        return to_(tensor, GPU.device, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient on the host, in the dtype of the source."""
        return grads[0].to(CPU, ctx.dtype), None, None


def _mover(mode: CudaSimMode, to_: Move) -> Move:
    def move(tensor: Tensor, device: Any, *args: Any, **kwargs: Any) -> Tensor:
        if INSIDE.moves:
            return to_(tensor, device, *args, **kwargs)
        device = resolve(device)
        place = mode.host.place(tensor)
        is_simulated = device is not None and not mode.is_off
        target_type = torch.device(device).type if is_simulated else ""
        if target_type and target_type == {Place.GPU: "cuda", Place.HOST: "cpu"}.get(place):
            is_kept = not args and not kwargs
            return tensor if is_kept else to_(tensor, _dtype_of(tensor, args, kwargs), **kwargs)
        if target_type == "cuda":
            device = GPU.device
            if tensor.is_nested:
                raise placement.refused("Tensor.to", "nested", mode.attribution.lines.current())
            if tensor.requires_grad and torch.is_grad_enabled() and place is not Place.GPU:
                run = partial(to_, **kwargs)
                return _FromHost.apply(tensor, run, args)  # type: ignore[no-untyped-call]
        elif target_type == "meta" and place in (Place.GPU, Place.HOST):
            return _empty(tensor, META, _dtype_of(tensor, args, kwargs))
        if place is Place.GPU and device == META and not args and not kwargs:
            return tensor
        if type(tensor) in placement.PLAIN:
            return to_(tensor, device, *args, **kwargs)
        with setting(INSIDE, "moves", True):
            return to_(tensor, device, *args, **kwargs)

    return move


_PYTHON_TYPES: Any = {float: torch.float64, int: torch.int64, bool: torch.bool}
"""Types that torch takes for a dtype (`isScalarType`, python_arg_parser.cpp)."""


def _parser(move: Move, to_: Move) -> Move:
    """Return a replacement of `Tensor.to` (`to_`). It calls `move(tensor, device, *args, **kwargs)`
    if the device may change, else `to_`."""

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(_PYTHON_TYPES.get(a, a) if isinstance(a, type) else a for a in args)
        if kwargs.get("dtype") in _PYTHON_TYPES:
            kwargs["dtype"] = _PYTHON_TYPES[kwargs["dtype"]]
        if "other" in kwargs:
            args = (kwargs.pop("other"), *args)
        if args and isinstance(args[0], Tensor):
            if INSIDE.compiles:  # fake tensors, which are on one device in C++
                return to_(tensor, *args, **kwargs)
            return move(tensor, args[0].device, args[0].dtype, *args[1:], **kwargs)
        if args and not isinstance(args[0], torch.dtype):
            return move(tensor, *args, **kwargs)
        if kwargs.get("device") is not None:
            device = kwargs.pop("device")
            if not args:
                dtype = kwargs.pop("dtype", None)
                args = () if dtype is None else (dtype,)
            return move(tensor, device, *args, **kwargs)
        return to_(tensor, *args, **kwargs)

    return to


def _dtype_of(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """Return the dtype that `to(device, *args, **kwargs)` requests, by default that of `tensor`.
    Remove it from `kwargs`."""
    dtype = kwargs.pop("dtype", None) or (args[0] if args else None)
    return dtype if isinstance(dtype, torch.dtype) else tensor.dtype


def _install_parameters(patches: Patches, mode: CudaSimMode) -> None:
    """Make new host parameters meta tensors without data, and let `Module.to` move them. It
    replaces the data of a parameter, which torch rejects between a real and a meta tensor."""
    make = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        is_real = type(data) in placement.PLAIN and not is_meta(data)
        if is_real and not mode.is_off and placement.true_device(data).type == "cpu":
            data = _without_data(data, mode)
        return make(cls, data, requires_grad)

    patches.set(nn.Parameter, "__new__", staticmethod(new))
    _install_data(patches, mode)
    _install_grad(patches, mode)

    @patches.wrap(torch, "_has_compatible_shallow_copy_type")
    def can_replace(are_alike: Any, tensor: Tensor, other: Tensor) -> bool:
        """Return True for a host and a GPU tensor, so that `Module.to` can replace the data. Two
        tensors that both have data, or both have none, are compared by `are_alike`, the
        original."""
        if is_meta(tensor) == is_meta(other):
            return are_alike(tensor, other)
        return mode.host.place(tensor if is_meta(tensor) else other) is not Place.META

    # parameters without a shape allow the replaced methods too
    lazy: Any = UninitializedParameter.__mro__[1]  # the base class of parameters and buffers
    names = "half float double char short int long cuda cpu to get_device".split()
    methods = [getattr(Tensor, name) for name in names]
    methods += [Tensor.untyped_storage, torch._has_compatible_shallow_copy_type]
    patches.set(lazy, "_allowed_methods", [*lazy._allowed_methods, *methods])


def _without_data(data: Tensor, mode: CudaSimMode) -> Tensor:
    """Return a host tensor like `data` without data, that is, a meta tensor. If it is small, its
    values are known (`adopt_small`)."""
    tensor = _empty(data, META)
    mode.host.put(tensor)
    mode.values.adopt_small(tensor, data)
    return tensor


def _install_data(patches: Patches, mode: CudaSimMode) -> None:
    """Allow `tensor.data = value` if one of the two tensors has data and the other has none."""
    data_of: Any = vars(torch._C.TensorBase)["data"]
    swap_tensors: Any = torch.utils.swap_tensors

    def set_data(tensor: Tensor, value: Tensor) -> None:
        # C++ holds a gradient, which cannot be swapped then
        is_grad = tensor._use_count() > 1 and not tensor.requires_grad  # type: ignore[attr-defined]
        if is_meta(tensor) and not is_meta(value) and is_grad:
            value = _without_data(value, mode)
        if is_meta(tensor) != is_meta(value):
            swapped = Tensor._make_subclass(type(tensor), value.detach(), tensor.requires_grad)
            vars(swapped).update(vars(tensor))  # class and attributes are swapped as well
            grad = tensor.grad if tensor.is_leaf else None
            try:
                swap_tensors(tensor, swapped)
            except RuntimeError:  # the autograd graph holds it after an exception
                if not is_meta(tensor):
                    raise
                data_of.__set__(tensor, _without_data(value, mode))
            if grad is not None and is_meta(grad) != is_meta(tensor):
                tensor.grad = _empty(grad, META if is_meta(tensor) else CPU)
            return
        data_of.__set__(tensor, value)

    patches.set(Tensor, "data", property(data_of.__get__, set_data))


def _install_grad(patches: Patches, mode: CudaSimMode) -> None:
    """Make a gradient have data exactly if its host weight has data, when `grad` is assigned.
    Refuse a gradient on another device as `check_and_update_grad` of python_variable.cpp does."""
    grad_of: Any = vars(torch._C.TensorBase)["grad"]

    def set_grad(tensor: Tensor, value: Tensor | None) -> None:
        kind = value.device.type if isinstance(value, Tensor) else ""
        if not mode.is_off and {kind, tensor.device.type} == {"cpu", "cuda"}:
            raise RuntimeError(
                f"attempting to assign a gradient with device type '{kind}' to a tensor with "
                f"device type '{tensor.device.type}'. Please ensure that the gradient and the "
                "tensor are on the same device"
            )
        grad_of.__set__(tensor, value if value is None else _like_weight(value, tensor, mode))

    patches.set(Tensor, "grad", property(grad_of.__get__, set_grad, grad_of.__delete__))


def _like_weight(grad: Tensor, weight: Tensor, mode: CudaSimMode) -> Tensor:
    """Return `grad` if both it and the host tensor `weight` have data, or neither has. Else return
    a copy of `grad` that has data if `weight` has."""
    part, weight_part = placement.local_part(grad), placement.local_part(weight)
    has_no_data = is_meta(weight_part)
    if is_meta(part) == has_no_data or mode.host.place(weight_part) is Place.META:
        return grad
    copy = _without_data(part, mode) if has_no_data else _empty(part, CPU)
    return copy if part is grad else type(grad)(copy, grad._spec, requires_grad=False)  # type: ignore


def _empty(like: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor on `device` with size and strides of `like`, outside of all dispatch
    modes. `dtype` None is that of `like`."""
    with _disable_current_modes():
        size, stride, dtype = like.size(), like.stride(), dtype or like.dtype
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
