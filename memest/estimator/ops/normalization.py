"""Batch, layer, group and RMS norms: cuDNN's workspaces, torch's kernels, the choice of both.

Sources (torch 2.11, `aten/src/ATen/native`): Normalization.cpp (`_select_batch_norm_backend`),
cudnn/BatchNorm.cpp, cuda/Normalization.cu, cuda/Normalization.cuh, cuda/layer_norm_kernel.cu,
cuda/group_norm_kernel.cu, layer_norm.cpp. cuDNN's batch norm has no workspace in NCHW. The rule for
channels-last is exact for 81 shapes of ResNets, MobileNetV2 and EfficientNetV2 on an H100 (cuDNN
9.19). Gradients of layer norm: event by event of Swin on an H100 (`zoo-swin-f32`). `SyncBatchNorm`:
recorded under DDP on two H100s. Symbols: M samples times pixels, C channels.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.reductions import accumulator_bytes_of, sum_bytes
from memest.estimator.ops.refusals import expects, type_name
from memest.estimator.ops.registry import KernelCall, op, register
from memest.estimator.ops.strides import contiguous, contiguous_args, contiguous_copy, strides_like
from memest.estimator.ops.temporaries import Events, Scratch, around, outputs, passing, temporaries
from memest.estimator.versions import simulated
from memest.units import ceil_div, last_power_of_2

aten = torch.ops.aten
CHANNELS_PER_BLOCK = 64
FORWARD_ROWS = {torch.float16: 160, torch.float32: 64}  # rows per block in channels-last
BACKWARD_ROWS = 96
FORWARD_HEADER, BACKWARD_HEADER = 1072, 1056  # bytes of a workspace besides its sums

SUMS_BYTES = 2 * 4 * CHANNELS_PER_BLOCK  # two float32 sums for each channel of a block
ROWS_PER_THREAD, BLOCK_THREADS = 16, 512
MAX_BLOCKS, MIN_BLOCKS = 128, 8  # per column: `MAX_H_BLOCK`, and the least that share sums
MAX_TRAINED_SAMPLES, MAX_EVALUATED_SAMPLES = 880801, 65535


def takes_cudnn(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, *, is_training: bool, is_enabled: bool,
) -> bool:  # fmt: skip
    """Return whether CUDA runs a batch norm by cuDNN (`_select_batch_norm_backend`). `is_enabled`
    is the argument `cudnn_enabled` of `torch.batch_norm`."""
    if weight is None or bias is None or not is_enabled:
        return False
    if torch.bfloat16 in (tensor.dtype, weight.dtype) or tensor.dim() < 3:
        return False
    if tensor.dtype == torch.float16 and weight.dtype != torch.float32:
        return False
    has_statistics = running_mean is not None and running_var is not None
    has_none = running_mean is None and running_var is None
    max_samples = MAX_TRAINED_SAMPLES if is_training else MAX_EVALUATED_SAMPLES
    return (
        (has_statistics or (has_none and is_training))
        and tensor.shape[0] <= max_samples
        and tensor.numel() < 2**31 - 1
    )


def _is_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous()  # cuDNN gets dense tensors: NCHW or channels-last


def _workspace(tensor: Tensor, rows_of_block: int, block_bytes: int, header_bytes: int) -> int:
    """Return the bytes of cuDNN's workspace for a batch norm of `tensor`: `header_bytes`, and 4
    bytes for each group of 64 channels. A group also has `block_bytes` for each block of
    `rows_of_block` rows. A row is one pixel of one sample."""
    channels = tensor.shape[1]
    groups = ceil_div(channels, CHANNELS_PER_BLOCK)
    blocks = ceil_div(tensor.numel(), channels * rows_of_block)
    return header_bytes + groups * (blocks * block_bytes + 4)


def _is_workspace_known(c: KernelCall) -> bool:
    """Return whether the workspace is known: none in NCHW, measured in channels-last on capability
    9.0. In channels-last only float16 and float32 were measured."""
    is_measured = c.input.dtype in FORWARD_ROWS and c.gpu.capability == (9, 0)
    return is_measured or not _is_channels_last(c.input)


def _has_no_gaps(c: KernelCall) -> bool:
    """Return False for a 3-d input that is not contiguous, which was not measured, else True."""
    return c.input.dim() != 3 or c.input.is_contiguous()


@registry.requests("cudnn_batch_norm", modelled=_is_workspace_known)
def batch_norm_by_cudnn(c: KernelCall) -> Scratch:
    """Allocations of `cudnn_batch_norm`: in channels-last training, partial sums and flags. A block
    of rows has two float32 sums for each channel, and a flag of 4 bytes for each 64 channels. Other
    calls allocate nothing but the outputs."""
    if not c.training or not _is_channels_last(c.input):
        return Scratch()
    rows = FORWARD_ROWS.get(c.input.dtype, FORWARD_ROWS[torch.float32])
    return Scratch(after=(_workspace(c.input, rows, SUMS_BYTES + 4, FORWARD_HEADER),))


@registry.requests("cudnn_batch_norm_backward", modelled=_is_workspace_known)
def batch_norm_backward_by_cudnn(c: KernelCall) -> Scratch:
    """Allocations of `cudnn_batch_norm_backward`: a gradient's copy, sums in channels-last. The
    incoming gradient is copied if its memory format differs from the input's. Only inputs in
    channels-last need partial sums."""
    is_channels_last = _is_channels_last(c.input)
    copies: tuple[int, ...] = ()
    if _is_channels_last(c.grad_output) != is_channels_last:
        copies = (c.grad_output.nbytes,)
    if not is_channels_last:
        return Scratch(before=copies)
    workspace = _workspace(c.input, BACKWARD_ROWS, SUMS_BYTES, BACKWARD_HEADER)
    return Scratch(before=copies, after=(workspace,))


def _has_contiguous_channels(tensor: Tensor) -> bool:
    """Return whether torch's channels-last kernels run (`batch_norm_use_channels_last_kernels`).
    They run if the channels of `tensor` are contiguous in memory."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous(memory_format=last) and (tensor.dim() > 3 or tensor.stride(1) == 1)


def _staging(tensor: Tensor, sums_per_channel: int) -> tuple[int, ...]:
    """Return (bytes of partial sums, bytes of semaphores), by which thread blocks combine their
    sums. The rows of a channel are split among several thread blocks. Each thread block writes
    `sums_per_channel` float32 sums for each of its channels. All thread blocks of the same channels
    share a semaphore of 4 bytes. Return () if channels are not contiguous, or if fewer than 8
    thread blocks share a channel (`flexible_launch_configs`)."""
    if not _has_contiguous_channels(tensor):
        return ()
    channels = tensor.shape[1]
    rows = tensor.numel() // max(1, channels)
    width = min(last_power_of_2(channels), 32)
    height = min(last_power_of_2(ceil_div(rows, ROWS_PER_THREAD)), BLOCK_THREADS // width)
    if width * height != BLOCK_THREADS:
        width = min(last_power_of_2(channels), BLOCK_THREADS // height)
    blocks = min(ceil_div(rows, height * ROWS_PER_THREAD), MAX_BLOCKS)
    if blocks < MIN_BLOCKS:
        return ()
    return sums_per_channel * channels * blocks * 4, ceil_div(channels, width) * 4


@registry.requests("native_batch_norm", modelled=_has_no_gaps)
def native_batch_norm(c: KernelCall) -> Scratch:
    """Allocations of torch's own `batch_norm_cuda`: in training, sums if channels are contiguous. A
    missing weight or bias of a 2-d input with gaps takes 4 bytes (`Impl::General`)."""
    staging = _staging(c.input, 4) if c.training else ()
    has_gaps = c.input.dim() == 2 and not c.input.is_contiguous()
    missing = [parameter for parameter in (c.weight, c.bias) if parameter is None]
    return Scratch(after=staging + (4,) * len(missing) if has_gaps else staging)


op(
    "batch_norm_stats", "staged sums (`batch_norm_stats` of `SyncBatchNorm`)",
    after=lambda c: _staging(c.input, 4),
)  # fmt: skip
op(
    "batch_norm_backward_reduce", "staged sums (`batch_norm_backward_reduce` of `SyncBatchNorm`)",
    after=lambda c: _staging(c.input, 2),
)  # fmt: skip


@registry.requests("native_batch_norm_backward", modelled=_has_no_gaps, layout=strides_like(1))
def native_batch_norm_backward(c: KernelCall) -> Events:
    """Allocations of `batch_norm_backward_cuda`: gradients by one kernel, or sums before them. One
    kernel runs if channels are not contiguous and the input needs a gradient. Else sums over the
    samples are allocated first."""
    tensor, mask = c.input, c.output_mask
    needs_input, *_ = mask
    gradients = {i: t.nbytes for i, t in enumerate(c.out) if t is not None and mask[i]}
    if needs_input and not _has_contiguous_channels(tensor):
        return outputs(gradients)
    input_gradient = outputs({0: gradients.pop(0)} if needs_input else {})
    sums = (_statistics(tensor).nbytes,) * 2
    staging = _staging(tensor, 2) if _has_contiguous_channels(c.grad_out) else ()
    return around(sums, outputs(gradients) + passing(*staging) + input_gradient)


MANY_ROWS = 64 * 1024  # more take partial sums, in `LaunchGammaBetaBackwardCUDAKernel`
ROWS_PER_BLOCK, MAX_GRID, COLUMNS_PER_BLOCK = 32, 64 * 1024 // 2, 32
"""`rows_per_block_y`, `max_grid_size` and `block_dim_x` of `LaunchGammaBetaBackwardCUDAKernel`."""


@registry.requests("native_layer_norm_backward _fused_rms_norm_backward", layout=contiguous)
def norm_backward(c: KernelCall) -> Events:
    """Allocations of a layer or RMS norm's backward: copies, gradients, sums of many narrow rows. A
    row is narrow below 32 * (num_sms // 2) elements, which is 2112 on an H100. For more than 65,536
    narrow rows, `LaunchGammaBetaBackwardCUDAKernel` (layer_norm_kernel.cu) writes a partial sum per
    block of rows. The `sum(0)` of the partial sums replaces the gradient that was allocated for
    weight or bias."""
    width = prod(c.normalized_shape)
    weight_by_output = {1: c.weight, 2: c.get("bias")}
    params = {i: w for i, w in weight_by_output.items() if w is not None and c.output_mask[i]}
    param_bytes = {i: weight.nbytes for i, weight in params.items()}
    num_rows, column_blocks = c.input.numel() // max(1, width), ceil_div(width, COLUMNS_PER_BLOCK)
    is_wide = width // COLUMNS_PER_BLOCK >= c.gpu.num_sms // 2
    input_copy, grad_copy = contiguous_copy(c.input), contiguous_copy(c.grad_out)
    gradients = outputs({0: c.input.nbytes} if c.output_mask[0] else {})
    if num_rows <= MANY_ROWS or is_wide:  # one pass adds up all rows
        return around(input_copy, gradients + outputs(param_bytes) + passing(*grad_copy))
    num_partials = min(MAX_GRID // column_blocks, ceil_div(num_rows, ROWS_PER_BLOCK))
    sums: Events = []
    partials_bytes = []
    for i, weight in params.items():
        partials = torch.empty((num_partials, width), dtype=weight.dtype, device="meta")
        partials_bytes.append(partials.nbytes)
        sums += outputs({i: param_bytes[i]})
        sums += passing(*sum_bytes(partials, [0], partials.dtype, c.gpu))
        sums += temporaries(-param_bytes[i], oldest=True)  # the gradient that the sum replaces
    gradients += temporaries(*param_bytes.values()) + around((*grad_copy, *partials_bytes), sums)
    return around(input_copy, gradients)


# layer_norm_kernel.cu
register("native_layer_norm _fused_rms_norm", requests=contiguous_args(0, is_before=True))


@registry.requests("native_group_norm")
def group_norm(c: KernelCall) -> Scratch:
    """Allocations of `native_group_norm`: scale and shift, each of N * C accumulators. Neither is
    allocated without weight and bias, or if a channel has one element (group_norm_kernel.cu)."""
    copies = contiguous_copy(c.input)
    if c.HxW == 1 or (c.weight is None and c.bias is None):
        return Scratch(before=copies)
    per_channel = c.N * c.C * accumulator_bytes_of(c.input.dtype)
    return Scratch(before=copies, after=(per_channel, per_channel))


@registry.requests("native_group_norm_backward")
def group_norm_backward(c: KernelCall) -> Scratch:
    """Allocations of `native_group_norm_backward`: two sums per channel, three factors. In
    group_norm_kernel.cu, the sums `ds` and `db` have N * C elements each. The factors `c2` and `c3`
    have N * G elements each, for G groups. The factor `c1` has N * C elements, and is absent
    without a weight. If a channel has one element, `ds`, `db` and `c1` are absent."""
    accumulator = accumulator_bytes_of(c.input.dtype)
    per_channel, per_group = c.N * c.C * accumulator, c.N * c.group * accumulator
    factors = [per_group, per_group] if c.output_mask[0] else []
    if c.HxW == 1:
        return Scratch(after=tuple(factors))
    if factors and c.weight is not None:
        factors.append(per_channel)
    return Scratch(after=(per_channel, per_channel, *factors))


register(  # torch 2.6 has no meta kernel
    "_weight_norm_interface_backward",
    result=lambda c: (torch.empty_like(c.saved_v), torch.empty_like(c.saved_g)),
)


@registry.refuse("native_group_norm")
def refuse_group_norm(c: KernelCall) -> str:
    """Return torch's error text for a wrong mix of dtypes (native/mixed_data_type.h), else ""."""
    dtype = c.input.dtype
    if c.weight is None or c.weight.dtype == dtype:
        return ""
    if dtype.itemsize > 2 and dtype != torch.float32:
        return "mixed dtype (CPU): all inputs must share same datatype."
    if c.weight.dtype != torch.float32:
        return "mixed dtype (CPU): expect parameter to have scalar type of Float"
    return f"expected scalar type {type_name(dtype)} but found {type_name(c.weight.dtype)}"


@registry.refuse("native_batch_norm cudnn_batch_norm _native_batch_norm_legit")
def refuse_batch_norm(c: KernelCall) -> str:
    """Return torch's error text for a weight of a wrong dtype (cuda/Normalization.cu), else ""."""
    dtype = c.input.dtype
    if c.weight is None or c.weight.dtype == dtype:
        return ""
    if dtype in (torch.float16, torch.bfloat16) and c.weight.dtype == torch.float32:
        return ""
    if not dtype.is_floating_point:
        return f"\"batch_norm_stats_cuda\" not implemented for '{type_name(dtype)}'"
    expected = torch.float32 if dtype.itemsize == 2 else dtype
    return f"expected scalar type {type_name(expected)} but found {type_name(c.weight.dtype)}"


register("native_layer_norm", refuse=expects(0, 2, "LayerNormKernelImpl"))


def _statistics(tensor: Tensor) -> Tensor:
    """Return a meta tensor with one number per channel of `tensor`, in float32 or wider."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.empty(tensor.shape[1], dtype=dtype, device="meta")


register(
    "batch_norm_stats batch_norm_gather_stats_with_counts",
    result=lambda c: (_statistics(c.input), _statistics(c.input)),
)
register("batch_norm_elemt batch_norm_backward_elemt", result=lambda c: torch.empty_like(c.input))


@registry.result("batch_norm_backward_reduce")
def _batch_norm_sums(c: KernelCall) -> tuple[Any, ...]:
    """Return meta results of `batch_norm_backward_reduce`: two sums over the batch, then the
    gradients of weight and bias. A gradient is None if the call does not request it."""
    gradients = (
        torch.empty_like(c.weight) if is_requested and c.weight is not None else None
        for is_requested in (c.weight_g, c.bias_g)
    )
    return _statistics(c.input), _statistics(c.input), *gradients


@registry.above_autograd("batch_norm", vmap_key=registry.UNDER_VMAP)
def batch_norm(next_kernel: Next, x: Tensor, *args: Any) -> Tensor:
    """Run a batch norm by cuDNN if `_batch_norm_impl_index` of native/Normalization.cpp does, else
    by torch's `next_kernel`. `args` are the further arguments of `torch.batch_norm`."""
    *tensors, training, momentum, eps, is_enabled = args
    is_by_cudnn = takes_cudnn(x, *tensors, is_training=training, is_enabled=is_enabled)
    if x.numel() > 0 and is_by_cudnn:
        x = x.contiguous(memory_format=suggest_memory_format(x))
        dense = [t if t is None else t.contiguous() for t in tensors]
        out, *_ = aten.cudnn_batch_norm.default(x, *dense, training, momentum, eps)
        return out
    return next_kernel(x, *args)


@registry.above_autograd("rms_norm")
def rms_norm(
    next_kernel: Next, x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    """Run `rms_norm` by separate operators if the simulated torch does so, else `next_kernel`."""
    if simulated().fuses_rms_norm or not _HAS_FUSED_RMS_NORM:
        return next_kernel(x, shape, weight, eps)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    out: Tensor = aten._fused_rms_norm.default._op_dk(composite, x, list(shape), weight, eps)[0]
    return out


def _fused_rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return meta results of `_fused_rms_norm`: (contiguous output, reciprocal root mean squares).
    The norm is over the last dimensions of `x`, whose sizes are `shape`."""
    num_leading = x.dim() - len(shape)
    sizes = [*x.shape[:num_leading], *(1 for _ in shape)]
    dtype = torch.float32 if x.itemsize == 2 else x.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return out, torch.empty(sizes, dtype=dtype, device="meta")


_HAS_FUSED_RMS_NORM = hasattr(aten, "_fused_rms_norm_backward")
if _HAS_FUSED_RMS_NORM:
    # without a kernel, torch decomposes the operator and ignores its own gradient
    _library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _library.m.impl("_fused_rms_norm", "Meta", _fused_rms_norm, False)  # which `impl` refuses
