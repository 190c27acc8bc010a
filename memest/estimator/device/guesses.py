"""Guesses: the values that a script reads where they are not known without the weights.

A loss, a norm or a sampled token: the simulated GPU has shapes and no values. A script that reads
one gets a finite and ordinary value, and each reading is counted with its line. Values that decide
a shape are in `assumed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memest.errors import UnsupportedError
from memest.estimator.device.notes import Notes

aten = torch.ops.aten

NUMBER = 1.0
"""A loss, a norm, a learning signal: finite, positive, and no reason to stop."""

FALL = 0.01
"""The n-th number that a script reads is `NUMBER / (1 + FALL * n)`: what is watched for progress,
such as a loss that decides about stopping early or about the learning rate, makes some.
"""

TOLERANCE = 1e-4
"""A threshold up to this size, but not 0, asks whether something has converged. It has not: what is
not known lies on the threshold's side of 0, and far beyond it.
"""

MAX_IN_A_ROW = 100_000
"""Readings by one line without an optimizer step before it is taken for a loop that waits."""

_ALL_FALSE = frozenset((
    aten.eq.Tensor, aten.eq.Scalar, aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar,
    aten.lt.Tensor, aten.le.Tensor,
    aten.isnan.default, aten.isinf.default,
    aten.all.default, aten.all.dim, aten.any.default, aten.any.dim,
))  # fmt: skip
"""A value that is not known equals nothing, is no special token and passes no threshold."""

_ALL_TRUE = frozenset((aten.ne.Tensor, aten.ne.Scalar, aten.gt.Tensor, aten.ge.Tensor))
"""It differs from everything; of two scores that are compared, the first may still win, as in a
beam search that asks whether it should go on.
"""

ASSUMED = frozenset((aten._is_all_true.default, aten.allclose.default))
"""Checks that a script makes of its own values, such as those of `torch.distributions`: passed."""


@dataclass(slots=True)
class Guesses:
    """Counts of guessed values by the line that read them."""

    is_strict: bool = False
    """Refuse to guess."""

    line: Callable[[], str] = lambda: ""
    """Returns the running line of the script, or ""."""

    notes: Notes = field(default_factory=Notes)

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(line, what was read) -> how often."""

    _num_numbers: int = 0
    _last: str = ""
    _in_a_row: int = 0

    def scalar(self, dtype: torch.dtype, op: str) -> Any:
        """Return a Python number of `dtype`: False, 1, or a float that falls slowly from 1."""
        self.note(f"{op} of {str(dtype).removeprefix('torch.')}")
        if dtype is torch.bool:
            return False
        if not (dtype.is_floating_point or dtype.is_complex):
            return 1
        number = NUMBER / (1 + FALL * self._num_numbers)
        self._num_numbers += 1
        return complex(number) if dtype.is_complex else number

    def note(self, what: str) -> None:
        """Count one reading of `what` by the running line.

        Raises:
            UnsupportedError: guesses are refused, or the line seems to wait for a value.
        """
        where = self.line() or "the script"
        if self.is_strict:
            raise UnsupportedError(
                f"{where} reads a value that is not known without a GPU ({what})",
                hint="leave `--strict` out to have it guessed",
            )
        self.counts[where, what] += 1
        self._in_a_row = self._in_a_row + 1 if where == self._last else 1
        self._last = where
        if self._in_a_row > MAX_IN_A_ROW:
            raise UnsupportedError(
                f"{where} has read a guessed value {MAX_IN_A_ROW} times in a row ({what})",
                hint="it seems to wait for a value that never comes; bound the loop",
            )

    def warn(self, text: str) -> None:
        """Report `text` above all figures, once.

        Raises:
            UnsupportedError: guesses are refused.
        """
        if self.is_strict:
            raise UnsupportedError(text, hint="leave `--strict` out to have a warning instead")
        if text not in self.notes.warnings:
            self.notes.warnings.append(text)

    def stepped(self) -> None:
        """Note an optimizer step: a line that reads again is not a loop that waits."""
        self._in_a_row = 0


def filler(dtype: torch.dtype) -> float:
    """What stands in a tensor of unknown values that is copied to the host."""
    return 0 if dtype is torch.bool else NUMBER


_SELECTIONS = frozenset((
    aten.gather.default, aten.index.Tensor, aten.index_select.default, aten.take.default,
))  # fmt: skip


def selection(func: Any, source: Tensor | None, out: Tensor) -> Tensor | None:
    """The twin of what unknown positions select from `source`, if that is the same everywhere."""
    if func not in _SELECTIONS or source is None or not source.numel():
        return None
    first = source.flatten()[0]
    return first.expand(out.shape) if bool((source == first).all()) else None


_ABOVE = frozenset((aten.gt.Scalar, aten.ge.Scalar))
_BELOW = frozenset((aten.lt.Scalar, aten.le.Scalar))


def comparison(func: Any, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
    """The twin of a comparison whose operands are not known, or None for another operator."""
    if func in _ABOVE or func in _BELOW:
        threshold = args[1]
        is_true = 0 < abs(threshold) <= TOLERANCE and (func in _ABOVE) == (threshold > 0)
        return torch.full(out.shape, is_true)
    if func in _ALL_FALSE:
        return torch.zeros(out.shape, dtype=torch.bool)
    if func in _ALL_TRUE:
        return torch.ones(out.shape, dtype=torch.bool)
    return None


MAX_GUESSED = 1 << 20
"""Larger masks are left unknown."""


def guess_booleans(values: Any, func: Any, args: tuple[Any, ...], out: Tensor) -> None:
    """Let `values`, where they know nothing of the booleans `out`, have what is guessed of them."""
    if func in ASSUMED and (not values.is_known(out) or values.is_guessed([out])):
        twin: Tensor | None = torch.ones(out.shape, dtype=torch.bool)
    elif values.is_known(out) or out.numel() > MAX_GUESSED:
        return
    else:
        twin = comparison(func, args, out)
        if twin is None:
            source = args[0] if args else None
            known = values.value_of(source) if isinstance(source, Tensor) else None
            twin = selection(func, known, out)
    if twin is not None:
        values.adopt_guess(out, twin)


def bincount(
    guesses: Guesses,
    tensor: Tensor,
    weights: Tensor | None = None,
    minlength: int = 0,
) -> Tensor | None:
    """`bincount` of unknown numbers: as long as the script says, if it does.

    A metric that gives the number of its classes has no larger ones.
    """
    if not minlength:
        return None
    guesses.note(f"{minlength} as the length of a bincount")
    dtype = torch.int64 if weights is None else weights.dtype
    dtype = torch.float64 if weights is not None and dtype is not torch.float32 else dtype
    return torch.empty(minlength, dtype=dtype, device="meta")
