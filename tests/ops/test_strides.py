"""Outputs lie as on CUDA; the CPU does the same where both ask `TensorIterator`, or say so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from memest.estimator.ops.registry import op_of

aten = torch.ops.aten


def crosswise(*shape: int) -> Tensor:
    """Positive numbers whose first two dimensions lie the other way round."""
    return (torch.rand(shape) / 2 + 0.25).transpose(0, 1).contiguous().transpose(0, 1)


PLAIN, CROSS = torch.rand(4, 6) / 2 + 0.25, crosswise(4, 6)
ROW = torch.rand(6)
IMAGE, CROSS_IMAGE, OF_CHANNEL = torch.rand(4, 6, 5), crosswise(4, 6, 5), torch.rand(6)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten._log_softmax_backward_data.default, (CROSS, PLAIN, -1, torch.float32)),
        (aten.mse_loss_backward.default, (PLAIN, CROSS, PLAIN, 1)),
        (aten.smooth_l1_loss_backward.default, (PLAIN, CROSS, PLAIN, 1, 1.0)),
        (aten.huber_loss_backward.default, (PLAIN, CROSS, PLAIN, 1, 1.0)),
        (aten.binary_cross_entropy_backward.default, (CROSS, PLAIN, PLAIN)),
        (aten.softplus_backward.default, (PLAIN, CROSS, 1, 20)),
        (aten.elu_backward.default, (PLAIN, 1.0, 1.0, 1.0, False, CROSS)),
        (aten.hardsigmoid_backward.default, (PLAIN, CROSS)),
        (aten.hardswish_backward.default, (CROSS, PLAIN)),
        (aten.hardswish_backward.default, (PLAIN, CROSS)),
        (aten.hardtanh_backward.default, (CROSS, PLAIN, -1.0, 1.0)),
        (aten.logit_backward.default, (CROSS, PLAIN)),
        (aten.copysign.Tensor, (CROSS, ROW)),
        (partial(aten.div.Tensor_mode, rounding_mode="floor"), (CROSS, torch.tensor(2.0))),
        (aten.pow.Scalar, (2.0, CROSS)),
        (aten.floor_divide.default, (PLAIN, CROSS)),
        (aten.heaviside.default, (ROW, CROSS)),
        (aten.logaddexp.default, (ROW, CROSS)),
        (aten.logaddexp2.default, (ROW, CROSS)),
        (aten.xlogy.Tensor, (CROSS, ROW)),
        (aten.special_xlog1py.default, (CROSS, ROW)),
        (
            aten.native_batch_norm_backward.default,
            (CROSS_IMAGE, IMAGE, *[OF_CHANNEL] * 5, True, 1e-5, [True, True, True]),
        ),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(getattr(value, "func", value)),
)
def test_outputs_lie_as_those_of_the_cpu(func: Any, args: tuple[Any, ...]) -> None:
    on_meta = tuple(
        torch.empty_strided(a.shape, a.stride(), device="meta") if isinstance(a, Tensor) else a
        for a in args
    )
    op = func.func if isinstance(func, partial) else func
    found = op_of(op).layout(on_meta, func(*on_meta))
    expected = func(*args)
    if isinstance(expected, tuple):
        found, expected = found[0], expected[0]

    assert found.stride() == expected.stride()
    assert found.is_meta


def test_the_gradient_of_a_dropout_has_no_gaps() -> None:
    """`empty_like` in the format that what came in suggests; recorded of XLNet's last layer."""
    grad = torch.empty(6, 4, device="meta").t()
    mask = torch.empty(4, 6, dtype=torch.bool, device="meta")
    func = aten.native_dropout_backward.default

    assert op_of(func).layout((grad, mask, 2.0), func(grad, mask, 2.0)).stride() == (6, 1)

    images = torch.empty(2, 3, 4, 5, device="meta", memory_format=torch.channels_last)
    kept = torch.empty_like(images, dtype=torch.bool)
    out = op_of(func).layout((images, kept, 2.0), func(images, kept, 2.0))
    assert out.is_contiguous(memory_format=torch.channels_last)
