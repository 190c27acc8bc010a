"""Conversion between bytes and text: the only place with GiB."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from memest.errors import PlanError, shown

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_SUFFIXES = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
SMALL = GIB // 10  # sizes below it are shown in MiB


def parse_bytes(text: str | int) -> int:
    """Return the bytes of a size with a binary or decimal suffix; a bare number is bytes.

    >>> parse_bytes("78.4GiB"), parse_bytes("80 GB"), parse_bytes(512)
    (84181359001, 80000000000, 512)

    Raises:
        PlanError: `text` is not a positive size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        num_bytes: float = text
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        factor = _SUFFIXES.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise PlanError(
                f"{shown(text)} is not a memory size", hint="write it as `78.4GiB` or `80GB`"
            )
        num_bytes = float(match[1]) * factor
    if num_bytes < 1:
        raise PlanError(f"memory size {shown(text)} is not positive", hint="write it as `78.4GiB`")
    if num_bytes > 2**50:
        raise PlanError(
            f"memory size {shown(text)} is beyond any machine", hint="write it as `78.4GiB`"
        )
    return int(num_bytes)


def gib_or_mib(num_bytes: int) -> str:
    """Return `num_bytes` in GiB, or in a smaller unit below 0.1 GiB.

    >>> gib_or_mib(16 * 2**30), gib_or_mib(3 * 2**20), gib_or_mib(0)
    ('16.00 GiB', '3.00 MiB', '0.00 GiB')
    """
    return format_bytes(num_bytes) if 0 < abs(num_bytes) < SMALL else f"{num_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of the sizes in a table: GiB or MiB."""

    name: str
    num_bytes: int

    def of(self, num_bytes: int) -> str:
        """Return `num_bytes` in this unit as text, without the unit's name."""
        return f"{num_bytes / self.num_bytes:.3f}"

    def adding_up(self, sizes: Sequence[int]) -> list[str]:
        """Return texts of `sizes` (bytes) in this unit, rounded so that they add up to the sum."""
        return [f"{x:.3f}" for x in rounded_to_sum([n / self.num_bytes for n in sizes], 3)]


def gib(num_bytes: int) -> str:
    """Return `num_bytes` in GiB as text with two decimals, without the unit."""
    return f"{num_bytes / GIB:.2f}"


def unit_of(largest: int) -> Unit:
    """Return the unit of a table whose largest size is `largest` bytes: MiB below 0.1 GiB.

    >>> unit_of(2**30).name, unit_of(2**20).name
    ('GiB', 'MiB')
    """
    return Unit("GiB", GIB) if largest >= SMALL else Unit("MiB", MIB)


def format_size(num_bytes: int) -> str:
    """Return `num_bytes` in GiB as short text for slides, without the unit.

    >>> format_size(3 * 2**29), format_size(2**28)
    ('1.5', '0.25')
    """
    return f"{num_bytes / GIB:.1f}" if num_bytes >= 0.95 * GIB else f"{num_bytes / GIB:.2f}"


def rounded_to_sum(values: Sequence[float], digits: int) -> list[float]:
    """Round `values` to `digits` decimals so that they add up to their rounded sum.

    All are rounded down first. Those with the largest remainders are then raised by one unit.

    >>> rounded_to_sum([0.234, 0.234, 0.234], 2)
    [0.24, 0.23, 0.23]
    """
    unit = 10**digits
    floors = [math.floor(value * unit) for value in values]
    num_raised = round(float(f"{sum(values):.{digits}f}") * unit) - sum(floors)
    order = sorted(range(len(values)), key=lambda i: floors[i] - values[i] * unit)
    for index in order[:num_raised]:
        floors[index] += 1
    return [floor / unit for floor in floors]


def gib_that_add_up(sizes: Sequence[int]) -> list[str]:
    """Return texts of `sizes` (bytes) in GiB, without the unit, rounded to add up to their sum."""
    return [f"{x:.2f}" for x in rounded_to_sum([n / GIB for n in sizes], 2)]


def shares_that_add_up(sizes: Sequence[int], total: int) -> list[str]:
    """Return texts of `sizes` in per cent of `total`, one decimal, rounded to add up to the sum."""
    whole = max(1, total)
    return [f"{x:.1f} %" for x in rounded_to_sum([100 * n / whole for n in sizes], 1)]


def counted(count: int, noun: str) -> str:
    """Return `count` and its noun, with an `s` unless `count` is 1.

    >>> counted(1, "tensor"), counted(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` in the largest binary unit that leaves a number of at least 1.

    >>> format_bytes(1536), format_bytes(-3 * 2**20), format_bytes(17)
    ('1.50 KiB', '-3.00 MiB', '17 B')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def format_count(num: int) -> str:
    """Return `num`, a count, in scientific form if it is large.

    >>> format_count(12_098_000_384), format_count(640)
    ('12.10e9', '640')
    """
    for exponent in (12, 9, 6, 3):
        if num >= 10**exponent:
            return f"{num / 10**exponent:.2f}e{exponent}"
    return str(num)


def ceil_div(numerator: int, denominator: int) -> int:
    """Return `numerator` / `denominator`, rounded up."""
    return -(-numerator // denominator)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return ceil_div(number, step) * step


def last_power_of_2(number: int) -> int:
    """Return the largest power of 2 that is at most `number`; 1 if `number` is below 1."""
    return 1 << (max(1, number).bit_length() - 1)
