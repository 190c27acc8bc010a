"""Memory of the kernels of the package `flash_attn`, in order.

Source: flash-attn 2.8.3, csrc/flash_attn/flash_api.cpp (`mha_fwd`, `mha_varlen_fwd`, `mha_bwd`,
`mha_varlen_bwd`). `flash_attn_interface.py` copies tensors with a stride in the last dimension.
Left out: a single query token whose heads are not contiguous.

Shapes: B batch, L query tokens, S key tokens, N tokens of all rows without padding, H query heads,
K key heads. E is the head width, a multiple of 8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memest.errors import PlanError
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.attention import num_flash_splits, rounded_head_width
from memest.estimator.ops.reductions import sum_bytes
from memest.estimator.ops.registry import Args, Kwargs, requests
from memest.estimator.ops.temporaries import Events, around, outputs, passing
from memest.models_meta.flash_attention import BACKWARD, FORWARD
from memest.plan.values import FLASH_ATTENTION_2
from memest.units import ceil_div

_FLOAT_BYTES = 4
_BLOCK = 128
OLDEST = (8, 0)
"""`FlashAttention only supports Ampere GPUs or newer`."""


def check_gpu(gpu: Gpu) -> None:
    """Check that the package runs on `gpu`.

    Raises:
    PlanError: the GPU is too old.
    """
    if gpu.capability < OLDEST:
        major, minor = gpu.capability
        raise PlanError(
            f"`{FLASH_ATTENTION_2}` needs compute capability 8.0 (Ampere) or newer, "
            f"not {major}.{minor}",
            hint="use `sdpa`, or another GPU",
        )


def _copies(*tensors: Tensor) -> list[int]:
    """`maybe_contiguous`: of what has another last stride than 1; dropped when the op returns."""
    return [tensor.nbytes for tensor in tensors if tensor.stride(-1) != 1]


@requests(FORWARD)
def forward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Output, logsumexp, split accumulators, random state (16 bytes).

    The logsumexp has 4 * B * H * L bytes, or 4 * H * N. Keys are split like torch's
    (`num_flash_splits`), without dropout. Texts of unlike length are split only for a lone query
    token with grouped heads (`seqlenq_ngroups_swapped`).
    """
    query, key, value, cu_seqlens, L, S, dropout_p, is_windowed = args
    H, E = query.shape[-2:]
    K = key.shape[-2]
    copies = _copies(query, key, value)
    is_swapped = L == 1 and H > K and not is_windowed and dropout_p == 0
    accumulators: list[int] = []
    if dropout_p == 0 and (cu_seqlens is None or is_swapped):
        B = query.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        if is_swapped:
            H, L = K, H // K
        splits = num_flash_splits(B=B, H=H, L=L, S=S, E=E, gpu=gpu)
        if splits > 1:
            rows = splits * B * H * L
            accumulators = [rows * _FLOAT_BYTES, rows * rounded_head_width(E) * _FLOAT_BYTES]
    made = outputs({0: out[0].nbytes, 1: out[1].nbytes})
    return around(copies, made + around(accumulators, outputs({2: out[2].nbytes})))


@requests(BACKWARD)
def backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Row sums, a float32 query gradient, key and value gradients of all query heads.

    The gradients themselves are made before. With L' = L rounded up to 128 for each of B rows, or
    N + 128 * B in all, and E' = E rounded up to 32 (to 64 above 128):

        4 * L' * H                    row sums, the result, which the caller drops
        4 * L' * H * E' * splits      splits: 1, or deterministic, ceil(SMs / (B * H))
        2 * itemsize * S * H * E      where K < H, then each is summed over its group
    """
    query, key = args[1:3]
    cu_seqlens, deterministic = args[9:11]
    copies = _copies(*args[:5])
    H, E = query.shape[-2:]
    B = query.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    rows = out.numel() // H
    accumulated = rows * H * rounded_head_width(E) * _FLOAT_BYTES
    if deterministic:
        accumulated *= ceil_div(gpu.num_sms, B * H)
    expanded, sums = _expanded(key, H, gpu)
    summed = around([accumulated, *expanded], passing(*sums) * len(expanded))
    return around(copies, outputs({0: out.nbytes}) + summed)


def _expanded(key: Tensor, H: int, gpu: Gpu) -> tuple[list[int], list[int]]:
    """Make gradients of key and value per query head, and the memory of summing one."""
    K, E = key.shape[-2:]
    if K == H:
        return [], []
    shape = (*key.shape[:-2], K, H // K, E)
    groups = torch.empty(shape, dtype=key.dtype, device="meta")
    summing = list(sum_bytes(groups, [groups.dim() - 2], key.dtype, gpu))
    return [groups.nbytes] * 2, summing
