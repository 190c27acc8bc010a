"""Errors that a user can cause or meet; `cli` turns each into two lines and an exit code."""

from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")
OOM_EXIT_CODE = 5  # exit code for a plan or script that does not fit, with `--check`


class MemestError(Exception):
    """Base of every error that memest raises on purpose.

    Args:
        message: what went wrong, with the values that made it so.
        hint: what to do about it, printed on a line of its own; "" prints no line.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class PlanError(MemestError):
    """Error of a contradictory plan or command line, or of an unknown key or an invalid value."""

    exit_code = 2


class UnknownModelError(MemestError):
    """Error of a model name that no bundled model, file or reachable Hub repository has."""

    exit_code = 2


class UnsupportedError(MemestError):
    """Error of a valid plan, setting or script that memest cannot simulate."""

    exit_code = 3


class TraceError(MemestError):
    """Error of a training step that cannot run on the meta device; the message names the module."""

    exit_code = 3


def result_or_error(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T | MemestError:
    """Return `function(*args, **kwargs)`, or the `MemestError` that the call raises."""
    try:
        return function(*args, **kwargs)
    except MemestError as error:
        return error


def raise_if_all_failed(results: Collection[object]) -> None:
    """Raise the first of `results` if all are a `MemestError`; do nothing if there are none."""
    errors = [result for result in results if isinstance(result, MemestError)]
    if errors and len(errors) == len(results):
        raise errors[0]


def shown(value: object) -> str:
    """Return `value` in backticks for a message, on one line, and cut if it is long.

    >>> shown("adamw"), shown(7)
    ('`adamw`', '`7`')
    """
    if isinstance(value, int) and value.bit_length() > 200:
        return f"`a number of {value.bit_length()} bits`"  # Python refuses to print the largest
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:
        text = f"a {type(value).__name__} with a number too large to print"
    text = " ".join(text.split())
    return f"`{text[:77]}...`" if len(text) > 80 else f"`{text}`"


def closest(name: str, known: Iterable[str], num: int = 3) -> Sequence[str]:
    """Return up to `num` of the `known` names that resemble `name`, best first; ignore case.

    >>> closest("adamv", ["adamw", "sgd"])
    ['adamw']
    """
    by_folded = {k.casefold(): k for k in known}
    matches = get_close_matches(name[:100].casefold(), by_folded, n=num, cutoff=0.4)
    return [by_folded[f] for f in matches]
