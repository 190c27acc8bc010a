"""What autograd does in place on a GPU, and out of place where a dispatch mode looks on.

torch asks `isTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) before it writes into a tensor
that it could reuse, and that is true for meta tensors and under any dispatch mode. A real run is
neither, so the backward pass of a trace would hold a copy of each gradient that is summed.
Not here: `scaled_dot_product_attention` adds its mask so too, which `sdpa.math_attention` writes out.

Sources (torch 2.11): torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`) and
torch/csrc/autograd/FunctionsManual.cpp (`index_backward`, `index_select_backward_symint`),
aten/src/ATen/native/TensorAdvancedIndexing.cpp (`gather_backward`).
Evidence: two allocator recordings of real runs, event by event.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

HELD_ONCE = 4
"""`Tensor._use_count()` of an argument of `__torch_dispatch__` that one owner holds (torch 2.13)."""

STORED_ONCE = 2
"""The same of its storage: the tensor, and the Python object through which we ask."""

_IN_BACKWARD_OF = {
    aten.index_put.default: ("IndexBackward0", aten._index_put_impl_.default, (True,)),
    aten.scatter_add.default: ("GatherBackward0", aten.scatter_add_.default, ()),
    aten.index_add.default: ("IndexSelectBackward0", aten.index_add_.default, ()),
}
"""Operator -> the node whose formula calls it, what it calls instead, further arguments."""

OUT_OF_PLACE_UNDER_A_MODE = frozenset((aten.add.Tensor, *_IN_BACKWARD_OF))
"""The operators that `as_without_a_mode` looks at."""


def as_without_a_mode(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The operator and arguments that run where no mode is active; mostly those given."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():  # type: ignore[attr-defined]
        return func, args
    if func is aten.add.Tensor:
        if not kwargs and _is_sum_of_gradients(*args) and _can_be_overwritten(args[0]):
            return aten.add_.Tensor, args
        return func, args
    node, in_place, more = _IN_BACKWARD_OF[func]
    current = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if kwargs or current is None or current.name() != node:
        return func, args
    return in_place, (*args, *more)


def _is_sum_of_gradients(left: Any, right: Any) -> bool:
    """Whether `left + right` looks like one of `InputBuffer`: two gradients of one tensor."""
    return (
        isinstance(left, Tensor)
        and isinstance(right, Tensor)
        and left.device.type == right.device.type == "meta"
        and left.shape == right.shape
        and left.dtype == right.dtype
    )


def _can_be_overwritten(gradient: Tensor) -> bool:
    """`can_accumulate_inplace`: dense, and nobody else holds the tensor or its storage."""
    storage = gradient.untyped_storage()
    return (
        gradient._use_count() == HELD_ONCE  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(storage._cdata) == STORED_ONCE  # type: ignore[attr-defined]
        and torch.ops.aten.is_non_overlapping_and_dense.default(gradient)
    )
