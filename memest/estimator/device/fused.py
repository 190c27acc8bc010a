"""Operators of which CUDA has one kernel where meta runs several, or none.

`mish` and `rms_norm` are taken apart by autograd unless the device has a fused kernel, `one_hot`
compares on meta where CUDA scatters, and the gradients of `cumprod` and `prod` take a way there
that no value decides; `kernels` puts the choice back above autograd. `MADE_HERE` gives the results
that torch's meta device does not know, or takes long to find.

Sources (torch 2.11, aten/src/ATen): native/layer_norm.cpp (`rms_norm_symint`),
native/cuda/layer_norm_kernel.cu (`_fused_rms_norm_cuda`), native/native_functions.yaml,
native/LossCTC.cpp, native/Onehot.cpp, native/ReduceOps.cpp (`cumprod_backward`),
torch/csrc/autograd/FunctionsManual.cpp (`prod_backward`),
native/cuda/MultiMarginLoss.cu and native/cuda/MultiLabelMarginCriterion.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from memest.errors import UnsupportedError
from memest.estimator.device.tensors import INSIDE, on_gpu

aten = torch.ops.aten

_MADE_ALIKE = ("_pad_packed_sequence", "pad_sequence", "vander")
"""Operators of C++ that make their results where what they are given lies."""


class _RmsNorm(torch.autograd.Function):
    """`_fused_rms_norm` and its gradient, each one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            of_x, of_weight = aten._fused_rms_norm_backward.default(
                grad, x, ctx.shape, rstd, weight, wanted
            )
        return of_x, None, of_weight if weight is not None else None, None


class _Product(torch.autograd.Function):
    """`prod`, of which the gradient looks for zeros, and finds none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], Tensor], dim: int | None) -> Tensor:
        out = run()
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out = ctx.saved_tensors
        x = x.to(grad.dtype)
        if ctx.dim is None:
            torch.eq(x, 0)  # `nonzero` of it, a few KiB, is left out
        elif x.dim():
            if grad.dim() < x.dim():
                grad, out = grad.unsqueeze(ctx.dim), out.unsqueeze(ctx.dim)
            is_zero = torch.eq(x, 0)
            counts = is_zero.sum(ctx.dim, keepdim=True)
            counts.sum()
        return grad * (out / x).conj(), None, None


def kernels(below: Any) -> dict[str, Callable[..., Any]]:
    """The kernels by the names of the operators they stand for.

    Args:
        below: the key set that what is not for the card goes on with.
    """

    def rms_norm(
        keyset: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None
    ) -> Tensor:
        is_fused = on_gpu(x) and x.is_floating_point() and not x.is_complex()
        is_fused = is_fused and (weight is None or weight.dtype is x.dtype)
        if is_fused and suggest_memory_format(x) is torch.contiguous_format:
            fused: Tensor = _RmsNorm.apply(x, list(shape), weight, eps)  # type: ignore[no-untyped-call]
            return fused
        result: Tensor = aten.rms_norm.default.redispatch(keyset & below, x, shape, weight, eps)
        return result

    def mish_backward(keyset: Any, grad: Tensor, x: Tensor) -> Tensor:
        if on_gpu(x):
            keyset &= torch._C._after_autograd_keyset
        result: Tensor = aten.mish_backward.default.redispatch(keyset & below, grad, x)
        return result

    def ctc_loss(
        keyset: Any, log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor,
        blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        args = log_probs, targets, lengths, target_lengths, blank, reduction, zero_infinity
        if not on_gpu(log_probs):
            result: Tensor = aten.ctc_loss.Tensor.redispatch(keyset & below, *args)
            return result
        if not on_gpu(targets) and targets.dtype is torch.int32 and targets.dim() == 1:
            raise UnsupportedError(
                "`ctc_loss` of int32 targets on the host goes to cuDNN, which cannot be simulated",
                hint="int64 targets take torch's own kernel",
            )
        return _ctc_loss(log_probs, targets, lengths.tolist(), target_lengths.tolist(), *args[4:])

    def ctc_loss_of_numbers(keyset: Any, log_probs: Tensor, targets: Tensor, *args: Any) -> Tensor:
        if on_gpu(log_probs):
            return _ctc_loss(log_probs, targets, *args)
        result: Tensor = aten.ctc_loss.IntList.redispatch(keyset & below, log_probs, targets, *args)
        return result

    return {
        "rms_norm": rms_norm,
        **dict.fromkeys(("prod", "prod.dim_int"), _prod(below)),
        "cumprod_backward": _cumprod_backward(below),
        "mish_backward": mish_backward,
        "ctc_loss.Tensor": ctc_loss,
        "ctc_loss.IntList": ctc_loss_of_numbers,
        "one_hot": _one_hot(below),
        **_only_values(below),
        **{name: _alike_kernel(getattr(aten, name).default, below) for name in _MADE_ALIKE},
    }


def _alike_kernel(op: Any, below: Any) -> Callable[..., Any]:
    """An operator of C++ whose result is made like what it is given (`options()`)."""

    def run(keyset: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        first = given if isinstance(given, Tensor) else given[0]
        before, INSIDE.composite = INSIDE.composite, on_gpu(first)
        try:
            return op.redispatch(keyset & below, given, *args, **kwargs)
        finally:
            INSIDE.composite = before

    return run


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, lengths: list[int], target_lengths: list[int],
    blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """`ctc_loss_impl` of LossCTC.cpp: the zero is made before the losses are compared."""
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    of_card: Any = {"dtype": batch.dtype, "device": "cuda"}
    losses: Tensor = aten._ctc_loss.default(
        batch, targets.to("cuda", torch.int64), lengths, target_lengths, blank, zero_infinity
    )[0]
    if zero_infinity:
        zero = torch.zeros((), **of_card)
        losses = torch.where(losses == float("inf"), zero, losses)
    if reduction == 1:
        return (losses / torch.tensor(target_lengths, **of_card).clamp_min(1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


def _prod(below: Any) -> Callable[..., Tensor]:
    def prod(keyset: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        op = aten.prod.dim_int if args else aten.prod.default
        if not on_gpu(x) or not _has_gradient(x):
            result: Tensor = op.redispatch(keyset & below, x, *args, **kwargs)
            return result
        plain = keyset & below & torch._C._after_autograd_keyset

        def run() -> Tensor:
            made: Tensor = op.redispatch(plain, x, *args, **kwargs)
            return made

        product: Tensor = _Product.apply(x, run, args[0] if args else None)  # type: ignore[no-untyped-call]
        return product

    return prod


def _only_values(below: Any) -> dict[str, Callable[..., Any]]:
    """Of matrices; vectors besides where there is a gradient, or a dispatch mode, which is none of
    the script's (`isTensorSubclassLike`, native/BatchLinearAlgebra.cpp).
    """

    def svdvals(keyset: Any, a: Tensor, *, driver: str | None = None) -> Tensor:
        if on_gpu(a):
            values: Tensor = aten._linalg_svd.default(a, False, _has_gradient(a), driver=driver)[1]
            return values
        result: Tensor = aten.linalg_svdvals.default.redispatch(keyset & below, a, driver=driver)
        return result

    def eigvalsh(keyset: Any, a: Tensor, uplo: str = "L") -> Tensor:
        if on_gpu(a):
            values: Tensor = aten._linalg_eigh.default(a, uplo, _has_gradient(a))[0]
            return values
        result: Tensor = aten.linalg_eigvalsh.default.redispatch(keyset & below, a, uplo)
        return result

    return {"linalg_svdvals": svdvals, "linalg_eigvalsh": eigvalsh}


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _one_hot(below: Any) -> Callable[..., Tensor]:
    def one_hot(keyset: Any, classes: Tensor, num_classes: int = -1) -> Tensor:
        if not on_gpu(classes) or not classes.numel():
            made: Tensor = aten.one_hot.default.redispatch(keyset & below, classes, num_classes)
            return made
        if num_classes == -1:
            num_classes = int(classes.max()) + 1
        zeros = torch.zeros((*classes.shape, num_classes), dtype=torch.int64, device=classes.device)
        return zeros.scatter_(-1, classes.unsqueeze(-1), 1)

    return one_hot


def _cumprod_backward(below: Any) -> Callable[..., Tensor]:
    def backward(keyset: Any, grad: Tensor, x: Tensor, dim: int, output: Tensor) -> Tensor:
        if not on_gpu(x) or x.is_complex() or x.dim() == 0 or x.shape[dim] == 1:
            op = aten.cumprod_backward.default
            made: Tensor = op.redispatch(keyset & below, grad, x, dim, output)
            return made
        products, is_zero = output * grad, x == 0
        is_zero.any()  # which the host reads; none is taken to be
        return products.flip(dim).cumsum(dim).flip(dim).div(x)

    return backward


def _rms_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The result, contiguous, and the reciprocal roots, of float32 or wider."""
    x, shape = args[0], args[1]
    kept = x.dim() - len(shape)
    sizes = [*x.shape[:kept], *(1 for _ in shape)]
    dtype = torch.float32 if x.itemsize == 2 else x.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return out, torch.empty(sizes, dtype=dtype, device="meta")


def _like(position: int) -> Callable[[tuple[Any, ...], dict[str, Any]], Tensor]:
    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return torch.empty(args[position].shape, dtype=args[position].dtype, device="meta")

    return make


def _margin_loss(x: Tensor, is_reduced: bool) -> Tensor:
    sizes = [] if is_reduced or x.dim() < 2 else [x.shape[0]]
    return torch.empty(sizes, dtype=x.dtype, device="meta")


def _multi_margin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _margin_loss(args[0], len(args) <= 5 or args[5] != 0)


def _multilabel_margin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    is_target = torch.empty(args[1].shape, dtype=args[0].dtype, device="meta")
    return _margin_loss(args[0], args[2] != 0), is_target


def _normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """As it is: on meta torch makes the numbers first, by a dozen operators."""
    filled: Tensor = args[0]
    std = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
    if filled.is_floating_point() and std >= 0:
        return filled
    made: Tensor = aten.normal_.default(*args, **kwargs)  # says what is wrong
    return made


MADE_HERE: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.normal_.default: _normal,
    aten._fused_rms_norm.default: _rms_norm,
    aten.mish_backward.default: _like(1),
    aten._ctc_loss_backward.default: _like(1),
    aten.multi_margin_loss.default: _multi_margin,
    aten.multi_margin_loss_backward.default: _like(1),
    aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    aten.multilabel_margin_loss_backward.default: _like(1),
}
"""Operator -> its results as meta tensors, from `(args, kwargs)`."""
