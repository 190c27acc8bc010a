"""What a tensor says of itself: where it lies, as the script sees it and as memest sees it.

A tensor of the virtual GPU is a meta tensor underneath, and so is one that a host would hold and
this one need not. `torch.Tensor.device` and its kin tell the script what a real run would; within
the mode they tell the truth, on which the kernel tables and torch's own meta kernels rely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

META = torch.device("meta")
CPU = torch.device("cpu")
_Device = torch.device
"""torch's own class, whatever stands in its place."""

_NO_DEVICE = (bool, torch.dtype)


class _Card:
    """The virtual GPU of this process."""

    device = torch.device("cuda", 0)
    """What tensors say; another index where it is one of several GPUs of a host."""

    num_visible = 1
    """GPUs of the host; the others are other ranks'."""


CARD = _Card()

_is_meta_in_c: Callable[[Any], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
_device_in_c: Callable[[Any], torch.device] = vars(torch._C.TensorBase)["device"].__get__
PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Classes without a `__torch_function__`, which would be asked first and answer for the script."""


def is_meta(tensor: Tensor) -> bool:
    """Whether `tensor` has no data, whatever it says."""
    if type(tensor) in PLAIN:
        return _is_meta_in_c(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return _is_meta_in_c(tensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a DTensor, which has no storage of its own; else `tensor`."""
    if type(tensor) in PLAIN:
        return tensor
    return getattr(tensor, "_local_tensor", tensor)


def true_device(tensor: Tensor) -> torch.device:
    """The device that torch's C++ sees."""
    with torch._C.DisableTorchFunctionSubclass():
        return _device_in_c(tensor)


def resolve(device: Any) -> Any:
    """`device` with the index that `"cuda"` stands for; None and all else as it is.

    Raises:
        RuntimeError: another GPU than this process has, as torch words it.
    """
    if device is None or isinstance(device, _NO_DEVICE):
        return device
    if isinstance(device, int):
        found = _Device("cuda", device)
    elif isinstance(device, str):
        found = _Device(device)
    elif isinstance(device, _Device):
        found = device
    else:
        return device
    if found.type != "cuda":
        return device
    if found.index is None or found.index == CARD.device.index:
        return CARD.device
    if CARD.num_visible == 1:
        what = "this run has one virtual GPU"
    else:
        what = f"this rank's virtual GPU is {CARD.device}"
    raise RuntimeError(f"CUDA error: invalid device ordinal: {found} ({what})")


def is_another(device: Any) -> bool:
    """Whether `device` is a GPU of the host that is another process's, of which it may be asked."""
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        return False
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda" or found.index is None or found.index == CARD.device.index:
        return False
    return 0 <= found.index < CARD.num_visible


class Place(Enum):
    """Where a tensor lies in the run that is simulated."""

    REAL = "in memory"
    """A tensor of the host that has its values."""

    HOST = "host"
    """A tensor of the host whose values nobody needs: it takes no memory here."""

    CARD = "card"
    """A tensor of the virtual GPU."""

    META = "meta"
    """A tensor that the script itself put on torch's meta device."""


class _Inside(threading.local):
    """Whether this thread runs the mode's own code."""

    depth = 0
    composite = False
    """It runs an operator of C++ that makes tensors in the likeness of one on the card."""


INSIDE = _Inside()

host_storages: dict[int, int] = {}
"""Bytes of the storages that lie on the simulated host, by the key of the storage."""


def storage_key(tensor: Tensor) -> int:
    """What tells one storage from another as long as it lives; of a sparse tensor that of its
    values.

    Raises:
        NotImplementedError: it has none, as within `torch.vmap`.
    """
    if tensor.layout is torch.sparse_coo:
        with torch._C._DisableTorchDispatch():
            tensor = tensor._values()
    key: int = tensor.untyped_storage()._cdata
    return key


def on_gpu(tensor: Tensor) -> bool:
    """Whether `tensor` would be a CUDA tensor: it has no data here, and is not the host's."""
    return is_meta(tensor) and not (host_storages and storage_key(tensor) in host_storages)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def few_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments; of a long list the first and the last, which are alike."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple) and value:
            items = value if len(value) <= 8 else (value[0], value[-1])
            found += [item for item in items if isinstance(item, Tensor)]
    return found
