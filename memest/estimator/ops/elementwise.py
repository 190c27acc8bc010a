"""Elementwise operators, fused optimizers and gradient scaling."""

from __future__ import annotations

from typing import Any

import torch

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.reductions import accumulator_bytes_of
from memest.estimator.ops.registry import Args, Kwargs, outputs_only, register, requests
from memest.estimator.ops.strides import contiguous, elementwise
from memest.estimator.ops.temporaries import Scratch
from memest.units import ceil_div

aten = torch.ops.aten


@requests("abs angle")
def as_complex_first(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Copy the real part of a complex result.

    The result is complex first: `unary_op_impl_with_complex_to_float_out` of UnaryOps.cpp.
    """
    tensor = args[0]
    return Scratch(after=(tensor.nbytes,) if tensor.is_complex() else ())


@requests("pow.Scalar")
def power_of_scalar_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `pow_Scalar_out` (Pow.cpp): the base as a tensor of fp64 or int64, unless the
    base is 1.
    """
    return Scratch() if args[0] == 1 else Scratch(after=(8,))


@requests("isinf")
def isinf_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`isinf` of TensorCompare.cpp: `abs() == inf`, with the absolute values as a tensor."""
    tensor = args[0]
    if not tensor.dtype.is_floating_point:
        return Scratch()
    return Scratch(before=(tensor.nbytes,))


@requests("where.self")
def where_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`where_self_out` (native/TensorCompare.cpp): what is of another type than the result is cast,
    and a number of the host is copied.
    """
    condition, *values = args[:3]
    gpu_tensors = [tensor for tensor in values if tensor.device.type != "cpu"]
    casts = [t.numel() * out.itemsize for t in gpu_tensors if t.dtype != out.dtype]
    copies = [1] * (condition.device.type == "cpu") + [out.itemsize] * (
        len(values) - len(gpu_tensors)
    )
    return Scratch(before=tuple(casts + copies))


outputs_only("floor_divide")

register("pow.Scalar", layout=contiguous)  # Pow.cpp
register(
    "logit_backward copysign.Tensor div.Tensor_mode floor_divide heaviside logaddexp "
    "logaddexp2 xlogy.Tensor special_xlog1py",
    layout=elementwise,
)

FOREACH_CHUNK = 65536
"""`kChunkSize` of MultiTensorApply.cuh."""


@requests("_foreach_norm.Scalar")
def foreach_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`_foreach_norm` of ForeachReduceOp.cu: one accumulator per tensor and chunk of the largest.

    ::

        len(tensors) * max(ceil(numel / 65536)) * accumulator bytes
    """
    tensors = args[0]
    if not tensors:
        return Scratch()
    chunks = max(ceil_div(t.numel(), FOREACH_CHUNK) for t in tensors)
    accumulator = accumulator_bytes_of(tensors[0].dtype)
    return Scratch(before=(len(tensors) * chunks * accumulator,))


outputs_only(
    "_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _fused_adagrad_ "
    "_fused_adam_ _fused_adamw_ _fused_sgd_"
)
outputs_only("complex polar")  # TensorFactories.cpp: one kernel over a `TensorIterator`
outputs_only("_assert_async")  # TensorCompare.cu: one thread that reads the value

register("_amp_foreach_non_finite_check_and_unscale_", may_mix_devices=True)
