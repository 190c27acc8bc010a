"""What decides a shape where nobody can know it: choices spread evenly, or the largest result.

Which tokens a router sends to an expert, which boxes pass a threshold: shapes follow that hang on
values that the virtual GPU does not have. They are supposed, apart from what a script is told when
it asks (`guesses`): a choice among few falls on each of them equally often, as the routers of
mixtures of experts are trained to choose, and of what is compared in size everything passes. What
follows from neither is as large as it can be. Each is counted as a guess, with its line, and
`--strict` refuses it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from memest.estimator.device.guesses import Guesses
from memest.estimator.device.lines import ScriptLines
from memest.estimator.device.tensors import META, is_meta, storage_key, tensors_in
from memest.estimator.device.traits import shaping
from memest.estimator.device.values import LiveValues, materialise

aten = torch.ops.aten

MAX_CHOICES = 1024
"""A choice among more is that of a token of a vocabulary, and is left unknown."""

_IN_ORDER = frozenset((aten.sort.default, aten.sort.stable))
_CHOICES = frozenset(map(id, (
    *_IN_ORDER, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
    aten.topk.default, aten.multinomial.default,
)))  # fmt: skip
_BY_SIZE = frozenset(map(id, (
    aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar,
    aten.gt.Tensor, aten.ge.Tensor, aten.lt.Tensor, aten.le.Tensor,
)))  # fmt: skip
"""By identity, as in `traits`: asked of each operator."""

EVENLY = (
    "how large some results are hangs on values that nobody knows: choices, such as those of a "
    "router between experts, are spread evenly, and what is compared in size passes"
)
LARGEST = (
    "how large some results are hangs on values that nobody knows: they are as large as they can be"
)
MAX_COMPARED = 1 << 20
"""A larger comparison is not followed; what it selects is as large as it can be."""


class Supposed(LiveValues):
    """The twins that are supposed, beside those that are `known`."""

    def __init__(self, known: LiveValues) -> None:
        super().__init__()
        self.known = known

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """What is supposed of `tensor`, or else what is known."""
        own = super().value_of(tensor)
        return self.known.value_of(tensor) if own is None else own

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a value of `tensor` is supposed or known."""
        return super().is_known(tensor) or self.known.is_known(tensor)

    def is_supposed(self, tensor: Tensor) -> bool:
        """Whether what `value_of` says is not known but supposed."""
        return is_meta(tensor) and storage_key(tensor) in self._twins

    def told(self, tensor: Tensor) -> Tensor | None:
        """What a script is told that reads `tensor`; None: `guesses` say."""
        return self.value_of(tensor) if self.is_supposed(tensor) else None

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Before what is known is followed: suppose what a choice or a comparison gives, and
        compute what follows from what is supposed.
        """
        if id(func) in _CHOICES:
            if not self.known.is_known(args[0]):
                chosen = out[-1] if isinstance(out, tuple | list) else out
                self._choose(func, args, kwargs, chosen)
        elif id(func) in _BY_SIZE and not all(map(self.is_known, tensors_in(args))):
            if 1 < out.numel() <= MAX_COMPARED:
                self.adopt(out, torch.ones(out.shape, dtype=torch.bool))
                self.guessed.add(storage_key(out))
            return
        if self._twins and any(map(self.is_supposed, tensors_in((*args, *kwargs.values())))):
            first = args[0]
            if func._schema.is_mutable and isinstance(first, Tensor):
                self._own(first)
            super().follow(func, args, kwargs, out)

    def _own(self, tensor: Tensor) -> None:
        """Before `tensor` is written: what is known of its storage, to be written here alone."""
        twin = self.known._twins.get(storage_key(tensor))
        if twin is not None and not self.is_supposed(tensor):
            copied: torch.UntypedStorage = twin.clone()  # type: ignore[no-untyped-call]
            self._twins[storage_key(tensor)] = copied

    def _choose(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        source = args[0]
        dim = _dim_of_choice(func, args, kwargs)
        if dim is None or not source.dim() or not self._wants_twin(out):
            return
        num_choices, is_kept = source.size(dim), out.dim() == source.dim()
        if func in _IN_ORDER:
            numbers = torch.arange(num_choices).expand(source.movedim(dim, -1).shape)
        elif num_choices > MAX_CHOICES:
            return
        else:
            shape = out.movedim(dim, -1).shape if is_kept else (*out.shape, 1)
            numbers = torch.arange(out.numel()).remainder_(num_choices).view(shape)
        self._adopt_like(out, numbers.movedim(-1, dim) if is_kept else numbers.squeeze(-1))


def _dim_of_choice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Along which dimension is chosen; None: over all."""
    if func is aten.multinomial.default:
        return -1
    is_of_one = func in (aten.argmax.default, aten.argmin.default)
    place = 2 if func is aten.topk.default else 1
    is_given = func is not aten.sort.stable and len(args) > place
    found: int | None = args[place] if is_given else kwargs.get("dim", None if is_of_one else -1)
    return found


def largest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest result that an operator whose shape depends on values can have, on meta; None
    where it has no bound.
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


class _Recorder(Protocol):
    values: LiveValues
    supposed: Supposed
    guesses: Guesses
    lines: ScriptLines

    def note(self, text: str) -> None:
        """Let the report say `text`, once."""


def answer(recorder: _Recorder, func: Any, tensor: Tensor) -> Any:
    """The number that a script is told which reads `tensor`, counted as a guess; None where nothing
    is supposed of it.

    Whether anything has passed a threshold is a question, which is answered with no (`guesses`):
    what is too large is drawn again, or treated apart as 8-bit products treat it, and is rare.
    """
    told = recorder.supposed.told(tensor)
    if told is None or func not in (aten._local_scalar_dense.default, aten.is_nonzero.default):
        return None
    if tensor.dtype is torch.bool and recorder.supposed.is_guessed([tensor]):
        return None
    recorder.guesses.note(recorder.lines.current(), "a choice, spread evenly")
    return told.item()


def suppose(recorder: _Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of one of `DEPENDS_ON_VALUES` whose shape is not known, on meta, counted as a
    guess; None where it is known, or has no bound.
    """
    deciding = list(tensors_in((shaping(func, args),)))
    if func is aten.masked_scatter_backward.default:  # it is told the sizes
        return None
    if all(map(recorder.values.decides, deciding)):
        return None
    is_supposed = all(map(recorder.supposed.is_known, deciding))
    if is_supposed:
        made = materialise(recorder.supposed.compute(func, args, kwargs))
    else:
        made = largest(func, args, kwargs)
    if made is not None:
        first = next(tensors_in((made,)))
        name = func._schema.name.removeprefix("aten::")
        what = f"{name} as {len(first)} of {deciding[0].numel()} elements"
        recorder.guesses.note(recorder.lines.current(), what)
        recorder.note(EVENLY if is_supposed else LARGEST)
    return made
