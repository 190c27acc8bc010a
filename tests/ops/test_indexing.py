"""Indices that are masks, or lie on the host, as the GPU was recorded to take them; bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import memest
from memest.estimator.ops.cub import radix_sort_bytes, scan_bytes, select_bytes, unique_by_key_bytes
from memest.estimator.ops.registry import op_of
from memest.estimator.ops.temporaries import Scratch
from tests.op_calls import H100, H200, meta, requested, scratch, sizes, workspaces
from tests.op_calls import requests as requests_of
from tests.requested import Requests
from tests.requests_at_peak import scratch_of

aten = torch.ops.aten
INT = torch.int64

MASK = torch.arange(16 * 427).view(16, 427) % 7 < 3
COUNT = int(MASK.sum())
POSITIONS = COUNT * 2 * 8
"""One int64 for each dimension of a mask that finds so many."""


@pytest.fixture
def requests() -> Iterator[Requests]:
    with memest.virtual_gpu("h100-80gb") as session:
        yield Requests(session.virtual)


def test_a_mask_is_searched_before_what_it_selects_is_made(requests: Requests) -> None:
    """6832 entries: their number, the sum's storage, the positions, the selection's storage."""
    values, mask = torch.ones(16, 427, device="cuda"), MASK.cuda()

    found = requests.of(lambda: values[mask])

    assert [n for n in found if n > 0] == [4, 21503, POSITIONS, 1023, 4 * COUNT]
    assert found.index(-POSITIONS) > found.index(4 * COUNT)


def test_a_mask_that_selects_is_an_index(requests: Requests) -> None:
    values, mask = torch.ones(16, 427, device="cuda"), MASK.cuda()

    assert requests.of(lambda: torch.masked_select(values, mask)) == requests.of(
        lambda: values[mask]
    )


def test_a_number_fills_where_a_mask_is_true_and_a_row_is_put_at_positions(
    requests: Requests,
) -> None:
    hidden, mask = torch.ones(16, 427, 32, device="cuda"), MASK.cuda()
    row = torch.ones(32, device="cuda")

    def fill() -> None:
        hidden[mask] = 0

    def put() -> None:
        hidden[mask] = row

    assert POSITIONS not in requests.of(fill)
    assert [n for n in requests.of(put) if n > 0] == [4, 21503, POSITIONS, 1023]


def test_what_is_put_elsewhere_is_a_copy_before_the_mask_is_searched(requests: Requests) -> None:
    hidden, mask = torch.ones(16, 427, device="cuda"), MASK.cuda()
    values = torch.ones(COUNT, device="cuda")

    found = requests.of(lambda: hidden.index_put((mask,), values))

    assert [n for n in found if n > 0] == [4 * MASK.numel(), 4, 21503, POSITIONS, 1023]


def test_a_mask_of_another_shape_is_refused(requests: Requests) -> None:
    """The losses of SSD300 are a column, and its mask has a row for each image."""
    losses, mask = torch.ones(24, 1, device="cuda"), torch.rand(4, 6, device="cuda") > 0.5
    message = r"mask \[4, 6\] at index 0 does not match .* tensor \[24, 1\] at index 0"

    for use in (lambda: losses[mask], lambda: losses.__setitem__(mask, 0)):
        with pytest.raises(IndexError, match=message):
            use()
    with pytest.raises(IndexError, match=r"\[6, 4\] at index 1 .* \[4, 6, 5\] at index 2"):
        torch.ones(4, 6, 5, device="cuda")[:, mask.t()]


@pytest.mark.parametrize("is_mask", [False, True])
def test_indices_of_the_host_are_copied_to_the_gpu(requests: Requests, is_mask: bool) -> None:
    values = torch.ones(100, 8, device="cuda")
    index = torch.arange(6)

    found = requests.of(lambda: values[torch.arange(100) < 6 if is_mask else index])

    assert found[:2] == [6 * 8, 6 * 8 * 4]
    assert -6 * 8 in found


def test_the_backward_searches_again(requests: Requests) -> None:
    weight, mask = torch.ones(16, 427, device="cuda", requires_grad=True), MASK.cuda()
    loss = weight[mask].sum()

    found = requests.of(loss.backward)

    assert found.count(POSITIONS) == 1


def test_indices_of_unlike_strides_are_copied_to_int64_tables() -> None:
    """`AdvancedIndex`: (5, 1) and (1, 7) broadcast to strides (1, 0) and (0, 1)."""
    rows, columns = meta(5, 1, dtype=torch.int64), meta(1, 7, dtype=torch.int64)

    found = scratch(aten.index.Tensor, meta(5, 7, dtype=torch.bool), [rows, columns])

    assert found == Scratch(before=(5 * 7 * 8, 5 * 7 * 8))
    assert scratch(aten.index.Tensor, meta(5, 7), [rows]) == Scratch()


def test_int32_indices_are_cast_after_they_are_broadcast() -> None:
    """`make_info`: the casts are contiguous, and then an int64 index is copied to be alike."""
    rows, columns = meta(5, 1, dtype=torch.int32), meta(7, dtype=torch.int64)

    found = scratch(aten.index.Tensor, meta(5, 7), [rows, columns])

    assert found == Scratch(before=(5 * 7 * 8, 5 * 7 * 8))
    assert scratch(aten.index.Tensor, meta(5, 7), [rows]) == Scratch(before=(5 * 8,))


def test_a_mask_whose_values_are_not_known_is_reported() -> None:
    args = (meta(4, 6, 3), [meta(4, 6, dtype=torch.bool)])

    assert not op_of(aten.index.Tensor).is_modelled(args, {}, H200)
    assert op_of(aten.index_put_.default).is_modelled((*args, meta(1)), {}, H200)
    assert not op_of(aten.index_put_.default).is_modelled((*args, meta(3)), {}, H200)


def test_masked_scatter_expands_its_target_to_the_mask() -> None:
    args = (meta(5), meta(5, 5, dtype=torch.bool), meta(25))

    assert scratch(aten.masked_scatter.default, *args).after[0] == 25 * 8


@pytest.mark.usefixtures("requests")
def test_a_number_is_selected_by_a_mask_of_one() -> None:
    """`masked_select_out_cuda_impl` gives both a dimension."""
    value, mask = torch.tensor(1.0, device="cuda"), torch.tensor(True, device="cuda")

    assert torch.masked_select(value, mask).shape == (1,)
    assert torch.masked_select(value, ~mask).shape == (0,)


def test_masked_scatter_counts_the_mask() -> None:
    """int64 count per element, the expanded mask, and 25600 / 896 = 29 tiles: (29 + 32) * 16 B."""
    args = (meta(2, 50, 256), meta(2, 50, 1, dtype=torch.bool), meta(2, 32, 256))

    found = scratch(aten.masked_scatter.default, *args)

    assert found == Scratch(after=(25600 * 8, 25600, 1024 + 255 + 1 + 255))


def test_the_gradient_of_a_bag_sorts_however_few_indices() -> None:
    indices, bags = meta(640, dtype=torch.int64), meta(64, dtype=torch.int64)
    args = (meta(64, 64), indices, bags, indices, bags, bags, 1000, False, 0, False, None)
    asked = sizes(aten._embedding_bag_backward.default, args, meta(1000, 64))

    assert asked == [
        5120, 5120, 5120, 1, 256000, 5120, 8, 5120, 1279, 5120, 5120, 1279, 8, 5632, 180224,
    ]  # fmt: skip
    assert op_of(aten._embedding_bag_backward.default).is_modelled(args, {}, H100)


def test_few_embedding_gradients_are_added_without_sorting() -> None:
    """Embedding.cu: up to 3072 indices; an expanded gradient is copied."""
    args = (meta(1).expand(2, 1536, 64), meta(2, 1536, dtype=torch.int64), 1000, -1, False)

    found = requests_of(aten.embedding_dense_backward.default, *args)

    copy = 3072 * 64 * 4
    assert found == [copy, 1000 * 64 * 4, -copy]


def test_many_embedding_gradients_are_sorted_and_added_in_partial_sums() -> None:
    """EmbeddingBackwardKernel.cu: S = 4096 segments, P = 4096 // 10 + S partial sums in float32."""
    n, rows, width = 4096, 30522, 1024
    args = (meta(n, width, dtype=torch.bfloat16), meta(n, dtype=torch.int64), rows, 0, False)

    found = requests_of(aten.embedding_dense_backward.default, *args)

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


def test_int32_indices_of_embedding_gradients_are_sorted_in_one_block() -> None:
    """Recorded on an H200: 4 bytes an index, and 8 for the two counts."""
    n, rows, width = 4096, 1000, 768
    args = (meta(n, width), meta(n, dtype=torch.int32), rows, -1, False)

    found = requests_of(aten.embedding_dense_backward.default, *args)

    assert [size for size in found if size > 0] == [
        16384, 16384, 16384, 1, 3_072_000, 16384, 8, 16384, 1279, 4000, 4000, 1023, 8, 5636,
        4_328_448,
    ]  # fmt: skip
    assert op_of(aten.embedding_dense_backward.default).is_modelled(args, {}, H100)


def test_a_table_of_few_wide_rows_accumulates_atomically() -> None:
    """32 rows of 2048 make 64 blocks (< 4 * 132) and 26246 partial sums (> 4 * 64)."""
    n, rows, width = 262_144, 32, 2048
    args = (meta(n, width, dtype=torch.bfloat16), meta(n, dtype=torch.int64), rows, -1, False)

    found = requests_of(aten.embedding_dense_backward.default, *args)

    partials = n // 10 + rows
    start = found.index(partials * 8)
    assert found[start : start + 3] == [partials * 8, partials * 8, rows * width * 4]


def test_accumulating_writes_sort_their_linear_indices() -> None:
    """Indexing.cu: 4096 rows over 18 bits of 151936 rows, 3 sweeps; expanded values are copied."""
    n = 4096
    args = (meta(151_936, 8), [meta(n, dtype=torch.int64)], meta(1).expand(n, 8), True)

    found = requests_of(aten.index_put.default, *args)

    storage, copy, row = 3 * 2048 + 1024 + 2 * n * 8 + 256 + 255, n * 8 * 4, n * 8
    assert found == [
        151_936 * 8 * 4,
        8, 1, -1, -8, 8, 1, -1, -8,
        row, row, -row,
        copy, row, row, row, storage, -storage, -row, -row, -row, -copy,
        -row,
    ]  # fmt: skip


def test_the_largest_row_number_decides_the_bits_of_the_sort() -> None:
    """Recorded on an H200 (SimCLR's `labels[~mask]`): 65,535 has 16 bits, so 2 sweeps."""
    rows, columns = torch.ones(256, 256, dtype=torch.bool).triu(1).nonzero().t().to("meta")
    index = [i.repeat(2)[:65280] for i in (rows, columns)]

    found = requests_of(
        aten._index_put_impl_.default, meta(256, 256), index, meta(len(index[0])), True, True
    )

    assert 1_064_447 in found


def test_writes_that_the_backward_knows_to_be_in_range_are_not_checked() -> None:
    """`index_backward` passes `unsafe`."""
    args = (meta(9, 8), [meta(5, dtype=torch.int64)], meta(5, 8), True, True)

    found = requests_of(aten._index_put_impl_.default, *args)

    assert found[:4] == [9 * 8 * 4, 40, 40, -40]


def test_the_host_multiplies_its_own_indices_before_values_accumulate(requests: Requests) -> None:
    """Recorded on an H200 (RT-DETR): a row for each index, then what sorts them."""
    boxes = torch.ones(4, 300, 4, device="cuda")
    batch, query = torch.arange(4).repeat_interleave(7), torch.arange(28)
    values, row = torch.ones(28, 4, device="cuda"), 28 * 8

    of_host = requests.of(lambda: boxes.index_put_((batch, query), values, accumulate=True))
    indices = batch.cuda(), query.cuda()
    of_gpu = requests.of(lambda: boxes.index_put_(indices, values, accumulate=True))

    assert of_host == [row, row, -row, row, row, row, 1, -row, -row, -row, -row, -1]
    linear = [row, row, -row, row, row, -row, -row]
    assert of_gpu == [8, 1, -8, -1] * 4 + linear + of_host[3:]


def test_one_value_of_several_dimensions_is_repeated() -> None:
    """A gradient of an expanded bias has the shape (1, 1)."""
    index = meta(1, dtype=torch.int64)

    of_two = requests_of(aten._index_put_impl_.default, meta(9), [index], meta(1, 1), True, True)
    of_none = requests_of(aten._index_put_impl_.default, meta(9), [index], meta(1), True, True)

    assert of_two == of_none


def test_writes_that_overwrite_are_not_sorted() -> None:
    args = (meta(9, 8), [meta(5, dtype=torch.int64)], meta(5, 8))

    assert requested(aten.index_put.default, args, {}, args[0], H200) == Scratch()


def test_the_gradient_of_masked_scatter_depends_on_the_mask() -> None:
    """Worst case: three int64 positions per element; no true entry: as many zeros."""
    args = (meta(2, 50, 256), meta(2, 50, 1, dtype=torch.bool), [2, 32, 256])
    out = meta(2, 32, 256)

    op = op_of(aten.masked_scatter_backward.default)
    worst, empty = (op.requests(op.call(args, {}, out, H200, known)) for known in ((), (0,)))

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

    found = requested(aten.nonzero.default, args, {}, out, H200)

    select = select_bytes(32, H200)
    assert [e.num_bytes for e in found] == [4, 1, -1, 48, select, -select, -4]


def test_each_further_index_is_brought_into_range_and_added() -> None:
    """CLIP's pooled rows on an H100: 16 rows of two indices, 128 B each time."""
    target, row = meta(16, 77, 512), meta(16, dtype=torch.int64)
    args = (target, [row, row], meta(16, 512), True, True)

    found = [e.num_bytes for e in requested(aten._index_put_impl_.default, args, {}, target, H200)]

    assert found[1:8] == [128, 128, -128, 128, 128, -128, -128]


def test_norms_of_looked_up_rows_sort_the_indices() -> None:
    table, indices = meta(5000, 768), meta(20, 89, dtype=INT)

    assert requests_of(aten.embedding_renorm_.default, table, indices, 5.0, 2.0) == [
        14240, 14240, 712, -712, -14240, 14240, 8, 1023, -1023, -8, -14240, -14240,
    ]  # fmt: skip


def test_indices_of_a_gradient_are_made_contiguous_before_it() -> None:
    grad, indices = meta(64, 1024)[:, :512], meta(64, 30, dtype=INT)[:, 3]

    found = requests_of(aten.embedding_dense_backward.default, grad, indices, 100, -1, False)

    assert found[:2] == [512, 64 * 512 * 4]


@pytest.mark.parametrize("is_column", [False, True])
def test_a_vector_of_any_stride_is_looked_up_as_it_is(is_column: bool) -> None:
    indices = meta(64, 30, dtype=INT)[:, 3] if is_column else meta(64, 30, dtype=INT)[:, 1:]

    found = workspaces(aten.embedding.default, meta(100, 8), indices)
    assert found == (() if is_column else (64 * 29 * 8,))


@pytest.mark.parametrize(
    ("reduce", "include_self", "dtype", "measured"),
    [
        ("prod", False, torch.int64, [256000]),
        ("amax", True, torch.int32, [256000]),
        ("amax", False, torch.int32, [256000, 2400, -2400]),
        ("mean", True, torch.int64, [256000, 256000, 76800, -76800, 64000, -64000, -256000]),
    ],
)
def test_a_mean_of_rows_counts_them(
    reduce: str, include_self: bool, dtype: torch.dtype, measured: list[int]
) -> None:
    """Recorded on an H200: 300 of 1000 rows of 64; in place without the result."""
    x, source, index = meta(1000, 64), meta(300, 64), meta(300, dtype=dtype)
    args, options = (x, 0, index, source, reduce), {"include_self": include_self}
    func, in_place = aten.index_reduce.default, aten.index_reduce_.default

    found = requested(func, args, options, meta(1000, 64), H100)
    assert [event.num_bytes for event in found] == measured
    found = requested(in_place, args, options, x, H100)
    assert [event.num_bytes for event in found] == measured[1:]
