"""What a convolution of torch allocates: contiguous copies, outputs and cuDNN's workspace.

Shapes: N samples, C input channels, O output channels, spatial sizes.

Sources: `aten/src/ATen/native/Convolution.cpp`, `cudnn/ConvShared.cpp` and `ConvUtils.h` (torch
2.11) for memory formats and copies. The workspaces are those of `cudnn_convolution`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.cudnn_convolution import (
    FEW_CHANNELS,
    MAX_WINDOW,
    ConvolutionShapes,
    forward_workspace,
    input_workspace,
    is_native,
    weight_workspace,
)
from memest.estimator.kernels.reductions import HALVES
from memest.estimator.kernels.scratch import Scratch

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

FLOATS = (*HALVES, torch.float32)

TENSOR_CORES_FOR_FLOAT32 = (8, 0)
"""First capability that multiplies float32 in tensor cores, as the measured GPU does."""


def convolution_format(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    """`cudnn_conv_suggest_memory_format`: channels-last where input or weight are."""
    formats = (suggest_memory_format(tensor), suggest_memory_format(weight))
    if tensor.dtype == torch.float64:
        return torch.contiguous_format
    for last in (torch.channels_last, torch.channels_last_3d):
        if last in formats:
            return last
    return torch.contiguous_format


def copies_in(memory_format: torch.memory_format, *tensors: Tensor) -> tuple[int, ...]:
    """Bytes of `tensor.contiguous(memory_format)` for each tensor that has another format."""
    return tuple(
        t.numel() * t.itemsize for t in tensors if not t.is_contiguous(memory_format=memory_format)
    )


def _shapes_of(args: Args, output: Tensor, first: int) -> ConvolutionShapes | None:
    """What cuDNN is asked for; None where its workspace is not known: three dimensions, groups of
    several channels, float64.
    """
    tensor, weight = args[first], args[first + 1]
    stride, padding, transposed, groups = (args[first + i] for i in (3, 4, 6, 8))
    if transposed:
        tensor, output = output, tensor
    dims = tensor.dim() - 2
    shapes = ConvolutionShapes(
        tensor=tuple(tensor.shape),
        weight=tuple(weight.shape),
        output=tuple(output.shape),
        stride=tuple(stride) * (dims if len(stride) == 1 else 1),
        padding=tuple(padding) * (dims if len(padding) == 1 else 1),
        groups=groups,
        dtype=tensor.dtype,
        is_channels_last=convolution_format(tensor, weight) != torch.contiguous_format,
    )
    is_known = dims < 3 and tensor.dtype in FLOATS and (groups == 1 or shapes.is_depthwise)
    return shapes if is_known and prod(shapes.output) else None


def convolution_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the workspace follows from the shapes: forward, in 16 bits, kernels larger than 1x1.

    On Hopper, without groups or depthwise, in up to two dimensions, from more channels than an
    image has or in patches: 97 % of those measured are right. Otherwise cuDNN picks the kernel, and
    with it the workspace, by heuristics of its own.
    """
    if func is not aten.convolution.default or gpu.capability != (9, 0):
        return False
    tensor, weight, transposed, groups = args[0], args[1], args[6], args[8]
    is_known = groups == 1 or weight.shape[1] == 1
    is_larger = prod(weight.shape[2:]) > 1
    is_known &= tensor.shape[1] > FEW_CHANNELS or max(weight.shape[2:]) > MAX_WINDOW
    return bool(
        tensor.dim() < 5 and tensor.dtype in HALVES and not transposed and is_known and is_larger
    )


def convolution_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`convolution`: the input in the format of the output before it, then the weight and cuDNN's
    workspace (`cudnn_convolution`).
    """
    memory_format = convolution_format(args[0], args[1])
    before = copies_in(memory_format, args[0])
    weight = copies_in(memory_format, args[1])
    shapes = _shapes_of(args, out, 0)
    if shapes is None or gpu.capability < TENSOR_CORES_FOR_FLOAT32:
        return Scratch(before=before, after=weight)
    workspace = input_workspace(shapes) if args[6] else forward_workspace(shapes)
    return Scratch(before=before, after=(*weight, *((workspace,) if workspace else ())))


def backward_workspaces(args: Args, gpu: Gpu) -> tuple[int, int]:
    """Workspaces of `convolution_backward` for the gradients of input and of weight.

    All calls are reported (`convolution_is_modelled`): cuDNN cuts the sum of a weight gradient
    into partial sums as it sees fit.
    """
    grad = args[0]
    shapes = _shapes_of(args, grad, 1)
    if shapes is None or gpu.capability < TENSOR_CORES_FOR_FLOAT32:
        return 0, 0
    for_input = forward_workspace(shapes) if args[7] else input_workspace(shapes)
    return for_input, weight_workspace(shapes, gpu.num_sms)


def weight_comes_first(args: Args) -> bool:
    """Whether the gradient of the weight is computed before that of the input: in torch's own
    depthwise kernels (`conv_depthwise2d_backward_cuda_out` of DepthwiseConv2d.cu).
    """
    shapes = _shapes_of(args, args[0], 1)
    return shapes is not None and is_native(shapes)


def convolution_outputs(func: OpOverload, args: Args, out: Any) -> Any:
    """Outputs of `func` in the memory format that cuDNN gives them; meta gives NCHW."""
    is_forward = func is aten.convolution.default
    tensor, weight = (args[0], args[1]) if is_forward else (args[1], args[2])
    memory_format = convolution_format(tensor, weight)
    if memory_format == torch.contiguous_format:
        return out
    if is_forward:
        return out.contiguous(memory_format=memory_format)
    return (
        *(None if t is None else t.contiguous(memory_format=memory_format) for t in out[:2]),
        out[2],
    )
