"""What CUDA's attention kernels allocate, in the order in which they allocate and free it.

Sources, torch 2.11 (equal in 2.13 where its wheel ships the header):
`flash`: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp; `efficient`:
.../cuda/attention.cu, .../cuda/attention_backward.cu, .../cuda/mem_eff_attention/kernel_backward.h
and kernels/cutlassB.h, cutlassF.h; `cudnn`: aten/src/ATen/native/cudnn/MHA.cpp and
`CompositeSDPABackwardNode` of cudnn_frontend's scaled_dot_product_flash_attention.h.
Left out: nested tensors, deterministic algorithms, batches above 65535.

Shapes: B batch, H query heads, K key heads, L query tokens, S key tokens, E head width, V width
of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.scratch import (
    OLDEST,
    Events,
    EventsFn,
    KernelEvent,
    Scratch,
    bytes_of,
    scratch_of,
)
from memest.estimator.kernels.scratch import outputs as _outputs
from memest.estimator.kernels.scratch import temporaries as _temporary

_aten = torch.ops.aten
_FLOAT_BYTES = 4
_HALF = (torch.float16, torch.bfloat16)

CUDNN_ENGINE_BYTES = 256
"""What cuDNN's own engines ask for on compute capability 9.0, forward and backward.

Measured with cuDNN 9.19 on an H200, the same in every case; no source is public.
"""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The letters of the legend, from tensors laid out as B, heads, tokens, width."""

    B: int
    H: int
    K: int
    L: int
    S: int
    E: int
    V: int
    itemsize: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> _Shape:
        B, H, L, E = query.shape
        return cls(B, H, key.size(1), L, key.size(2), E, value.size(3), query.itemsize)

    @property
    def lse_bytes(self) -> int:
        """One float32 per query token and head."""
        return self.B * self.H * self.L * _FLOAT_BYTES

    @property
    def out_bytes(self) -> int:
        return self.B * self.H * self.L * self.V * self.itemsize


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b


def _argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int, name: str, other: Any
) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, other)


def _tokens_first(tensor: Tensor) -> bool:
    """Whether B, tokens, heads, width is the order in memory, which flash and efficient want."""
    return tensor.transpose(1, 2).is_contiguous()


# --------------------------------------------------------------------------- flash


def flash_forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Events:
    """`mha_fwd`: output, logsumexp, split accumulators, random state (16 bytes), unused (8 bytes).

    With dropout the random state is allocated anew and the first one freed. Keys are split over
    blocks when the queries alone do not fill the GPU (`num_splits_heuristic`, none with dropout);
    each split has a float32 output, of a width rounded up to 32 (64 above 128), and a logsumexp.
    Left out: the layout copies of one query token with grouped heads (generation, not training).
    """
    shape = _Shape.of(*args[:3])
    dropout_p = _argument(args, kwargs, 3, "dropout_p", 0.0)
    splits = 1
    if dropout_p == 0:
        splits = num_flash_splits(B=shape.B, H=shape.H, L=shape.L, S=shape.S, E=shape.E, gpu=gpu)
    accumulators: list[int] = []
    if splits > 1:
        rounded_E = rounded_head_width(shape.E)
        tokens = splits * shape.B * shape.H * shape.L
        accumulators = [tokens * _FLOAT_BYTES, tokens * rounded_E * _FLOAT_BYTES]
    events = _outputs({0: shape.out_bytes, 1: shape.lse_bytes}) + _temporary(*accumulators)
    if dropout_p > 0:
        events += [*_temporary(16), *_outputs({7: 8, 6: 16}), *_temporary(-16)]
    else:
        events += _outputs({6: 16, 7: 8})
    return tuple(events + _temporary(*(-n for n in accumulators)))


def rounded_head_width(E: int) -> int:
    """`head_size_rounded`: the width of flash's float32 buffers."""
    return _round_up(E, 32 if E <= 128 else 64)


def num_flash_splits(*, B: int, H: int, L: int, S: int, E: int, gpu: Gpu) -> int:
    """`set_params_splitkv` and `num_splits_heuristic`: the fewest with 85 % of the best use."""
    block_keys = 256 if E <= 64 else 128 if E <= 128 else 64
    key_blocks = _ceil_div(S, block_keys)
    query_blocks = B * H * _ceil_div(L, 64)
    slots = gpu.num_sms * 2
    if query_blocks >= 0.8 * slots:
        return 1
    uses: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        same_as_fewer = splits > 1 and _ceil_div(key_blocks, splits) == _ceil_div(
            key_blocks, splits - 1
        )
        if not same_as_fewer:
            waves = query_blocks * splits / slots
            uses[splits] = waves / _ceil_div(query_blocks * splits, slots)
    best = max(uses.values(), default=0.0)
    return next((splits for splits, use in uses.items() if use >= 0.85 * best), 1)


def flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Events:
    """`mha_bwd`: contiguous copies, gradients, softmax sums, float32 query gradient.

    Queries are rounded up to 128 tokens and the width as in the forward. Grouped heads add key
    and value gradients of all query heads, summed into the outputs.
    """
    grad_out, query, key, value, output = args[:5]
    shape = _Shape.of(query, key, value)
    copies = [bytes_of(t) for t in (grad_out, output) if not _tokens_first(t)]
    rows = shape.B * shape.H * _round_up(shape.L, 128)
    rounded_E = rounded_head_width(shape.E)
    scratch = [rows * _FLOAT_BYTES, rows * rounded_E * _FLOAT_BYTES]
    if shape.K != shape.H:
        scratch += [shape.B * shape.S * shape.H * shape.E * shape.itemsize] * 2
    gradients = {0: bytes_of(query), 1: bytes_of(key), 2: bytes_of(value)}
    return tuple(
        _temporary(*copies)
        + _outputs(gradients)
        + _temporary(*scratch)
        + _temporary(*(-n for n in reversed(scratch)))
        + _temporary(*(-n for n in reversed(copies)))
    )


# ----------------------------------------------------------------------- efficient


def efficient_forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Events:
    """`_efficient_attention_forward`: output, logsumexp, and a float32 output for wide half heads.

    The logsumexp is padded to 32 tokens, and empty when no gradient is wanted. Above a width of
    128 the output does not fit the registers (`kNeedsOutputAccumulatorBuffer`). Seed and offset
    stay on the CPU.
    """
    query, key, value = args[:3]
    shape = _Shape.of(query, key, value)
    needs_lse = _argument(args, kwargs, 4, "compute_log_sumexp", True)
    lse_bytes = shape.B * shape.H * _round_up(shape.L, 32) * _FLOAT_BYTES if needs_lse else 0
    accumulator = 0
    if query.dtype in _HALF and max(shape.E, shape.V) > 128:
        accumulator = shape.B * shape.L * shape.H * shape.V * _FLOAT_BYTES
    events = _outputs({0: shape.out_bytes, 1: lse_bytes})
    return tuple(events + _temporary(accumulator, -accumulator))


def efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Events:
    """`_efficient_attention_backward`: gradients, row sums of grad_out * out, workspace.

    A bias gradient has rows padded to 16. Half kernels compute the row sums themselves, float32
    ones are preceded by a product, a sum over the width and a transposed copy.
    """
    grad_out, query, key, value, bias = args[:5]
    shape = _Shape.of(query, key, value)
    dropout_p = _argument(args, kwargs, 9, "dropout_p", 0.0)
    block = _efficient_block(query.dtype, max(shape.E, shape.V), dropout_p > 0, gpu)
    copy = 0 if _tokens_first(grad_out) else bytes_of(grad_out)
    gradients = {0: bytes_of(query), 1: bytes_of(key), 2: bytes_of(value)}
    if bias is not None and _argument(args, kwargs, 10, "grad_input_mask", [False] * 4)[3]:
        rows = bias.numel() // bias.size(-1)
        gradients[3] = rows * _round_up(bias.size(-1), 16) * bias.itemsize
    delta_events = _temporary(shape.lse_bytes)
    if not block.sums_rows:
        delta_events = _row_sums(shape)
    workspace = block.workspace_bytes(shape)
    return tuple(
        _temporary(copy)
        + _outputs(gradients)
        + delta_events
        + _temporary(workspace, -shape.lse_bytes, -workspace, -copy)
    )


def _row_sums(shape: _Shape) -> list[KernelEvent]:
    """`(grad_out.float() * out.float()).sum(-1).transpose(-2, -1).contiguous()`, which stays.

    Left out: what the sum itself asks for beyond widths of 1024.
    """
    product = shape.B * shape.L * shape.H * shape.V * _FLOAT_BYTES
    casts = [product, product] if shape.itemsize < _FLOAT_BYTES else []
    sums = shape.lse_bytes
    is_copied = shape.L > 1 and shape.H > 1
    copied = [*_temporary(sums), KernelEvent(-sums, OLDEST)] if is_copied else []
    done = _temporary(-product, *(-n for n in casts))
    return [*_temporary(*casts, product, sums), *copied, *done]


@dataclass(frozen=True, slots=True)
class _EfficientBlock:
    """The tile of a backward kernel (`AttentionBackwardKernel`)."""

    queries: int
    keys: int
    max_width: int
    is_half: bool
    capability: int

    @property
    def keeps_output_in_registers(self) -> bool:
        """`kOutputInRF`."""
        return self.is_half and self.max_width <= self.queries

    @property
    def sums_rows(self) -> bool:
        """`kKernelComputesDelta`; not on 7.0, where the compiler had a bug."""
        return self.is_half and (self.keeps_output_in_registers or self.capability != 70)

    def workspace_bytes(self, shape: _Shape) -> int:
        """`Params::workspace_size`: floats per batch and head, rounded up to 4.

        - query gradient: ceil(L / queries) * ceil(E / keys) * (4 + queries * keys)
        - key gradient, half and not in registers: splits * keys * round_up(E, queries)
        - value gradient, likewise: splits * keys * round_up(V, queries)
        """
        tiles = _ceil_div(shape.L, self.queries) * _ceil_div(shape.E, self.keys)
        floats = tiles * (4 + self.queries * self.keys)
        if self.is_half and not self.keeps_output_in_registers:
            rows = self.key_splits(shape) * self.keys
            floats += rows * (_round_up(shape.E, self.queries) + _round_up(shape.V, self.queries))
        return shape.B * shape.H * _round_up(floats, 4) * _FLOAT_BYTES

    def key_splits(self, shape: _Shape) -> int:
        """The heuristic of `_efficient_attention_backward` where key gradients are staged."""
        heads = shape.B * shape.H
        splits = _ceil_div(shape.S, self.keys)
        if heads >= 256 and splits <= 2:
            splits = 1
        return max(1, min(splits, 200 // heads))


_SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Capabilities with 99 KiB of shared memory per block (CUDA programming guide, table of limits).

From 8.0 on the tiles of 128 queries need 121344 bytes in float32, and those of 128 x 128 need
133632 (bfloat16) to 162304 (float16, dropout) in half precision. All others fit everywhere, on 7.5
as well: at most 54784 bytes of 64 KiB. `sizeof(SharedStorage)` of torch 2.13's kernel_backward.h,
compiled with CUTLASS 4.2.
"""


def _efficient_block(
    dtype: torch.dtype, width: int, has_dropout: bool, gpu: Gpu
) -> _EfficientBlock:
    """The first kernel of `dispatch_cutlassB` that is wide enough and fits the shared memory."""
    is_half = dtype in _HALF
    major, minor = gpu.capability
    is_small = gpu.capability in _SMALL_SHARED_MEMORY
    max_width = 128 if width <= 128 else 65536
    queries, keys = 128, 64
    if width <= 64:
        queries, max_width = 64, 64
    elif is_half and width <= 96 and gpu.capability in ((8, 6), (8, 9)) and not has_dropout:
        max_width = 96
    elif not is_half and (major < 8 or is_small):
        queries = 64
    elif is_half and major >= 8 and width <= 128:
        queries, keys = (64, 64) if is_small else (128, 128)
    return _EfficientBlock(queries, keys, max_width, is_half, major * 10 + minor)


# --------------------------------------------------------------------------- cuDNN


def cudnn_forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Events:
    """`run_cudnn_SDP_fprop`: seed, offset, output, logsumexp if wanted, workspace.

    The workspace is the engine's own (see `CUDNN_ENGINE_BYTES`); none for a single query token.
    """
    shape = _Shape.of(*args[:3])
    needs_lse = _argument(args, kwargs, 4, "compute_log_sumexp", True)
    workspace = _cudnn_engine_bytes(gpu) if shape.L > 1 else 0
    outputs = {6: 8, 7: 8, 0: shape.out_bytes, 1: shape.lse_bytes if needs_lse else 0}
    return tuple(_outputs(outputs) + _temporary(workspace, -workspace))


def cudnn_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Events:
    """`run_cudnn_SDP_bprop`: gradients, a copy of an expanded grad_out, workspace.

    The workspace holds a float32 query gradient, a softmax sum per row, and for grouped heads
    key and value gradients of all query heads:

        B*H*L*E*4 + B*H*L*4 + (K < H) * B*H*S*(E + V)*itemsize + the engine's own
    """
    grad_out, query, key, value = args[:4]
    shape = _Shape.of(query, key, value)
    copy = bytes_of(grad_out) if grad_out.stride(-1) != 1 else 0
    workspace = shape.B * shape.H * shape.L * shape.E * _FLOAT_BYTES + shape.lse_bytes
    for heads, width in ((shape.K, shape.E), (value.size(1), shape.V)):
        if heads != shape.H:
            workspace += shape.B * shape.H * shape.S * width * shape.itemsize
    workspace += _cudnn_engine_bytes(gpu)
    gradients = {0: bytes_of(query), 1: bytes_of(key), 2: bytes_of(value)}
    return tuple(_outputs(gradients) + _temporary(copy, workspace, -workspace, -copy))


def _cudnn_engine_bytes(gpu: Gpu) -> int:
    return CUDNN_ENGINE_BYTES if gpu.capability == (9, 0) else 0


def _cudnn_not_modelled(gpu: Gpu) -> str:
    if gpu.capability == (9, 0):
        return ""
    return "the workspace of cuDNN's attention engines was measured on compute capability 9.0 only"


# ---------------------------------------------------------------------------- math


def safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Events:
    """`_safe_softmax` of transformers/attention.cpp: result, a boolean per element, one per row,
    and a scalar zero.
    """
    dim = _argument(args, kwargs, 1, "dim", -1)
    rows = out.numel() // max(1, out.size(dim))
    scratch = (out.numel(), rows, out.itemsize)
    return tuple(
        _outputs({0: bytes_of(out)})
        + _temporary(*scratch)
        + _temporary(*(-n for n in reversed(scratch)))
    )


ATTENTION_EVENTS: dict[OpOverload, EventsFn] = {
    _aten._scaled_dot_product_flash_attention.default: flash_forward,
    _aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    _aten._scaled_dot_product_cudnn_attention.default: cudnn_forward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    _aten._safe_softmax.default: safe_softmax,
}
"""What each operation asks of the allocator, in order."""


def output_bytes_of(events: Events, out: Any) -> list[int]:
    """Requested bytes of each tensor in `out`, 0 for one that CUDA does not allocate."""
    sizes = {e.output: e.num_bytes for e in events if e.output not in (None, OLDEST)}
    results = out if isinstance(out, list | tuple) else (out,)
    return [sizes.get(i, 0) for i, result in enumerate(results) if isinstance(result, Tensor)]


def _scratch_rule(
    events: EventsFn,
) -> Callable[[tuple[Any, ...], dict[str, Any], Any, Gpu], Scratch]:
    return lambda args, kwargs, out, gpu: scratch_of(events(args, kwargs, out, gpu))


def _output_rule(
    events: EventsFn,
) -> Callable[[tuple[Any, ...], dict[str, Any], Any, Gpu], list[int]]:
    return lambda args, kwargs, out, gpu: output_bytes_of(events(args, kwargs, out, gpu), out)


ATTENTION_SCRATCH = {op: _scratch_rule(events) for op, events in ATTENTION_EVENTS.items()}
"""`scratch_of` each operation's events."""

ATTENTION_OUTPUT_BYTES = {op: _output_rule(events) for op, events in ATTENTION_EVENTS.items()}
"""`output_bytes_of` each operation's events: in the order of the results, not of allocation."""

NOT_MODELLED: dict[OpOverload, Callable[[Gpu], str]] = {
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn_not_modelled,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_not_modelled,
}
"""Why an operation's allocations are not all known on a GPU; empty where they are."""
