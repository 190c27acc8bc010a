"""Checks of a script, which end it: `assert`, and a condition before `raise`."""

from __future__ import annotations

import dis
import sys
from functools import cache
from pathlib import Path
from types import CodeType

import torch

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_BETWEEN = ("TO_BOOL", "NOT_TAKEN", "NOP", "CACHE")  # a condition and its jump
_ENDS = ("RETURN", "JUMP", "POP_JUMP", "FOR_ITER", "YIELD", "STORE")


def that_passes(guess: bool) -> bool:
    """Return `guess`, or its opposite if the running line raises on `guess` alone.

    The line is that of the innermost frame outside of torch.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_FOREIGN):
        if frame.f_back is None:
            return guess
        frame = frame.f_back
    raises = _raising(frame.f_code, frame.f_lasti)
    return not guess if guess in raises and (not guess) not in raises else guess


@cache
def _raising(code: CodeType, offset: int) -> tuple[bool, ...]:
    """Return the values of the condition that is read at `offset` on which the code raises."""
    found = list(dis.get_instructions(code))
    index = next((i for i, step in enumerate(found) if step.offset == offset), len(found))
    if not found[index:][:1] or "POP_JUMP" not in found[index].opname:
        index = _after(found, index + 1)  # a call of `bool` or `item`, whose result a jump reads
    jump = found[index] if index < len(found) else None
    if jump is None or "POP_JUMP" not in jump.opname or "NONE" in jump.opname:
        return ()
    target = next(i for i, step in enumerate(found) if step.offset == jump.argval)
    jumps_on = jump.opname.endswith("TRUE")
    ways = ((jumps_on, target), (not jumps_on, index + 1))
    return tuple(value for value, start in ways if _raises(found, start))


def _after(found: list[dis.Instruction], index: int) -> int:
    while index < len(found) and found[index].opname in _BETWEEN:
        index += 1
    return index


def _raises(found: list[dis.Instruction], start: int) -> bool:
    """Return whether the code from `start` on raises before it branches or stores."""
    for step in found[start:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(_ENDS):
            return False
    return False
