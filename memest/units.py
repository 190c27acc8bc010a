"""Bytes to text and back: the one place where GiB appear."""

from __future__ import annotations

import re

from memest.errors import PlanError, shown

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SUFFIXES = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """The number of bytes in `text`; binary and decimal suffixes, a bare number is bytes.

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


def format_gib(num_bytes: int, digits: int = 2) -> str:
    """`num_bytes` in GiB.

    >>> format_gib(16 * 2**30)
    '16.00 GiB'
    """
    return f"{num_bytes / GIB:.{digits}f} GiB"


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` in the largest binary unit that leaves a number of at least 1.

    >>> format_bytes(1536), format_bytes(-3 * 2**20), format_bytes(17)
    ('1.50 KiB', '-3.00 MiB', '17 B')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def format_count(num: int) -> str:
    """A count as a lecture writes it.

    >>> format_count(12_098_000_384), format_count(640)
    ('12.10e9', '640')
    """
    for exponent in (12, 9, 6, 3):
        if num >= 10**exponent:
            return f"{num / 10**exponent:.2f}e{exponent}"
    return str(num)
