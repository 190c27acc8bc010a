"""Losses: buffers, and what their results keep."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from memest.estimator.ops.temporaries import Scratch
from tests.op_calls import H100, H200, meta, requested, sizes, workspaces

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_a_mean_squared_error_keeps_the_storage_of_its_elements() -> None:
    """Loss.cpp: the output is allocated at full size, then resized to the scalar."""
    args = (meta(64, 64), meta(64, 64), 1)
    out = aten.mse_loss.default(*args)

    size = 64 * 64 * 4
    found = requested(aten.mse_loss.default, args, {}, out, H200)
    assert found == Scratch(after=(size,), outputs=(size,))


def test_a_reduced_cross_entropy_of_probabilities_keeps_the_elementwise_loss() -> None:
    """Its mean is a scalar of its own, copied into the first element."""
    args = (meta(64, 64), meta(64, 64))
    out = aten.binary_cross_entropy.default(*args)

    rule = partial(requested, aten.binary_cross_entropy.default)
    assert rule(args, {}, out, H200) == Scratch(after=(4,), outputs=(64 * 64 * 4,))
    assert rule((*args, None, 0), {}, out, H200) == Scratch()


@pytest.mark.parametrize(
    ("steps", "zero_infinity", "expected"),
    [
        # recorded on an H100: 24 samples, 32 classes, targets of up to 79 tokens
        (
            597,
            True,
            [
                *(192, 192, 192, 9112608, 1833984, 4584960, 57312, 57312, 14328, -14328, -57312),
                *(4584960, 57312, -4584960, -57312, -57312, -4584960, 4, 24, 1833984, -24, -4),
                *(-1833984, -9112608, -192, -192, -192),
            ],
        ),
        # 2 * 190 + 24 * 24 // 10 + 2 * 32 // 10 is 443, of at most 450
        (190, True, [192, 192, 192, 2900160, 583680, -2900160, -192, -192, -192]),
    ],
)
def test_a_long_ctc_loss_sums_over_blanks_apart(
    steps: int, zero_infinity: bool, expected: list[int]
) -> None:
    log_probs, alphas = meta(steps, 24, 32), meta(24, steps, 159)
    args = (None, log_probs, None, None, None, meta(24), alphas, 0, zero_infinity)
    events = requested(aten._ctc_loss_backward.default, args, {}, log_probs, H200)

    assert [event.num_bytes for event in events] == expected


def test_a_loss_of_logits_holds_the_log_sigmoid_and_itself() -> None:
    func, x = aten.binary_cross_entropy_with_logits.default, meta(64, 1000)

    assert sizes(func, (x, x), meta()) == [256000, 256000, 4]
    assert sizes(func, (x, x, None, None, 0), x) == [256000, 256000]
    assert sizes(func, (x, x, None, meta(1000)), meta()) == [256000, 4000, 256000, 256000, 4]


def test_a_smooth_loss_keeps_its_elements_and_a_huber_loss_does_not() -> None:
    args = meta(64, 1000), meta(64, 1000)
    smooth, huber = aten.smooth_l1_loss.default, aten.huber_loss.default

    kept = Scratch(after=(256000,), outputs=(256000,))
    assert requested(smooth, args, {}, meta(), H100) == kept
    assert requested(huber, args, {}, meta(), H100) == Scratch(before=(256000,))


def test_targets_of_a_loss_are_made_contiguous() -> None:
    logs, target = meta(2048, 50368, dtype=torch.bfloat16), meta(2048, 2, dtype=INT)[:, 0]
    loss, total = meta(), meta()

    assert workspaces(aten.nll_loss_forward.default, logs, target, None, 1, -100) == (16384,)
    gradient = (loss, logs, target, None, 1, -100, total)
    assert workspaces(aten.nll_loss_backward.default, *gradient) == (16384,)
    whole = meta(2048, dtype=INT)
    assert workspaces(aten.nll_loss_forward.default, logs, whole, None, 1, -100) == ()


def test_an_expanded_gradient_of_a_loss_per_sample_is_made_contiguous() -> None:
    """`nll_loss_backward_out_cuda_template` of an H200: Keras divides a sum by the batch size."""
    logs, target = meta(64, 100), meta(64, dtype=INT)
    gradient = (meta().expand(64), logs, target, None, 0, -100, meta())

    assert workspaces(aten.nll_loss_backward.default, *gradient) == (256,)
