"""CUB's storage on every generation: tiles of CCCL 3.0's tuning headers, as nvcc compiles them."""

from __future__ import annotations

import pytest

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.cub import (
    radix_sort_bytes,
    scan_bytes,
    select_bytes,
    sum_storage_bytes,
    unique_by_key_bytes,
)
from tests.op_calls import H200

ITEMS = 1_000_000
GENERATIONS = ["v100-32gb", "t4", "a100-80gb", "a10g", "l4", "h200", "b200", "rtx-5090"]


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


@pytest.mark.parametrize(
    ("name", "tile"),
    [*zip(GENERATIONS, [256 * 11] * 2 + [384 * 10] * 3 + [384 * 12] * 3, strict=True)],
)
def test_a_radix_sort_counts_in_the_tiles_of_its_generation(name: str, tile: int) -> None:
    """8 sweeps of 256 counts of 8 B; 256 counts of 4 B a tile; two copies; 8 counters."""
    look_back = -(-ITEMS // tile) * 256 * 4

    expected = 16_384 + look_back + 2 * rounded(8 * ITEMS) + 256 + 255

    assert radix_sort_bytes(ITEMS, find_gpu(name)) == expected


@pytest.mark.parametrize(
    ("name", "tile"),
    [*zip(GENERATIONS, [640, 640, 2304, 640, 640, 4224, 3520, 3520], strict=True)],
)
def test_a_selection_has_a_state_for_each_tile_of_its_generation(name: str, tile: int) -> None:
    """8 B for each tile and 32 more; their own alignment, then that of the whole."""
    states = rounded((-(-ITEMS // tile) + 32) * 8) + 255

    assert select_bytes(ITEMS, find_gpu(name)) == rounded(states) + 255


@pytest.mark.parametrize(
    ("name", "tile"),
    [*zip(GENERATIONS, [320, 320, 1344, 320, 320, 4928, 4928, 4928], strict=True)],
)
def test_segments_of_keys_have_a_state_for_each_tile_of_their_generation(
    name: str, tile: int
) -> None:
    states = rounded((-(-ITEMS // tile) + 32) * 16) + 255

    assert unique_by_key_bytes(ITEMS, find_gpu(name)) == rounded(states) + 255


def test_a_scan_is_alike_everywhere_and_a_sum_fills_the_gpu_five_times() -> None:
    """A T4 holds 40 * 1024 threads, 160 blocks of 256."""
    t4 = find_gpu("t4")

    assert scan_bytes(896 * 4) == rounded(rounded((4 + 32) * 16) + 255) + 255
    assert scan_bytes(4, value_bytes=4) == rounded(rounded((1 + 32) * 8) + 255) + 255 == 1023
    assert (
        sum_storage_bytes(ITEMS, t4.multiprocessor.threads * t4.num_sms)
        == rounded(160 * 5 * 4) + 255
    )


def test_cub_storage_follows_from_tiles_and_sweeps() -> None:
    """CCCL 3.0: parts rounded to 256 B, plus 255 B.

    400000 pairs: 8 sweeps * 2048 B, ceil(400000 / 4608) = 87 KiB, two copies, counters 256 B.
    """
    assert radix_sort_bytes(400_000, H200) == 16_384 + 87 * 1024 + 2 * 3_200_000 + 256 + 255
    assert radix_sort_bytes(2048, H200) == 1
    assert radix_sort_bytes(8192, H200, num_bits=6) == 2048 + 2 * 1024 + 256 + 255
    assert scan_bytes(512_000) == 9728 + 256 + 255
    assert select_bytes(400_000, H200) == 1024 + 256 + 255
    assert unique_by_key_bytes(262_144, H200) == 1536 + 256 + 255


def test_a_sum_over_a_full_gpu_keeps_one_number_for_each_block() -> None:
    """132 * 2048 / 256 blocks at once, five times over, 4 B each; 256 B and 255 B of alignment."""
    assert sum_storage_bytes(4096, 132 * 2048) == 1
    assert sum_storage_bytes(4097, 132 * 2048) == 83 * 256 + 255
