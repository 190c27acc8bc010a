"""Losses: elementwise buffers, and which of them the result keeps.

Sources (torch 2.11, `aten/src/ATen/native`): Loss.cpp, LossCTC.cpp, cuda/Loss.cu,
cuda/MultiMarginLoss.cu, cuda/MultiLabelMarginCriterion.cu, cuda/LossCTC.cu, cuda/NLLLoss.cu;
torch/csrc/autograd/FunctionsManual.cpp (`binary_cross_entropy_with_logits_backward`).
Evidence: the allocator's events of each loss, recorded on an H100.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.in_place import in_nodes
from memest.estimator.ops.reductions import sum_bytes
from memest.estimator.ops.refusals import accepts, same_type
from memest.estimator.ops.registry import KernelCall, op, register
from memest.estimator.ops.strides import contiguous, contiguous_copy, strides_like
from memest.estimator.ops.temporaries import Events, Scratch, around, outputs, passing, temporaries
from memest.estimator.tensors.placement import on_gpu

aten = torch.ops.aten


def _elementwise_bytes(c: KernelCall) -> tuple[int, tuple[int, ...]]:
    """Return (bytes of all elementwise losses, bytes of the temporaries of their sum)."""
    shape: Any = torch.broadcast_shapes(c.self.shape, c.target.shape)  # type: ignore[no-untyped-call]
    loss = torch.empty(shape, dtype=c.out.dtype, device="meta")
    return loss.nbytes, sum_bytes(loss, (), loss.dtype, c.gpu)


def _reduced_loss(
    names: str, about: str, allocations: Callable[[KernelCall, int, tuple[int, ...]], Scratch]
) -> None:
    """Register what the losses `names` (separated by blanks) allocate if reduced to a mean or sum:
    the result of `allocations(call, *_elementwise_bytes(call))`. `about` describes them."""

    def rule(c: KernelCall) -> Scratch:
        return allocations(c, *_elementwise_bytes(c)) if c.reduction else Scratch()

    register(names, about=about, requests=rule)


_reduced_loss(
    "mse_loss smooth_l1_loss",
    "reduced: a second loss per element, its sum's staging; the result keeps the loss's storage "
    "(Loss.cpp)",
    lambda c, size, staging: Scratch(after=(size, *staging), outputs=(size,)),
)
_reduced_loss(
    "soft_margin_loss binary_cross_entropy",
    "reduced: the staging of the sum, a scalar that is copied into the loss, whose storage is kept "
    "(Loss.cpp, cuda/Loss.cu)",
    lambda c, size, staging: Scratch(after=(c.out.itemsize, *staging), outputs=(size,)),
)
_reduced_loss(
    "huber_loss",
    "reduced: the elementwise loss, its sum's staging (Loss.cpp)",
    lambda c, size, staging: Scratch(before=(size,), after=staging),
)


@registry.requests("binary_cross_entropy_with_logits")
def bce_with_logits(c: KernelCall) -> Events:
    """Allocations of `binary_cross_entropy_with_logits` (Loss.cpp): log-sigmoid, then the loss.
    With a `pos_weight`, two temporaries have the size of the weights and of the loss."""
    size, staging = _elementwise_bytes(c)
    loss_events = outputs({0: size})
    if c.reduction:
        loss_events = around((size,), outputs({0: c.out.itemsize}) + passing(*staging))
    weight_events = [] if c.pos_weight is None else passing(c.pos_weight.nbytes, size)
    return around((c.self.nbytes,), weight_events + loss_events)


def _is_reduced(c: KernelCall) -> bool:
    """Return whether a loss of several samples is reduced to a mean or a sum."""
    return bool(c.reduction) and c.self.dim() > 1


def _margin_loss(c: KernelCall) -> Tensor:
    shape = [] if c.reduction or c.self.dim() < 2 else [len(c.self)]
    return torch.empty(shape, dtype=c.self.dtype, device="meta")


op(
    "nll_loss_forward", "reduced: copies of what has gaps (cuda/NLLLoss.cu)",
    after=lambda c: contiguous_copy(c.self, c.weight, c.target) if _is_reduced(c) else (),
)  # fmt: skip
op(
    "nll_loss_backward", "copies of what has gaps, such as an expanded gradient (cuda/NLLLoss.cu)",
    after=lambda c: contiguous_copy(c.target, c.self, c.grad_output, c.weight),
)  # fmt: skip
op(
    "multi_margin_loss", "reduced: one loss for each sample (MultiMarginLoss.cu)",
    after=lambda c: len(c.self) * c.out.itemsize if _is_reduced(c) else 0,
    result=_margin_loss,
)  # fmt: skip


@registry.requests("soft_margin_loss_backward")
def soft_margin_backward(c: KernelCall) -> Events:
    """Allocations of the gradient in Loss.cpp: `exp(-target * input)` and two products."""
    size = c.out.nbytes
    products = temporaries(size, size, size) + temporaries(-size, -size, oldest=True)
    return products + c.outputs() + temporaries(-size)


@registry.requests(
    "multilabel_margin_loss_forward",
    result=lambda c: (_margin_loss(c), c.self.new_empty(c.target.shape)),
)
def multilabel_margin(c: KernelCall) -> Events:
    """Allocations of MultiLabelMarginCriterion.cu: target mask, losses, their mean or sum."""
    losses = (len(c.self) * c.self.itemsize,) if _is_reduced(c) else ()
    return c.outputs(1) + around(losses, c.outputs(0))


register(
    "_ctc_loss _ctc_loss.Tensor",
    about="lengths and start of the target of each sample, forward variables, losses (LossCTC.cu)",
    requests=lambda c: around((c.out[0].numel() * 8,) * 3, c.outputs(1, 0)),
)


@registry.requests("_ctc_loss_backward _ctc_loss_backward.Tensor")
def ctc_loss_backward(c: KernelCall) -> Events:
    """Allocations of `_ctc_loss_backward` (LossCTC.cu): lengths, backward variables, gradient. For
    large inputs, a `logsumexp` over the blanks follows. `zero_infinity` adds a second gradient."""
    alphas, num_samples = c.log_alpha, c.neg_log_likelihood.numel()
    gradient = c.outputs()
    steps, classes = c.log_probs.shape[0], c.log_probs.shape[-1]
    if 2 * steps + 24 * num_samples // 10 + 2 * classes // 10 > 450:  # `is_large` of LossCTC.cu
        samples, alpha_steps, states = alphas.shape
        rows = samples * alpha_steps
        blanks = rows * (states // 2 + 1) * alphas.itemsize
        sums = rows * alphas.itemsize
        blank_events = temporaries(
            blanks, sums, sums, rows, -rows, -sums, blanks, sums, -blanks, -sums, -sums, -blanks
        )
        if c.zero_infinity:
            zeros = (c.out.itemsize, num_samples)
            gradient = around((c.out.nbytes,), blank_events + around(zeros, gradient))
        else:
            gradient += blank_events
    lengths = (num_samples * 8,) * 3  # of inputs and targets, and the targets' starts
    return around((*lengths, alphas.nbytes), gradient)


_CLASS_DTYPES = (torch.int64, torch.uint8)  # of a target of classes
_NLL_LOSS = "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for '{}'"

# cuda/NLLLoss.cu, cuda/NLLLoss2d.cu, cuda/Loss.cu
register("nll_loss_forward", refuse=accepts(1, _CLASS_DTYPES, _NLL_LOSS))
register(
    "nll_loss2d_forward", refuse=accepts(1, _CLASS_DTYPES, "expected scalar type Long but found {}")
)
register("binary_cross_entropy", refuse=same_type(1, 0, "Found dtype {} but expected {}"))
# Loss.cpp, cuda/Loss.cu
register("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", layout=contiguous)
register("binary_cross_entropy_backward", layout=strides_like(1))


def _is_in_place(left: Tensor, right: Any) -> bool:
    """Return whether autograd writes the result of `left` and `right` into `left`. The operation is
    a product, difference or quotient in the gradient of a binary cross-entropy with logits. `right`
    is a tensor or a number. Autograd writes into `left` if the backward is not recorded and the
    result has the shape of `left`. The shapes differ, for example, if `left` is a `pos_weight` of
    shape (C,) and the target has shape (N, C)."""
    if torch.is_grad_enabled():
        return False
    if not isinstance(right, Tensor):
        return True
    return left.dim() >= right.dim() and left.shape == torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        left.shape, right.shape
    )


register(
    "sub.Tensor mul.Tensor div.Tensor",
    in_backward=in_nodes("BinaryCrossEntropyWithLogitsBackward0", is_possible=_is_in_place),
)

register("_ctc_loss _ctc_loss_backward _cudnn_ctc_loss", may_mix_devices=True)


# cudnn/LossCTC.cpp: losses and gradient; the workspace is not known
register(
    "_cudnn_ctc_loss",
    result=lambda c: (c.log_probs.new_empty(c.log_probs.shape[1]), torch.empty_like(c.log_probs)),
)


def _goes_to_cudnn(
    batch: Tensor, targets: Tensor, lengths: list[int], target_lengths: list[int]
) -> bool:
    """Return whether cuDNN computes a CTC loss with blank 0 (`_use_cudnn_ctc_loss`). It takes
    float32 log probabilities `batch` (steps, samples, classes) and 1-d int32 `targets` on the host.
    All input `lengths` must equal the number of steps. No target length may exceed the number of
    steps or 255."""
    fits_targets = not on_gpu(targets) and targets.dtype is torch.int32 and targets.dim() == 1
    max_length = min(255, len(batch))
    fits_lengths = {*lengths} == {len(batch)} and all(n <= max_length for n in target_lengths)
    fits_batch = batch.dtype is torch.float32 and torch._C._get_cudnn_enabled()
    return fits_targets and fits_lengths and fits_batch


@registry.above_autograd("ctc_loss.IntList")
def ctc_loss(
    next_kernel: Next, log_probs: Tensor, targets: Tensor, lengths: list[int],
    target_lengths: list[int], blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Run `_cudnn_ctc_loss` if CUDA would, else `_ctc_loss`, which is torch's own kernel.

    `next_kernel` is not called. `reduction` is 0 (none), 1 (mean) or 2 (sum). For `zero_infinity`,
    LossCTC.cpp makes a zero before it compares the losses with infinity.
    """
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    options: Any = {"dtype": batch.dtype, "device": "cuda"}
    sizes = (lengths, target_lengths, blank)
    if blank == 0 and _goes_to_cudnn(batch, targets, lengths, target_lengths):
        losses, _ = aten._cudnn_ctc_loss.default(batch, targets, *sizes, True, zero_infinity)
    else:
        targets = targets.to("cuda", torch.int64)
        losses, _ = aten._ctc_loss.default(batch, targets, *sizes, zero_infinity)
    if zero_infinity:
        zero = torch.zeros((), **options)
        losses = torch.where(losses == float("inf"), zero, losses)
    if reduction == 1:  # mean
        return (losses / torch.tensor(target_lengths, **options).clamp_min(1)).mean()
    if reduction == 2:  # sum
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


@registry.above_autograd("ctc_loss.Tensor")
def ctc_loss_of_tensors(
    next_kernel: Next, log_probs: Tensor, targets: Tensor, *lengths_and_options: Any
) -> Tensor:
    """Run `ctc_loss` for an overload that has both lengths in tensors, followed by the options."""
    lengths, target_lengths, *options = lengths_and_options
    return ctc_loss(
        next_kernel, log_probs, targets, lengths.tolist(), target_lengths.tolist(), *options
    )


register(
    "_ctc_loss_backward multi_margin_loss_backward multilabel_margin_loss_backward",
    result=registry.empty_like(1),
)
