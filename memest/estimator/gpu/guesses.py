"""Guessed values: what a script reads where values depend on unknown weights.

A script that reads a loss, a norm or a sampled token gets a finite, ordinary value. `Guesses`
counts each read with its line. A comparison that a script branches on is guessed to be False. One
that decides the size of a result (`loss[loss > 0.7]`) is guessed to be True, so that the result is
as large as it can be. `GuessedValues` has these guesses apart from the others.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.distributions import distribution

from memest.errors import UnsupportedError
from memest.estimator.gpu.branches import WaitingLoops
from memest.estimator.ops.registry import Args, Kwargs, arguments_by_name, op_of
from memest.estimator.tensors.known_values import COMPARISONS, KnownValues, materialise
from memest.estimator.tensors.lines import LARGEST, Notes
from memest.estimator.tensors.placement import CPU, META, operators, storage_key, tensors_in

aten = torch.ops.aten

CHECK_DEPTH = 12  # innermost frames that are searched for a check of `torch.distributions`
NUMBER = 1.0  # guess of a loss, a norm or a tensor that is copied to the host
FALL = 0.01  # the n-th number that a script reads is `NUMBER / (1 + FALL * n)`, so a loss falls
TOLERANCE = 1e-4  # largest threshold of a test of convergence, which an unknown value exceeds
LARGE = 1e4  # smallest limit, such as that of float16, that no unknown value exceeds
MAX_IN_A_ROW = 100_000  # reads by one line without an optimizer step: a waiting loop
_REDUCTIONS = operators("all all.dim any any.dim")
_ALL_FALSE = _REDUCTIONS | operators(
    "eq.Tensor eq.Scalar isin.Tensor_Tensor isin.Tensor_Scalar lt.Tensor le.Tensor isnan isinf"
)
"""Comparisons that return False: an unknown value equals nothing, passes no threshold."""

_ALL_TRUE = operators("ne.Tensor ne.Scalar gt.Tensor ge.Tensor")
"""Comparisons that return True: an unknown value differs from all others, and is the larger one."""

PASSING_CHECKS = operators("_is_all_true allclose")
"""Checks of a script's own values, such as in `torch.distributions`; they return True."""

_VALIDATE = distribution.Distribution._validate_sample.__code__
_CHECKS = "" if "_is_all_true" in _VALIDATE.co_names else _VALIDATE.co_filename
"""File of `torch.distributions` if its checks read `all()` in place of `_is_all_true`."""


def is_check() -> bool:
    """Return whether `torch.distributions` is checking its arguments, by reading an `all()`."""
    frames = islice(walk_stack(sys._getframe(1)), CHECK_DEPTH) if _CHECKS else ()
    return any(frame.f_code.co_filename == _CHECKS for frame, _ in frames)


@dataclass(slots=True)
class Guesses:
    """Guesses of unknown values that the script reads, counted by the line that reads them."""

    is_strict: bool = False  # raise instead of guessing
    line: Callable[[], str] = lambda: ""  # returns the running line of the script, or ""
    notes: Notes = field(default_factory=Notes)

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(line, value that was read) -> count."""

    loops: WaitingLoops = field(default_factory=WaitingLoops)
    _num_numbers: int = 0
    _last: str = ""
    _in_a_row: int = 0

    def scalar(self, dtype: torch.dtype, op: str) -> Any:
        """Return a guess of a number of `dtype`, and count it as read by the operator named `op`.
        Booleans are False and integers 1. Floats begin at 1 and fall slowly with each read."""
        self.note(f"{op} of {str(dtype).removeprefix('torch.')}")
        if dtype is torch.bool:
            return False
        if not (dtype.is_floating_point or dtype.is_complex):
            return 1
        number = NUMBER / (1 + FALL * self._num_numbers)
        self._num_numbers += 1
        return complex(number) if dtype.is_complex else number

    def branch(self, guess: bool) -> bool:
        """Return `guess` for the condition that the script reads; its opposite, if `guess` leads to
        a `raise` or to a loop that does not end."""
        return self.loops.choose(guess, self.notes)

    def note(self, what: str) -> None:
        """Count one read of a guess by the script's running line; `what` describes the value. Raise
        `UnsupportedError` if `is_strict`, or if the line has read too many guesses in a row."""
        location = self.line() or "the script"
        if self.is_strict:
            raise UnsupportedError(
                f"{location} reads a value that is not known without a GPU ({what})",
                hint="leave `--strict` out to have it guessed",
            )
        self.counts[location, what] += 1
        self._in_a_row = self._in_a_row + 1 if location == self._last else 1
        self._last = location
        if self._in_a_row > MAX_IN_A_ROW:
            raise UnsupportedError(
                f"{location} has read a guessed value {MAX_IN_A_ROW} times in a row ({what})",
                hint="it seems to wait for a value that never comes; bound the loop",
            )

    def warn(self, text: str) -> None:
        """Add the warning `text` to the report, once; raise `UnsupportedError` if `is_strict`."""
        if self.is_strict:
            raise UnsupportedError(text, hint="leave `--strict` out to have a warning instead")
        if text not in self.notes.warnings:
            self.notes.warnings.append(text)

    def stepped(self) -> None:
        """Record an optimizer step: reads in a row and rounds of loops are counted from 0 again."""
        self._in_a_row = 0
        self.loops.clear()


_SELECTIONS = operators("gather index.Tensor index_select take")
_ABOVE = operators("gt.Scalar ge.Scalar")
_BELOW = operators("lt.Scalar le.Scalar")


def guessed_comparison(func: Any, args: Args) -> bool | None:
    """Return the guessed result of the operator `func`, a comparison, `any` or `all`; else None."""
    if func in _ABOVE or func in _BELOW:
        threshold = args[1]
        size = abs(threshold)
        if (func in _ABOVE) == (threshold > 0):  # passed by values farther from 0
            return 0 < size <= TOLERANCE
        return size >= LARGE
    if func in _REDUCTIONS and args[0].is_floating_point():  # numbers differ from 0
        return True
    if func in _ALL_FALSE:
        return False
    return True if func in _ALL_TRUE else None


MAX_MASK = 1 << 20  # largest number of elements of a mask with guessed values

MAX_CHOICES = 1024  # largest number of guessed choices; tokens of a vocabulary stay unknown
_SORTS = operators("sort sort.stable")
_CHOICES = frozenset(map(id, _SORTS | operators("max.dim min.dim argmax argmin topk multinomial")))
_SIZE_COMPARISONS = frozenset(map(id, COMPARISONS | _ABOVE | _BELOW))
"""Ids of `<`, `<=`, `>` and `>=`. An id is looked up for each operator, and is faster to hash."""

EVENLY = (
    "the size of some results depends on unknown values: choices, such as those of a router "
    "between experts, are spread evenly, and comparisons in size pass"
)
_OPPOSITES = operators("bitwise_not logical_not")
MAX_COMPARED = 1 << 20  # elements of the largest stored comparison; larger selections are full
_SUMS = operators("sum sum.dim_IntList count_nonzero")
_COUNT_TESTS = _ABOVE | _BELOW | operators("eq.Scalar ne.Scalar")


class _Selections:
    """Record of masks that have selected elements, as in `x[mask]`. The selection assumed True
    elements, so a later test by `mask.any()` or `mask.sum() > 0` is guessed to be True too."""

    def __init__(self) -> None:
        self._opposites: dict[int, int] = {}  # storage of `~mask` -> that of `mask`
        self._masks: set[int] = set()
        self._counts: set[int] = set()  # storages of `mask.sum()`
        self._answers: set[int] = set()  # storages of `mask.any()`, of `mask.sum() > 0`

    def add(self, masks: Iterable[Tensor]) -> None:
        """Record that `masks` selected elements; for a mask made as `~other`, also `other`."""
        for key in map(storage_key, masks):
            self._masks.update((key, self._opposites.get(key, key)))

    def follow(self, func: Any, source: Any, out: Any) -> None:
        """Record `out = func(source)` if it is the negation, the count or the `any` of a mask."""
        if func in _OPPOSITES:
            self._opposites[storage_key(out)] = storage_key(source)
        elif func in _SUMS:
            self._counts.add(storage_key(out))
        elif (func is aten.any.default and storage_key(source) in self._masks) or (
            func in _COUNT_TESTS and storage_key(source) in self._counts
        ):
            self._answers.add(storage_key(out))

    def pop_answer(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is `any()` or `count > 0` of a mask, and drop its record."""
        key = storage_key(tensor)
        is_answer = key in self._answers
        self._answers.discard(key)
        return is_answer

    def forget(self, key: int) -> None:
        """Drop the records of a freed storage; `key` is its `storage_key`."""
        self._opposites.pop(key, None)
        for keys in (self._masks, self._counts, self._answers):
            keys.discard(key)


class GuessedValues:
    """Guessed values of tensors that decide the shapes of results, such as a router's choices.
    Choices, such as those of `topk`, are spread evenly over all indices. A mask made by `<`, `<=`,
    `>` or `>=` is True in all elements. A guess is used even if `known` has a computed value.
    `guesses` counts each use."""

    def __init__(self, known: KnownValues, guesses: Guesses) -> None:
        self._known = known
        self._layer = KnownValues(below=known)
        self.guesses = guesses
        self._selections = _Selections()

    def forget(self, key: int) -> None:
        """Drop guessed and known values of a freed storage; `key` is its `storage_key`."""
        self._known.forget(key)
        self._selections.forget(key)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the guessed value of `tensor` as a CPU tensor; None if it has no guess."""
        return self._layer.value_of(tensor) if self._layer.holds(tensor) else None

    def adopt(self, tensor: Tensor, value: Tensor) -> None:
        """Store `value` as the guessed value of `tensor`."""
        self._layer.adopt_guess(tensor, value)

    def read(self, func: Any, tensor: Tensor) -> Any:
        """Return the guessed number that the script reads from `tensor` by the operator `func`.
        Return None if there is no guess, or if `func` is not a read such as `item`. A guessed
        boolean is returned only if it tests a mask that has selected elements."""
        value = self.value_of(tensor)
        if value is None or func not in (aten._local_scalar_dense.default, aten.is_nonzero.default):
            return None
        if tensor.dtype is torch.bool and self._layer.is_guessed([tensor]):
            if not self._selections.pop_answer(tensor):
                return None
            self.guesses.note(f"{value.item()} from a mask that has selected")
            return self.guesses.branch(bool(value.item()))
        self.guesses.note("a choice, spread evenly")
        return value.item()

    def result(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of `func(*args, **kwargs)`, whose shape depends on values, as meta
        tensors of a guessed shape. Count the guess. Return None if the values are known, or if the
        shape has no upper bound."""
        shaped_by = op_of(func).shaped_by
        assert shaped_by is not None
        deciding = list(tensors_in((shaped_by(args),)))
        if not any(tensor.numel() for tensor in deciding):
            return largest_result(func, args, kwargs)
        if all(map(self._known.decides, deciding)):
            return None
        is_guessed = all(map(self._layer.is_known, deciding))
        if is_guessed:
            result = materialise(self._layer.compute(func, args, kwargs))
        else:
            result = largest_result(func, args, kwargs)
        if result is not None:
            tensor = next(tensors_in((result,)))
            name = func._schema.name.removeprefix("aten::")
            count, longest = len(tensor), deciding[0].numel()
            text = f"{name} as {count} of {longest} elements"
            self.guesses.note(f"{count} as the length of a {name}" if count > longest else text)
            self.guesses.notes.add(EVENLY if is_guessed else LARGEST)
        if is_guessed:
            self._selections.add(deciding)
        return result

    def follow(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Store a guess of `out = func(*args, **kwargs)`; call this before `KnownValues.follow`. A
        choice among unknown values, such as `topk`, gets evenly spread indices. Comparisons
        by `<`, `<=`, `>` or `>=`, and conversions to bool, are True in all elements. Only unknown
        integers are assumed not to be above a number over `MAX_CHOICES`, as indices and tokens in
        their range. A comparison of one element gets no guess. Results of other operators are
        computed from the guesses of arguments, if there are any."""
        layer = self._layer
        # `bool()` is like a comparison: numbers differ from 0, as positions of beams do
        is_to_bool = func is aten._to_copy.default and kwargs.get("dtype") is torch.bool
        compares = is_to_bool or id(func) in _SIZE_COMPARISONS
        if id(func) in _CHOICES:
            if not self._known.is_known(args[0]):
                choices = out[-1] if isinstance(out, tuple | list) else out
                self._choose(func, args, kwargs, choices)
        elif compares and not all(map(layer.is_known, tensors_in(args))):
            if 1 < out.numel() <= MAX_COMPARED:
                is_index = func in _ABOVE and not args[0].is_floating_point()
                passes = not (is_index and args[1] > MAX_CHOICES)
                layer.adopt_guess(out, torch.full(out.shape, passes, device=CPU))
            return
        if layer and any(map(layer.holds, tensors_in((*args, *kwargs.values())))):
            source = args[0]
            if func._schema.is_mutable and isinstance(source, Tensor) and not layer.holds(source):
                key = storage_key(source)
                storage = self._known.copies.get(key)
                if storage is not None:  # the operator writes to a copy in the layer
                    layer.copies[key] = storage.clone()  # type: ignore[no-untyped-call]
            layer.follow(func, args, kwargs, out)
            self._selections.follow(func, source, out)

    def guess_booleans(self, func: Any, args: Args, out: Tensor) -> None:
        """Guess the booleans `out`, the result of `func(*args)`, and store them as known values. Do
        nothing if `out` is known already, or has more than `MAX_MASK` elements. The guess is:

            check (`PASSING_CHECKS`)     True, also if a guess of `out` is stored already
            selection, such as `gather`  value of the source's elements if all are equal, else none
            other operator               result of `guessed_comparison`, which may be no guess
        """
        values = self._known
        guess: bool | None = None
        if func in PASSING_CHECKS and (not values.is_known(out) or values.is_guessed([out])):
            guess = True
        elif values.is_known(out) or out.numel() > MAX_MASK:
            return
        elif func in _SELECTIONS:
            source = values.value_of(args[0])
            if source is not None and source.numel():
                first_value = bool(source.flatten()[0])
                guess = first_value if bool((source == first_value).all()) else None
        else:
            guess = guessed_comparison(func, args)
        if guess is not None:
            values.adopt_guess(out, torch.full(out.shape, guess, device=CPU))

    def bincount(self, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
        """Return `torch.bincount(tensor, weights, minlength)` as a meta tensor of `minlength` bins;
        None if that is 0. This counts as a guess that no value of `tensor` reaches `minlength`."""
        if not minlength:
            return None
        self.guesses.note(f"{minlength} as the length of a bincount")
        dtype = torch.int64
        if weights is not None:
            dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
        return torch.empty(minlength, dtype=dtype, device=META)

    def _choose(self, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        """Store evenly spread indices as the guess of `out`, the choices that `func` makes."""
        source = args[0]
        default = None if func in (aten.argmax.default, aten.argmin.default) else -1
        dim = arguments_by_name(func, args, kwargs).get("dim", default)  # None: of all elements
        if dim is None or not source.dim() or not self._layer.may_hold(out):
            return
        num_choices, keeps_dim = source.size(dim), out.dim() == source.dim()
        if func in _SORTS:
            numbers = torch.arange(num_choices, device=CPU).expand(source.movedim(dim, -1).shape)
        elif num_choices > MAX_CHOICES and (func is not aten.topk.default or source.dim() < 3):
            return  # a token of each sequence; rows of boxes choose among anchors
        else:
            shape = out.movedim(dim, -1).shape if keeps_dim else (*out.shape, 1)
            start = int(func is aten.topk.default)  # index 0 might be used as a divisor
            numbers = torch.arange(start, start + out.numel(), device=CPU)
            numbers = numbers.remainder_(num_choices).view(shape)
        self._layer.adopt_like(out, numbers.movedim(-1, dim) if keeps_dim else numbers.squeeze(-1))


def largest_result(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the largest possible result of `func(*args, **kwargs)`, as meta tensors. Return None
    except for `nonzero`, `unique`, and `repeat_interleave` with an `output_size`."""
    source: Tensor = args[0]
    size = source.numel()

    def indices(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=META)

    if func is aten.nonzero.default:
        return indices(source.dim(), size).t()
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return indices(kwargs["output_size"])
    if func in _UNIQUE:
        arguments = arguments_by_name(func, args, kwargs)
        dim = arguments.get("dim")
        rows = size if dim is None else source.shape[dim]
        values = source.new_empty(rows) if dim is None else torch.empty_like(source)
        shape = source.shape if dim is None else (rows,)
        inverse = indices(*shape if arguments.get("return_inverse") else (0,))
        return values, inverse, indices(rows if arguments.get("return_counts") else 0)
    return None


_UNIQUE = operators("_unique2 unique_consecutive unique_dim unique_dim_consecutive")
