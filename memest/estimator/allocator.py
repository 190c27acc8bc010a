"""CUDA's caching allocator, simulated: which requests share a segment, and what stays reserved.

Mirrors `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11 and 2.13) with its default settings: one
stream, no expandable segments, no `max_split_size_mb`, no garbage collection. Sizes and thresholds
are those of `c10/core/AllocatorConfig.h`; a test reads them from the installed headers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ROUND_BYTES = 512
"""`kMinBlockSize`: every request is rounded up to a multiple of it."""

SMALL_REQUEST_BYTES = 1 << 20
"""`kSmallSize`: requests up to it come from the small pool."""

SMALL_SEGMENT_BYTES = 2 << 20
"""`kSmallBuffer`: the segments of the small pool."""

LARGE_SEGMENT_BYTES = 20 << 20
"""`kLargeBuffer`: the segment fetched for a large request below `MIN_OWN_SEGMENT_BYTES`."""

MIN_OWN_SEGMENT_BYTES = 10 << 20
"""`kMinLargeAlloc`: from here on a request gets a segment of its own size."""

SEGMENT_ROUND_BYTES = 2 << 20
"""`kRoundLarge`: own segments are rounded up to a multiple of it."""


class OutOfMemory(Exception):
    """The simulated `cudaMalloc` failed even after every cached segment was given back."""

    def __init__(self, request_bytes: int) -> None:
        super().__init__(f"a request of {request_bytes} bytes")
        self.request_bytes = request_bytes


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment; neighbours are linked in address order."""

    address: int
    num_bytes: int
    is_small: bool
    is_free: bool = False
    previous: Block | None = None
    next: Block | None = None


def round_request(num_bytes: int) -> int:
    """The block size that serves a request.

    >>> round_request(1), round_request(512), round_request(513)
    (512, 512, 1024)
    """
    return max(ROUND_BYTES, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES)


def segment_bytes(block_bytes: int) -> int:
    """The segment that `cudaMalloc` is asked for when no cached block serves a rounded request.

    >>> [segment_bytes(size) >> 20 for size in (512, 3 << 20, (10 << 20) + 512)]
    [2, 20, 12]
    """
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


class FreeBlocks:
    """The free blocks of one pool in the order of the allocator's search: by size, then address."""

    __slots__ = ("_blocks", "_keys")

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Make `block` findable."""
        insort(self._keys, (block.num_bytes, block.address))
        self._blocks[block.address] = block

    def discard(self, block: Block) -> None:
        """Take `block` out, which is in the pool."""
        del self._keys[bisect_left(self._keys, (block.num_bytes, block.address))]
        del self._blocks[block.address]

    def take_best_fit(self, num_bytes: int) -> Block | None:
        """Remove and return the smallest block of at least `num_bytes`; lowest address first."""
        index = bisect_left(self._keys, (num_bytes, -1))
        if index == len(self._keys):
            return None
        return self._blocks.pop(self._keys.pop(index)[1])

    def keys(self) -> list[tuple[int, int]]:
        """Size and address of every block, in the order of the search."""
        return self._keys

    def blocks(self) -> list[Block]:
        """Every block, in no order."""
        return list(self._blocks.values())


class CachingAllocator:
    """One GPU's allocator.

    Args:
        limit_bytes: what `cudaMalloc` can hand out in total: the card's memory less its context, or
            the cap of `set_per_process_memory_fraction`; None is a card without end.
        addresses: where `cudaMalloc` puts segments; the order of addresses breaks ties between
            equal blocks.
    """

    def __init__(self, limit_bytes: int | None = None, addresses: AddressSpace | None = None):
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._pools = (FreeBlocks(), FreeBlocks())
        self._addresses = addresses or AddressSpace()

    def malloc(self, num_bytes: int) -> Block:
        """A block for a request of `num_bytes`.

        Raises:
            OutOfMemory: no block is free and the limit leaves no room for a segment.
        """
        size = -(-num_bytes // ROUND_BYTES) * ROUND_BYTES or ROUND_BYTES
        is_small = size <= SMALL_REQUEST_BYTES
        pool = self._pools[is_small]
        block = pool.take_best_fit(size)
        if block is None:
            block = self._new_segment(num_bytes, size, is_small)
        remaining = block.num_bytes - size
        if remaining >= ROUND_BYTES if is_small else remaining > SMALL_REQUEST_BYTES:
            self._split(block, size, pool)
        block.is_free = False
        self.allocated_bytes += block.num_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to its pool and merge it with free neighbours."""
        self.allocated_bytes -= block.num_bytes
        pool = self._pools[block.is_small]
        before, after = block.previous, block.next
        if before is not None and before.is_free:
            pool.discard(before)
            block.address = before.address
            block.num_bytes += before.num_bytes
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.is_free:
            pool.discard(after)
            block.num_bytes += after.num_bytes
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        block.is_free = True
        pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment that is wholly free back to the driver."""
        for pool in self._pools:
            for block in pool.blocks():
                if block.previous is None and block.next is None:
                    pool.discard(block)
                    self.reserved_bytes -= block.num_bytes
                    self._addresses.give_back(block.address, block.num_bytes)

    def layout(self) -> tuple[object, ...]:
        """What decides the future besides the live blocks: the free blocks of both pools."""
        return tuple(tuple(pool.keys()) for pool in self._pools)

    def reset_peaks(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _new_segment(self, request_bytes: int, size: int, is_small: bool) -> Block:
        num_bytes = segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + num_bytes > self.limit_bytes:
            # a failed cudaMalloc frees all cached segments and is tried once more
            self.num_retries += 1
            self.empty_cache()
            if self.reserved_bytes + num_bytes > self.limit_bytes:
                raise OutOfMemory(request_bytes)
        self.reserved_bytes += num_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return Block(self._addresses.take(num_bytes), num_bytes, is_small)

    @staticmethod
    def _split(block: Block, size: int, pool: FreeBlocks) -> None:
        rest = Block(
            block.address + size, block.num_bytes - size, block.is_small, True, block, block.next
        )
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.num_bytes = size
        pool.add(rest)


class AddressSpace:
    """Where the driver maps what `cudaMalloc` returns.

    Measured on an H200 (driver 580.159, from the `segment_alloc` events of recorded runs): a
    segment takes a new range whose size is rounded up to 32 MiB, below the range before it; the
    rest of a range is used by later segments that fit into it. Only the order of addresses matters
    here, and only between blocks of one size.
    """

    RANGE_BYTES = 32 << 20

    def __init__(self) -> None:
        self._lowest = 1 << 47
        self._holes: list[tuple[int, int]] = []  # (address, bytes), the newest last
        self._most_room = 0  # no hole has more; the largest may have less

    def take(self, num_bytes: int) -> int:
        """The address of a new segment of `num_bytes`."""
        if num_bytes <= self._most_room:
            for index in range(len(self._holes) - 1, -1, -1):
                address, room = self._holes[index]
                if room >= num_bytes:
                    if room == num_bytes:
                        del self._holes[index]
                    else:
                        self._holes[index] = (address + num_bytes, room - num_bytes)
                    return address
            self._most_room = max((room for _, room in self._holes), default=0)
        span = -(-num_bytes // self.RANGE_BYTES) * self.RANGE_BYTES
        self._lowest -= span
        if span > num_bytes:
            self._add_hole(self._lowest + num_bytes, span - num_bytes)
        return self._lowest

    def give_back(self, address: int, num_bytes: int) -> None:
        """A segment returned by `cudaFree`; its range may serve another."""
        self._add_hole(address, num_bytes)

    def _add_hole(self, address: int, num_bytes: int) -> None:
        self._holes.append((address, num_bytes))
        self._most_room = max(self._most_room, num_bytes)
