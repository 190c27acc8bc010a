"""Temporaries of cuDNN convolutions, as far as they follow from the shapes.

Shapes: N samples, C input channels, O output channels, spatial sizes.

Sources: `aten/src/ATen/native/Convolution.cpp` and `cudnn/ConvShared.cpp` (torch 2.11) for the
contiguous copies and the bias gradient. The workspace rule is deduced from cuDNN 9.19 on an H200:
its kernels read channels-last, so each operand of an NCHW call is rearranged in the workspace, with
channels padded to 16 bytes. It gives all 16-bit forward workspaces measured there, to 131 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.indexing import contiguous_copy
from memest.estimator.kernels.reductions import HALVES
from memest.estimator.kernels.scratch import Scratch

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

WORKSPACE_TAIL = 16
"""Bytes that cuDNN 9.19 asks for beyond the rearranged operands (16 to 147 measured)."""

FLOATS = (*HALVES, torch.float32)

VECTOR_BYTES = 16
"""Channels of one pixel are padded to a multiple of it: one vector load."""


def _padded(tensor: Tensor, dim: int) -> int:
    """Bytes of `tensor` with dimension `dim` padded to whole vectors."""
    per_vector = VECTOR_BYTES // tensor.itemsize
    channels = -(-tensor.shape[dim] // per_vector) * per_vector
    return tensor.numel() // tensor.shape[dim] * channels * tensor.itemsize


def _rearranged(tensor: Tensor, weight: Tensor, output: Tensor) -> int:
    """Workspace that holds input, weight and output in channels-last order."""
    return _padded(tensor, 1) + _padded(weight, 1) + _padded(output, 1) + WORKSPACE_TAIL


def _is_plain(args: Args, first: int, dtypes: tuple[torch.dtype, ...] = HALVES) -> bool:
    """Of `dtypes`, one group, not transposed, NCHW.

    Not over three dimensions: the one that was recorded, whose kernel covers the whole input, takes
    no workspace.
    """
    tensor, weight = args[first], args[first + 1]
    transposed, groups = args[first + 6], args[first + 8]
    return (
        tensor.dim() < 5 and tensor.dtype in dtypes and not transposed and groups == 1
        and tensor.is_contiguous() and weight.is_contiguous()
    )  # fmt: skip


def convolution_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the workspace follows from the shapes: forward, half or bfloat16, on Hopper.

    Otherwise cuDNN picks the kernel, and with it the workspace, by heuristics of its own.
    """
    return func is aten.convolution.default and _is_plain(args, 0) and gpu.capability == (9, 0)


def convolution_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`convolution`: every operand rearranged, with its channels padded in 16 bits.

    In float32 the kernel, and with it the workspace, is cuDNN's choice by more than the shapes'
    kind: of one layer on an H200 it took none for 1 sample, the rearrangement without padding for 8
    to 32 and with it for 64. The middle one is taken for all, and the call is reported
    (`convolution_is_modelled`).

    In 16 bits one recorded layer contradicts the rule: Gemma 3's patches of 896 pixels took none.
    Such calls are not reported yet, since nothing in their shapes tells them apart.
    """
    copies = contiguous_copy(args[0])
    if gpu.capability != (9, 0) or not _is_plain(args, 0, FLOATS):
        return Scratch(before=copies)
    workspace = _rearranged(args[0], args[1], out)
    if args[0].dtype == torch.float32:
        operands = (args[0], args[1], out)
        workspace = sum(t.numel() * t.itemsize for t in operands) + WORKSPACE_TAIL
    return Scratch(before=copies, after=(workspace,))


def backward_workspaces(args: Args, gpu: Gpu) -> tuple[int, int]:
    """Workspaces of `convolution_backward` for the gradients of input and of weight.

    Every operand rearranged, as in the forward: right to 2.3 KiB in 19 of the 30 calls that were
    recorded on an H200, in 16 bits and in float32; 8 to 26 MB short in 9 and 3 to 7 MB over in 2.
    Left out: the partial sums of a weight gradient that cuDNN splits (6 more weights, when it sees
    fit), and kernels that rearrange less. All calls are reported (`convolution_is_modelled`).
    """
    grad, tensor, weight = args[0], args[1], args[2]
    if gpu.capability != (9, 0) or not _is_plain((tensor, weight, None, *args[4:]), 0, FLOATS):
        return 0, 0
    workspace = _rearranged(tensor, weight, grad)
    return workspace, workspace
