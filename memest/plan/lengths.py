"""`lengths` of a plan: tokens of each micro-batch, from a list, a text or a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from memest.errors import PlanError, shown
from memest.plan.reading import read_limited

MAX_LENGTHS = 10_000
"""Micro-batches, each of which is run."""

_MAX_FILE_BYTES = 1 << 20


def read_lengths(value: Any) -> tuple[int, ...]:
    """The numbers of a list, of a text such as `512,96`, or of a file: JSON, or one per line.

    Raises:
        PlanError: it is none of these, or a number is not positive.
    """
    items = value
    if isinstance(value, str | Path):
        text = str(value)
        if not re.fullmatch(r"[-+\d,\s]+", text):
            text = read_limited(Path(text), _MAX_FILE_BYTES, what="a list of lengths")
        items = _numbers(text)
    if isinstance(items, int) and not isinstance(items, bool):
        items = [items]
    if not isinstance(items, list | tuple):
        raise PlanError(f"`lengths` is {shown(value)}", hint="give a list of numbers, or a file")
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or item < 1:
            raise PlanError(
                f"`lengths` has {shown(item)}", hint="give positive whole numbers of tokens"
            )
    if not 1 <= len(items) <= MAX_LENGTHS:
        raise PlanError(f"`lengths` has {len(items)} numbers", hint=f"give 1 to {MAX_LENGTHS}")
    return tuple(items)


def steps_of(lengths: tuple[int, ...], num_micro_batches: Any) -> int:
    """Optimizer steps that there are lengths for; at least one."""
    is_count = isinstance(num_micro_batches, int) and num_micro_batches > 0
    return max(1, len(lengths) // (num_micro_batches if is_count else 1))


def _numbers(text: str) -> list[Any]:
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        return found if isinstance(found, list) else [text[:40]]
    words = text.replace(",", " ").split()
    return [int(word) if word.lstrip("+-").isdigit() else word for word in words]
