"""Effects of the allocator's settings: how it rounds, searches, splits and frees.

Mirrors `c10/cuda/CUDACachingAllocator.cpp`, torch 2.11: `round_size`, `get_free_block`,
`should_split`, `garbage_collect_cached_blocks`, `release_available_cached_blocks`.
`CachingAllocator` calls it only where a setting is not the default.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING

from memest.estimator.allocator.blocks import (
    ADDRESS_BITS,
    ROUND_BYTES,
    SMALL_REQUEST_BYTES,
    Block,
    FreeBlocks,
    round_request,
)
from memest.estimator.allocator.expandable import ExpandableSegments
from memest.estimator.allocator.settings import NUM_INTERVALS, AllocatorSettings
from memest.units import MIB, round_up

if TYPE_CHECKING:
    from memest.estimator.allocator.caching import CachingAllocator


class Tuning:
    """Rules of `allocator` with other than default `settings`: rounding, search, split and free."""

    def __init__(self, allocator: "CachingAllocator", settings: AllocatorSettings) -> None:
        self.settings = settings
        self.expandable = (
            ExpandableSegments(allocator, settings.large_segment_bytes)
            if settings.expandable_segments
            else None
        )
        self._allocator = allocator
        self._max_split = settings.max_split_bytes
        self._num_searches = [0, 0]  # `get_free_blocks_call_count`, by size of the pool
        self._inserted_at: dict[int, int] = {}  # by `id` of a free block

    # --- sizes

    def rounded(self, num_bytes: int) -> int:
        """Return the block size, in bytes, that serves a request of `num_bytes`."""
        if num_bytes < ROUND_BYTES:
            return ROUND_BYTES
        interval = num_bytes.bit_length() - MIB.bit_length()
        divisions = self.settings.roundup_divisions[min(max(0, interval), NUM_INTERVALS - 1)]
        if divisions <= 1 or num_bytes <= ROUND_BYTES * divisions:
            return round_request(num_bytes)
        floor = 1 << (num_bytes.bit_length() - 1)
        return round_up(num_bytes, floor // divisions)  # a power of two stays

    # --- a request

    def best_index(self, pool: FreeBlocks, index: int, size: int, is_small: bool) -> int:
        """Return the index in `pool` of the free block that serves a request of `size` bytes. By
        default it is `index`, that of the smallest block that is large enough. With expandable
        segments it can be a later block (`ExpandableSegments.best_index`). `max_split_size_mb` can
        forbid the block, such as a block above that size for a request below (`_serves`). If no
        block is large enough or the block is forbidden, free old segments (if `collects`), and
        return the pool's length. `is_small` is True for a pool of small blocks."""
        if self.collects:
            self._num_searches[is_small] += 1
        if index < len(pool.keys) and self.expandable is not None:
            index = self.expandable.best_index(pool, index)
        if index < len(pool.keys) and self._serves(pool.keys[index] >> ADDRESS_BITS, size):
            return index
        if self.collects:
            self._collect()
        return len(pool.keys)

    def _serves(self, num_bytes: int, size: int) -> bool:
        """Return whether `max_split_size_mb` lets a block of `num_bytes` serve `size` bytes."""
        limit = self._max_split
        if limit is None:
            return True
        if size < limit:
            return num_bytes < limit
        return num_bytes < size + self.settings.max_non_split_rounding_bytes

    def splits(self, size: int, remaining: int, is_small: bool) -> bool:
        """Return whether a block of `size + remaining` bytes is split to serve `size` bytes."""
        if is_small or self.expandable is not None:
            return remaining >= ROUND_BYTES
        is_whole = self._max_split is not None and size >= self._max_split
        return remaining > SMALL_REQUEST_BYTES and not is_whole

    # --- freeing

    @property
    def collects(self) -> bool:
        """True if old segments are freed: a threshold and a share of the GPU's memory are set."""
        return (
            self.settings.garbage_collection_threshold > 0
            and self._allocator.allowed_bytes is not None
        )

    def inserted(self, block: Block) -> None:
        """Record when `block` was inserted into its pool, for its age. Time is counted in searches
        of the small or of the large pools; each request is one search."""
        if self.settings.garbage_collection_threshold:
            self._inserted_at[id(block)] = self._num_searches[block.is_small]

    def _collect(self) -> None:
        """Free large cached segments of at least average age, down to the threshold if possible."""
        allocator = self._allocator
        assert allocator.allowed_bytes is not None
        share = self.settings.garbage_collection_threshold
        target = allocator.reserved_bytes - int(share * allocator.allowed_bytes)
        if target <= 0:
            return
        ages = {id(b): self._age(b) for _, b in allocator.unsplit(is_small=False)}
        total, count, reclaimed, has_freed = sum(ages.values()), len(ages), 0, True
        while reclaimed < target and has_freed and count:
            threshold, has_freed = total / count, False
            for pool, block in allocator.unsplit(is_small=False):
                age = self._age(block)
                if self.expandable is not None or age < threshold:
                    continue
                has_freed = True
                reclaimed += block.num_bytes
                total -= age
                count -= 1
                pool.discard(block)
                allocator.release(block)

    def _age(self, block: Block) -> int:
        return self._num_searches[block.is_small] - self._inserted_at.get(id(block), 0)

    def release_oversize(self, size: int, is_small: bool, stream: int) -> bool:
        """Free cached segments of at least `max_split_size_mb`, for a new segment of `size` bytes.
        Free one that is large enough, else several, the largest first. Return whether the freed
        bytes suffice. `stream` and `is_small` select the pool."""
        if self._max_split is None:
            return False
        allocator = self._allocator
        pool = allocator.pools_of(stream)[is_small]
        needed_bytes = max(size, self._max_split)
        index = bisect_left(pool.keys, needed_bytes << ADDRESS_BITS)
        if index < len(pool.keys) and self.expandable is None:
            block = pool.by_key[pool.keys[index]]
            pool.discard(block)
            allocator.release(block)
            return True
        released = 0
        for block in [pool.by_key[key] for key in reversed(pool.keys)]:
            if released >= needed_bytes or block.num_bytes < self._max_split:
                break
            if self.expandable is None:
                released += block.num_bytes
                pool.discard(block)
                allocator.release(block)
        return released >= needed_bytes

    def layout(self) -> tuple[object, ...]:
        """Return a value to compare: what decides later addresses, besides the free blocks."""
        if self.collects:
            return (object(),)  # ages differ, so two states never compare equal
        return () if self.expandable is None else self.expandable.layout()
