"""The command that this process was started to run, as it was typed."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from memest.packages import is_in_packages

RUNNERS = frozenset(("ipykernel_launcher", "pytest", "py.test", "unittest"))
"""Programs that run code with arguments of their own, such as pytest."""

_MEMEST = Path(__file__).resolve().parents[1]
_LIBRARY = Path(os.__file__).resolve().parent  # folder of Python's own library


@dataclass(frozen=True, slots=True)
class Command:
    """A script or a module with its arguments, as `memest run` takes them."""

    words: tuple[str, ...]  # words of the command: `train.py --bs 8`, or `-m package.train --bs 8`
    folder: str  # working folder of the command

    @property
    def label(self) -> str:
        """Name for messages."""
        name, *rest = self.words
        return " ".join((os.path.basename(name) or name, *rest))


def typed_command(frame: FrameType | None = None) -> Command | None:
    """Return the command that this process was started to run; None in a notebook or a shell.

    `frame` is the caller's. A script that a session runs (`%run train.py`) has a command.
    """
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if getattr(sys, "frozen", False):
        return None
    if spec is not None and spec.name != "__main__":
        return _of_module(spec.name.removesuffix(".__main__"))
    if file is not None:
        is_runner = Path(file).stem in RUNNERS
        return _of_script(file) if os.path.isfile(file) and not is_runner else None
    return _of_callers(frame)


def _of_module(name: str) -> Command | None:
    if name.partition(".")[0] in RUNNERS:
        return None
    typed = sys.orig_argv
    for at in range(1, len(typed) - 1):
        if typed[at] == "-m" and typed[at + 1] in (name, f"{name}.__main__"):
            return Command(("-m", *typed[at + 1 :]), os.getcwd())
    return Command(("-m", name, *sys.argv[1:]), os.getcwd())


def _of_script(file: str) -> Command:
    """Return the script with the arguments of its command line, even if it changed `sys.argv`."""
    for folder in dict.fromkeys((os.getcwd(), os.environ.get("PWD") or os.getcwd())):
        for at, word in enumerate(sys.orig_argv[1:], 1):
            if os.path.join(folder, word) == file or _is_same(os.path.join(folder, word), file):
                return Command(tuple(sys.orig_argv[at:]), folder)
    return Command((os.path.abspath(file), *sys.argv[1:]), os.getcwd())


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _of_callers(frame: FrameType | None) -> Command | None:
    """Return the script or module that called `preflight` from a notebook or a shell."""
    while frame is not None:
        names: dict[str, Any] = frame.f_globals
        file, name = names.get("__file__"), names.get("__name__", "")
        frame = frame.f_back
        if not isinstance(file, str) or not os.path.isfile(file) or _is_library(file):
            continue
        if name == "__main__":
            return Command((os.path.abspath(file), *sys.argv[1:]), os.getcwd())
        if _runs_by_itself(file):
            return Command(("-m", name), os.getcwd())
    return None


def _is_library(file: str) -> bool:
    path = Path(file).resolve()
    return is_in_packages(path) or path.is_relative_to(_MEMEST) or _LIBRARY in path.parents


def _runs_by_itself(file: str) -> bool:
    """Return whether a module has an `if __name__ == "__main__":`."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    return any(
        isinstance(node, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        for node in tree.body
    )
