"""Gradients of layer norm and RMS norm: layer_norm_kernel.cu of torch 2.11.

Evidence: event by event of Swin on an H100 (`zoo-swin-f32` of results/scripts).
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
    bytes_of,
    outputs,
    passing,
    temporaries,
)

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

MANY_ROWS = 64 * 1024
"""More rows than this take partial sums, in `LaunchGammaBetaBackwardCUDAKernel`."""

ROWS_PER_BLOCK, MAX_GRID, COLUMNS_PER_BLOCK = 32, 64 * 1024 // 2, 32
"""`rows_per_block_y`, `max_grid_size` and `block_dim_x` of `LaunchGammaBetaBackwardCUDAKernel`."""


def _partial_rows(num_rows: int, width: int, gpu: Gpu) -> int:
    """Rows of a norm's partial weight gradient, 0 where it is added in one pass."""
    if num_rows <= MANY_ROWS or width // COLUMNS_PER_BLOCK >= gpu.num_sms // 2:
        return 0
    blocks = -(-width // COLUMNS_PER_BLOCK)
    return min(MAX_GRID // blocks, -(-num_rows // ROWS_PER_BLOCK))


def _events(args: Args, weights: dict[int, Tensor | None], mask: list[bool], gpu: Gpu) -> Events:
    """Copies, the gradients, and where rows are many and narrow partial sums of those of `weights`,
    which are given by the position of their gradient.

    `LaunchGammaBetaBackwardCUDAKernel` adds blocks of rows for all of them, and then calls `sum(0)`
    for one after the other: each result replaces an output that was allocated before.
    """
    grad, tensor, shape = args[0], args[1], args[2]
    width = prod(shape)
    wanted = {i: w for i, w in weights.items() if mask[i] and w is not None}
    rows = _partial_rows(tensor.numel() // max(1, width), width, gpu)
    of_input, of_weights = contiguous_copy(tensor), {i: bytes_of(w) for i, w in wanted.items()}
    of_grad = contiguous_copy(grad)
    made = outputs({0: bytes_of(tensor)} if mask[0] else {})
    ends = temporaries(*(-n for n in reversed((*of_input, *of_grad))))
    if not rows:
        made += outputs(of_weights) + temporaries(*of_grad)
        return tuple(temporaries(*of_input) + made + ends)
    sums: list[KernelEvent] = []
    parts = []
    for i, weight in wanted.items():
        part = torch.empty((rows, width), dtype=weight.dtype, device="meta")
        parts.append(bytes_of(part))
        sums += outputs({i: of_weights[i]}) + passing(*sum_bytes(part, [0], part.dtype, gpu))
        sums += [KernelEvent(-of_weights[i], OLDEST)]
    made += temporaries(*of_weights.values(), *of_grad, *parts) + sums
    return tuple(temporaries(*of_input) + made + temporaries(*(-n for n in reversed(parts))) + ends)


def layer_norm_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`native_layer_norm_backward`: copies, and partial sums of the gradients of weight and bias,
    one after the other, where rows are many and narrow.
    """
    return _events(args, {1: args[5], 2: args[6]}, list(args[7]), gpu)


def rms_norm_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_fused_rms_norm_backward`: copies, and partial sums of the weight's gradient where rows are
    many and narrow.
    """
    return _events(args, {1: args[4]}, list(args[5]), gpu)


LAYER_NORM_EVENTS: dict[OpOverload, EventsFn] = {
    aten.native_layer_norm_backward.default: layer_norm_backward_events,
    aten._fused_rms_norm_backward.default: rms_norm_backward_events,
}
