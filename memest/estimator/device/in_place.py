"""What autograd does in place on a GPU, and out of place where a dispatch mode looks on.

torch asks `isTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) before it writes into a tensor
that it could reuse, and that is true for meta tensors and under any dispatch mode. A real run is
neither, so the backward pass of a trace would hold a copy of each gradient that is summed. Not
here: `scaled_dot_product_attention` adds its mask so too, which `sdpa.math_attention` writes out.

Sources (torch 2.11): torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`),
torch/csrc/autograd/FunctionsManual.cpp (`index_backward`, `index_select_backward_symint`,
`masked_select_backward`, `value_selecting_reduction_backward_symint`, `take_backward`,
`trace_backward_symint`, `cummaxmin_backward`, `evenly_distribute_backward`,
`binary_cross_entropy_with_logits_backward`) and
aten/src/ATen/native/TensorAdvancedIndexing.cpp (`gather_backward`).
Evidence: two allocator recordings of real runs, event by event.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_SELECTIONS = (
    "TopkBackward0", "SortBackward0", "SortBackward1", "MaxBackward0", "MinBackward0",
    "KthvalueBackward0", "ModeBackward0", "MedianBackward1", "NanmedianBackward1",
)  # fmt: skip
_EXTREMES = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
_BINARY_CROSS_ENTROPY = ("BinaryCrossEntropyWithLogitsBackward0",)
_IN_BACKWARD_OF: dict[Any, tuple[tuple[str, ...], Any, tuple[Any, ...]]] = {
    aten.index_put.default: (("IndexBackward0",), aten._index_put_impl_.default, (True,)),
    aten.scatter_add.default: (
        ("GatherBackward0", "CummaxBackward0", "CumminBackward0"),
        aten.scatter_add_.default,
        (),
    ),
    aten.put.default: (("TakeBackward0",), aten.put_.default, ()),
    aten.index_fill.int_Tensor: (("TraceBackward0",), aten.index_fill_.int_Tensor, ()),
    aten.logical_and.default: (_EXTREMES, aten.logical_and_.default, ()),
    aten.sub.Tensor: (_BINARY_CROSS_ENTROPY, aten.sub_.Tensor, ()),
    aten.mul.Tensor: (_BINARY_CROSS_ENTROPY, aten.mul_.Tensor, ()),
    aten.div.Tensor: (_BINARY_CROSS_ENTROPY, aten.div_.Tensor, ()),
    aten.index_add.default: (("IndexSelectBackward0",), aten.index_add_.default, ()),
    aten.masked_scatter.default: (("MaskedSelectBackward0",), aten.masked_scatter_.default, ()),
    aten.scatter.src: (_SELECTIONS, aten.scatter_.src, ()),
}
"""Operator -> the nodes whose formulas call it, what they call instead, further arguments."""

OUT_OF_PLACE_UNDER_A_MODE = frozenset((aten.add.Tensor, *_IN_BACKWARD_OF))
"""The operators that `as_without_a_mode` looks at."""


def as_without_a_mode(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The operator and arguments that run where no mode is active; mostly those given."""
    if torch._C._current_graph_task_id() == -1:
        return func, args
    is_graph_made = torch.is_grad_enabled()
    if func is aten.add.Tensor:
        is_sum = not kwargs and not is_graph_made and _is_sum_of_gradients(*args)
        is_sum = is_sum and not _is_in_cholesky()
        return (aten.add_.Tensor if is_sum and _can_be_overwritten(args[0]) else func), args
    nodes, in_place, more = _IN_BACKWARD_OF[func]
    current = torch._C._current_autograd_node()
    if kwargs or current is None or current.name() not in nodes:
        return func, args
    if nodes is _BINARY_CROSS_ENTROPY and (is_graph_made or not _holds_result(*args)):
        return func, args
    return in_place, (*args, *more)


def _is_in_cholesky() -> bool:
    """Whether the gradient of a Cholesky decomposition runs, whose formula has a sum of its own
    (`cholesky_backward`, FunctionsManual.cpp); the sum of two such of one matrix is missed.
    """
    node = torch._C._current_autograd_node()
    return node is not None and node.name().startswith("LinalgCholesky")


def _holds_result(left: Tensor, right: Any) -> bool:
    """Whether the result has the shape of `left`; not so where weights of the positives, which stay
    as they are, meet a target that has more dimensions.
    """
    if not isinstance(right, Tensor):
        return True
    return left.dim() >= right.dim() and left.shape == torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        left.shape, right.shape
    )


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
    return _owners(gradient) == owners_of_a_sole_gradient() and bool(
        aten.is_non_overlapping_and_dense.default(gradient)
    )


def _owners(tensor: Tensor) -> tuple[int, int]:
    """How often the tensor and its storage are held, this call's own holds included."""
    storage = tensor.untyped_storage()
    held = torch._C._storage_Use_Count(storage._cdata)
    return tensor._use_count(), held  # type: ignore[attr-defined]


@cache
def owners_of_a_sole_gradient() -> tuple[int, int]:
    """`_owners` of a gradient that the input buffer alone holds, as a dispatch mode sees it.

    The way through Python adds holds of its own, whose number differs between releases of torch;
    it is read off a graph in which the gradient of `x` is the sum of two fresh products.
    """
    watch = _WatchSums()  # type: ignore[no-untyped-call]
    leaf = torch.empty(2, device="meta", requires_grad=True)
    with torch.enable_grad(), watch:
        x = leaf * 2
        ((x * 3).sum() + (x * 5).sum()).backward()  # type: ignore[no-untyped-call]
    return watch.owners


class _WatchSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what `_owners` says at the sum of gradients."""

    owners = (0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would otherwise import its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.owners = _owners(args[0])
        return func(*args, **(kwargs or {}))
