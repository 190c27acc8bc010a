"""Memory functions of `torch.cuda`, read from the simulated allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memest.estimator.allocator.settings import changed_settings
from memest.estimator.allocator.statistics import CountingAllocator, allow_share
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches, refusing, unsupported
from memest.estimator.tensors.placement import is_another, resolve
from memest.estimator.torch_api.cuda import memory_history

_HOST_STATS = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
_HOST_TIMES = ("host_alloc_time", "host_free_time")


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Make every function about memory read `mode`'s allocator."""
    allocator = mode.memory.allocator
    assert isinstance(allocator, CountingAllocator)
    _install_statistics(patches, mode, allocator)
    _install_limits(patches, mode, allocator)
    _install_raw_allocations(patches, mode)
    _install_host(patches)
    _install_refusals(patches)
    memory_history.install(patches, mode, allocator)


def _install_statistics(patches: Patches, mode: CudaSimMode, allocator: CountingAllocator) -> None:
    def settled(function: Callable[[], Any]) -> Callable[..., Any]:
        def call(device: Any = 0) -> Any:
            _check(device)
            mode.memory.settle()
            return function()

        return call

    def empty_cache(*args: Any) -> None:
        mode.memory.settle()
        allocator.empty_cache()
        mode.memory.history.emptied()

    stats, reset_peaks = settled(allocator.memory_stats), settled(allocator.reset_peak_stats)
    reset_accumulated = settled(allocator.reset_accumulated_stats)
    in_c: dict[str, Any] = {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_emptyCache": empty_cache,
        "_accelerator_getDeviceStats": stats,
        "_accelerator_resetPeakStats": reset_peaks,
        "_accelerator_resetAccumulatedStats": reset_accumulated,
        "_accelerator_emptyCache": empty_cache,
    }
    patches.set_all(torch._C, in_c)


def _install_limits(patches: Patches, mode: CudaSimMode, allocator: CountingAllocator) -> None:
    gpu, given = mode.gpu, allocator.limit_bytes
    most = gpu.limit_bytes if given is None else given

    def set_fraction(fraction: float, device: Any = 0) -> None:
        """Limit the allocator to a share of the GPU's memory, as `setMemoryFraction`."""
        _check(device)
        allocator.read_settings()
        allow_share(allocator, fraction, gpu.memory_bytes, most)

    def fraction(device: Any = 0) -> float:
        _check(device)
        allocator.read_settings()
        allowed = allocator.allowed_bytes
        return 1.0 if allowed is None else allowed / gpu.memory_bytes

    def change_settings(text: str) -> None:
        """Change settings as `setAllocatorSettings`, while nothing is reserved."""
        allocator.read_settings()
        settings, before = changed_settings(allocator.settings, text), allocator.settings
        alike = replace(settings, text=before.text, without_effect=before.without_effect)
        if allocator.reserved_bytes:
            if alike == before:
                return
            raise unsupported("a change of the allocator's settings after its first segment")
        allocator.use(settings)
        if settings.memory_fraction != 1:
            allow_share(allocator, settings.memory_fraction, gpu.memory_bytes, most)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        if is_another(device):  # which has as much as this one at first
            return gpu.limit_bytes, gpu.memory_bytes
        resolve(device)
        mode.memory.settle()
        return max(0, gpu.limit_bytes - allocator.reserved_bytes), gpu.memory_bytes

    in_c: dict[str, Any] = {
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": fraction,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_accelerator_getMemoryInfo": mem_get_info,
        "_accelerator_setAllocatorSettings": change_settings,
        "_accelerator_getAllocatorSettings": lambda: allocator.settings.text,
    }
    patches.set_all(torch._C, in_c)
    patches.set(torch.cuda, "mem_get_info", mem_get_info)
    patches.set(torch.cuda.memory, "mem_get_info", mem_get_info)


def _install_raw_allocations(patches: Patches, mode: CudaSimMode) -> None:
    """Install `torch.cuda.caching_allocator_alloc` and `_delete`: blocks without a tensor."""
    indices: dict[int, int] = {}

    def allocate(num_bytes: int, stream: int = 0) -> int:
        if not num_bytes:
            return 0
        with mode.memory.lock, mode.timeline.on_stream(stream):
            index = mode.memory.allocate_workspace(
                num_bytes, mode.attribution.site("caching_allocator_alloc")
            )
        address = mode.memory.blocks[index].address
        indices[address] = index
        return address

    def delete(address: int) -> None:
        if not address:
            return
        index = indices.pop(address, None)
        if index is None:
            raise RuntimeError(f"invalid device pointer: {address:#x}")
        mode.memory.free(index)

    def enable(is_enabled: bool) -> None:
        if not is_enabled:
            raise unsupported("an allocator without a cache")

    patches.set(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", allocate)
    patches.set(torch._C, "_cuda_cudaCachingAllocator_raw_delete", delete)
    patches.set(torch._C, "_cuda_cudaCachingAllocator_enable", enable)
    patches.set(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True)


def _install_host(patches: Patches) -> None:
    """Install zeros for pinned host memory, which is not simulated."""

    def stats() -> dict[str, Any]:
        zeros = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
        times = dict.fromkeys(("total", "max", "min", "count", "avg"), 0)
        made: dict[str, Any] = {name: dict(zeros) for name in _HOST_STATS}
        made |= {name: dict(times) for name in _HOST_TIMES}
        return made | {"num_host_alloc": 0, "num_host_free": 0}

    patches.set(torch._C, "_cuda_hostMemoryStats", stats)


def _install_refusals(patches: Patches) -> None:
    """Raise for allocators of the script's own, by name."""
    name = "CUDAPluggableAllocator"
    stands_for = type(name, (), {"__init__": refusing(f"torch.cuda.{name}")})
    refused = refusing("torch.cuda.change_current_allocator")
    for owner in (torch.cuda.memory, torch.cuda):
        patches.set(owner, name, stands_for)
        patches.set(owner, "change_current_allocator", refused)


def _check(device: Any) -> None:
    resolve(None if isinstance(device, int) and device < 0 else device)
