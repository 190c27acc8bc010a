"""Outputs lie as on CUDA; the CPU does the same where both ask `TensorIterator`, or say so."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.ops.registry import op_of
from memest.estimator.ops.strides import with_pointwise_strides
from tests.op_calls import laid_out

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
    found = laid_out(op, on_meta, func(*on_meta))
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

    assert laid_out(func, (grad, mask, 2.0), func(grad, mask, 2.0)).stride() == (6, 1)

    images = torch.empty(2, 3, 4, 5, device="meta", memory_format=torch.channels_last)
    kept = torch.empty_like(images, dtype=torch.bool)
    out = laid_out(func, (images, kept, 2.0), func(images, kept, 2.0))
    assert out.is_contiguous(memory_format=torch.channels_last)


has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def odd() -> Tensor:
    """Positive numbers in plain order, whose dimension of one element has the stride 1."""
    return (torch.rand(60) / 2 + 0.25).as_strided((4, 1, 3, 5), (15, 1, 5, 1))


def pointwise_calls() -> Iterator[tuple[OpOverload, list[Any]]]:
    """Yield pointwise operators with arguments: tensors of `odd`, and numbers."""
    made = {"Tensor": odd, "Scalar": lambda: 2, "number": lambda: 2, "int": lambda: 1}
    packets = (getattr(aten, name) for name in dir(aten))
    for packet in (packet for packet in packets if hasattr(packet, "overloads")):
        for func in (getattr(packet, name) for name in packet.overloads()):
            kinds = [str(a.type) for a in func._schema.arguments if not a.has_default_value()]
            is_pointwise = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
            if not is_pointwise or has_kernel(func.name(), "CompositeImplicitAutograd"):
                continue
            if made.keys() >= set(kinds):
                args = [made[kind]() for kind in kinds]
                yield func, args
                if kinds.count("Tensor") > 1 and kinds[1] == "Tensor":
                    yield func, [args[0], torch.rand(4, 1, 3, 5), *args[2:]]


def test_pointwise_results_of_plain_order_have_plain_strides() -> None:
    """Also in dimensions of one element, by which a convolution chooses its memory format."""
    count = 0
    for func, args in pointwise_calls():
        on_meta = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
            if isinstance(a, Tensor)
            else a
            for a in args
        ]
        try:
            expected, found = func(*args), func(*on_meta)
        except (NotImplementedError, RuntimeError):
            continue
        if isinstance(expected, Tensor):
            op = op_of(func)
            found = op.layout(op.call(on_meta, {}, found)) if op.layout else found
            assert with_pointwise_strides(func, on_meta, found).stride() == expected.stride(), func
            count += 1
    assert count > 200
