"""Counters of `torch.cuda.memory_stats` for the simulated allocator.

`CountingAllocator` updates `DeviceStats` (`c10/core/CachingDeviceAllocator.h`) where
`c10/cuda/CUDACachingAllocator.cpp` does, torch 2.11. A request appends three integers to a list,
which is added up when a figure is read, or when it is long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from memest.estimator.allocator.blocks import (
    SMALL_REQUEST_BYTES,
    AddressSpace,
    Block,
    round_request,
)
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.allocator.memory_history import MemoryHistory

POOLS = ("all", "small_pool", "large_pool")  # `StatType`, in its order
_REQUESTS = (
    "allocation", "allocated_bytes", "active", "active_bytes", "requested_bytes",
    "inactive_split", "inactive_split_bytes",
)  # fmt: skip
_SEGMENTS = ("segment", "reserved_bytes")
_LONGEST_LOG = 3 * 4096
_SPLIT_CYCLE = 512  # divides all block sizes, so one integer holds changes of bytes and blocks
_malloc, _free = CachingAllocator.malloc, CachingAllocator.free  # looked up once: they are hot


class Stat:
    """One figure over time, as `c10::CachingAllocator::Stat`."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """Add `amount`, which may be negative."""
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount

    def change_by_each(self, amounts: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Add each of `amounts` in order."""
        if not amounts.size:
            return
        sums = np.cumsum(amounts)
        self.peak = max(self.peak, self.current + int(sums.max()))
        total, gained = int(sums[-1]), int(np.maximum(amounts, 0).sum())
        self.current += total
        self.allocated += gained
        self.freed += gained - total

    def as_dict(self) -> dict[str, int]:
        """Return the figure in torch's Python form."""
        return {name: getattr(self, name) for name in ("current", "peak", "allocated", "freed")}


class CountingAllocator(CachingAllocator):
    """A `CachingAllocator` with all counters of `torch.cuda.memory_stats`.

    `gpu_bytes` is the memory that the GPU leaves it, whatever the limit; None is the limit.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        addresses: AddressSpace | None = None,
        *,
        gpu_bytes: int | None = None,
    ) -> None:
        super().__init__(limit_bytes, addresses)
        self.gpu_bytes = limit_bytes if gpu_bytes is None else gpu_bytes
        self.observers: list[Callable[[int, int], None]] = []
        """Called when no memory is left: with the bytes of the block, and those that are free."""

        self.num_ooms = self.num_syncs = self.num_segments = self.num_segments_freed = 0
        self.history: MemoryHistory | None = None  # records every action while it is set
        self._stats = {name: [Stat() for _ in POOLS] for name in (*_REQUESTS, *_SEGMENTS)}
        self._log: list[int] = []  # of each request: +-block, requested bytes, change of splits
        self._retries_forgotten = 0
        self._oversize = {name: Stat() for name in ("allocations", "segments")}

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Count and serve a request; see `CachingAllocator.malloc`."""
        history = self.history
        if history is not None:
            history.gather()
        try:
            block = _malloc(self, num_bytes, stream)
        except OutOfMemory:
            self._note_refusal(num_bytes, stream)
            raise
        size, after = block.num_bytes, block.next
        if self._tuning is not None and self._is_outside_splits(size, 1):
            change = 0
        elif after is None:
            change = 0 if block.previous is None else -size - 1
        elif not after.is_free:
            change = -size - 1
        elif block.previous is not None or after.next is not None:  # the rest was split off before
            change = -size
        else:
            change = after.num_bytes + 1
        block.requested_bytes = num_bytes
        log = self._log
        log += (size, num_bytes, change)
        if len(log) > _LONGEST_LOG:
            self._add_up()
        if history is not None:
            history.allocated(block, num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Count and free; see `CachingAllocator.free`."""
        if self.history is not None:
            self.history.free_requested(block)
            self.history.free_completed(block)
        size = block.num_bytes
        before, after = block.previous, block.next
        change = 0
        if before is not None and before.is_free:
            change = -before.num_bytes - 1
        if after is not None and after.is_free:
            change -= after.num_bytes + 1
        _free(self, block)
        if block.previous is not None or block.next is not None:
            change += block.num_bytes + 1
        if self._tuning is not None and self._is_outside_splits(size, -1):
            change = 0
        self._log += (-size, block.requested_bytes, change)

    def defer(self, block: Block) -> None:
        """Count a deferred block, which is not allocated any more but active."""
        if self.history is not None:
            self.history.free_requested(block)
        super().defer(block)
        self._add_up()
        self._change(block.is_small, allocation=-1, allocated_bytes=-block.num_bytes)

    def complete(self, block: Block) -> None:
        """Count and free a deferred block; see `CachingAllocator.complete`."""
        if self._deferred.pop(id(block), None) is None:
            return
        history, self.history = self.history, None
        if history is not None:
            history.free_completed(block)
        is_small = block.is_small
        self.allocated_bytes += block.num_bytes
        self._add_up()
        self.free(block)
        minus_size, requested_bytes, change = self._log
        self._log.clear()  # of a free, only the second half happens now
        self.history = history
        num_blocks, num_bytes = _parts(change)
        self._change(
            is_small,
            active=-1,
            active_bytes=minus_size,
            requested_bytes=-requested_bytes,
            inactive_split=num_blocks,
            inactive_split_bytes=num_bytes,
        )

    def empty_cache(self) -> None:
        """Free the cache, as `release_cached_blocks` does."""
        self.num_syncs += 1
        super().empty_cache()

    def release(self, block: Block) -> None:
        """Count a returned segment."""
        self.num_segments_freed += 1
        super().release(block)
        self._change(block.is_small, segment=-1, reserved_bytes=-block.num_bytes)
        self._count_oversize("segments", block.num_bytes, -1)
        if self.history is not None:
            self.history.segment_freed(block)

    def taken(self, block: Block) -> None:
        """Count a new segment."""
        self.num_segments += 1
        self._change(block.is_small, segment=1, reserved_bytes=block.num_bytes)
        self._count_oversize("segments", block.num_bytes, 1)
        if self.history is not None:
            self.history.segment_allocated(block)

    def mapped(self, address: int, num_bytes: int, block: Block) -> None:
        """Count mapped memory."""
        super().mapped(address, num_bytes, block)
        self.num_segments += 1
        self._change(block.is_small, reserved_bytes=num_bytes)
        if self.history is not None:
            self.history.segment_mapped(address, num_bytes, block)

    def unmapped(self, address: int, num_bytes: int, block: Block) -> None:
        """Count unmapped memory."""
        super().unmapped(address, num_bytes, block)
        self.num_segments_freed += 1
        self._change(block.is_small, reserved_bytes=-num_bytes)
        if self.history is not None:
            self.history.segment_unmapped(address, num_bytes, block)

    def _note_refusal(self, num_bytes: int, stream: int) -> None:
        self.num_ooms += 1
        size = round_request(num_bytes) if self._tuning is None else self._tuning.rounded(num_bytes)
        free_bytes = max(0, (self.gpu_bytes or 0) - self.reserved_bytes)
        if self.history is not None:
            self.history.refused(size, stream, free_bytes)
        for observer in self.observers:
            observer(size, free_bytes)

    # --- queries

    def memory_stats(self) -> dict[str, Any]:
        """Return the dict of `torch._C._cuda_memoryStats`."""
        self.read_settings()
        self._add_up()
        max_split = self.settings.max_split_bytes
        tables: dict[str, Any] = {
            name: {pool: stat.as_dict() for pool, stat in zip(POOLS, stats, strict=True)}
            for name, stats in self._stats.items()
        }
        return tables | {
            "oversize_allocations": self._oversize["allocations"].as_dict(),
            "oversize_segments": self._oversize["segments"].as_dict(),
            "max_split_size": -1 if max_split is None else max_split,  # -1: the largest size_t
            "num_alloc_retries": self.num_retries - self._retries_forgotten,
            "num_ooms": self.num_ooms,
            "num_oom_rejections": 0,
            "num_sync_all_streams": self.num_syncs,
            "num_device_alloc": self.num_segments,
            "num_device_free": self.num_segments_freed,
        }

    def reset_peak_stats(self) -> None:
        """Reset peaks as `torch.cuda.reset_peak_memory_stats`, except those of the run itself."""
        self._add_up()
        for stat in self._all():
            stat.peak = stat.current

    def reset_accumulated_stats(self) -> None:
        """Reset counters, as `torch.cuda.reset_accumulated_memory_stats` does."""
        self._add_up()
        for stat in self._all():
            stat.allocated = stat.freed = 0
        self._retries_forgotten = self.num_retries
        self.num_ooms = self.num_syncs = self.num_segments = self.num_segments_freed = 0

    def _all(self) -> Iterator[Stat]:
        return chain(*self._stats.values(), self._oversize.values())

    def _is_outside_splits(self, num_bytes: int, sign: int) -> bool:
        """Count a new or freed block; return whether its segment is expandable.

        Free blocks of expandable segments do not count as split.
        """
        self._count_oversize("allocations", num_bytes, sign)
        return self.settings.expandable_segments

    def _count_oversize(self, name: str, num_bytes: int, sign: int) -> None:
        max_split = self.settings.max_split_bytes
        if max_split is not None and num_bytes >= max_split:
            self._oversize[name].change(sign)

    def _change(self, is_small: bool, **amounts: int) -> None:
        for name, amount in amounts.items():
            if amount:
                stats = self._stats[name]
                stats[0].change(amount)
                stats[1 if is_small else 2].change(amount)

    def _add_up(self) -> None:
        """Add the log to the figures."""
        if not self._log:
            return
        rows = np.array(self._log, dtype=np.int64).reshape(-1, 3)
        self._log.clear()
        sizes, signs = rows[:, 0], np.sign(rows[:, 0])
        num_blocks, num_bytes = _parts(rows[:, 2])
        is_small = np.abs(sizes) <= SMALL_REQUEST_BYTES  # a block of the large pool is larger
        requested = signs * rows[:, 1]
        columns = (signs, sizes, signs, sizes, requested, num_blocks, num_bytes)
        for name, column in zip(_REQUESTS, columns, strict=True):
            both, small, large = self._stats[name]
            both.change_by_each(column)
            small.change_by_each(column[is_small])
            large.change_by_each(column[~is_small])


def _parts(change: Any) -> tuple[Any, Any]:
    """Return (blocks, bytes) of a change in which both are added up."""
    half = _SPLIT_CYCLE // 2
    num_blocks = (change + half) % _SPLIT_CYCLE - half
    return num_blocks, change - num_blocks


def allow_share(
    allocator: CountingAllocator, share: float, total_bytes: int, most_bytes: int
) -> None:
    """Limit the allocator to `share` (0 to 1) of the GPU's whole memory, as `setMemoryFraction`
    does.

    `most_bytes` is the memory that the allocator can reserve there; a share of 1 allows all of it.
    """
    allowed = int(share * total_bytes)
    allocator.allowed_bytes = allowed if share < 1 else None
    allocator.limit_bytes = min(most_bytes, allowed)
