"""When Python collects the garbage of a script: at the moments at which it would in a real run.

A module that is built and replaced is often part of a cycle, and holds its memory on the GPU until
Python looks for cycles: when 700 containers more were made than dropped (`gc.get_threshold`). The
mode makes containers of its own, which a real run does not; the threshold is moved by as many.

What runs for every operator makes tuples of a known length, `tuple([...])`: those made from an
iterator are cut to size, which Python counts as made and not as dropped; and it leaves no cycles.

Left out: tensors that a real run makes and keeps in C++ alone, such as the gradients of a backward,
have objects of Python here.
"""

from __future__ import annotations

import gc
from typing import Any

PER_STORAGE = 4
"""Containers for a storage that lives: torch's two Python objects of it, the reference to it and
the allocator's block; a test counts them.
"""


class GarbagePace:
    """Moves the threshold of Python's youngest generation by what is not the script's."""

    def __init__(self) -> None:
        self._own = self._moved = 0
        self._threshold = (0, 0, 0)
        self._is_kept = False

    def start(self) -> None:
        """From here on the threshold moves."""
        self._own, self._is_kept = 0, True
        self._threshold = gc.get_threshold()
        self._moved = self._threshold[0]
        gc.callbacks.append(self._looked)

    def made(self, num_objects: int) -> None:
        """So many containers that live on were made, or dropped, for the mode's own sake."""
        if not self._is_kept or not gc.isenabled():
            self._own += num_objects
            return
        now = gc.get_threshold()
        if now[0] != self._moved:  # the script has a threshold of its own
            self._threshold, self._own = now, 0
        self._own += num_objects
        if self._threshold[0]:
            self._moved = max(1, self._threshold[0] + self._own)
            gc.set_threshold(self._moved, *self._threshold[1:])

    def stop(self) -> None:
        """The threshold is the script's again."""
        self._is_kept = False
        if self._looked in gc.callbacks:  # which the script may clear
            gc.callbacks.remove(self._looked)
        if gc.get_threshold()[0] == self._moved:
            gc.set_threshold(*self._threshold)

    def _looked(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            if gc.get_threshold()[0] == self._moved:
                self._moved = self._threshold[0]
                gc.set_threshold(*self._threshold)
            self._own = 0
