"""Counters of `torch.cuda.memory_stats` for the simulated allocator.

`CountingAllocator` updates `DeviceStats` (`c10/core/CachingDeviceAllocator.h`) where
`c10/cuda/CUDACachingAllocator.cpp` does, torch 2.11.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from memest.estimator.allocator.blocks import AddressSpace, Block
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.allocator.memory_history import MemoryHistory, segment_of

POOLS = ("all", "small_pool", "large_pool")  # `StatType`, in its order
_ALLOCATED = ("allocation", "allocated_bytes")
_ACTIVE = (
    "active", "active_bytes", "requested_bytes", "inactive_split", "inactive_split_bytes",
)  # fmt: skip
_REQUESTS = (*_ALLOCATED, *_ACTIVE)
_RESERVED = ("reserved_bytes",)
_SEGMENTS = ("segment", *_RESERVED)
_malloc, _free = CachingAllocator.malloc, CachingAllocator.free  # looked up once: they are hot


class Stat:
    """One statistic, such as a number of blocks: value, peak, and totals of its increases and
    decreases (torch's `Stat`)."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """Add `amount`, which may be negative, and update peak and totals."""
        current = self.current = self.current + amount
        if amount > 0:
            self.allocated += amount
            if current > self.peak:
                self.peak = current
        else:
            self.freed -= amount

    def as_dict(self) -> dict[str, int]:
        """Return the statistic as a dict with torch's keys."""
        return {name: getattr(self, name) for name in ("current", "peak", "allocated", "freed")}


class CountingAllocator(CachingAllocator):
    """`CachingAllocator` that also keeps the statistics of `torch.cuda.memory_stats`. `gpu_bytes`
    is the memory that it could reserve without `limit_bytes`; None means `limit_bytes`."""

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
        self._retries_forgotten = 0
        self._oversize = {name: Stat() for name in ("allocations", "segments")}

    @property
    def total_bytes(self) -> int:
        """Bytes of all requests so far, rounded up to blocks."""
        return self._stats["allocated_bytes"][0].allocated

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Serve and count a request; see `CachingAllocator.malloc`."""
        history = self.history
        if history is not None:
            history.gather()
        try:
            block = _malloc(self, num_bytes, stream)
        except OutOfMemory:
            self.num_ooms += 1
            size = self.rounded(num_bytes)
            free_bytes = max(0, (self.gpu_bytes or 0) - self.reserved_bytes)
            if history is not None:
                history.refused(size, stream, free_bytes)
            for observer in self.observers:
                observer(size, free_bytes)
            raise
        block.requested_bytes = num_bytes
        size = block.num_bytes
        if self._tuning is not None:
            self._count_oversize("allocations", size, 1)
        amounts = (1, size, 1, size, num_bytes, *self._inactive_split_change(block))
        self._count(block.is_small, _REQUESTS, amounts)
        if history is not None:
            history.allocated(block)
        return block

    def _inactive_split_change(self, block: Block) -> tuple[int, int]:
        """Return the changes of `inactive_split` and `inactive_split_bytes` by the request that got
        `block`. They count free blocks that do not fill their segment."""
        size, following = block.num_bytes, block.next
        if self.settings.expandable_segments:
            return 0, 0
        if following is None and block.previous is None:  # it fills its segment
            return 0, 0
        if following is None or not following.is_free:  # a free block was used whole
            return -1, -size
        if block.previous is not None or following.next is not None:  # a free part was split again
            return 0, -size
        return 1, following.num_bytes  # a whole segment was split

    def malloc_at(self, address: int, num_bytes: int, stream: int) -> Block:
        """Count and serve a request at an address; see `CachingAllocator.malloc_at`."""
        block = super().malloc_at(address, num_bytes, stream)
        block.requested_bytes = size = block.num_bytes
        previous, following = block.previous, block.next
        free_parts = [b for b in (previous, following) if b is not None and b.is_free]
        far_previous = previous.previous if previous is not None and previous.is_free else previous
        far_next = following.next if following is not None and following.is_free else following
        if far_previous is None and far_next is None:  # the whole segment was free
            split = len(free_parts), sum(b.num_bytes for b in free_parts)
        else:
            split = len(free_parts) - 1, -size
        self._count(block.is_small, _REQUESTS, (1, size, 1, size, size, *split))
        return block

    def free(self, block: Block) -> None:
        """Free a block and count that; see `CachingAllocator.free`."""
        if self.history is not None:
            self.history.free_requested(block)
            self.history.free_completed(block)
        self._count(block.is_small, _ALLOCATED, (-1, -block.num_bytes))
        self._return_to_pool(block)

    def _return_to_pool(self, block: Block) -> None:
        """Return `block` to its pool, and count it as inactive. It was counted as freed before."""
        size = block.num_bytes
        num_split = split_bytes = 0
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free:  # `_free` merges it with `block`
                num_split -= 1
                split_bytes -= neighbour.num_bytes
        _free(self, block)
        if block.previous is not None or block.next is not None:
            num_split += 1
            split_bytes += block.num_bytes
        if self._tuning is not None:
            self._count_oversize("allocations", size, -1)
        if self.settings.expandable_segments:
            num_split = split_bytes = 0
        amounts = (-1, -size, -block.requested_bytes, num_split, split_bytes)
        self._count(block.is_small, _ACTIVE, amounts)

    def defer(self, block: Block) -> None:
        """Count a deferred block as freed, but still active."""
        if self.history is not None:
            self.history.free_requested(block)
        super().defer(block)
        self._count(block.is_small, _ALLOCATED, (-1, -block.num_bytes))

    def complete(self, block: Block) -> None:
        """Free a deferred block and count that; see `CachingAllocator.complete`."""
        if self._deferred.pop(id(block), None) is None:
            return
        if self.history is not None:
            self.history.free_completed(block)
        self.allocated_bytes += block.num_bytes
        self._return_to_pool(block)

    def empty_cache(self) -> None:
        """Return cached segments to the driver, and count a synchronisation of all streams."""
        self.num_syncs += 1
        super().empty_cache()

    def release(self, block: Block) -> None:
        """Return the segment that `block` fills to the driver, and count that."""
        self.num_segments_freed += 1
        super().release(block)
        self._count(block.is_small, _SEGMENTS, (-1, -block.num_bytes))
        self._count_oversize("segments", block.num_bytes, -1)
        if self.history is not None:
            self.history.segment_freed(block)

    def count_segment(self, block: Block) -> None:
        """Count the new segment that `block` fills."""
        self.num_segments += 1
        self._count(block.is_small, _SEGMENTS, (1, block.num_bytes))
        self._count_oversize("segments", block.num_bytes, 1)
        if self.history is not None:
            self.history.segment_allocated(block)

    def count_mapped(self, address: int, num_bytes: int, block: Block) -> None:
        """Count `num_bytes` that are mapped into the expandable segment of `block`."""
        super().count_mapped(address, num_bytes, block)
        self.num_segments += 1
        self._count(block.is_small, _RESERVED, (num_bytes,))
        if self.history is not None:
            self.history.segment_mapped(address, num_bytes, block)

    def count_unmapped(self, address: int, num_bytes: int, block: Block) -> None:
        """Count `num_bytes` that are unmapped from the expandable segment of `block`."""
        super().count_unmapped(address, num_bytes, block)
        self.num_segments_freed += 1
        self._count(block.is_small, _RESERVED, (-num_bytes,))
        if self.history is not None:
            self.history.segment_unmapped(address, num_bytes, block)

    # --- queries

    def memory_stats(self) -> dict[str, Any]:
        """Return the counters as the nested dict of `torch._C._cuda_memoryStats`."""
        self.read_settings()
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

    def described_segments(self, live: list[Block]) -> list[dict[str, Any]]:
        """Return all segments as in `torch.cuda.memory_snapshot`; `live` has the blocks in use."""
        return [segment_of(b, self.is_deferred, self.history) for b in self.segments(live)]

    def reset_peak_stats(self) -> None:
        """Set the peaks of `memory_stats` to current values; the report keeps its own peaks."""
        for stat in self._all_stats():
            stat.peak = stat.current

    def reset_accumulated_stats(self) -> None:
        """Reset totals as `torch.cuda.reset_accumulated_memory_stats` does."""
        for stat in self._all_stats():
            stat.allocated = stat.freed = 0
        self._retries_forgotten = self.num_retries
        self.num_ooms = self.num_syncs = self.num_segments = self.num_segments_freed = 0

    def _all_stats(self) -> Iterator[Stat]:
        return chain(*self._stats.values(), self._oversize.values())

    def _count_oversize(self, name: str, num_bytes: int, sign: int) -> None:
        """Add `sign` to the oversize statistic `name`, if `num_bytes` reach `max_split_size_mb`."""
        max_split = self.settings.max_split_bytes
        if max_split is not None and num_bytes >= max_split:
            self._oversize[name].change(sign)

    def _count(self, is_small: bool, names: tuple[str, ...], amounts: tuple[int, ...]) -> None:
        """Add `amounts` to the statistics `names`: in all pools, and in the small or large one."""
        for name, amount in zip(names, amounts, strict=True):
            if amount:
                all_pools, small_pool, large_pool = self._stats[name]
                all_pools.change(amount)
                (small_pool if is_small else large_pool).change(amount)


def allow_share(
    allocator: CountingAllocator, share: float, total_bytes: int, most_bytes: int
) -> None:
    """Limit the allocator to `share` (0 to 1) of `total_bytes`, as `setMemoryFraction` does.
    `most_bytes` is what the allocator can reserve on the GPU; a share of 1 allows all of it."""
    allowed = int(share * total_bytes)
    allocator.allowed_bytes = allowed if share < 1 else None
    allocator.limit_bytes = min(most_bytes, allowed)
