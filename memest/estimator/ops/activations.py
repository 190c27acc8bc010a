"""Activations and softmax.

Sources (torch 2.11, `aten/src/ATen/native`): cuda/SoftMax.cu, cuda/Activation.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.registry import (
    UNDER_VMAP,
    Args,
    Kwargs,
    above_autograd,
    outputs_only,
    register,
    requests,
    result,
)
from memest.estimator.ops.strides import contiguous, elementwise
from memest.estimator.ops.temporaries import Scratch, contiguous_copy
from memest.estimator.tensors.placement import META, on_gpu

aten = torch.ops.aten


@requests("_softmax _log_softmax")
def input_copy_after(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """A contiguous copy of the input, made after the outputs (SoftMax.cu)."""
    return Scratch(after=contiguous_copy(args[0]))


@requests("_log_softmax_backward_data")
def two_inputs_copy_after(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Contiguous copies of the first two arguments, made after the outputs (SoftMax.cu)."""
    return Scratch(after=contiguous_copy(args[0], args[1]))


@requests("_softmax_backward_data")
def softmax_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `softmax_backward_cuda_out` (SoftMax.cu): the product `grad * output`, and
    contiguous copies of the product and the output.
    """
    product = args[0] * args[1]
    return Scratch(after=(product.nbytes, *contiguous_copy(product, args[1])))


@requests("log_sigmoid_forward")
def log_sigmoid_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`log_sigmoid_forward_cuda` (cuda/Activation.cpp): only the CPU kernel fills the buffer."""
    return Scratch(outputs=(out[0].nbytes, 0))


outputs_only(
    "_prelu_kernel _prelu_kernel_backward elu_backward glu glu_backward hardshrink_backward "
    "hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu leaky_relu_ "
    "leaky_relu_backward "
    "log_sigmoid_backward log_sigmoid_forward.output mish_backward rrelu_with_noise "
    "rrelu_with_noise_backward softplus_backward softshrink_backward abs_"
)

register("_log_softmax_backward_data", layout=contiguous)  # SoftMax.cu
register(
    "softplus_backward elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward",
    layout=elementwise,
)


def _above_softmax(op: OpOverload, kernel: OpOverload) -> None:
    def softmax(then: Next, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Run half input with a float32 result without a cast (ATen/native/SoftMax.cpp)."""
        if on_gpu(x) and x.dtype is torch.float16 and dtype is torch.float32:
            return kernel(x, dim, True)
        return then(x, dim, dtype)

    above_autograd(op, vmap_key=UNDER_VMAP)(softmax)


_above_softmax(aten.softmax.int, aten._softmax.default)
_above_softmax(aten.log_softmax.int, aten._log_softmax.default)


@above_autograd("mish_backward")
def mish_backward(then: Next, grad: Tensor, x: Tensor) -> Tensor:
    """Run CUDA's single kernel; on other devices autograd decomposes `mish_backward`."""
    return (then.below_autograd if on_gpu(x) else then)(grad, x)


@result("mish_backward")
def mish_gradient(args: Args, kwargs: Kwargs) -> Tensor:
    """Make the gradient, contiguous."""
    return torch.empty(args[1].shape, dtype=args[1].dtype, device=META)
