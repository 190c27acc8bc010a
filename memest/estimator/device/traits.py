"""What the mode asks of an operator at each call, looked up once.

torch computes the hash of an operator in Python, so a set of operators costs more to ask than the
rest of a lookup; an operator lives as long as the process, so its identity will do.
"""

from __future__ import annotations

from typing import Any

import torch

from memest.estimator.device.in_place import OUT_OF_PLACE_UNDER_A_MODE
from memest.estimator.device.values import READS_VALUE
from memest.estimator.kernels.cublas import MATMULS

aten = torch.ops.aten

IN_THE_LIKENESS = frozenset((
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.full_like.default, aten.rand_like.default, aten.randn_like.default,
    aten.randint_like.default, aten.new_empty.default, aten.new_empty_strided.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
))  # fmt: skip
"""Factories whose argument only says what is made."""

COLLECTIVES = frozenset(("c10d",))
"""Namespaces of the operators through which a `ProcessGroup` sends."""

MAY_MIX_DEVICES = frozenset((
    aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default,
    aten.index_put.default, aten._index_put_impl_.default, aten._unsafe_index.Tensor,
    aten._copy_from.default, aten.set_.source_Tensor, aten.masked_scatter_.default,
    aten._amp_foreach_non_finite_check_and_unscale_.default, aten.repeat_interleave.Tensor,
    aten.lift_fresh.default, aten.set_.source_Storage_storage_offset,
    aten._pack_padded_sequence.default, aten._ctc_loss.default, aten._ctc_loss_backward.default,
))  # fmt: skip
"""Operators that torch lets take tensors of the host beside those of the GPU."""

DEPENDS_ON_VALUES = frozenset((
    aten.masked_scatter_backward.default, aten.nonzero.default, aten.masked_select.default,
    aten.index.Tensor, aten._unique2.default, aten.unique_consecutive.default,
    aten.unique_dim.default, aten.unique_dim_consecutive.default,
    aten.bincount.default, aten.repeat_interleave.Tensor,
))  # fmt: skip
"""Operators whose outputs' shapes are not a function of their inputs' shapes."""


TAKES_INDICES = frozenset((
    aten.index.Tensor, aten.masked_select.default, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default, aten._unsafe_index_put.default,
))  # fmt: skip
"""Operators that look at their indices first; see `indices`."""


_MAY_DROP = frozenset((
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
))  # fmt: skip


def shaping(func: Any, args: tuple[Any, ...]) -> Any:
    """The arguments of one of `DEPENDS_ON_VALUES` whose values decide its output's shape."""
    if func is aten.index.Tensor:
        masks = (torch.bool, torch.uint8)
        return [index for index in args[1] if index is not None and index.dtype in masks]
    return args[1:] if func is aten.masked_select.default else args


class Traits:
    """The traits of one operator."""

    __slots__ = (
        "depends_on_values",
        "func",
        "is_collective",
        "is_matmul",
        "is_mutable",
        "is_random",
        "is_view",
        "makes_alike",
        "may_be_in_place",
        "name",
        "reads_value",
        "returns_nothing",
        "takes_indices",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.func = func  # held, so that its identity stays its own
        self.name = str(func).removesuffix(".default")
        self.is_view: bool = func.is_view
        self.is_mutable: bool = func._schema.is_mutable
        self.returns_nothing = not func._schema.returns
        self.may_be_in_place = func in OUT_OF_PLACE_UNDER_A_MODE
        self.reads_value = func in READS_VALUE
        self.depends_on_values = func in DEPENDS_ON_VALUES
        self.is_matmul = func in MATMULS
        self.is_collective = func.namespace in COLLECTIVES
        self.makes_alike = func in IN_THE_LIKENESS
        self.takes_indices = func in TAKES_INDICES
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags or func in _MAY_DROP


_known: dict[int, Traits] = {}


def traits_of(func: Any) -> Traits:
    """The traits of `func`, one object for all who ask."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = Traits(func)
    return found
