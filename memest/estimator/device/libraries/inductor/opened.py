"""Objects that hold tensors, taken apart and put together again.

pytree knows containers, and what libraries have told it of; of other objects, such as a cache of
keys and values, the attributes are looked into.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

DEPTH = 6
"""Objects within objects that are looked into."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, nn.Module)


class _Slot:
    """Where a tensor was."""


_SLOT = _Slot()


class Opened:
    """What is left of a value without its tensors."""

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        self._template = self._open(value, DEPTH)

    def fill(self, tensors: Iterator[Tensor]) -> Any:
        """The value again, with other tensors."""
        return self._fill(self._template, tensors)

    def _open(self, value: Any, depth: int) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        return spec, [self._leaf(leaf, depth) for leaf in leaves]

    def _leaf(self, leaf: Any, depth: int) -> Any:
        if isinstance(leaf, Tensor):
            self.tensors.append(leaf)
            return _SLOT
        if isinstance(leaf, _PLAIN) or not depth or not hasattr(leaf, "__dict__"):
            return (leaf, None)
        count = len(self.tensors)
        attributes = {k: self._open(v, depth - 1) for k, v in vars(leaf).items()}
        return (leaf, attributes if len(self.tensors) > count else None)

    def _fill(self, template: Any, tensors: Iterator[Tensor]) -> Any:
        spec, parts = template
        return pytree.tree_unflatten([self._part(part, tensors) for part in parts], spec)

    def _part(self, part: Any, tensors: Iterator[Tensor]) -> Any:
        if part is _SLOT:
            return next(tensors)
        leaf, attributes = part
        if attributes is None:
            return leaf
        made = copy.copy(leaf)
        for name, inside in attributes.items():
            vars(made)[name] = self._fill(inside, tensors)
        return made
