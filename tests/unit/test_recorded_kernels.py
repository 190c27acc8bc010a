"""Kernels as they were recorded on an H100 in scripts that nobody here wrote; bytes, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memest.estimator.device.kernel_calls import _EVENTS
from memest.estimator.device.mode import _MADE_HERE as MADE_HERE
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.kernels.tables import SCRATCH, is_partly_modelled
from memest.estimator.kernels.transfers import to_host_scratch

aten = torch.ops.aten
H100 = find_gpu("h100-80gb")
INT, FLOAT = torch.int64, torch.float32


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def events(func: Any, *args: Any, out: Any = None) -> list[int]:
    """Of `func` in order, a free below 0."""
    made = MADE_HERE[func](args, {}) if func in MADE_HERE else out
    made = func(*args) if made is None else made
    return [event.num_bytes for event in _EVENTS[func](args, {}, made, H100)]


def scratch(func: Any, *args: Any) -> tuple[int, ...]:
    """Beside the outputs."""
    made = MADE_HERE[func](args, {}) if func in MADE_HERE else func(*args)
    found = SCRATCH[func](args, {}, made, H100)
    return (*found.before, *found.after)


def test_logsumexp_looks_for_infinite_maxima_first() -> None:
    found = events(aten.logsumexp.default, meta(4096, 16), [1])

    assert found == [
        16384, 16384, 4096, -4096, -16384, 262144, 16384, -262144, -16384,
    ]  # fmt: skip


def test_a_few_sought_elements_are_compared_one_by_one() -> None:
    elements, sought = meta(50257, dtype=INT), meta(1, dtype=INT)
    assert scratch(aten.isin.Tensor_Tensor, elements, sought) == (50257, 50257)
    assert not is_partly_modelled(aten.isin.Tensor_Tensor, (elements, sought), {}, H100)
    many = meta(100, dtype=INT)
    assert is_partly_modelled(aten.isin.Tensor_Tensor, (elements, many), {}, H100)


def test_a_draw_of_many_probabilities_stages_its_extremes() -> None:
    found = events(aten.multinomial.default, meta(24, 50257), 1)

    extreme = [592, 4, -4, -592]
    assert found == [
        192, 4, *extreme, 1, 4, *extreme, 1, 1, -1, -4, -1, -4, 96, 24, 1, -24, -96, 1, -1,
        4824672, -4824672, -1, -1,
    ]  # fmt: skip


def test_norms_of_looked_up_rows_sort_the_indices() -> None:
    table, indices = meta(5000, 768), meta(20, 89, dtype=INT)

    assert events(aten.embedding_renorm_.default, table, indices, 5.0, 2.0) == [
        14240, 14240, 712, -712, -14240, 14240, 8, 1023, -1023, -8, -14240, -14240,
    ]  # fmt: skip


def test_indices_of_a_gradient_are_made_contiguous_before_it() -> None:
    grad, indices = meta(64, 1024)[:, :512], meta(64, 30, dtype=INT)[:, 3]

    found = events(aten.embedding_dense_backward.default, grad, indices, 100, -1, False)

    assert found[:2] == [512, 64 * 512 * 4]


@pytest.mark.parametrize("is_column", [False, True])
def test_a_vector_of_any_stride_is_looked_up_as_it_is(is_column: bool) -> None:
    indices = meta(64, 30, dtype=INT)[:, 3] if is_column else meta(64, 30, dtype=INT)[:, 1:]

    found = scratch(aten.embedding.default, meta(100, 8), indices)
    assert found == (() if is_column else (64 * 29 * 8,))


def test_targets_of_a_loss_are_made_contiguous() -> None:
    logs, target = meta(2048, 50368, dtype=torch.bfloat16), meta(2048, 2, dtype=INT)[:, 0]
    loss, total = meta(), meta()

    assert scratch(aten.nll_loss_forward.default, logs, target, None, 1, -100) == (16384,)
    gradient = (loss, logs, target, None, 1, -100, total)
    assert scratch(aten.nll_loss_backward.default, *gradient) == (16384,)
    whole = meta(2048, dtype=INT)
    assert scratch(aten.nll_loss_forward.default, logs, whole, None, 1, -100) == ()


def test_cells_make_what_their_gradient_needs_first() -> None:
    gates, state = meta(64, 3072), meta(64, 768)

    bias = meta(3072)
    found = events(aten._thnn_fused_lstm_cell.default, gates, gates, state, bias, bias)
    assert found == [786432, 196608, 196608]
    found = events(aten._thnn_fused_gru_cell.default, meta(64, 2304), meta(64, 2304), state)
    assert found == [64 * 768 * 5 * 4, 196608]


def test_a_batch_norm_of_rows_without_a_gradient_of_its_input_sums_first() -> None:
    x, each = meta(512, 96), meta(96)
    out = (meta(512, 96), meta(96), meta(96))

    args = (x, x, each, each, each, each, each, True, 1e-5, [False, True, True])
    assert events(aten.native_batch_norm_backward.default, *args, out=out) == [
        384, 384, 384, 384, -384, -384,
    ]  # fmt: skip
    pictures, more = meta(48, 96, 20, 20), (each, each, each, each, each, True, 1e-5)
    args = (pictures, pictures, *more, [True, True, True])
    out = (pictures, each, each)
    found = events(aten.native_batch_norm_backward.default, *args, out=out)
    assert found == [48 * 96 * 400 * 4, 384, 384]


def test_many_rows_of_a_batch_norm_stage_sums() -> None:
    """`flexible_launch_configs`: 32 by 16 threads, 16 rows each; below 8 blocks there are none."""
    each, more = meta(128), (True, 0.1, 1e-5)

    few, many = ((meta(rows, 128), each, each, each, each, *more) for rows in (1792, 2048))
    assert scratch(aten.native_batch_norm.default, *few) == ()
    assert scratch(aten.native_batch_norm.default, *many) == (4 * 128 * 8 * 4, 4 * 4)


def test_synchronised_batch_norms_make_statistics_of_float32() -> None:
    x, each = meta(48, 64, 80, 80, dtype=torch.bfloat16), meta(64)

    mean, inverse = MADE_HERE[aten.batch_norm_stats.default]((x, 1e-5), {})
    assert mean.shape == inverse.shape == (64,)
    assert mean.dtype == inverse.dtype == torch.float32
    assert MADE_HERE[aten.batch_norm_elemt.default]((x, each, each, mean, mean, 1), {}).shape == (
        x.shape
    )
    args = x, x, mean, inverse, each, True, True, False
    made = MADE_HERE[aten.batch_norm_backward_reduce.default](args, {})
    assert [None if t is None else tuple(t.shape) for t in made] == [(64,), (64,), (64,), None]


@pytest.mark.parametrize(
    ("is_source_transposed", "dtype", "is_waited_for", "expected"),
    [
        (False, torch.float32, True, ()),
        (True, torch.float32, True, (8192,)),
        (False, torch.float16, True, ()),
        (False, torch.float16, False, (4096,)),
        (True, torch.float16, False, (4096, 4096)),
    ],
)
def test_what_a_copy_to_the_host_makes_contiguous_or_casts(
    is_source_transposed: bool, dtype: torch.dtype, is_waited_for: bool, expected: tuple[int, ...]
) -> None:
    source = meta(64, 32).t() if is_source_transposed else meta(32, 64)
    target = torch.empty(32, 64, dtype=dtype)

    found = to_host_scratch(aten.copy_.default, (target, source, not is_waited_for), {})
    assert found == expected


def test_numbers_are_counted_after_their_extremes_are_read() -> None:
    labels, staged = meta(6144, dtype=INT), [1960, 4, -4, -1960]
    large = events(aten.bincount.default, meta(1_003_264, dtype=INT), out=meta(361, dtype=INT))

    assert events(aten.bincount.default, labels, out=meta(59, dtype=INT)) == [8, -8, 8, -8, 472]
    assert large[0] == 8
    assert len(large) == 2 * (2 + len(staged)) + 1
    assert is_partly_modelled(aten.bincount.default, (labels, None, 1 << 20), {}, H100)


def test_deviations_are_checked_before_they_are_drawn_with_and_after() -> None:
    x = meta(16, 6)

    assert events(aten.normal.Tensor_Tensor, x, x) == [4, 1, -1, -4, 384, 4, 1, -1, -4]


def test_the_gradient_of_a_gru_cell_sums_either_bias_over_the_samples() -> None:
    hidden = meta(3200, 1024)
    args = (hidden, meta(3200, 5 * 1024), True)

    assert events(aten._thnn_fused_gru_cell_backward.default, *args) == [
        39321600, 39321600, 13107200, 12288, 78643200, 96, -96, -78643200,
        12288, 78643200, 96, -96, -78643200,
    ]  # fmt: skip


def test_rows_with_gaps_are_normalised_by_numbers_where_there_are_no_weights() -> None:
    rows, mean = meta(256, 197, 768)[:, 0], meta(768)

    found = SCRATCH[aten.native_batch_norm.default](
        (rows, None, None, mean, mean, True, 0.1, 1e-6), {}, None, H100
    )

    assert found.after == (4, 4)


def test_the_gradient_of_a_softmax_copies_a_product_that_is_not_contiguous() -> None:
    probabilities = meta(2, 19, 64, 64)
    gradient = probabilities.contiguous(memory_format=torch.channels_last)
    num_bytes = 4 * probabilities.numel()

    assert scratch(aten._softmax_backward_data.default, probabilities, probabilities, 1, FLOAT) == (
        num_bytes,
    )
    assert scratch(aten._softmax_backward_data.default, gradient, probabilities, 1, FLOAT) == (
        num_bytes,
        num_bytes,
    )


def test_the_norm_of_each_column_is_staged() -> None:
    """The weight norm of a positional convolution of wav2vec 2.0."""
    assert scratch(aten.norm.ScalarOpt_dim, meta(1024, 64, 128), 2, [0, 1], True) == (67108864, 4)
