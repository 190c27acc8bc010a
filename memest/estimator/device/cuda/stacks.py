"""The Python frames of the script, as `torch.cuda.memory._snapshot()` shows them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_OWN = str(Path(__file__).resolve().parents[2])
_TORCH_OPS = torch._ops.__file__

Stack = tuple[tuple[CodeType | str, int], ...]
"""(code, offset of the instruction) of each frame, innermost first; a name is an operator."""


class Stacks:
    """Gathers stacks and turns them into torch's frames.

    Args:
        has_operators: begin with the operator that runs, which stands for the frames of C++.
    """

    def __init__(self, *, has_operators: bool) -> None:
        self._has_operators = has_operators
        self._is_own: dict[CodeType, bool] = {}
        self._frames: dict[Stack, list[dict[str, Any]]] = {}

    def gather(self) -> Stack:
        """The frames of the running thread, without those of memest."""
        is_own, found = self._is_own, list[tuple[CodeType | str, int]]()
        frame = sys._getframe(1)
        wants_operator = self._has_operators
        at: Any = frame
        while at is not None:
            code = at.f_code
            known = is_own.get(code)
            if known is None:
                known = is_own[code] = code.co_filename.startswith(_OWN)
            if not known:
                found.append((code, at.f_lasti))
                at = at.f_back
                continue
            while found and _is_redispatch(found[-1][0]):  # memest itself has called it
                found.pop()
            if wants_operator and code.co_name == "__torch_dispatch__":
                found.append((at.f_locals["func"]._schema.name, 0))
                wants_operator = False
            at = at.f_back
        return tuple(found)

    def frames_of(self, stack: Stack) -> list[dict[str, Any]]:
        """Torch's frames; equal stacks share one list, which keeps pickles small."""
        frames = self._frames.get(stack)
        if frames is None:
            frames = self._frames[stack] = [_frame(code, at) for code, at in stack]
        return frames


def _is_redispatch(code: CodeType | str) -> bool:
    return not isinstance(code, str) and code.co_filename == _TORCH_OPS


def _frame(code: CodeType | str, at: int) -> dict[str, Any]:
    if isinstance(code, str):  # torch's own mark of a frame that has no file
        return {"filename": "??", "line": 0, "name": code}
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= at < end and number is not None:
            line = number
    return {"filename": code.co_filename, "line": line, "name": code.co_name}
