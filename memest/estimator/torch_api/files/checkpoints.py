"""Saving, loading and copying of tensors without data: meta tensors of a virtual GPU or its host.

A tensor without data is written as a placeholder of the same shape and dtype: one zero as storage,
and strides of 0. Plain torch reads it. Its metadata, of which torch ignores unknown keys, has the
size of the storage. Known values are written as they are. A storage for the GPU is allocated with
its first tensor, in the order of the file.
"""

import copy
import importlib
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from io import BytesIO
from os import SEEK_END
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.gpu.host import VIRTUAL_HOST_BYTES
from memest.estimator.gpu.imports import ImportHooks, replace_everywhere
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors import placement
from memest.estimator.tensors.patches import Patches, constant, setting
from memest.estimator.tensors.placement import CPU, GPU, META, Place, is_meta, resolve

MAPPED_BYTES = 1 << 26  # larger files are mapped, not read: their values are not needed
MAX_KNOWN_BYTES = 1 << 20  # size up to which integers have known values on the GPU
HOLDS_ZEROS = "files written by the script hold zeros for tensors whose values are not known"
"""Note of a run that writes such files."""

_MARK = "memest"
_LOCATION = "_memest_location"
_BASE = "_memest_base"
_PRIORITY = 1  # priority before torch's own packages, whose first is the CPU with 10


class _State(threading.local):
    """Thread-local state while a file is saved or loaded."""

    placeholders: dict[Any, torch.UntypedStorage] | None = None
    """Placeholders of the running `torch.save`, which tensors of one storage and dtype share."""

    metadata: Any = None  # metadata of the tensor that is rebuilt
    is_mapped = False  # True while `torch.load` maps its file
    is_old = False  # True while a file of torch's old format, with values at its end, is read


class Checkpoints:
    """Functions with which a simulated run saves, loads and copies tensors without data."""

    def __init__(self, mode: CudaSimMode) -> None:
        self._mode = mode
        self._state = _State()

    def install(self, patches: Patches) -> None:
        """Patch `torch.save`, `torch.load` and the functions with which they rebuild tensors."""
        serialization = torch.serialization
        placeholders = partial(setting, self._state, "placeholders")
        patches.within(serialization, "save", lambda *_: placeholders({}))
        patches.set(torch, "save", serialization.save)
        old_format = partial(setting, self._state, "is_old", True)
        patches.within(serialization, "_legacy_load", lambda *_: old_format())
        patches.wrap(serialization, "load")(self._load)
        patches.set(torch, "load", serialization.load)
        patches.wrap(torch._utils, "_rebuild_tensor")(self._rebuild)
        patches.within(torch._utils, "_rebuild_tensor_v2", self._with_metadata)
        unpickler: Any = importlib.import_module("torch._weights_only_unpickler")
        uncached = unpickler._get_allowed_globals.__wrapped__
        patches.set(unpickler, "_get_allowed_globals", uncached)

    def reduced(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return (function, arguments) from which pickle rebuilds `tensor`, which has no data. They
        have its values if these are known, else a placeholder: one zero, with strides of 0."""
        storage = tensor.untyped_storage()
        is_guessed = placement.storage_key(tensor) in self._mode.values.guessed
        value = None if is_guessed else self._mode.values.value_of(tensor)
        size = tuple(tensor.size())
        mark: str | None = None
        if value is not None:
            new_storage = _clone(value.untyped_storage())
            geometry = tensor.storage_offset(), size, tensor.stride()
        else:
            new_storage = self._dummy(storage, tensor.dtype)
            geometry = 0, size, (0,) * len(size)
            mark = _mark(storage.nbytes(), tensor.storage_offset(), tensor.stride())
            self._mode.notes.add(HOLDS_ZEROS)
        if storage._cdata in self._mode.memory.live:
            setattr(new_storage, _LOCATION, str(GPU.device))
            self._mode.timeline.copy_pageable("to_host", storage.nbytes())
        return _pickled(new_storage, tensor.dtype, geometry, tensor.requires_grad, mark)

    def _dummy(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.UntypedStorage:
        shared = self._state.placeholders  # None outside of `torch.save`
        placeholders = {} if shared is None else shared
        key = (storage._cdata, dtype)
        if key not in placeholders:
            with _disable_current_modes():
                placeholders[key] = torch.zeros(1, dtype=dtype, device=CPU).untyped_storage()
        return placeholders[key]

    def _load(self, load: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `load`, the original `torch.load`, on the file `f`. Use `mmap=True` if `f` is the
        path of a large file."""
        is_mapped = not kwargs.get("mmap") and _is_large_archive(f)
        if is_mapped:
            kwargs["mmap"] = True
        with setting(self._state, "is_mapped", is_mapped):
            return load(f, *args, **kwargs)

    def _with_metadata(self, *args: Any) -> AbstractContextManager[None]:
        """Return a context in which `_rebuild` can read the metadata of the tensor that torch
        loads. `args` are the arguments of `_rebuild_tensor_v2`, of which the seventh is the
        metadata. The metadata of a placeholder has the size of its storage, the offset and the
        strides (`_mark`). The context stores the metadata in the thread-local `_state`, since torch
        does not pass it to `_rebuild_tensor`."""
        return setting(self._state, "metadata", args[6] if len(args) > 6 else None)

    def _rebuild(self, make: Any, storage: Any, offset: int, size: Any, stride: Any) -> Tensor:
        """Return a tensor of the loaded `storage`. A placeholder (`mark`) and a GPU tensor have no
        data, nor does a large tensor of a mapped file. `make`, torch's `_rebuild_tensor`, makes
        tensors of files that are not mapped. `offset` and `stride` are in elements."""
        untyped = storage._untyped_storage
        mark = _read_mark(self._state.metadata)
        is_gpu = hasattr(untyped, _LOCATION)
        is_large = storage.dtype.is_floating_point and untyped.nbytes() >= VIRTUAL_HOST_BYTES
        is_saved_on_meta = untyped.device.type == "meta" and mark is None
        if is_saved_on_meta or not (is_gpu or mark or self._state.is_mapped):
            return make(storage, offset, size, stride)
        num_bytes = untyped.nbytes()
        if mark:
            num_bytes, offset, stride = mark
        has_no_data = is_gpu or mark or is_large
        base = getattr(untyped, _BASE, None)
        if base is None:
            if has_no_data:
                base = self._allocate(untyped, num_bytes, storage.dtype)
            else:
                base = _clone(untyped)  # clone, since the file may be overwritten meanwhile
            setattr(untyped, _BASE, base)
        device = META if has_no_data else CPU
        with _disable_current_modes():
            tensor = torch.empty(0, dtype=storage.dtype, device=device)
            return tensor.set_(base, offset, size, stride)

    def _allocate(self, source: Any, num_bytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        """Return a new storage of `num_bytes` without data, for tensors of `dtype`. It is on the
        device of `source`, the loaded storage."""
        mode = self._mode
        with _disable_current_modes():
            base = _meta_storage(num_bytes)
            if source.device.type == "meta":
                return base
            self._place(base, "torch.load", on_host=not hasattr(source, _LOCATION))
            if not hasattr(source, _LOCATION):
                return base
            with mode.memory.lock:
                mode.timeline.copy_pageable("to_gpu", num_bytes)
            limit = 512 if dtype.is_floating_point else MAX_KNOWN_BYTES
            if source.nbytes() == num_bytes <= limit and not self._state.is_old:
                mode.values.copies[base._cdata] = _clone(source)
        return base

    def _place(self, base: torch.UntypedStorage, op_name: str, *, on_host: bool) -> None:
        """Put the storage `base` on the host if `on_host`. Else allocate it on the GPU, for the
        operator named `op_name`."""
        mode, memory = self._mode, self._mode.memory
        tensor = torch.empty(0, dtype=torch.uint8, device=META).set_(base)
        if on_host:
            mode.host.put(tensor)
            return
        with memory.lock:
            memory.allocate(tensor, mode.attribution.site(op_name), memory.kind)

    def copied(self, storage: Any) -> Any:
        """Return a copy of `storage`, which has no data; its known values are copied too."""
        mode, key = self._mode, storage._cdata
        with _disable_current_modes():
            base = _meta_storage(storage.nbytes())
            self._place(base, "clone", on_host=key in placement.host_storages)
            values = mode.values.copies.get(key)
            if values is not None:
                mode.values.copies[base._cdata] = _clone(values)
        return base


class Placeholder:
    """Wrapper that pickles a tensor without its values, for files written outside a virtual GPU.
    Plain torch reads zeros from the file; on a virtual GPU the tensor has its real size."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tensor = self._tensor
        size = tuple(tensor.size())
        mark = _mark(tensor.nbytes, 0, torch.empty(size, device=META).stride())
        storage = torch.zeros(1, dtype=tensor.dtype, device=CPU).untyped_storage()
        return _pickled(storage, tensor.dtype, (0, size, (0,) * len(size)), False, mark)


def _pickled(
    storage: torch.UntypedStorage, dtype: torch.dtype, geometry: Any, requires_grad: bool,
    mark: str | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return (function, arguments) from which pickle rebuilds a tensor of `storage`, for
    `__reduce_ex__`. `geometry` is (offset, size, strides) in elements. `mark` is the text of
    `_mark` for a tensor saved without its values, else None."""
    storage_class: Any = torch.storage.TypedStorage
    typed = storage_class(wrap_storage=storage, dtype=dtype, _internal=True)
    hooks: OrderedDict[int, Any] = OrderedDict()
    metadata = () if mark is None else ({mark: True},)
    return torch._utils._rebuild_tensor_v2, (typed, *geometry, requires_grad, hooks, *metadata)


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Patch torch, and safetensors when it is imported (`hooks`), to save and load tensors without
    data."""
    checkpoints = Checkpoints(mode)
    checkpoints.install(patches)
    _install_writing(patches, mode, checkpoints)
    _install_storages(patches, mode, checkpoints)
    hooks.after("safetensors.torch", partial(_install_safetensors, patches, mode))


def _install_writing(patches: Patches, mode: CudaSimMode, checkpoints: Checkpoints) -> None:
    @patches.wrap(Tensor, "_reduce_ex_internal")
    def reduced(reduce: Any, tensor: Tensor, protocol: Any) -> Any:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_meta(tensor):
            return reduce(tensor, protocol)
        if mode.host.place(tensor) is Place.META and not mode.is_off:
            return reduce(tensor, protocol)
        return checkpoints.reduced(tensor)

    def copied(tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_meta(tensor):
            parts: Any = tensor.__reduce_ex__(4)  # type: ignore[no-untyped-call]
            return copy._reconstruct(tensor, None, *parts)  # type: ignore[attr-defined]
        result: Tensor = tensor.data
        if isinstance(tensor, torch.nn.Parameter):
            result = torch.nn.Parameter(result)
        result.__dict__.update(tensor.__dict__)
        return result.requires_grad_(tensor.requires_grad)

    patches.set(Tensor, "__copy__", copied)
    module: Any = torch.serialization
    packages = module._package_registry
    package = (_PRIORITY, lambda storage: getattr(storage, _LOCATION, None), constant(None))
    patches.set(module, "_package_registry", [package, *packages])


def _install_storages(patches: Patches, mode: CudaSimMode, checkpoints: Checkpoints) -> None:
    storage_class: Any = torch.UntypedStorage

    @patches.wrap(storage_class, "clone")
    def cloned(clone: Any, storage: Any) -> Any:
        key = storage._cdata
        if key in mode.memory.live or key in placement.host_storages:
            return checkpoints.copied(storage)
        return clone(storage)

    @patches.wrap(storage_class, "to")
    def to(true_to: Any, storage: Any, *, device: Any, **options: Any) -> Any:
        if torch.device(device).type != "cuda":
            return true_to(storage, device=device, **options)
        if storage._cdata not in mode.memory.live:  # its first tensor is allocated there
            resolve(device)
            setattr(storage, _LOCATION, str(GPU.device))
        return storage

    share: Any = Tensor.share_memory_
    patches.set(Tensor, "share_memory_", lambda t: t if is_meta(t) else share(t))


def _meta_storage(num_bytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(num_bytes, device="meta")  # type: ignore[no-untyped-call]


def _clone(storage: Any) -> torch.UntypedStorage:
    return storage.clone()


def _is_large_archive(file: Any) -> bool:
    if not isinstance(file, str | os.PathLike):
        return False
    path = Path(file)
    if not path.is_file() or path.stat().st_size < MAPPED_BYTES:
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"


def _mark(num_bytes: int, offset: Any, stride: tuple[Any, ...]) -> str:
    return ":".join(map(str, (_MARK, num_bytes, offset, *stride)))


def _read_mark(metadata: Any) -> tuple[int, int, tuple[int, ...]] | None:
    """Return (bytes of storage, offset, strides) of a tensor that was saved as a placeholder,
    without its values. They are read from its `metadata`; None if the tensor is no placeholder."""
    for key in metadata or ():
        if isinstance(key, str) and key.startswith(_MARK + ":"):
            num_bytes, offset, *stride = map(int, key.split(":")[1:])
            return num_bytes, offset, tuple(stride)
    return None


_LENGTH_BYTES = 8  # size of the header's length, and alignment (huggingface.co/docs/safetensors)


def _install_safetensors(patches: Patches, mode: CudaSimMode, module: Any) -> None:
    """Patch `module`, `safetensors.torch`, to write and read tensors without data."""
    writer = Writer(module, mode)
    functions = (
        (module.save_file, writer.save_file),
        (module.save, writer.save),
        (module.safe_open, _opener(module, mode)),
    )
    replace_everywhere(patches, functions)


def _opener(module: Any, mode: CudaSimMode) -> type:
    """Return a class that replaces `safetensors.safe_open`; `module` is `safetensors.torch`."""
    true_open, dtypes = module.safe_open, module._TYPES

    class Slice:
        """Result of the replaced `get_slice`: reads parts of a tensor, which may have no data."""

        def __init__(self, file: "SafeOpen", name: str) -> None:
            self._file, self._name = file, name
            self._slice = file._file.get_slice(name)
            self.get_shape, self.get_dtype = self._slice.get_shape, self._slice.get_dtype

        def __getitem__(self, index: Any) -> Any:
            virtual = self._file._virtual(self._name)
            return self._file._move(self._slice[index] if virtual is None else virtual[index])

    class SafeOpen:
        """Replacement of `safe_open`. Large floating-point tensors that it reads have no data."""

        def __init__(
            self, filename: Any, framework: str, device: Any = "cpu", **options: Any
        ) -> None:
            self._device = resolve(device)
            self._moves = isinstance(self._device, torch.device) and self._device.type == "cuda"
            self._is_torch = framework in ("pt", "torch", "pytorch")
            true_device = "cpu" if self._moves else device
            self._file = true_open(filename, framework, device=true_device, **options)
            self.keys, self.metadata = self._file.keys, self._file.metadata
            self.offset_keys = self._file.offset_keys

        def __enter__(self) -> "SafeOpen":
            self._file.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self._file.__exit__(*exception)

        def _virtual(self, name: str) -> Tensor | None:
            """Return tensor `name` without data if it is large and floating-point, else None."""
            entry = self._file.get_slice(name)
            dtype, shape = dtypes.get(entry.get_dtype()), entry.get_shape()
            if not self._is_torch or dtype is None or not dtype.is_floating_point:
                return None
            if math.prod(shape) * dtype.itemsize < VIRTUAL_HOST_BYTES:
                return None
            tensor = torch.empty(shape, dtype=dtype, device=META)
            mode.host.put(tensor)
            return tensor

        def _move(self, tensor: Any) -> Any:
            return tensor.to(self._device) if self._moves else tensor

        def get_tensor(self, name: str) -> Any:
            virtual = self._virtual(name)
            return self._move(self._file.get_tensor(name) if virtual is None else virtual)

        def get_tensors(self) -> dict[str, Any]:
            return {name: self.get_tensor(name) for name in self.offset_keys()}

        def get_slice(self, name: str) -> Slice:
            return Slice(self, name)

    return SafeOpen


class Writer:
    """Replacements of `save_file` and `save` of safetensors, for tensors without data too."""

    def __init__(self, module: Any, mode: CudaSimMode) -> None:
        self._module = module
        self._mode = mode
        self._save_file: Callable[..., Any] = module.save_file
        self._save: Callable[..., Any] = module.save

    def save_file(self, tensors: dict[str, Tensor], filename: Any, metadata: Any = None) -> None:
        if not _has_virtual(tensors):
            self._save_file(tensors, filename, metadata=metadata)
            return
        with Path(filename).open("wb") as file:
            self._write(file, tensors, metadata)

    def save(self, tensors: dict[str, Tensor], metadata: Any = None) -> bytes:
        if not _has_virtual(tensors):
            return self._save(tensors, metadata=metadata)
        content = BytesIO()
        self._write(content, tensors, metadata)
        return content.getvalue()

    def _write(self, file: Any, tensors: dict[str, Tensor], metadata: Any) -> None:
        """Write `tensors` by name to the open `file` in safetensors' format, with `metadata` unless
        None. Unknown values are written as zeros."""
        header, ranges = self._header(tensors, metadata)
        file.write(header)
        for name, (begin, _) in ranges.items():
            data = self._data(tensors[name])
            if data is not None:
                file.seek(len(header) + begin)
                file.write(data)
        total = len(header) + max(end for _, end in ranges.values())
        if file.seek(0, SEEK_END) < total:
            file.seek(total - 1)
            file.write(b"\0")
        self._mode.notes.add(HOLDS_ZEROS)

    def _header(
        self, tensors: dict[str, Tensor], metadata: Any
    ) -> tuple[bytes, dict[str, tuple[int, int]]]:
        """Return (header, {tensor name: (begin, end) in bytes after the end of the header})."""
        if hasattr(self._module, "_evaluate_tensors_for_save"):
            self._module._evaluate_tensors_for_save(tensors)
        else:  # safetensors up to 0.6 has the checks in `_flatten`, which then reads the data
            with mock.patch.object(self._module, "_tobytes", return_value=b""):
                self._module._flatten(tensors)
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(
                    f"You are trying to save a non contiguous tensor: `{name}` which is not "
                    "allowed. It either means you are trying to save tensors which are reference "
                    "of each other in which case it's recommended to save only the full tensors, "
                    "and reslice at load time, or simply call `.contiguous()` on your tensor to "
                    "pack it before saving."
                )
        with _disable_current_modes():
            empty = {name: torch.empty(0, dtype=t.dtype, device=CPU) for name, t in tensors.items()}
            content = self._save(empty, metadata=metadata)  # its names of dtypes, and its order
        header = json.loads(content[_LENGTH_BYTES:].rstrip(b"\0"))
        offset, ranges = 0, {}
        for name in [name for name in header if name != "__metadata__"]:
            ranges[name] = offset, offset + tensors[name].nbytes
            header[name] |= {"shape": list(tensors[name].shape), "data_offsets": ranges[name]}
            offset = ranges[name][1]
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text, ranges

    def _data(self, tensor: Tensor) -> bytes | None:
        with _disable_current_modes():
            value = self._mode.values.value_of(tensor)
            if value is None or not value.numel():
                return None
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            return bytes(flat.numpy().data)


def _has_virtual(tensors: Any) -> bool:
    return isinstance(tensors, dict) and any(
        isinstance(tensor, Tensor) and is_meta(tensor) for tensor in tensors.values()
    )
