"""Any order of requests and frees leaves every segment tiled and every byte accounted for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from memest.estimator.allocator.blocks import (
    ROUND_BYTES,
    SMALL_REQUEST_BYTES,
    Block,
    round_request,
)
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory

MIB = 1 << 20
sizes = (
    st.sampled_from([0, 1, 512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 20 * MIB])
    | st.integers(0, 3 * MIB)
    | st.integers(0, 64 * MIB)
)


def segments_of(
    allocator: CachingAllocator, live: dict[int, tuple[Block, int]]
) -> list[list[Block]]:
    """Every segment as its blocks in the order of addresses, found from the blocks' links."""
    free = [block for pool in allocator.pools[0] for block in pool.by_key.values()]
    heads: dict[int, Block] = {}
    for block in [*free, *(block for block, _ in live.values())]:
        head = block
        while head.previous is not None:
            head = head.previous
        heads[id(head)] = head
    segments = []
    for head in heads.values():
        blocks = [head]
        while (following := blocks[-1].next) is not None:
            blocks.append(following)
        segments.append(blocks)
    return segments


class AllocatorMachine(RuleBasedStateMachine):
    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[Block, int]] = {}

    @initialize(limit=st.none() | st.integers(8 * MIB, 256 * MIB))
    def start(self, limit: int | None) -> None:
        self.allocator = CachingAllocator(limit)

    @rule(target=blocks, size=sizes)
    def malloc(self, size: int) -> object:
        before = self.allocator.allocated_bytes
        try:
            block = self.allocator.malloc(size)
        except OutOfMemory as error:
            assert error.request_bytes == size
            assert self.allocator.limit_bytes is not None
            assert self.allocator.allocated_bytes == before
            return multiple()
        self.live[id(block)] = (block, size)
        assert self.allocator.allocated_bytes == before + block.num_bytes
        return block

    @rule(block=consumes(blocks))
    def free(self, block: Block) -> None:
        del self.live[id(block)]
        self.allocator.free(block)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        assert not any(
            len(blocks) == 1 and blocks[0].is_free
            for blocks in segments_of(self.allocator, self.live)
        )

    @rule()
    def reset_peaks(self) -> None:
        self.allocator.reset_peaks()
        assert self.allocator.peak_reserved_bytes == self.allocator.reserved_bytes

    @invariant()
    def segments_are_tiled(self) -> None:
        """No gap, no overlap, no two free neighbours, links that agree in both directions."""
        for blocks in segments_of(self.allocator, self.live):
            for left, right in pairwise(blocks):
                assert right.previous is left
                assert left.address + left.num_bytes == right.address
                assert left.is_small == right.is_small
                assert not (left.is_free and right.is_free)

    @invariant()
    def segments_do_not_overlap(self) -> None:
        segments = segments_of(self.allocator, self.live)
        spans = sorted((blocks[0].address, sum(b.num_bytes for b in blocks)) for blocks in segments)
        assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))

    @invariant()
    def every_byte_is_counted_once(self) -> None:
        blocks = [b for blocks in segments_of(self.allocator, self.live) for b in blocks]
        live = sum(block.num_bytes for block, _ in self.live.values())
        assert self.allocator.allocated_bytes == live
        assert self.allocator.reserved_bytes == sum(b.num_bytes for b in blocks)
        assert sum(b.num_bytes for b in blocks if not b.is_free) == live

    @invariant()
    def a_block_serves_its_request_and_wastes_little(self) -> None:
        for block, size in self.live.values():
            spare = block.num_bytes - round_request(size)
            assert not block.is_free
            assert block.num_bytes % ROUND_BYTES == 0
            assert block.is_small == (round_request(size) <= SMALL_REQUEST_BYTES)
            assert 0 <= spare <= (0 if block.is_small else SMALL_REQUEST_BYTES)

    @invariant()
    def the_pools_hold_the_free_blocks_in_order(self) -> None:
        for is_small, pool in enumerate(self.allocator.pools[0]):
            found = sorted(pool.by_key.values(), key=lambda b: (b.num_bytes, b.address))
            assert [pool.by_key[key] for key in pool.keys] == found
            assert all(b.is_free and b.is_small == bool(is_small) for b in pool.by_key.values())

    @invariant()
    def peaks_and_limit_hold(self) -> None:
        allocator = self.allocator
        assert allocator.allocated_bytes <= allocator.peak_allocated_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert (
            allocator.limit_bytes is None or allocator.peak_reserved_bytes <= allocator.limit_bytes
        )

    def teardown(self) -> None:
        """Whatever happened, freeing everything gives everything back."""
        for block, _ in self.live.values():
            self.allocator.free(block)
        if hasattr(self, "allocator"):
            self.allocator.empty_cache()
            assert (self.allocator.allocated_bytes, self.allocator.reserved_bytes) == (0, 0)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=100, stateful_step_count=60)
