"""CUB's storage on every generation: tiles of CCCL 3.0's tuning headers, as nvcc compiles them."""

from __future__ import annotations

import pytest

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.kernels.cub import (
    radix_sort_bytes,
    scan_bytes,
    select_bytes,
    sum_storage_bytes,
    unique_by_key_bytes,
)
from memest.estimator.kernels.reductions import threads_per_sm

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
    assert sum_storage_bytes(ITEMS, threads_per_sm(t4) * t4.num_sms) == rounded(160 * 5 * 4) + 255
