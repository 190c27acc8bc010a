"""Simulation of CUDA's caching allocator: which requests share a segment, and what stays reserved.

Mirrors `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11 and 2.13). `tuned.py` has the effects of
settings. Each stream has its own pools.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from math import inf

from memest.estimator.allocator import blocks
from memest.estimator.allocator.blocks import AddressSpace, Block, FreeBlocks, merge, new_linked
from memest.estimator.allocator.expandable import Unmapped
from memest.estimator.allocator.settings import DEFAULT, AllocatorSettings
from memest.estimator.allocator.tuned import Tuning

Pools = tuple[FreeBlocks, FreeBlocks]  # large and small pool; `is_small` is the index


class OutOfMemory(Exception):
    """Error of a simulated `cudaMalloc` that failed even after every cached segment was freed."""

    def __init__(self, request_bytes: int) -> None:
        super().__init__(f"a request of {request_bytes} bytes")
        self.request_bytes = request_bytes


class CachingAllocator:
    """Simulated caching allocator of one GPU.

    Args:
        limit_bytes: bytes that `cudaMalloc` can return in total: the GPU's memory less its context,
            or the cap of `set_per_process_memory_fraction`; None is unlimited.
        addresses: model of segments' addresses, whose order breaks ties between equal blocks.
    """

    has_soft_limit = False  # if set, requests raise the limit instead of `OutOfMemory`

    def __init__(
        self, limit_bytes: int | None = None, addresses: AddressSpace | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.gpu_bytes = limit_bytes  # memory of which `limit_bytes` can be a share, or None
        self.allowed_bytes: int | None = None  # allowed share of the GPU's memory, or None
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        self.pools: dict[int, Pools] = defaultdict(lambda: (FreeBlocks(), FreeBlocks()))
        """(large pool, small pool) of free blocks of each stream, and of each private pool."""

        self.released_pools: set[int] = set()  # private pools whose CUDA graphs are freed
        self._deferred: dict[int, Block] = {}
        self.addresses = addresses or AddressSpace()
        self.settings = DEFAULT
        self._tuning: Tuning | None = None
        self._read_late: Callable[[], AllocatorSettings] | None = None

    def use(self, settings: AllocatorSettings) -> None:
        """Apply `settings` to later requests; the allocator must have no memory reserved."""
        assert not self.reserved_bytes
        self.settings = settings
        self._tuning = None if settings.is_default else Tuning(self, settings)

    def use_late(self, read: Callable[[], AllocatorSettings]) -> None:
        """Call `read` at the first request, and apply the settings that it returns."""
        self._read_late = read
        self._tuning = Tuning(self, DEFAULT)

    def read_settings(self) -> None:
        """Apply the settings that `use_late` has deferred, if they were not applied yet."""
        read = self._read_late
        if read is not None:
            self._read_late = None
            self.use(read())

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Return a block of at least `num_bytes`, or raise `OutOfMemory`. `stream` is the number of
        a CUDA stream (0 is the default one) or of a private pool."""
        self.read_settings()
        tuning, size = self._tuning, self.rounded(num_bytes)
        is_small = size <= blocks.SMALL_REQUEST_BYTES
        pool = self.pools[stream][is_small]
        index = pool.first_index(size)
        if tuning is not None:
            index = tuning.best_index(pool, index, size, is_small)
        if index < len(pool.keys):
            block = pool.pop(index)
        else:
            block = self.new_segment(num_bytes, size, is_small, stream)
        remaining = block.num_bytes - size
        if tuning is not None:  # else as `should_split`
            splits = tuning.splits(size, remaining, is_small)
        elif is_small:
            splits = remaining >= blocks.ROUND_BYTES
        else:
            splits = remaining > blocks.SMALL_REQUEST_BYTES
        if splits:
            tail = new_linked(Block, block, block.address + size, remaining, block, block.next)
            block.num_bytes = size
            pool.insert(tail)
            if tuning is not None:
                tuning.record_insertion(tail)
        block.is_free = False
        self.allocated_bytes += block.num_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def malloc_at(self, address: int, num_bytes: int, stream: int) -> Block:
        """Return a block of `num_bytes` at `address`, which is free in the pools of `stream`. torch
        does so to restore a CUDA graph's pool."""
        large, small = self.pools[stream]
        block = next(
            block
            for block in (*large.by_key.values(), *small.by_key.values())
            if block.address <= address < block.address + block.num_bytes
        )
        pool = small if block.is_small else large
        pool.discard(block)
        offset = address - block.address
        room = block.num_bytes - offset
        if offset:  # the free bytes before `address` stay in the pool
            left = new_linked(Block, block, block.address, offset, block.previous, block)
            pool.insert(left)
        if room > num_bytes:
            end = address + num_bytes
            right = new_linked(Block, block, end, room - num_bytes, block, block.next)
            pool.insert(right)
        block.address, block.num_bytes, block.is_free = address, num_bytes, False
        self.allocated_bytes += num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def rounded(self, num_bytes: int) -> int:
        """Return the block size, in bytes, that serves a request of `num_bytes`."""
        tuning = self._tuning
        return blocks.round_request(num_bytes) if tuning is None else tuning.rounded(num_bytes)

    def free(self, block: Block) -> None:
        """Return `block` to its pool, merged with free neighbours."""
        self.allocated_bytes -= block.num_bytes
        pool = self.pools[block.stream][block.is_small]
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free:
                pool.discard(neighbour)
                merge(block, neighbour)
        block.is_free = True
        pool.insert(block)
        if self._tuning is not None:
            self._tuning.record_insertion(block)

    def defer(self, block: Block) -> None:
        """Count `block` as freed, but keep it out of its pool while another stream uses it."""
        self.allocated_bytes -= block.num_bytes
        self._deferred[id(block)] = block

    def complete(self, block: Block) -> None:
        """Return a deferred block to its pool, unless that was done before."""
        if self._deferred.pop(id(block), None) is not None:
            self.allocated_bytes += block.num_bytes  # `defer` subtracted them, as `free` does
            self.free(block)

    def empty_cache(self) -> None:
        """Complete deferred frees; return each segment without allocated blocks to the driver."""
        for block in list(self._deferred.values()):
            self.complete(block)
        if self._tuning is not None and self._tuning.expandable is not None:
            self._tuning.expandable.give_back()
            return
        for is_small in (False, True):  # large pools first, as `release_cached_blocks`
            for pool, block in self.unsplit(is_small=is_small):
                pool.discard(block)
                self.release(block)

    def unsplit(self, *, is_small: bool) -> Iterator[tuple[FreeBlocks, Block]]:
        """Yield (pool, block) of each segment that one free block fills, by stream, size and
        address. `is_small` selects the small pools, else the large ones. Private pools of live CUDA
        graphs are left out. The caller may release a segment while iterating."""
        for stream in sorted(self.pools):
            if stream >= blocks.FIRST_PRIVATE_POOL and stream not in self.released_pools:
                continue
            pool = self.pools[stream][is_small]
            for block in [pool.by_key[key] for key in pool.keys]:
                if block.previous is None and block.next is None:
                    yield pool, block

    def release(self, block: Block) -> None:
        """Return the segment of `block` to the driver; `block` fills it and is in no pool."""
        self.reserved_bytes -= block.num_bytes
        self.addresses.give_back(block.address, block.num_bytes)

    def layout(self) -> tuple[object, ...]:
        """Return a value to compare: allocators with equal layouts serve later requests equally."""
        free = tuple(tuple(pool.keys) for pool in chain(*self.pools.values()))
        return free if self._tuning is None else (*free, *self._tuning.layout())

    def is_deferred(self, block: Block) -> bool:
        """Return whether `block` was freed but another stream still uses it."""
        return id(block) in self._deferred

    def segments(self, live: list[Block]) -> list[Block]:
        """Return the first block of each segment, sorted by address; `live` has the allocated
        blocks. Each mapped part of an expandable segment counts as a segment."""
        all_blocks = [*live, *self._deferred.values()]
        for pool in chain(*self.pools.values()):
            all_blocks += pool.by_key.values()
        first_blocks = {
            block.address: block
            for block in all_blocks
            if block.previous is None or isinstance(block.previous, Unmapped)
        }
        return [block for _, block in sorted(first_blocks.items())]

    def reset_peaks(self) -> None:
        """Reset the peaks, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def new_segment(self, request_bytes: int, size: int, is_small: bool, stream: int) -> Block:
        """Return a block of at least `size` bytes, the rounded `request_bytes`, from new memory for
        the small or large pool of `stream`. If the driver has none, empty the cache and try again.
        If that fails too, raise `OutOfMemory`. If `has_soft_limit` is set, increase the limit
        instead, unless allocator settings are in use. A replay sets `has_soft_limit` to find how
        much memory a run lacks."""
        tuning = self._tuning
        block = self._from_driver(size, is_small, stream)
        if block is None and tuning is not None and tuning.release_oversize(size, is_small, stream):
            block = self._from_driver(size, is_small, stream)
        if block is None:
            # a failed cudaMalloc frees all cached segments and is tried once more
            self.num_retries += 1
            self.empty_cache()
            block = self._from_driver(size, is_small, stream)
        if block is None and self.has_soft_limit and tuning is None:
            self.limit_bytes = self.reserved_bytes + blocks.segment_bytes(size)
            block = self._from_driver(size, is_small, stream)
        if block is None:
            raise OutOfMemory(request_bytes)
        return block

    def _from_driver(self, size: int, is_small: bool, stream: int) -> Block | None:
        """Return a block of new memory, of at least `size` bytes; None if the limit is reached."""
        tuning = self._tuning
        num_bytes = blocks.segment_bytes(size, self.settings.large_segment_bytes)
        limit = inf if self.limit_bytes is None else self.limit_bytes
        is_over_limit = self.reserved_bytes + num_bytes > limit
        if tuning is not None and tuning.expandable is not None:
            is_share = self.gpu_bytes is None or limit < self.gpu_bytes
            if is_share and is_over_limit:
                return None
            return tuning.expandable.grow(size, is_small, stream)  # checks the GPU's memory
        if is_over_limit:
            return None
        self._reserve(num_bytes)
        block = Block(self.addresses.take(num_bytes), num_bytes, is_small, stream=stream)
        self.count_segment(block)
        return block

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def count_segment(self, block: Block) -> None:
        """Do nothing. Subclasses override this; it is called when `block` fills a new segment."""

    # --- expandable segments

    def count_mapped(self, address: int, num_bytes: int, block: Block) -> None:
        """Add `num_bytes`, mapped at `address` as part of `block`, to reserved memory."""
        self._reserve(num_bytes)

    def count_unmapped(self, address: int, num_bytes: int, block: Block) -> None:
        """Subtract `num_bytes`, unmapped at `address` as part of `block`, from reserved memory."""
        self.reserved_bytes -= num_bytes
