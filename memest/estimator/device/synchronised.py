"""The results of `SyncBatchNorm`'s operators, of which torch's meta device knows none.

Source (torch 2.11): aten/src/ATen/native/cuda/Normalization.cu; recorded under DDP on two H100s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _statistics(tensor: Tensor) -> Tensor:
    """A number for each channel, of float32 or wider."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.empty(tensor.shape[1], dtype=dtype, device="meta")


def _batch_norm_stats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return _statistics(args[0]), _statistics(args[0])


def _batch_norm_sums(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The sums that its gradient needs, and the gradients of weight and bias."""
    _, tensor, _, _, weight, _, of_weight, of_bias = args
    made = torch.empty_like if weight is not None else None
    return (
        _statistics(tensor),
        _statistics(tensor),
        made(weight) if made and of_weight else None,
        made(weight) if made and of_bias else None,
    )


def _like_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return torch.empty_like(args[0])


def _like_saved_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return torch.empty_like(args[1])


MADE_HERE: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.batch_norm_stats.default: _batch_norm_stats,
    aten.batch_norm_gather_stats_with_counts.default: _batch_norm_stats,
    aten.batch_norm_elemt.default: _like_input,
    aten.batch_norm_backward_reduce.default: _batch_norm_sums,
    aten.batch_norm_backward_elemt.default: _like_saved_input,
}
"""Operator -> its results as meta tensors, from `(args, kwargs)`."""
