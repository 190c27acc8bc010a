"""Operations that autograd runs in place on a GPU, but out of place under a dispatch mode.

torch calls `isTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) before it writes into a tensor
that it could reuse, and that is true for meta tensors and under any dispatch mode. Families
register operators of formulas with `in_nodes`; `attention.math_attention` adds its mask in place.

Source (torch 2.11): torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`). Evidence: two
allocator recordings of real runs, event by event.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memest.estimator.ops.registry import Args, register
from memest.estimator.ops.strides import is_dense
from memest.estimator.tensors.placement import INSIDE

aten = torch.ops.aten


def in_nodes(
    nodes: str, *, instead: Any = None, more: Args = (),
    is_possible: Callable[..., bool] | None = None,
) -> Callable[[Any, Args], tuple[Any, Args]]:  # fmt: skip
    """Return a rule for an operator that autograd, without a dispatch mode, runs in place.

    The rule gets an operator and its arguments, and returns (operator, arguments) to run instead.
    It changes a call only while an autograd node named in `nodes` (separated by blanks) runs. The
    new operator is `instead`, or the in-place overload if `instead` is None. The new arguments are
    those of the call, followed by `more`. `is_possible(*args)` returns whether the call can run in
    place; if it is None, every call can.
    """
    names = nodes.split()

    def rule(func: Any, args: Args) -> tuple[Any, Args]:
        current = torch._C._current_autograd_node()
        if current is None or current.name() not in names:
            return func, args
        if is_possible is not None and not is_possible(*args):
            return func, args
        packet = getattr(aten, f"{func._schema.name.removeprefix('aten::')}_")
        return instead or getattr(packet, func._overloadname), (*args, *more)

    return rule


def _sum_of_gradients(func: Any, args: Args) -> tuple[Any, Args]:
    """Return (operator, arguments) by which autograd adds two gradients, the tensors in `args`. The
    operator is `aten.add_` if autograd adds in place, else `func`, which is `aten.add`.
    `InputBuffer` adds in place if the first gradient is dense and has no other owner
    (`can_accumulate_inplace`). Sums within the gradient of a Cholesky decomposition and within the
    second gradient of a convolution are out of place. Left out: autograd may add a second gradient
    of the decomposed matrix while `cholesky_backward` runs. This sum counts as out of place, too.
    """
    if torch.is_grad_enabled() or INSIDE.double_backward or not _are_alike(*args):
        return func, args
    node = torch._C._current_autograd_node()
    if node is not None and node.name().startswith("LinalgCholesky"):
        return func, args
    gradient, _ = args
    is_reusable = _owners(gradient) == owners_of_a_sole_gradient() and is_dense(gradient)
    return aten.add_.Tensor if is_reusable else func, args


register("add.Tensor", in_backward=_sum_of_gradients)


def _are_alike(left: Any, right: Any) -> bool:
    """Return whether both summands are meta tensors of the same shape and dtype."""
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return False
    are_meta = left.device.type == right.device.type == "meta"
    return are_meta and left.shape == right.shape and left.dtype == right.dtype


def _owners(tensor: Tensor) -> tuple[int, int]:
    """Return (number of references to `tensor`, number of references to its storage). References
    that this function itself makes are counted, too."""
    storage = tensor.untyped_storage()
    storage_owners = torch._C._storage_Use_Count(storage._cdata)
    return tensor._use_count(), storage_owners  # type: ignore[attr-defined]


@cache
def owners_of_a_sole_gradient() -> tuple[int, int]:
    """Return reference counts, as `_owners`, of a gradient that only autograd's input buffer holds.
    They differ between releases of torch, so a small backward with a sum measures them."""
    watch = _WatchSums()  # type: ignore[no-untyped-call]
    leaf = torch.empty(2, device="meta", requires_grad=True)
    with torch.enable_grad(), watch:
        x = leaf * 2
        ((x * 3).sum() + (x * 5).sum()).backward()  # type: ignore[no-untyped-call]
    return watch.owners


class _WatchSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the `owners` of the first summand in a backward's last sum."""

    owners = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.owners = _owners(args[0])
        return func(*args, **(kwargs or {}))
