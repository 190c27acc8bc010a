"""Bytes to text and back."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.errors import PlanError
from memest.units import (
    format_bytes,
    format_count,
    gib_or_mib,
    parse_bytes,
    shares_that_add_up,
    unit_of,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512", 512), ("512b", 512), ("1KiB", 1024), ("1MiB", 1048576), ("3GiB", 3221225472),
        ("2TiB", 2199023255552), ("1kB", 1000), ("1MB", 10**6), ("80GB", 80 * 10**9),
        ("1TB", 10**12), (" 80  gib ", 80 * 2**30), ("0.5GiB", 2**29), (".5gib", 2**29),
        ("1.GiB", 2**30), (7, 7), ("1.5KiB", 1536), (2**50, 2**50),
    ],
)  # fmt: skip
def test_sizes_are_binary_or_decimal_by_their_suffix(text: Any, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


def test_a_fraction_of_a_byte_is_cut_off() -> None:
    assert parse_bytes("78.4GiB") == 84181359001  # 78.4 * 2**30 = 84181359001.6


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "much", "1 EiB", "1e9", "-1GiB", "1,5GiB", "1GiB1", "\u0661GiB", None, 1.5,
     True, [], {}],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="is not a memory size") as caught:
        parse_bytes(text)

    assert caught.value.hint == "write it as `78.4GiB` or `80GB`"


@pytest.mark.parametrize("text", ["0", 0, -5, "0.0GiB", "0.5", "0.0001KiB"])
def test_less_than_a_byte_is_refused(text: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"memory size `{text}` is not positive")):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1025TiB", 2**50 + 1, "9" * 400, "9" * 5000 + "GiB"])
def test_more_than_any_machine_is_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="is beyond any machine"):
        parse_bytes(text)


def test_a_number_too_long_to_print_is_refused() -> None:
    """Python does not print integers of more than 4300 digits."""
    with pytest.raises(PlanError, match="`a number of 20001 bits` is beyond any machine"):
        parse_bytes(16**5000)


def test_gib_have_two_digits_and_small_sizes_a_smaller_unit() -> None:
    assert gib_or_mib(0) == "0.00 GiB"
    assert gib_or_mib(3 * 2**29) == "1.50 GiB"
    assert gib_or_mib(-(2**30)) == "-1.00 GiB"
    assert gib_or_mib(-(20 * 2**20)) == "-20.00 MiB"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**20 - 1024, "1023.00 KiB"),
        (2**20, "1.00 MiB"), (2**30, "1.00 GiB"), (5 * 2**40, "5120.00 GiB"), (-512, "-512 B"),
        (-(2**20), "-1.00 MiB"),
    ],
)  # fmt: skip
def test_the_unit_is_the_largest_that_leaves_one_or_more(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("num", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00e3"), (124_439_808, "124.44e6"), (2 * 10**12, "2.00e12")],
)
def test_counts_are_grouped_by_thousands(num: int, text: str) -> None:
    assert format_count(num) == text


@given(st.lists(st.integers(0, 2**45), min_size=1, max_size=12))
def test_printed_parts_add_up_to_the_printed_whole(sizes: list[int]) -> None:
    texts = unit_of(2**30).adding_up(sizes)

    assert sum(map(Decimal, texts)) == Decimal(f"{sum(sizes) / 2**30:.3f}")
    assert all(abs(float(t) - n / 2**30) < 0.001001 for t, n in zip(texts, sizes, strict=True))


def test_tables_of_a_small_run_are_in_mib() -> None:
    unit = unit_of(20 * 2**20)

    assert (unit.name, unit.of(2**20)) == ("MiB", "1.000")
    assert unit_of(2**30 // 10).name == "GiB"


def test_shares_add_up_to_a_hundred() -> None:
    shares = shares_that_add_up([1, 1, 1], 3)

    assert shares == ["33.4 %", "33.3 %", "33.3 %"]
