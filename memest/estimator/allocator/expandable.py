"""Expandable segments: addresses per pool and stream, to which memory is mapped as needed.

Mirrors `find_expandable_block`, `map_block`, `try_allocate_expandable_block` and `unmap_block` of
`c10/cuda/CUDACachingAllocator.cpp`, torch 2.11. Memory is mapped in pieces of 2 MiB in the small
pool and of 20 MiB in the large one. What is not mapped is an `Unmapped` block between the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from memest.estimator.allocator.blocks import (
    ADDRESS_BITS,
    SMALL_SEGMENT_BYTES,
    Block,
    FreeBlocks,
)

if TYPE_CHECKING:
    from memest.estimator.allocator.caching import CachingAllocator

HIGHEST_ADDRESS = 1 << 46
"""Ranges are laid below it. Where the driver lays them is not known, and does not matter: blocks of
two ranges are compared only after one range is full."""

MOST_RANGE_BYTES = 1 << 41
"""On a card without end."""


class Unmapped(Block):
    """Addresses of a range that have no memory."""

    __slots__ = ()


class ExpandableSegments:
    """The ranges of one allocator.

    Args:
        allocator: whose blocks lie in them.
        large_bytes: of a piece of memory in the large pool.
    """

    def __init__(self, allocator: CachingAllocator, large_bytes: int) -> None:
        self._allocator = allocator
        self._piece_bytes = (large_bytes, SMALL_SEGMENT_BYTES)
        self._unmapped: dict[tuple[int, bool], list[tuple[int, Unmapped]]] = {}
        self._lowest = HIGHEST_ADDRESS

    def best(self, pool: FreeBlocks, index: int) -> int:
        """The place in `pool` of the block to take, from the smallest that is large enough on.

        What lies before unmapped addresses counts as long as it could become.
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
        """A free block of at least `size`, taken out of its pool, for which memory was mapped.

        None where the card has none left; what was mapped until then stays.
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
        """Unmap every piece in which nothing lives."""
        for is_small in (False, True):
            for stream in sorted(self._allocator.streams):
                pool = self._allocator.pools_of(stream)[is_small]
                for block in [pool.by_key[key] for key in pool.keys]:
                    self._unmap(block)

    def layout(self) -> tuple[object, ...]:
        """The unmapped addresses."""
        return tuple(
            (where, tuple((address, block.num_bytes) for address, block in blocks))
            for where, blocks in self._unmapped.items()
        )

    def _place_for(self, size: int, is_small: bool, stream: int) -> Block:
        """The first block of the lowest free addresses that hold `size`, mapped or not."""
        for _, block in self._unmapped.get((stream, is_small), ()):
            before = block.previous
            start: Block = before if before is not None and before.is_free else block
            if _has_room(start, size):
                return start
        return self._new_range(is_small, stream)

    def _new_range(self, is_small: bool, stream: int) -> Unmapped:
        """Addresses for 9/8 of the card's memory, as `ExpandableSegment` reserves them."""
        piece = self._piece_bytes[is_small]
        total = self._allocator.card_bytes
        room = MOST_RANGE_BYTES if total is None else min(total * 9 // 8, MOST_RANGE_BYTES)
        num_bytes = -(-room // piece) * piece
        self._lowest = (self._lowest - num_bytes) // piece * piece
        block = Unmapped(self._lowest, num_bytes, is_small, stream=stream)
        self._add_unmapped(block)
        return block

    def _map(self, block: Unmapped, size: int) -> Block | None:
        """Memory at the beginning of `block`, joined with what is free beside it."""
        piece = self._piece_bytes[block.is_small]
        num_bytes = -(-size // piece) * piece
        if not self._allocator.has_room_for(num_bytes):
            return None
        self._remove_unmapped(block)
        mapped = Block(
            block.address, num_bytes, block.is_small, True, block.previous, block.next, block.stream
        )
        _link(mapped)
        if num_bytes < block.num_bytes:
            rest = Unmapped(
                block.address + num_bytes,
                block.num_bytes - num_bytes,
                block.is_small,
                False,
                mapped,
                block.next,
                block.stream,
            )
            _link(rest)
            self._add_unmapped(rest)
        address = mapped.address
        for other in (mapped.previous, mapped.next):
            if other is not None and other.is_free:
                self._pool(other).discard(other)
                _merge(mapped, other)
        self._insert(mapped)
        self._allocator.mapped(address, num_bytes, mapped)
        return mapped

    def _unmap(self, block: Block) -> None:
        """Take the memory of the pieces that a free block covers."""
        piece = self._piece_bytes[block.is_small]
        begin = -(-block.address // piece) * piece
        end = (block.address + block.num_bytes) // piece * piece
        if begin >= end:
            return
        self._pool(block).discard(block)
        gone = Unmapped(
            begin, end - begin, block.is_small, False, block.previous, block.next, block.stream
        )
        _link(gone)
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
        """The part of a free block that shares its piece with one that lives, beside `gone`."""
        is_before = address < gone.address
        kept = Block(
            address,
            num_bytes,
            gone.is_small,
            True,
            gone.previous if is_before else gone,
            gone if is_before else gone.next,
            gone.stream,
        )
        _link(kept)
        self._insert(kept)

    def _pool(self, block: Block) -> FreeBlocks:
        return self._allocator.pools_of(block.stream)[block.is_small]

    def _insert(self, block: Block) -> None:
        pool = self._pool(block)
        key = block.num_bytes << ADDRESS_BITS | block.address
        insort(pool.keys, key)
        pool.by_key[key] = block

    def _add_unmapped(self, block: Unmapped) -> None:
        blocks = self._unmapped.setdefault((block.stream, block.is_small), [])
        insort(blocks, (block.address, block), key=_address)

    def _remove_unmapped(self, block: Unmapped) -> None:
        blocks = self._unmapped[block.stream, block.is_small]
        del blocks[bisect_left(blocks, block.address, key=_address)]


def _address(entry: tuple[int, Unmapped]) -> int:
    return entry[0]


def _size_if_grown(block: Block) -> int:
    following = block.next
    return block.num_bytes + (following.num_bytes if isinstance(following, Unmapped) else 0)


def _has_room(block: Block, size: int) -> bool:
    """Whether `size` fits from `block` on into what is free or unmapped."""
    room, at = 0, block
    while room < size:
        if not (at.is_free or isinstance(at, Unmapped)):
            return False
        room += at.num_bytes
        if at.next is None:
            break
        at = at.next
    return room >= size


def _link(block: Block) -> None:
    """Let the neighbours that `block` names know it."""
    if block.previous is not None:
        block.previous.next = block
    if block.next is not None:
        block.next.previous = block


def _merge(block: Block, other: Block) -> None:
    """Take a neighbour into `block`."""
    if block.previous is other:
        block.address, block.previous = other.address, other.previous
    else:
        block.next = other.next
    block.num_bytes += other.num_bytes
    _link(block)
