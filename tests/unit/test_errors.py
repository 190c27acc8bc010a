"""The error tree: exit codes, hints, and how values are shown."""

from __future__ import annotations

import pytest

from memest import errors
from memest.errors import (
    MemestError,
    PlanError,
    TraceError,
    UnknownModelError,
    UnsupportedError,
    closest,
    shown,
)

DEFINED = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and value.__module__ == errors.__name__
]


@pytest.mark.parametrize(
    ("error_type", "exit_code"),
    [
        (MemestError, 1),
        (PlanError, 2),
        (UnknownModelError, 2),
        (UnsupportedError, 3),
        (TraceError, 3),
    ],
)
def test_every_error_has_its_exit_code(error_type: type[MemestError], exit_code: int) -> None:
    error = error_type("what went wrong", hint="what to do")

    assert (error.exit_code, str(error), error.hint) == (exit_code, "what went wrong", "what to do")


def test_every_error_of_the_module_is_a_memest_error() -> None:
    assert len(DEFINED) == 5
    assert all(issubclass(error, MemestError) for error in DEFINED)


def test_no_error_ends_with_the_code_of_a_verdict() -> None:
    """`--check` ends with 5 where a plan does not fit, which is a result."""
    assert not {0, 5} & {error.exit_code for error in DEFINED}


def test_the_hint_is_optional() -> None:
    assert MemestError("short").hint == ""


def test_the_closest_name_is_first_whatever_its_case() -> None:
    assert closest("adamW_", ["sgd", "ADAMW", "adam"])[0] == "ADAMW"


def test_names_that_are_like_nothing_have_no_neighbour() -> None:
    assert closest("zzz", ["sgd", "adam"]) == []


def test_at_most_three_names_are_near() -> None:
    assert len(closest("a1", ["a1", "a2", "a3", "a4", "a5"])) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("adamw", "`adamw`"),
        (2, "`2`"),
        (None, "`None`"),
        (["q", "v"], "`['q', 'v']`"),
        ("two\nlines", "`two lines`"),
    ],
)
def test_a_value_is_shown_on_one_line_between_backticks(value: object, text: str) -> None:
    assert shown(value) == text


def test_numbers_that_python_does_not_print_are_described() -> None:
    assert shown(16**5000) == "`a number of 20001 bits`"
    assert shown([16**5000]) == "`a list with a number too large to print`"


def test_a_long_value_is_cut() -> None:
    assert shown("x" * 81) == "`" + "x" * 77 + "...`"
    assert shown("x" * 80) == "`" + "x" * 80 + "`"
