"""Kernels that work in stages: every sequence is derived by hand from the source that it names."""

from __future__ import annotations

import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.cub import (
    radix_sort_bytes,
    scan_bytes,
    select_bytes,
    sum_storage_bytes,
    unique_by_key_bytes,
)
from memest.estimator.kernels.scratch import Scratch, scratch_of
from memest.estimator.kernels.staged import (
    STAGED_EVENTS,
    index_put_is_sorted,
    masked_scatter_backward_events,
)
from memest.units import GIB

aten = torch.ops.aten

H200 = Gpu(
    name="test",
    label="Test",
    memory_bytes=140 * GIB,
    capability=(9, 0),
    num_sms=132,
    context_bytes=0,
    memory_gb_s=4800,
    source="test",
)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def requests(func: torch._ops.OpOverload, *args: object) -> list[int]:
    """Bytes asked for (positive) and freed (negative) by `func`."""
    return [event.num_bytes for event in STAGED_EVENTS[func](args, {}, func(*args), H200)]


def test_dropout_makes_its_mask_before_its_result() -> None:
    """Dropout.cu: `mask` is allocated first; where all is kept it is the other way round."""
    tensor = meta(5, 7, dtype=torch.bfloat16)

    assert requests(aten.native_dropout.default, tensor, 0.1, True) == [35, 70]
    assert requests(aten.native_dropout.default, tensor, 0.1, False) == [70, 35]


def test_few_embedding_gradients_are_added_without_sorting() -> None:
    """Embedding.cu: up to 3072 indices; an expanded gradient is copied."""
    args = (meta(1).expand(2, 1536, 64), meta(2, 1536, dtype=torch.int64), 1000, -1, False)

    found = requests(aten.embedding_dense_backward.default, *args)

    copy = 3072 * 64 * 4
    assert found == [copy, 1000 * 64 * 4, -copy]


def test_many_embedding_gradients_are_sorted_and_added_in_partial_sums() -> None:
    """EmbeddingBackwardKernel.cu: S = 4096 segments, P = 4096 // 10 + S partial sums in float32."""
    n, rows, width = 4096, 30522, 1024
    args = (meta(n, width, dtype=torch.bfloat16), meta(n, dtype=torch.int64), rows, 0, False)

    found = requests(aten.embedding_dense_backward.default, *args)

    row, partials = n * 8, 409 + 4096
    sort, unique, scan = radix_sort_bytes(n, H200), unique_by_key_bytes(n, H200), scan_bytes(n)
    sums = partials * width * 4
    assert found == [
        row, row, row, sort, -sort, -row,
        rows * width * 2,
        row, 8, row, unique, -unique, -row,
        row, row, scan, -scan,
        8, partials * 8, sums, -sums, -partials * 8,
        -8, -row, -row, -8, -row, -row, -row,
    ]  # fmt: skip


def test_a_table_of_few_wide_rows_accumulates_atomically() -> None:
    """32 rows of 2048 make 64 blocks (< 4 * 132) and 26246 partial sums (> 4 * 64)."""
    n, rows, width = 262_144, 32, 2048
    args = (meta(n, width, dtype=torch.bfloat16), meta(n, dtype=torch.int64), rows, -1, False)

    found = requests(aten.embedding_dense_backward.default, *args)

    partials = n // 10 + rows
    start = found.index(partials * 8)
    assert found[start : start + 3] == [partials * 8, partials * 8, rows * width * 4]


def test_accumulating_writes_sort_their_linear_indices() -> None:
    """Indexing.cu: 4096 rows over 18 bits of 151936 rows, 3 sweeps; expanded values are copied."""
    n = 4096
    args = (meta(151_936, 8), [meta(n, dtype=torch.int64)], meta(1).expand(n, 8), True)

    found = requests(aten.index_put.default, *args)

    storage, copy, row = 3 * 2048 + 1024 + 2 * n * 8 + 256 + 255, n * 8 * 4, n * 8
    assert index_put_is_sorted(args, {})
    assert found == [
        151_936 * 8 * 4,
        8, 1, -1, -8, 8, 1, -1, -8,
        row, row, -row,
        copy, row, row, row, storage, -storage, -row, -row, -row, -copy,
        -row,
    ]  # fmt: skip


def test_writes_that_the_backward_knows_to_be_in_range_are_not_checked() -> None:
    """`index_backward` passes `unsafe`."""
    args = (meta(9, 8), [meta(5, dtype=torch.int64)], meta(5, 8), True, True)

    found = requests(aten._index_put_impl_.default, *args)

    assert found[:4] == [9 * 8 * 4, 40, 40, -40]


def test_writes_that_overwrite_are_not_sorted() -> None:
    assert not index_put_is_sorted((meta(9, 8), [meta(5, dtype=torch.int64)], meta(5, 8)), {})


def test_the_gradient_of_masked_scatter_depends_on_the_mask() -> None:
    """Worst case: three int64 positions per element; no true entry: as many zeros."""
    args = (meta(2, 50, 256), meta(2, 50, 1, dtype=torch.bool), [2, 32, 256])
    out = meta(2, 32, 256)

    worst = masked_scatter_backward_events(args, {}, out, H200)
    empty = masked_scatter_backward_events(args, {}, out, H200, num_selected=0)

    source = 2 * 32 * 256
    assert scratch_of(worst) == Scratch(before=(source * 3 * 8,))
    assert scratch_of(empty) == Scratch(before=(source * 4,))
    select = select_bytes(25600, H200)
    finding = [25600, 4, 21503, -21503, select, -select, -4, -25600]
    assert [e.num_bytes for e in empty] == [*finding, source * 4, source * 4, -source * 4]


def test_positions_are_counted_before_they_are_selected() -> None:
    """Nonzero.cu: an int32 count; up to 4096 entries are summed in one block."""
    args = (meta(8, 4, dtype=torch.bool),)
    out = meta(3, 2, dtype=torch.int64)

    found = STAGED_EVENTS[aten.nonzero.default](args, {}, out, H200)

    select = select_bytes(32, H200)
    assert [e.num_bytes for e in found] == [4, 1, -1, 48, select, -select, -4]


def test_a_sum_over_a_full_gpu_keeps_one_number_for_each_block() -> None:
    """132 * 2048 / 256 blocks at once, five times over, 4 B each; 256 B and 255 B of alignment."""
    assert sum_storage_bytes(4096, 132 * 2048) == 1
    assert sum_storage_bytes(4097, 132 * 2048) == 83 * 256 + 255


def test_a_convolution_copies_its_gradient_until_the_weight_is_done() -> None:
    """Conv of 3 channels padded to 8 (16 B): input, weight and gradient rearranged, with what the
    kernel asks for by itself; bias last.
    """
    batch, width, patch = 1, 1408, 14
    grad = meta(batch, 16, 16, width, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    args = (
        grad,
        meta(batch, 3, 224, 224, dtype=torch.bfloat16),
        meta(width, 3, patch, patch, dtype=torch.bfloat16),
        [width], [patch, patch], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True],
    )  # fmt: skip
    out = (None, args[2], meta(width, dtype=torch.bfloat16))

    found = [
        e.num_bytes for e in STAGED_EVENTS[aten.convolution_backward.default](args, {}, out, H200)
    ]

    copy, weight = 256 * width * 2, width * 3 * patch * patch * 2
    rearranged = 8 * 224 * 224 * 2 + width * 8 * patch * patch * 2 + copy
    workspace = found[2]
    assert rearranged <= workspace <= rearranged + 512
    assert found[:6] == [copy, weight, workspace, -workspace, -copy, width * 2]


def test_a_roll_over_two_dimensions_keeps_what_it_rolled_first() -> None:
    """Swin's shift on an H100: the first roll lives until the second is made."""
    tensor = meta(4, 56, 56, 96)
    num_bytes = tensor.numel() * 4

    def sizes(*args: object) -> list[int]:
        events = STAGED_EVENTS[aten.roll.default]((tensor, *args), {}, tensor, H200)
        return [e.num_bytes for e in events]

    assert sizes([-3, -3], [1, 2]) == [num_bytes, num_bytes, -num_bytes]
    assert sizes([-3], [1]) == [num_bytes]


def test_each_further_index_is_brought_into_range_and_added() -> None:
    """CLIP's pooled rows on an H100: 16 rows of two indices, 128 B each time."""
    target, row = meta(16, 77, 512), meta(16, dtype=torch.int64)
    args = (target, [row, row], meta(16, 512), True, True)

    found = [
        e.num_bytes for e in STAGED_EVENTS[aten._index_put_impl_.default](args, {}, target, H200)
    ]

    assert found[1:8] == [128, 128, -128, 128, 128, -128, -128]
