"""The history of an allocator: what `torch.cuda.memory._record_memory_history` records.

As `record_trace` and `recordHistory` of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11): the same
entries in the same order, each with the stack that `context` asks for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.expandable import Unmapped
from memest.estimator.allocator.torch_format import (
    POOL,
    block_entry,
    free_block_entry,
    segment_entry,
)

Stack = Any
"""What `GathersStacks.gather` returns."""


class GathersStacks(Protocol):
    """Knows what runs."""

    def gather(self) -> Stack:
        """The stack of the running thread."""

    def frames_of(self, stack: Stack) -> list[dict[str, Any]]:
        """A stack as torch's frames."""


class Context(IntEnum):
    """`RecordContext`: of what stacks are kept."""

    NEVER = 0
    STATE = 1
    ALLOC = 2
    ALL = 3


class Entry(NamedTuple):
    """A `TraceEntry`."""

    action: str
    address: int
    num_bytes: int
    stream: int
    time_us: int
    stack: Stack | None
    metadata: str


class MemoryHistory:
    """The actions since it began.

    Args:
        stacks: gathers them.
        context: of what stacks are kept.
        max_entries: the last so many actions are kept.
        skipped: names of actions that are not.
    """

    def __init__(
        self,
        stacks: GathersStacks,
        *,
        context: Context,
        max_entries: int,
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        self.context = context
        self.metadata = ""
        """What `torch.cuda.memory._set_memory_metadata` has set."""

        self.entries: deque[Entry] = deque(maxlen=min(max_entries, 1 << 62))
        self.stacks: dict[int, Stack] = {}
        """Of live blocks, by address."""

        self.of_segments: dict[int, Stack] = {}
        self._gather = stacks.gather
        self._frames_of = stacks.frames_of
        self._skipped = skipped
        self._stack: Stack | None = None
        self._freed_at: dict[int, Stack] = {}

    def continues(self, before: MemoryHistory, *, keeps_entries: bool) -> None:
        """Go on from `before`: the stacks of what lives, and the actions so far."""
        self.stacks = before.stacks
        self.of_segments = before.of_segments
        if keeps_entries:
            self.entries.extend(before.entries)

    def gather(self) -> None:
        """A request comes: keep the stack for what it leads to."""
        self._stack = self._gather() if self.context >= Context.STATE else None

    def dies(self, address: int) -> None:
        """The storage at `address` dies now; its block is freed before the next request."""
        if self.context >= Context.ALL:
            self._freed_at[address] = self._gather()

    def allocated(self, block: Block, num_bytes: int) -> None:
        """A request of `num_bytes` got `block`."""
        if self._stack is not None:
            self.stacks[block.address] = self._stack
        self._add("alloc", block.address, num_bytes, block.stream, self._stack)

    def free_requested(self, block: Block) -> None:
        """`block` is not needed any more."""
        stack = self._freed_at.get(block.address, self.stacks.get(block.address))
        self._add("free_requested", block.address, block.requested_bytes, block.stream, stack)

    def free_completed(self, block: Block) -> None:
        """`block` may be used again."""
        stack = self._freed_at.pop(block.address, None)
        allocated_at = self.stacks.pop(block.address, None)
        stack = allocated_at if stack is None else stack
        self._add("free_completed", block.address, block.requested_bytes, block.stream, stack)

    def segment_allocated(self, block: Block) -> None:
        """`cudaMalloc` gave a segment."""
        if self._stack is not None:
            self.of_segments[block.address] = self._stack
        self._add("segment_alloc", block.address, block.num_bytes, block.stream, self._stack)

    def segment_freed(self, block: Block) -> None:
        """`cudaFree` took one."""
        stack = self.of_segments.pop(block.address, None)
        if self.context >= Context.ALL:
            stack = self._gather()
        self._add("segment_free", block.address, block.num_bytes, block.stream, stack)

    def segment_mapped(self, address: int, num_bytes: int, block: Block) -> None:
        """An expandable segment has grown."""
        if self._stack is not None and (block.previous is None):
            self.of_segments.setdefault(block.address, self._stack)
        self._add("segment_map", address, num_bytes, block.stream, self._stack)

    def segment_unmapped(self, address: int, num_bytes: int, block: Block) -> None:
        """An expandable segment has given memory back."""
        stack = self._gather() if self.context >= Context.ALL else None
        self._add("segment_unmap", address, num_bytes, block.stream, stack)

    def refused(self, num_bytes: int, stream: int, free_bytes: int) -> None:
        """No memory for a block of `num_bytes`, of which `cudaMalloc` has `free_bytes` left."""
        self._add("oom", free_bytes, num_bytes, stream, self._stack)

    def snapshot_taken(self, active_bytes: int) -> None:
        """Somebody has looked at the segments."""
        self._add("snapshot", 0, active_bytes, 0, None)

    def _add(
        self, action: str, address: int, num_bytes: int, stream: int, stack: Stack | None
    ) -> None:
        if action in self._skipped:
            return
        stack = stack if self.context >= Context.ALLOC else None
        now = time.time_ns() // 1000
        self.entries.append(Entry(action, address, num_bytes, stream, now, stack, self.metadata))

    def trace(self) -> list[dict[str, Any]]:
        """The entries as torch gives them; one without a stack has no `frames`."""
        return [self._entry(entry) for entry in self.entries]

    def _entry(self, entry: Entry) -> dict[str, Any]:
        made: dict[str, Any] = {"action": entry.action}
        made["device_free" if entry.action == "oom" else "addr"] = entry.address
        made["size"] = entry.num_bytes
        made["stream"] = entry.stream
        made["time_us"] = entry.time_us
        made["compile_context"] = "N/A"
        made["user_metadata"] = entry.metadata
        made["pool_id"] = POOL
        if entry.stack is not None:
            made["frames"] = self._frames_of(entry.stack)
        return made

    def frames_at(self, address: int) -> list[dict[str, Any]]:
        """The frames of the block at `address`, if its stack was kept."""
        stack = self.stacks.get(address)
        return [] if stack is None else self._frames_of(stack)

    def frames_of_segment(self, address: int) -> list[dict[str, Any]]:
        """The frames of the request for which the segment at `address` was taken."""
        stack = self.of_segments.get(address)
        return [] if stack is None else self._frames_of(stack)


def segment_of(
    first: Block,
    is_deferred: Callable[[Block], bool],
    history: MemoryHistory | None,
) -> dict[str, Any]:
    """The segment that begins with `first`, as `torch.cuda.memory_snapshot` gives it; of an
    expandable one the part that is mapped without a gap.

    Args:
        first: its first block.
        is_deferred: whether a block is freed, and still used by another stream.
        history: knows the stacks of the blocks, if they were kept.
    """
    blocks = []
    num_bytes = 0
    block: Block | None = first
    is_expandable = isinstance(first.previous, Unmapped)
    while block is not None:
        if isinstance(block, Unmapped):
            is_expandable = True
            break
        if block.is_free:
            blocks.append(free_block_entry(block.address, block.num_bytes))
        else:
            state = "active_pending_free" if is_deferred(block) else "active_allocated"
            frames = [] if history is None else history.frames_at(block.address)
            blocks.append(
                block_entry(block.address, block.num_bytes, block.requested_bytes, state, frames)
            )
        num_bytes += block.num_bytes
        block = block.next
    frames = [] if history is None else history.frames_of_segment(first.address)
    return segment_entry(
        first.address,
        num_bytes,
        stream=first.stream,
        is_small=first.is_small,
        is_expandable=is_expandable,
        blocks=blocks,
        frames=frames,
    )
