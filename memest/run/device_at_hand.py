"""The real GPU, identified without a CUDA context on it.

NVML is used where possible. It cannot identify the GPU that CUDA would choose among slices or GPUs
of several kinds; then a short process uses torch. A process with a context uses torch itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from memest.estimator.hardware.gpus import Gpu, match_device, nearest_gpu

_QUESTION = (
    "import json, torch; p = torch.cuda.get_device_properties(0); "
    "print(json.dumps([p.name, p.total_memory, p.major, p.minor, torch.cuda.mem_get_info(0)[0]]))"
)
_QUESTION_TIMEOUT_S = 60.0
_NO_DEVICE = ("", "-1", "NoDevFiles")  # values of `CUDA_VISIBLE_DEVICES` that hide every GPU


@dataclass(frozen=True, slots=True)
class DeviceAtHand:
    """A GPU and its free memory."""

    name: str
    total_bytes: int  # total of `torch.cuda.get_device_properties`: without the driver's own memory
    capability: tuple[int, int]
    free_bytes: int  # free bytes; the cache of this process's allocator counts as free
    has_context: bool = False  # this process's CUDA context is not in `free_bytes`

    @property
    def gpu(self) -> Gpu:
        """Entry of the catalogue, or the nearest one with this memory."""
        known = match_device(self.name, self.total_bytes)
        return known or nearest_gpu(self.capability, self.total_bytes)

    @property
    def is_known(self) -> bool:
        """True if the catalogue has this GPU."""
        return match_device(self.name, self.total_bytes) is not None

    @property
    def room_bytes(self) -> int:
        """Bytes that the script's allocator can reserve now."""
        gpu = self.gpu
        free = self.free_bytes - (0 if self.has_context else gpu.context_bytes)
        return max(0, min(free, gpu.limit_bytes))

    @property
    def others_bytes(self) -> int:
        """Bytes that other processes hold."""
        context = self.gpu.context_bytes if self.has_context else 0
        return max(0, self.total_bytes - self.free_bytes - context)


def device_at_hand(environment: Mapping[str, str] | None = None) -> DeviceAtHand | None:
    """Return the GPU that `cuda:0` is for this process; None where CUDA has none for it.

    Args:
        environment: of the process, for `CUDA_VISIBLE_DEVICES`; by default its own.
    """
    environment = os.environ if environment is None else environment
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    first = None if visible is None else visible.partition(",")[0].strip()
    if first in _NO_DEVICE:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and _has_context(torch):
        return _of_this_process(torch)
    try:
        nvml = _Nvml()
    except OSError:
        return _of_another_process() if _has_driver() else None
    try:
        return nvml.device(first, environment.get("CUDA_DEVICE_ORDER", ""))
    except _UnsureError:
        return _of_another_process()
    finally:
        nvml.close()


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _has_context(torch: Any) -> bool:
    if not torch.cuda.is_initialized():
        return False
    asks = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return asks is None or bool(asks(0))


def _of_this_process(torch: Any) -> DeviceAtHand:
    found = torch.cuda.get_device_properties(0)
    free = torch.cuda.mem_get_info(0)[0] + torch.cuda.memory_reserved(0)
    capability = (found.major, found.minor)
    return DeviceAtHand(found.name, found.total_memory, capability, free, has_context=True)


def _of_another_process() -> DeviceAtHand | None:
    """Return torch's GPU in a child process; None where it sees no GPU either."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_QUESTION_TIMEOUT_S,
            check=True,
        )
        name, total, major, minor, free = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None
    return DeviceAtHand(name, total, (major, minor), free, has_context=True)


_DRIVER, _NVML = (
    ("nvcuda.dll", "nvml.dll") if sys.platform == "win32" else ("libcuda.so.1", "libnvidia-ml.so.1")
)


class _UnsureError(Exception):
    """NVML cannot identify the GPU, or its memory."""


class _Memory(ctypes.Structure):
    """`nvmlMemory_v2_t` of nvml.h."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


_MEMORY_VERSION = ctypes.sizeof(_Memory) | 2 << 24  # as NVML_STRUCT_VERSION(Memory, 2)
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


class _Nvml:
    """The NVIDIA Management Library, initialised; `OSError` if it finds no driver."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(_NVML)
        if self._library.nvmlInit_v2():
            raise OSError("NVML finds no driver")

    def close(self) -> None:
        self._library.nvmlShutdown()

    def device(self, visible: str | None, order: str) -> DeviceAtHand | None:
        """Return the GPU of `CUDA_VISIBLE_DEVICES`, or None; `_UnsureError` if it is unclear."""
        count = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        handle = ctypes.c_void_p()
        if visible is not None and not visible.isdecimal():
            self._ask("nvmlDeviceGetHandleByUUID", visible.encode(), ctypes.byref(handle))
        else:
            index = int(visible or 0)
            if index >= count.value:
                return None
            if order != "PCI_BUS_ID" and len(self._names(count.value)) > 1:
                raise _UnsureError  # CUDA puts the fastest first
            handle = self._by_index(index)
        if self._is_sliced(handle):
            raise _UnsureError
        memory = _Memory(version=_MEMORY_VERSION)
        self._ask("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._ask(
            "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)
        )
        total = memory.total - memory.reserved
        return DeviceAtHand(
            self._name(handle), total, (major.value, minor.value), total - memory.used
        )

    def _ask(self, function: str, *args: Any) -> None:
        ask: Callable[..., int] | None = getattr(self._library, function, None)
        if ask is None or ask(*args):
            raise _UnsureError

    def _by_index(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._ask("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        return handle

    def _name(self, handle: ctypes.c_void_p) -> str:
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._ask("nvmlDeviceGetName", handle, name, _NAME_BYTES)
        return name.value.decode(errors="replace")

    def _names(self, count: int) -> set[str]:
        return {self._name(self._by_index(index)) for index in range(count)}

    def _is_sliced(self, handle: ctypes.c_void_p) -> bool:
        """Return whether the GPU is in MIG mode, in which CUDA sees a slice of it."""
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        with suppress(_UnsureError):  # GPUs without MIG do not support the query
            self._ask("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        return bool(current.value)
