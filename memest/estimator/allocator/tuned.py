"""Effects of the allocator's settings: how it rounds, searches, splits and frees.

Mirrors `c10/cuda/CUDACachingAllocator.cpp`, torch 2.11: `round_size`, `get_free_block`,
`should_split`, `garbage_collect_cached_blocks`, `release_available_cached_blocks`.
`CachingAllocator` calls it only where a setting is not the default.
"""

from typing import TYPE_CHECKING

from memest.estimator.allocator import blocks
from memest.estimator.allocator.blocks import Block, FreeBlocks
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
        self._num_searches = [0, 0]  # `get_free_blocks_call_count`, indexed by `is_small`
        self._inserted_at: dict[int, int] = {}  # by `id` of a free block

    # --- sizes

    def rounded(self, num_bytes: int) -> int:
        """Return the block size, in bytes, that serves a request of `num_bytes`."""
        if num_bytes < blocks.ROUND_BYTES:
            return blocks.ROUND_BYTES
        interval = num_bytes.bit_length() - MIB.bit_length()  # 0 from 1 MiB, 1 from 2 MiB, ...
        divisions = self.settings.roundup_divisions[min(max(0, interval), NUM_INTERVALS - 1)]
        if divisions <= 1 or num_bytes <= blocks.ROUND_BYTES * divisions:
            return blocks.round_request(num_bytes)
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
        if index < len(pool.keys) and self._serves(pool.keys[index] >> blocks.ADDRESS_BITS, size):
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
            return remaining >= blocks.ROUND_BYTES
        is_whole = self._max_split is not None and size >= self._max_split
        return remaining > blocks.SMALL_REQUEST_BYTES and not is_whole

    # --- freeing

    @property
    def collects(self) -> bool:
        """True if old segments are freed: a threshold and a share of the GPU's memory are set."""
        return (
            self.settings.garbage_collection_threshold > 0
            and self._allocator.allowed_bytes is not None
        )

    def record_insertion(self, block: Block) -> None:
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
        if target <= 0 or self.expandable is not None:
            return
        ages = [self._age(block) for _, block in allocator.unsplit(is_small=False)]
        total_age, num_segments = sum(ages), len(ages)
        reclaimed_bytes, has_freed = 0, True
        while reclaimed_bytes < target and has_freed and num_segments:
            mean_age, has_freed = total_age / num_segments, False
            for pool, block in allocator.unsplit(is_small=False):
                age = self._age(block)
                if age < mean_age:
                    continue
                has_freed = True
                reclaimed_bytes += block.num_bytes
                total_age -= age
                num_segments -= 1
                pool.discard(block)
                allocator.release(block)

    def _age(self, block: Block) -> int:
        return self._num_searches[block.is_small] - self._inserted_at.get(id(block), 0)

    def release_oversize(self, size: int, is_small: bool, stream: int) -> bool:
        """Free cached segments of at least `max_split_size_mb`, for a new segment of `size` bytes.
        Free one that is large enough, else several, the largest first. Return whether the freed
        bytes suffice. `stream` and `is_small` select the pool."""
        if self._max_split is None or self.expandable is not None:
            return False
        allocator = self._allocator
        pool = allocator.pools[stream][is_small]
        needed_bytes = max(size, self._max_split)
        index = pool.first_index(needed_bytes)
        if index < len(pool.keys):
            allocator.release(pool.pop(index))
            return True
        released_bytes = 0
        while pool.keys and released_bytes < needed_bytes:
            largest = pool.by_key[pool.keys[-1]]
            if largest.num_bytes < self._max_split:
                break
            released_bytes += largest.num_bytes
            pool.discard(largest)
            allocator.release(largest)
        return released_bytes >= needed_bytes

    def layout(self) -> tuple[object, ...]:
        """Return a value to compare: what decides later addresses, besides the free blocks."""
        if self.collects:
            return (object(),)  # ages differ, so two states never compare equal
        return () if self.expandable is None else self.expandable.layout()
