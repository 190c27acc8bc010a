"""Garbage collections at a real run's moments.

A module that is built and replaced is often part of a cycle. Its GPU memory is held until Python
collects cycles: when 700 more containers were made than dropped (`gc.get_threshold`). The mode
makes containers that a real run does not make, so the threshold moves by their number. Code that
runs for every operator leaves no cycles, and makes tuples of a known length, `tuple([...])`.
(Python counts a tuple from an iterator as made and not as dropped.)

Left out: tensors that a real run holds in C++ alone, such as gradients, have Python objects here.
"""

from __future__ import annotations

import gc
from typing import Any

PER_STORAGE = 4  # containers per live storage: two of torch, the reference, the block


class GarbagePace:
    """Moves the threshold of Python's youngest generation by the number of memest's own objects."""

    def __init__(self) -> None:
        self._own = self._moved = 0
        self._threshold = (0, 0, 0)
        self._is_kept = False

    def start(self) -> None:
        """Start to move the threshold."""
        self._own, self._is_kept = 0, True
        self._threshold = gc.get_threshold()
        self._moved = self._threshold[0]
        gc.callbacks.append(self._looked)

    def made(self, num_objects: int) -> None:
        """Count Python containers that memest creates, or frees if negative, beyond this call."""
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
        """Restore the script's threshold."""
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
