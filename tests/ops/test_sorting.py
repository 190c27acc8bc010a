"""Sorting, scans, counting and searches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memest
from memest.estimator.ops.registry import op_of
from memest.estimator.ops.sorting import sort_bytes
from memest.estimator.ops.temporaries import Scratch
from memest.units import MIB
from tests.op_calls import H100, H200, laid_out, meta, requested, requests, scratch, workspaces

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_short_sorts_need_a_range_and_long_ones_a_radix_sort() -> None:
    """Sort.cpp: up to 4096 within a block; else range and CUB, thrice the data for several rows."""
    row = 400_000 * 8

    assert scratch(aten.sort.default, meta(4, 2048, dtype=torch.int64)).after == (2048 * 8,)
    one = scratch(aten.sort.default, meta(400_000, dtype=torch.int64)).after
    several = scratch(aten.sort.default, meta(4, 100_000, dtype=torch.int64)).after
    assert one == (row, 6_505_983)
    assert several == (row, row, row, 6_505_983)


def test_only_a_scan_of_one_row_needs_storage() -> None:
    """ScanUtils.cuh: CUB's, or if it is deterministic 13 sums over blocks of 512 * 16 values."""
    assert scratch(aten.cumsum.default, meta(4, 100_000), -1) == Scratch()
    assert scratch(aten.cumsum.default, meta(262_144), 0) == Scratch(after=(2047,))  # an H100's
    assert scratch(aten.cumsum.default, meta(1_200_000), 0) == Scratch(after=(5887,))
    torch.use_deterministic_algorithms(True)
    try:
        assert scratch(aten.cumsum.default, meta(100_000), 0) == Scratch(after=(13 * 4,))
    finally:
        torch.use_deterministic_algorithms(False)
    assert scratch(aten.cumsum.default, meta(4, 9, dtype=torch.bool), -1).after == (36 * 8,)


def test_scans_write_to_a_given_tensor() -> None:
    """PyTorch Geometric's `cumsum` writes behind a zero; ScanKernels.cpp: `contiguous_out_arg`."""
    with memest.virtual_gpu("h100-80gb") as gpu:
        counts = torch.ones(262_144, dtype=torch.int64, device="cuda")
        sums, every_other = counts.new_zeros(len(counts) + 1), counts.new_zeros(len(counts), 2)
        before = torch.cuda.memory_allocated()
        torch.cumsum(counts, 0, out=sums[1:])
        assert torch.cuda.max_memory_allocated() - before < MIB  # CUB's
        torch.cumsum(counts, 0, out=every_other[:, 0])
        assert 0 < torch.cuda.max_memory_allocated() - before - counts.nbytes < MIB
        counts.cumsum_(0)

    assert not gpu.report().coverage["unmodelled"]


def test_logarithms_of_running_sums_copy_what_is_not_contiguous() -> None:
    """`scan_dim` of ScanUtils.cuh; the result of ScanKernels.cpp is contiguous."""
    func, turned = aten.logcumsumexp.default, meta(64, 4, 32).transpose(0, 1)

    assert scratch(func, meta(4, 64, 32), 1) == Scratch()
    assert scratch(func, turned, 1) == Scratch(after=(4 * 64 * 32 * 4,))
    assert op_of(func).is_modelled((turned, 1), {}, H100)
    assert not op_of(func).is_modelled((meta(64), 0), {}, H100)
    assert laid_out(func, (turned, 1), func(turned, 1)).is_contiguous()


def test_searches_copy_values_before_boundaries() -> None:
    """BucketizationUtils.h: what is not contiguous, or of another type than the common one."""
    rows, steps, search = meta(4, 63), meta(4, 128), aten.searchsorted.Tensor
    turned = meta(128, 4).t()

    assert scratch(search, rows, steps) == Scratch()
    assert scratch(search, rows, turned) == Scratch(after=(4 * 128 * 4,))
    halves = meta(4, 63, dtype=torch.float16)
    assert scratch(search, halves, steps) == Scratch(after=(4 * 63 * 4,))
    assert scratch(aten.bucketize.Tensor, turned, meta(63)) == Scratch(after=(4 * 128 * 4,))
    assert op_of(search).is_modelled((rows, turned), {}, H100)
    assert not op_of(search).is_modelled((halves, turned), {}, H100)
    assert not op_of(search).is_modelled((rows, steps), {"sorter": rows}, H100)


def test_topk_over_a_vocabulary_shares_counts_among_blocks() -> None:
    """`mbtopk` of TensorTopK.cu; recorded on an H100, with as many multiprocessors."""
    args = (meta(4, 96000), 6)
    made = meta(4, 6), meta(4, 6, dtype=torch.int64)
    events = [e.num_bytes for e in requested(aten.topk.default, args, {}, made, H200)]

    kept = [16, 32, 32, 192512, 4096, 1504, 1504]
    assert events == [96, 192, *kept, *(1279, -1279) * 2, *(-n for n in reversed(kept))]
    few = requested(aten.topk.default, (meta(8192, 128), 8), {}, (), H200)
    assert not few
    assert op_of(aten.topk.default).is_modelled(args, {}, H200)
    assert op_of(aten.topk.default).is_modelled((meta(4, 96000), 4096), {}, H200)
    assert not op_of(aten.topk.default).is_modelled((meta(4, 96000), 5000), {}, H200)


def test_a_histogram_between_given_bounds_counts_in_shared_memory() -> None:
    """SummaryOps.cu: equal bounds are first looked for, which is not modelled."""
    experts = meta(4096, dtype=torch.int32)

    assert requested(aten.histc.default, (experts, 128, 0, 127), {}, meta(128), H200) == Scratch()
    assert op_of(aten.histc.default).is_modelled((experts, 128, 0, 127), {}, H200)
    assert not op_of(aten.histc.default).is_modelled((experts, 128), {}, H200)


def test_a_running_product_of_a_row_is_scanned_by_cub() -> None:
    """As recorded on an H100 for the 1,000 betas of a diffusion; rows beside it need nothing."""
    assert scratch(aten.cumprod.default, meta(1000), 0) == Scratch(after=(1023,))
    assert scratch(aten.cumprod.default, meta(2, 1000), 1) == Scratch(after=())


@pytest.mark.parametrize(
    ("shape", "dtype", "asked"),
    [
        ((1, 50257), torch.float32, (402056, 622335)),
        ((1, 50257), torch.bfloat16, (402056, 516607)),
        ((4, 32000), torch.float32, (1024000, 1024000, 512000, 1569279)),
        ((4, 32000), torch.bfloat16, (1024000, 1024000, 256000, 1308159)),
        ((128, 5000), torch.float32, (5120000, 7680255)),
    ],
)
def test_long_rows_are_sorted_by_keys_of_their_own_size(
    shape: tuple[int, int], dtype: torch.dtype, asked: tuple[int, ...]
) -> None:
    x = meta(*shape, dtype=dtype)

    assert sort_bytes(x, -1, H100) == asked
    assert op_of(aten.sort.default).is_modelled((x, -1), {}, H100)
    assert sort_bytes(x.t(), 0, H100) == asked


def test_a_column_is_copied_before_it_is_sorted() -> None:
    """`sort_cuda_kernel` (Sort.cpp), as the confidence of boxes before a suppression."""
    boxes = meta(25_200, 85)
    whole = sort_bytes(meta(25_200), -1, H100)
    column = sort_bytes(boxes[:, 4], -1, H100)

    assert column == (25_200 * 4, *whole)
    assert op_of(aten.sort.default).is_modelled((boxes[:, 4], -1), {}, H100)


def test_columns_are_sorted_as_copies_in_order_of_the_columns() -> None:
    """`sort_cuda_kernel` (Sort.cpp): the input, both results, and then as for rows."""
    table, num_bytes = meta(8192, 6), 8192 * 6 * 4
    rows = sort_bytes(meta(6, 8192), -1, H100)

    assert sort_bytes(table, 0, H100) == (num_bytes, num_bytes, 2 * num_bytes, *rows)
    assert sort_bytes(table[:, :4], 0, H100)[:3] == tuple(8192 * 4 * n for n in (4, 4, 8))
    assert op_of(aten.sort.default).is_modelled((table, 0), {}, H100)


def test_a_few_sought_elements_are_compared_one_by_one() -> None:
    elements, sought = meta(50257, dtype=INT), meta(1, dtype=INT)
    assert workspaces(aten.isin.Tensor_Tensor, elements, sought) == (50257, 50257)
    assert op_of(aten.isin.Tensor_Tensor).is_modelled((elements, sought), {}, H100)
    many = meta(100, dtype=INT)
    assert not op_of(aten.isin.Tensor_Tensor).is_modelled((elements, many), {}, H100)


def test_numbers_are_counted_after_their_extremes_are_read() -> None:
    labels, staged = meta(6144, dtype=INT), [1960, 4, -4, -1960]
    large = requests(aten.bincount.default, meta(1_003_264, dtype=INT), out=meta(361, dtype=INT))

    assert requests(aten.bincount.default, labels, out=meta(59, dtype=INT)) == [8, -8, 8, -8, 472]
    assert large[0] == 8
    assert len(large) == 2 * (2 + len(staged)) + 1


UNIQUE = [  # (op, dtype, elements, inverse, counts, requests on an H100)
    ("unique", INT, 7, 0, 0, [56, 1, -1, 56, 8, 1023, -1023, -8, -56]),
    ("unique", FLOAT, 4097, 0, 1,
     [16388, 1, -1, 16388, 8, 32776, 1023, -1023, -8, -16388]),
    ("unique", torch.int32, 300_000, 0, 0,
     [1200000, 1251839, -1251839, 1200000, 8, 1279, -1279, -8, -1200000]),
    ("unique", INT, 300_000, 1, 1,
     [2400000, 2400000, 2400000, 4884479, -4884479, -2400000, 2400000, 2400000, 1791, -1791,
      -2400000, 2400000, 8, 2400000, 7167, -7167, -8, -2400000, -2400000]),
    ("unique", torch.bool, 300_000, 1, 0, [4, 21503, -21503, 2, 16, 2400000, -4]),
    ("consecutive", torch.uint8, 300_000, 1, 0,
     [2400000, 1200000, 1791, -1791, -1200000, 300000, 8, 1279, -1279, -8]),
    ("consecutive", torch.float64, 1000, 0, 1, [8000, 8, 8000, 1023, -1023, -8]),
    ("unique", INT, 0, 1, 1, []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "count", "inverse", "counts", "measured"), UNIQUE)
def test_unique_values_are_sorted_and_have_room_for_all(
    name: str, dtype: torch.dtype, count: int, inverse: int, counts: int, measured: list[int]
) -> None:
    """UniqueCub.cu: the result keeps the storage that has as many elements as the input."""
    values = meta(count, dtype=dtype)
    kept = meta(min(count, 2 if dtype is torch.bool else count), dtype=dtype)
    out = kept, meta(count * inverse, dtype=INT), meta(count * counts, dtype=INT)
    func: Any = aten._unique2.default if name == "unique" else aten.unique_consecutive.default
    args = (values, True) if name == "unique" else (values,)

    assert requests(func, *args, bool(inverse), bool(counts), out=out) == measured
    assert op_of(func).is_modelled(args, {}, H100)


UNIQUE_ROWS = [  # (dtype, shape, dim, inverse, counts, rows found, requests on an H200)
    (INT, (1, 1), 0, 0, 0, 1, [8, 767, -767, 1535, -1535, 8, -8]),
    (FLOAT, (20_000, 3), 0, 0, 0, 8, [160000, 160511, -160511, 1791, -1791, 96, -160000]),
    (INT, (100_000, 2), 0, 1, 0, 4,
     [800000, 800511, -800511, 800000, 800000, 255, -255, 1791, -1791, -800000, 3839, -3839,
      64, -800000]),
    (INT, (1000, 17), 0, 0, 1, 996,
     [8000, 8703, -8703, 8008, 1535, -1535, 7968, 255, -255, -8008, 135456, -8000]),
    (torch.int32, (2, 3), 1, 1, 1, 2,
     [24, 24, 767, -767, 24, 24, 255, -255, 1279, -1279, -24, 32, 1535, -1535, 16, 255, -255,
      -32, 16, -24, -24]),
    (torch.int32, (300, 1), 1, 0, 0, 1, [8, 767, -767, 1535, -1535, 1200, -8]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "shape", "dim", "inverse", "counts", "found", "measured"), UNIQUE_ROWS
)
def test_unique_rows_are_sorted_by_their_positions(
    dtype: torch.dtype,
    shape: tuple[int, int],
    dim: int,
    inverse: int,
    counts: int,
    found: int,
    measured: list[int],
) -> None:
    values = meta(*shape, dtype=dtype)
    kept = meta(*(found if i == dim else n for i, n in enumerate(shape)), dtype=dtype)
    out = kept, meta(shape[dim] * inverse, dtype=INT), meta(found * counts, dtype=INT)
    func: Any = aten.unique_dim.default
    args = values, dim, True, bool(inverse), bool(counts)

    assert requests(func, *args, out=out) == measured
    assert op_of(func).is_modelled(args, {}, H100)


@pytest.mark.parametrize(
    ("inverse", "counts", "measured"),
    [
        (False, False, [800, 1535, -1535, 2400, -800]),
        (False, True, [800, 808, 1535, -1535, 800, 255, -255, -808, 2400, -800]),
        (True, False, [800, 800, 800, 255, -255, 1279, -1279, -800, 1535, -1535, 2400, -800]),
    ],
)
def test_consecutive_rows_are_not_sorted(inverse: bool, counts: bool, measured: list[int]) -> None:
    """Recorded on an H200: 100 rows of three int64, all of them unique."""
    rows, row = meta(100, 3, dtype=torch.int64), meta(100, dtype=torch.int64)
    for func, args in (
        (aten.unique_dim_consecutive.default, (rows, 0, inverse, counts)),
        (aten.unique_consecutive.default, (rows, inverse, counts, 0)),
    ):
        found = requested(func, args, {}, (rows, row, row), H200)

        assert [event.num_bytes for event in found] == measured
        assert op_of(func).is_modelled(args, {}, H200)
