"""Effects of the allocator's settings: how it rounds, searches, splits, grows and frees.

Mirrors `c10/cuda/CUDACachingAllocator.cpp`, torch 2.11: `round_size`, `get_free_block`,
`should_split`, `garbage_collect_cached_blocks`, `release_available_cached_blocks`.
`CachingAllocator` calls it only where a setting is not the default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from memest.estimator.allocator.blocks import (
    ADDRESS_BITS,
    MIN_OWN_SEGMENT_BYTES,
    ROUND_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    FreeBlocks,
    round_request,
    segment_bytes,
)
from memest.estimator.allocator.settings import AllocatorSettings
from memest.units import round_up

if TYPE_CHECKING:
    from memest.estimator.allocator.caching import CachingAllocator

HIGHEST_ADDRESS = 1 << 46
"""Highest address of expandable ranges."""

MOST_RANGE_BYTES = 1 << 41
"""Size of a range on an unlimited GPU."""


_ADDRESS = attrgetter("address")


class Unmapped(Block):
    """Part of an expandable range without mapped memory."""

    __slots__ = ()


Made = TypeVar("Made", bound=Block)


class ExpandableSegments:
    """Expandable segments of one allocator, which grow by pieces of `large_bytes` in the large
    pool.
    """

    def __init__(self, allocator: CachingAllocator, large_bytes: int) -> None:
        self._allocator = allocator
        self._piece_bytes = (large_bytes, SMALL_SEGMENT_BYTES)
        self._unmapped: dict[tuple[int, bool], list[Unmapped]] = {}
        self._lowest = HIGHEST_ADDRESS

    def best(self, pool: FreeBlocks, index: int) -> int:
        """Return the index in `pool` of the block to take, searching from the smallest large
        enough.

        A block before unmapped addresses counts with the size to which it can grow.
        """
        keys, by_key = pool.keys, pool.by_key
        size = _size_if_grown(by_key[keys[index]])
        while index + 1 < len(keys):
            following = _size_if_grown(by_key[keys[index + 1]])
            if following >= size:
                break
            index, size = index + 1, following
        return index

    def grow(self, size: int, is_small: bool, stream: int) -> Block | None:
        """Map memory for a block of at least `size`; return it, taken out of its pool.

        None where the GPU has no memory left; pieces mapped until then stay mapped.
        """
        block = self._place_for(size, is_small, stream)
        if isinstance(block, Unmapped):
            mapped = self._map(block, min(block.num_bytes, size))
            if mapped is None:
                return None
            block = mapped
        while block.num_bytes < size:
            following = block.next
            assert isinstance(following, Unmapped)
            mapped = self._map(following, min(size - block.num_bytes, following.num_bytes))
            if mapped is None:
                return None
            block = mapped
        self._pool(block).discard(block)
        return block

    def give_back(self) -> None:
        """Unmap every piece without live blocks."""
        for is_small in (False, True):
            for stream in sorted(self._allocator.streams):
                pool = self._allocator.pools_of(stream)[is_small]
                for block in [pool.by_key[key] for key in pool.keys]:
                    self._unmap(block)

    def layout(self) -> tuple[object, ...]:
        """Return the unmapped addresses."""
        return tuple(
            (where, tuple((block.address, block.num_bytes) for block in blocks))
            for where, blocks in self._unmapped.items()
        )

    def _place_for(self, size: int, is_small: bool, stream: int) -> Block:
        """Return the first block of the lowest free addresses that hold `size`, mapped or not."""
        for block in self._unmapped.get((stream, is_small), ()):
            before = block.previous
            start: Block = before if before is not None and before.is_free else block
            if _has_room(start, size):
                return start
        return self._new_range(is_small, stream)

    def _new_range(self, is_small: bool, stream: int) -> Unmapped:
        """Reserve addresses for 9/8 of the GPU's memory, as `ExpandableSegment` does."""
        piece = self._piece_bytes[is_small]
        total = self._allocator.gpu_bytes
        room = MOST_RANGE_BYTES if total is None else min(total * 9 // 8, MOST_RANGE_BYTES)
        num_bytes = round_up(room, piece)
        self._lowest = (self._lowest - num_bytes) // piece * piece
        block = Unmapped(self._lowest, num_bytes, is_small, stream=stream)
        self._add_unmapped(block)
        return block

    def _map(self, block: Unmapped, size: int) -> Block | None:
        """Map memory at the beginning of `block` and merge it with free neighbours."""
        piece = self._piece_bytes[block.is_small]
        num_bytes = round_up(size, piece)
        if not self._allocator.has_room_for(num_bytes):
            return None
        self._remove_unmapped(block)
        mapped = _linked(Block, block, block.address, num_bytes, block.previous, block.next)
        if num_bytes < block.num_bytes:
            end, size = block.address + num_bytes, block.num_bytes - num_bytes
            self._add_unmapped(_linked(Unmapped, block, end, size, mapped, block.next))
        address = mapped.address
        for other in (mapped.previous, mapped.next):
            if other is not None and other.is_free:
                self._pool(other).discard(other)
                _merge(mapped, other)
        self._pool(mapped).insert(mapped)
        self._allocator.mapped(address, num_bytes, mapped)
        return mapped

    def _unmap(self, block: Block) -> None:
        """Unmap the pieces that a free block covers."""
        piece = self._piece_bytes[block.is_small]
        begin = round_up(block.address, piece)
        end = (block.address + block.num_bytes) // piece * piece
        if begin >= end:
            return
        self._pool(block).discard(block)
        gone = _linked(Unmapped, block, begin, end - begin, block.previous, block.next)
        before, after = begin - block.address, block.address + block.num_bytes - end
        for num_bytes, address in ((before, block.address), (after, end)):
            if num_bytes:
                self._keep(num_bytes, address, gone)
        for other in (gone.previous, gone.next):
            if isinstance(other, Unmapped):
                self._remove_unmapped(other)
                _merge(gone, other)
        if gone.previous is not None or gone.next is not None:  # else nothing of the range is left
            self._add_unmapped(gone)
        self._allocator.unmapped(begin, end - begin, gone)

    def _keep(self, num_bytes: int, address: int, gone: Unmapped) -> None:
        """Insert the part of a free block that shares its piece with a live one, next to `gone`."""
        around = (gone.previous, gone) if address < gone.address else (gone, gone.next)
        kept = _linked(Block, gone, address, num_bytes, *around)
        self._pool(kept).insert(kept)

    def _pool(self, block: Block) -> FreeBlocks:
        return self._allocator.pools_of(block.stream)[block.is_small]

    def _add_unmapped(self, block: Unmapped) -> None:
        blocks = self._unmapped.setdefault((block.stream, block.is_small), [])
        insort(blocks, block, key=_ADDRESS)

    def _remove_unmapped(self, block: Unmapped) -> None:
        blocks = self._unmapped[block.stream, block.is_small]
        del blocks[bisect_left(blocks, block.address, key=_ADDRESS)]


def _size_if_grown(block: Block) -> int:
    following = block.next
    return block.num_bytes + (following.num_bytes if isinstance(following, Unmapped) else 0)


def _has_room(block: Block, size: int) -> bool:
    """Return whether `size` fits from `block` on into free or unmapped addresses."""
    room, at = 0, block
    while room < size:
        if not (at.is_free or isinstance(at, Unmapped)):
            return False
        room += at.num_bytes
        if at.next is None:
            break
        at = at.next
    return room >= size


def _linked(
    kind: type[Made], like: Block, address: int, num_bytes: int,
    previous: Block | None, following: Block | None,
) -> Made:  # fmt: skip
    """Make a free or unmapped block in the range of `like`, linked to its neighbours."""
    is_free = kind is not Unmapped
    made = kind(address, num_bytes, like.is_small, is_free, previous, following, like.stream)
    _link(made)
    return made


def _link(block: Block) -> None:
    """Link the neighbours of `block` to it."""
    if block.previous is not None:
        block.previous.next = block
    if block.next is not None:
        block.next.previous = block


def _merge(block: Block, other: Block) -> None:
    """Merge a neighbour into `block`."""
    if block.previous is other:
        block.address, block.previous = other.address, other.previous
    else:
        block.next = other.next
    block.num_bytes += other.num_bytes
    _link(block)


class Tuning:
    """Settings of one allocator that are not all default."""

    def __init__(self, allocator: CachingAllocator, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.expandable = (
            ExpandableSegments(allocator, settings.large_segment_bytes)
            if settings.expandable_segments
            else None
        )
        self._allocator = allocator
        self._max_split = settings.max_split_bytes
        self._num_searches = [0, 0]  # `get_free_blocks_call_count`, by size of the pool
        self._inserted_at: dict[int, int] = {}  # by the identity of a block that is free

    # --- sizes

    def rounded(self, num_bytes: int) -> int:
        """Return the block size that serves a request."""
        if num_bytes < ROUND_BYTES:
            return ROUND_BYTES
        divisions = self.settings.roundup_divisions_of(num_bytes)
        if divisions <= 1 or num_bytes <= ROUND_BYTES * divisions:
            return round_request(num_bytes)
        floor = 1 << (num_bytes.bit_length() - 1)
        if num_bytes == floor:
            return num_bytes
        step = floor // divisions
        return round_up(num_bytes, step)

    def segment_bytes(self, block_bytes: int) -> int:
        """Return the size of a segment of `cudaMalloc`."""
        if SMALL_REQUEST_BYTES < block_bytes < MIN_OWN_SEGMENT_BYTES:
            return self.settings.large_segment_bytes
        return segment_bytes(block_bytes)

    # --- a request

    def malloc(self, num_bytes: int, stream: int) -> Block:
        """Serve a request; see `CachingAllocator.malloc`."""
        allocator = self._allocator
        size = self.rounded(num_bytes)
        is_small = size <= SMALL_REQUEST_BYTES
        pool = allocator.pools_of(stream)[is_small]
        if self.collects:
            self._num_searches[is_small] += 1
        block = self._found(pool, size)
        if block is None:
            if self.collects:
                self._collect()
            block = allocator.new_segment(num_bytes, size, is_small, stream)
        remaining = block.num_bytes - size
        if self._splits(size, remaining, is_small):
            rest = Block(block.address + size, remaining, is_small, True, block, block.next, stream)
            _link(rest)
            block.num_bytes = size
            pool.insert(rest)
            self.inserted(rest)
        block.is_free = False
        return block

    def _found(self, pool: FreeBlocks, size: int) -> Block | None:
        """Remove and return the free block that serves a request of `size`."""
        index = bisect_left(pool.keys, size << ADDRESS_BITS)
        if index == len(pool.keys):
            return None
        if self.expandable is not None:
            index = self.expandable.best(pool, index)
        key = pool.keys[index]
        found = key >> ADDRESS_BITS
        if self._max_split is not None:
            if size < self._max_split <= found:
                return None  # an oversize block is kept for large requests
            spare = self.settings.max_non_split_rounding_bytes
            if size >= self._max_split and found >= size + spare:
                return None
        del pool.keys[index]
        return pool.by_key.pop(key)

    def _splits(self, size: int, remaining: int, is_small: bool) -> bool:
        if is_small or self.expandable is not None:
            return remaining >= ROUND_BYTES
        if self._max_split is not None and size >= self._max_split:
            return False
        return remaining > SMALL_REQUEST_BYTES

    # --- freeing

    @property
    def collects(self) -> bool:
        """True if old segments are freed: a threshold is set, and a share of the GPU is allowed."""
        return (
            self.settings.garbage_collection_threshold > 0
            and self._allocator.allowed_bytes is not None
        )

    def inserted(self, block: Block) -> None:
        """Note when `block` was inserted into its pool."""
        if self.settings.garbage_collection_threshold:
            self._inserted_at[id(block)] = self._num_searches[block.is_small]

    def _collect(self) -> None:
        """Free the unsplit large segments that were idle longest."""
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
        """Free one oversize block that is large enough, or as many as are needed together.

        Return whether that was enough for a request of `size`.
        """
        if self._max_split is None:
            return False
        allocator = self._allocator
        pool = allocator.pools_of(stream)[is_small]
        wanted = max(size, self._max_split)
        index = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if index < len(pool.keys) and self.expandable is None:
            block = pool.by_key[pool.keys[index]]
            pool.discard(block)
            allocator.release(block)
            return True
        released = 0
        for block in [pool.by_key[key] for key in reversed(pool.keys)]:
            if released >= wanted or block.num_bytes < self._max_split:
                break
            if self.expandable is None:
                released += block.num_bytes
                pool.discard(block)
                allocator.release(block)
        return released >= wanted

    def layout(self) -> tuple[object, ...]:
        """Return the state that decides future addresses besides live and free blocks."""
        if self.collects:
            return (object(),)  # ages differ, so two states never compare equal
        return () if self.expandable is None else self.expandable.layout()
