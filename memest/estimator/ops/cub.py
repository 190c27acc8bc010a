"""Temporary storage that CUB's device-wide algorithms need.

`AliasTemporaries` rounds each part of an algorithm to 256 B and adds 255 B to align the whole.
Mirrors CCCL 3.0 (CUDA 13.0, the `cub/device/dispatch` headers and their `tuning` policies), which
torch 2.11+cu130 is built with, for int64 keys, values and sums.

The tunings go by the architecture that the code was compiled for: 7.5, 8.0, 8.6 (also for 8.9),
9.0, 10.0 and 12.0 (RELEASE.md of torch 2.11). 7.0 runs the wheels for CUDA 12.6, whose CUB is
assumed to have the same tunings. Left out: inputs of 2**28 elements or more.
"""

import torch

from memest.estimator.hardware.gpus import Gpu
from memest.units import ceil_div, round_up

_ALIGN = 256
_TILE_PADDING = 32  # `TILE_STATUS_PADDING`: states before the first tile, one per lane
_RADIX_DIGITS = 256
_SINGLE_TILE = 256 * 9  # sorts of fewer 8-byte keys run in one block of 256 threads


def _aliased(*sizes: int) -> int:
    """`AliasTemporaries` of util_temporary_storage.cuh."""
    return sum(round_up(size, _ALIGN) for size in sizes) + _ALIGN - 1


def _tile_states(num_tiles: int, state_bytes: int) -> int:
    """`tile_state_allocation_size` of single_pass_scan_operators.cuh."""
    return _aliased((num_tiles + _TILE_PADDING) * state_bytes)


def segmented_sort_bytes(num_items: int, key_bytes: int) -> int:
    """`DeviceSegmentedRadixSort::SortPairs` with int64 values: a second copy of both."""
    return _aliased(num_items * key_bytes, num_items * 8)


def radix_sort_bytes(num_items: int, gpu: Gpu, *, num_bits: int = 64, key_bytes: int = 8) -> int:
    """`DeviceRadixSort::SortPairs` of keys with int64 values (dispatch_radix_sort.cuh).

    One sweep per 8 bits of the key: 64-bit digit counts for each sweep, 32-bit look-back counts for
    each tile, and a counter. Two sweeps or more need a second copy of keys and values. A tile is
    384 threads of 24 * 4 / 8 pairs from compute capability 9.0 on, 384 of 21 * 4 / 8 on 8.x, and
    256 of 23 * 4 / 8 on 7.x. On 9.0 and later, keys of 4 bytes have 14 and keys of 2 bytes 15 pairs
    for each thread (`sm90_small_key_tuning`).
    """
    if num_items <= _SINGLE_TILE:
        return 1
    tile = 384 * 10 if gpu.capability[0] == 8 else 256 * 11
    if gpu.capability[0] >= 9:
        tile = 384 * {2: 15, 4: 14}.get(key_bytes, 12)
    sweeps = ceil_div(num_bits, 8)
    keys, values = (num_items * key_bytes, num_items * 8) if sweeps > 1 else (0, 0)
    return _aliased(
        sweeps * _RADIX_DIGITS * 8,
        ceil_div(num_items, tile) * _RADIX_DIGITS * 4,
        keys,
        values,
        sweeps * 4,
    )


def keys_sort_bytes(num_items: int, dtype: torch.dtype) -> int:
    """`DeviceRadixSort::SortKeys`, as `radix_sort_bytes` without values.

    Evidence: an H100. Each of 384 threads of a tile has 15 keys of 8 bytes, 18 of float32 or 19 of
    int32. A single tile has 256 threads of 9 keys of 8 bytes, or 19 of 4 bytes.
    """
    item = dtype.itemsize
    if num_items <= 256 * (19 * 4 // max(4, item)):
        return 1
    tile = 384 * (15 if item == 8 else 18 if dtype.is_floating_point else 19)
    return _aliased(
        item * _RADIX_DIGITS * 8,
        ceil_div(num_items, tile) * _RADIX_DIGITS * 4,
        num_items * item if item > 1 else 0,
        item * 4,
    )


def scan_bytes(num_items: int, *, value_bytes: int = 8) -> int:
    """`DeviceScan` (dispatch_scan.cuh): a state of twice `value_bytes` for each tile.

    CUB has no tuning for torch's operator. By the default policy a tile is 128 threads with 15
    values of up to 4 bytes each, or with 60 bytes of larger values.
    """
    tile = 128 * min(15, 60 // value_bytes)
    return _aliased(_tile_states(ceil_div(num_items, tile), 2 * value_bytes))


def select_bytes(num_items: int, gpu: Gpu) -> int:
    """`DeviceSelect::Flagged` of int64 positions (dispatch_select_if.cuh): 8-byte states.

    A tile is 320 threads of 22 * 4 / 8 items from compute capability 10.0 on, 384 of 11 on 9.0 and
    of 6 on 8.0. It is 128 of 10 * 4 / 8 on 7.x, 8.6 and 8.9, which have no tuning of their own.
    """
    tile = {(9, 0): 384 * 11, (8, 0): 384 * 6}.get(
        gpu.capability, 320 * 11 if gpu.capability[0] >= 10 else 128 * 5
    )
    return _aliased(_tile_states(ceil_div(num_items, tile), 8), 0, 0)


def unique_bytes(num_items: int, gpu: Gpu, item_bytes: int) -> int:
    """`DeviceSelect::Unique` (dispatch_select_if.cuh): 8-byte states, as `select_bytes`.

    A tile is 384 threads of 11 items of 8 bytes or 17 of 4 bytes on 9.0, and 192 of 10 or 256 of 18
    on 8.0; smaller items are in tiles of 256 threads with 22. By default it is 128 threads with 10
    items of up to 4 bytes.
    """
    small = {(9, 0): (256 * 22, 256 * 22, 384 * 17, 384 * 11)}
    small[8, 0] = (992 * 20, 576 * 14, 256 * 18, 192 * 10)
    tiles = small.get(gpu.capability, (1280, 1280, 1280, 640))
    tile = tiles[item_bytes.bit_length() - 1]
    return _aliased(_tile_states(ceil_div(num_items, tile), 8), 0, 0)


def run_lengths_bytes(num_items: int) -> int:
    """`DeviceRunLengthEncode::Encode` with int64 lengths: a 16-byte state for each tile.

    CUB tunes 32-bit lengths only. By the default policy a tile is 128 threads of 6 items.
    """
    return _aliased((ceil_div(num_items, 128 * 6) + _TILE_PADDING) * 16, 0, 0)


def sum_scan_bytes(num_items: int, gpu: Gpu) -> int:
    """`DeviceScan::InclusiveSum` of int32 numbers (tuning_scan.cuh): 8-byte states.

    A tile is 128 threads of 24 numbers from compute capability 9.0 on, 320 of 12 on 8.0, and 128 of
    15 by default.
    """
    tile = {(8, 0): 320 * 12}.get(gpu.capability, 128 * (24 if gpu.capability >= (9, 0) else 15))
    return _aliased(_tile_states(ceil_div(num_items, tile), 8))


def long_sum_scan_bytes(num_items: int) -> int:
    """`thrust::inclusive_scan` of int64 numbers (tuning_scan.cuh): 16-byte states.

    A tile is 224 threads of 10 numbers on compute capability 9.0.
    """
    return _aliased(_tile_states(ceil_div(num_items, 224 * 10), 16))


def thrust_unique_bytes(num_items: int) -> int:
    """`thrust::unique` of int64 positions: 16-byte states of tiles of 640, and a count."""
    return _aliased(_aliased((ceil_div(num_items, 128 * 5) + _TILE_PADDING) * 16, 0), 8)


def unique_by_key_bytes(num_items: int, gpu: Gpu) -> int:
    """`DeviceSelect::UniqueByKey` of int64 keys (dispatch_unique_by_key.cuh): 16-byte states.

    A tile is 448 threads of 11 keys from compute capability 9.0 on, 192 of 7 on 8.0, and 64 of
    11 * 4 / 8 on 7.x, 8.6 and 8.9.
    """
    return _aliased(_tile_states(ceil_div(num_items, _unique_tile(gpu)), 16), 0)


def _unique_tile(gpu: Gpu) -> int:
    if gpu.capability >= (9, 0):
        return 448 * 11
    return 192 * 7 if gpu.capability == (8, 0) else 64 * 5


def merge_sort_bytes(num_items: int) -> int:
    """`DeviceMergeSort` of int64 pairs (dispatch_merge_sort.cuh), which `thrust::sort_by_key` runs.

    It needs a second copy of both, and the beginning of each tile of 512 threads with 8 pairs.
    """
    tiles = ceil_div(num_items, 512 * 8)
    return _aliased(num_items * 8, num_items * 8, (tiles + 1) * 8)


def keys_merge_sort_bytes(num_items: int) -> int:
    """`thrust::sort` of int64 positions by torch's comparison, `merge_sort_bytes` of keys alone."""
    return _aliased(num_items * 8, (ceil_div(num_items, 512 * 8) + 1) * 8)


def thrust_unique_by_key_bytes(num_items: int, gpu: Gpu) -> int:
    """`thrust::unique_by_key` of int64 pairs (thrust/system/cuda/detail/unique_by_key.h).

    It needs the storage of `unique_by_key_bytes` with 8-byte states (items are counted in 32 bits),
    and a count.
    """
    tiles = ceil_div(num_items, _unique_tile(gpu))
    return _aliased(_aliased(_tile_states(tiles, 8), 0), 8)


def sum_storage_bytes(num_items: int, num_threads: int) -> int:
    """`DeviceReduce::Sum` into an int32 (dispatch_reduce.cuh): a partial sum for each block.

    A block has 256 threads with 16 values each. One block needs no storage. Otherwise the number of
    blocks is five times what the GPU runs at once (`subscription_factor`; `num_threads` in all).
    """
    return 1 if num_items <= 256 * 16 else _aliased(num_threads // 256 * 5 * 4)
