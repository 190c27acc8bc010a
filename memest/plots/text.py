"""Texts on slides: their sizes, widths and colours."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from memest.plots.words import gpu_label
from memest.units import GIB

FONT = "DejaVu Sans"  # comes with matplotlib, so every machine draws the same
_LINE = 1.2  # matplotlib's line spacing, in sizes of type
_MAX_LETTERS = 250  # more never fit a line

TITLE, LABEL, TICK, VALUE, SMALL = 26, 20, 18, 16, 14  # points; a long list goes below `SMALL`


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the inches of one line of `text`."""
    if not text.strip():
        return 0.0
    font = FontProperties(family=FONT, weight="bold" if bold else "normal")
    text = text.replace("$", "S")  # matplotlib would measure a formula
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) / 72


def shortened(text: str, size: float, inches: float, *, bold: bool = False) -> str:
    """Return `text` with its middle replaced by an ellipsis where it is wider than `inches`."""

    def cut(num_kept: int) -> str:
        tail = num_kept // 2
        return f"{text[: num_kept - tail]}…{text[len(text) - tail :]}"

    text = " ".join(text.split())
    if len(text) <= _MAX_LETTERS and text_width(text, size, bold=bold) <= inches:
        return text
    kept = range(2, min(len(text), _MAX_LETTERS))
    num_fit = bisect_right(kept, inches, key=lambda n: text_width(cut(n), size, bold=bold))
    return cut(kept[num_fit - 1]) if num_fit else "…"


def wrapped(text: str, size: float, inches: float) -> str:
    """Return `text` in lines of at most `inches`, broken at spaces; its own lines stay."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        start = len(lines)
        for word in paragraph.split():
            if len(lines) > start and text_width(f"{lines[-1]} {word}", size) <= inches:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
    return "\n".join(lines)


def fitted(texts: Sequence[str], inches: float, tall: float) -> tuple[list[str], float]:
    """Return `texts` wrapped to `inches`, at most `tall` inches high, and the largest such size."""
    for size in (VALUE, SMALL, 12, 11, 10, 9, 8, 7):
        found = [wrapped(text, size, inches) for text in texts]
        lines = [text.split("\n") for text in found]
        if max(map(len, lines), default=0) * size * _LINE / 72 <= tall and all(
            text_width(line, size) <= inches for each in lines for line in each
        ):
            return found, size
    return found, size


def first_size(text: str, sizes: Sequence[float], inches: float, *, bold: bool = False) -> float:
    """Return the first of `sizes` in which `text` is at most `inches` wide, or the last."""
    return next((s for s in sizes if text_width(text, s, bold=bold) <= inches), sizes[-1])


def name_and_tag(name: str, tag: str, size: float, inches: float) -> str:
    """Return `name` and `tag`, the name cut where both together are wider than `inches`."""
    return shortened(name, size, inches - text_width(tag, size)) + tag


def limit_text(gpu: str, limit_bytes: int, inches: float) -> str:
    """Return the name of a GPU's line, shortened to `inches`."""
    text = f"{gpu_label(gpu)}: {limit_bytes / GIB:.1f} GiB usable"
    return shortened(text, VALUE, inches, bold=True)


def row_size(num_rows: int, inches: float) -> float:
    """Return the size of type for `num_rows` lines in `inches`."""
    return min(float(VALUE), 0.86 * 72 * inches / num_rows)


def text_on(color: str) -> str:
    """Return black or white, the one with more contrast on `color` (WCAG 2 relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#FFFFFF"
