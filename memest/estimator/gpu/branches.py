"""Values for unknown branch conditions, so that no code raises and every loop ends.

A guess is inverted if the code raises on it. A loop that waits for an unknown value runs `ROUNDS`
times, like the loop of an adaptive solver. The second round takes the other branches.
"""

import ast
import dis
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch.optim import lbfgs

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.tensors.lines import Notes
from memest.estimator.tensors.patches import Patches

_FOREIGN = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
_BETWEEN_CONDITION_AND_JUMP = ("TO_BOOL", "NOT_TAKEN", "NOP", "CACHE")
_BRANCHES_AND_STORES = ("RETURN", "JUMP", "POP_JUMP", "FOR_ITER", "YIELD", "STORE")
ROUNDS = 2  # rounds of a loop that waits for an unknown value, while no optimizer steps
STEADY_ROUNDS = 64  # rounds of a loop that allocate the same bytes each, before it ends early


def install(patches: Patches, hooks: ImportHooks, guesses: Any) -> None:
    """Make line searches of `torch.optim.LBFGS` end with their first step, which is accepted mostly
    (Nocedal and Wright, Numerical Optimization, 2006, section 6.1). Make `scipy.optimize.minimize`
    succeed if it reads one of `guesses`: its own line search finds that they contradict."""

    @patches.wrap(lbfgs, "_strong_wolfe")
    def search(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        guesses.notes.add("line searches of L-BFGS are assumed to end with their first step")
        return original(*args, **(kwargs | {"max_ls": 0}))

    def assume_success(module: ModuleType) -> None:
        @patches.wrap(module, "minimize")
        def minimize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            num_reads = guesses.counts.total()
            result = original(*args, **kwargs)
            if guesses.counts.total() > num_reads:
                guesses.notes.add("`scipy.optimize.minimize` is assumed to succeed")
                result.update(success=True, status=0, message="CONVERGENCE")
            return result

    hooks.after("scipy.optimize", assume_success)


class WaitingLoops:
    """Counter of the rounds of loops that wait for an unknown value, which also ends such loops. A
    loop is identified by its running frame and its lines. `total_bytes` sums all requests."""

    def __init__(self, total_bytes: Callable[[], int] = lambda: 0) -> None:
        self._rounds: dict[tuple[int, range], int] = {}
        self.steady: dict[tuple[int, int], tuple[int, int, int]] = {}
        """(frame, line) -> (alike rounds, total bytes, bytes of a round), since a backward."""

        self._total_bytes = total_bytes

    def clear(self) -> None:
        """Set all counts of rounds to 0, after an optimizer step: the script makes progress."""
        self._rounds.clear()
        self.steady.clear()

    def choose(self, guess: bool, notes: Notes) -> bool:
        """Return a value for the unknown condition that the script is reading: `guess` or its
        opposite. A loop here is a `while` loop that can end only by its condition.

        - The condition of a loop gets `guess` for `ROUNDS` rounds. Then it gets the opposite, which
          ends the loop, and `notes` gets a note.
        - A condition in the body of a loop, or in a function that the body calls, gets `guess` in
          the first round. In the second round it gets the opposite, so that the other branch of an
          `if` runs too. In later rounds `guess` and the opposite alternate.
        - A condition outside of loops gets `guess`. If `if CONDITION: break` ends another loop, the
          opposite ends it after `STEADY_ROUNDS` rounds that allocate the same bytes each.

        The last two rules have an exception, for a condition such as that of an `assert`. If the
        code raises at once on the value, and not on the opposite, the condition gets the opposite.
        """
        frame, loop = _running_condition()
        if frame is None:
            return guess
        if loop is not None:
            return self._waiting_condition(guess, frame, loop, notes)
        if self._is_steady(frame):
            notes.add(f"{_waits(frame)}: ended after {STEADY_ROUNDS} rounds of equal memory")
            return not guess
        if self._rounds and self._is_in_even_round(frame):
            guess = not guess
        raises = _values_that_raise(frame.f_code, frame.f_lasti)
        return not guess if raises == (guess,) else guess

    def count_round(self) -> None:
        """Count a round of the loop whose condition the script is reading, and whose value is
        known. Do nothing if the script reads another condition."""
        frame, loop = _running_condition()
        if frame is not None and loop is not None:
            key = id(frame), loop
            self._rounds[key] = self._rounds.get(key, 0) + 1

    def _waiting_condition(self, guess: bool, frame: FrameType, loop: range, notes: Notes) -> bool:
        """Return the value of the unknown condition of a loop, with lines `loop` in `frame`:
        `guess`, or after `ROUNDS` rounds its opposite."""
        key = id(frame), loop
        rounds = self._rounds.get(key, 0)
        if rounds < ROUNDS:
            self._rounds[key] = rounds + 1
            return guess
        del self._rounds[key]
        notes.add(f"{_waits(frame)}: each loop is assumed to end after {ROUNDS} rounds")
        return not guess

    def _is_steady(self, frame: FrameType) -> bool:
        """Return whether a loop that the condition in `frame` may end had only alike rounds."""
        if frame.f_lineno not in _early_exits(frame.f_code.co_filename):
            return False
        key, now = (id(frame), frame.f_lineno), self._total_bytes()
        rounds, total, size = self.steady.get(key, (0, 0, 0))
        rounds = rounds + 1 if now - total == size else 0
        self.steady[key] = rounds, now, now - total
        return rounds >= STEADY_ROUNDS

    def _is_in_even_round(self, frame: FrameType | None) -> bool:
        """Return whether `frame` or a caller is in the second (or any even) round of a loop."""
        running = {key for key, rounds in self._rounds.items() if not rounds % 2}
        while running and frame is not None:
            if any(owner == id(frame) and frame.f_lineno in loop for owner, loop in running):
                return True
            frame = frame.f_back
        return False


def _running_condition() -> tuple[FrameType | None, range | None]:
    """Return (innermost running frame outside torch and memest, lines of its `while` loop). The
    frame is None if there is none. The lines are None unless the frame's current line is in the
    loop's condition, and this condition alone ends the loop."""
    stack = (frame for frame, _ in walk_stack(sys._getframe(1)))
    frame = next((f for f in stack if not f.f_code.co_filename.startswith(_FOREIGN)), None)
    if frame is None:
        return None, None
    loops = _waiting_loops(frame.f_code.co_filename)
    return frame, next((loop for condition, loop in loops if frame.f_lineno in condition), None)


# Loops with one way out: `while CONDITION:`, and `while True:` with one `if CONDITION: break`.


@cache
def _waiting_loops(file: str) -> tuple[tuple[range, range], ...]:
    """Return (lines of the condition, lines of the loop) for `while` loops in `file` that end by
    this condition only. Those with another exit, such as a maximum of rounds, are left out."""
    loops = [node for node in _nodes(file) if isinstance(node, ast.While)]
    pairs = [(_only_condition(loop), loop) for loop in loops]
    return tuple((_lines(test), _lines(loop)) for test, loop in pairs if test is not None)


@cache
def _early_exits(file: str) -> frozenset[int]:
    """Return the lines in `file` of each condition of a `break` or `return` in a loop."""
    loops = (node for node in _nodes(file) if isinstance(node, ast.For | ast.While))
    inner = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.If))
    ends = (node for node in inner if isinstance(node.body[-1], ast.Break | ast.Return))
    return frozenset(line for node in ends for line in _lines(node.test))


def _nodes(file: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return []


def _only_condition(loop: ast.While) -> ast.expr | None:
    """Return the condition that alone ends `loop`; None if there are other exits."""
    exits = list(_exits(loop.body))
    if not isinstance(loop.test, ast.Constant):  # no `while True`
        return None if exits or isinstance(loop.test, ast.BoolOp) else loop.test
    tests = [node.test for node in loop.body if isinstance(node, ast.If) and node.body[-1] in exits]
    return tests[0] if len(tests) == len(exits) == 1 else None


def _exits(body: Iterable[ast.AST], is_nested: bool = False) -> Iterator[ast.AST]:
    """Yield each `return` in a loop's body, and each `break` that ends the loop itself. `is_nested`
    is True within a loop in the body, whose own `break` does not count."""
    for node in body:
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and not is_nested):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = is_nested or isinstance(node, ast.While | ast.For | ast.AsyncFor)
            yield from _exits(ast.iter_child_nodes(node), inner)


def _waits(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} waits for an unknown value"


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


# Conditions that end a script: `assert`, and a condition before `raise`.


@cache
def _values_that_raise(code: CodeType, offset: int) -> tuple[bool, ...]:
    """Return a tuple of the values of a condition, True or False, on which `code` raises at once.
    For an `assert` the result is (False,). The condition is read at bytecode `offset`. Return () if
    `code` raises on neither value, or if no branch follows the condition."""
    steps = list(dis.get_instructions(code))
    index_by_offset = {step.offset: index for index, step in enumerate(steps)}
    if offset not in index_by_offset:
        return ()
    index = index_by_offset[offset]
    if "POP_JUMP" not in steps[index].opname:  # but a call whose result a jump reads
        index += 1
        while index < len(steps) and steps[index].opname in _BETWEEN_CONDITION_AND_JUMP:
            index += 1
    if index == len(steps):
        return ()
    jump = steps[index]
    if "POP_JUMP" not in jump.opname or "NONE" in jump.opname:
        return ()
    jumps_on = jump.opname.endswith("TRUE")
    branches = ((jumps_on, index_by_offset[jump.argval]), (not jumps_on, index + 1))
    return tuple(value for value, start in branches if _raises(steps, start))


def _raises(steps: list[dis.Instruction], start: int) -> bool:
    """Return whether the instructions `steps[start:]` raise before any branch or store."""
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(_BRANCHES_AND_STORES):
            return False
    return False
