"""The layouts that CUDA gives to outputs where meta gives others.

Meta goes by decompositions of its own for some operators. What CUDA does is in the file named with
each group (torch 2.11), and where it is `TensorIterator`, the CPU does the same: a test compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format

from memest.estimator.kernels.convolution import convolution_outputs

aten = torch.ops.aten

Args = tuple[Any, ...]

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

CONTIGUOUS = (
    aten.native_layer_norm_backward.default,  # layer_norm_kernel.cu
    aten._fused_rms_norm_backward.default,
    aten._log_softmax_backward_data.default,  # SoftMax.cu
    aten.mse_loss_backward.default,  # Loss.cpp, as the next two
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.pow.Scalar,  # Pow.cpp
)
"""Operators whose outputs are contiguous; on meta they follow an argument."""

LIKE_AN_INPUT = {
    aten.native_batch_norm_backward.default: 1,  # cuda/Normalization.cu
    aten.binary_cross_entropy_backward.default: 1,  # cuda/Loss.cu
}
"""Operators whose first output lies as the argument of that number does."""

ELEMENTWISE = (
    aten.softplus_backward.default,
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.logit_backward.default,
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.heaviside.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.xlogy.Tensor,
    aten.special_xlog1py.default,
)
"""Operators whose output lies as `TensorIterator` decides."""


IN_AN_INPUTS_FORMAT = {
    aten.native_dropout_backward.default: 0,  # cuda/Dropout.cu
}
"""Operators whose output has the memory format that the argument of that number suggests."""


def as_on_cuda(func: OpOverload, args: Args, out: Any) -> Any:
    """The outputs of `func` on meta in the layout that CUDA gives them."""
    rule = _RULES.get(id(func))  # an operator computes its hash in Python
    return out if rule is None else rule(args, out)


def _of_convolution(func: OpOverload) -> Callable[[Args, Any], Any]:
    return lambda args, out: convolution_outputs(func, args, out)


def _contiguous(args: Args, out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.contiguous()
    return tuple(t if t is None else t.contiguous() for t in out)


def _like(number: int) -> Callable[[Args, Any], Any]:
    def rule(args: Args, out: Any) -> Any:
        if isinstance(out, Tensor):
            return _strided(out, torch.empty_like(args[number]).stride())
        first, *rest = out
        if first is not None:
            first = _strided(first, torch.empty_like(args[number]).stride())
        return (first, *rest)

    return rule


def _in_format_of(number: int) -> Callable[[Args, Any], Any]:
    def rule(args: Args, out: Tensor) -> Tensor:
        memory_format = suggest_memory_format(args[number])
        if out.is_contiguous(memory_format=memory_format):
            return out
        return torch.empty_like(out, memory_format=memory_format)

    return rule


def _elementwise(args: Args, out: Tensor) -> Tensor:
    given = [arg.expand(out.shape) for arg in args if isinstance(arg, Tensor) and arg.dim()]
    return _strided(out, compute_elementwise_output_strides(*given)) if given else out


def _strided(made: Tensor, strides: tuple[int, ...]) -> Tensor:
    if made.stride() == strides:
        return made
    return torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device)


_RULES: dict[int, Callable[[Args, Any], Any]] = {
    **{id(func): _of_convolution(func) for func in CONVOLUTIONS},
    **dict.fromkeys(map(id, CONTIGUOUS), _contiguous),
    **{id(func): _like(number) for func, number in LIKE_AN_INPUT.items()},
    **{id(func): _in_format_of(number) for func, number in IN_AN_INPUTS_FORMAT.items()},
    **dict.fromkeys(map(id, ELEMENTWISE), _elementwise),
}
