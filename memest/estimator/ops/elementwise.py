"""Elementwise operators, activations, softmax, fused optimizers and gradient scaling.

Sources (torch 2.11, `aten/src/ATen/native`): UnaryOps.cpp, Pow.cpp, TensorCompare.cpp,
cuda/SoftMax.cu, cuda/Activation.cpp. For the fake quantization of `torch.ao.quantization`, in
quantized/: FakeQuantPerTensorAffine.cpp, FakeQuantPerChannelAffine.cpp, cuda/FusedObsFakeQuant.cu.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.reductions import accumulator_bytes_of
from memest.estimator.ops.registry import KernelCall, op, register
from memest.estimator.ops.strides import contiguous, contiguous_args, contiguous_copy, elementwise
from memest.estimator.ops.temporaries import Scratch
from memest.units import ceil_div

aten = torch.ops.aten


op(
    "abs",
    "the complex result, of which torch copies the real part (UnaryOps.cpp)",
    after=lambda c: c.self.nbytes if c.self.is_complex() else 0,
)
op(
    "angle",
    "as `abs`, but the complex result is made first (UnaryOps.cpp)",
    before=lambda c: c.self.nbytes if c.self.is_complex() else 0,
)
op(
    "pow.Scalar", "the base as fp64 or int64, unless it is 1 (Pow.cpp)",
    after=lambda c: 0 if c.self == 1 else 8, layout=contiguous,
)  # fmt: skip
op(
    "isinf", "the absolute values, since it is `abs() == inf` (TensorCompare.cpp)",
    before=lambda c: c.self.nbytes if c.self.is_floating_point() else 0,
)  # fmt: skip


@registry.requests("where.self")
def where(c: KernelCall) -> Scratch:
    """Allocations of `where_self_out` (TensorCompare.cpp): casts, and a copy of a host number. A
    condition on the host is also copied."""
    item, values = c.out.itemsize, (c.self, c.other)
    num_on_host = sum(t.device.type == "cpu" for t in values)
    casts = [t.numel() * item for t in values if t.device.type != "cpu" and t.dtype != c.out.dtype]
    condition_copy = [1] if c.condition.device.type == "cpu" else []
    return Scratch(before=(*casts, *condition_copy, *[item] * num_on_host))


register(
    "logit_backward copysign.Tensor div.Tensor_mode floor_divide heaviside logaddexp "
    "logaddexp2 xlogy.Tensor special_xlog1py",
    layout=elementwise,
)


def _norm_accumulators(c: KernelCall) -> int:
    if not c.self:
        return 0
    max_chunks = max(ceil_div(t.numel(), 65536) for t in c.self)  # kChunkSize, MultiTensorApply.cuh
    return len(c.self) * max_chunks * accumulator_bytes_of(c.self[0].dtype)


op(
    "_foreach_norm.Scalar",
    "accumulators of each tensor and chunk: tensors * max(ceil(numel / 65536)) "
    "(ForeachReduceOp.cu)",
    before=_norm_accumulators,
)
register("_amp_foreach_non_finite_check_and_unscale_", may_mix_devices=True)


# SoftMax.cu
register("_softmax _log_softmax", requests=contiguous_args(0))
register("_log_softmax_backward_data", requests=contiguous_args(0, 1), layout=contiguous)


@registry.requests("_softmax_backward_data")
def softmax_backward(c: KernelCall) -> Scratch:
    """Allocations of `softmax_backward_cuda_out` (SoftMax.cu): `grad * output`, contiguous copies.
    The product and `output` are copied if they are not contiguous."""
    product = c.grad_output * c.output
    return Scratch(after=(product.nbytes, *contiguous_copy(product, c.output)))


register(
    "log_sigmoid_forward",
    about="the result, and no buffer (cuda/Activation.cpp)",
    requests=lambda c: c.outputs(0),
)
register(
    "softplus_backward elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward",
    layout=elementwise,
)


def _softmax_rule(kernel: OpOverload) -> Callable[..., Tensor]:
    def softmax(next_kernel: Next, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Run softmax: from float16 to float32 in one kernel (SoftMax.cpp), else by torch's
        `next_kernel`. A `dtype` of None is that of `x`."""
        if x.dtype is torch.float16 and dtype is torch.float32:
            return kernel(x, dim, True)
        return next_kernel(x, dim, dtype)

    return softmax


for _name in ("softmax", "log_softmax"):
    _kernel = getattr(aten, f"_{_name}").default
    register(f"{_name}.int", above_autograd=_softmax_rule(_kernel), vmap_key=registry.UNDER_VMAP)


@registry.above_autograd("mish_backward")
def mish_backward(next_kernel: Next, grad: Tensor, x: Tensor) -> Tensor:
    """Run torch's kernel of `mish_backward` (`next_kernel`) without autograd, as on CUDA. On other
    devices than CPU and CUDA, autograd would decompose the operator into several others."""
    return next_kernel.below_autograd(grad, x)


register("mish_backward", result=registry.empty_like(1))


@registry.decomposition("_fused_moving_avg_obs_fq_helper")
def observe_and_quantize(
    x: Tensor, observer_on: Tensor, fake_quant_on: Tensor, running_min: Tensor, running_max: Tensor,
    scale: Tensor, zero_point: Tensor, averaging_const: float, quant_min: int, quant_max: int,
    channel: int, per_row: bool = False, symmetric: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `fused_moving_avg_obs_fake_quant_cuda`: minimum and maximum of `x`, then fake
    quantization. With `per_row`, each index of dimension `channel` has its own scale. Return
    (quantized values, mask of the values in range)."""
    dense = x.contiguous()
    if not per_row:
        torch.aminmax(dense)
        quantize: Callable[..., tuple[Tensor, Tensor]] = (
            aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        )
        return quantize(x, scale, zero_point, fake_quant_on, quant_min, quant_max)
    if not running_min.numel():
        for state in (running_min, running_max, scale, zero_point):
            state.resize_(x.size(channel))
        running_min.fill_(math.inf)
        running_max.fill_(-math.inf)
    # one row for each index of `channel`
    torch.aminmax(x if x.dim() == 2 else x.transpose(0, channel).flatten(1), dim=1)
    if not fake_quant_on.item():
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    quantize = aten.fake_quantize_per_channel_affine_cachemask
    return quantize(x, scale, zero_point, 0, quant_min, quant_max)
