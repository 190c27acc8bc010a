"""What ranks have said to all: the ranks that are run after them hear it.

Ranks run one after another, and in general each gets from a collective what it would if the others
had what it has. That is wrong of a broadcast, which is made to tell what one rank alone has: a
run's name, a shuffled order, a count by which the ranks check each other. So a rank that is the
source of one leaves it here, as far as it is known, and the same broadcast of a later rank gets it:
the one with the same number among those of its group and source.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

MAX_NUMEL = 1 << 20
"""Of tensors; those that are larger are weights, whose values nobody needs."""


class Broadcasts:
    """Of a run with several ranks, by group and source; can be pickled."""

    def __init__(self) -> None:
        self._said: dict[Hashable, list[bytes | None]] = {}
        self._counts: Counter[Hashable] = Counter()

    def begin_rank(self) -> None:
        """Another rank begins, whose first broadcast is the first one."""
        self._counts.clear()

    def learn(self, other: Broadcasts) -> None:
        """Take over what is known in `other`, which has gone on in another process."""
        self._said.update(other._said)

    def says(self, key: Hashable, what: Any) -> None:
        """This rank is the source and has `what`; None where it is not known, or is too large."""
        number = self._next(key)
        said = self._said.setdefault(key, [])
        if len(said) <= number:
            said.append(_packed(what))

    def hears(self, key: Hashable) -> Any:
        """What this rank, which is not the source, gets; None where nobody knows."""
        number = self._next(key)
        said = self._said.get(key, ())
        packed = said[number] if number < len(said) else None
        with _disable_current_modes():
            return None if packed is None else pickle.loads(packed)

    def _next(self, key: Hashable) -> int:
        number = self._counts[key]
        self._counts[key] += 1
        return number


def _packed(what: Any) -> bytes | None:
    if isinstance(what, Tensor) and what.numel() > MAX_NUMEL:
        return None
    try:
        with _disable_current_modes():
            return None if what is None else pickle.dumps(what)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return None  # it raises in the real run too, or lies on the card
