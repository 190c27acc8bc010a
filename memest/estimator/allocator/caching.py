"""CUDA's caching allocator, simulated: which requests share a segment, and what stays reserved.

Mirrors `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11 and 2.13) with its default settings: no
expandable segments, no `max_split_size_mb`, no garbage collection. Each stream has pools of its
own. Sizes and thresholds are those of `c10/core/AllocatorConfig.h`; a test reads them from the
installed headers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from memest.estimator.allocator.addresses import AddressSpace

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
    stream: int = 0
    requested_bytes: int = field(init=False, repr=False)
    """What was asked for; set by `CountingAllocator` alone."""


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


_ADDRESS_BITS = 48


class FreeBlocks:
    """The free blocks of one pool in the order of the allocator's search: by size, then address.

    A key is both in one number, which is quicker to compare than a pair. `CachingAllocator` works
    on `keys` and `by_key` itself where every call counts.
    """

    __slots__ = ("by_key", "keys")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.by_key: dict[int, Block] = {}

    def discard(self, block: Block) -> None:
        """Take `block` out, which is in the pool."""
        key = block.num_bytes << _ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.by_key[key]

    def blocks(self) -> list[Block]:
        """Every block, in no order."""
        return list(self.by_key.values())


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
        self._pools_of_streams: dict[int, tuple[FreeBlocks, FreeBlocks]] = {0: self._pools}
        self._deferred: dict[int, Block] = {}
        self._addresses = addresses or AddressSpace()

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """A block for a request of `num_bytes` on `stream`.

        Raises:
            OutOfMemory: no block is free and the limit leaves no room for a segment.
        """
        size = -(-num_bytes // ROUND_BYTES) * ROUND_BYTES or ROUND_BYTES
        is_small = size <= SMALL_REQUEST_BYTES
        pool = (self._pools if not stream else self._pools_of(stream))[is_small]
        keys = pool.keys
        index = bisect_left(keys, size << _ADDRESS_BITS)  # the smallest, at the lowest address
        if index < len(keys):
            block = pool.by_key.pop(keys.pop(index))
        else:
            block = self._new_segment(num_bytes, size, is_small, stream)
        remaining = block.num_bytes - size
        if remaining >= ROUND_BYTES if is_small else remaining > SMALL_REQUEST_BYTES:
            after = block.next
            rest = Block(block.address + size, remaining, is_small, True, block, after, stream)
            if after is not None:
                after.previous = rest
            block.next = rest
            block.num_bytes = size
            key = remaining << _ADDRESS_BITS | rest.address
            insort(keys, key)
            pool.by_key[key] = rest
        block.is_free = False
        allocated = self.allocated_bytes = self.allocated_bytes + block.num_bytes
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to its pool and merge it with free neighbours."""
        num_bytes = block.num_bytes
        self.allocated_bytes -= num_bytes
        pools = self._pools if not block.stream else self._pools_of_streams[block.stream]
        pool = pools[block.is_small]
        keys, by_key = pool.keys, pool.by_key
        before, after = block.previous, block.next
        if before is not None and before.is_free:
            key = before.num_bytes << _ADDRESS_BITS | before.address
            del keys[bisect_left(keys, key)], by_key[key]
            block.address = before.address
            num_bytes += before.num_bytes
            first = block.previous = before.previous
            if first is not None:
                first.next = block
        if after is not None and after.is_free:
            key = after.num_bytes << _ADDRESS_BITS | after.address
            del keys[bisect_left(keys, key)], by_key[key]
            num_bytes += after.num_bytes
            last = block.next = after.next
            if last is not None:
                last.previous = block
        block.num_bytes = num_bytes
        block.is_free = True
        key = num_bytes << _ADDRESS_BITS | block.address
        insort(keys, key)
        by_key[key] = block

    def defer(self, block: Block) -> None:
        """Free a block that another stream still uses: not allocated any more, and not free yet."""
        self.allocated_bytes -= block.num_bytes
        self._deferred[id(block)] = block

    def complete(self, block: Block) -> None:
        """The other stream is done with a deferred block, if nothing has completed it before."""
        if self._deferred.pop(id(block), None) is not None:
            self.allocated_bytes += block.num_bytes
            self.free(block)

    def empty_cache(self) -> None:
        """Wait for deferred blocks; give every segment that is wholly free back to the driver."""
        for block in list(self._deferred.values()):
            self.complete(block)
        for pools in self._pools_of_streams.values():
            for pool in pools:
                for block in pool.blocks():
                    if block.previous is None and block.next is None:
                        pool.discard(block)
                        self.reserved_bytes -= block.num_bytes
                        self._addresses.give_back(block.address, block.num_bytes)

    def _pools_of(self, stream: int) -> tuple[FreeBlocks, FreeBlocks]:
        return self._pools_of_streams.setdefault(stream, (FreeBlocks(), FreeBlocks()))

    def layout(self) -> tuple[object, ...]:
        """What decides the future besides the live blocks: the free blocks of all pools."""
        every = (pool for pools in self._pools_of_streams.values() for pool in pools)
        return tuple(tuple(pool.keys) for pool in every)

    def reset_peaks(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _new_segment(self, request_bytes: int, size: int, is_small: bool, stream: int) -> Block:
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
        return Block(self._addresses.take(num_bytes), num_bytes, is_small, stream=stream)
