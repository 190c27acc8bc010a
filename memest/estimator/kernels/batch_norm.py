"""Batch norm: cuDNN's workspaces, torch's choice between cuDNN and its own kernels, and theirs.

Sources: `_select_batch_norm_backend` of ATen/native/Normalization.cpp, cudnn/BatchNorm.cpp, and of
torch's own kernels cuda/Normalization.cu and Normalization.cuh (torch 2.11). With cuDNN there is no
workspace in NCHW. The rule for channels-last is deduced from all float16 calls of ResNet-18,
ResNet-50 and MobileNetV2 and all float32 calls of a ResNet-50 and an EfficientNetV2 on an H100
(cuDNN 9.19), 81 shapes, and gives all of them to the byte.

Symbols: M samples times pixels, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.scratch import Events, Scratch, outputs, passing, temporaries

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

CHANNELS_PER_BLOCK = 64
FORWARD_ROWS, FORWARD_HEADER = {torch.float16: 160, torch.float32: 64}, 1072
BACKWARD_ROWS, BACKWARD_HEADER = 96, 1056
"""Rows that a block adds up, and what is asked for beside the blocks' sums."""

SUMS_BYTES = 2 * 4 * CHANNELS_PER_BLOCK
"""Two float32 sums for each channel of a block."""

ROWS_PER_THREAD, BLOCK_THREADS = 16, 512
MAX_BLOCKS, MIN_BLOCKS = 128, 8
"""`ELEMENTS_PER_THREAD`, `MAX_BLOCK_SIZE`, `MAX_H_BLOCK`; the least worth a sum over the grid."""

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
    """`_select_batch_norm_backend`: whether CUDA runs a batch norm by cuDNN."""
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
    """Sums of each block of rows and each group of 64 channels, 4 bytes more for each group."""
    channels = tensor.shape[1]
    groups = -(-channels // CHANNELS_PER_BLOCK)
    blocks = -(-tensor.numel() // channels // rows_of_block)
    return header_bytes + groups * (blocks * block_bytes + 4)


def batch_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`cudnn_batch_norm`: in channels-last training partial sums, and a flag for each block."""
    tensor, is_training = args[0], args[5]
    if not is_training or not _is_channels_last(tensor):
        return Scratch()
    rows = FORWARD_ROWS.get(tensor.dtype, FORWARD_ROWS[torch.float32])
    return Scratch(after=(_workspace(tensor, rows, SUMS_BYTES + 4, FORWARD_HEADER),))


def batch_norm_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`cudnn_batch_norm_backward`: the gradient in the input's format, and partial sums in
    channels-last.
    """
    tensor, grad = args[0], args[1]
    is_last = _is_channels_last(tensor)
    is_like = grad.is_contiguous() != is_last
    copies = () if is_like else (grad.numel() * grad.itemsize,)
    if not is_last:
        return Scratch(before=copies)
    workspace = _workspace(tensor, BACKWARD_ROWS, SUMS_BYTES, BACKWARD_HEADER)
    return Scratch(before=copies, after=(workspace,))


def batch_norm_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the workspace is known: NCHW, and cuDNN's channels-last on Hopper but for float64.

    torch's own kernels (bfloat16) were recorded in both orders, in two nets, but not of sequences
    with gaps.
    """
    is_backward = func is torch.ops.aten.native_batch_norm_backward.default
    tensor = args[1] if is_backward else args[0]
    if "native" in func._schema.name:
        return bool(tensor.dim() != 3 or tensor.is_contiguous())
    is_measured = tensor.dtype in FORWARD_ROWS and gpu.capability == (9, 0)
    return bool(not _is_channels_last(tensor) or is_measured)


def _takes_rows(tensor: Tensor) -> bool:
    """`batch_norm_use_channels_last_kernels`: the channels of a sample lie side by side."""
    if tensor.dim() == 2:
        return tensor.is_contiguous() and tensor.stride(1) == 1
    return tensor.dim() > 3 and _is_channels_last(tensor)


def _last_power_of_2(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _staging(tensor: Tensor, sums_per_channel: int) -> tuple[int, ...]:
    """What blocks of rows leave to each other: sums in float32, and a flag for each group of
    channels; nothing where fewer than 8 blocks would share a group (`flexible_launch_configs`).
    """
    channels = tensor.shape[1]
    rows = tensor.numel() // max(1, channels)
    width = min(_last_power_of_2(channels), 32)
    height = min(_last_power_of_2(-(-rows // ROWS_PER_THREAD)), BLOCK_THREADS // width)
    if width * height != BLOCK_THREADS:
        width = min(_last_power_of_2(channels), BLOCK_THREADS // height)
    blocks = min(-(-rows // (height * ROWS_PER_THREAD)), MAX_BLOCKS)
    if blocks < MIN_BLOCKS:
        return ()
    return sums_per_channel * channels * blocks * 4, -(-channels // width) * 4


def native_batch_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`batch_norm_cuda` by torch's own kernels: in training staged sums where channels lie side by
    side; of rows with gaps numbers in place of weights that are not there (`Impl::General`).
    """
    tensor, is_training = args[0], args[5]
    staged = _staging(tensor, 4) if is_training and _takes_rows(tensor) else ()
    has_gaps = tensor.dim() == 2 and not tensor.is_contiguous()
    return Scratch(after=staged + (4,) * (has_gaps * sum(w is None for w in args[1:3])))


def statistics_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`batch_norm_stats`, of `SyncBatchNorm`."""
    return Scratch(after=_staging(args[0], 4) if _takes_rows(args[0]) else ())


def statistics_gradient_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`batch_norm_backward_reduce`, of `SyncBatchNorm`."""
    return Scratch(after=_staging(args[1], 2) if _takes_rows(args[1]) else ())


def native_batch_norm_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`batch_norm_backward_cuda`: one kernel, or where channels lie side by side, or the input
    needs no gradient, sums over the samples first.
    """
    tensor, wanted = args[1], args[9]
    takes_rows = _takes_rows(tensor)
    sizes = {i: t.numel() * t.itemsize for i, t in enumerate(out) if t is not None and wanted[i]}
    if wanted[0] and not takes_rows:
        return tuple(outputs(sizes))
    of_input = outputs({0: sizes.pop(0)} if wanted[0] else {})
    sums = (tensor.shape[1] * (8 if tensor.dtype == torch.float64 else 4),) * 2
    staged = _staging(tensor, 2) if takes_rows and _takes_rows(args[0]) else ()
    return tuple(
        temporaries(*sums)
        + outputs(sizes)
        + passing(*staged)
        + of_input
        + temporaries(*(-n for n in sums))
    )
