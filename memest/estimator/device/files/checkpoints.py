"""`torch.save`, `torch.load`, `pickle` and `copy.deepcopy` of tensors that have no data.

What is written is a stand-in: a tensor of the same shape and dtype whose storage is one zero, with
strides of 0. Plain torch reads it, and it takes a few bytes. Beside it stands, among the metadata
of the tensor that torch ignores where it does not know it, how large the storage is; so it takes
here what it would take. Values that are known are written as they are.

What is read goes where the file or `map_location` says: a storage that belongs on the card is born
when its first tensor is, in the order of the file.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.host import VIRTUAL_HOST_BYTES
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import (
    CARD,
    CPU,
    META,
    Place,
    host_storages,
    is_meta,
    resolve,
    storage_key,
)

MAPPED_BYTES = 1 << 26
"""Files from this size on are mapped, not read: nobody needs the values of a large checkpoint."""

MAX_TWIN_BYTES = 1 << 20
"""Integers up to this many bytes keep their values on the card."""

_MARK = "memest"
_LOCATION = "_memest_location"
_BASE = "_memest_base"
_PRIORITY = 1
"""Before torch's own packages, whose first is the CPU with 10."""


class Checkpoints:
    """Writes and reads tensors of the virtual GPU and of the virtual host."""

    def __init__(self, mode: CudaSimMode) -> None:
        self._mode = mode
        self._state = threading.local()

    # --- writing

    def reduced(self, tensor: Tensor) -> tuple[Any, ...]:
        """What `pickle` makes of a tensor without data."""
        storage = tensor.untyped_storage()
        made: Any
        value = self._mode.values.value_of(tensor) if self._is_followed(tensor) else None
        size = tuple(tensor.size())
        if value is not None:
            made = _clone(value.untyped_storage())
            geometry = tensor.storage_offset(), size, tensor.stride()
            metadata = None
        else:
            made = self._stand_in(storage, tensor.dtype)
            geometry = 0, size, (0,) * len(size)
            metadata = {_mark(storage.nbytes(), tensor.storage_offset(), tensor.stride()): True}
            self._mode.notes.add(
                "files written by the script hold stand-ins for tensors whose values are not known"
            )
        if storage._cdata in self._mode.memory.live:
            setattr(made, _LOCATION, str(CARD.device))
        storage_class: Any = torch.storage.TypedStorage
        typed = storage_class(wrap_storage=made, dtype=tensor.dtype, _internal=True)
        arguments = typed, *geometry, tensor.requires_grad, OrderedDict()  # type: ignore[var-annotated]
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, arguments if metadata is None else (*arguments, metadata)

    def _is_followed(self, tensor: Tensor) -> bool:
        return storage_key(tensor) not in self._mode.values.guessed

    def _stand_in(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.UntypedStorage:
        memo = getattr(self._state, "stand_ins", None)
        key = storage._cdata, dtype
        if memo is not None and key in memo:
            known: torch.UntypedStorage = memo[key]
            return known
        with _disable_current_modes():
            made = torch.zeros(1, dtype=dtype, device=CPU).untyped_storage()
        if memo is not None:
            memo[key] = made
        return made

    def saving(self, save: Any) -> Any:
        """`torch.save`, within which tensors that share a storage share its stand-in."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = getattr(self._state, "stand_ins", None)
            self._state.stand_ins = {}
            try:
                return save(*args, **kwargs)
            finally:
                self._state.stand_ins = before

        return call

    # --- reading

    def loading(self, load: Any) -> Any:
        """`torch.load`, which maps a large file."""

        def call(f: Any, *args: Any, **kwargs: Any) -> Any:
            before = getattr(self._state, "is_mapped", False)
            self._state.is_mapped = not kwargs.get("mmap") and _is_large_archive(f)
            if self._state.is_mapped:
                kwargs["mmap"] = True
            try:
                return load(f, *args, **kwargs)
            finally:
                self._state.is_mapped = before

        return call

    def loading_old(self, load: Any) -> Any:
        """The reader of the old format, which has the values only after the tensors."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._state.is_old = True
            try:
                return load(*args, **kwargs)
            finally:
                self._state.is_old = False

        return call

    def restored(self, storage: Any, location: str) -> Any:
        """A storage that goes to the card, or None where it does not."""
        if not location.startswith("cuda"):
            return None
        resolve(location)
        setattr(storage, _LOCATION, str(CARD.device))
        return storage

    def rebuilt(
        self, storage: Any, offset: int, size: Any, stride: Any, metadata: Any = None
    ) -> Tensor | None:
        """The tensor of a storage that is not to have data, or None for a real one."""
        untyped = storage._untyped_storage
        full = _read_mark(metadata)
        on_card = hasattr(untyped, _LOCATION)
        if untyped.device.type == "meta" and full is None:
            return None
        is_large = storage.dtype.is_floating_point and untyped.nbytes() >= VIRTUAL_HOST_BYTES
        is_mapped = getattr(self._state, "is_mapped", False)
        if not (on_card or full or is_mapped):
            return None
        base = getattr(untyped, _BASE, None)
        if base is None:
            if on_card or full or is_large:
                base = self._born(untyped, full[0] if full else untyped.nbytes(), storage.dtype)
            else:
                base = _clone(untyped)  # the file may be written to while it is used
            setattr(untyped, _BASE, base)
        if full:
            offset, stride = full[1:]
        device = META if on_card or full or is_large else CPU
        with _disable_current_modes():
            made = torch.empty(0, dtype=storage.dtype, device=device)
            return made.set_(base, offset, size, stride)

    def _born(self, source: Any, num_bytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        """A storage without data for that of `source`, on the card or the host."""
        mode = self._mode
        with _disable_current_modes():
            base = _bare(num_bytes)
            whole = torch.empty(0, dtype=torch.uint8, device=META).set_(base)
            if source.device.type == "meta":
                return base
            if not hasattr(source, _LOCATION):
                mode.host.put(whole)
                return base
            memory = mode.memory
            with memory.lock:
                memory.allocate(whole, mode.attribution.site("torch.load"), memory.kind)
                mode.timeline.copy_from_host(num_bytes)
            limit = 512 if dtype.is_floating_point else MAX_TWIN_BYTES
            if source.nbytes() == num_bytes <= limit and not getattr(self._state, "is_old", False):
                mode.values.set_storage(base._cdata, _clone(source))
        return base

    # --- copying

    def copied(self, storage: Any) -> Any:
        """`storage.clone()` of a storage without data."""
        mode, key = self._mode, storage._cdata
        with _disable_current_modes():
            base = _bare(storage.nbytes())
            whole = torch.empty(0, dtype=torch.uint8, device=META).set_(base)
            if key in host_storages:
                mode.host.put(whole)
            else:
                memory = mode.memory
                with memory.lock:
                    memory.allocate(whole, mode.attribution.site("clone"), memory.kind)
            known = mode.values.storage_of(key)
            if known is not None:
                mode.values.set_storage(base._cdata, _clone(known))
        return base


class StandIn:
    """What is to be written for a tensor without data, outside of a virtual GPU.

    `torch.save` of one writes what it writes of such a tensor within: plain torch reads zeros, and
    on a virtual GPU they take what the tensor would take.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tensor = self._tensor
        size = tuple(tensor.size())
        num_bytes = tensor.numel() * tensor.itemsize
        strides = torch.empty(size, device=META).stride()
        storage_class: Any = torch.storage.TypedStorage
        one = torch.zeros(1, dtype=tensor.dtype).untyped_storage()
        typed = storage_class(wrap_storage=one, dtype=tensor.dtype, _internal=True)
        metadata = {_mark(num_bytes, 0, strides): True}
        arguments = typed, 0, size, (0,) * len(size), False, OrderedDict(), metadata  # type: ignore[var-annotated]
        return torch._utils._rebuild_tensor_v2, arguments


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let what torch writes and reads know of the virtual GPU."""
    checkpoints = Checkpoints(mode)
    _install_writing(patches, mode, checkpoints)
    _install_reading(patches, checkpoints)
    _install_storages(patches, mode, checkpoints)


def _install_writing(patches: Patches, mode: CudaSimMode, checkpoints: Checkpoints) -> None:
    reduce: Any = Tensor._reduce_ex_internal

    def reduced(tensor: Tensor, protocol: Any) -> Any:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_meta(tensor):
            return reduce(tensor, protocol)
        if mode.host.place(tensor) is Place.META and not mode.is_off:
            return reduce(tensor, protocol)
        return checkpoints.reduced(tensor)

    patches.set(Tensor, "_reduce_ex_internal", reduced)
    module: Any = torch.serialization
    patches.set(torch, "save", checkpoints.saving(module.save))
    patches.set(torch.serialization, "save", torch.save)

    def location_of(storage: Any) -> str | None:
        return getattr(storage, _LOCATION, None)

    packages = torch.serialization._package_registry
    own = (_PRIORITY, location_of, checkpoints.restored)
    patches.set(torch.serialization, "_package_registry", [own, *packages])


def _install_reading(patches: Patches, checkpoints: Checkpoints) -> None:
    module: Any = torch._utils
    make, make_v2 = module._rebuild_tensor, module._rebuild_tensor_v2

    def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any) -> Tensor:
        made = checkpoints.rebuilt(storage, offset, size, stride)
        return make(storage, offset, size, stride) if made is None else made

    def _rebuild_tensor_v2(
        storage: Any, offset: int, size: Any, stride: Any, wants_grad: bool, hooks: Any,
        metadata: Any = None,
    ) -> Tensor:  # fmt: skip
        made = checkpoints.rebuilt(storage, offset, size, stride, metadata)
        if made is None:
            found: Tensor = make_v2(storage, offset, size, stride, wants_grad, hooks, metadata)
            return found
        made.requires_grad = wants_grad
        made._backward_hooks = hooks
        return made

    for function in (_rebuild_tensor, _rebuild_tensor_v2):
        function.__module__, function.__qualname__ = "torch._utils", function.__name__
        patches.set(module, function.__name__, function)
    from torch import _weights_only_unpickler

    allowed: Any = _weights_only_unpickler._get_allowed_globals
    patches.set(_weights_only_unpickler, "_get_allowed_globals", allowed.__wrapped__)
    patches.set(torch, "load", checkpoints.loading(torch.load))
    patches.set(torch.serialization, "load", torch.load)
    old = checkpoints.loading_old(torch.serialization._legacy_load)
    patches.set(torch.serialization, "_legacy_load", old)


def _install_storages(patches: Patches, mode: CudaSimMode, checkpoints: Checkpoints) -> None:
    storage_class: Any = torch.UntypedStorage
    clone, true_to = storage_class.clone, storage_class.to

    def cloned(storage: Any) -> Any:
        key = storage._cdata
        if key in mode.memory.live or key in host_storages:
            return checkpoints.copied(storage)
        return clone(storage)

    def to_card(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        if storage._cdata in mode.memory.live:
            return storage
        return checkpoints.restored(
            storage, str(resolve(CARD.device if device is None else device))
        )

    def to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type == "cuda":
            return to_card(storage, device)
        return true_to(storage, device=device, non_blocking=non_blocking)

    patches.set(storage_class, "clone", cloned)
    patches.set(storage_class, "cuda", to_card)
    patches.set(storage_class, "to", to)
    share: Any = Tensor.share_memory_

    def share_memory_(tensor: Tensor) -> Tensor:
        return tensor if is_meta(tensor) else share(tensor)

    patches.set(Tensor, "share_memory_", share_memory_)


def _bare(num_bytes: int) -> torch.UntypedStorage:
    """A storage without data."""
    made: torch.UntypedStorage = torch.UntypedStorage(num_bytes, device="meta")  # type: ignore[no-untyped-call]
    return made


def _clone(storage: Any) -> torch.UntypedStorage:
    """A copy of a storage that has data."""
    made: torch.UntypedStorage = storage.clone()
    return made


def _is_large_archive(file: Any) -> bool:
    if not isinstance(file, str | os.PathLike):
        return False
    path = Path(file)
    if not path.is_file() or path.stat().st_size < MAPPED_BYTES:
        return False
    with path.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


def _mark(num_bytes: int, offset: Any, stride: tuple[Any, ...]) -> str:
    return ":".join(map(str, (_MARK, num_bytes, offset, *stride)))


def _read_mark(metadata: Any) -> tuple[int, int, tuple[int, ...]] | None:
    """(bytes of the storage, offset, stride) of a stand-in."""
    for key in metadata or ():
        if isinstance(key, str) and key.startswith(_MARK + ":"):
            num_bytes, offset, *stride = map(int, key.split(":")[1:])
            return num_bytes, offset, tuple(stride)
    return None
