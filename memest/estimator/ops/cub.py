"""Temporary storage that CUB's device-wide algorithms need.

`AliasTemporaries` rounds each part of an algorithm to 256 B and adds 255 B to align the whole.
Mirrors CCCL 3.0 (CUDA 13.0, the `cub/device/dispatch` headers and their `tuning` policies), which
torch 2.11+cu130 is built with, for int64 keys, values and sums.

The tunings go by the architecture that the code was compiled for: 7.5, 8.0, 8.6 (also for 8.9),
9.0, 10.0 and 12.0 (RELEASE.md of torch 2.11). 7.0 runs the wheels for CUDA 12.6, whose CUB is
assumed to have the same tunings. Left out: inputs of 2**28 elements or more.

A tile is written as its threads times the items of each. Where CUB has no tuning for torch's
operator or for a GPU, its default policy is taken.
"""

import torch

from memest.estimator.hardware.gpus import Gpu
from memest.units import ceil_div, round_up

_ALIGN = 256
_TILE_PADDING = 32  # `TILE_STATUS_PADDING`: states before the first tile, one per lane
_RADIX_DIGITS = 256
SINGLE_TILE = 256 * 19  # most pairs of 4 bytes each that one block of 256 threads sorts


def _aliased(*sizes: int) -> int:
    """Return the bytes of one allocation for several parts, each aligned (`AliasTemporaries`)."""
    return sum(round_up(size, _ALIGN) for size in sizes) + _ALIGN - 1


def _states(num_items: int, tile: int, state_bytes: int) -> int:
    """Return the bytes of a scan's states: `state_bytes` per tile of `tile` items, with padding."""
    return (ceil_div(num_items, tile) + _TILE_PADDING) * state_bytes


def segmented_sort_bytes(num_items: int, key_bytes: int) -> int:
    """Bytes of `DeviceSegmentedRadixSort::SortPairs`: a second copy of keys and int64 values."""
    return _aliased(num_items * key_bytes, num_items * 8)


def radix_sort_bytes(
    num_items: int, gpu: Gpu, *, num_bits: int = 64, key_bytes: int = 8, value_bytes: int = 8
) -> int:
    """Bytes of `DeviceRadixSort::SortPairs` (dispatch_radix_sort.cuh); values are int64 or int32.

    Each 8 bits of the key are a pass, with a 64-bit count per digit and a 32-bit look-back count
    per digit and tile. Two passes or more need a second copy of keys and values. On 9.0 and later,
    small keys have their own tuning (`sm90_small_key_tuning`).
    """
    if num_items <= 256 * (19 * 4 // max(key_bytes, value_bytes, 4)):
        return 1
    tile = 384 * 10 if gpu.capability[0] == 8 else 256 * 11
    if gpu.capability[0] >= 9:
        tile = 384 * {2: 15, 4: 14}.get(key_bytes, 12)
    sweeps = ceil_div(num_bits, 8)
    keys, values = (num_items * key_bytes, num_items * value_bytes) if sweeps > 1 else (0, 0)
    digits, tiles = sweeps * _RADIX_DIGITS * 8, ceil_div(num_items, tile) * _RADIX_DIGITS * 4
    return _aliased(digits, tiles, keys, values, sweeps * 4)


def keys_sort_bytes(num_items: int, dtype: torch.dtype) -> int:
    """Bytes of `DeviceRadixSort::SortKeys`: `radix_sort_bytes` without values. Evidence: H100."""
    itemsize = dtype.itemsize
    if num_items <= 256 * (19 * 4 // max(4, itemsize)):
        return 1
    items_of_small_keys = 18 if dtype.is_floating_point else 19
    tile = 384 * (15 if itemsize == 8 else items_of_small_keys)
    keys = num_items * itemsize if itemsize > 1 else 0
    digits, tiles = itemsize * _RADIX_DIGITS * 8, ceil_div(num_items, tile) * _RADIX_DIGITS * 4
    return _aliased(digits, tiles, keys, itemsize * 4)


def scan_bytes(num_items: int, *, value_bytes: int = 8) -> int:
    """Bytes of `DeviceScan` (dispatch_scan.cuh): twice `value_bytes` per tile of items."""
    tile = 128 * min(15, 60 // value_bytes)
    return _aliased(_aliased(_states(num_items, tile, 2 * value_bytes)))


def select_bytes(num_items: int, gpu: Gpu) -> int:
    """Bytes of `DeviceSelect::Flagged` on int64 (dispatch_select_if.cuh): 8 per tile of items."""
    tile = {(9, 0): 384 * 11, (8, 0): 384 * 6}.get(
        gpu.capability, 320 * 11 if gpu.capability[0] >= 10 else 128 * 5
    )
    return _aliased(_aliased(_states(num_items, tile, 8)), 0, 0)


def unique_bytes(num_items: int, gpu: Gpu, item_bytes: int) -> int:
    """Bytes of `DeviceSelect::Unique` (dispatch_select_if.cuh): 8 per tile of items."""
    tiles = {  # tiles by item size: 1, 2, 4 and 8 bytes
        (9, 0): (256 * 22, 256 * 22, 384 * 17, 384 * 11),
        (8, 0): (992 * 20, 576 * 14, 256 * 18, 192 * 10),
    }.get(gpu.capability, (128 * 10, 128 * 10, 128 * 10, 128 * 5))
    tile = tiles[item_bytes.bit_length() - 1]
    return _aliased(_aliased(_states(num_items, tile, 8)), 0, 0)


def run_lengths_bytes(num_items: int) -> int:
    """Bytes of `DeviceRunLengthEncode::Encode` with int64 lengths: 16 per tile of items."""
    return _aliased(_states(num_items, 128 * 6, 16), 0, 0)


def sum_scan_bytes(num_items: int, gpu: Gpu) -> int:
    """Bytes of `DeviceScan::InclusiveSum` of int32 (tuning_scan.cuh): 8 per tile of items."""
    tile = {(8, 0): 320 * 12}.get(gpu.capability, 128 * (24 if gpu.capability >= (9, 0) else 15))
    return _aliased(_aliased(_states(num_items, tile, 8)))


def long_sum_scan_bytes(num_items: int) -> int:
    """Bytes of `thrust::inclusive_scan` of int64 on 9.0 (tuning_scan.cuh): 16 for each tile."""
    return _aliased(_aliased(_states(num_items, 224 * 10, 16)))


def thrust_unique_bytes(num_items: int) -> int:
    """Bytes of `thrust::unique` of int64 row numbers: 16 per tile of items, and 8 for the count."""
    return _aliased(_aliased(_states(num_items, 128 * 5, 16), 0), 8)


def unique_by_key_bytes(num_items: int, gpu: Gpu) -> int:
    """Bytes of `DeviceSelect::UniqueByKey` on int64 (dispatch_unique_by_key.cuh): 16 per tile."""
    return _aliased(_aliased(_states(num_items, _unique_tile(gpu), 16)), 0)


def _unique_tile(gpu: Gpu) -> int:
    if gpu.capability >= (9, 0):
        return 448 * 11
    return 192 * 7 if gpu.capability == (8, 0) else 64 * 5


def merge_sort_bytes(num_items: int) -> int:
    """Bytes of `DeviceMergeSort` of int64 pairs (dispatch_merge_sort.cuh): `thrust::sort_by_key`.

    They hold a second copy of keys and values, and where each tile begins. A tile is the 8 pairs of
    each of 512 threads.
    """
    tiles = ceil_div(num_items, 512 * 8)
    return _aliased(num_items * 8, num_items * 8, (tiles + 1) * 8)


def keys_merge_sort_bytes(num_items: int) -> int:
    """Bytes of `thrust::sort` of int64 by a comparison: `merge_sort_bytes` without values."""
    return _aliased(num_items * 8, (ceil_div(num_items, 512 * 8) + 1) * 8)


def thrust_unique_by_key_bytes(num_items: int, gpu: Gpu) -> int:
    """Bytes of `thrust::unique_by_key` of int64 pairs (thrust/system/cuda/detail/unique_by_key.h).

    They are 8 per tile of items, where `unique_by_key_bytes` has 16, and 8 for the count.
    """
    return _aliased(_aliased(_aliased(_states(num_items, _unique_tile(gpu), 8)), 0), 8)


def sum_storage_bytes(num_items: int, num_threads: int) -> int:
    """Bytes of `DeviceReduce::Sum` to int32 (dispatch_reduce.cuh): a partial sum for each block.
    `num_threads` is the number of threads that the whole GPU runs at once. A block has 256 threads
    with 16 values each. One block needs no storage. Otherwise there are five times as many partial
    sums as blocks that run at once (`subscription_factor`)."""
    return 1 if num_items <= 256 * 16 else _aliased(num_threads // 256 * 5 * 4)
