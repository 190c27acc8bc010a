"""Names that stand for others while something runs, and are put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes that were replaced, in order; `undo` puts back what was there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._afterwards: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Let `owner.name` be `value`; returns what it was, or None if there was none."""
        before = vars(owner).get(name, _ABSENT)
        self._before.append((owner, name, before))
        was = getattr(owner, name, None)
        setattr(owner, name, value)
        return was

    def set_all(self, owner: Any, values: Mapping[str, Any]) -> None:
        """`set` for each name in `values`."""
        for name, value in values.items():
            self.set(owner, name, value)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Let `action` run when everything has been put back."""
        self._afterwards.append(action)

    def undo(self) -> None:
        """Put back everything, the last first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        while self._afterwards:
            self._afterwards.pop()()
