"""Sparse tensors in coordinate format (COO), of which torch's meta device knows the shape alone.

Which calls are about them; what those do is in `sparse_rules`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.cuda_semantics import decisions_again
from memest.estimator.device.layouts import refused
from memest.estimator.device.patches import Patches
from memest.estimator.device.sparse_rules import FROM_PARTS, RULES, is_sparse
from memest.estimator.device.tensors import INSIDE, Place, few_tensors, is_meta
from memest.estimator.device.traits import traits_of

aten = torch.ops.aten

_FROM_DENSE = frozenset((FROM_PARTS, aten._to_sparse.default))
_ON_HOST_TOO = frozenset((FROM_PARTS, aten.addmm.default, aten._sparse_addmm.default))
_MAKERS = frozenset(
    map(id, (*_FROM_DENSE, aten._embedding_bag_backward.default, aten._to_copy.default))
)
"""Operators by which a sparse tensor comes to the card, by identity, as in `traits`."""


class SparseTensors:
    """What a mode knows of the sparse tensors of its card."""

    def __init__(self, mode: Any) -> None:
        self.distinct: set[int | None] = set()
        """Storages of indices of which it is known that no two are alike."""

        self._mode = mode
        self._is_any = False

    def concerns(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `func` takes or makes a sparse tensor of the card.

        Raises:
            UnsupportedError: it does, and what it does is not known.
        """
        if not self._is_any and id(func) not in _MAKERS:
            return False
        tensors, mode = few_tensors(args, kwargs), self._mode
        if func is aten._embedding_bag_backward.default:
            is_one = bool(args[9])
        elif func in _FROM_DENSE:
            is_one = True
        else:
            is_one = any(map(is_sparse, tensors))
        if not is_one:
            return False
        target, places = getattr(kwargs.get("device"), "type", ""), map(mode.host.place, tensors)
        found = set(places)
        if target != "cuda" and Place.CARD not in found:
            return func in _ON_HOST_TOO and Place.HOST in found
        if func in RULES:
            return True
        if traits_of(func).is_view:  # of the parts
            return False
        raise refused(func, "sparse_coo", mode.attribution.lines.current())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` makes; its requests are recorded."""
        self._is_any = True
        depth, INSIDE.depth = INSIDE.depth, 0
        try:
            with self._mode, torch.no_grad(), decisions_again():
                return RULES[func](self._mode, *args, **kwargs)
        except NotImplementedError as error:
            if error.args:
                raise
            raise refused(func, "sparse_coo", self._mode.attribution.lines.current()) from None
        finally:
            INSIDE.depth = depth


def install(patches: Patches) -> None:
    """Let `grad.new(indices, values, shape)`, as optimizers write it, know the card."""
    new = torch.Tensor.new

    def made_anew(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_sparse(tensor) and is_meta(tensor) and args and isinstance(args[0], Tensor):
            return torch.sparse_coo_tensor(*args, **kwargs, check_invariants=False)
        return new(tensor, *args, **kwargs)

    patches.set(torch.Tensor, "new", made_anew)
