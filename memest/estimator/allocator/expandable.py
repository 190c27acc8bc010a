"""Expandable segments: ranges of addresses in which memory is mapped and unmapped by pieces.

Mirrors `ExpandableSegment`, `try_allocate_expandable_block`, `map_block` and `unmap_block` of
`c10/cuda/CUDACachingAllocator.cpp`, torch 2.11. The blocks of a range are linked like those of a
segment; `Unmapped` ones have addresses without memory.
"""

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from memest.estimator.allocator import blocks
from memest.estimator.allocator.blocks import Block, FreeBlocks, merge, new_linked
from memest.units import round_up

if TYPE_CHECKING:
    from memest.estimator.allocator.caching import CachingAllocator

HIGHEST_ADDRESS = 1 << 46  # highest address of expandable ranges
MOST_RANGE_BYTES = 1 << 41  # size of a range on an unlimited GPU
_ADDRESS = attrgetter("address")


class Unmapped(Block):
    """Addresses of an expandable segment to which no memory is mapped, as a block."""

    __slots__ = ()


class ExpandableSegments:
    """Expandable segments of `allocator`, which map and unmap their memory in pieces. A piece of a
    large pool has `large_bytes`, one of a small pool 2 MiB."""

    def __init__(self, allocator: "CachingAllocator", large_bytes: int) -> None:
        self._allocator = allocator
        self._piece_bytes = (large_bytes, blocks.SMALL_SEGMENT_BYTES)  # indexed by `is_small`
        self._unmapped: dict[tuple[int, bool], list[Unmapped]] = {}  # by stream and `is_small`
        self._lowest = HIGHEST_ADDRESS  # address of the lowest range

    def best_index(self, pool: FreeBlocks, index: int) -> int:
        """Return the index of the block of `pool` that serves a request. The block at `index` is
        the smallest that is large enough. Compare it with the next block. Both sizes include the
        unmapped bytes directly after the block (`_size_if_grown`). While the next block is smaller,
        go on to the next block."""
        keys, by_key = pool.keys, pool.by_key
        size = _size_if_grown(by_key[keys[index]])
        while index + 1 < len(keys):
            following = _size_if_grown(by_key[keys[index + 1]])
            if following >= size:
                break
            index, size = index + 1, following
        return index

    def grow(self, size: int, is_small: bool, stream: int) -> Block | None:
        """Map memory for a free block of at least `size` bytes; return the block, which is in no
        pool. It is in the segment of `stream` for small or large blocks (`is_small`). Return None
        if the GPU has no memory left; pieces mapped until then stay mapped."""
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
        """Unmap every piece that is entirely free."""
        for is_small in (False, True):
            for stream in sorted(self._allocator.pools):
                pool = self._allocator.pools[stream][is_small]
                for block in [pool.by_key[key] for key in pool.keys]:
                    self._unmap(block)

    def layout(self) -> tuple[object, ...]:
        """Return the unmapped blocks, to compare two states of the allocator. The result has an
        entry for the large and for the small segments of each stream: ((stream, `is_small`),
        gaps). `gaps` has (address, bytes) of each unmapped block in these segments."""
        return tuple(
            (pool_key, tuple((gap.address, gap.num_bytes) for gap in gaps))
            for pool_key, gaps in self._unmapped.items()
        )

    def _place_for(self, size: int, is_small: bool, stream: int) -> Block:
        """Return the lowest block from which `size` bytes are free or unmapped, in the segment of
        `stream` and `is_small`. If there is none, return an unmapped block in a new range."""
        for block in self._unmapped.get((stream, is_small), ()):
            previous = block.previous
            start: Block = previous if previous is not None and previous.is_free else block
            if _has_room(start, size):
                return start
        return self._new_range(is_small, stream)

    def _new_range(self, is_small: bool, stream: int) -> Unmapped:
        """Return addresses of a new segment: 9/8 of the GPU's memory, as `ExpandableSegment`."""
        piece = self._piece_bytes[is_small]
        total = self._allocator.gpu_bytes
        room = MOST_RANGE_BYTES if total is None else min(total * 9 // 8, MOST_RANGE_BYTES)
        num_bytes = round_up(room, piece)
        self._lowest = (self._lowest - num_bytes) // piece * piece
        unmapped = Unmapped(self._lowest, num_bytes, is_small, stream=stream)
        self._add_unmapped(unmapped)
        return unmapped

    def _map(self, block: Unmapped, size: int) -> Block | None:
        """Map `size` bytes, in whole pieces, at the start of `block`. Return the mapped block,
        merged with free neighbours; None if the GPU has no memory left."""
        piece = self._piece_bytes[block.is_small]
        num_bytes = round_up(size, piece)
        gpu_bytes = self._allocator.gpu_bytes
        if gpu_bytes is not None and self._allocator.reserved_bytes + num_bytes > gpu_bytes:
            return None
        self._remove_unmapped(block)
        mapped = new_linked(Block, block, block.address, num_bytes, block.previous, block.next)
        if num_bytes < block.num_bytes:
            end, rest = block.address + num_bytes, block.num_bytes - num_bytes
            self._add_unmapped(new_linked(Unmapped, block, end, rest, mapped, block.next))
        address = mapped.address  # `merge` below may lower it
        for neighbour in (mapped.previous, mapped.next):
            if neighbour is not None and neighbour.is_free:
                self._pool(neighbour).discard(neighbour)
                merge(mapped, neighbour)
        self._pool(mapped).insert(mapped)
        self._allocator.count_mapped(address, num_bytes, mapped)
        return mapped

    def _unmap(self, block: Block) -> None:
        """Unmap the pieces that are entirely within the free `block`."""
        piece = self._piece_bytes[block.is_small]
        begin = round_up(block.address, piece)
        end = (block.address + block.num_bytes) // piece * piece
        if begin >= end:
            return
        self._pool(block).discard(block)
        gap = new_linked(Unmapped, block, begin, end - begin, block.previous, block.next)
        head_bytes, tail_bytes = begin - block.address, block.address + block.num_bytes - end
        if head_bytes:  # this part of the block stays mapped, as does the one behind
            mapped = new_linked(Block, gap, block.address, head_bytes, gap.previous, gap)
            self._pool(mapped).insert(mapped)
        if tail_bytes:
            mapped = new_linked(Block, gap, end, tail_bytes, gap, gap.next)
            self._pool(mapped).insert(mapped)
        for neighbour in (gap.previous, gap.next):
            if isinstance(neighbour, Unmapped):
                self._remove_unmapped(neighbour)
                merge(gap, neighbour)
        if gap.previous is not None or gap.next is not None:  # else nothing of the range is left
            self._add_unmapped(gap)
        self._allocator.count_unmapped(begin, end - begin, gap)

    def _pool(self, block: Block) -> FreeBlocks:
        return self._allocator.pools[block.stream][block.is_small]

    def _add_unmapped(self, block: Unmapped) -> None:
        gaps = self._unmapped.setdefault((block.stream, block.is_small), [])
        insort(gaps, block, key=_ADDRESS)

    def _remove_unmapped(self, block: Unmapped) -> None:
        gaps = self._unmapped[block.stream, block.is_small]
        del gaps[bisect_left(gaps, block.address, key=_ADDRESS)]


def _size_if_grown(block: Block) -> int:
    """Return the bytes of `block` and of unmapped addresses directly after it."""
    following = block.next
    return block.num_bytes + (following.num_bytes if isinstance(following, Unmapped) else 0)


def _has_room(block: Block, size: int) -> bool:
    """Return whether `block` and the free or unmapped blocks after it have `size` bytes or more."""
    room, current = 0, block
    while room < size:
        if not (current.is_free or isinstance(current, Unmapped)):
            return False
        room += current.num_bytes
        if current.next is None:
            break
        current = current.next
    return room >= size
