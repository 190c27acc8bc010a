"""Pooling, padding, resizing and sliding windows: copies and buffers.

Sources (torch 2.11, `aten/src/ATen/native/cuda`): UpSample*.cu, DilatedMaxPool3d.cu,
AveragePool3d.cu, AdaptiveMaxPooling2d.cu, AdaptiveMaxPooling3d.cu, AdaptiveAveragePooling3d.cu,
ReflectionPad.cu, ReplicationPadding.cu, Im2Col.cu, Col2Im.cu.
Evidence: the allocator's events of each operator, recorded on an H100.
"""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from memest.estimator.ops import registry
from memest.estimator.ops.refusals import expects
from memest.estimator.ops.registry import INDEX_BYTES, KernelCall, op, register
from memest.estimator.ops.strides import contiguous, contiguous_args, contiguous_copy, copies_in
from memest.estimator.ops.temporaries import Events, Scratch, around, outputs, passing, temporaries


def _is_in_order(c: KernelCall) -> bool:
    """Return whether the first argument is not channels-last; kernels for channels-last are not
    modelled. The allocations of a call are known if this is True."""
    return suggest_memory_format(c.args[0]) is torch.contiguous_format


register(
    "upsample_nearest1d upsample_nearest1d_backward _upsample_nearest_exact1d "
    "_upsample_nearest_exact1d_backward upsample_linear1d_backward upsample_nearest3d "
    "upsample_nearest3d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward "
    "upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward adaptive_max_pool2d_backward "
    "_upsample_bicubic2d_aa_backward avg_pool3d avg_pool3d_backward adaptive_max_pool3d_backward "
    "_adaptive_avg_pool3d_backward reflection_pad1d reflection_pad1d_backward reflection_pad2d "
    "reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward",
    requests=contiguous_args(0), modelled=_is_in_order,
)  # fmt: skip
register("upsample_bicubic2d_backward", requests=contiguous_args(0))
register(  # MaxUnpooling.cu
    "max_unpool2d max_unpool3d", requests=contiguous_args(0, 1, is_before=True), layout=contiguous
)


@registry.requests("unfold_backward")
def unfold_backward(c: KernelCall) -> Scratch:
    """Allocations of `unfold_backward` (UnfoldBackward.h): int64 positions, if windows overlap."""
    sizes, step, size = c.input_sizes, c.step, c.size
    if step >= size:
        return Scratch()
    num_windows = c.grad_in.shape[c.dim % len(sizes)]
    positions = min(sizes[c.dim], (num_windows - 1) * step + size)
    return Scratch(after=(positions * INDEX_BYTES,))


def _copies_like(like: int, *positions: int) -> registry.RequestRule:
    """Return a rule that copies arguments at `positions` to the memory format of argument `like`.
    Kernels of UpSampleNearest2d.cu, UpSampleBilinear2d.cu, AveragePool2d.cu, DilatedMaxPool2d.cu,
    DilatedMaxPool3d.cu and AdaptiveAveragePooling.cu support channels-last."""

    def copies(c: KernelCall) -> Scratch:
        """Allocations of copies of arguments, in the memory format of one of them."""
        memory_format = suggest_memory_format(c.args[like])
        return Scratch(after=copies_in(memory_format, *(c.args[i] for i in positions)))

    return copies


_copy_of_image = _copies_like(0, 0)
register(
    "upsample_nearest2d upsample_nearest2d_backward _upsample_nearest_exact2d "
    "_upsample_nearest_exact2d_backward avg_pool2d max_pool2d_with_indices "
    "max_pool3d_with_indices",
    requests=_copy_of_image,
)
register("max_pool3d_with_indices_backward", requests=_copies_like(1, 0, 7))
register(
    "avg_pool2d_backward _adaptive_avg_pool2d_backward max_pool2d_with_indices_backward",
    requests=_copies_like(1, 0, 1),
)


@registry.requests("upsample_bilinear2d_backward", modelled=_is_in_order)
def bilinear_gradient(c: KernelCall) -> Scratch | Events | None:
    """Allocations of bilinear upsampling's gradient: a copy of `grad_output`, unless input and
    output have the same size. `grad_output` is copied only if it is not contiguous in its memory
    format. The result is always a `Scratch`; the type is that of all such rules."""
    return Scratch() if c.grad_output.shape == c.out.shape else _copy_of_image(c)


@registry.requests("im2col col2im")
def im2col(c: KernelCall) -> Events:
    """Allocations of Im2Col.cu and Col2Im.cu: the result is first allocated with the input's size.
    A larger result then gets a new storage; a smaller one stays in the first storage."""
    input_bytes, copies = c.self.nbytes, contiguous_copy(c.self)
    if c.out.nbytes <= input_bytes:
        return outputs({0: input_bytes}) + passing(*copies)
    return temporaries(input_bytes) + around(copies, c.outputs() + temporaries(-input_bytes))


register("grid_sampler_2d", refuse=expects(0, 1, "grid_sampler_2d_cuda"))


_CUDNN_DTYPES = (torch.float64, torch.float32, torch.float16)


def _is_by_cudnn(c: KernelCall) -> bool:
    """Return whether cuDNN samples the grid: bilinear with aligned corners, zeros outside of the
    image, and at most 1024 channels (GridSampler.cpp)."""
    return (
        torch.backends.cudnn.enabled
        and c.input.dtype in _CUDNN_DTYPES
        and c.grid.dtype in _CUDNN_DTYPES
        and c.interpolation_mode == c.padding_mode == 0  # `Bilinear`, `Zeros`
        and c.align_corners
        and 0 < c.input.size(1) <= 1024
    )


def _cudnn_copies(c: KernelCall) -> tuple[int, ...]:
    """Return the bytes of copies: of an image that `expand` made, and of a grid with gaps."""
    return _copy_if_expanded(c.input) + contiguous_copy(c.grid)


def _copy_if_expanded(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.nbytes,) if 0 in tensor.stride() else ()


op(
    "grid_sampler_2d",
    "by cuDNN copies of an expanded image and of a grid with gaps (GridSampler.cpp)",
    before=lambda c: _cudnn_copies(c) if _is_by_cudnn(c) else (),
)


@registry.requests("grid_sampler_2d_backward")
def grid_sampler_backward(c: KernelCall) -> Events:
    """Allocations of `cudnn_grid_sampler_backward`, which always computes the grid's gradient. One
    that the call does not return is temporary. Without cuDNN, only outputs are allocated."""
    if not _is_by_cudnn(c):
        return c.outputs()
    copies = _cudnn_copies(c) + _copy_if_expanded(c.grad_output)
    gradients: Events = []
    frees: Events = []
    for i, tensor in enumerate((c.input, c.grid)):
        if c.output_mask[i]:
            gradients += outputs({i: tensor.nbytes})
        else:
            gradients += temporaries(tensor.nbytes)
            frees += temporaries(-tensor.nbytes)
    return around(copies, gradients) + frees
