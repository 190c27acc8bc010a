"""Where the driver puts segments: addresses break ties between equal blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class _Hole:
    """Room in a mapped range."""

    address: int
    num_bytes: int
    range_at: int


class AddressSpace:
    """Where the driver maps what `cudaMalloc` returns.

    Measured on an H200 (driver 580.159, from the `segment_alloc` events of recorded runs):

    - a segment goes where there is room for it in a range that is mapped, at the lowest address;
    - where there is none it takes a new range, of a multiple of 32 MiB, below the others;
    - a range without segments is unmapped, and its addresses do not come back;
    - where several GPUs work together (`ranges_stay`), ranges stay, and what a freed segment leaves
      takes one that fits into it, not into it and what is free beside it. This describes the order
      of addresses best (15 % of pairs wrong in 55 recordings of four GPUs, else 20 %), and no more;
    - above all lie two ranges of the context, which leave `CONTEXT_ROOM` and are never unmapped.

    Only the order of addresses matters here, and only between blocks of one size. Left out is what
    libraries map beside: they take room in some ranges, and while a model is loaded the system
    hands out 384 MiB above its first segments that something else has let go of.
    """

    RANGE_BYTES = 32 << 20
    CONTEXT_ROOM = (24 << 20, 2 << 20)
    """What is free at the ends of the context's ranges, from the highest address down."""

    def __init__(self, *, ranges_stay: bool = False) -> None:
        self._ranges_stay = ranges_stay
        self._lowest = 1 << 47
        self._holes: list[_Hole] = []  # by address
        self._most_room = 0  # no hole has more; the largest may have less
        self._range_of: dict[int, int] = {}  # by the address of a segment
        self._num_segments: dict[int, int] = {}  # by range
        for room in self.CONTEXT_ROOM:
            context = self._map(self.RANGE_BYTES)
            self._num_segments[context.range_at] = 1
            start = context.address + context.num_bytes - room
            self._add_hole(_Hole(start, room, context.range_at))

    def take(self, num_bytes: int) -> int:
        """The address of a new segment of `num_bytes`."""
        hole = self._lowest_hole(num_bytes) or self._map(num_bytes)
        rest = hole.num_bytes - num_bytes
        if rest:
            self._add_hole(_Hole(hole.address + num_bytes, rest, hole.range_at))
        self._range_of[hole.address] = hole.range_at
        self._num_segments[hole.range_at] += 1
        return hole.address

    def give_back(self, address: int, num_bytes: int) -> None:
        """A segment returned by `cudaFree`; its range serves others while one lies in it."""
        range_at = self._range_of.pop(address)
        self._num_segments[range_at] -= 1
        if self._ranges_stay:
            self._add_hole(_Hole(address, num_bytes, range_at))
            return
        if not self._num_segments[range_at]:
            del self._num_segments[range_at]
            self._holes = [hole for hole in self._holes if hole.range_at != range_at]
            return
        for hole in [hole for hole in self._holes if hole.range_at == range_at]:
            if hole.address in (address + num_bytes, address - hole.num_bytes):
                del self._holes[bisect_left(self._holes, hole)]
                address, num_bytes = min(address, hole.address), num_bytes + hole.num_bytes
        self._add_hole(_Hole(address, num_bytes, range_at))

    def mapped(self, address: int, num_bytes: int) -> None:
        """Memory was mapped to addresses of an expandable segment; for those who record."""

    def unmapped(self, address: int, num_bytes: int) -> None:
        """Such memory was taken away again."""

    def _lowest_hole(self, num_bytes: int) -> _Hole | None:
        """The hole that a segment goes into, taken out of the list."""
        if num_bytes > self._most_room:
            return None
        for index, hole in enumerate(self._holes):
            if hole.num_bytes >= num_bytes:
                return self._holes.pop(index)
        self._most_room = max((hole.num_bytes for hole in self._holes), default=0)
        return None

    def _map(self, num_bytes: int) -> _Hole:
        """A new range, which is a hole from end to end."""
        span = -(-num_bytes // self.RANGE_BYTES) * self.RANGE_BYTES
        self._lowest -= span
        self._num_segments[self._lowest] = 0
        return _Hole(self._lowest, span, self._lowest)

    def _add_hole(self, hole: _Hole) -> None:
        insort(self._holes, hole)
        self._most_room = max(self._most_room, hole.num_bytes)
