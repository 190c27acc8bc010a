"""Assumed values: what decides a shape where nothing is known.

A router decides which tokens an expert gets, and a threshold which boxes pass. Shapes follow from
such values, which the simulated GPU does not have. So they are assumed. A choice among few options
takes each of them equally often, as the routers of mixtures of experts are trained to do. A
comparison in size passes for all elements. Other results are as large as they can be. Each is
counted as a guess with its line, and `--strict` refuses it. What a script reads is in `guesses`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.guesses import Guesses
from memest.estimator.device.tensors import META, storage_key, tensors_in
from memest.estimator.device.traits import shaping
from memest.estimator.device.values import KnownValues, materialise

aten = torch.ops.aten

MAX_CHOICES = 1024
"""A choice among more is a token of a vocabulary, and is left unknown."""

_IN_ORDER = frozenset((aten.sort.default, aten.sort.stable))
_CHOICES = frozenset(map(id, (
    *_IN_ORDER, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
    aten.topk.default, aten.multinomial.default,
)))  # fmt: skip
_BY_SIZE = frozenset(map(id, (
    aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar,
    aten.gt.Tensor, aten.ge.Tensor, aten.lt.Tensor, aten.le.Tensor,
)))  # fmt: skip
"""Comparisons in size, by identity as in `traits`: this is looked up for each operator."""

EVENLY = (
    "how large some results are hangs on values that nobody knows: choices, such as those of a "
    "router between experts, are spread evenly, and what is compared in size passes"
)
LARGEST = (
    "how large some results are hangs on values that nobody knows: they are as large as they can be"
)
MAX_COMPARED = 1 << 20
"""A larger comparison is not followed; what it selects is as large as it can be."""


class AssumedValues:
    """Values that are assumed, in a layer above those that are known.

    Args:
        known: the values that are known.
        guesses: counts each use of an assumption.
    """

    def __init__(self, known: KnownValues, guesses: Guesses) -> None:
        self._known = known
        self._layer = KnownValues(below=known)
        self._guesses = guesses

    def told(self, tensor: Tensor) -> Tensor | None:
        """Assumed value of `tensor`, or None where none is assumed."""
        return self._layer.value_of(tensor) if self._layer.holds(tensor) else None

    def read(self, func: Any, tensor: Tensor) -> Any:
        """Return the assumed number that a script reads from `tensor`; None where none is assumed.

        The number counts as a guess. Whether anything has passed a threshold is left to `guesses`,
        which says no: values above it are rare.
        """
        told = self.told(tensor)
        if told is None or func not in (aten._local_scalar_dense.default, aten.is_nonzero.default):
            return None
        if tensor.dtype is torch.bool and self._layer.is_guessed([tensor]):
            return None
        self._guesses.note("a choice, spread evenly")
        return told.item()

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the assumed result of an operator of `DEPENDS_ON_VALUES`, on meta.

        The assumption counts as a guess. None where the shape is known, or has no bound.
        """
        deciding = list(tensors_in((shaping(func, args),)))
        if func is aten.masked_scatter_backward.default:  # the sizes are among its arguments
            return None
        if all(map(self._known.decides, deciding)):
            return None
        is_assumed = all(map(self._layer.is_known, deciding))
        if is_assumed:
            made = materialise(self._layer.compute(func, args, kwargs))
        else:
            made = largest(func, args, kwargs)
        if made is not None:
            first = next(tensors_in((made,)))
            name = func._schema.name.removeprefix("aten::")
            self._guesses.note(f"{name} as {len(first)} of {deciding[0].numel()} elements")
            self._guesses.notes.add(EVENLY if is_assumed else LARGEST)
        return made

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Assume the result of a choice or comparison, and compute what follows from assumptions.

        Call it before the known values follow the same call.
        """
        layer = self._layer
        if id(func) in _CHOICES:
            if not self._known.is_known(args[0]):
                chosen = out[-1] if isinstance(out, tuple | list) else out
                self._choose(func, args, kwargs, chosen)
        elif id(func) in _BY_SIZE and not all(map(layer.is_known, tensors_in(args))):
            if 1 < out.numel() <= MAX_COMPARED:
                layer.adopt_guess(out, torch.ones(out.shape, dtype=torch.bool))
            return
        if layer and any(map(layer.holds, tensors_in((*args, *kwargs.values())))):
            first = args[0]
            if func._schema.is_mutable and isinstance(first, Tensor):
                self._copy_up(first)
            layer.follow(func, args, kwargs, out)

    def _copy_up(self, tensor: Tensor) -> None:
        """Copy the known storage of `tensor` into the layer, before an operator writes to it."""
        key = storage_key(tensor)
        known = self._known.storage_of(key)
        if known is not None and not self._layer.holds(tensor):
            self._layer.set_storage(key, known.clone())  # type: ignore[no-untyped-call]

    def _choose(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        source = args[0]
        dim = _dim_of_choice(func, args, kwargs)
        if dim is None or not source.dim() or not self._layer.may_hold(out):
            return
        num_choices, is_kept = source.size(dim), out.dim() == source.dim()
        if func in _IN_ORDER:
            numbers = torch.arange(num_choices).expand(source.movedim(dim, -1).shape)
        elif num_choices > MAX_CHOICES:
            return
        else:
            shape = out.movedim(dim, -1).shape if is_kept else (*out.shape, 1)
            numbers = torch.arange(out.numel()).remainder_(num_choices).view(shape)
        self._layer.adopt_like(out, numbers.movedim(-1, dim) if is_kept else numbers.squeeze(-1))


def _dim_of_choice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Dimension of the choice, or None for a choice among all elements."""
    if func is aten.multinomial.default:
        return -1
    is_of_one = func in (aten.argmax.default, aten.argmin.default)
    place = 2 if func is aten.topk.default else 1
    is_given = func is not aten.sort.stable and len(args) > place
    found: int | None = args[place] if is_given else kwargs.get("dim", None if is_of_one else -1)
    return found


def largest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the largest result of an operator of `DEPENDS_ON_VALUES`, on meta.

    None where it has no bound.
    """
    source: Tensor = args[0]
    size = source.numel()

    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=META)

    if func is aten.nonzero.default:
        return whole(source.dim(), size).t()
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return whole(kwargs["output_size"])
    if func in _UNIQUE:
        given = dict(zip(_UNIQUE[func], args[1:], strict=False)) | kwargs
        dim = given.get("dim")
        rows = size if dim is None else source.size(dim)
        kept = source.new_empty(rows) if dim is None else torch.empty_like(source)
        shape = source.shape if dim is None else (rows,)
        inverse = whole(*shape if given.get("return_inverse") else (0,))
        return kept, inverse, whole(rows if given.get("return_counts") else 0)
    return None


_UNIQUE = {
    aten._unique2.default: ("sorted", "return_inverse", "return_counts"),
    aten.unique_consecutive.default: ("return_inverse", "return_counts", "dim"),
    aten.unique_dim.default: ("dim", "sorted", "return_inverse", "return_counts"),
    aten.unique_dim_consecutive.default: ("dim", "return_inverse", "return_counts"),
}
