"""Which attention kernel CUDA runs, and the operations around it.

Mirrors `scaled_dot_product_attention` of aten/src/ATen/native/transformers/attention.cpp and
`select_sdp_backend` of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, both of torch 2.11,
as they treat CUDA tensors; the tensors here live on the meta device.

Shapes: B batch, H heads, L query tokens, S key tokens, E head width of query and key.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)
"""The last compute capability that the fused kernels accept (`sm121` in the source)."""


class SdpaBackend(enum.Enum):
    """The kernels, with the integers that `torch._fused_sdp_choice` returns for them."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaRules:
    """What the choice depends on beside tensors and GPU: the build of torch that will run."""

    cudnn_version: int
    """As `torch.backends.cudnn.version()` gives it, such as 91900."""

    dropout_in_sixteenths: bool
    """cuDNN is refused when the dropout probability is not a multiple of 1/16."""


TORCH_2_11 = SdpaRules(cudnn_version=91900, dropout_in_sixteenths=False)
"""torch 2.11 for CUDA 13. Evidence: 368 of 368 choices on an H200."""

TORCH_2_13 = SdpaRules(cudnn_version=91900, dropout_in_sixteenths=True)
"""torch 2.13: adds github.com/pytorch/pytorch/pull/174245. Read in the source, not measured."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one call; `sdp_params` in the source."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    gpu: Gpu
    rules: SdpaRules

    @property
    def needs_grad(self) -> bool:
        """`input_requires_grad`: the mask does not count."""
        return torch.is_grad_enabled() and any(
            t.requires_grad for t in (self.query, self.key, self.value)
        )


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    gpu: Gpu,
    rules: SdpaRules = TORCH_2_11,
) -> SdpaBackend:
    """The backend that `_fused_sdp_choice` picks for CUDA tensors with this metadata.

    Order (`priority_order`): flash, efficient, math; with cuDNN in front where
    `check_prefer_cudnn_attention` says so: compute capability 9.x or 10.x and cuDNN > 9.15
    (the wheels for CUDA 12 ship an older one). The user's switches
    (`torch.nn.attention.sdpa_kernel`, deterministic algorithms) and the grad mode are read from
    the process, as torch reads them.
    Left out: nested tensors, FlashAttention 3 and ROCm, the refusal of misaligned storage offsets
    that a later torch adds for `EFFICIENT`, a user-set priority order.
    """
    call = _Call(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, gpu, rules
    )  # fmt: skip
    prefers_cudnn = rules.cudnn_version > 91500 and gpu.capability[0] in (9, 10)
    if prefers_cudnn and _can_use_cudnn(call):
        return SdpaBackend.CUDNN
    if _can_use_flash(call):
        return SdpaBackend.FLASH
    if _can_use_efficient(call):
        return SdpaBackend.EFFICIENT
    return SdpaBackend.MATH


def _can_use_cudnn(call: _Call) -> bool:
    """`can_use_cudnn_attention`."""
    deterministic = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    sixteenths = call.dropout_p * 16
    return (
        torch._C._get_cudnn_sdp_enabled()
        and not deterministic
        and _is_4d(call)
        and _dtypes_agree(call, _HALF)
        and _cudnn_takes_mask(call)
        and (8, 0) <= call.gpu.capability <= _NEWEST
        and not (call.rules.dropout_in_sixteenths and sixteenths != math.floor(sixteenths))
        and not (call.dropout_p > 0 and 91100 < call.rules.cudnn_version < 91400)
        and _has_tokens(call)
        and _last_strides_are_1(call, ignore_width_1=True)
        and _heads_agree(call, supports_gqa=True, same_kv_heads=False)
        and _cudnn_takes_shapes(call)
    )


def _can_use_flash(call: _Call) -> bool:
    """`can_use_flash_attention`."""
    if not (torch._C._get_flash_sdp_enabled() and _is_4d(call) and call.attn_mask is None):
        return False
    head_dim = call.query.size(-1)
    # check_head_dim_size_flash
    if not (head_dim == call.key.size(-1) == call.value.size(-1) and head_dim <= 256):
        return False
    if not (8, 0) <= call.gpu.capability <= _NEWEST:  # check_flash_attention_hardware_support
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    capability = call.gpu.capability
    small_shared_memory = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    untrainable = 192 < head_dim <= 224 or (head_dim > 224 and call.dropout_p > 0)
    if small_shared_memory and call.needs_grad and untrainable:
        return False
    # check_flash_causal_non_square_seqlens
    if call.is_causal and call.query.size(-2) != call.key.size(-2):
        return False
    return (
        _dtypes_agree(call, _HALF)
        and _heads_agree(call, supports_gqa=True, same_kv_heads=True)
        and _has_tokens(call)
        and _last_strides_are_1(call, ignore_width_1=True)
    )


def _can_use_efficient(call: _Call) -> bool:
    """`can_use_mem_efficient_attention`; any head width that the GEMM's alignment divides."""
    is_ampere = call.gpu.capability >= (8, 0)
    dtypes = (torch.float16, torch.float32, torch.bfloat16) if is_ampere else (
        torch.float16, torch.float32,
    )  # fmt: skip
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        and (5, 0) <= call.gpu.capability <= _NEWEST
        and _is_4d(call)
        and _efficient_takes_head_dims(call)
        and _has_tokens(call)
        and _last_strides_are_1(call, ignore_width_1=False)
        and _heads_agree(call, supports_gqa=False, same_kv_heads=True)
        and _dtypes_agree(call, dtypes)
    )


def _efficient_takes_head_dims(call: _Call) -> bool:
    """`check_head_dim_size_mem_efficient` with `minimum_gemm_alignment`: 8 half, 4 float32.

    Compute capability 7.x has tensor cores for half only, and no minimum otherwise.
    """
    is_half = call.query.dtype in _HALF
    major = call.gpu.capability[0]
    alignment = 4 if major >= 8 else 1
    if major >= 8 or (major == 7 and is_half):
        alignment = max(alignment, 8 if is_half else 4)
    head_dim, value_dim = call.query.size(-1), call.value.size(-1)
    return (
        head_dim == call.key.size(-1)
        and head_dim > 0
        and value_dim > 0
        and head_dim % alignment == 0
        and value_dim % alignment == 0
    )


def _cudnn_takes_shapes(call: _Call) -> bool:
    """`check_cudnn_tensor_shapes`, for cuDNN 9."""
    head_dim, value_dim = call.query.size(3), call.value.size(3)
    limit = 128
    if call.rules.cudnn_version >= 91000 and call.gpu.capability == (9, 0):
        limit = 256
    if call.rules.cudnn_version >= 91100 and call.gpu.capability[0] == 10:
        limit = 192 if (head_dim, value_dim) == (192, 128) else limit
    return (
        head_dim <= limit
        and value_dim <= limit
        and head_dim % 8 == 0
        and value_dim % 8 == 0
        and call.key.size(2) != 1
        and not (call.query.size(2) == 1 and call.dropout_p != 0)
    )


def _cudnn_takes_mask(call: _Call) -> bool:
    """`check_attn_mask_shape`: no gradient, and broadcastable from 2 or 4 dimensions."""
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))
    return all(
        size in (1, target) for size, target in zip(mask.shape, wanted[-mask.dim() :], strict=True)
    )


def _is_4d(call: _Call) -> bool:
    """`check_tensor_shapes`."""
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _has_tokens(call: _Call) -> bool:
    """`check_nonzero_sequence_lengths_dense`."""
    return call.query.size(-2) != 0 and call.key.size(-2) != 0


def _dtypes_agree(call: _Call, allowed: tuple[torch.dtype, ...]) -> bool:
    """`check_tensor_dtype`, with half precision of capability 7.x being float16 only."""
    if call.gpu.capability < (8, 0) and call.query.dtype == torch.bfloat16:
        return False
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in allowed


def _last_strides_are_1(call: _Call, *, ignore_width_1: bool) -> bool:
    """`check_last_dim_stride_equals_1_dense`, for the mask too."""
    strides = all(t.stride(-1) == 1 for t in (call.query, call.key, call.value))
    if ignore_width_1:
        strides = strides or call.query.size(-1) == 1
    return strides and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)


def _heads_agree(call: _Call, *, supports_gqa: bool, same_kv_heads: bool) -> bool:
    """`check_batch_size_and_num_heads_dense` and `check_grouped_query_attention`."""
    if not call.query.size(0) == call.key.size(0) == call.value.size(0):
        return False
    query_heads, key_heads, value_heads = (t.size(-3) for t in (call.query, call.key, call.value))
    if call.enable_gqa and supports_gqa:
        if same_kv_heads and key_heads != value_heads:
            return False
        return query_heads % key_heads == 0 and query_heads % value_heads == 0
    return query_heads == key_heads == value_heads


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    gpu: Gpu,
    rules: SdpaRules = TORCH_2_11,
) -> Tensor:
    """Attention through the operations that CUDA tensors would go through on `gpu`.

    Made to stand above autograd, as a kernel of `aten::scaled_dot_product_attention`: what it
    calls is recorded by autograd and seen by a dispatch mode, one operation for one.
    """
    backend = choose_backend(
        query, key, value, attn_mask, dropout_p, is_causal,
        enable_gqa=enable_gqa, gpu=gpu, rules=rules,
    )  # fmt: skip
    # cuDNN does not take minus infinity (`convert_boolean_attn_mask_cudnn`, gone in later torch).
    masked_out = -65504.0 if backend is SdpaBackend.CUDNN else -math.inf
    attn_mask = _additive_mask(attn_mask, query.dtype, masked_out)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if backend is SdpaBackend.CUDNN:
        return _first([*_aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, attn_mask, needs_grad, dropout_p, is_causal, False, scale=scale
        )])  # fmt: skip
    if backend is SdpaBackend.FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend is SdpaBackend.EFFICIENT:
        if attn_mask is not None:
            attn_mask = _aligned_mask(attn_mask, query, key)
        return _first(
            [
                *_aten._scaled_dot_product_efficient_attention.default(
                    query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
                )
            ]
        )
    return math_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _first(results: list[Tensor]) -> Tensor:
    """The first result; the others are dropped in their order, as a `std::tuple` drops them.

    Autograd keeps most of them; under checkpointing it does not.
    """
    while len(results) > 1:
        results.pop(1)
    return results[0]


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Heads padded to a multiple of 8, scaled by the true width, and the padding sliced off."""
    head_dim = query.size(-1)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    padding = -head_dim % 8
    if padding:
        query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value))
    out = _first(
        [
            *_aten._scaled_dot_product_flash_attention.default(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )
        ]
    )
    return _aten.slice.Tensor(out, -1, 0, head_dim) if padding else out


def _additive_mask(
    mask: Tensor | None, dtype: torch.dtype, masked_out: float = -math.inf
) -> Tensor | None:
    """`convert_boolean_attn_mask`: 0 where a boolean mask is true, `masked_out` elsewhere."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    converted: Tensor = _aten.where.ScalarSelf(
        mask, 0.0, _aten.scalar_tensor.default(masked_out, dtype=dtype, device=mask.device)
    )
    return converted


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """`preprocess_mask`: rows that start at multiples of 8 elements, then expanded to B, H, L, S.

    A mask whose strides are not multiples of 8 is copied into a padded one and sliced back; the
    padding is 1 to 8 elements, so an aligned width with an odd stride elsewhere grows by 8.
    """
    aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    if not aligned:
        width = mask.size(-1)
        padded = torch.nn.functional.pad(mask, (0, 8 - width % 8))
        mask = _aten.slice.Tensor(padded, -1, 0, width)
        del padded
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """`_scaled_dot_product_attention_math`, written out.

    Half precision is computed in float32 (`allow_fp16_bf16_reduction_math_sdp` off). Not the
    operation itself, because that adds the mask out of place whenever a dispatch mode is active
    (`areAnyTensorSubclassLike`), while a real run adds it in place: one B x H x L x S buffer less.
    Every name below lives until the end, as its namesake does in the source, and the last to be
    declared goes first.
    """
    dtype = query.dtype
    query_acc, key_acc, value_acc = query, key, value
    if dtype in _HALF and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query_acc, key_acc, value_acc = query.float(), key.float(), value.float()
    factor = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else abs(scale))
    scaled = _aten.mul.Scalar(query_acc, -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        lower = _aten.ones.default(
            [query.size(-2), key.size(-2)],
            dtype=torch.bool,
            layout=torch.strided,
            device=query.device,
        ).tril()
        attn_mask = _additive_mask(lower, query_acc.dtype)
        del lower
    all_keys, all_values = key_acc, value_acc
    if enable_gqa and not query.size(-3) == key.size(-3) == value.size(-3):
        all_keys = key_acc.repeat_interleave(query.size(-3) // key.size(-3), -3)
        all_values = value_acc.repeat_interleave(query.size(-3) // value.size(-3), -3)
    attn = torch.matmul(scaled, _aten.mul.Scalar(all_keys.transpose(-2, -1), factor))
    if attn_mask is not None:
        attn.add_(attn_mask)
    attn = _aten._safe_softmax.default(attn, -1)
    if dropout_p > 0:
        attn = torch.dropout(attn, dropout_p, True)
    # The weights are a second result, converted before the output is computed, and dropped here.
    weights = attn.to(dtype)
    out = torch.matmul(attn, all_values).to(dtype)
    del weights, attn, all_keys, all_values, scaled, attn_mask, value_acc, key_acc, query_acc
    return out
