"""safetensors files of tensors that have no data: read without reading, written without writing.

A file that a script writes has the size that it would have, and is sparse: a hole of zeros where
values are not known. Of a file that it reads, large floating-point tensors stay on the disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.host import VIRTUAL_HOST_BYTES
from memest.estimator.device.imports import ImportHooks, names_of
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import META, is_meta, resolve

_LENGTH_BYTES = 8
"""A file begins with the length of its header
(https://huggingface.co/docs/safetensors, "Format"), and the header is padded to as many.
"""


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Let safetensors, where a script uses it, know tensors without data."""

    def replace(module: ModuleType, name: str, made: Any) -> None:
        for owner, alias in names_of(getattr(module, name)):
            patches.set(owner, alias, made)

    def files(module: ModuleType) -> None:
        writer = Writer(module, mode)
        replace(module, "save_file", writer.save_file)
        replace(module, "save", writer.save)
        replace(module, "safe_open", _opener(module, mode))

    hooks.after("safetensors.torch", files)


def _opener(module: Any, mode: CudaSimMode) -> type:
    """`safe_open` for the virtual GPU."""
    true_open, dtypes = module.safe_open, module._TYPES

    class Slice:
        """As `get_slice` returns it."""

        def __init__(self, file: SafeOpen, name: str) -> None:
            self._file, self._name = file, name
            self._slice = file._file.get_slice(name)
            self.get_shape, self.get_dtype = self._slice.get_shape, self._slice.get_dtype

        def __getitem__(self, index: Any) -> Any:
            virtual = self._file._virtual(self._name)
            return self._file._placed(self._slice[index] if virtual is None else virtual[index])

    class SafeOpen:
        """As `safetensors.safe_open`."""

        def __init__(
            self, filename: Any, framework: str, device: Any = "cpu", **options: Any
        ) -> None:
            self._device = resolve(device)
            is_cuda = isinstance(self._device, torch.device) and self._device.type == "cuda"
            self._is_torch = framework in ("pt", "torch", "pytorch")
            self._file = true_open(
                filename, framework, device="cpu" if is_cuda else device, **options
            )
            self._moves = is_cuda
            self.keys, self.metadata = self._file.keys, self._file.metadata
            self.offset_keys = self._file.offset_keys

        def __enter__(self) -> SafeOpen:
            self._file.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self._file.__exit__(*exception)

        def _virtual(self, name: str) -> Tensor | None:
            """The tensor `name` without data, if it is large and of floating-point numbers."""
            described = self._file.get_slice(name)
            dtype, shape = dtypes.get(described.get_dtype()), described.get_shape()
            if not self._is_torch or dtype is None or not dtype.is_floating_point:
                return None
            if math.prod(shape) * dtype.itemsize < VIRTUAL_HOST_BYTES:
                return None
            made = torch.empty(shape, dtype=dtype, device=META)
            mode.host.put(made)
            return made

        def _placed(self, tensor: Any) -> Any:
            return tensor.to(self._device) if self._moves else tensor

        def get_tensor(self, name: str) -> Any:
            """The tensor `name`, on the device that was asked for."""
            virtual = self._virtual(name)
            return self._placed(self._file.get_tensor(name) if virtual is None else virtual)

        def get_tensors(self) -> dict[str, Any]:
            """All of them, in the order of the file."""
            return {name: self.get_tensor(name) for name in self.offset_keys()}

        def get_slice(self, name: str) -> Slice:
            """A tensor of which parts are asked for."""
            return Slice(self, name)

    return SafeOpen


class Writer:
    """`save_file` and `save` of safetensors."""

    def __init__(self, module: Any, mode: CudaSimMode) -> None:
        self._module = module
        self._mode = mode
        self._save_file: Callable[..., Any] = module.save_file
        self._save: Callable[..., Any] = module.save

    def save_file(self, tensors: dict[str, Tensor], filename: Any, metadata: Any = None) -> None:
        """As `safetensors.torch.save_file`."""
        if not _has_virtual(tensors):
            self._save_file(tensors, filename, metadata=metadata)
            return
        header, total, offsets = self._header(tensors, metadata)
        with Path(filename).open("wb") as file:
            file.write(header)
            for name, offset in offsets.items():
                data = self._data(tensors[name])
                if data is not None:
                    file.seek(len(header) + offset)
                    file.write(data)
            file.truncate(len(header) + total)
        self._mode.notes.add(
            "files written by the script hold stand-ins for tensors whose values are not known"
        )

    def save(self, tensors: dict[str, Tensor], metadata: Any = None) -> bytes:
        """As `safetensors.torch.save`."""
        if not _has_virtual(tensors):
            saved: bytes = self._save(tensors, metadata=metadata)
            return saved
        header, total, offsets = self._header(tensors, metadata)
        content = bytearray(total)
        for name, offset in offsets.items():
            data = self._data(tensors[name])
            if data is not None:
                content[offset : offset + len(data)] = data
        return header + bytes(content)

    def _header(
        self, tensors: dict[str, Tensor], metadata: Any
    ) -> tuple[bytes, int, dict[str, int]]:
        """The header, bytes behind it, and where each tensor begins there."""
        self._module._evaluate_tensors_for_save(tensors)
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
            empty = {name: torch.empty(0, dtype=t.dtype) for name, t in tensors.items()}
            written = self._save(empty, metadata=metadata)  # its names of dtypes, and its order
        described = json.loads(written[_LENGTH_BYTES:].rstrip(b"\0"))
        offset, offsets = 0, {}
        for name, entry in described.items():
            if name == "__metadata__":
                continue
            tensor = tensors[name]
            offsets[name] = offset
            end = offset + tensor.numel() * tensor.itemsize
            entry["shape"], entry["data_offsets"] = list(tensor.shape), [offset, end]
            offset = end
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text, offset, offsets

    def _data(self, tensor: Tensor) -> bytes | None:
        """The values of `tensor` where they are known."""
        with _disable_current_modes():
            value = self._mode.values.value_of(tensor) if is_meta(tensor) else tensor
            if value is None or not value.numel():
                return None
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            return bytes(flat.numpy().data)


def _has_virtual(tensors: Any) -> bool:
    return isinstance(tensors, dict) and any(
        isinstance(tensor, Tensor) and is_meta(tensor) for tensor in tensors.values()
    )
