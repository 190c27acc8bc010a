"""Memory functions of `torch.cuda`, read from the simulated allocator, and its history."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from memest.estimator.allocator.memory_history import POOL, Context, MemoryHistory, settings_entry
from memest.estimator.allocator.settings import changed_settings
from memest.estimator.allocator.statistics import CountingAllocator, allow_share
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches, refusing, unsupported
from memest.estimator.tensors.placement import is_another, resolve

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
    _install_recordings(patches, mode, allocator)


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
    patches.set_all(in_c, torch._C)


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
        if is_another(device):  # it has as much as this one at first
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
    patches.set_all(in_c, torch._C)
    patches.set_all({"mem_get_info": mem_get_info}, torch.cuda, torch.cuda.memory)


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

    in_c: dict[str, Any] = {
        "raw_alloc": allocate, "raw_delete": delete, "enable": enable, "is_enabled": lambda: True,
    }  # fmt: skip
    for name, function in in_c.items():
        patches.set(torch._C, f"_cuda_cudaCachingAllocator_{name}", function)


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
    """Make functions for custom allocators raise, with their names."""
    name = "CUDAPluggableAllocator"
    stands_for = type(name, (), {"__init__": refusing(f"torch.cuda.{name}")})
    refused = refusing("torch.cuda.change_current_allocator")
    made = {name: stands_for, "change_current_allocator": refused}
    patches.set_all(made, torch.cuda.memory, torch.cuda)


def _check(device: Any) -> None:
    resolve(None if isinstance(device, int) and device < 0 else device)


_OWN = str(Path(__file__).resolve().parents[2])
_TORCH_OPS = torch._ops.__file__

Stack = tuple[tuple[CodeType | str, int], ...]  # (code or operator, offset), innermost first


class Stacks:
    """Collects Python stacks and converts them to torch's frames.

    `has_operators` puts the running operator first, in place of the C++ frames.
    """

    def __init__(self, *, has_operators: bool) -> None:
        self._has_operators = has_operators
        self._is_own: dict[CodeType, bool] = {}
        self._frames: dict[Stack, list[dict[str, Any]]] = {}

    def gather(self) -> Stack:
        """Return the frames of the running thread, without those of memest."""
        is_own, found = self._is_own, list[tuple[CodeType | str, int]]()
        frame = sys._getframe(1)
        needs_operator = self._has_operators
        at: Any = frame
        while at is not None:
            code = at.f_code
            known = is_own.get(code)
            if known is None:
                known = is_own[code] = code.co_filename.startswith(_OWN)
            if not known:
                found.append((code, at.f_lasti))
                at = at.f_back
                continue
            # a call from memest itself
            while found and getattr(found[-1][0], "co_filename", "") == _TORCH_OPS:
                found.pop()
            if needs_operator and code.co_name == "__torch_dispatch__":
                found.append((at.f_locals["func"]._schema.name, 0))
                needs_operator = False
            at = at.f_back
        return tuple(found)

    def frames_of(self, stack: Stack) -> list[dict[str, Any]]:
        """Return torch's frames; equal stacks share one list, which makes pickles small."""
        frames = self._frames.get(stack)
        if frames is None:
            frames = self._frames[stack] = [_frame(code, at) for code, at in stack]
        return frames


def _frame(code: CodeType | str, at: int) -> dict[str, Any]:
    if isinstance(code, str):  # torch's own mark of a frame that has no file
        return {"filename": "??", "line": 0, "name": code}
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= at < end and number is not None:
            line = number
    return {"filename": code.co_filename, "line": line, "name": code.co_name}


class Recordings:
    """Recording of the allocator's history for the script.

    Mirrors `torch::cuda::_record_memory_history` (`torch/csrc/cuda/memory_snapshot.cpp`), torch
    2.11.
    """

    def __init__(self, mode: CudaSimMode, allocator: CountingAllocator) -> None:
        self._mode = mode
        self._allocator = allocator
        self.metadata = ""  # set by `torch._C._cuda_setMemoryMetadata`

    def record(
        self, enabled: str | None, context: str | None = "all", stacks: str = "all",
        max_entries: int = sys.maxsize, clear_history: bool = False, compile_context: bool = False,
        global_record_annotations: bool = False, skip_actions: list[str] | None = None,
    ) -> None:  # fmt: skip
        """Replace `torch._C._cuda_record_memory_history`, with its `RuntimeError` for options."""
        for word, known, message in (
            (enabled, ("state", "all", None), "expected state to be 'state', 'all', or None"),
            (
                context, ("state", "alloc", "all", None),
                "expected context to be 'state', 'alloc', 'all', or None",
            ),
            (stacks, ("python", "all"), "expected stacks to be 'python', or 'all'"),
        ):  # fmt: skip
            if word not in known:
                raise RuntimeError(message)
        self._mode.memory.settle()
        before, self._allocator.history = self._allocator.history, None
        self._follow_frees(enabled is not None and context == "all")
        if enabled is None:
            return
        recorded = Stacks(has_operators=stacks == "all")
        history = MemoryHistory(
            recorded.gather, recorded.frames_of,
            context=Context.NEVER if context is None else Context[context.upper()],
            max_entries=max(1, max_entries) if enabled == "all" else 1,
            skipped=frozenset(skip_actions or ()),
        )  # fmt: skip
        history.metadata = self.metadata
        if before is not None:
            history.continues(before, keeps_entries=not clear_history)
        self._allocator.history = history

    def record_legacy(
        self, enabled: bool, record_context: bool = True, trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False, record_context_cpp: bool = False,
        clear_history: bool = False, compile_context: bool = False,
        global_record_annotations: bool = False, skip_actions: list[str] | None = None,
    ) -> None:  # fmt: skip
        """Replace `torch._C._cuda_record_memory_history_legacy`, whose first argument is a bool."""
        context = "state" if record_context else None
        self.record(
            "all" if enabled else None,
            "alloc" if trace_alloc_record_context else context,
            "all" if record_context_cpp else "python",
            trace_alloc_max_entries,
            clear_history,
            skip_actions=skip_actions,
        )

    def _follow_frees(self, follows: bool) -> None:
        """Record the stack at which a storage is freed; its block is freed a little later."""
        mode, allocator = self._mode, self._allocator
        vars(mode.memory).pop("free", None)
        if not follows:
            return
        ends = mode.memory.free

        def ends_here(index: int) -> None:
            block = mode.memory.blocks.get(index)
            if block is not None and allocator.history is not None:
                allocator.history.storage_freed(block.address)
            ends(index)

        vars(mode.memory)["free"] = ends_here

    def snapshot(self, options: Any = None) -> dict[str, Any]:
        """Replace `torch._C._cuda_memorySnapshot`.

        Options are the id of a private pool, or zeros for all segments. A third option of False
        leaves out the trace.
        """
        self._mode.memory.settle()
        allocator = self._allocator
        history = allocator.history
        has_trace = options is None or len(options) < 3 or options[2]
        trace = history.trace() if history is not None and has_trace else []
        live = list(self._mode.memory.blocks.values())
        segments = allocator.described_segments(live)
        pool = tuple(options or POOL)[:2]
        if pool != POOL:
            segments = [segment for segment in segments if segment["segment_pool_id"] == pool]
        if history is not None:
            history.snapshot_taken(sum(segment["active_size"] for segment in segments))
        return {
            "segments": segments,
            "device_traces": [trace],
            "allocator_settings": settings_entry(allocator.settings),
            "external_annotations": [],
        }

    def traceback_of(self, address: int) -> list[dict[str, Any]] | None:
        history = self._allocator.history
        return (history and history.frames_at(address)) or None

    def set_metadata(self, text: str) -> None:
        self.metadata = text
        if self._allocator.history is not None:
            self._allocator.history.metadata = text


def _install_recordings(patches: Patches, mode: CudaSimMode, allocator: CountingAllocator) -> None:
    """Make `torch.cuda.memory` record `allocator`."""
    recordings = Recordings(mode, allocator)
    gpu = mode.gpu

    def attach(observer: Callable[[int, int, int, int], None]) -> None:
        def refused(num_bytes: int, free_bytes: int) -> None:
            limit = allocator.limit_bytes
            if limit is None or limit >= gpu.limit_bytes:
                limit = gpu.memory_bytes
            observer(0, num_bytes, limit, free_bytes)

        allocator.observers.append(refused)

    in_c: dict[str, Any] = {
        "_cuda_record_memory_history": recordings.record,
        "_cuda_record_memory_history_legacy": recordings.record_legacy,
        "_cuda_isHistoryEnabled": lambda: allocator.history is not None,
        "_cuda_memorySnapshot": recordings.snapshot,
        "_cuda_allocationTraceback": recordings.traceback_of,
        "_cuda_setMemoryMetadata": recordings.set_metadata,
        "_cuda_getMemoryMetadata": lambda: recordings.metadata,
        "_cuda_attach_out_of_memory_observer": attach,
    }
    patches.set_all(in_c, torch._C)
