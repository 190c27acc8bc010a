"""Softmax and its gradients."""

from __future__ import annotations

import torch

from memest.estimator.ops.temporaries import Scratch
from tests.op_calls import meta, scratch, workspaces

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_softmax_gradients_multiply_before_they_normalise() -> None:
    """SoftMax.cu: `grad * output`; log-softmax copies only what is not contiguous."""
    grad = meta(3, 5, 7)

    assert scratch(aten._softmax_backward_data.default, grad, grad, -1, torch.float32) == Scratch(
        after=(3 * 5 * 7 * 4,)
    )
    args = (meta(1).expand(5, 7), meta(5, 7), -1, torch.float32)
    assert scratch(aten._log_softmax_backward_data.default, *args).after == (5 * 7 * 4,)


def test_the_gradient_of_a_softmax_copies_a_product_that_is_not_contiguous() -> None:
    probabilities = meta(2, 19, 64, 64)
    gradient = probabilities.contiguous(memory_format=torch.channels_last)
    num_bytes = 4 * probabilities.numel()

    assert workspaces(
        aten._softmax_backward_data.default, probabilities, probabilities, 1, FLOAT
    ) == (num_bytes,)
    assert workspaces(aten._softmax_backward_data.default, gradient, probabilities, 1, FLOAT) == (
        num_bytes,
        num_bytes,
    )
