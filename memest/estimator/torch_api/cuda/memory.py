"""Memory functions of `torch.cuda`, read from the simulated allocator, and its history."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import walk_stack
from types import CodeType
from typing import Any

import torch

from memest.estimator.allocator.memory_history import DEFAULT_POOL_ID, Context, MemoryHistory
from memest.estimator.allocator.settings import changed_settings
from memest.estimator.allocator.statistics import CountingAllocator, allow_share
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches, refusing, unsupported
from memest.estimator.tensors.placement import is_another, resolve


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Make memory functions of `torch.cuda` use the simulated allocator of `mode`. Pluggable
    allocators are refused."""
    functions = _MemoryFunctions(mode)
    for methods in (functions, _Recordings(mode)):
        patches.set_methods(methods, torch._C, prefix="_cuda_")
    patches.set_methods(_RawBlocks(mode), torch._C, prefix="_cuda_cudaCachingAllocator_")
    accelerator_functions = {
        "getDeviceStats": functions.memoryStats,
        "resetPeakStats": functions.resetPeakMemoryStats,
        "resetAccumulatedStats": functions.resetAccumulatedMemoryStats,
        "emptyCache": functions.emptyCache,
        "getMemoryInfo": functions._get_info,
        "setAllocatorSettings": functions._change_settings,
        "getAllocatorSettings": lambda: functions._allocator.settings.text,
    }
    for name, function in accelerator_functions.items():
        patches.set(torch._C, f"_accelerator_{name}", function)
    class_name = "CUDAPluggableAllocator"
    python_functions = {
        "mem_get_info": functions._get_info,
        "change_current_allocator": refusing("torch.cuda.change_current_allocator"),
        class_name: type(class_name, (), {"__init__": refusing(f"torch.cuda.{class_name}")}),
    }
    patches.set_all(python_functions, torch.cuda, torch.cuda.memory)


class _Replacements:
    """Base class of objects whose methods replace functions of `torch._C`. An object has the mode
    of the simulation, its memory and its allocator. A method has the name of the function that it
    replaces, without a prefix. For example, `memoryStats` replaces `_cuda_memoryStats`."""

    def __init__(self, mode: CudaSimMode) -> None:
        assert isinstance(mode.memory.allocator, CountingAllocator)
        self._mode, self._memory, self._allocator = mode, mode.memory, mode.memory.allocator


class _MemoryFunctions(_Replacements):
    """Replacements of functions for the allocator's statistics, limits and settings."""

    def __init__(self, mode: CudaSimMode) -> None:
        super().__init__(mode)
        limit_bytes, self._total_bytes = self._allocator.limit_bytes, mode.gpu.memory_bytes
        self._most_bytes = mode.gpu.limit_bytes if limit_bytes is None else limit_bytes

    def _settled(self, device: Any) -> CountingAllocator:
        """Return the allocator of `device`, after blocks of freed tensors are returned to it."""
        _check(device)
        self._memory.settle()
        return self._allocator

    def memoryStats(self, device: Any = 0) -> dict[str, Any]:
        return self._settled(device).memory_stats()

    def resetPeakMemoryStats(self, device: Any = 0) -> None:
        self._settled(device).reset_peak_stats()

    def resetAccumulatedMemoryStats(self, device: Any = 0) -> None:
        self._settled(device).reset_accumulated_stats()

    def emptyCache(self, *args: Any) -> None:
        self._memory.settle()
        self._allocator.empty_cache()
        self._memory.history.emptied()

    def getAllocatorBackend(self) -> str:
        return "native"

    def setMemoryFraction(self, fraction: float, device: Any = 0) -> None:
        """Limit the allocator to `fraction` (0 to 1) of the GPU's memory, as torch does."""
        _check(device)
        self._allocator.read_settings()
        allow_share(self._allocator, fraction, self._total_bytes, self._most_bytes)

    def getMemoryFraction(self, device: Any = 0) -> float:
        _check(device)
        self._allocator.read_settings()
        allowed = self._allocator.allowed_bytes
        return 1.0 if allowed is None else allowed / self._total_bytes

    def _change_settings(self, text: str) -> None:
        """Apply the allocator settings in `text`, such as `max_split_size_mb:64`. Raise
        `UnsupportedError` if a setting changes after the first segment is reserved."""
        allocator = self._allocator
        allocator.read_settings()
        before = allocator.settings
        settings = changed_settings(before, text)
        comparable = replace(settings, text=before.text, without_effect=before.without_effect)
        if allocator.reserved_bytes:
            if comparable == before:
                return
            raise unsupported("a change of the allocator's settings after its first segment")
        allocator.use(settings)
        if settings.memory_fraction != 1:
            self.setMemoryFraction(settings.memory_fraction)

    def _get_info(self, device: Any = None) -> tuple[int, int]:
        """Return (free, total) bytes of the GPU `device`. Memory that this process reserves is not
        free. For a GPU that another process uses, all usable memory counts as free."""
        limit_bytes = self._mode.gpu.limit_bytes
        if is_another(device):
            return limit_bytes, self._total_bytes
        reserved_bytes = self._settled(device).reserved_bytes
        return max(0, limit_bytes - reserved_bytes), self._total_bytes


class _RawBlocks(_Replacements):
    """Replacements of torch's functions that allocate and free GPU memory without a tensor."""

    def raw_alloc(self, num_bytes: int, stream: int = 0) -> int:
        if not num_bytes:
            return 0
        with self._memory.lock, self._mode.timeline.on_stream(stream):
            site = self._mode.attribution.site("caching_allocator_alloc")
            index = self._memory.allocate_workspace(num_bytes, site)
        address = self._memory.blocks[index].address
        self._memory.raw_blocks[address] = index
        return address

    def raw_delete(self, address: int) -> None:
        if not address:
            return
        if address not in self._memory.raw_blocks:
            raise RuntimeError(f"invalid device pointer: {address:#x}")
        self._memory.free(self._memory.raw_blocks.pop(address))

    def enable(self, is_enabled: bool) -> None:
        if not is_enabled:
            raise unsupported("an allocator without a cache")

    def is_enabled(self) -> bool:
        return True


def _check(device: Any) -> None:
    resolve(None if isinstance(device, int) and device < 0 else device)


_OWN = str(Path(__file__).resolve().parents[2])

Stack = tuple[tuple[CodeType | str, int], ...]  # (code or operator, offset), innermost first


class Stacks:
    """Collector of Python stacks, which converts them to frames in the form of torch's memory
    snapshots. With `has_operators` the running operator comes first, where torch has C++ frames."""

    def __init__(self, *, has_operators: bool) -> None:
        self._has_operators = has_operators
        self._frames: dict[Stack, list[dict[str, Any]]] = {}

    def gather(self) -> Stack:
        """Return the running thread's stack, innermost frame first, without frames of memest."""
        stack = list[tuple[CodeType | str, int]]()
        needs_operator = self._has_operators
        for frame, _ in walk_stack(sys._getframe(1)):
            code = frame.f_code
            if not code.co_filename.startswith(_OWN):
                stack.append((code, frame.f_lasti))
                continue
            # called by memest itself
            while stack and getattr(stack[-1][0], "co_filename", "") == torch._ops.__file__:
                stack.pop()
            if needs_operator and code.co_name == "__torch_dispatch__":
                stack.append((frame.f_locals["func"]._schema.name, 0))
                needs_operator = False
        return tuple(stack)

    def frames_of(self, stack: Stack) -> list[dict[str, Any]]:
        """Return `stack` as a list of {filename, line, name}; equal stacks share a list."""
        if stack not in self._frames:
            self._frames[stack] = [_frame(code, at) for code, at in stack]
        return self._frames[stack]


def _frame(code: CodeType | str, at: int) -> dict[str, Any]:
    if isinstance(code, str):  # torch's mark of a frame without a file
        return {"filename": "??", "line": 0, "name": code}
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
    line = next(lines, code.co_firstlineno)
    return {"filename": code.co_filename, "line": line, "name": code.co_name}


_CHOICES = {
    "state": ("state", "all", None),
    "context": ("state", "alloc", "all", None),
    "stacks": ("python", "all"),
}
"""Values of the options of a recording."""


class _Recordings(_Replacements):
    """Replacements of functions that record the allocator's history. They mirror
    `torch::cuda::_record_memory_history` (`torch/csrc/cuda/memory_snapshot.cpp`, torch 2.11)."""

    _metadata = ""

    def record_memory_history(
        self, enabled: str | None, context: str | None = "all", stacks: str = "all",
        max_entries: int = sys.maxsize, clear_history: bool = False, compile_context: bool = False,
        has_annotations: bool = False, skipped_actions: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Start recording the allocator's events, or stop if `enabled` is None. Options are those
        of `torch.cuda.memory._record_memory_history`; a wrong one raises `RuntimeError`.
        `compile_context` and `has_annotations` have no effect."""
        options = {"state": enabled, "context": context, "stacks": stacks}
        for option, value in options.items():
            if value not in _CHOICES[option]:
                *first, last = map(repr, _CHOICES[option])
                raise RuntimeError(f"expected {option} to be {', '.join(first)}, or {last}")
        self._memory.settle()
        previous, self._allocator.history = self._allocator.history, None
        self._follow_frees(enabled is not None and context == "all")
        if enabled is None:
            return
        collector = Stacks(has_operators=stacks == "all")
        history = MemoryHistory(
            collector.gather, collector.frames_of,
            context=Context.NEVER if context is None else Context[context.upper()],
            max_entries=max(1, max_entries) if enabled == "all" else 1,
            skipped=frozenset(skipped_actions),
        )  # fmt: skip
        history.metadata = self._metadata
        if previous is not None:
            history.continue_from(previous, keeps_entries=not clear_history)
        self._allocator.history = history

    def record_memory_history_legacy(
        self, enabled: bool, has_stacks: bool = True, max_entries: int = 1,
        has_stacks_of_entries: bool = False, has_cpp_stacks: bool = False, *others: Any,
    ) -> None:  # fmt: skip
        """Start or stop a recording, by the flags of torch's older function. The recording's
        `context` is "alloc" with `has_stacks_of_entries`, else "state" with `has_stacks`, else
        None. Its `stacks` are "all" with `has_cpp_stacks`, else "python"."""
        context = "state" if has_stacks else None
        if has_stacks_of_entries:
            context = "alloc"
        stacks = "all" if has_cpp_stacks else "python"
        state = "all" if enabled else None
        self.record_memory_history(state, context, stacks, max_entries, *others)

    def _follow_frees(self, follows: bool) -> None:
        """If `follows`, begin to record the stacks at which Python frees storages; otherwise stop
        it."""
        memory, allocator = self._memory, self._allocator
        vars(memory).pop("free", None)
        free = memory.free

        def record_and_free(index: int) -> None:
            block = memory.blocks.get(index)
            if block is not None and allocator.history is not None:
                allocator.history.storage_freed(block.address)
            free(index)

        if follows:
            vars(memory)["free"] = record_and_free

    def isHistoryEnabled(self) -> bool:
        return self._allocator.history is not None

    def memorySnapshot(self, options: Any = None) -> dict[str, Any]:
        """Return segments and trace of events, in the form of torch's snapshot. `options` begin
        with the id of a private pool (two numbers); (0, 0) selects all segments, as None does. A
        third option, False, leaves out the trace."""
        self._memory.settle()
        history = self._allocator.history
        has_trace = options is None or len(options) < 3 or options[2]
        trace = history.trace() if history is not None and has_trace else []
        segments = self._allocator.described_segments(list(self._memory.blocks.values()))
        pool = tuple(options or DEFAULT_POOL_ID)[:2]
        if pool != DEFAULT_POOL_ID:
            segments = [segment for segment in segments if segment["segment_pool_id"] == pool]
        if history is not None:
            history.snapshot_taken(sum(segment["active_size"] for segment in segments))
        return {
            "segments": segments,
            "device_traces": [trace],
            "allocator_settings": self._allocator.settings.as_in_snapshot(),
            "external_annotations": [],
        }

    def allocationTraceback(self, address: int) -> list[dict[str, Any]] | None:
        history = self._allocator.history
        return None if history is None else history.frames_at(address) or None

    def setMemoryMetadata(self, text: str) -> None:
        self._metadata = text
        if self._allocator.history is not None:
            self._allocator.history.metadata = text

    def getMemoryMetadata(self) -> str:
        return self._metadata

    def attach_out_of_memory_observer(self, observer: Callable[[int, int, int, int], None]) -> None:
        gpu, allocator = self._mode.gpu, self._allocator

        def refused(num_bytes: int, free_bytes: int) -> None:
            limit = allocator.limit_bytes
            if limit is None or limit >= gpu.limit_bytes:
                limit = gpu.memory_bytes
            observer(0, num_bytes, limit, free_bytes)

        allocator.observers.append(refused)
