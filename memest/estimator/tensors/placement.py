"""Place of a tensor: its device in a real run, and the device on which torch has it here.

Tensors of the virtual GPU, and host tensors without values, are meta tensors. `Tensor.device` and
related attributes return the device of a real run to the script. Inside the dispatch mode they
return the true one.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memest.errors import UnsupportedError
from memest.estimator.tensors.patches import Patches

META = torch.device("meta")
CPU = torch.device("cpu")
_Device = torch.device  # torch's own class, also while another class replaces it


class _Gpu:
    """Device of this process's virtual GPU, and the number of GPUs that `torch.cuda` reports."""

    device = torch.device("cuda", 0)  # device of GPU tensors; the index is the local rank
    num_visible = 1  # GPUs that `torch.cuda.device_count()` returns
    is_chosen = False  # the script has named a GPU by index; else all ranks are on GPU 0


GPU = _Gpu()

T = TypeVar("T")

_is_meta_in_c: Callable[[Any], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
_device_in_c: Callable[[Any], torch.device] = vars(torch._C.TensorBase)["device"].__get__
_is_cuda_in_c: Callable[[Any], bool] = vars(torch._C.TensorBase)["is_cuda"].__get__


def operators(names: str) -> frozenset[Any]:
    """Return the overloads of aten operators that `names` lists, such as "sum sum.dim_IntList"."""
    pairs = (f"{name}.default".split(".") for name in names.split())
    return frozenset(getattr(getattr(torch.ops.aten, name), form) for name, form, *_ in pairs)


PLAIN = frozenset((Tensor, torch.nn.Parameter))  # without a `__torch_function__` of their own

_has_mode = torch._C._is_torch_function_mode_enabled
"""Return whether a `TorchFunctionMode` is active: `torch.set_default_device` enters one.

Attributes of C then return what the replaced attributes of Python return.
"""


def _without_torch_function(attribute: Callable[[Any], T], tensor: Tensor) -> T:
    if _has_mode():
        with torch._C.DisableTorchFunction():
            return attribute(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return attribute(tensor)


def is_meta(tensor: Tensor) -> bool:
    """Return whether `tensor` has no data, that is, whether torch's C++ has it on `meta`."""
    if type(tensor) in PLAIN and not _has_mode():
        return _is_meta_in_c(tensor)
    return _without_torch_function(_is_meta_in_c, tensor)


def is_on_real_gpu(tensor: Tensor) -> bool:
    """Return whether `tensor` is on a real GPU, where it was made before the simulated run."""
    if type(tensor) in PLAIN and not _has_mode():
        return _is_cuda_in_c(tensor)
    return type(tensor) in PLAIN and _without_torch_function(_is_cuda_in_c, tensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the inner tensor if `tensor` is of a wrapper subclass, such as a DTensor; else
    `tensor`. Of several inner tensors, it is the first."""
    while type(tensor) not in PLAIN:
        inner = getattr(tensor, "_local_tensor", None)
        parts: Any = getattr(tensor, "__tensor_flatten__", None)
        if inner is None and parts is not None:
            with suppress(AttributeError):  # an instance under construction has no parts yet
                inner = getattr(tensor, parts()[0][0])
        if inner is None:
            break
        tensor = inner
    return tensor


def true_device(tensor: Tensor) -> torch.device:
    """Return the device of `tensor` according to torch's C++: `meta` if it has no data."""
    return _without_torch_function(_device_in_c, tensor)


def _to_device(device: Any) -> torch.device | None:
    """Return the `torch.device` for a GPU's index, a name or a device; None for any other value."""
    if isinstance(device, bool) or not isinstance(device, int | str | _Device):
        return None
    return _Device("cuda", device) if isinstance(device, int) else _Device(device)


def resolve(device: Any) -> Any:
    """Return the `torch.device` of this process's GPU if `device` is `"cuda"` or the GPU's index.
    Devices of other types, and values that are no device, are returned unchanged. Raise
    `RuntimeError`, with torch's message, for a GPU that this process does not have."""
    parsed = _to_device(device)
    if parsed is None or parsed.type != "cuda":
        return device
    GPU.is_chosen |= parsed.index is not None and device is not GPU.device
    if parsed.index is None or parsed.index == GPU.device.index or _is_own(parsed.index):
        return GPU.device
    if GPU.num_visible == 1:
        reason = "this run has one virtual GPU"
    else:
        reason = f"this rank's virtual GPU is {GPU.device}"
    raise RuntimeError(f"CUDA error: invalid device ordinal: {parsed} ({reason})")


def _is_own(index: int) -> bool:
    """Return whether the script's `CUDA_VISIBLE_DEVICES` makes `cuda:index` this process's GPU."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return index < len(names) and names[index] == str(GPU.device.index)


def is_another(device: Any) -> bool:
    """Return whether `device` is a GPU of this host that another process uses, not this one."""
    parsed = _to_device(device)
    if parsed is None or parsed.type != "cuda" or parsed.index in (None, GPU.device.index):
        return False
    return 0 <= parsed.index < GPU.num_visible and not _is_own(parsed.index)


class Place(Enum):
    """Place of a tensor in the simulated run: host with or without values, GPU, or meta."""

    REAL = "in memory"  # a tensor of the host that has its values
    HOST = "host"  # a tensor of the host whose values are not needed: it takes no memory here
    GPU = "gpu"  # a tensor of the virtual GPU
    META = "meta"  # a tensor that the script itself put on torch's meta device


class _Inside(threading.local):
    """Flags of the current thread. A flag is set while certain code runs, in which memest has to
    act differently. For example, `depth` is above 0 while the dispatch mode's own code runs. Then
    `Tensor.device` returns the true device, not that of a real run."""

    depth = 0  # number of nested calls of the mode; above 0 the mode's own code runs
    composite = False  # True while C++ makes tensors that are on the GPU, like those given to it
    double_backward = False  # in the C++ formula of a convolution's second gradient
    compiles = False  # this thread runs torch's compiler, whose tensors without data are on GPU
    moves = False  # True while a tensor subclass handles `Tensor.to`, and calls it again
    autocast = False  # True inside an operator whose inputs autocast has already cast
    autocast_block = False  # the script is in `torch.autocast`, which a dispatch mode turns off


INSIDE = _Inside()

host_storages: dict[int, int] = {}  # bytes on the simulated host, by storage key


def storage_key(tensor: Tensor) -> int:
    """Return an integer that identifies the storage of `tensor` (if sparse, of its values)."""
    if tensor.layout is not torch.strided:
        is_coo = tensor.layout is torch.sparse_coo
        with torch._C._DisableTorchDispatch():
            tensor = tensor._values() if is_coo else tensor.values()
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # a tensor of `torch.vmap` is where the wrapped one is
        return storage_key(torch._C._functorch.get_unwrapped(tensor))


def on_gpu(tensor: Tensor) -> bool:
    """Return whether `tensor` would be on the GPU in a real run; in this run it has no data."""
    return is_meta(tensor) and not (host_storages and storage_key(tensor) in host_storages)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in `values`, nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def sample_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments and in lists among them. Of a list of more than 8
    items, only the first and the last are returned."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple) and value:
            items = value if len(value) <= 8 else (value[0], value[-1])
            tensors += [item for item in items if isinstance(item, Tensor)]
    return tensors


_HINT = "use tensors that are dense and padded"
_MAKERS = {
    torch.nested: ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow"),
    torch: ("sparse_bsr_tensor", "sparse_bsc_tensor"),
}


def dense(out: Any, func: Any, where: Callable[[], str]) -> Any:
    """Return `out`, a result of the operator `func` on the GPU, if it is a dense tensor or no
    tensor. Else raise `UnsupportedError`, with the script's line, which `where` returns."""
    if not isinstance(out, Tensor) or out.layout is torch.strided:
        return out
    raise refused(func, str(out.layout).removeprefix("torch."), where())


def refused(func: Any, kind: str, line: str) -> UnsupportedError:
    """Return the error for a call of `func` with a tensor of layout `kind`, such as `sparse_coo`.
    `line` is the script's line, "" if unknown."""
    name = str(func).removesuffix(".default")
    return UnsupportedError(
        f"{line or 'the script'}: `{name}` with a tensor of layout {kind} cannot be simulated",
        hint=_HINT,
    )


def install_layouts(patches: Patches, where: Callable[[], str]) -> None:
    """Make creation of nested or block-sparse tensors on the GPU raise `UnsupportedError`. The
    error names the script's line, which `where` returns."""
    for owner, names in _MAKERS.items():
        for name in names:
            full_name = f"{owner.__name__}.{name}"
            patches.wrap(owner, name)(partial(_make_on_host, full_name, where))


def _make_on_host(
    name: str, where: Callable[[], str], make: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    device = kwargs.get("device")
    if device is None:
        is_for_gpu = any(map(on_gpu, tensors_in((*args, *kwargs.values()))))
    else:
        is_for_gpu = torch.device(device).type == "cuda"
    if is_for_gpu:
        raise UnsupportedError(
            f"{where() or 'the script'}: `{name}` on the GPU cannot be simulated", hint=_HINT
        )
    return make(*args, **kwargs)


def local_foreach(
    mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `func`, a `_foreach` operator, under `mode` on the local parts of DTensors that are
    sharded alike. Return DTensors, None if it has no result, or `NotImplemented` for any other
    call."""
    name = func._schema.name.removeprefix("aten::")
    if not name.startswith("_foreach_") or name in FOREACH_REDUCTIONS or kwargs:
        return NotImplemented
    lists = [value for value in args if _is_tensors(value)]
    if not lists or not all(map(_are_sharded_alike, zip(*lists, strict=True))):
        return NotImplemented
    local_args = tuple([t._local_tensor for t in v] if _is_tensors(v) else v for v in args)
    if any(isinstance(value, Tensor) and hasattr(value, "_local_tensor") for value in local_args):
        return NotImplemented
    results = mode.__torch_dispatch__(func, (), local_args, kwargs)  # type: ignore[no-untyped-call]
    if not results:
        return None
    return [_wrap_local(tensor, result) for tensor, result in zip(args[0], results, strict=True)]


FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def _is_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _are_sharded_alike(tensors: Sequence[Any]) -> bool:
    """Return whether all are DTensors of one mesh, shape and placements, and none is partial."""
    specs = [getattr(tensor, "_spec", None) for tensor in tensors]
    first = specs[0]
    if first is None or any(p.is_partial() for p in first.placements):
        return False
    sharding = attrgetter("mesh", "placements", "shape")
    others = (spec for spec in specs if spec is not first)
    return all(spec is not None and sharding(spec) == sharding(first) for spec in others)


def _wrap_local(tensor: Any, local: Tensor) -> Any:
    spec = tensor._spec
    if local.dtype is not spec.tensor_meta.dtype:
        meta = type(spec.tensor_meta)(spec.shape, spec.stride, local.dtype)
        spec = spec.shallow_copy_with_tensor_meta(meta)
    return type(tensor)(local, spec, requires_grad=False)
