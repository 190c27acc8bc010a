"""Pooling, padding, resizing and sliding windows: copies and the buffers that are outgrown.

Sources (torch 2.11, `aten/src/ATen/native/cuda`): UpSample*.cu, DilatedMaxPool3d.cu,
AveragePool3d.cu, AdaptiveMaxPooling2d.cu, AdaptiveMaxPooling3d.cu, AdaptiveAveragePooling3d.cu,
ReflectionPad.cu, ReplicationPadding.cu, Im2Col.cu, Col2Im.cu.
Evidence: the allocator's events of each operator, recorded on an H100.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.refusals import expects
from memest.estimator.ops.registry import Args, Kwargs, register
from memest.estimator.ops.strides import contiguous
from memest.estimator.ops.temporaries import (
    INDEX_BYTES,
    Events,
    Scratch,
    around,
    contiguous_copy,
    copies_in,
    outputs,
    passing,
    temporaries,
)

aten = torch.ops.aten

_IMAGES = (
    "upsample_nearest2d upsample_nearest2d_backward _upsample_nearest_exact2d "
    "_upsample_nearest_exact2d_backward"
)
_COPYING = (
    "upsample_nearest1d upsample_nearest1d_backward _upsample_nearest_exact1d "
    "_upsample_nearest_exact1d_backward upsample_linear1d_backward upsample_nearest3d "
    "upsample_nearest3d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward "
    "upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward adaptive_max_pool2d_backward "
    "_upsample_bicubic2d_aa_backward avg_pool3d avg_pool3d_backward adaptive_max_pool3d_backward "
    "_adaptive_avg_pool3d_backward reflection_pad1d reflection_pad1d_backward reflection_pad2d "
    "reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward"
)


register(_COPYING, "upsample_bicubic2d_backward", requests=registry.copying(0))
register(
    "max_unpool2d max_unpool3d", requests=registry.copying(0, 1, is_before=True), layout=contiguous
)  # MaxUnpooling.cu


@registry.requests("unfold_backward")
def unfold_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `unfold_backward` (UnfoldBackward.h): positions, if windows overlap."""
    grad, sizes, dim, size, step = args
    if step >= size:
        return Scratch()
    positions = min(sizes[dim], (grad.shape[dim % len(sizes)] - 1) * step + size)
    return Scratch(after=(positions * INDEX_BYTES,))


def _copies_like(like: int, *positions: int) -> registry.RequestRule:
    """Return a rule: copies after the outputs in the memory format of the argument `like`.

    Kernels of UpSampleNearest2d.cu, UpSampleBilinear2d.cu, AveragePool2d.cu, DilatedMaxPool2d.cu,
    DilatedMaxPool3d.cu and AdaptiveAveragePooling.cu know channels-last.
    """

    def copies(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
        """Copies of arguments in the memory format of one of them, after the outputs."""
        memory_format = suggest_memory_format(args[like])
        return Scratch(after=copies_in(memory_format, *(args[i] for i in positions)))

    return copies


image_copy_after = _copies_like(0, 0)
register(_IMAGES, "avg_pool2d", requests=image_copy_after)
register("max_pool2d_with_indices max_pool3d_with_indices", requests=image_copy_after)
register("max_pool3d_with_indices_backward", requests=_copies_like(1, 0, 7))
register(
    "avg_pool2d_backward _adaptive_avg_pool2d_backward max_pool2d_with_indices_backward",
    requests=_copies_like(1, 0, 1),
)


@registry.requests("upsample_bilinear2d_backward")
def bilinear_gradient_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch | Events:
    """Requests of `image_copy_after`; a gradient of the input's own size is copied at once."""
    is_same = args[0].shape == out.shape
    return Scratch() if is_same else image_copy_after(args, kwargs, out, gpu)


@registry.requests("im2col col2im")
def sliding_events(args: Args, kwargs: Kwargs, out: Tensor, gpu: Gpu) -> Events:
    """Requests of Im2Col.cu and Col2Im.cu: the result begins as a tensor like the input.

    Where it needs more, another storage takes its place; where it needs less, it keeps the first.
    """
    source = args[0]
    first, wanted = source.nbytes, out.nbytes
    copies = contiguous_copy(source)
    if wanted <= first:
        return outputs({0: first}) + passing(*copies)
    return temporaries(first) + around(copies, outputs({0: wanted}) + temporaries(-first))


@registry.modelled(_IMAGES, _COPYING, "upsample_bilinear2d_backward")
def window_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether the first argument is not channels-last.

    Kernels for channels-last differ by the number of channels.
    """
    return suggest_memory_format(args[0]) is torch.contiguous_format


register("grid_sampler_2d", refuse=expects(0, 1, "grid_sampler_2d_cuda"))


# ------------------------------------------------------------------- sampling at a grid

_BY_CUDNN = (torch.float64, torch.float32, torch.float16)
_MOST_CHANNELS = 1024


def _is_by_cudnn(image: Tensor, grid: Tensor, mode: int, padding: int, is_aligned: bool) -> bool:
    """Return whether cuDNN samples: bilinear, zeros around the image (`grid_sampler` of
    GridSampler.cpp).
    """
    is_known = image.dtype in _BY_CUDNN and grid.dtype in _BY_CUDNN and image.size(1) > 0
    is_wanted = mode == padding == 0 and is_aligned and image.size(1) <= _MOST_CHANNELS
    return torch.backends.cudnn.enabled and is_known and is_wanted


def _copy_of_expanded(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.nbytes,) if 0 in tensor.stride() else ()


@registry.requests("grid_sampler_2d")
def grid_sampler_events(args: Args, kwargs: Kwargs, out: Tensor, gpu: Gpu) -> Events:
    """Requests of `cudnn_grid_sampler_forward` (GridSampler.cpp of cudnn): copies of an expanded
    image and of a grid with gaps. torch's own kernel requests nothing.
    """
    image, grid = args[:2]
    made = outputs({0: out.nbytes})
    if not _is_by_cudnn(*args[:5]):
        return made
    return around(_copy_of_expanded(image) + contiguous_copy(grid), made)


@registry.requests("grid_sampler_2d_backward")
def grid_sampler_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `cudnn_grid_sampler_backward`, which computes the gradient of the grid always."""
    grad, image, grid = args[:3]
    made = outputs({i: t.nbytes for i, t in enumerate(out) if t is not None})
    if not _is_by_cudnn(*args[1:6]):
        return made
    copies = _copy_of_expanded(image) + contiguous_copy(grid) + _copy_of_expanded(grad)
    both = [(image, args[6][0]), (grid, args[6][1])]
    each = [
        outputs({i: t.nbytes}) if is_wanted else temporaries(t.nbytes)
        for i, (t, is_wanted) in enumerate(both)
    ]
    unwanted = [-t.nbytes for t, is_wanted in both if not is_wanted]
    return around(copies, each[0] + each[1]) + temporaries(*unwanted)
