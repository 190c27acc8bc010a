"""Temporaries of the losses: elementwise buffers, and which of them the result keeps.

Sources (torch 2.11, `aten/src/ATen/native`): Loss.cpp, cuda/MultiMarginLoss.cu,
cuda/MultiLabelMarginCriterion.cu, cuda/LossCTC.cu, cuda/NLLLoss.cu.
Evidence: the allocator's events of each loss, recorded on an H100.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.indexing import contiguous_copy
from memest.estimator.kernels.reductions import sum_bytes
from memest.estimator.kernels.scratch import (
    OLDEST,
    Events,
    EventsFn,
    KernelEvent,
    Scratch,
    ScratchFn,
    bytes_of,
    outputs,
    passing,
    temporaries,
)

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def is_reduced(args: Args, position: int) -> bool:
    """Whether the loss is a mean or a sum: what the argument at `position` is, unless left out."""
    return len(args) <= position or args[position] != 0


def loss_shape(args: Args) -> tuple[int, ...]:
    """The shape of the elementwise loss of the first two arguments."""
    return tuple(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]


def _elements(shape: tuple[int, ...], out: Tensor, gpu: Gpu) -> tuple[int, tuple[int, ...]]:
    """Bytes of an elementwise loss, and of what its sum over everything asks for."""
    loss = torch.empty(shape, dtype=out.dtype, device="meta")
    return prod(shape) * out.itemsize, sum_bytes(loss, (), loss.dtype, gpu)


def mse_loss_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`mse_loss` and `smooth_l1_loss` of Loss.cpp, reduced: the elementwise loss and the staging
    of its sum.
    """
    if not is_reduced(args, 2):
        return Scratch()
    loss = torch.empty(loss_shape(args), dtype=out.dtype, device="meta")
    return Scratch(after=(loss.numel() * loss.itemsize, *sum_bytes(loss, (), loss.dtype, gpu)))


def mse_loss_outputs(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> list[int] | None:
    """The scalar of a reduced loss (Loss.cpp) keeps the storage of the elementwise loss."""
    if not is_reduced(args, 2):
        return None
    return [prod(loss_shape(args)) * out.itemsize]


def bce_of_probabilities_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`binary_cross_entropy` of cuda/Loss.cu, reduced: the mean or sum, copied into the loss."""
    if not is_reduced(args, 3):
        return Scratch()
    loss = torch.empty(args[0].shape, dtype=out.dtype, device="meta")
    return Scratch(after=(out.itemsize, *sum_bytes(loss, (), loss.dtype, gpu)))


def bce_of_probabilities_outputs(
    args: Args, kwargs: Kwargs, out: Any, gpu: Gpu
) -> list[int] | None:
    """The scalar of a reduced `binary_cross_entropy` (cuda/Loss.cu) keeps all its storage."""
    return [args[0].numel() * out.itemsize] if is_reduced(args, 3) else None


def huber_loss_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`huber_loss` of Loss.cpp with a reduction: the elementwise loss, then the staging of its
    sum.
    """
    if not is_reduced(args, 2):
        return Scratch()
    size, staged = _elements(loss_shape(args), out, gpu)
    return Scratch(before=(size,), after=staged)


def bce_with_logits_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`binary_cross_entropy_with_logits` of Loss.cpp: the log-sigmoid, then the loss.

    With weights of the positives the log-sigmoid is multiplied by `(pos_weight - 1) * target + 1`,
    which is made of a tensor of the weights' size and one of the loss's.
    """
    positives = args[3] if len(args) > 3 else kwargs.get("pos_weight")
    size, staged = _elements(loss_shape(args), out, gpu)
    log_sigmoid = bytes_of(args[0])
    events = temporaries(log_sigmoid)
    if positives is not None:
        events += passing(positives.numel() * positives.itemsize, size)
    if not is_reduced(args, 4):
        return tuple(events + outputs({0: size}) + temporaries(-log_sigmoid))
    reduced = outputs({0: out.itemsize}) + passing(*staged)
    return tuple(events + temporaries(size) + reduced + temporaries(-size, -log_sigmoid))


def soft_margin_outputs(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> list[int] | None:
    """The scalar of a reduced `soft_margin_loss` (Loss.cpp) keeps the elements' storage."""
    return [args[0].numel() * out.itemsize] if is_reduced(args, 2) else None


def nll_loss_copies(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`nll_loss_forward` (cuda/NLLLoss.cu), reduced: input, weight and target made contiguous."""
    log_probs, target, weight, reduction = args[:4]
    if reduction == 0 or log_probs.dim() < 2:
        return Scratch()
    return Scratch(after=contiguous_copy(log_probs, weight, target))


def nll_loss_gradient_copies(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`nll_loss_backward`, likewise."""
    _, log_probs, target, weight, reduction = args[:5]
    if reduction == 0 or log_probs.dim() < 2:
        return Scratch()
    return Scratch(after=contiguous_copy(target, weight))


def soft_margin_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`soft_margin_loss` of Loss.cpp, reduced: the mean or sum, copied into the loss."""
    if not is_reduced(args, 2):
        return Scratch()
    return Scratch(after=(out.itemsize, *_elements(args[0].shape, out, gpu)[1]))


def soft_margin_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`soft_margin_loss_backward` of Loss.cpp: `exp(-target * input)` by way of two products."""
    size = out.numel() * out.itemsize
    oldest = KernelEvent(-size, OLDEST)
    return tuple(
        [*temporaries(size, size, size), oldest, oldest, *outputs({0: size}), *temporaries(-size)]
    )


def _samples(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() > 1 else 1


def multi_margin_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`multi_margin_loss` (MultiMarginLoss.cu) with a reduction: one loss for each sample."""
    if args[0].dim() < 2 or not is_reduced(args, 5):
        return Scratch()
    return Scratch(after=(_samples(args[0]) * out.itemsize,))


def multilabel_margin_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`multilabel_margin_loss_forward` (MultiLabelMarginCriterion.cu): which are targets, one loss
    for each sample, then their mean or sum.
    """
    loss, is_target = out
    kept = outputs({1: is_target.numel() * is_target.itemsize})
    result = outputs({0: loss.numel() * loss.itemsize})
    if args[0].dim() < 2 or not is_reduced(args, 2):
        return tuple(kept + result)
    each = _samples(args[0]) * loss.itemsize
    return tuple(kept + temporaries(each) + result + temporaries(-each))


def ctc_loss_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_ctc_loss` (LossCTC.cu): the lengths of inputs and targets and where targets begin, as
    int64 for each sample, the forward variables, then the losses.
    """
    losses, alphas = out
    lengths = (losses.numel() * 8,) * 3
    results = outputs({1: alphas.numel() * alphas.itemsize, 0: losses.numel() * losses.itemsize})
    return tuple(temporaries(*lengths) + results + temporaries(*(-n for n in lengths)))


LARGE_CTC = 450
"""More than this, by `_is_large_ctc`, sums over blanks apart."""


def _is_large_ctc(log_probs: Tensor, batch: int) -> bool:
    """Whether there are many steps, samples or classes: `is_large` of LossCTC.cu."""
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    return 2 * steps + 24 * batch // 10 + 2 * classes // 10 > LARGE_CTC


def ctc_loss_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_ctc_loss_backward` (LossCTC.cu): lengths as in the forward, then the backward variables,
    of the size of the forward ones, then the gradient; a large one has a `logsumexp` over the
    blanks, and a second gradient where infinite losses count as zero.
    """
    log_probs, losses, alphas = args[1], args[5], args[6]
    zero_infinity = args[8] if len(args) > 8 else kwargs.get("zero_infinity", False)
    lengths = (losses.numel() * 8,) * 3
    betas = alphas.numel() * alphas.itemsize
    made = out.numel() * out.itemsize
    events = temporaries(*lengths, betas)
    if not _is_large_ctc(log_probs, losses.numel()):
        events += outputs({0: made})
    else:
        rows = alphas.shape[0] * alphas.shape[1]
        blanks = rows * (alphas.shape[2] // 2 + 1) * alphas.itemsize
        sums = rows * alphas.itemsize
        of_blanks = temporaries(
            blanks, sums, sums, rows, -rows, -sums, blanks, sums, -blanks, -sums, -sums, -blanks
        )
        if zero_infinity:
            zero, flags = out.itemsize, losses.numel()
            events += temporaries(made) + of_blanks + temporaries(zero, flags)
            events += outputs({0: made}) + temporaries(-flags, -zero, -made)
        else:
            events += outputs({0: made}) + of_blanks
    return tuple(events + temporaries(-betas, *(-n for n in lengths)))


LOSS_SCRATCH: dict[OpOverload, ScratchFn] = {
    aten.nll_loss_forward.default: nll_loss_copies,
    aten.nll_loss_backward.default: nll_loss_gradient_copies,
    aten.mse_loss.default: mse_loss_scratch,
    aten.smooth_l1_loss.default: mse_loss_scratch,
    aten.binary_cross_entropy.default: bce_of_probabilities_scratch,
    aten.huber_loss.default: huber_loss_scratch,
    aten.soft_margin_loss.default: soft_margin_scratch,
    aten.multi_margin_loss.default: multi_margin_scratch,
}
"""Temporaries of the losses that need no order."""

LOSS_OUTPUTS = {
    aten.mse_loss.default: mse_loss_outputs,
    aten.smooth_l1_loss.default: mse_loss_outputs,
    aten.binary_cross_entropy.default: bce_of_probabilities_outputs,
    aten.soft_margin_loss.default: soft_margin_outputs,
}
"""Bytes of the results that keep more than they hold."""

LOSS_EVENTS: dict[OpOverload, EventsFn] = {
    aten.binary_cross_entropy_with_logits.default: bce_with_logits_events,
    aten.soft_margin_loss_backward.default: soft_margin_backward_events,
    aten.multilabel_margin_loss_forward.default: multilabel_margin_events,
    aten._ctc_loss.default: ctc_loss_events,
    aten._ctc_loss.Tensor: ctc_loss_events,
    aten._ctc_loss_backward.default: ctc_loss_backward_events,
    aten._ctc_loss_backward.Tensor: ctc_loss_backward_events,
}
"""What each loss asks for, in order."""

LOSSES_WITHOUT_SCRATCH = (
    "smooth_l1_loss_backward huber_loss_backward multi_margin_loss_backward "
    "multilabel_margin_loss_backward"
)
"""Names of the gradients that ask for their result alone."""
