"""Pooling, padding, resizing and sliding windows: copies and the buffers that are outgrown.

Sources (torch 2.11, `aten/src/ATen/native/cuda`): UpSample*.cu, DilatedMaxPool3d.cu,
AveragePool3d.cu, AdaptiveMaxPooling2d.cu, AdaptiveMaxPooling3d.cu, AdaptiveAveragePooling3d.cu,
ReflectionPad.cu, ReplicationPadding.cu, Im2Col.cu, Col2Im.cu.
Evidence: the allocator's events of each operator, recorded on an H100.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.convolution import copies_in
from memest.estimator.kernels.indexing import contiguous_copy
from memest.estimator.kernels.scratch import (
    Events,
    EventsFn,
    Scratch,
    ScratchFn,
    outputs,
    temporaries,
)

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def window_copy_after(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """A contiguous copy of the first argument (input or gradient), made after the outputs."""
    return Scratch(after=contiguous_copy(args[0]))


def image_copy_after(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """A copy of the first argument in its own memory format, made after the outputs.

    UpSampleNearest2d.cu, UpSampleBilinear2d.cu, whose kernels know channels-last.
    """
    return Scratch(after=copies_in(suggest_memory_format(args[0]), args[0]))


def bilinear_gradient_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """As `image_copy_after`; a gradient of the input's own size is copied at once."""
    is_same = args[0].shape == out.shape
    return Scratch() if is_same else image_copy_after(args, kwargs, out, gpu)


def sliding_events(args: Args, kwargs: Kwargs, out: Tensor, gpu: Gpu) -> Events:
    """`im2col` and `col2im` (Im2Col.cu, Col2Im.cu): the result begins as a tensor like the input.

    Where it needs more, another storage takes its place; where it needs less, it keeps the first.
    """
    source = args[0]
    first, wanted = source.numel() * source.itemsize, out.numel() * out.itemsize
    copies = contiguous_copy(source)
    copied = temporaries(*copies), temporaries(*(-n for n in copies))
    if wanted <= first:
        return tuple(outputs({0: first}) + copied[0] + copied[1])
    resized = outputs({0: wanted}) + temporaries(-first)
    return tuple(temporaries(first) + copied[0] + resized + copied[1])


def _is_channels_last(tensor: Tensor) -> bool:
    return suggest_memory_format(tensor) is not torch.contiguous_format


def window_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the first argument is not channels-last, for which kernels differ by the number of
    channels.
    """
    return not _is_channels_last(args[0])


_IMAGES = (
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact2d_backward.default,
)
_COPYING = (
    aten.upsample_nearest1d.default,
    aten.upsample_nearest1d_backward.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_nearest3d.default,
    aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact3d.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_trilinear3d_backward.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa_backward.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d.default,
    aten.reflection_pad3d_backward.default,
)

WINDOW_SCRATCH: dict[OpOverload, ScratchFn] = {
    **dict.fromkeys(_IMAGES, image_copy_after),
    **dict.fromkeys(_COPYING, window_copy_after),
    aten.upsample_bilinear2d_backward.default: bilinear_gradient_scratch,
}
"""Temporaries of each operator."""

WINDOW_EVENTS: dict[OpOverload, EventsFn] = {
    aten.im2col.default: sliding_events,
    aten.col2im.default: sliding_events,
}
"""What each operator asks for, in order."""

WINDOW_MODELLED_WHERE = dict.fromkeys(WINDOW_SCRATCH, window_is_modelled)

WINDOWS_WITHOUT_SCRATCH = (
    "upsample_bilinear2d upsample_linear1d upsample_trilinear3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool3d"
)
"""Names of the operators that read their input as it lies."""
