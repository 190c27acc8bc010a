"""Device, type and address of tensors and storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.attributes import legacy
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import (
    CARD,
    CPU,
    INSIDE,
    META,
    host_storages,
    is_meta,
    local_part,
    storage_key,
    true_device,
)


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let tensors and storages answer for the place where the mode has put them."""
    device = _device_of(mode)

    def says(kind: str) -> property:
        return property(lambda tensor: device(tensor).type == kind)

    patches.set(Tensor, "device", property(device))
    patches.set(Tensor, "is_cuda", says("cuda"))
    patches.set(Tensor, "is_meta", says("meta"))
    patches.set(Tensor, "is_cpu", says("cpu"))
    patches.set(
        Tensor, "get_device", lambda t: CARD.device.index if device(t).type == "cuda" else -1
    )
    legacy.install(patches, device)
    _install_addresses(patches, mode)
    _install_storages(patches, mode)


def _device_of(mode: CudaSimMode) -> Callable[[Tensor], torch.device]:
    live = mode.memory.live

    def device(tensor: Tensor) -> torch.device:
        tensor = local_part(tensor)
        if not is_meta(tensor):
            return true_device(tensor)
        if INSIDE.depth:
            return META
        try:
            key = storage_key(tensor)
        except (NotImplementedError, RuntimeError):  # a subclass without a storage
            inner = torch._C._functorch.get_unwrapped(tensor) if _is_of_vmap(tensor) else None
            return META if inner is None else device(inner)
        if key in live:
            return CARD.device
        return CPU if key in host_storages else META

    return device


def _is_of_vmap(tensor: Tensor) -> bool:
    """Whether `torch.vmap` has wrapped it: it lies where what is in it does."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _install_addresses(patches: Patches, mode: CudaSimMode) -> None:
    true_address: Callable[[Tensor], int] = Tensor.data_ptr

    def data_ptr(tensor: Tensor) -> int:
        if not is_meta(tensor):
            return true_address(tensor)
        try:
            start = _address_of(mode, storage_key(tensor))
        except (NotImplementedError, RuntimeError):
            start = 0
        return start + int(tensor.storage_offset()) * tensor.itemsize

    patches.set(Tensor, "data_ptr", data_ptr)


def _install_storages(patches: Patches, mode: CudaSimMode) -> None:
    live = mode.memory.live
    class_of_storage: Any = torch.UntypedStorage
    true_device_of = class_of_storage.device
    true_address_of = class_of_storage.data_ptr

    def device(storage: torch.UntypedStorage) -> torch.device:
        key = storage._cdata
        if not INSIDE.depth and key in live:
            return CARD.device
        if key in host_storages and not INSIDE.depth:
            return CPU
        found: torch.device = true_device_of.__get__(storage)
        return found

    def data_ptr(storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if key in live or key in host_storages:
            return _address_of(mode, key)
        return int(true_address_of(storage))

    patches.set(class_of_storage, "device", property(device))
    patches.set(class_of_storage, "data_ptr", data_ptr)
    patches.set(class_of_storage, "is_cuda", property(lambda s: device(s).type == "cuda"))


def _address_of(mode: CudaSimMode, key: int) -> int:
    """Where the block lies on the card; of a storage of the host anything that is its own."""
    index = mode.memory.live.get(key)
    if index is None:
        return key
    block = mode.memory.blocks.get(index)
    return 0 if block is None else block.address
