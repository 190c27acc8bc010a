"""Losses: elementwise buffers, and which of them the result keeps.

Sources (torch 2.11, `aten/src/ATen/native`): Loss.cpp, LossCTC.cpp, cuda/Loss.cu,
cuda/MultiMarginLoss.cu, cuda/MultiLabelMarginCriterion.cu, cuda/LossCTC.cu, cuda/NLLLoss.cu;
torch/csrc/autograd/FunctionsManual.cpp (`binary_cross_entropy_with_logits_backward`).
Evidence: the allocator's events of each loss, recorded on an H100.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.in_place import in_nodes
from memest.estimator.ops.reductions import sum_bytes
from memest.estimator.ops.refusals import accepts, same_type
from memest.estimator.ops.registry import Args, Kwargs, argument, register
from memest.estimator.ops.strides import contiguous, like
from memest.estimator.ops.temporaries import (
    OLDEST,
    Events,
    KernelEvent,
    Scratch,
    around,
    contiguous_copy,
    outputs,
    passing,
    temporaries,
)
from memest.estimator.tensors.placement import on_gpu

aten = torch.ops.aten


def is_reduced(args: Args, position: int) -> bool:
    """Return whether the loss is a mean or a sum, by the argument at `position` if it is given."""
    return len(args) <= position or args[position] != 0


def loss_shape(args: Args) -> tuple[int, ...]:
    """Return the shape of the elementwise loss of the first two arguments."""
    return tuple(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]


def _elements(shape: tuple[int, ...], out: Tensor, gpu: Gpu) -> tuple[int, tuple[int, ...]]:
    """Bytes of an elementwise loss, and of its sum over everything."""
    loss = torch.empty(shape, dtype=out.dtype, device="meta")
    return prod(shape) * out.itemsize, sum_bytes(loss, (), loss.dtype, gpu)


def _reduced_loss(position: int, *, is_copied: bool) -> registry.RequestRule:
    """Return the rule of a loss whose reduction is the argument at `position`.

    The staging of the sum comes after a second elementwise loss, or, if `is_copied`, after a scalar
    that is copied into the loss.
    """

    def reduced_loss(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
        """Requests of the loss, whose storage the scalar keeps, and the staging of its sum."""
        if not is_reduced(args, position):
            return Scratch()
        size, staged = _elements(loss_shape(args), out, gpu)
        return Scratch(after=(out.itemsize if is_copied else size, *staged), outputs=(size,))

    return reduced_loss


register("mse_loss smooth_l1_loss", requests=_reduced_loss(2, is_copied=False))  # Loss.cpp
register("soft_margin_loss", requests=_reduced_loss(2, is_copied=True))  # Loss.cpp
register("binary_cross_entropy", requests=_reduced_loss(3, is_copied=True))  # cuda/Loss.cu


@registry.requests("huber_loss")
def huber_loss_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `huber_loss` (Loss.cpp), reduced: the elementwise loss, its sum's staging."""
    if not is_reduced(args, 2):
        return Scratch()
    size, staged = _elements(loss_shape(args), out, gpu)
    return Scratch(before=(size,), after=staged)


@registry.requests("binary_cross_entropy_with_logits")
def bce_with_logits_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `binary_cross_entropy_with_logits` of Loss.cpp: the log-sigmoid, then the loss.

    `(pos_weight - 1) * target + 1` takes a tensor of the weights' size and one of the loss's.
    """
    positives = argument(args, kwargs, 3, "pos_weight")
    size, staged = _elements(loss_shape(args), out, gpu)
    log_sigmoid = args[0].nbytes
    loss = outputs({0: size})
    if is_reduced(args, 4):
        loss = around((size,), outputs({0: out.itemsize}) + passing(*staged))
    weights = [] if positives is None else passing(positives.nbytes, size)
    return around((log_sigmoid,), weights + loss)


@registry.requests("nll_loss_forward")
def nll_loss_copies(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `nll_loss_forward` (cuda/NLLLoss.cu), reduced: copies of what has gaps."""
    log_probs, target, weight, reduction = args[:4]
    if reduction == 0 or log_probs.dim() < 2:
        return Scratch()
    return Scratch(after=contiguous_copy(log_probs, weight, target))


@registry.requests("nll_loss_backward")
def nll_loss_gradient_copies(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `nll_loss_backward` (cuda/NLLLoss.cu), reduced: copies of target and weight."""
    _, log_probs, target, weight, reduction = args[:5]
    if reduction == 0 or log_probs.dim() < 2:
        return Scratch()
    return Scratch(after=contiguous_copy(target, weight))


@registry.requests("soft_margin_loss_backward")
def soft_margin_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of the gradient in Loss.cpp: `exp(-target * input)` by way of two products."""
    size = out.nbytes
    oldest = KernelEvent(-size, OLDEST)
    made = [*temporaries(size, size, size), oldest, oldest]
    return made + outputs({0: size}) + temporaries(-size)


def _samples(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() > 1 else 1


@registry.requests("multi_margin_loss")
def multi_margin_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `multi_margin_loss` (MultiMarginLoss.cu), reduced: one loss for each sample."""
    if args[0].dim() < 2 or not is_reduced(args, 5):
        return Scratch()
    return Scratch(after=(_samples(args[0]) * out.itemsize,))


@registry.requests("multilabel_margin_loss_forward")
def multilabel_margin_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of MultiLabelMarginCriterion.cu: marks of targets, losses, their mean or sum."""
    loss, is_target = out
    kept = outputs({1: is_target.nbytes})
    result = outputs({0: loss.nbytes})
    if args[0].dim() < 2 or not is_reduced(args, 2):
        return kept + result
    each = _samples(args[0]) * loss.itemsize
    return kept + around((each,), result)


@registry.requests("_ctc_loss _ctc_loss.Tensor")
def ctc_loss_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `_ctc_loss`: three int64 per sample, the forward variables, then the losses.

    The three are the lengths of input and target, and the start of the target (LossCTC.cu).
    """
    losses, alphas = out
    lengths = (losses.numel() * 8,) * 3
    results = outputs({1: alphas.nbytes, 0: losses.nbytes})
    return around(lengths, results)


LARGE_CTC = 450  # bound of `is_large` of LossCTC.cu: above it blanks are summed separately


@registry.requests("_ctc_loss_backward _ctc_loss_backward.Tensor")
def ctc_loss_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `_ctc_loss_backward` (LossCTC.cu): lengths, backward variables, gradient.

    A large one has a `logsumexp` over the blanks. `zero_infinity` has a second gradient.
    """
    log_probs, losses, alphas = args[1], args[5], args[6]
    zero_infinity = argument(args, kwargs, 8, "zero_infinity", False)
    made = out.nbytes
    gradient = outputs({0: made})
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    if 2 * steps + 24 * losses.numel() // 10 + 2 * classes // 10 > LARGE_CTC:
        rows = alphas.shape[0] * alphas.shape[1]
        blanks = rows * (alphas.shape[2] // 2 + 1) * alphas.itemsize
        sums = rows * alphas.itemsize
        of_blanks = temporaries(
            blanks, sums, sums, rows, -rows, -sums, blanks, sums, -blanks, -sums, -sums, -blanks
        )
        if zero_infinity:
            zero, flags = out.itemsize, losses.numel()
            gradient = around((made,), of_blanks + around((zero, flags), gradient))
        else:
            gradient += of_blanks
    lengths = (losses.numel() * 8,) * 3
    return around((*lengths, alphas.nbytes), gradient)


_CLASSES = (torch.int64, torch.uint8)  # types of a target of classes
_KERNEL = '"nll_loss_forward_reduce_cuda_kernel_2d_index"'

# cuda/NLLLoss.cu, cuda/NLLLoss2d.cu, cuda/Loss.cu
register("nll_loss_forward", refuse=accepts(1, _CLASSES, _KERNEL + " not implemented for '{}'"))
register(
    "nll_loss2d_forward", refuse=accepts(1, _CLASSES, "expected scalar type Long but found {}")
)
register("binary_cross_entropy", refuse=same_type(1, 0, "Found dtype {} but expected {}"))
register(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward", layout=contiguous
)  # Loss.cpp
register("binary_cross_entropy_backward", layout=like(1))  # cuda/Loss.cu


def _is_in_place(left: Tensor, right: Any) -> bool:
    """Return whether autograd computes `left * right` and the like in place.

    It cannot if the result has another shape than `left`, as with `pos_weight` and a target of more
    dimensions.
    """
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


@registry.result("_cudnn_ctc_loss")
def _cudnn_ctc(args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    """Return the losses and the gradient (cudnn/LossCTC.cpp); the workspace is not known."""
    return args[0].new_empty(args[0].shape[1]), torch.empty_like(args[0])


def _goes_to_cudnn(batch: Tensor, targets: Tensor, lengths: list[int], of: list[int]) -> bool:
    """Return whether cuDNN computes a loss with blank 0: `_use_cudnn_ctc_loss` (LossCTC.cpp)."""
    is_host = not on_gpu(targets) and targets.dtype is torch.int32 and targets.dim() == 1
    is_fit = {*lengths} == {len(batch)} and all(size < 256 and size <= len(batch) for size in of)
    return is_host and is_fit and batch.dtype is torch.float32 and torch._C._get_cudnn_enabled()


@registry.above_autograd("ctc_loss.IntList")
def ctc_loss(
    then: Next, log_probs: Tensor, targets: Tensor, lengths: list[int], target_lengths: list[int],
    blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Run torch's own kernel of `ctc_loss`, or cuDNN's.

    `ctc_loss_impl` of LossCTC.cpp makes the zero before the losses are compared.
    """
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    of_gpu: Any = {"dtype": batch.dtype, "device": "cuda"}
    sizes = (lengths, target_lengths, blank)
    if blank == 0 and _goes_to_cudnn(batch, targets, lengths, target_lengths):
        losses: Tensor = aten._cudnn_ctc_loss.default(batch, targets, *sizes, True, zero_infinity)[
            0
        ]
    else:
        targets = targets.to("cuda", torch.int64)
        losses = aten._ctc_loss.default(batch, targets, *sizes, zero_infinity)[0]
    if zero_infinity:
        zero = torch.zeros((), **of_gpu)
        losses = torch.where(losses == float("inf"), zero, losses)
    if reduction == 1:
        return (losses / torch.tensor(target_lengths, **of_gpu).clamp_min(1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


@registry.above_autograd("ctc_loss.Tensor")
def ctc_loss_of_tensors(
    then: Next, log_probs: Tensor, targets: Tensor, *lengths_and_options: Any
) -> Tensor:
    """Run `ctc_loss` with lengths in tensors."""
    lengths, target_lengths, *options = lengths_and_options
    return ctc_loss(then, log_probs, targets, lengths.tolist(), target_lengths.tolist(), *options)


def _margin_loss(x: Tensor, is_reduced: bool) -> Tensor:
    sizes = [] if is_reduced or x.dim() < 2 else [x.shape[0]]
    return torch.empty(sizes, dtype=x.dtype, device="meta")


@registry.result("multi_margin_loss")
def _multi_margin(args: Args, kwargs: Kwargs) -> Tensor:
    return _margin_loss(args[0], is_reduced(args, 5))


@registry.result("multilabel_margin_loss_forward")
def _multilabel_margin(args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    is_target = torch.empty(args[1].shape, dtype=args[0].dtype, device="meta")
    return _margin_loss(args[0], is_reduced(args, 2)), is_target


register(
    "_ctc_loss_backward multi_margin_loss_backward multilabel_margin_loss_backward",
    result=registry.empty_like(1),
)
