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
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.reductions import accumulator_bytes_of, sum_bytes
from memest.estimator.ops.refusals import expects, type_name
from memest.estimator.ops.registry import Args, Kwargs, register
from memest.estimator.ops.strides import contiguous, like
from memest.estimator.ops.temporaries import (
    OLDEST,
    Events,
    KernelEvent,
    Scratch,
    around,
    contiguous_copy,
    outputs,
    passing,
    temporaries,
)
from memest.estimator.versions import simulated
from memest.units import ceil_div, last_power_of_2

aten = torch.ops.aten

CHANNELS_PER_BLOCK = 64
FORWARD_ROWS, FORWARD_HEADER = {torch.float16: 160, torch.float32: 64}, 1072
BACKWARD_ROWS, BACKWARD_HEADER = 96, 1056
"""Rows per block of the channels-last gradient, and bytes that its workspace has besides the sums.
"""

SUMS_BYTES = 2 * 4 * CHANNELS_PER_BLOCK  # two float32 sums for each channel of a block
ROWS_PER_THREAD, BLOCK_THREADS = 16, 512
MAX_BLOCKS, MIN_BLOCKS = 128, 8  # per column: `MAX_H_BLOCK`, and the least that share sums
MAX_TRAINED_SAMPLES, MAX_EVALUATED_SAMPLES = 880801, 65535


def takes_cudnn(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    is_training: bool,
    is_enabled: bool,
) -> bool:
    """Return whether CUDA runs a batch norm by cuDNN: `_select_batch_norm_backend`."""
    if weight is None or bias is None or not is_enabled:
        return False
    if torch.bfloat16 in (tensor.dtype, weight.dtype) or tensor.dim() < 3:
        return False
    if tensor.dtype == torch.float16 and weight.dtype != torch.float32:
        return False
    has_statistics = running_mean is not None and running_var is not None
    has_none = running_mean is None and running_var is None
    most = MAX_TRAINED_SAMPLES if is_training else MAX_EVALUATED_SAMPLES
    return (
        (has_statistics or (has_none and is_training))
        and tensor.shape[0] <= most
        and tensor.numel() < 2**31 - 1
    )


def _is_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous()  # cuDNN gets dense tensors: NCHW or channels-last


def _workspace(tensor: Tensor, rows_of_block: int, block_bytes: int, header_bytes: int) -> int:
    """Bytes of sums per block of rows and group of 64 channels, 4 more for each group."""
    channels = tensor.shape[1]
    groups = ceil_div(channels, CHANNELS_PER_BLOCK)
    blocks = ceil_div(tensor.numel(), channels * rows_of_block)
    return header_bytes + groups * (blocks * block_bytes + 4)


@registry.requests("cudnn_batch_norm")
def batch_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `cudnn_batch_norm`: partial sums in channels-last training, a flag per block."""
    tensor, is_training = args[0], args[5]
    if not is_training or not _is_channels_last(tensor):
        return Scratch()
    rows = FORWARD_ROWS.get(tensor.dtype, FORWARD_ROWS[torch.float32])
    return Scratch(after=(_workspace(tensor, rows, SUMS_BYTES + 4, FORWARD_HEADER),))


@registry.requests("cudnn_batch_norm_backward")
def batch_norm_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `cudnn_batch_norm_backward`: copied gradient, partial sums in channels-last."""
    tensor, grad = args[0], args[1]
    is_last = _is_channels_last(tensor)
    is_like = grad.is_contiguous() != is_last
    copies = () if is_like else (grad.nbytes,)
    if not is_last:
        return Scratch(before=copies)
    workspace = _workspace(tensor, BACKWARD_ROWS, SUMS_BYTES, BACKWARD_HEADER)
    return Scratch(before=copies, after=(workspace,))


@registry.modelled(
    "cudnn_batch_norm cudnn_batch_norm_backward native_batch_norm native_batch_norm_backward"
)
def batch_norm_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether the workspace is known: NCHW, and channels-last on Hopper except float64.

    torch's own kernels (bfloat16) were recorded in both orders, but not of sequences with gaps.
    """
    is_backward = func is torch.ops.aten.native_batch_norm_backward.default
    tensor = args[1] if is_backward else args[0]
    if "native" in func._schema.name:
        return bool(tensor.dim() != 3 or tensor.is_contiguous())
    is_measured = tensor.dtype in FORWARD_ROWS and gpu.capability == (9, 0)
    return bool(not _is_channels_last(tensor) or is_measured)


def _takes_rows(tensor: Tensor) -> bool:
    """Return whether channels are contiguous: `batch_norm_use_channels_last_kernels`."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous(memory_format=last) and (tensor.dim() > 3 or tensor.stride(1) == 1)


def _staging(tensor: Tensor, sums_per_channel: int) -> tuple[int, ...]:
    """Bytes that blocks of rows share: float32 sums, and a flag for each group of channels.

    Nothing if fewer than 8 blocks would share a group (`flexible_launch_configs`).
    """
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


@registry.requests("native_batch_norm")
def native_batch_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `batch_norm_cuda` by torch's own kernels: in training, staged sums if channels
    are contiguous.

    Missing weights are numbers (`Impl::General`).
    """
    tensor, is_training = args[0], args[5]
    staged = _staging(tensor, 4) if is_training and _takes_rows(tensor) else ()
    has_gaps = tensor.dim() == 2 and not tensor.is_contiguous()
    return Scratch(after=staged + (4,) * (has_gaps * sum(w is None for w in args[1:3])))


@registry.requests("batch_norm_stats")
def statistics_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `batch_norm_stats` of `SyncBatchNorm`: staged sums."""
    return Scratch(after=_staging(args[0], 4) if _takes_rows(args[0]) else ())


@registry.requests("batch_norm_backward_reduce")
def statistics_gradient_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `batch_norm_backward_reduce` of `SyncBatchNorm`: staged sums."""
    return Scratch(after=_staging(args[1], 2) if _takes_rows(args[1]) else ())


@registry.requests("native_batch_norm_backward")
def native_batch_norm_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `batch_norm_backward_cuda`: gradients by one kernel.

    Sums over the samples come first if channels are contiguous or the input needs no gradient.
    """
    tensor, wanted = args[1], args[9]
    takes_rows = _takes_rows(tensor)
    sizes = {i: t.nbytes for i, t in enumerate(out) if t is not None and wanted[i]}
    if wanted[0] and not takes_rows:
        return outputs(sizes)
    of_input = outputs({0: sizes.pop(0)} if wanted[0] else {})
    sums = (tensor.shape[1] * (8 if tensor.dtype == torch.float64 else 4),) * 2
    staged = _staging(tensor, 2) if takes_rows and _takes_rows(args[0]) else ()
    return around(sums, outputs(sizes) + passing(*staged) + of_input)


MANY_ROWS = 64 * 1024  # more take partial sums, in `LaunchGammaBetaBackwardCUDAKernel`
ROWS_PER_BLOCK, MAX_GRID, COLUMNS_PER_BLOCK = 32, 64 * 1024 // 2, 32
"""`rows_per_block_y`, `max_grid_size` and `block_dim_x` of `LaunchGammaBetaBackwardCUDAKernel`."""


def _partial_rows(num_rows: int, width: int, gpu: Gpu) -> int:
    """Return the rows of a norm's partial weight gradients; 0 if one pass adds up all rows."""
    if num_rows <= MANY_ROWS or width // COLUMNS_PER_BLOCK >= gpu.num_sms // 2:
        return 0
    blocks = ceil_div(width, COLUMNS_PER_BLOCK)
    return min(MAX_GRID // blocks, ceil_div(num_rows, ROWS_PER_BLOCK))


def _events(args: Args, weights: dict[int, Tensor | None], mask: list[bool], gpu: Gpu) -> Events:
    """Requests of a norm's backward: copies, gradients, partial sums where rows are many and
    narrow.

    `weights` are given by the position of their gradient. `LaunchGammaBetaBackwardCUDAKernel` adds
    blocks of rows, then calls `sum(0)` for each, which replaces an allocated output.
    """
    grad, tensor, shape = args[0], args[1], args[2]
    width = prod(shape)
    wanted = {i: w for i, w in weights.items() if mask[i] and w is not None}
    rows = _partial_rows(tensor.numel() // max(1, width), width, gpu)
    of_input, of_weights = contiguous_copy(tensor), {i: w.nbytes for i, w in wanted.items()}
    of_grad = contiguous_copy(grad)
    made = outputs({0: tensor.nbytes} if mask[0] else {})
    if not rows:
        return around(of_input, made + outputs(of_weights) + passing(*of_grad))
    sums: Events = []
    parts = []
    for i, weight in wanted.items():
        part = torch.empty((rows, width), dtype=weight.dtype, device="meta")
        parts.append(part.nbytes)
        sums += outputs({i: of_weights[i]}) + passing(*sum_bytes(part, [0], part.dtype, gpu))
        sums += [KernelEvent(-of_weights[i], OLDEST)]
    made += temporaries(*of_weights.values()) + around((*of_grad, *parts), sums)
    return around(of_input, made)


@registry.requests("native_layer_norm_backward")
def layer_norm_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `native_layer_norm_backward`: copies, partial sums for weight, then for bias."""
    return _events(args, {1: args[5], 2: args[6]}, list(args[7]), gpu)


@registry.requests("_fused_rms_norm_backward")
def rms_norm_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `_fused_rms_norm_backward`: copies, and partial sums for the weight."""
    return _events(args, {1: args[4]}, list(args[5]), gpu)


register(
    "native_layer_norm _fused_rms_norm", requests=registry.copying(0, is_before=True)
)  # layer_norm_kernel.cu


@registry.requests("native_group_norm")
def group_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `native_group_norm`: scale and shift, N * C accumulators each.

    group_norm_kernel.cu; none without weight and bias or with one element per channel.
    """
    tensor, weight, bias, batch, channels, size = args[:6]
    copies = contiguous_copy(tensor)
    if size == 1 or (weight is None and bias is None):
        return Scratch(before=copies)
    per_channel = batch * channels * accumulator_bytes_of(tensor.dtype)
    return Scratch(before=copies, after=(per_channel, per_channel))


@registry.requests("native_group_norm_backward")
def group_norm_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `native_group_norm_backward`: two sums per channel, three factors for the input.

    group_norm_kernel.cu: `ds`, `db` and, with a weight, `c1` of N * C; `c2` and `c3` of N * G.
    """
    tensor, weight = args[1], args[4]
    batch, channels, size, groups = args[5:9]
    acc = accumulator_bytes_of(tensor.dtype)
    per_channel, per_group = batch * channels * acc, batch * groups * acc
    if size == 1:
        return Scratch(after=(per_group, per_group) if args[9][0] else ())
    after = (per_channel, per_channel)
    if args[9][0]:
        after += (per_group, per_group) + ((per_channel,) if weight is not None else ())
    return Scratch(after=after)


@registry.result("_weight_norm_interface_backward")  # torch 2.6 has no meta kernel
def _weight_norm_backward(args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[1]), torch.empty_like(args[2])


@registry.refuse("native_group_norm")
def refuse_group_norm(args: Args, kwargs: Kwargs) -> str:
    """Check the types of input and weight (native/mixed_data_type.h)."""
    tensor, weight = args[0].dtype, args[1] if len(args) > 1 else None
    if weight is None or weight.dtype == tensor:
        return ""
    if tensor.itemsize > 2 and tensor != torch.float32:
        return "mixed dtype (CPU): all inputs must share same datatype."
    if weight.dtype != torch.float32:
        return "mixed dtype (CPU): expect parameter to have scalar type of Float"
    return f"expected scalar type {type_name(tensor)} but found {type_name(weight.dtype)}"


@registry.refuse("native_batch_norm cudnn_batch_norm _native_batch_norm_legit")
def refuse_batch_norm(args: Args, kwargs: Kwargs) -> str:
    """Check the weight (cuda/Normalization.cu): of the input's type, or float32 for half inputs."""
    tensor, weight = args[0].dtype, args[1] if len(args) > 1 else None
    if weight is None or weight.dtype == tensor:
        return ""
    if tensor in (torch.float16, torch.bfloat16) and weight.dtype == torch.float32:
        return ""
    if not tensor.is_floating_point:
        return f"\"batch_norm_stats_cuda\" not implemented for '{type_name(tensor)}'"
    expected = torch.float32 if tensor.itemsize == 2 else tensor
    return f"expected scalar type {type_name(expected)} but found {type_name(weight.dtype)}"


register("native_layer_norm", refuse=expects(0, 2, "LayerNormKernelImpl"))

register(
    "native_layer_norm_backward _fused_rms_norm_backward", layout=contiguous
)  # layer_norm_kernel.cu
register("native_batch_norm_backward", layout=like(1))  # cuda/Normalization.cu


def _statistics(tensor: Tensor) -> Tensor:
    """Return a tensor with a number for each channel, of float32 or wider."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.empty(tensor.shape[1], dtype=dtype, device="meta")


@registry.result("batch_norm_stats batch_norm_gather_stats_with_counts")
def _batch_norm_stats(args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    return _statistics(args[0]), _statistics(args[0])


@registry.result("batch_norm_backward_reduce")
def _batch_norm_sums(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """Return two sums over the batch, and the gradients of weight and bias, on meta."""
    _, tensor, _, _, weight, _, of_weight, of_bias = args
    made = torch.empty_like if weight is not None else None
    return (
        _statistics(tensor),
        _statistics(tensor),
        made(weight) if made and of_weight else None,
        made(weight) if made and of_bias else None,
    )


register("batch_norm_elemt", result=lambda args, kwargs: torch.empty_like(args[0]))
register("batch_norm_backward_elemt", result=lambda args, kwargs: torch.empty_like(args[1]))


@registry.above_autograd("batch_norm", vmap_key=registry.UNDER_VMAP)
def batch_norm(
    then: Next,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Run cuDNN's kernel where `_batch_norm_impl_index` of native/Normalization.cpp does."""
    tensors = weight, bias, running_mean, running_var
    is_by_cudnn = takes_cudnn(x, *tensors, is_training=training, is_enabled=cudnn_enabled)
    if x.numel() > 0 and is_by_cudnn:
        x = x.contiguous(memory_format=suggest_memory_format(x))
        dense = [t if t is None else t.contiguous() for t in tensors]
        return aten.cudnn_batch_norm.default(x, *dense, training, momentum, eps)[0]
    return then(x, *tensors, training, momentum, eps, cudnn_enabled)


@registry.above_autograd("rms_norm")
def rms_norm(
    then: Next, x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    """Run the decomposition, if the simulated release of torch has no fused kernel."""
    if simulated().fuses_rms_norm or not _HAS_FUSED_RMS_NORM:
        return then(x, shape, weight, eps)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    out: Tensor = aten._fused_rms_norm.default._op_dk(composite, x, list(shape), weight, eps)[0]
    return out


def _fused_rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return the contiguous result, and the reciprocal roots in float32 or wider."""
    kept = x.dim() - len(shape)
    sizes = [*x.shape[:kept], *(1 for _ in shape)]
    dtype = torch.float32 if x.itemsize == 2 else x.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return out, torch.empty(sizes, dtype=dtype, device="meta")


_HAS_FUSED_RMS_NORM = hasattr(aten, "_fused_rms_norm_backward")
if _HAS_FUSED_RMS_NORM:
    # without a kernel torch decomposes the operator, and does not take the operator's own gradient
    _library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _library.m.impl("_fused_rms_norm", "Meta", _fused_rms_norm, False)  # which `impl` refuses
