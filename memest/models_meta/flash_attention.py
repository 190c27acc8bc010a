"""FlashAttention 2 on the meta device: the functions of the package `flash_attn`, without kernels.

A mirror of flash-attn 2.8.3 (flash_attn/flash_attn_interface.py and bert_padding.py) as
transformers 5.17 calls it (modeling_flash_attention_utils.py, integrations/flash_attention.py). It
saves the same tensors. Each kernel is one operator; `estimator/ops/attention.py` has its rules.

Left out: ALiBi slopes, paged keys, returned probabilities.
Shapes: B batch, L query tokens, S key tokens, N tokens of all rows without padding, H query heads,
K key heads, E head width.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn

from memest.errors import PlanError, UnsupportedError
from memest.plan.keys import FLASH_ATTENTION_2
from memest.units import round_up

MAX_HEAD_WIDTH = 256
INSTEAD = "use `sdpa`, whose flash and cuDNN kernels keep no attention matrix either"
_HALF = (torch.float16, torch.bfloat16)
_BLOCK = 128  # `kBlockM` at its largest: rows to which the backward rounds, or between texts
_library = torch.library.Library("memest", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens,"
    " int max_queries, int max_keys, float dropout_p, bool is_windowed)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(  # type: ignore[no-untyped-call]
    "flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor softmax_lse, Tensor grad_query, Tensor grad_key, Tensor grad_value,"
    " Tensor? cu_seqlens, bool deterministic) -> Tensor"
)


def _forward_on_meta(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return meta tensors (output, logsumexp, random state). `query` is (B, tokens, heads, width),
    or (tokens, heads, width) if `cu_seqlens` has the bounds of texts packed into a row."""
    out = torch.empty_like(query if query.stride(-1) == 1 else query.contiguous())
    B, L, H = (1, *query.shape[:2]) if cu_seqlens is not None else query.shape[:3]
    lse_shape = (H, L) if cu_seqlens is not None else (B, H, L)
    softmax_lse = torch.empty(lse_shape, dtype=torch.float32, device=query.device)
    rng_state = torch.empty(2, dtype=torch.int64, device=query.device)
    return out, softmax_lse, rng_state


def _backward_on_meta(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, softmax_lse: Tensor,
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, cu_seqlens: Tensor | None,
    deterministic: bool,
) -> Tensor:  # fmt: skip
    """Return the workspace of the backward kernel, an empty fp32 meta tensor. The real kernel
    writes the sum of `grad_out` * `out` for each query and head to the workspace.

    Without `cu_seqlens`, `query` is (B, L, H, width), with L queries in each of B rows and H heads.
    The workspace is then (B, H, L rounded up to 128). With `cu_seqlens`, which has the bounds of T
    texts packed into a row, `query` is (N, H, width), with the N queries of all texts. The
    workspace is then (H, N + 128 * T).

    The real kernel also fills `grad_query`, `grad_key` and `grad_value`. `softmax_lse` and
    `deterministic` are unused.
    """
    if cu_seqlens is not None:
        N, H = query.shape[:2]
        shape: tuple[int, ...] = (H, N + _BLOCK * (cu_seqlens.numel() - 1))
    else:
        B, L, H = query.shape[:3]
        shape = (B, H, round_up(L, _BLOCK))
    return torch.empty(shape, dtype=torch.float32, device=query.device)


_library.impl("flash_attention_forward", _forward_on_meta, "Meta")  # type: ignore[no-untyped-call]
_library.impl("flash_attention_backward", _backward_on_meta, "Meta")  # type: ignore[no-untyped-call]

FORWARD = torch.ops.memest.flash_attention_forward.default
BACKWARD = torch.ops.memest.flash_attention_backward.default


class FlashAttention(torch.autograd.Function):
    """`FlashAttnFunc`, `FlashAttnVarlenFunc` and their variants for packed tensors.

    It saves query, key, value, output and logsumexp. The head width of all but logsumexp is padded
    to a multiple of 8. `forward` takes one of three groups of inputs, and None for other inputs:

    - `query`, `key` and `value`.
    - `query` and `packed`, which is (key, value) in one tensor.
    - `packed`, which is (query, key, value) in one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor | None, key: Tensor | None, value: Tensor | None,
        packed: Tensor | None, cu_seqlens: tuple[Tensor, Tensor] | None,
        max_lengths: tuple[int, int], dropout_p: float, is_windowed: bool, deterministic: bool,
        needs_grad: bool,
    ) -> Tensor:  # fmt: skip
        """Return the output, as wide as the inputs; save tensors for the backward only if
        `needs_grad`. For texts packed into a row, `cu_seqlens` has the bounds of (queries, keys);
        else it is None. `max_lengths` is (longest query, longest key), in tokens."""
        parts = () if packed is None else packed.detach().unbind(-3)
        ctx.num_parts = len(parts)
        inputs: list[Any] = [t for t in (query, key, value, *parts) if t is not None]
        width = inputs[0].shape[-1]
        if width % 8:
            inputs = [_padded(tensor) for tensor in inputs]
        query_bounds = None if cu_seqlens is None else cu_seqlens[0]
        out, softmax_lse, rng_state = FORWARD(
            *inputs, query_bounds, *max_lengths, dropout_p, is_windowed
        )
        if needs_grad:
            ctx.save_for_backward(*inputs, out, softmax_lse, *(cu_seqlens or ()), rng_state)
            ctx.is_of_texts = cu_seqlens is not None
            ctx.deterministic = deterministic
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return meta gradients of the first four arguments of `forward`; None for the others."""
        # read once, since a checkpointed region refuses a second read
        query, key, value, out, softmax_lse, *bounds, _rng_state = ctx.saved_tensors
        grad_out, num = grad_outputs[0], ctx.num_parts
        packed = key.new_empty(*key.shape[:-2], num, *key.shape[-2:]) if num else None
        parts = () if packed is None else packed.unbind(-3)
        gradients = [torch.empty_like(t) for t in (query, key, value)[: 3 - num]]
        BACKWARD(
            _padded(grad_out) if grad_out.shape[-1] % 8 else grad_out,
            query, key, value, out, softmax_lse, *gradients, *parts,
            bounds[0] if ctx.is_of_texts else None, ctx.deterministic,
        )  # fmt: skip
        padded_grads = (*gradients, *(None,) * num, packed)
        grads = (None if t is None else t[..., : grad_out.shape[-1]] for t in padded_grads)
        return *grads, *(None,) * 6


def _padded(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, [0, -tensor.shape[-1] % 8])


class _Options(NamedTuple):
    """Optional parameters at the end of each function of `flash_attn`, in the package's order."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    block_table: Tensor | None = None


def _function(name: str, tensors: str, texts: str = "") -> Callable[..., Tensor]:
    """Return the replacement of function `name` of `flash_attn`, with the same signature.

    The signature has the parameters `tensors`, then `texts`, then the fields of `_Options`.
    `tensors` are names separated by blanks, such as `q kv`. `texts` are names for texts packed into
    a row: `cu_seqlens max_seqlen` or `_QUERIES_AND_KEYS`. For other functions `texts` is "".
    """
    names = (*tensors.split(), *texts.split())
    params = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in (*names, *_Options._fields)]
    signature = Signature(params)

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        arguments = signature.bind_partial(*args, **kwargs).arguments
        inputs = {name: arguments.pop(name) for name in names}
        bounds = [inputs[name] for name in texts.split()]
        if len(bounds) == 2:  # the same for queries and keys
            bounds = [bounds[0], bounds[0], bounds[1], bounds[1]]
        packed = inputs.get("qkv", inputs.get("kv"))
        query, key, value = (inputs.get(name) for name in "qkv")
        return _attend(query, key, value, packed, _Options(**arguments), *bounds)

    attend.__name__ = attend.__qualname__ = name
    vars(attend)["__signature__"] = signature
    return attend


_QUERIES_AND_KEYS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"

# Tensors are (B, L, H, E) or (B, S, K, E), and (N, H, E) of packed texts; `kv` and `qkv` have a
# dimension of 2 or 3 before the heads.
flash_attn_func = _function("flash_attn_func", "q k v")
flash_attn_varlen_func = _function("flash_attn_varlen_func", "q k v", _QUERIES_AND_KEYS)
flash_attn_qkvpacked_func = _function("flash_attn_qkvpacked_func", "qkv")
flash_attn_kvpacked_func = _function("flash_attn_kvpacked_func", "q kv")
flash_attn_varlen_qkvpacked_func = _function(
    "flash_attn_varlen_qkvpacked_func", "qkv", "cu_seqlens max_seqlen"
)
flash_attn_varlen_kvpacked_func = _function(
    "flash_attn_varlen_kvpacked_func", "q kv", _QUERIES_AND_KEYS
)


def _attend(
    query: Tensor | None, key: Tensor | None, value: Tensor | None, packed: Tensor | None,
    options: _Options, *texts: Any,
) -> Tensor:  # fmt: skip
    """Return the output of the attention. `texts` is empty, or for texts packed into a row: bounds
    of queries, bounds of keys, longest query, longest key (tokens). `packed`: see
    `FlashAttention`."""
    parts = () if packed is None else packed.unbind(-3)
    inputs = [tensor for tensor in (query, key, value, *parts) if tensor is not None]
    _check_call(inputs, options)
    cu_seqlens: Any = None
    max_queries, max_keys = inputs[0].shape[1], inputs[1].shape[1]
    if texts:
        *cu_seqlens, max_queries, max_keys = texts
    is_windowed = any(0 <= size < max_keys for size in options.window_size)
    is_windowed = is_windowed or (options.causal and max_queries > 1)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return FlashAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, packed, cu_seqlens, (int(max_queries), int(max_keys)),
        options.dropout_p, is_windowed, options.deterministic, needs_grad,
    )  # fmt: skip


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Tensor:
    """Raise `UnsupportedError`: a cache of keys and values is for generation only."""
    raise UnsupportedError("attention with a cache is generation, not training", hint=INSTEAD)


def _check_call(inputs: Sequence[Tensor], options: _Options) -> None:
    """Raise a `PlanError` if `mha_fwd` of flash_api.cpp refuses `inputs`, (query, key, value)."""
    query, key, _ = inputs
    dtypes = {str(t.dtype).removeprefix("torch.") for t in inputs}
    if len(dtypes) > 1 or query.dtype not in _HALF:
        raise PlanError(
            f"`{FLASH_ATTENTION_2}` takes fp16 or bf16, and a layer of the model gives it "
            + " and ".join(f"`{name}`" for name in sorted(dtypes)),
            hint="use `bf16-true`, `bf16-mixed`, `16-true` or `16-mixed`, or `sdpa`",
        )
    if query.shape[-1] > MAX_HEAD_WIDTH:
        raise PlanError(
            f"`{FLASH_ATTENTION_2}` takes heads of up to {MAX_HEAD_WIDTH}, and the model's are "
            f"{query.shape[-1]} wide",
            hint="use `sdpa`",
        )
    if query.shape[-2] % key.shape[-2]:
        raise PlanError(
            f"`{FLASH_ATTENTION_2}` needs query heads in whole groups, not {query.shape[-2]} over "
            f"{key.shape[-2]}",
            hint="use `sdpa`",
        )
    if options.softcap > 0 and options.dropout_p > 0:
        raise PlanError(
            f"`{FLASH_ATTENTION_2}` caps scores or drops them, and the model requests both",
            hint="use `eager`",
        )


class _TakeRows(torch.autograd.Function):
    """`IndexFirstAxis` of flash_attn: gather the rows `indices` of (B * L, ...)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows, row_shape = rows.shape[0], rows.shape[1:]
        flat = rows.reshape(rows.shape[0], -1)
        out = torch.gather(flat, 0, indices[:, None].expand(-1, flat.shape[1]))
        return out.reshape(-1, *row_shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (indices,) = ctx.saved_tensors
        row_shape = grad_outputs[0].shape[1:]
        flat = grad_outputs[0].reshape(grad_outputs[0].shape[0], -1)
        grad = torch.zeros((ctx.num_rows, flat.shape[1]), device=flat.device, dtype=flat.dtype)
        grad.scatter_(0, indices[:, None].expand(-1, flat.shape[1]), flat)
        return grad.reshape(ctx.num_rows, *row_shape), None


class _PutRows(torch.autograd.Function):
    """`IndexPutFirstAxis` of flash_attn: scatter rows to `indices` among zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(indices)
        out = torch.zeros(num_rows, *rows.shape[1:], device=rows.device, dtype=rows.dtype)
        out[indices] = rows
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return grad_outputs[0][indices], None, None


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return (kept tokens, indices, bounds, longest, lengths) of `hidden_states` (B, L, ...).

    A token is kept if `attention_mask` (B, L) selects it, or `unused_mask` if not None. The N kept
    tokens are (N, ...). Indices (N) are their positions among all B * L tokens. Bounds (B + 1) are
    positions among the kept tokens: text i goes from bound i to bound i + 1. Longest is the number
    of kept tokens of the longest text. Lengths (B) count the tokens of each text that
    `attention_mask` selects.
    """
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    used_lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    longest = int(lengths.max().item())
    bounds = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = _TakeRows.apply(hidden_states.flatten(0, 1), indices)  # type: ignore[no-untyped-call]
    return rows, indices, bounds, longest, used_lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return a tensor (`batch`, `seqlen`, ...) with the tokens `hidden_states` (N, ...), and zeros
    as padding. Token i is at `indices[i]` among the `batch` * `seqlen` tokens of the result."""
    out = _PutRows.apply(hidden_states, indices, batch * seqlen)  # type: ignore[no-untyped-call]
    return out.reshape(batch, seqlen, *hidden_states.shape[1:])


@contextlib.contextmanager
def replace_functions() -> Iterator[None]:
    """Make transformers use this module's functions instead of `flash_attn`'s within the block.

    An installed `flash_attn` is not imported, and `sys.modules` is unchanged.
    """
    from transformers import modeling_flash_attention_utils as utils

    is_old = not hasattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX")  # before transformers 5
    if is_old and not hasattr(utils, "_lazy_imports"):
        refuse_old_release()
    lazy_imports = utils._lazy_imports
    functions: list[Any] = [flash_attn_func, flash_attn_varlen_func]
    functions += [] if is_old else [flash_attn_with_kvcache]

    def find(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation != FLASH_ATTENTION_2:
            return lazy_imports(implementation, *args, **kwargs)
        return (*functions, pad_input, unpad_input)

    forward = utils._flash_attention_forward
    with contextlib.ExitStack() as stack:
        for name in _STATE & vars(utils).keys():
            stack.enter_context(mock.patch.object(utils, name, None))
        stack.enter_context(mock.patch.object(utils, "_lazy_imports", find))
        if is_old:
            from transformers import modeling_utils

            for module in (utils, modeling_utils):
                for name in _CHECKS & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, name, return_value=True))
        else:
            checks = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
            overrides = {"general_availability_check": lambda: True}
            stack.enter_context(mock.patch.dict(checks, overrides))
        for family in _IMPORT_WITH_THE_PACKAGE:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            stack.enter_context(
                mock.patch.object(module, "_flash_attention_forward", forward, create=True)
            )
        yield


def refuse_old_release(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an `UnsupportedError`: transformers is too old for `replace_functions`."""
    raise UnsupportedError(
        "the installed transformers is too old for FlashAttention here",
        hint="take `sdpa`, whose kernel saves the same tensors, or install transformers 5",
    )


_STATE = frozenset(
    "_flash_fn _flash_varlen_fn _flash_with_kvcache_fn _pad_fn _unpad_fn _loaded_implementation"
    " _process_flash_kwargs_fn".split()
)
"""Variables of transformers that hold the functions it found."""

_CHECKS = frozenset(("is_flash_attn_2_available", "is_flash_attn_greater_or_equal_2_10"))
"""Functions with which transformers 4.55 to 4.57 checks for the package."""

_IMPORT_WITH_THE_PACKAGE = ("falcon", "gpt_neo", "gptj")
"""Families that import `_flash_attention_forward` only where the package is installed."""


def mark_quantized(model: nn.Module) -> None:
    """Mark the configs in `model` as quantised, as `from_pretrained` does. transformers then casts
    float32 queries to the dtype of the config (`get_target_dtype`)."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = True
