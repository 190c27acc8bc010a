"""The gradients of a convolution's gradients, which on CUDA are of contiguous tensors.

Mirrors `_convolution_double_backward` of ATen/native/Convolution.cpp (torch 2.11), which asks
`is_cuda()` before each of its convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.tensors import on_gpu

NAME = "_convolution_double_backward"

aten = torch.ops.aten


def kernel(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What runs in place of the operator `NAME`; elsewhere than on the GPU `otherwise` does."""

    def double_backward(
        keyset: Any,
        gg_input: Tensor | None,
        gg_weight: Tensor | None,
        gg_bias: Tensor | None,
        grad: Tensor,
        weight: Tensor,
        x: Tensor,
        *options: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if not on_gpu(x) or not x.numel():
            given = gg_input, gg_weight, gg_bias, grad, weight, x
            op = aten._convolution_double_backward.default
            made: tuple[Tensor, Tensor, Tensor] = otherwise(op, keyset, *given, *options)
            return made
        call = _Call(*options[:-1], num_dims=weight.dim() - 2)
        if not call.transposed and x.dim() > 4:
            call.groups = x.size(1) // weight.size(1)
        if gg_input is not None:
            weight = weight.contiguous()
        if gg_weight is not None:
            gg_weight = gg_weight.contiguous()
        gg_out = _of_output(call, gg_input, gg_weight, gg_bias, grad, weight, x)
        of_weight = None if gg_input is None else _of_weight(call, gg_input, grad, weight)
        of_input = None if gg_weight is None else _of_input(call, gg_weight, grad, weight, x)
        return gg_out, of_input, of_weight

    return double_backward


class _Call:
    """The options of a convolution, one for each dimension."""

    def __init__(
        self,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        *,
        num_dims: int,
    ) -> None:
        def each(given: Sequence[int]) -> list[int]:
            return [*given] * num_dims if len(given) == 1 else [*given]

        self.stride, self.padding, self.dilation = each(stride), each(padding), each(dilation)
        self.transposed, self.output_padding = transposed, each(output_padding)
        self.groups = groups

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution."""
        made: Tensor = aten.convolution.default(
            x, weight, None, self.stride, self.padding, self.dilation,
            self.transposed, self.output_padding, self.groups,
        )  # fmt: skip
        return made

    def changed(self, **options: Any) -> _Call:
        """The same with other options."""
        made = _Call.__new__(_Call)
        made.__dict__.update(self.__dict__, **options)
        return made


def _of_output(
    call: _Call,
    gg_input: Tensor | None,
    gg_weight: Tensor | None,
    gg_bias: Tensor | None,
    grad: Tensor,
    weight: Tensor,
    x: Tensor,
) -> Tensor | None:
    total = None if gg_input is None else call.run(gg_input, weight)
    if gg_weight is not None:
        term = call.run(x, gg_weight)
        total = term if total is None else total + term
    if gg_bias is not None:
        shape = [1, gg_bias.size(0), *[1] * (grad.dim() - 2)]
        spread = gg_bias.contiguous().view(shape).expand(grad.size())
        total = spread if total is None else total + spread
    return total


def _of_weight(call: _Call, gg_input: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Batches are summed over as channels are: both operands are transposed."""
    across = call.changed(stride=call.dilation, dilation=call.stride, groups=1, transposed=False)
    grads, inputs = grad.transpose(0, 1), gg_input.transpose(0, 1)

    def of_group(inputs: Tensor, grads: Tensor) -> Tensor:
        grads = grads.contiguous()
        return across.run(grads, inputs) if call.transposed else across.run(inputs, grads)

    if call.groups == 1:
        made = of_group(inputs, grads)
    else:
        pairs = zip(inputs.chunk(call.groups), grads.chunk(call.groups), strict=True)
        made = torch.cat([of_group(*pair) for pair in pairs], 1)
    return _cut(made.transpose(0, 1), weight)


def _of_input(call: _Call, gg_weight: Tensor, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    grad = grad.contiguous()
    if call.transposed:
        return _cut(call.changed(transposed=False).run(grad, gg_weight), x)
    missing = list(call.output_padding)
    for i, side in enumerate(weight.shape[2:]):
        reached = (side - 1) * call.dilation[i] - 2 * call.padding[i]
        reached += call.stride[i] * (grad.size(i + 2) - 1) + 1
        if reached != x.size(i + 2):
            missing[i] = x.size(i + 2) - reached
    return call.changed(transposed=True, output_padding=missing).run(grad, gg_weight)


def _cut(made: Tensor, like: Tensor) -> Tensor:
    """Sides that are longer than those of `like` are."""
    for dim in range(2, made.dim()):
        if made.size(dim) > like.size(dim):
            made = made.narrow(dim, 0, like.size(dim))
    return made
