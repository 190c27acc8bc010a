"""Elementwise operators, activations, softmax, fused optimizers and gradient scaling.

Sources (torch 2.11, `aten/src/ATen/native`): UnaryOps.cpp, Pow.cpp, TensorCompare.cpp,
cuda/SoftMax.cu, cuda/Activation.cpp.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.reductions import accumulator_bytes_of
from memest.estimator.ops.registry import Args, Kwargs, register
from memest.estimator.ops.strides import contiguous, elementwise
from memest.estimator.ops.temporaries import Scratch, contiguous_copy
from memest.units import ceil_div

aten = torch.ops.aten


@registry.requests("abs")
def abs_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `abs` (UnaryOps.cpp): the complex result, of which torch copies the real part."""
    return Scratch(after=(args[0].nbytes,)) if args[0].is_complex() else Scratch()


@registry.requests("angle")
def angle_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `angle` (UnaryOps.cpp): as of `abs`, but the complex result is made first."""
    return Scratch(before=(args[0].nbytes,)) if args[0].is_complex() else Scratch()


@registry.requests("pow.Scalar")
def power_of_scalar_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `pow_Scalar_out` (Pow.cpp): the base as fp64 or int64, unless it is 1."""
    return Scratch() if args[0] == 1 else Scratch(after=(8,))


@registry.requests("isinf")
def isinf_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `isinf` (TensorCompare.cpp), which is `abs() == inf`: the absolute values."""
    tensor = args[0]
    return Scratch() if not tensor.dtype.is_floating_point else Scratch(before=(tensor.nbytes,))


@registry.requests("where.self")
def where_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `where_self_out` (TensorCompare.cpp): casts, and a copied number of the host."""
    condition, *values = args[:3]
    gpu_tensors = [tensor for tensor in values if tensor.device.type != "cpu"]
    casts = [t.numel() * out.itemsize for t in gpu_tensors if t.dtype != out.dtype]
    copies = [1] * (condition.device.type == "cpu") + [out.itemsize] * (
        len(values) - len(gpu_tensors)
    )
    return Scratch(before=tuple(casts + copies))


register("pow.Scalar", layout=contiguous)  # Pow.cpp
register(
    "logit_backward copysign.Tensor div.Tensor_mode floor_divide heaviside logaddexp "
    "logaddexp2 xlogy.Tensor special_xlog1py",
    layout=elementwise,
)

FOREACH_CHUNK = 65536  # `kChunkSize` of MultiTensorApply.cuh


@registry.requests("_foreach_norm.Scalar")
def foreach_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `_foreach_norm` (ForeachReduceOp.cu): accumulators of a tensor and chunk.

    ::

        len(tensors) * max(ceil(numel / 65536)) * accumulator bytes
    """
    tensors = args[0]
    if not tensors:
        return Scratch()
    chunks = max(ceil_div(t.numel(), FOREACH_CHUNK) for t in tensors)
    accumulator = accumulator_bytes_of(tensors[0].dtype)
    return Scratch(before=(len(tensors) * chunks * accumulator,))


register("_amp_foreach_non_finite_check_and_unscale_", may_mix_devices=True)


register("_softmax _log_softmax", requests=registry.copying(0))  # SoftMax.cu
register(
    "_log_softmax_backward_data", requests=registry.copying(0, 1), layout=contiguous
)  # SoftMax.cu


@registry.requests("_softmax_backward_data")
def softmax_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `softmax_backward_cuda_out` (SoftMax.cu): `grad * output`, contiguous copies."""
    product = args[0] * args[1]
    return Scratch(after=(product.nbytes, *contiguous_copy(product, args[1])))


@registry.requests("log_sigmoid_forward")
def log_sigmoid_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `log_sigmoid_forward_cuda` (cuda/Activation.cpp): the result, and no buffer."""
    return Scratch(outputs=(out[0].nbytes, 0))


register(
    "softplus_backward elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward",
    layout=elementwise,
)


def _above_softmax(op: OpOverload, kernel: OpOverload) -> None:
    def softmax(then: Next, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Run half input with a float32 result without a cast (ATen/native/SoftMax.cpp)."""
        if x.dtype is torch.float16 and dtype is torch.float32:
            return kernel(x, dim, True)
        return then(x, dim, dtype)

    register(op, above_autograd=softmax, vmap_key=registry.UNDER_VMAP)


_above_softmax(aten.softmax.int, aten._softmax.default)
_above_softmax(aten.log_softmax.int, aten._log_softmax.default)


@registry.above_autograd("mish_backward")
def mish_backward(then: Next, grad: Tensor, x: Tensor) -> Tensor:
    """Run CUDA's single kernel; on other devices autograd decomposes `mish_backward`."""
    return then.below_autograd(grad, x)


register("mish_backward", result=registry.empty_like(1))


# Fake quantization of `torch.ao.quantization`.
#
# Sources (torch 2.11, `aten/src/ATen/native/quantized`): FakeQuantPerTensorAffine.cpp,
# FakeQuantPerChannelAffine.cpp, cuda/FusedObsFakeQuant.cu.


@registry.composed("_fused_moving_avg_obs_fq_helper")
def observe_and_quantize(
    x: Tensor,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    channel: int,
    per_row: bool = False,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `fused_moving_avg_obs_fake_quant_cuda`: extremes, then the quantized values."""
    contiguous = x.contiguous()
    if not per_row:
        torch.aminmax(contiguous)
        quantize: Callable[..., tuple[Tensor, Tensor]] = (
            aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        )
        return quantize(x, scale, zero_point, fake_quant_on, quant_min, quant_max)
    if not running_min.numel():
        for state in (running_min, running_max, scale, zero_point):
            state.resize_(x.size(channel))
        running_min.fill_(math.inf)
        running_max.fill_(-math.inf)
    torch.aminmax(x if x.dim() == 2 else x.transpose(0, channel).flatten(1), dim=1)
    if not fake_quant_on.item():
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    quantize = aten.fake_quantize_per_channel_affine_cachemask
    return quantize(x, scale, zero_point, 0, quant_min, quant_max)
