"""CUDA kernels of torchvision 0.26: NMS, RoI pooling and deformable convolution.

Sources: `torchvision/csrc/ops/cuda`. Under autocast the kernels run in float32.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.ops.autograd_ops import KEY_NAME, Next, kernel_above
from memest.estimator.ops.registry import register
from memest.estimator.ops.strides import contiguous_args
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import CPU, on_gpu
from memest.units import ceil_div

BOXES_PER_WORD = 64  # `threadsPerBlock` of nms_kernel.cu: bits of a word of the mask
_library: list[Any] = []
_notes: list[Callable[[str], None]] = []  # function that notes a guess of the active virtual GPU


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Register the kernels once torchvision has registered its operators."""
    _notes.append(mode.guesses.note)
    patches.on_undo(_notes.clear)
    hooks.after("torchvision.extension", _after)
    hooks.after("torchvision.models.detection._utils", partial(_guess_samples, patches, mode))


def _after(module: ModuleType) -> None:
    ops = torch.ops.torchvision
    if _library or not hasattr(ops, "nms"):
        return
    register(ops.roi_align.default, ops.roi_pool.default, requests=contiguous_args(0, 1))
    # a gradient is read with its strides
    register(
        ops._roi_align_backward.default, ops._roi_pool_backward.default, requests=contiguous_args(1)
    )
    register(ops.deform_conv2d.default, decomposition=_deform_conv2d)
    register(ops._deform_conv2d_backward.default, decomposition=_deform_conv2d_backward)
    make: Any = torch.library.Library  # untyped in torch
    library = make("torchvision", "IMPL")
    _library.append(library)
    for packet, kernel in (
        (ops.nms, _nms), (ops.roi_align, _in_float32), (ops.deform_conv2d, _in_float32),
    ):  # fmt: skip
        op = packet.default
        library.impl(op, kernel_above(op, kernel), KEY_NAME, with_keyset=True)


def _guess_samples(patches: Patches, mode: CudaSimMode, module: ModuleType) -> None:
    """Guess unknown labels of boxes for a detector's `BalancedPositiveNegativeSampler`. `module` is
    `torchvision.models.detection._utils`, which has the sampler. The sampler selects boxes of each
    image by their labels: 1 for a positive box, 0 for a negative one. Where labels are unknown, as
    many boxes are positive as the sampler can select, and all others negative."""

    @patches.wrap(module.BalancedPositiveNegativeSampler, "__call__")
    def sample_guessed(sample: Any, self: Any, matched_idxs: list[Tensor]) -> Any:
        num_positive = int(self.batch_size_per_image * self.positive_fraction)
        for labels in matched_idxs:
            if on_gpu(labels) and not mode.values.is_known(labels):
                is_positive = torch.arange(len(labels), device=CPU) < num_positive
                mode.guessed.adopt(labels, is_positive.to(labels.dtype))
        return sample(self, matched_idxs)


def _nms(next_kernel: Next, boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Run the operators of `nms_kernel`; return the indices of all boxes, highest score first. The
    result is that for boxes that do not overlap, so `iou_threshold` has no effect. The kernel
    `next_kernel` is not called."""
    if torch.is_autocast_enabled("cuda"):
        boxes, scores = boxes.float(), scores.float()
    count = boxes.shape[0]
    if not boxes.numel():
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    _notes[-1](f"nms as {count} of {count} boxes")
    with torch.no_grad():
        order = scores.sort(stable=True, dim=0, descending=True)[1]
        sorted_boxes = boxes.index_select(0, order).contiguous()
        words = ceil_div(count, BOXES_PER_WORD)
        mask = torch.empty(count * words, dtype=torch.int64, device=boxes.device)
        is_kept = mask[:count] >= 0
        indices = order.masked_select(is_kept)
        del sorted_boxes, mask
    return indices


def _in_float32(next_kernel: Next, image: Tensor, *args: Any) -> Tensor:
    """Run `next_kernel` on `image` and `args`; under autocast, in float32."""
    if not torch.is_autocast_enabled("cuda"):
        return next_kernel(image, *args)
    casts = [arg.float() if isinstance(arg, Tensor) else arg for arg in (*args[::-1], image)]
    return next_kernel(*casts[::-1]).to(image.dtype)


MAX_IMAGES = 32  # `kMaxParallelImgs` of deform_conv2d_kernel.cu: most images of a product


def _num_images(batch: int) -> int:
    """Return the images per matrix product: the largest divisor of `batch` up to `MAX_IMAGES`."""
    return max(n for n in range(1, MAX_IMAGES + 1) if batch % n == 0)


def _columns(x: Tensor, weight: Tensor, offset: Tensor, groups: int) -> Tensor:
    """Return an empty im2col matrix for one block of images. Its shape is (`groups`, channels of a
    group * elements of the kernel, output pixels). `offset` has the output's height and width."""
    positions = x.shape[1] // groups * weight.shape[2] * weight.shape[3]
    return x.new_empty((groups, positions, _num_images(len(x)) * offset[0, 0].numel()))


def _deform_conv2d(
    x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, *args: Any
) -> Tensor:
    """Run `deform_conv2d_forward_kernel`: a matrix product for each group of each block of images.
    `args` are the operator's further arguments; `args[6]` is the number of groups."""
    x, offset, weight, mask, bias = (t.contiguous() for t in (x, offset, weight, mask, bias))
    groups, images, size = args[6], _num_images(len(x)), offset.shape[2:]
    out = x.new_zeros((len(x) // images, images, len(weight), *size))
    sums = x.new_zeros((len(x) // images, groups, len(weight) // groups, images * size.numel()))
    columns = _columns(x, weight, offset, groups).zero_()
    kernels = weight.view(*sums.shape[1:3], -1)
    for block, group in product(range(len(sums)), range(groups)):
        sums[block, group].addmm_(kernels[group], columns[group])
    out.copy_(sums.view(len(out), -1, images, *size).transpose(1, 2))
    result = out.view(len(x), -1, *size) + bias.view(1, -1, 1, 1)
    del columns, sums, out
    return result


def _deform_conv2d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Run `deform_conv2d_backward_kernel`; return the gradients of `x`, `weight`, `offset`, `mask`
    and `bias`. `grad` is the output's gradient, `args` are the forward's further arguments."""
    grad, x, weight, offset, mask, bias = (
        t.contiguous() for t in (grad, x, weight, offset, mask, bias)
    )
    groups, images = args[6], _num_images(len(x))
    x_grad, offset_grad, mask_grad = (torch.zeros_like(t) for t in (x, offset, mask))
    columns = _columns(x, weight, offset, groups)
    grads = grad.view(-1, images, groups, len(weight) // groups, *grad.shape[2:])
    grads = grads.permute(0, 2, 3, 1, 4, 5)
    kernels = weight.view(groups, grads.shape[2], -1)
    for block in range(len(grads)):
        columns.zero_()
        for group in range(groups):
            columns[group].addmm_(kernels[group].t(), grads[block, group].flatten(1))
    del columns
    weight_grad = torch.zeros_like(weight)
    grads = grads.contiguous()
    columns = _columns(x, weight, offset, groups)
    sums = weight_grad.view(kernels.shape)
    for block, group in product(range(len(grads)), range(groups)):
        sums[group].addmm_(grads[block, group].flatten(1), columns[group].t())
    del columns, grads
    total = grad.sum((0, 2, 3))
    return x_grad, weight_grad, offset_grad, mask_grad, torch.ones_like(bias) * total
