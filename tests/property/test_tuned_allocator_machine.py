"""Whatever the settings: every segment is tiled, every byte is counted, every limit holds."""

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

from memest.estimator.allocator.blocks import ROUND_BYTES, Block
from memest.estimator.allocator.caching import OutOfMemory
from memest.estimator.allocator.expandable import Unmapped
from memest.estimator.allocator.settings import AllocatorSettings, parse_settings
from memest.estimator.allocator.statistics import CountingAllocator, allow_share

MIB, GIB = 1 << 20, 1 << 30
SMALL_PIECE, LARGE_PIECE = 2 * MIB, 20 * MIB
sizes = (
    st.sampled_from([0, 1, 513, MIB, MIB + 1, 10 * MIB, 20 * MIB, 32 * MIB, 40 * MIB + 1])
    | st.integers(0, 3 * MIB)
    | st.integers(0, 64 * MIB)
)
texts = st.lists(
    st.sampled_from(
        [
            "expandable_segments:True",
            "max_split_size_mb:32",
            "max_split_size_mb:20,max_non_split_rounding_mb:24",
            "roundup_power2_divisions:8",
            "roundup_power2_divisions:[2:2,32:4,>:0]",
            "garbage_collection_threshold:0.3",
            "roundup_power2_divisions:1",
            "large_segment_size_mb:16",
        ]
    ),
    min_size=1,
    max_size=4,
).map(",".join)


class TunedMachine(RuleBasedStateMachine):
    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[Block, int]] = {}

    @initialize(
        text=texts,
        limit=st.none() | st.integers(64 * MIB, 300 * MIB),
        share=st.sampled_from([1.0, 0.5, 0.8]),
    )
    def start(self, text: str, limit: int | None, share: float) -> None:
        self.settings: AllocatorSettings = parse_settings(text)
        self.allocator = CountingAllocator(limit)
        self.allocator.use(self.settings)
        if limit is not None:
            allow_share(self.allocator, share, limit, limit)

    @rule(target=blocks, size=sizes, stream=st.sampled_from([0, 0, 0, 5]))
    def malloc(self, size: int, stream: int) -> object:
        before = self.allocator.allocated_bytes
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory:
            assert self.allocator.limit_bytes is not None
            assert self.allocator.allocated_bytes == before
            return multiple()
        self.live[id(block)] = (block, size)
        assert block.stream == stream
        return block

    @rule(block=consumes(blocks))
    def free(self, block: Block) -> None:
        del self.live[id(block)]
        self.allocator.free(block)

    @rule(block=consumes(blocks))
    def free_later(self, block: Block) -> None:
        del self.live[id(block)]
        self.allocator.defer(block)
        self.allocator.complete(block)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        for chain in self.chains():
            if not self.settings.expandable_segments:
                assert len(chain) > 1 or not chain[0].is_free
                continue
            for block in chain:
                assert not block.is_free or not whole_pieces(block, self.piece(block))

    def piece(self, block: Block) -> int:
        return SMALL_PIECE if block.is_small else self.settings.large_segment_bytes

    def chains(self) -> list[list[Block]]:
        """Every segment, or range of one that is expandable, as its blocks."""
        allocator = self.allocator
        free = [
            b for s in allocator.pools for pool in allocator.pools[s] for b in pool.by_key.values()
        ]
        heads: dict[int, Block] = {}
        for block in [*free, *(block for block, _ in self.live.values())]:
            head = block
            while head.previous is not None:
                head = head.previous
            heads[id(head)] = head
        found = []
        for head in heads.values():
            chain = [head]
            while (following := chain[-1].next) is not None:
                chain.append(following)
            found.append(chain)
        return found

    @invariant()
    def chains_are_tiled(self) -> None:
        for chain in self.chains():
            for left, right in pairwise(chain):
                assert right.previous is left
                assert left.address + left.num_bytes == right.address
                assert (left.is_small, left.stream) == (right.is_small, right.stream)
                assert not (left.is_free and right.is_free)
                assert not (isinstance(left, Unmapped) and isinstance(right, Unmapped))

    @invariant()
    def what_is_mapped_comes_in_pieces(self) -> None:
        for chain in self.chains():
            for block in chain:
                if isinstance(block, Unmapped):
                    assert self.settings.expandable_segments
                    assert not block.is_free
                    assert block.address % self.piece(block) == 0
                    assert block.num_bytes % self.piece(block) == 0

    @invariant()
    def every_byte_is_counted_once(self) -> None:
        held = [b for chain in self.chains() for b in chain if not isinstance(b, Unmapped)]
        live = sum(block.num_bytes for block, _ in self.live.values())
        allocator = self.allocator
        assert allocator.allocated_bytes == live
        assert allocator.reserved_bytes == sum(b.num_bytes for b in held)
        stats = allocator.memory_stats()
        assert stats["allocated_bytes"]["all"]["current"] == live
        assert stats["reserved_bytes"]["all"]["current"] == allocator.reserved_bytes
        assert stats["reserved_bytes"]["all"]["peak"] == allocator.peak_reserved_bytes
        assert stats["requested_bytes"]["all"]["current"] == sum(s for _, s in self.live.values())

    @invariant()
    def splits_are_counted(self) -> None:
        chains = [] if self.settings.expandable_segments else self.chains()
        split = [b for chain in chains for b in chain if b.is_free and len(chain) > 1]
        stats = self.allocator.memory_stats()
        assert stats["inactive_split"]["all"]["current"] == len(split)
        assert stats["inactive_split_bytes"]["all"]["current"] == sum(b.num_bytes for b in split)

    @invariant()
    def oversize_blocks_are_whole_and_counted(self) -> None:
        most = self.settings.max_split_bytes
        if most is None:
            return
        over = [block for block, _ in self.live.values() if block.num_bytes >= most]
        assert self.allocator.memory_stats()["oversize_allocations"]["current"] == len(over)
        for block, size in self.live.values():
            if block.num_bytes >= most and not self.settings.expandable_segments:
                spare = self.settings.max_non_split_rounding_bytes
                assert block.num_bytes < max(size, most) + max(spare, LARGE_PIECE)

    @invariant()
    def a_block_serves_its_request(self) -> None:
        for block, size in self.live.values():
            assert not block.is_free
            assert block.num_bytes >= size
            assert block.num_bytes % ROUND_BYTES == 0

    @invariant()
    def the_pools_hold_the_free_blocks_in_order(self) -> None:
        for stream in self.allocator.pools:
            for is_small, pool in enumerate(self.allocator.pools[stream]):
                found = sorted(pool.by_key.values(), key=lambda b: (b.num_bytes, b.address))
                assert [pool.by_key[key] for key in pool.keys] == found
                assert all(b.is_free and b.is_small == bool(is_small) for b in found)

    @invariant()
    def the_limit_holds(self) -> None:
        allocator = self.allocator
        limit, card = allocator.limit_bytes, allocator.gpu_bytes
        if limit is None or card is None:
            return
        piece = self.settings.large_segment_bytes if self.settings.expandable_segments else 0
        assert allocator.peak_reserved_bytes <= min(card, limit + piece)

    def teardown(self) -> None:
        """Whatever happened, freeing everything gives everything back."""
        for block, _ in self.live.values():
            self.allocator.free(block)
        if hasattr(self, "allocator"):
            self.allocator.empty_cache()
            assert (self.allocator.allocated_bytes, self.allocator.reserved_bytes) == (0, 0)


def whole_pieces(block: Block, piece: int) -> bool:
    """Whether a block covers a piece from end to end."""
    begin = -(-block.address // piece) * piece
    return begin + piece <= block.address + block.num_bytes


TestTunedAllocator = TunedMachine.TestCase
TestTunedAllocator.settings = settings(max_examples=80, stateful_step_count=50)
