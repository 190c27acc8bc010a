"""CUDA kernels of torchvision (0.26, `torchvision/csrc/ops/cuda`): NMS, pooling of regions.

They decide above autograd: autocast runs them in float32, and NMS calls operators of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.ops.autograd_ops import KEY_NAME, Next, kernel_above
from memest.estimator.ops.registry import copying, register
from memest.estimator.tensors.patches import Patches
from memest.units import ceil_div

BOXES_PER_WORD = 64
"""`threadsPerBlock` of nms_kernel.cu: bits of a word of the mask."""

_library: list[Any] = []
_notes: list[Callable[[str], None]] = []
"""Function that notes a guess of the active virtual GPU."""


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Install the kernels when torchvision registers its operators."""
    _notes.append(mode.guesses.note)
    patches.on_undo(_notes.clear)
    hooks.after("torchvision.extension", _after)


def _after(module: ModuleType) -> None:
    ops = torch.ops.torchvision
    if _library or not hasattr(ops, "nms"):
        return
    register(ops.roi_align.default, ops.roi_pool.default, requests=copying(0, 1))
    # a gradient is read with its strides
    register(ops._roi_align_backward.default, ops._roi_pool_backward.default, requests=copying(1))
    make: Any = torch.library.Library  # untyped in torch
    library = make("torchvision", "IMPL")
    _library.append(library)
    for op, kernel in ((ops.nms.default, _nms), (ops.roi_align.default, _roi_align)):
        name = op._schema.name.partition("::")[2]
        library.impl(name, kernel_above(op, kernel), KEY_NAME, with_keyset=True)


def _nms(then: Next, boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Run the operators of `nms_kernel`. All boxes are assumed to be kept."""
    if torch.is_autocast_enabled("cuda"):
        boxes, scores = boxes.float(), scores.float()
    count = boxes.shape[0]
    if not boxes.numel():
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    _notes[-1](f"nms as {count} of {count} boxes")
    with torch.no_grad():
        order = scores.sort(stable=True, dim=0, descending=True)[1]
        ordered = boxes.index_select(0, order).contiguous()
        words = ceil_div(count, BOXES_PER_WORD)
        mask = torch.empty(count * words, dtype=torch.int64, device=boxes.device)
        keep = mask[:count] >= 0
        kept = order.masked_select(keep)
        del ordered, mask
    return kept


def _roi_align(then: Next, image: Tensor, rois: Tensor, *args: Any) -> Tensor:
    """Cast to float32 and back under autocast (torchvision/csrc/ops/autocast)."""
    if not torch.is_autocast_enabled("cuda"):
        return then(image, rois, *args)
    return then(image.float(), rois.float(), *args).to(image.dtype)
