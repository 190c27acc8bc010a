"""Attention: which kernel CUDA runs, the operators around it, and what each kernel allocates.

Sources are under aten/src/ATen/native (torch 2.11; equal in 2.13 where its wheel ships the header).
`choice`: `scaled_dot_product_attention` of transformers/attention.cpp and `select_sdp_backend` of
transformers/cuda/sdp_utils.cpp; `flash`: transformers/cuda/flash_attn/flash_api.cpp; `efficient`:
transformers/cuda/attention.cu, attention_backward.cu, mem_eff_attention/kernel_backward.h and
kernels/cutlassB.h, cutlassF.h; `cudnn`: cudnn/MHA.cpp and `CompositeSDPABackwardNode` of
cudnn_frontend's scaled_dot_product_flash_attention.h. Left out: nested tensors, deterministic
algorithms, batches above 65535.

The last section has the kernels of the package `flash_attn` 2.8.3, csrc/flash_attn/flash_api.cpp
(`mha_fwd`, `mha_varlen_fwd`, `mha_bwd`, `mha_varlen_bwd`). Its `flash_attn_interface.py` copies
tensors with a stride in the last dimension. Left out there: a single query token whose heads are
not contiguous.

Shapes: B batch, H query heads, K key heads, L query tokens, S key tokens, E head width, V width of
the values. N is the tokens of all rows without padding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend

from memest.errors import PlanError
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next, active_gpu
from memest.estimator.ops.random import DRAWS
from memest.estimator.ops.reductions import sum_bytes
from memest.estimator.ops.refusals import cpp_type
from memest.estimator.ops.registry import Args, KernelCall
from memest.estimator.ops.strides import strided
from memest.estimator.ops.temporaries import Events, around, outputs, passing, temporaries
from memest.estimator.versions import TorchRelease, simulated
from memest.models_meta.flash_attention import BACKWARD, FORWARD
from memest.plan.keys import FLASH_ATTENTION_2
from memest.units import ceil_div, round_up

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_NEWEST_CAPABILITY = (12, 1)  # of the fused kernels (`sm121` in the source)
_DEFAULT_ORDER = 1, 2, 0, 3  # `sdp_priority_order` of ATen/Context.h, as numbers of `SDPBackend`


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one attention call, its GPU and torch release (`sdp_params`, sdp_utils.cpp)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    gpu: Gpu = field(kw_only=True)
    release: TorchRelease = field(kw_only=True, default_factory=simulated)


def choose_backend(*args: Any, **kwargs: Any) -> SDPBackend:
    """Return the backend that `_fused_sdp_choice` selects; the arguments are the fields of `_Call`.

    The order of trials (`priority_order`) is flash, efficient, math, cuDNN. cuDNN is first if
    `check_prefer_cudnn_attention` is true: compute capability 9.x or 10.x and cuDNN > 9.15. The
    user's order and switches and the grad mode are read from the process.

    Evidence: 368 of 368 choices on an H200 with torch 2.11 for CUDA 13. Left out: nested tensors,
    FlashAttention 3, ROCm, misaligned storage offsets.

    Raises:
        RuntimeError: no allowed backend accepts the call (`select_sdp_backend`).
    """
    call = _Call(*args, **kwargs)
    accepts: dict[SDPBackend, Callable[[_Call], bool]] = {
        SDPBackend.CUDNN_ATTENTION: _can_use_cudnn,
        SDPBackend.FLASH_ATTENTION: _can_use_flash,
        SDPBackend.EFFICIENT_ATTENTION: _can_use_efficient,
        SDPBackend.MATH: lambda call: bool(torch._C._get_math_sdp_enabled()),
    }
    for backend in _backends_in_order(call):
        if accepts[backend](call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _backends_in_order(call: _Call) -> tuple[SDPBackend, ...]:
    """Return the backends in order of trial: the user's (`set_priority=True`), or the GPU's."""
    numbers = getattr(torch._C, "_get_sdp_priority_order", lambda: _DEFAULT_ORDER)()
    # torch 2.6 has five places for four backends: the last is 0
    backends = [n for n in dict.fromkeys(numbers) if n in _DEFAULT_ORDER]
    order = tuple(map(SDPBackend, backends))
    # 9.15.0, as `cudnnGetVersion` returns it
    prefers_cudnn = call.release.cudnn_version > 91500 and call.gpu.capability[0] in (9, 10)
    if prefers_cudnn and tuple(backends) == _DEFAULT_ORDER:
        return SDPBackend.CUDNN_ATTENTION, *order[:-1]
    return order


def _can_use_cudnn(call: _Call) -> bool:
    is_deterministic = torch.get_deterministic_debug_mode() == 2  # 1 only warns
    is_in_sixteenths = call.dropout_p * 16 == math.floor(call.dropout_p * 16)
    return (
        torch._C._get_cudnn_sdp_enabled()
        and not is_deterministic
        and _passes_common_checks(call, SDPBackend.CUDNN_ATTENTION, *_HALF)
        and _cudnn_takes_mask(call)
        and (8, 0) <= call.gpu.capability <= _NEWEST_CAPABILITY
        and (is_in_sixteenths or not call.release.dropout_in_sixteenths)
        and not (call.dropout_p > 0 and 91100 < call.release.cudnn_version < 91400)
        and _cudnn_takes_shapes(call)
    )


def _can_use_flash(call: _Call) -> bool:
    is_enabled = torch._C._get_flash_sdp_enabled() and call.attn_mask is None
    if not (is_enabled and _passes_common_checks(call, SDPBackend.FLASH_ATTENTION, *_HALF)):
        return False
    head_dim, capability = call.query.size(-1), call.gpu.capability
    # check_head_dim_size_flash
    if not (head_dim == call.key.size(-1) == call.value.size(-1) and head_dim <= 256):
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    has_small_shared_memory = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    is_untrainable = 192 < head_dim <= 224 or (head_dim > 224 and call.dropout_p > 0)
    needs_grad = _needs_grad(call.query, call.key, call.value)
    if has_small_shared_memory and needs_grad and is_untrainable:
        return False
    # check_flash_causal_non_square_seqlens, check_flash_attention_hardware_support
    is_square = call.query.size(-2) == call.key.size(-2)
    return (is_square or not call.is_causal) and (8, 0) <= capability <= _NEWEST_CAPABILITY


def _can_use_efficient(call: _Call) -> bool:
    """Return whether the efficient kernel accepts the call: `can_use_mem_efficient_attention`. Head
    widths must be multiples of 8 in half precision (from capability 7.0) and of 4 in float32 (from
    8.0): `check_head_dim_size_mem_efficient` with `minimum_gemm_alignment`."""
    if not (
        torch._C._get_mem_efficient_sdp_enabled()
        and (5, 0) <= call.gpu.capability <= _NEWEST_CAPABILITY
        and _passes_common_checks(call, SDPBackend.EFFICIENT_ATTENTION, *_HALF, torch.float32)
    ):
        return False
    alignment = 1
    if call.gpu.capability >= (7, 0) and call.query.dtype in _HALF:
        alignment = 8
    elif call.gpu.capability >= (8, 0):
        alignment = 4
    head_dim, value_dim = call.query.size(-1), call.value.size(-1)
    is_aligned = all(width > 0 and width % alignment == 0 for width in (head_dim, value_dim))
    return is_aligned and head_dim == call.key.size(-1)


def _cudnn_takes_shapes(call: _Call) -> bool:
    """Return whether cuDNN 9 accepts the tensors' shapes: `check_cudnn_tensor_shapes`."""
    head_dim, value_dim = call.query.size(3), call.value.size(3)
    limit = 128
    if call.release.cudnn_version >= 91000 and call.gpu.capability == (9, 0):
        limit = 256
    is_blackwell = call.gpu.capability[0] == 10
    if is_blackwell and call.release.cudnn_version >= 91100 and (head_dim, value_dim) == (192, 128):
        limit = 192
    return (
        all(width <= limit and width % 8 == 0 for width in (head_dim, value_dim))
        and call.key.size(2) != 1
        and not (call.query.size(2) == 1 and call.dropout_p != 0)
    )


def _cudnn_takes_mask(call: _Call) -> bool:
    """Return whether cuDNN accepts the mask: None, or one with 2 or 4 dimensions that broadcasts
    and has no gradient (`check_attn_mask_shape`)."""
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full_shape = (*call.query.shape[:3], call.key.size(2))[-mask.dim() :]
    return all(size in (1, target) for size, target in zip(mask.shape, full_shape, strict=True))


def _passes_common_checks(call: _Call, backend: SDPBackend, *dtypes: torch.dtype) -> bool:
    """Return whether `call` passes the checks that all fused kernels share. `dtypes` are the dtypes
    that `backend` supports.

    The checks are `check_tensor_shapes`, `check_tensor_dtype` (bfloat16 from 8.0 on),
    `check_nonzero_sequence_lengths_dense`, `check_last_dim_stride_equals_1_dense` with the mask,
    `check_batch_size_and_num_heads_dense` and the check of grouped heads. Heads of width 1 may have
    a last stride other than 1, and heads may be grouped (`enable_gqa`). The efficient kernel
    accepts neither of the two.
    """
    query, key, value = call.query, call.key, call.value
    is_efficient = backend == SDPBackend.EFFICIENT_ATTENTION
    if not query.dim() == key.dim() == value.dim() == 4 or 0 in (query.size(2), key.size(2)):
        return False
    if call.gpu.capability < (8, 0) and query.dtype == torch.bfloat16:
        return False
    if query.dtype not in dtypes or not query.dtype == key.dtype == value.dtype:
        return False
    has_unit_strides = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    if not (has_unit_strides or (query.size(-1) == 1 and not is_efficient)):
        return False
    if call.attn_mask is not None and call.attn_mask.stride(-1) != 1:
        return False
    if not query.size(0) == key.size(0) == value.size(0):
        return False
    query_heads, key_heads, value_heads = query.size(1), key.size(1), value.size(1)
    if call.enable_gqa and not is_efficient:
        if backend == SDPBackend.FLASH_ATTENTION and key_heads != value_heads:
            return False
        return query_heads % key_heads == 0 and query_heads % value_heads == 0
    return query_heads == key_heads == value_heads


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False, gpu: Gpu,
) -> Tensor:  # fmt: skip
    """Run attention by the operators that CUDA would run on `gpu`, so that autograd records them.

    It replaces `aten::scaled_dot_product_attention` above autograd, and has its arguments.
    """
    refuse_attention(query, key, value, attn_mask)
    qkv = query, key, value
    options: tuple[Any, ...] = dropout_p, is_causal
    backend = choose_backend(*qkv, attn_mask, *options, enable_gqa=enable_gqa, gpu=gpu)
    # cuDNN does not take minus infinity (`convert_boolean_attn_mask_cudnn`, gone in later torch).
    masked_out = -65504.0 if backend == SDPBackend.CUDNN_ATTENTION else -math.inf
    attn_mask = _additive_mask(attn_mask, query.dtype, masked_out)
    if backend == SDPBackend.MATH:
        return math_attention(*qkv, attn_mask, *options, scale=scale, enable_gqa=enable_gqa)
    returns_debug_mask = False
    if backend == SDPBackend.FLASH_ATTENTION:
        head_dim, padding = query.size(-1), -query.size(-1) % 8  # to a multiple of 8
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        if padding:
            query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in qkv)
            qkv = query, key, value
        op = aten._scaled_dot_product_flash_attention.default
        out = _first_result(op, *qkv, *options, returns_debug_mask, scale=scale)
        return aten.slice.Tensor(out, -1, 0, head_dim) if padding else out
    if backend == SDPBackend.CUDNN_ATTENTION:
        op = aten._scaled_dot_product_cudnn_attention.default
        options = *options, returns_debug_mask
    else:
        op = aten._scaled_dot_product_efficient_attention.default
        attn_mask = None if attn_mask is None else _aligned_mask(attn_mask, query, key)
    return _first_result(op, *qkv, attn_mask, _needs_grad(*qkv), *options, scale=scale)


def _needs_grad(*tensors: Tensor) -> bool:
    """Return whether autograd is on and a tensor requires a gradient (`input_requires_grad`)."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _first_result(op: OpOverload, *args: Any, scale: float | None) -> Tensor:
    """Return the first result of `op`; free the rest in order, as C++ frees a `std::tuple`."""
    results = [*op(*args, scale=scale)]
    while len(results) > 1:
        results.pop(1)
    return results[0]


def _additive_mask(
    mask: Tensor | None, dtype: torch.dtype, masked_out: float = -math.inf
) -> Tensor | None:
    """Return a boolean `mask` in `dtype`: 0 where True, else `masked_out`. Others are unchanged."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return aten.where.ScalarSelf(
        mask, 0.0, aten.scalar_tensor.default(masked_out, dtype=dtype, device=mask.device)
    )


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return `mask` expanded to (B, H, L, S), with rows at multiples of 8 (`preprocess_mask`). A
    mask with other strides is copied into one that is 1 to 8 elements wider, and sliced back."""
    is_aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    if not is_aligned:
        width = mask.size(-1)
        padded = torch.nn.functional.pad(mask, (0, 8 - width % 8))
        mask = aten.slice.Tensor(padded, -1, 0, width)
        del padded
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def math_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, *, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Run attention as matrix products and a softmax: `_scaled_dot_product_attention_math`.

    Half precision is computed in float32. The mask is added in place. Under a dispatch mode, torch
    itself would add it into one more B x H x L x S buffer (`areAnyTensorSubclassLike`).
    """
    dtype = query.dtype
    query_acc, key_acc, value_acc = query, key, value
    if dtype in _HALF and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query_acc, key_acc, value_acc = query.float(), key.float(), value.float()
    # both factors of the product are multiplied by the root of the scale, whose sign the query gets
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    factor = math.sqrt(abs(scale))
    scaled_q = aten.mul.Scalar(query_acc, -factor if scale < 0 else factor)
    if is_causal:
        sides, device = [query.size(-2), key.size(-2)], query.device
        lower = aten.ones.default(sides, dtype=torch.bool, device=device).tril()
        attn_mask = _additive_mask(lower, query_acc.dtype)
        del lower
    all_keys, all_values = key_acc, value_acc
    if enable_gqa and not query.size(-3) == key.size(-3) == value.size(-3):
        all_keys = key_acc.repeat_interleave(query.size(-3) // key.size(-3), -3)
        all_values = value_acc.repeat_interleave(query.size(-3) // value.size(-3), -3)
    attn = torch.matmul(scaled_q, aten.mul.Scalar(all_keys.transpose(-2, -1), factor))
    if attn_mask is not None:
        attn.add_(attn_mask)
    attn = aten._safe_softmax.default(attn, -1)
    if dropout_p > 0:
        attn = torch.dropout(attn, dropout_p, True)
    # The weights are a second result, converted before the output is computed, and dropped here.
    weights = attn.to(dtype)
    out = torch.matmul(attn, all_values).to(dtype)
    # C++ destroys local variables in reverse order
    del weights, attn, all_keys, all_values, scaled_q, attn_mask, value_acc, key_acc, query_acc
    return out


@registry.above_autograd("scaled_dot_product_attention", vmap_key=registry.UNDER_VMAP)
def run_attention(next_kernel: Next, *args: Any, **kwargs: Any) -> Tensor:
    """Run attention by the backend that CUDA would choose, in place of the kernel `next_kernel`."""
    return scaled_dot_product_attention(*args, **kwargs, gpu=active_gpu())


_FLOAT_BYTES = 4
_RANDOM_STATE_BYTES, _UNUSED_BYTES = 16, 8  # results of flash's forward: two int64, one int64

CUDNN_ENGINE_BYTES = 256
"""Workspace of cuDNN's own engines on compute capability 9.0, forward and backward.

Measured with cuDNN 9.19 on an H200, the same in every case; no source is public.
"""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of one attention call, named as in this file's docstring, and bytes of an element."""

    B: int
    H: int
    K: int
    L: int
    S: int
    E: int
    V: int
    itemsize: int

    @classmethod
    def of(cls, c: KernelCall) -> "_Shape":
        B, H, L, E = c.query.shape
        return cls(B, H, c.key.size(1), L, c.key.size(2), E, c.value.size(3), c.query.itemsize)

    @property
    def lse_bytes(self) -> int:
        """Bytes of the logsumexp: one float32 per query token and head."""
        return self.B * self.H * self.L * _FLOAT_BYTES

    @property
    def out_bytes(self) -> int:
        return self.B * self.H * self.L * self.V * self.itemsize


def _has_tokens_before_heads(tensor: Tensor) -> bool:
    """Return whether `tensor`, (B, heads, tokens, width), is stored with tokens before heads."""
    return tensor.transpose(1, 2).is_contiguous()


def _dropout_offset(count: int, dropout_p: float) -> int:
    """Return by how much dropout of `count` numbers advances the random generator's offset; 0 if
    `dropout_p` is 0."""
    return round_up(count, DRAWS) if dropout_p else 0


def _offset_of_scores(c: KernelCall) -> int:
    return _dropout_offset(prod(c.query.shape[:3]) * c.key.size(2), c.dropout_p)


@registry.requests(
    "_scaled_dot_product_flash_attention",
    random_offset=lambda c: _dropout_offset(c.query.size(0) * c.query.size(1) * 32, c.dropout_p),
)
def flash_forward(c: KernelCall) -> Events:
    """Allocations of `mha_fwd`: output, logsumexp, split accumulators, 16 B random state, 8 unused.

    With dropout the random state is allocated again, and the first one freed. Keys are split if the
    queries do not fill the GPU (`num_splits_heuristic`, none with dropout). Each split has its own
    logsumexp and float32 output; the output's width is rounded up to 32 (64 above 128).
    """
    shape = _Shape.of(c)
    results = outputs({0: shape.out_bytes, 1: shape.lse_bytes})
    if c.dropout_p > 0:
        random_state = outputs({7: _UNUSED_BYTES, 6: _RANDOM_STATE_BYTES})
        return results + around((_RANDOM_STATE_BYTES,), random_state)
    accumulators = _split_accumulators(shape.B, shape.H, shape.L, shape.S, shape.E, c.gpu)
    random_state = outputs({6: _RANDOM_STATE_BYTES, 7: _UNUSED_BYTES})
    frees = temporaries(*(-num_bytes for num_bytes in accumulators))
    return results + temporaries(*accumulators) + random_state + frees


def rounded_head_width(E: int) -> int:
    """Return the width of flash's float32 buffers for heads of width `E`: `head_size_rounded`."""
    return round_up(E, 32 if E <= 128 else 64)


def _split_accumulators(B: int, H: int, L: int, S: int, E: int, gpu: Gpu) -> list[int]:
    """Return [bytes of logsumexps, bytes of outputs] of all splits of the keys; [] without a split.
    B, H, L, S, E: batch, heads, queries, keys, head width. The number of splits is the least whose
    use of the multiprocessors is at least 85 % of the best (`num_splits_heuristic`)."""
    block_keys = 64
    if E <= 128:
        block_keys = 256 if E <= 64 else 128
    key_blocks = ceil_div(S, block_keys)
    query_blocks = B * H * ceil_div(L, 64)
    slots = gpu.num_sms * 2  # blocks that run at once, as torch counts them
    if query_blocks >= 0.8 * slots:
        return []
    use_by_splits: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        blocks_of_split = ceil_div(key_blocks, splits)
        if splits == 1 or blocks_of_split != ceil_div(key_blocks, splits - 1):
            waves = query_blocks * splits / slots
            use_by_splits[splits] = waves / ceil_div(query_blocks * splits, slots)
    best = max(use_by_splits.values(), default=0.0)
    num_splits = next((splits for splits, use in use_by_splits.items() if use >= 0.85 * best), 1)
    if num_splits == 1:
        return []
    lse_bytes = num_splits * B * H * L * _FLOAT_BYTES
    return [lse_bytes, lse_bytes * rounded_head_width(E)]


@registry.requests("_scaled_dot_product_flash_attention_backward")
def flash_backward(c: KernelCall) -> Events:
    """Allocations of `mha_bwd`: contiguous copies, gradients, softmax sums, float32 query gradient.

    Queries are rounded up to 128 tokens. Grouped heads add temporary key and value gradients for
    each query head, which are summed into the outputs.
    """
    shape = _Shape.of(c)
    copies = [t.nbytes for t in (c.grad_out, c["out"]) if not _has_tokens_before_heads(t)]
    rows = shape.B * shape.H * round_up(shape.L, 128)
    return around(copies, _flash_gradients(c, rows, shape.B * shape.S, shape.H, shape.K))


def _flash_gradients(c: KernelCall, rows: int, num_keys: int, H: int, K: int) -> Events:
    E, itemsize = c.query.size(-1), c.query.itemsize
    workspaces = [rows * _FLOAT_BYTES, rows * rounded_head_width(E) * _FLOAT_BYTES]
    if K != H:  # gradients of key and value for each query head
        workspaces += [num_keys * H * E * itemsize] * 2
    return _gradient_outputs(c) + passing(*workspaces)


def _is_packed_without_dropout(c: KernelCall) -> bool:
    """Return whether the sequences are packed, as (tokens, H, E), and dropout is 0."""
    return c.cum_seq_q is not None and not c.dropout_p


@registry.requests("_flash_attention_forward", modelled=_is_packed_without_dropout)
def packed_forward(c: KernelCall) -> Events:
    """Requests of `mha_varlen_fwd`: output, logsumexp, 16 B of random state, 8 unused bytes."""
    state = outputs({2: _RANDOM_STATE_BYTES, 3: _UNUSED_BYTES})
    return outputs({0: c.query.nbytes, 1: c.out[1].nbytes}) + state


@registry.requests("_flash_attention_backward", modelled=_is_packed_without_dropout)
def packed_backward(c: KernelCall) -> Events:
    """Requests of `mha_varlen_bwd`: those of `mha_bwd`, with 128 tokens more for each sequence."""
    (num_queries, H, _), (num_keys, K, _) = c.query.shape, c.key.shape
    copies = [t.nbytes for t in (c.grad_out, c["out"]) if not t.is_contiguous()]
    rows = H * (num_queries + 128 * (c.cum_seq_q.numel() - 1))
    return around(copies, _flash_gradients(c, rows, num_keys, H, K))


def _gradient_outputs(c: KernelCall) -> Events:
    return outputs({i: t.nbytes for i, t in enumerate((c.query, c.key, c.value))})


@registry.requests("_scaled_dot_product_efficient_attention", random_offset=_offset_of_scores)
def efficient_forward(c: KernelCall) -> Events:
    """Allocations of `_efficient_attention_forward`: output, logsumexp, and perhaps an accumulator.

    The logsumexp is padded to 32 tokens, and empty without a gradient. For half precision above a
    width of 128 the output is accumulated in a float32 buffer (`kNeedsOutputAccumulatorBuffer`).
    """
    shape = _Shape.of(c)
    lse_bytes = 0
    if c.compute_log_sumexp:
        lse_bytes = shape.B * shape.H * round_up(shape.L, 32) * _FLOAT_BYTES
    accumulator = 0
    if c.query.dtype in _HALF and max(shape.E, shape.V) > 128:
        accumulator = shape.B * shape.L * shape.H * shape.V * _FLOAT_BYTES
    return outputs({0: shape.out_bytes, 1: lse_bytes}) + passing(accumulator)


@registry.requests("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(c: KernelCall) -> Events:
    """Allocations of `_efficient_attention_backward`: gradients, row sums, workspace. A bias
    gradient has rows padded to 16. The row sums are sums of grad_out * out over the head width.
    Most kernels of half precision compute them. In all other cases torch computes them before the
    kernel runs, by a product, a sum and a transposed copy (`_row_sums`)."""
    shape, bias = _Shape.of(c), c.attn_bias
    is_half, width = c.query.dtype in _HALF, max(shape.E, shape.V)
    queries, keys, is_staged = _efficient_tile(c.query.dtype, width, c.dropout_p > 0, c.gpu)
    copy = 0 if _has_tokens_before_heads(c.grad_out_) else c.grad_out_.nbytes
    gradients = _gradient_outputs(c)
    _, _, _, needs_bias_gradient = c.grad_input_mask
    if bias is not None and needs_bias_gradient:
        rows = bias.numel() // bias.size(-1)
        gradients += outputs({3: rows * round_up(bias.size(-1), 16) * bias.itemsize})
    # `kKernelComputesDelta`
    sums_rows = is_half and not (is_staged and c.gpu.capability == (7, 0))
    row_sums = temporaries(shape.lse_bytes) if sums_rows else _row_sums(shape)
    # `Params::workspace_size`: the query's gradient, and those of key and value if staged
    floats = ceil_div(shape.L, queries) * ceil_div(shape.E, keys) * (4 + queries * keys)
    heads = shape.B * shape.H
    if is_staged:
        splits = max(1, min(ceil_div(shape.S, keys), 200 // heads))
        floats += splits * keys * (round_up(shape.E, queries) + round_up(shape.V, queries))
    workspace = heads * round_up(floats, 4) * _FLOAT_BYTES
    final_events = temporaries(workspace, -shape.lse_bytes, -workspace, -copy)
    return temporaries(copy) + gradients + row_sums + final_events


def _row_sums(shape: _Shape) -> Events:
    """Allocations of `(grad_out.float() * out.float()).sum(-1).transpose(-2, -1).contiguous()`. The
    result stays allocated. Left out: staging buffers of the sum at widths above 1024."""
    product = shape.B * shape.L * shape.H * shape.V * _FLOAT_BYTES
    casts = [product, product] if shape.itemsize < _FLOAT_BYTES else []
    sums = shape.lse_bytes
    is_copied = shape.L > 1 and shape.H > 1
    # the transposed copy replaces the sums
    copy_events = temporaries(sums) + temporaries(-sums, oldest=True) if is_copied else []
    frees = temporaries(-product, *(-n for n in casts))
    return [*temporaries(*casts, product, sums), *copy_events, *frees]


_LEAST_SHARED_KIB = 99
"""Least shared memory per block from compute capability 8.0 on, KiB.

Tiles of 128 queries need 121344 bytes in float32. Tiles of 128 x 128 need 133632 (bfloat16) to
162304 (float16, dropout). All other tiles fit. Source: `sizeof(SharedStorage)` of torch 2.13's
kernel_backward.h, compiled with CUTLASS 4.2.
"""


def _efficient_tile(
    dtype: torch.dtype, width: int, has_dropout: bool, gpu: Gpu
) -> tuple[int, int, bool]:
    """Return (queries per tile, keys per tile, True if gradients are staged) of the backward
    kernel: the first of `dispatch_cutlassB` that supports heads of `width` and fits the shared
    memory. Staged gradients are accumulated in global memory, by kernels of half precision that
    have too few registers for the width (not `kOutputInRF`)."""
    is_half = dtype in _HALF
    is_small = gpu.multiprocessor.block_shared_kib == _LEAST_SHARED_KIB
    max_width = 128 if width <= 128 else 65536
    queries, keys = 128, 64
    if width <= 64:
        queries, max_width = 64, 64
    elif is_half and width <= 96 and gpu.capability in ((8, 6), (8, 9)) and not has_dropout:
        max_width = 96
    elif not is_half and (gpu.capability[0] < 8 or is_small):
        queries = 64
    elif is_half and gpu.capability[0] >= 8 and width <= 128:
        queries, keys = (64, 64) if is_small else (128, 128)
    return queries, keys, is_half and max_width > queries


def cudnn_output(args: Args, out: Any) -> Any:
    """Return `out`, the results of attention, with the strides that CUDA's kernel gives the first.
    The strides are those of the query `args[0]` (`alloc_with_matching_layout`). The meta kernel of
    torch 2.6 has others. If query and first result differ in shape, `out` is returned unchanged."""
    query, (first, *rest) = args[0], out
    is_alike = query.shape == first.shape
    return (strided(first, torch.empty_like(query).stride()), *rest) if is_alike else out


def _is_measured(c: KernelCall) -> bool:
    """Return whether the GPU has compute capability 9.0; cuDNN was not measured on others."""
    return c.gpu.capability == (9, 0)


def _engine_bytes(c: KernelCall) -> int:
    return CUDNN_ENGINE_BYTES if _is_measured(c) else 0


@registry.requests(
    "_scaled_dot_product_cudnn_attention",
    modelled=_is_measured, random_offset=_offset_of_scores,
    layout=lambda c: cudnn_output(c.args, c.out),
)  # fmt: skip
def cudnn_forward(c: KernelCall) -> Events:
    """Allocations of `run_cudnn_SDP_fprop`: seed, offset, output, logsumexp if needed, workspace.

    The workspace has the constant size `CUDNN_ENGINE_BYTES`; a single query token needs none.
    """
    shape = _Shape.of(c)
    workspace = _engine_bytes(c) if shape.L > 1 else 0
    lse_bytes = shape.lse_bytes if c.compute_log_sumexp else 0
    seed_and_offset = outputs({6: 8, 7: 8})  # an int64 each
    return seed_and_offset + outputs({0: shape.out_bytes, 1: lse_bytes}) + passing(workspace)


@registry.requests("_scaled_dot_product_cudnn_attention_backward", modelled=_is_measured)
def cudnn_backward(c: KernelCall) -> Events:
    """Allocations of `run_cudnn_SDP_bprop`: gradients, a copy of an expanded grad_out, workspace.

    The workspace holds a float32 query gradient, a softmax sum per row, and for grouped heads key
    and value gradients of all query heads:

        B*H*L*E*4 + B*H*L*4 + (K < H) * B*H*S*(E + V)*itemsize + CUDNN_ENGINE_BYTES
    """
    shape = _Shape.of(c)
    copy = c.grad_out.nbytes if c.grad_out.stride(-1) != 1 else 0
    workspace = shape.B * shape.H * shape.L * shape.E * _FLOAT_BYTES + shape.lse_bytes
    for heads, width in ((shape.K, shape.E), (c.value.size(1), shape.V)):
        if heads != shape.H:
            workspace += shape.B * shape.H * shape.S * width * shape.itemsize
    return _gradient_outputs(c) + passing(copy, workspace + _engine_bytes(c))


@registry.requests("_safe_softmax")
def safe_softmax(c: KernelCall) -> Events:
    """Allocations of `_safe_softmax` (attention.cpp): result, two bool masks, and a 0-d zero. The
    first mask has an element for each element of the result, the second for each row."""
    rows = c.out.numel() // max(1, c.out.size(c.dim))
    return c.outputs() + passing(c.out.numel(), rows, c.out.itemsize)


def refuse_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise torch's `RuntimeError` for dtypes that do not agree (`validate_sdpa_input`)."""
    dtypes = [tensor.dtype for tensor in (query, key, value)]
    if len(set(dtypes)) > 1:
        first, second, third = map(cpp_type, dtypes)
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{first} key.dtype: {second} and value.dtype: {third} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {cpp_type(mask.dtype)} and  query.dtype: {cpp_type(query.dtype)} "
            "instead."
        )


def check_gpu(gpu: Gpu) -> None:
    """Raise a `PlanError` if `gpu` is too old for the package `flash-attn`."""
    if gpu.capability < (8, 0):  # `FlashAttention only supports Ampere GPUs or newer`
        major, minor = gpu.capability
        raise PlanError(
            f"`{FLASH_ATTENTION_2}` needs compute capability 8.0 (Ampere) or newer, "
            f"not {major}.{minor}",
            hint="use `sdpa`, or another GPU",
        )


def _copies_for_unit_stride(*tensors: Tensor) -> list[int]:
    """Return the bytes of copies of tensors whose last stride is not 1: `maybe_contiguous`."""
    return [tensor.nbytes for tensor in tensors if tensor.stride(-1) != 1]


@registry.requests(FORWARD)
def package_forward(c: KernelCall) -> Events:
    """Allocations of flash-attn's forward: output, logsumexp, split accumulators, 16 B RNG state.
    The logsumexp has 4 * B * H * L bytes, or 4 * H * N for N packed tokens. Keys are split as in
    torch (`_split_accumulators`), except with dropout. Packed sequences (`cu_seqlens`) are split
    only for a single query token with grouped heads (`seqlenq_ngroups_swapped`)."""
    L, K = c.max_queries, c.key.shape[-2]
    H, E = c.query.shape[-2:]
    is_swapped = L == 1 and H > K and not c.is_windowed and c.dropout_p == 0
    accumulators: list[int] = []
    if c.dropout_p == 0 and (c.cu_seqlens is None or is_swapped):
        if is_swapped:  # the query heads of a group run as tokens of its key head
            H, L = K, H // K
        accumulators = _split_accumulators(_num_sequences(c), H, L, c.max_keys, E, c.gpu)
    events = c.outputs(0, 1) + around(accumulators, c.outputs(2))
    return around(_copies_for_unit_stride(c.query, c.key, c.value), events)


def _num_sequences(c: KernelCall) -> int:
    return int(c.query.shape[0] if c.cu_seqlens is None else c.cu_seqlens.numel() - 1)


@registry.requests(BACKWARD)
def package_backward(c: KernelCall) -> Events:
    """Allocations of flash-attn's backward: copies, gradients, and these buffers.

        4 * L' * H                    row sums, a result that the caller drops
        4 * L' * H * E' * splits      float32 gradient of the query
        2 * itemsize * S' * H * E     only if K < H: gradients of key and value per query head

    L' is the number of query tokens in the batch, with each sequence rounded up to 128. For packed
    sequences, it is N + 128 * B. S' is the number of key tokens in the batch. E' is E rounded up to
    32, or to 64 above 128. `splits` is 1, or ceil(SMs / (B * H)) for a deterministic backward. The
    gradients per query head are then summed over each group of heads.
    """
    (H, E), K = c.query.shape[-2:], c.key.shape[-2]
    accumulator_bytes = c.out.nbytes * rounded_head_width(E)
    if c.deterministic:
        accumulator_bytes *= ceil_div(c.gpu.num_sms, _num_sequences(c) * H)
    buffers = [accumulator_bytes]
    sum_events: Events = []
    if K != H:  # gradients of key and value for each query head, and their sum over a group
        groups = c.key.new_empty((*c.key.shape[:-2], K, H // K, E))
        buffers += [groups.nbytes, groups.nbytes]
        sum_events = 2 * passing(*sum_bytes(groups, [groups.dim() - 2], groups.dtype, c.gpu))
    tensors = c.args[:5]  # gradient of the output, query, key, value, output
    return around(_copies_for_unit_stride(*tensors), c.outputs() + around(buffers, sum_events))
