"""The real GPU, identified without a CUDA context on it.

NVML is used where nvidia-ml-py is installed. It cannot identify the GPU that CUDA would choose
among slices or GPUs of several kinds; then a short process uses torch. A process with a context
uses torch itself.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from memest.estimator.hardware.gpus import Gpu, match_device, nearest_gpu
from memest.packages import with_nvml

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
    total_bytes: int  # total of `torch.cuda.get_device_properties`, without the driver's own memory
    capability: tuple[int, int]
    free_bytes: int  # free bytes, including the cache of this process's allocator
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
    """Return the GPU that `cuda:0` is for a process with `environment`; None if CUDA has none."""
    environment = os.environ if environment is None else environment
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    first = None if visible is None else visible.partition(",")[0].strip()
    if first in _NO_DEVICE:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        if has_context is None or has_context(0):
            return _of_this_process(torch)
    if not _has_driver():
        return None
    order = environment.get("CUDA_DEVICE_ORDER", "")
    with suppress(_UnsureError):
        found = with_nvml(lambda nvml: [_read_nvml(nvml, first, order)])
        if found is not None:
            return found[0]
    return _of_another_process()


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _of_this_process(torch: Any) -> DeviceAtHand:
    found = torch.cuda.get_device_properties(0)
    free = torch.cuda.mem_get_info(0)[0] + torch.cuda.memory_reserved(0)
    capability = (found.major, found.minor)
    return DeviceAtHand(found.name, found.total_memory, capability, free, has_context=True)


def _of_another_process() -> DeviceAtHand | None:
    """Return the GPU that torch finds in a child process, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUESTION], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_QUESTION_TIMEOUT_S, check=True,
        )  # fmt: skip
        name, total, major, minor, free = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None
    return DeviceAtHand(name, total, (major, minor), free, has_context=True)


_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class _UnsureError(Exception):
    """Raised when NVML cannot identify the GPU."""


def _read_nvml(nvml: Any, visible: str | None, order: str) -> DeviceAtHand | None:
    """Return the GPU that `CUDA_VISIBLE_DEVICES` names first, if any; `_UnsureError` if unsure."""
    if visible is not None and not visible.isdecimal():
        handle = nvml.nvmlDeviceGetHandleByUUID(visible)
    else:
        index, count = int(visible or 0), nvml.nvmlDeviceGetCount()
        if index >= count:
            return None
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        if order != "PCI_BUS_ID" and len({nvml.nvmlDeviceGetName(h) for h in handles}) > 1:
            raise _UnsureError  # CUDA's order is fastest first
        handle = handles[index]
    with suppress(nvml.NVMLError_NotSupported):  # GPUs without MIG do not support the query
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            raise _UnsureError  # CUDA uses a MIG instance of it
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    total = memory.total - memory.reserved
    name = nvml.nvmlDeviceGetName(handle)
    return DeviceAtHand(name, total, (major, minor), total - memory.used)
