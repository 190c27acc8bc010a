"""Pages with parts that scripts write: tables in Markdown, and what is between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of words."""
    first, *lines = (f"| {' | '.join(line)} |\n" for line in (head, *rows))
    return "".join([first, "|---" * len(head) + "|\n", *lines])


def with_part(text: str, begin: str, end: str, part: str) -> str:
    """Return the text of a page with `part` between its marks."""
    head, _, rest = text.partition(begin)
    return f"{head}{begin}{part}{end}{rest.partition(end)[2]}"


def write_part(page: Path, begin: str, end: str, part: str) -> None:
    """Write `part` between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    page.write_text(with_part(text, begin, end, part), encoding="utf-8")
