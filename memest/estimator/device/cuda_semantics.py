"""What CUDA tensors do above autograd and meta tensors do not: autocast, fused dropout, attention
backends.

torch decides these in C++ by `tensor.is_cuda()`. A meta tensor never is, so the decisions are put
back where torch makes them: as kernels on a dispatch key in front of autograd, which is switched on
for the simulated code only. The key is `AutocastIPU`, whose backend no longer exists in torch;
nothing else is registered on it. Autograd and the mode below see the operators that a GPU would
run, called from Python or from C++ alike.

The autocast state is that of `torch.autocast("cuda")`; torch keeps it per thread, and activation
checkpointing saves and restores it for the recomputation.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from memest.estimator.device import double_backward, fused, recurrent
from memest.estimator.device.patches import Patches
from memest.estimator.device.refusals import refuse_attention
from memest.estimator.device.tensors import on_gpu
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.attention.choice import scaled_dot_product_attention
from memest.estimator.kernels.batch_norm import takes_cudnn

KEY_NAME = "AutocastIPU"
UNDER_VMAP = "FuncTorchBatched"
"""Where `torch.vmap` takes operators apart, before `KEY_NAME` is asked."""

IN_FUNCTORCH = "FuncTorchDynamicLayerFrontMode"
"""Where functorch has a `dropout` of its own (PyTorchOperatorHacks.cpp)."""

_KEY = getattr(torch._C.DispatchKey, KEY_NAME)
_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# The policies of ATen/autocast_mode.h (torch 2.11; 2.13 has `rms_norm` among FLOAT32 besides); a
# test compares their union with what the installed torch registers for AutocastCUDA.
LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()
FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
""".split()
FLOAT32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()

_library: list[torch.library.Library] = []
_active_gpu: list[Gpu] = []
_CUDA = "cuda"
"""The device whose autocast state counts."""


class _Inside(threading.local):
    """Where this thread is."""

    autocast = False
    """In an operator that autocast has already dealt with."""

    autocast_block = False
    """In `torch.autocast`, also where a dispatch mode is called, for which it is off."""


_INSIDE = _Inside()


def follow_autocast(patches: Patches) -> None:
    """Know in a dispatch mode whether autocast is on; the state of the dead key is nobody's."""

    def set_enabled(*args: Any) -> None:
        torch._C.set_autocast_enabled(*args)
        _INSIDE.autocast_block = torch.is_autocast_enabled(_CUDA)

    _INSIDE.autocast_block = torch.is_autocast_enabled(_CUDA)
    patches.set(torch, "set_autocast_enabled", set_enabled)
    patches.set(torch._C, "_is_any_autocast_enabled", _is_any_enabled)


def _is_any_enabled() -> bool:
    return torch.is_autocast_enabled(_CUDA) or torch.is_autocast_enabled("cpu")


class CastCache:
    """The casts of leaf weights that `torch.autocast` keeps until its outermost context ends.

    Mirrors `cached_cast` of ATen/autocast_mode.cpp (torch 2.11): a float32 leaf that wants a
    gradient is cast to the lower precision once, whether the weight is used again or not; in
    inference mode at each use.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """`tensor.to(dtype)`, kept where torch keeps it."""
        is_kept = (
            dtype is torch.get_autocast_dtype(_CUDA)
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )
        if not is_kept:
            return tensor.to(dtype)
        key = tensor._cdata
        found = self._casts.get(key)
        if found is not None and found[0]() is tensor:
            return found[1]
        with torch.enable_grad():  # it may be used again where gradients are wanted
            made = tensor.to(dtype)
        self._casts[key] = weakref.ref(tensor), made
        return made

    def clear(self) -> None:
        """As `torch.clear_autocast_cache`."""
        self._casts.clear()


CASTS = CastCache()


@contextlib.contextmanager
def decisions_of(gpu: Gpu) -> Iterator[None]:
    """Within it, this thread's operators on meta tensors take the decisions of `gpu`."""
    _register_once()
    _active_gpu.append(gpu)
    try:
        with decisions_again():
            yield
    finally:
        _active_gpu.pop()


@contextlib.contextmanager
def decisions_again() -> Iterator[None]:
    """What a dispatch mode calls takes them, too, such as the parts of a composite operator."""
    was_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    was_on = torch.is_autocast_enabled(_CUDA)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    torch._C.set_autocast_enabled(_CUDA, was_on or _INSIDE.autocast_block)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        torch._C.set_autocast_enabled(_CUDA, was_on)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, was_excluded)


def _register_once() -> None:
    if _library:
        return
    library: Any = torch.library.Library  # untyped in torch
    fallback, aten = library("_", "IMPL"), library("aten", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, KEY_NAME)
    _library.extend((fallback, aten))
    special: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "softmax.int": _make_softmax(torch.ops.aten.softmax.int, torch.ops.aten._softmax.default),
        "log_softmax.int": _make_softmax(
            torch.ops.aten.log_softmax.int, torch.ops.aten._log_softmax.default
        ),
        "scaled_dot_product_attention": _attention,
        "linear": _linear,
        "batch_norm": _batch_norm,
        double_backward.NAME: double_backward.kernel(_next),
    }
    for name, kernel in special.items():
        if name != "dropout":
            aten.impl(name, _under_vmap(_overload(name), kernel), UNDER_VMAP)
    with warnings.catch_warnings():  # C++ tells once that a kernel takes the place of another
        warnings.simplefilter("ignore")
        kernel = _under_vmap(torch.ops.aten.dropout.default, _dropout)
        aten.impl("dropout", kernel, IN_FUNCTORCH, allow_override=True)
    special |= recurrent.kernels(_BELOW, _decisions) | fused.kernels(_BELOW)
    policies = [(LOWER_PRECISION, _to_lower_precision), (FLOAT32, _to_float32)]
    policies += [(FLOAT32_RESULT, _to_float32_result), (PROMOTE, _to_widest)]
    for names, policy in policies:
        for name in names:
            decided = special.pop(name, None) or _redispatch(_overload(name))
            aten.impl(
                name, _with_policy(_overload(name), policy, decided), KEY_NAME, with_keyset=True
            )
    for name, kernel in special.items():
        aten.impl(name, kernel, KEY_NAME, with_keyset=True)


def _decisions() -> tuple[Gpu, torch.dtype | None]:
    is_cast = torch.is_autocast_enabled(_CUDA)
    return _active_gpu[-1], torch.float16 if is_cast else None  # AutocastRNN.cpp knows no other


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return op


def _redispatch(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keyset & _BELOW, *args, **kwargs)

    return kernel


def _under_vmap(op: torch._ops.OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        is_virtual = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        return (kernel if is_virtual else partial(_next, op))(None, *args, **kwargs)

    return run


def _next(op: torch._ops.OpOverload, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch would run; for `vmap`, whose `keyset` is None, what it is made of."""
    if keyset is None:
        return op._op_dk(_COMPOSITE, *args, **kwargs)
    return op.redispatch(keyset & _BELOW, *args, **kwargs)


def _with_policy(
    op: torch._ops.OpOverload,
    policy: Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]],
    kernel: Callable[..., Any],
) -> Callable[..., Any]:
    def cast_then_run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _INSIDE.autocast or not torch.is_autocast_enabled(_CUDA):
            return kernel(keyset, *args, **kwargs)
        # as torch does, casts and the operators inside a composite run without autocast
        _INSIDE.autocast = True
        try:
            cast_args, cast_kwargs = policy(op, args, kwargs)
            out = kernel(keyset, *cast_args, **cast_kwargs)
            # C++ drops the casts in the reverse of the order in which it made them: the first
            # argument first; a list drops its last item first
            cast_args = [*cast_args]
            cast_args.reverse()
            return out
        finally:
            _INSIDE.autocast = False

    return cast_then_run


def _is_eligible(value: Any) -> bool:
    """As `is_autocast_eligible` and `is_eligible`: floating point on the device, but not double."""
    return (
        isinstance(value, Tensor)
        and on_gpu(value)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_eligible(value):
        return value if value.dtype is dtype else CASTS.cast(value, dtype)
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _cast_all(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """The last argument is cast first.

    `WrapFunction_` of ATen/autocast_mode.h casts within the argument list of a call, whose order
    C++ leaves open; the compiler of the Linux wheels (GCC, x86-64) goes from right to left.
    Evidence: every cast recorded on an H200.
    """
    cast_kwargs = {k: _cast(v, dtype) for k, v in reversed(list(kwargs.items()))}
    cast_args = [_cast(a, dtype) for a in reversed(args)]
    return cast_args[::-1], dict(reversed(list(cast_kwargs.items())))


def _to_lower_precision(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _cast_all(args, kwargs, torch.get_autocast_dtype(_CUDA))


def _to_float32(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _cast_all(args, kwargs, torch.float32)


def _to_float32_result(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The operator's own `dtype` becomes float32 where the caller gave none."""
    names = [a.name for a in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if _is_eligible(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only and a.name in given]
    return (
        [given[n] for n in positional],
        {n: v for n, v in given.items() if n not in positional},
    )


def _to_widest(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    flat = [a for a in (*args, *kwargs.values()) if _is_eligible(a)]
    if not flat:
        return args, kwargs
    is_mixed = any(a.dtype is torch.float32 for a in flat)
    return _cast_all(args, kwargs, torch.float32 if is_mixed else torch.get_autocast_dtype(_CUDA))


def _dropout(keyset: Any, x: Tensor, p: float, train: bool) -> Tensor:
    """`at::dropout` is fused on CUDA where 0 < p < 1 (ATen/native/Dropout.cpp,
    `is_fused_kernel_acceptable`).
    """
    if train and 0 < p < 1 and on_gpu(x) and x.numel() > 0:
        out: Tensor = torch.ops.aten.native_dropout.default(x, p, train)[0]
        return out
    result: Tensor = _next(torch.ops.aten.dropout.default, keyset, x, p, train)
    return result


def _linear(keyset: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A bias is added in place to the product of an input that is not contiguous, which under a
    dispatch mode it is not (`isTensorSubclassLike` in ATen/native/Linear.cpp).
    """
    if bias is not None and x.dim() > 2 and on_gpu(x) and not x.is_contiguous():
        return torch.matmul(x, weight.t()).add_(bias)
    result: Tensor = _next(torch.ops.aten.linear.default, keyset, x, weight, bias)
    return result


def _make_softmax(
    op: torch._ops.OpOverload, kernel: torch._ops.OpOverload
) -> Callable[..., Tensor]:
    def softmax(keyset: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """On CUDA a half input with a float32 result needs no cast (ATen/native/SoftMax.cpp)."""
        if on_gpu(x) and x.dtype is torch.float16 and dtype is torch.float32:
            fused: Tensor = kernel(x, dim, True)
            return fused
        result: Tensor = _next(op, keyset, x, dim, dtype)
        return result

    return softmax


def _batch_norm(
    keyset: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """`_batch_norm_impl_index` of ATen/native/Normalization.cpp, which asks for CUDA tensors."""
    tensors = weight, bias, running_mean, running_var
    if (
        on_gpu(x)
        and x.numel() > 0
        and takes_cudnn(x, *tensors, is_training=training, is_enabled=cudnn_enabled)
    ):
        x = x.contiguous(memory_format=suggest_memory_format(x))
        dense = [t if t is None else t.contiguous() for t in tensors]
        out: Tensor = torch.ops.aten.cudnn_batch_norm.default(x, *dense, training, momentum, eps)[0]
        return out
    result: Tensor = _next(
        torch.ops.aten.batch_norm.default,
        keyset, x, *tensors, training, momentum, eps, cudnn_enabled,
    )  # fmt: skip
    return result


def _attention(
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    refuse_attention(query, key, value, attn_mask)
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal,
        scale=scale, enable_gqa=enable_gqa, gpu=_active_gpu[-1],
    )  # fmt: skip
