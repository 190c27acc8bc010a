"""The caching allocator's rules, one by one, with sizes worked out by hand."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from memest.estimator.allocator import blocks as allocator
from memest.estimator.allocator.blocks import AddressSpace, Block, round_request, segment_bytes
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory

MIB = 1 << 20


def test_the_constants_are_those_of_the_installed_torch() -> None:
    """Read from the headers that torch ships, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    header = Path(spec.origin).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    text = header.read_text()
    constants = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", text))
    default = re.search(r"large_segment_size_\{(\d+)\}", text)

    assert int(constants["kMinBlockSize"]) == allocator.ROUND_BYTES
    assert int(constants["kSmallSize"]) == allocator.SMALL_REQUEST_BYTES
    assert int(constants["kSmallBuffer"]) == allocator.SMALL_SEGMENT_BYTES
    assert int(constants["kMinLargeAlloc"]) == allocator.MIN_OWN_SEGMENT_BYTES
    assert int(constants["kRoundLarge"]) == allocator.SEGMENT_ROUND_BYTES
    assert default is not None
    assert int(default[1]) == allocator.LARGE_SEGMENT_BYTES


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes"),
    [(0, 512), (1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (MIB + 1, MIB + 512)],
)
def test_a_request_is_rounded_up_to_512(request_bytes: int, block_bytes: int) -> None:
    assert round_request(request_bytes) == block_bytes
    made = CachingAllocator()
    assert made.malloc(request_bytes).num_bytes >= block_bytes


@pytest.mark.parametrize(
    ("block_bytes", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_the_segment_follows_from_the_request(block_bytes: int, segment: int) -> None:
    assert segment_bytes(block_bytes) == segment
    made = CachingAllocator()
    made.malloc(block_bytes)
    assert made.reserved_bytes == segment


def test_small_requests_share_a_segment_of_two_mib() -> None:
    made = CachingAllocator()

    first, second, third = (made.malloc(MIB) for _ in range(3))

    assert second.address == first.address + MIB
    assert third.previous is None  # the first two filled their segment
    assert (made.allocated_bytes, made.reserved_bytes) == (3 * MIB, 4 * MIB)


def test_a_large_request_never_takes_from_the_small_pool() -> None:
    made = CachingAllocator()
    made.free(made.malloc(MIB))  # leaves 2 MiB free in the small pool

    made.malloc(MIB + 512)

    assert made.reserved_bytes == 22 * MIB


def test_a_small_request_never_takes_from_the_large_pool() -> None:
    made = CachingAllocator()
    made.free(made.malloc(5 * MIB))

    made.malloc(512)

    assert made.reserved_bytes == 22 * MIB


def test_the_rest_of_a_small_block_is_split_off_from_512_on() -> None:
    made = CachingAllocator()

    block = made.malloc(2 * MIB - 512 - MIB)

    assert block.num_bytes == MIB - 512
    assert block.next is not None
    assert block.next.num_bytes == MIB + 512


def test_a_large_block_with_a_mib_to_spare_is_not_split_and_all_of_it_counts() -> None:
    """11 MiB takes a segment of 12; the MiB beyond the request is part of `allocated`."""
    made = CachingAllocator()

    block = made.malloc(11 * MIB)

    assert block.next is None
    assert made.allocated_bytes == 12 * MIB


def test_a_large_block_with_more_than_a_mib_to_spare_is_split() -> None:
    """11 MiB - 512 takes 12 MiB too, and leaves 1 MiB + 512 for others."""
    made = CachingAllocator()

    block = made.malloc(11 * MIB - 512)

    assert block.next is not None
    assert (block.num_bytes, block.next.num_bytes) == (11 * MIB - 512, MIB + 512)
    assert made.allocated_bytes == 11 * MIB - 512


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    made = CachingAllocator()
    blocks = [made.malloc(size * MIB) for size in (16, 12, 14)]  # each its own segment
    addresses = [block.address for block in blocks]
    for block in blocks:
        made.free(block)

    assert made.malloc(12 * MIB + 512).address == addresses[2]
    assert made.malloc(12 * MIB + 512).address == addresses[0]
    assert made.malloc(12 * MIB).address == addresses[1]


def test_among_equal_blocks_the_lowest_address_is_taken() -> None:
    made = CachingAllocator()
    blocks = [made.malloc(32 * MIB) for _ in range(3)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        made.free(block)

    assert [made.malloc(32 * MIB).address for _ in range(3)] == sorted(addresses)


def test_a_freed_block_merges_with_both_free_neighbours() -> None:
    """Four quarters of a small segment; freed 1, 3, then 2: one block of 1.5 MiB."""
    made = CachingAllocator()
    quarter = MIB // 2
    first, second, third, fourth = (made.malloc(quarter) for _ in range(4))

    made.free(first)
    made.free(third)
    made.free(second)

    assert fourth.previous is not None
    assert (fourth.previous.num_bytes, fourth.previous.address) == (3 * quarter, first.address)
    assert fourth.previous.previous is None
    assert (made.allocated_bytes, made.reserved_bytes) == (quarter, 2 * MIB)
    made.free(fourth)
    assert made.malloc(MIB).previous is None


def test_free_blocks_of_two_segments_do_not_merge() -> None:
    made = CachingAllocator()
    for block in [made.malloc(32 * MIB) for _ in range(2)]:
        made.free(block)

    made.malloc(64 * MIB)

    assert made.reserved_bytes == 128 * MIB


def test_emptying_the_cache_gives_back_only_wholly_free_segments() -> None:
    made = CachingAllocator()
    kept, released = made.malloc(12 * MIB), made.malloc(14 * MIB)
    small = made.malloc(512)
    made.free(released)

    made.empty_cache()

    assert made.reserved_bytes == (12 + 2) * MIB
    made.free(kept)
    made.free(small)
    made.empty_cache()
    assert made.reserved_bytes == 0
    assert made.layout() == ((), ())


def test_peaks_remember_and_can_be_reset() -> None:
    made = CachingAllocator()
    made.free(made.malloc(12 * MIB))
    made.empty_cache()

    assert (made.peak_allocated_bytes, made.peak_reserved_bytes) == (12 * MIB, 12 * MIB)
    made.reset_peaks()
    assert (made.peak_allocated_bytes, made.peak_reserved_bytes) == (0, 0)


def test_at_the_limit_cached_segments_are_given_back_and_the_request_is_tried_again() -> None:
    """12 MiB are cached; 14 more do not fit under 20, but do once the cache is empty."""
    made = CachingAllocator(limit_bytes=20 * MIB)
    made.free(made.malloc(12 * MIB))

    made.malloc(14 * MIB)

    assert (made.reserved_bytes, made.peak_reserved_bytes) == (14 * MIB, 14 * MIB)
    assert made.num_retries == 1


def test_the_limit_itself_may_be_reached() -> None:
    made = CachingAllocator(limit_bytes=24 * MIB)
    made.malloc(12 * MIB)
    made.malloc(12 * MIB)

    assert (made.reserved_bytes, made.num_retries) == (24 * MIB, 0)


def test_a_request_beyond_the_limit_is_out_of_memory() -> None:
    made = CachingAllocator(limit_bytes=20 * MIB)
    made.malloc(12 * MIB)

    with pytest.raises(OutOfMemory) as caught:
        made.malloc(10 * MIB + 1)

    assert caught.value.request_bytes == 10 * MIB + 1
    assert made.allocated_bytes == 12 * MIB


def test_a_segment_with_one_live_block_keeps_its_rest_from_a_larger_request() -> None:
    """Fragmentation: 24 of 40 MiB are free, 12 in each of two segments, and 14 do not fit."""
    made = CachingAllocator(limit_bytes=40 * MIB)
    fillers = []
    for _ in range(2):
        made.malloc(8 * MIB)
        fillers.append(made.malloc(12 * MIB))
    for filler in fillers:
        made.free(filler)
    assert made.reserved_bytes - made.allocated_bytes == 24 * MIB

    with pytest.raises(OutOfMemory):
        made.malloc(14 * MIB)


class EmptySpace(AddressSpace):
    """Address space whose context and driver leave no room."""

    CONTEXT_ROOM = FIRST_ROOM = LATER_ROOM = 0


def test_the_context_leaves_room_for_one_large_and_one_small_segment() -> None:
    """24 MiB and, below them, 2; a range below that is as good for what fits."""
    space = AddressSpace()
    first = space.take(32 * MIB)
    large, small = space.take(20 * MIB), space.take(2 * MIB)

    assert first < small < large
    assert space.take(20 * MIB) == first - 32 * MIB
    assert space.take(4 * MIB) == first - 12 * MIB


def test_the_ranges_of_the_context_are_never_unmapped() -> None:
    space = AddressSpace()
    address = space.take(20 * MIB)

    space.give_back(address, 20 * MIB)

    assert space.take(24 * MIB) == address


def test_the_first_kernel_frees_memory_of_the_driver_next_to_the_small_room() -> None:
    """The room that it leaves in its new range is lower; 2 MiB of code take the low one."""
    space = AddressSpace()
    low = space.take(2 * MIB)

    space.load_first_kernel()

    assert low - space.take(20 * MIB) == 414 * MIB
    assert space.take(6 * MIB) < low - 414 * MIB


def test_what_the_first_kernel_frees_is_unmapped_if_no_segment_is_next_to_it() -> None:
    """After `empty_cache` the next large segment is below all ranges of the driver."""
    space = AddressSpace()
    low = space.take(2 * MIB)

    space.load_first_kernel()
    space.give_back(low, 2 * MIB)

    assert space.take(32 * MIB) < low - 512 * MIB


def test_a_handle_of_cublas_takes_the_lowest_room() -> None:
    """64 and 12 MiB the first, 64 and 2 the second."""
    space = EmptySpace()
    segment = space.take(2 * MIB)

    space.create_cublas_handle()
    space.create_cublas_handle()

    assert space.take(16 * MIB) == segment + 16 * MIB
    assert space.take(2 * MIB) == segment - 160 * MIB


def test_an_emptied_range_is_unmapped_but_stays_where_several_gpus_work_together() -> None:
    alone, together = EmptySpace(), EmptySpace(ranges_stay=True)
    for space, reuses in ((alone, False), (together, True)):
        first = space.take(64 * MIB)
        space.give_back(first, 64 * MIB)

        assert (space.take(20 * MIB) == first) is reuses


def test_among_several_gpus_what_two_freed_segments_leave_is_not_joined() -> None:
    """8, 8 and 16 MiB fill a range; the first two are freed, and 16 MiB are asked for."""
    alone, together = EmptySpace(), EmptySpace(ranges_stay=True)
    for space, joins in ((alone, True), (together, False)):
        first, second, _ = space.take(8 * MIB), space.take(8 * MIB), space.take(16 * MIB)
        space.give_back(first, 8 * MIB)
        space.give_back(second, 8 * MIB)

        assert space.take(16 * MIB) == (first if joins else first - 32 * MIB)


def test_segments_lie_below_one_another_and_fill_the_rest_of_a_range() -> None:
    """Ranges are multiples of 32 MiB; 20 of the first are used, 12 are left for a later segment."""
    space = EmptySpace()
    top = space.take(20 * MIB)

    assert space.take(32 * MIB) == top - 32 * MIB
    assert space.take(12 * MIB) == top + 20 * MIB
    assert space.take(2 * MIB) == top - 64 * MIB


def test_a_segment_goes_to_the_lowest_address_with_room() -> None:
    """12 MiB are left of the range above, 10 of the one below, 2 of which suffice."""
    space = EmptySpace()
    top = space.take(20 * MIB)
    below = space.take(22 * MIB)

    assert space.take(2 * MIB) == below + 22 * MIB
    assert space.take(10 * MIB) == top + 20 * MIB
    assert space.take(8 * MIB) == below + 24 * MIB


def test_a_range_serves_again_while_another_segment_lies_in_it() -> None:
    space = EmptySpace()
    top = space.take(20 * MIB)
    space.take(2 * MIB)
    space.take(32 * MIB)

    space.give_back(top, 20 * MIB)

    assert space.take(14 * MIB) == top
    assert space.take(6 * MIB) == top + 14 * MIB


def test_room_that_is_given_back_joins_its_neighbours() -> None:
    """20 and 2 MiB between the first segment and the one at the end, all free again."""
    space = EmptySpace()
    top = space.take(2 * MIB)
    middle, small = space.take(20 * MIB), space.take(2 * MIB)
    last = space.take(8 * MIB)

    space.give_back(middle, 20 * MIB)
    space.give_back(small, 2 * MIB)

    assert last == top + 24 * MIB
    assert space.take(22 * MIB) == top + 2 * MIB


def test_a_new_range_goes_to_the_top_of_the_highest_gap_with_room() -> None:
    """Gaps of 32 and of 128 MiB, which three ranges left."""
    space = EmptySpace()
    space.load_first_kernel()
    space.take(30 * MIB)  # behind the kernel's code
    small, _, large, more = (space.take(size * MIB) for size in (32, 64, 64, 64))
    last = space.take(64 * MIB)
    for address, size in ((small, 32), (large, 64), (more, 64)):
        space.give_back(address, size * MIB)

    assert space.take(60 * MIB) == large
    assert space.take(20 * MIB) == small
    assert space.take(64 * MIB) == more
    assert space.take(32 * MIB) == last - 32 * MIB


def test_blocks_are_equal_only_to_themselves() -> None:
    assert Block(0, 512, True) != Block(0, 512, True)


class Recorded:
    """Addresses of a recorded run's segments, in their order."""

    def __init__(self, events: list[Any]) -> None:
        self.left = [event[1:3] for event in events if event[0] == "segment_alloc"]

    def take(self, num_bytes: int) -> int:
        found = next(i for i, (size, _) in enumerate(self.left) if size == num_bytes)
        address: int = self.left.pop(found)[1]
        return address


def test_with_the_addresses_of_the_driver_every_block_is_where_it_was() -> None:
    """Rank 0 of `dconf-tp` on four H200s (validation/parallel.md): 3,706 blocks, both peaks."""
    path = Path(__file__).parents[1] / "data" / "events_tp4.json.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)
    made = CachingAllocator()
    made.addresses = Recorded(events)  # type: ignore[assignment]
    blocks: dict[int, Block] = {}
    for action, num_bytes, address, stream in events:
        if action == "alloc":
            blocks[address] = made.malloc(num_bytes, stream)
            assert blocks[address].address == address
        elif action == "free_completed":
            made.free(blocks.pop(address))

    assert (made.peak_allocated_bytes, made.peak_reserved_bytes) == (1_650_467_328, 1_755_316_224)
