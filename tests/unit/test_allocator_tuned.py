"""What each setting of the allocator does, by hand."""

from __future__ import annotations

import pytest

from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.allocator.expandable import Unmapped
from memest.estimator.allocator.settings import parse_settings
from memest.estimator.allocator.statistics import CountingAllocator, allow_share

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def make(text: str, limit: int | None = None) -> CachingAllocator:
    made = CachingAllocator(limit)
    made.use(parse_settings(text))
    return made


def counting(text: str, limit: int) -> CountingAllocator:
    made = CountingAllocator(limit)
    made.use(parse_settings(text))
    return made


# --- roundup_power2_divisions


@pytest.mark.parametrize(
    ("text", "asked", "given"),
    [
        ("roundup_power2_divisions:4", 5 * MIB, 5 * MIB),
        ("roundup_power2_divisions:4", 5 * MIB + 1, 6 * MIB),
        ("roundup_power2_divisions:4", 7 * MIB + 1, 8 * MIB),
        ("roundup_power2_divisions:4", 8 * MIB, 8 * MIB),
        ("roundup_power2_divisions:4", 1200, 1536),  # below 4 * 512 it goes by 512
        ("roundup_power2_divisions:4", 2100, 2560),
        ("roundup_power2_divisions:1", 5 * MIB + 512, 5 * MIB + 512),
        ("roundup_power2_divisions:1", 3664, 4096),  # one part: by 512, as measured
        ("roundup_power2_divisions:[256:1,>:8]", 11255809, 11256320),
        ("roundup_power2_divisions:[4:2,>:0]", 5 * MIB, 6 * MIB),
        ("roundup_power2_divisions:[4:2,>:0]", 9 * MIB + 1, 9 * MIB + 512),
        ("roundup_power2_divisions:[4:2,>:0]", 3 * MIB, 3 * MIB),
        ("roundup_power2_divisions:[4:2,>:0]", 1, 512),
    ],
)
def test_requests_round_up_to_parts_of_a_power_of_two(text: str, asked: int, given: int) -> None:
    assert make(text).malloc(asked).num_bytes == given


def test_what_is_rounded_above_a_mebibyte_is_large() -> None:
    block = make("roundup_power2_divisions:[1:2]").malloc(MIB - 511)

    assert (block.num_bytes, block.is_small) == (MIB, True)


# --- max_split_size_mb


def test_oversize_blocks_are_not_split_and_serve_no_small_request() -> None:
    made = make("max_split_size_mb:64")
    made.free(made.malloc(100 * MIB))

    small = made.malloc(30 * MIB)
    assert made.reserved_bytes == 130 * MIB
    made.free(small)
    large = made.malloc(81 * MIB)
    assert (large.num_bytes, made.reserved_bytes) == (100 * MIB, 130 * MIB)
    made.free(large)
    assert made.malloc(80 * MIB).num_bytes == 80 * MIB  # 20 MiB larger is too large
    assert made.reserved_bytes == 210 * MIB


def test_a_block_may_be_so_much_larger_as_is_said() -> None:
    made = make("max_split_size_mb:64,max_non_split_rounding_mb:30")
    made.free(made.malloc(100 * MIB))

    assert made.malloc(71 * MIB).num_bytes == 100 * MIB


def test_one_oversize_block_makes_room_before_all_that_is_cached() -> None:
    made = counting("max_split_size_mb:64", 400 * MIB)
    kept = made.malloc(30 * MIB)
    made.free(made.malloc(40 * MIB))
    made.free(made.malloc(100 * MIB))
    made.free(made.malloc(140 * MIB))

    made.malloc(116 * MIB)  # 90 MiB are left: the block of 140 MiB goes, not those of 40 and 100

    assert made.reserved_bytes == (30 + 40 + 100 + 116) * MIB
    assert (made.num_retries, made.num_segments_freed) == (0, 1)
    made.free(kept)


def test_several_oversize_blocks_make_room_together() -> None:
    made = counting("max_split_size_mb:64", 400 * MIB)
    for block in [made.malloc(num_mib * MIB) for num_mib in (100, 110, 90)]:
        made.free(block)

    held = made.malloc(160 * MIB)  # 100 are left: 110 and 100 go, which are enough

    assert made.reserved_bytes == (90 + 160) * MIB
    assert made.num_retries == 0
    assert held.num_bytes == 160 * MIB


def test_oversize_blocks_are_counted() -> None:
    made = counting("max_split_size_mb:64", GIB)
    block = made.malloc(100 * MIB)
    made.malloc(10 * MIB)

    stats = made.memory_stats()
    assert stats["max_split_size"] == 64 * MIB
    assert stats["oversize_segments"]["current"] == stats["oversize_allocations"]["current"] == 1
    made.free(block)
    made.empty_cache()
    stats = made.memory_stats()
    assert stats["oversize_segments"]["current"] == stats["oversize_allocations"]["current"] == 0
    assert stats["oversize_segments"]["peak"] == 1


# --- garbage_collection_threshold


def test_old_segments_are_given_back_above_a_share_of_what_is_allowed() -> None:
    made = counting("garbage_collection_threshold:0.5", GIB)
    allow_share(made, 0.5, GIB, GIB)  # 512 MiB allowed, collected above 256
    old, young, busy = (made.malloc(num_mib * MIB) for num_mib in (100, 120, 130))
    made.free(old)
    made.free(busy)
    busy = made.malloc(130 * MIB)  # a search in which `old` ages
    made.free(young)
    assert made.reserved_bytes == 350 * MIB

    made.malloc(140 * MIB)  # 94 MiB too many: `old` is enough

    assert made.reserved_bytes == 390 * MIB
    assert (made.num_segments_freed, made.num_retries) == (1, 0)
    assert made.malloc(120 * MIB).num_bytes == 120 * MIB  # that of `young`
    assert made.reserved_bytes == 390 * MIB
    made.free(busy)


def test_nothing_is_collected_where_all_of_the_gpu_is_allowed() -> None:
    made = counting("garbage_collection_threshold:0.1", GIB)
    made.free(made.malloc(300 * MIB))

    made.malloc(400 * MIB)

    assert made.reserved_bytes == 700 * MIB


# --- expandable_segments


def blocks_from(block: Block) -> list[Block]:
    while block.previous is not None:
        block = block.previous
    found = [block]
    while (following := found[-1].next) is not None:
        found.append(following)
    return found


def test_an_expandable_segment_grows_by_pieces() -> None:
    made = make("expandable_segments:True", 80 * GIB)

    first, second = made.malloc(30 * MIB), made.malloc(15 * MIB)
    assert made.reserved_bytes == 60 * MIB  # 40, and 20 more
    assert second.address == first.address + 30 * MIB
    small = made.malloc(3 * KIB)
    assert made.reserved_bytes == 62 * MIB
    assert abs(small.address - first.address) > GIB  # a range of its own
    rest = blocks_from(first)[-1]
    assert isinstance(rest, Unmapped)
    assert (rest.num_bytes + 60 * MIB) % (20 * MIB) == 0


def test_what_is_left_of_a_large_block_is_split_off_whatever_its_size() -> None:
    made = make("expandable_segments:True")

    block = made.malloc(20 * MIB - 512)

    assert block.num_bytes == 20 * MIB - 512
    assert made.reserved_bytes == 20 * MIB


def test_lengths_that_grow_leave_no_pieces() -> None:
    """Each request is larger than the one before: segments cannot serve, an expandable one does."""

    def reserved(text: str) -> int:
        made = make(text)
        for num_mib in range(20, 60, 4):
            made.free(made.malloc(num_mib * MIB))
        return made.reserved_bytes

    assert reserved("") == sum(range(20, 60, 4)) * MIB
    assert reserved("expandable_segments:True") == 60 * MIB


def test_a_free_block_at_the_end_counts_as_long_as_it_could_become() -> None:
    made = make("expandable_segments:True", GIB)
    first = made.malloc(30 * MIB)
    wall = made.malloc(2 * MIB)
    made.free(first)

    block = made.malloc(6 * MIB)  # 8 MiB at the end are smaller; the 30 before are what they are

    assert block.address == wall.address - 30 * MIB


def test_memory_between_what_lives_can_be_unmapped_and_mapped_again() -> None:
    made = counting("expandable_segments:True", 200 * MIB)
    first, middle, last = (made.malloc(50 * MIB) for _ in range(3))
    made.free(middle)
    assert made.reserved_bytes == 160 * MIB

    made.empty_cache()  # of the pieces 40 to 60, 60 to 80 and 80 to 100 the outer ones are shared
    assert made.reserved_bytes == 120 * MIB
    assert [block.is_free for block in blocks_from(first)] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    again = made.malloc(45 * MIB)
    assert again.address == first.address + 50 * MIB
    assert made.reserved_bytes == 160 * MIB
    for block in (first, again, last):
        made.free(block)
    made.empty_cache()
    assert (made.reserved_bytes, made.allocated_bytes) == (0, 0)
    stats = made.memory_stats()
    assert stats["num_device_free"] == 2
    assert stats["segment"]["all"]["peak"] == stats["inactive_split"]["all"]["peak"] == 0
    assert stats["reserved_bytes"]["large_pool"]["peak"] == 160 * MIB


def test_what_is_cached_makes_room_for_another_stream() -> None:
    made = make("expandable_segments:True", 100 * MIB)
    made.free(made.malloc(70 * MIB))

    made.malloc(60 * MIB, 7)

    assert made.reserved_bytes == 60 * MIB
    assert made.num_retries == 1
    with pytest.raises(OutOfMemory):
        made.malloc(50 * MIB, 7)


def test_a_cap_below_the_gpu_is_asked_before_memory_is_mapped() -> None:
    made = counting("expandable_segments:True", GIB)
    allow_share(made, 100 / 1024, GIB, GIB)
    made.malloc(30 * MIB)
    made.malloc(30 * MIB)
    assert made.reserved_bytes == 60 * MIB

    with pytest.raises(OutOfMemory):
        made.malloc(41 * MIB)  # 42 more than 60; the piece that would be mapped is not asked


# --- on the whole


def test_settings_are_read_at_the_first_request() -> None:
    made = CountingAllocator(GIB)
    made.use_late(lambda: parse_settings("expandable_segments:True"))
    assert not made.settings.expandable_segments

    made.malloc(30 * MIB)

    assert made.settings.expandable_segments
    assert made.reserved_bytes == 40 * MIB


def test_no_setting_at_the_first_request_is_the_allocator_as_it_is() -> None:
    late, plain = CachingAllocator(GIB), CachingAllocator(GIB)
    late.use_late(lambda: parse_settings(""))
    for made in (late, plain):
        kept = [made.malloc(size) for size in (3 * MIB, 700, 12 * MIB, 5 * MIB)]
        made.free(kept[1])
        made.malloc(900)

    assert late.layout() == plain.layout()
    assert late.reserved_bytes == plain.reserved_bytes
