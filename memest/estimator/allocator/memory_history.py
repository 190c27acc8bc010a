"""History of an allocator, as `torch.cuda.memory._record_memory_history` records it.

Mirrors `record_trace` and `recordHistory` of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11).
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from memest.estimator.allocator.blocks import FIRST_PRIVATE_POOL, Block
from memest.estimator.allocator.expandable import Unmapped

DEFAULT_POOL_ID = (0, 0)  # as `torch.cuda.MemPool` ids

_MAX_DEQUE_LEN = 1 << 62  # `maxlen` must fit a C `Py_ssize_t`; scripts pass `sys.maxsize`
Stack = Any  # stack of a thread, as the caller gathers it


class Context(IntEnum):
    """Choice of the events for which a Python stack is recorded: torch's `RecordContext`."""

    NEVER = 0
    STATE = 1  # stacks of live blocks, for a snapshot
    ALLOC = 2  # also stacks of recorded actions: that of the block's request
    ALL = 3  # also stacks of frees


class Entry(NamedTuple):
    """Record of one action of the allocator: a `TraceEntry` of torch's memory snapshot."""

    action: str
    address: int  # of `oom`: free bytes of the GPU
    num_bytes: int  # requested bytes of a block, bytes of a segment
    block_bytes: int  # bytes of the block or segment
    stream: int
    time_us: int
    stack: Stack  # None if it was not recorded
    metadata: str


@dataclass(eq=False)
class MemoryHistory:
    """Record of the latest `max_entries` actions of the allocator, except those named in `skipped`.
    `context` selects the events whose Python stacks are recorded. `gather_stack` returns the
    running thread's stack, and `frames_of` converts a stack to a snapshot's frames."""

    gather_stack: Callable[[], Stack]
    frames_of: Callable[[Stack], list[dict[str, Any]]]
    _: KW_ONLY
    context: Context
    max_entries: int
    skipped: frozenset[str] = frozenset()
    metadata: str = ""  # value of `torch.cuda.memory._set_memory_metadata`
    stacks: dict[int, Stack] = field(default_factory=dict)  # of live blocks, by address
    segment_stacks: dict[int, Stack] = field(default_factory=dict)  # of segments, by address
    _stack: Stack | None = None
    _freed_at: dict[int, Stack] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=min(self.max_entries, _MAX_DEQUE_LEN))

    def continue_from(self, before: "MemoryHistory", *, keeps_entries: bool) -> None:
        """Share the stacks of the history `before`; with `keeps_entries`, copy its entries."""
        self.stacks, self.segment_stacks = before.stacks, before.segment_stacks
        if keeps_entries:
            self.entries.extend(before.entries)

    def _gather(self, min_context: Context) -> Stack | None:
        """Return the running thread's stack, if `context` is at least `min_context`; else None."""
        return self.gather_stack() if self.context >= min_context else None

    def gather(self) -> None:
        """Record the running thread's stack for the request that follows."""
        self._stack = self._gather(Context.STATE)

    def storage_freed(self, address: int) -> None:
        """Record the stack at which Python freed the storage at `address`, if `context` is ALL."""
        if self.context >= Context.ALL:
            self._freed_at[address] = self.gather_stack()

    def allocated(self, block: Block) -> None:
        """Record that a request got `block`."""
        if self._stack is not None:
            self.stacks[block.address] = self._stack
        self._add_block("alloc", block, self._stack)

    def free_requested(self, block: Block) -> None:
        """Record that `block` was freed, although another stream may still use it."""
        stack = self._freed_at.get(block.address, self.stacks.get(block.address))
        self._add_block("free_requested", block, stack)

    def free_completed(self, block: Block) -> None:
        """Record that `block` returned to its pool."""
        allocated_at = self.stacks.pop(block.address, None)
        stack = self._freed_at.pop(block.address, None)
        self._add_block("free_completed", block, allocated_at if stack is None else stack)

    def segment_allocated(self, block: Block) -> None:
        """Record that `cudaMalloc` returned a segment, which `block` fills."""
        if self._stack is not None:
            self.segment_stacks[block.address] = self._stack
        self._add("segment_alloc", block.address, block.num_bytes, block.stream, self._stack)

    def segment_freed(self, block: Block) -> None:
        """Record that `cudaFree` freed the segment that `block` fills."""
        stack = self.segment_stacks.pop(block.address, None)
        if self.context >= Context.ALL:
            stack = self.gather_stack()
        self._add("segment_free", block.address, block.num_bytes, block.stream, stack)

    def segment_mapped(self, address: int, num_bytes: int, block: Block) -> None:
        """Record that `num_bytes` were mapped at `address`, in the segment of `block`."""
        if self._stack is not None and block.previous is None:
            self.segment_stacks.setdefault(block.address, self._stack)
        self._add("segment_map", address, num_bytes, block.stream, self._stack)

    def segment_unmapped(self, address: int, num_bytes: int, block: Block) -> None:
        """Record that `num_bytes` were unmapped at `address`, in the segment of `block`."""
        stack = self._gather(Context.ALL)
        self._add("segment_unmap", address, num_bytes, block.stream, stack)

    def refused(self, num_bytes: int, stream: int, free_bytes: int) -> None:
        """Record a failed request of `num_bytes`, when the GPU had `free_bytes` left."""
        self._add("oom", free_bytes, num_bytes, stream, self._stack)

    def snapshot_taken(self, active_bytes: int) -> None:
        """Record that a snapshot was taken, when blocks in use had `active_bytes`."""
        self._add("snapshot", 0, active_bytes, 0, None)

    def _add_block(self, action: str, block: Block, stack: Stack | None) -> None:
        requested_bytes, stream = block.requested_bytes, block.stream
        self._add(action, block.address, requested_bytes, stream, stack, block.num_bytes)

    def _add(
        self, action: str, address: int, num_bytes: int, stream: int, stack: Stack | None,
        block_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Add an entry for `action`, torch's name of an event such as `segment_alloc`. The other
        arguments are fields of `Entry`; `block_bytes` None means `num_bytes`."""
        if action in self.skipped:
            return
        stack = stack if self.context >= Context.ALLOC else None
        now = time.time_ns() // 1000
        size = num_bytes if block_bytes is None else block_bytes
        entry = Entry(action, address, num_bytes, size, stream, now, stack, self.metadata)
        self.entries.append(entry)

    def trace(self) -> list[dict[str, Any]]:
        """Return the entries as in torch's snapshot; an entry without a stack has no `frames`."""
        return [self._entry(entry) for entry in self.entries]

    def _entry(self, entry: Entry) -> dict[str, Any]:
        record: dict[str, Any] = {"action": entry.action}
        record["device_free" if entry.action == "oom" else "addr"] = entry.address
        record["size"] = entry.num_bytes
        record["stream"] = entry.stream
        record["time_us"] = entry.time_us
        record["compile_context"] = "N/A"
        record["user_metadata"] = entry.metadata
        record["pool_id"] = DEFAULT_POOL_ID
        if entry.stack is not None:
            record["frames"] = self.frames_of(entry.stack)
        return record

    def frames_at(self, address: int) -> list[dict[str, Any]]:
        """Return the stack frames of the request for the live block at `address`; [] if unknown."""
        return self.frames_of(self.stacks[address]) if address in self.stacks else []

    def frames_of_segment(self, address: int) -> list[dict[str, Any]]:
        """Return the stack frames of the request for the segment at `address`; [] if unknown."""
        return (
            self.frames_of(self.segment_stacks[address]) if address in self.segment_stacks else []
        )


def segment_of(
    first: Block, is_deferred: Callable[[Block], bool], history: MemoryHistory | None
) -> dict[str, Any]:
    """Return the segment that begins with `first`, as a dict of `torch.cuda.memory_snapshot`. An
    expandable segment ends at its first gap. `is_deferred` returns whether a freed block is still
    used by another stream. `history` has the stack frames of requests; None leaves them empty."""
    blocks: list[dict[str, Any]] = []
    num_bytes = 0
    block: Block | None = first
    is_expandable = isinstance(first.previous, Unmapped)
    while block is not None:
        if isinstance(block, Unmapped):
            is_expandable = True
            break
        state = "inactive"
        if not block.is_free:
            state = "active_pending_free" if is_deferred(block) else "active_allocated"
        frames = [] if history is None or block.is_free else history.frames_at(block.address)
        blocks.append(
            {
                "address": block.address,
                "size": block.num_bytes,
                "requested_size": 0 if block.is_free else block.requested_bytes,
                "state": state,
                "frames": frames,
            }
        )
        num_bytes += block.num_bytes
        block = block.next
    pool_number = first.stream - FIRST_PRIVATE_POOL  # negative for a stream
    in_use = [entry for entry in blocks if entry["state"] != "inactive"]
    allocated = [entry for entry in in_use if entry["state"] == "active_allocated"]
    return {
        "device": 0, "address": first.address, "total_size": num_bytes,
        "allocated_size": sum(entry["size"] for entry in allocated),
        "active_size": sum(entry["size"] for entry in in_use),
        "requested_size": sum(entry["requested_size"] for entry in in_use),
        "stream": first.stream,
        "segment_type": "small" if first.is_small else "large",
        "segment_pool_id": DEFAULT_POOL_ID if pool_number < 0 else (0, pool_number),
        "is_expandable": is_expandable,
        "frames": [] if history is None else history.frames_of_segment(first.address),
        "blocks": blocks,
    }  # fmt: skip
