"""What `torch.cuda` and its kin say of memory, from the simulated allocator."""

from __future__ import annotations

from typing import Any

import torch

from memest.estimator.device.attributes import resolve
from memest.estimator.device.live import LiveRecorder
from memest.estimator.device.patches import Patches


def install(patches: Patches, recorder: LiveRecorder) -> None:
    """Let every function that tells of memory ask `recorder`'s allocator."""
    gpu, allocator = recorder.gpu, recorder.allocator

    def stat(current: int, peak: int) -> dict[str, Any]:
        return {"all": {"current": current, "peak": peak, "allocated": 0, "freed": 0}}

    def stats(device: int = 0) -> dict[str, Any]:
        recorder.settle()
        zero = stat(0, 0)
        return {
            "allocated_bytes": stat(allocator.allocated_bytes, allocator.peak_allocated_bytes),
            "active_bytes": stat(allocator.allocated_bytes, allocator.peak_allocated_bytes),
            "reserved_bytes": stat(allocator.reserved_bytes, allocator.peak_reserved_bytes),
            "requested_bytes": zero, "inactive_split_bytes": zero, "allocation": zero,
            "segment": zero, "active": zero, "inactive_split": zero,
            "num_alloc_retries": allocator.num_retries, "num_ooms": recorder.num_ooms,
        }  # fmt: skip

    def reset_peaks(device: int = 0) -> None:
        recorder.settle()
        allocator.reset_peaks()

    def empty_cache(*args: Any) -> None:
        recorder.settle()
        allocator.empty_cache()

    def set_fraction(fraction: float, device: int = 0) -> None:
        allocator.limit_bytes = min(gpu.limit_bytes, int(fraction * gpu.memory_bytes))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        resolve(device)
        recorder.settle()
        free = gpu.memory_bytes - gpu.context_bytes - allocator.reserved_bytes
        return free, gpu.memory_bytes

    in_c: dict[str, Any] = {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": lambda device=0: None,
        "_cuda_emptyCache": empty_cache,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda device=0: (allocator.limit_bytes or 0) / gpu.memory_bytes,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memorySnapshot": lambda *args: {"segments": [], "device_traces": [[]]},
        "_accelerator_getDeviceStats": stats,
        "_accelerator_resetPeakStats": reset_peaks,
        "_accelerator_resetAccumulatedStats": lambda device=0: None,
        "_accelerator_emptyCache": empty_cache,
        "_accelerator_getMemoryInfo": mem_get_info,
    }
    for name, function in in_c.items():
        patches.set(torch._C, name, function)
    patches.set(torch.cuda, "mem_get_info", mem_get_info)
    patches.set(torch.cuda.memory, "mem_get_info", mem_get_info)
