"""Blocks, their pools and sizes, and the addresses of segments."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TypeVar

from memest.units import round_up

ROUND_BYTES = 512  # `kMinBlockSize`: every request is rounded up to a multiple of it
SMALL_REQUEST_BYTES = 1 << 20  # `kSmallSize`: requests up to it come from the small pool
FIRST_PRIVATE_POOL = 1 << 20  # first of the private pools, whose segments stay with a CUDA graph
SMALL_SEGMENT_BYTES = 2 << 20  # `kSmallBuffer`: the segments of the small pool
LARGE_SEGMENT_BYTES = 20 << 20  # `kLargeBuffer`: for requests below `MIN_OWN_SEGMENT_BYTES`
MIN_OWN_SEGMENT_BYTES = 10 << 20  # `kMinLargeAlloc`: from here a request has its own segment
SEGMENT_ROUND_BYTES = 2 << 20  # `kRoundLarge`: own segments are rounded up to a multiple of it


@dataclass(eq=False, slots=True)
class Block:
    """Part of a segment, which is the memory of one `cudaMalloc`; allocated or free."""

    address: int
    num_bytes: int
    is_small: bool  # True in a small pool
    is_free: bool = False
    previous: "Block | None" = None  # adjacent block before it in its segment
    next: "Block | None" = None  # adjacent block after it
    stream: int = 0  # stream, or private pool of a CUDA graph, to which it belongs
    requested_bytes: int = field(init=False, repr=False)
    """Requested bytes; set by allocators whose history is recorded."""


AnyBlock = TypeVar("AnyBlock", bound=Block)


def round_request(num_bytes: int) -> int:
    """Return the bytes of the block for a request of `num_bytes`: a multiple of 512.

    >>> round_request(1), round_request(512), round_request(513)
    (512, 512, 1024)
    """
    return max(ROUND_BYTES, round_up(num_bytes, ROUND_BYTES))


def segment_bytes(block_bytes: int, large_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Return the bytes of a new segment for a block of `block_bytes`, a rounded request.

    Segments of blocks between 1 and 10 MiB have `large_bytes`.

    >>> [segment_bytes(size) >> 20 for size in (512, 3 << 20, (10 << 20) + 512)]
    [2, 20, 12]
    """
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_OWN_SEGMENT_BYTES:
        return large_bytes
    return round_up(block_bytes, SEGMENT_ROUND_BYTES)


def link(block: Block) -> None:
    """Set `block` as the `next` of its `previous` block, and as the `previous` of its `next`."""
    if block.previous is not None:
        block.previous.next = block
    if block.next is not None:
        block.next.previous = block


def new_linked(
    kind: type[AnyBlock], like: Block, address: int, num_bytes: int,
    previous: Block | None, following: Block | None,
) -> AnyBlock:  # fmt: skip
    """Return a new block of class `kind`, linked to the blocks before and after it (None: no
    block). It is in the segment of `like`."""
    is_free = kind is Block
    block = kind(address, num_bytes, like.is_small, is_free, previous, following, like.stream)
    link(block)
    return block


def merge(block: Block, neighbour: Block) -> None:
    """Extend `block` by the adjacent block `neighbour`, on either side."""
    if block.previous is neighbour:
        block.address, block.previous = neighbour.address, neighbour.previous
    else:
        block.next = neighbour.next
    block.num_bytes += neighbour.num_bytes
    link(block)


ADDRESS_BITS = 48  # bits for the address in a key of `FreeBlocks`; GPU addresses are below 2**47


class FreeBlocks:
    """Free blocks of one pool in the order in which the allocator searches: by size, then address.
    `keys` is a sorted list of integers that pack both; `by_key` has the block of each key."""

    __slots__ = ("by_key", "keys")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.by_key: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Add `block`, which is free."""
        key = block.num_bytes << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.by_key[key] = block

    def discard(self, block: Block) -> None:
        """Remove `block`, which is in the pool."""
        key = block.num_bytes << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.by_key[key]

    def first_index(self, num_bytes: int) -> int:
        """Return the index of the smallest block of at least `num_bytes`, at the lowest address."""
        return bisect_left(self.keys, num_bytes << ADDRESS_BITS)

    def pop(self, index: int) -> Block:
        """Remove and return the block at `index`."""
        return self.by_key.pop(self.keys.pop(index))


@dataclass(frozen=True, slots=True, order=True)
class _Hole:
    """Free addresses in a range that the driver has mapped; the range begins at `range_at`."""

    address: int
    num_bytes: int
    range_at: int


class AddressSpace:
    """Model of the addresses at which CUDA's driver maps segments of `cudaMalloc`.

    Measured on an H200 (driver 580.159, from the `segment_alloc` events of recorded runs):

    - A segment is placed at the lowest address with room in a mapped range. Free addresses in a
      mapped range are a hole.
    - Without room, a segment gets a new range, of a multiple of 32 MiB, below the others.
    - A range without segments is unmapped. Its addresses become a gap, which can serve a new range.
      The highest gap with room serves first. A range that is unmapped before the first kernel
      leaves no gap, since the process maps libraries at its addresses.
    - On several GPUs (`ranges_stay`) ranges stay mapped. The hole of a freed segment is then not
      merged with adjacent holes. So two adjacent holes of 32 MiB cannot serve a segment of 64 MiB.
      This describes the order of addresses best (15 % of pairs wrong in 55 recordings of four GPUs,
      else 20 %).
    - The driver maps two ranges when it creates the context. In the upper range, `CONTEXT_ROOM`
      bytes are free for segments. In the lower range, the driver uses `FIRST_BYTES` for itself, and
      `FIRST_ROOM` bytes are free for segments.

    Measured on an H100 with torch 2.11.0+cu130, from the holes after each of 45 operators:

    - The first kernel takes `CODE_BYTES`. The driver then maps a new range: `LATER_BYTES` for
      itself, and `LATER_ROOM` bytes that are free for segments. The driver frees the `FIRST_BYTES`
      in the older range, which segments can use from then on.
    - Each handle of cuBLAS takes `HANDLE_BYTES`. The first handle takes `LIBRARY_BYTES` in
      addition. Each later handle takes `CODE_BYTES` in addition. Recorded scripts have a space of
      `LIBRARY_BYTES` between segments; what takes it was not found. Of the sizes 2 and 12 MiB for
      this space, 12 MiB gives the order of addresses of 60 recordings best.

    Only the order of addresses matters here, and only between blocks of one size. Left out are
    kernels that are loaded later, libraries other than cuBLAS, and gaps that freed weights in host
    memory leave.
    """

    RANGE_BYTES = 32 << 20
    CONTEXT_ROOM = 24 << 20
    FIRST_BYTES, FIRST_ROOM = 414 << 20, 2 << 20
    CODE_BYTES = 2 << 20
    LATER_BYTES, LATER_ROOM = 506 << 20, 6 << 20
    HANDLE_BYTES, LIBRARY_BYTES = 64 << 20, 12 << 20

    def __init__(self, *, ranges_stay: bool = False) -> None:
        self._ranges_stay = ranges_stay
        self._lowest = 1 << 47  # address of the lowest range; GPU addresses are below 2**47
        self._holes: list[_Hole] = []  # by address
        self._most_room = 0  # upper bound of the bytes of a hole: takes may have shrunk the largest
        self._range_of_segment: dict[int, int] = {}  # by address; ranges by their beginning
        self._num_segments: dict[int, int] = {}  # by range
        self._range_ends: dict[int, int] = {}  # of ranges, by their beginning
        self._gaps: list[tuple[int, int]] = []  # (begin, end) between ranges, in no order
        self._has_kernels = self._has_handle = False
        self._map_for_driver(self.RANGE_BYTES - self.CONTEXT_ROOM, self.CONTEXT_ROOM)
        self._first_range = self._map_for_driver(self.FIRST_BYTES, self.FIRST_ROOM)

    def load_first_kernel(self) -> None:
        """Map and free memory as the driver does for itself at a process's first kernel."""
        self.take(self.CODE_BYTES)
        self._map_for_driver(self.LATER_BYTES, self.LATER_ROOM)
        self.give_back(self._first_range, self.FIRST_BYTES)
        self._has_kernels = True

    def create_cublas_handle(self) -> None:
        """Map memory for a handle of cuBLAS; with the first handle, also for the library."""
        self.take(self.HANDLE_BYTES)
        self.take(self.CODE_BYTES if self._has_handle else self.LIBRARY_BYTES)
        self._has_handle = True

    def _map_for_driver(self, num_bytes: int, room: int) -> int:
        """Map a range: `num_bytes` for the driver, then `room` free bytes. Return its address."""
        hole = self._map(num_bytes + room)
        self._range_of_segment[hole.address] = hole.range_at
        self._num_segments[hole.range_at] = 1
        if room:
            self._add_hole(_Hole(hole.address + num_bytes, room, hole.range_at))
        return hole.address

    def take(self, num_bytes: int) -> int:
        """Place a new segment of `num_bytes`, and return its address."""
        hole = self._pop_lowest_hole(num_bytes)
        if hole is None:
            hole = self._map(num_bytes)
        remaining = hole.num_bytes - num_bytes
        if remaining:
            self._add_hole(_Hole(hole.address + num_bytes, remaining, hole.range_at))
        self._range_of_segment[hole.address] = hole.range_at
        self._num_segments[hole.range_at] += 1
        return hole.address

    def give_back(self, address: int, num_bytes: int) -> None:
        """Free a segment's `num_bytes` at `address`; unmap an empty range unless `ranges_stay`."""
        range_at = self._range_of_segment.pop(address)
        self._num_segments[range_at] -= 1
        if self._ranges_stay:
            self._add_hole(_Hole(address, num_bytes, range_at))
            return
        if not self._num_segments[range_at]:
            self._unmap(range_at)
            self._holes = [hole for hole in self._holes if hole.range_at != range_at]
            return
        for hole in [hole for hole in self._holes if hole.range_at == range_at]:
            if hole.address in (address + num_bytes, address - hole.num_bytes):
                self._holes.remove(hole)
                address, num_bytes = min(address, hole.address), num_bytes + hole.num_bytes
        self._add_hole(_Hole(address, num_bytes, range_at))

    def _pop_lowest_hole(self, num_bytes: int) -> _Hole | None:
        """Remove and return the hole of at least `num_bytes` at the lowest address, or None."""
        if num_bytes > self._most_room:
            return None
        for index, hole in enumerate(self._holes):
            if hole.num_bytes >= num_bytes:
                return self._holes.pop(index)
        self._most_room = max((hole.num_bytes for hole in self._holes), default=0)
        return None

    def _map(self, num_bytes: int) -> _Hole:
        """Map a new range of at least `num_bytes` of addresses; return it as one hole."""
        span = round_up(num_bytes, self.RANGE_BYTES)
        fitting = [(begin, end) for begin, end in self._gaps if end - begin >= span]
        if fitting:
            begin, end = max(fitting)  # the highest; its upper part becomes the range
            self._gaps.remove((begin, end))
            address = end - span
            if begin < address:
                self._gaps.append((begin, address))
        else:
            address = self._lowest = self._lowest - span
        self._range_ends[address] = address + span
        self._num_segments[address] = 0
        return _Hole(address, span, address)

    def _unmap(self, range_at: int) -> None:
        """Unmap the range at `range_at`. The addresses of the range become a gap for new ranges,
        merged with adjacent gaps. Two ranges make no gap: one that is unmapped before the first
        kernel, and the one in which the driver uses `FIRST_BYTES`."""
        begin, end = range_at, self._range_ends.pop(range_at)
        del self._num_segments[range_at]
        if range_at == self._first_range or not self._has_kernels:
            return
        adjacent = [(low, high) for low, high in self._gaps if high == begin or low == end]
        for low, high in adjacent:
            self._gaps.remove((low, high))
            begin, end = min(begin, low), max(end, high)
        self._gaps.append((begin, end))

    def _add_hole(self, hole: _Hole) -> None:
        insort(self._holes, hole)
        self._most_room = max(self._most_room, hole.num_bytes)
