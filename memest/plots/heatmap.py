"""Tables as pictures: the largest batch of every model and technique, and a sweep's verdicts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log2

from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from memest.plots import style
from memest.plots.style import Panel, Theme, require, shortened, slide, text_on, text_width
from memest.plots.words import dotted, gpu_label, version_words
from memest.report import Outcome, Verdict
from memest.units import GIB

MAX_ROWS = 14  # number of rows above which the slide becomes taller instead of the type smaller
_TOP, _BOTTOM, _LEFT, _RIGHT = 2.55, 0.3, 0.4, 0.4  # inches
_STEPS = (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 256)  # between written column heads
_SCALES = {False: ("#DCEBF7", "#08436E"), True: ("#16354A", "#A9DBF7")}
"""Colours of the least and the most, on light and dark slides; one hue, for grey prints."""


@dataclass(frozen=True, slots=True)
class _Cell:
    text: str
    short: str  # text used if `text` is too wide
    color: str
    is_oom: bool = False


def plot_largest_batch(
    table: Mapping[str, Mapping[str, int | None]], *, gpu: str, dark: bool = False,
    remarks: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw the largest batch that fits `gpu`, by row (such as a model) and column of `table`.

    A value of 0 means that not even a batch of 1 fits, None that the combination does not exist.
    `remarks` are texts for the subtitle.

    Raises:
        PlanError: the table is empty.
    """
    require(list(table))
    columns = list(dict.fromkeys(name for cells in table.values() for name in cells))
    require(columns)
    highest = max((n for cells in table.values() for n in cells.values() if n), default=1)

    def cell(row: str, column: str, theme: Theme) -> _Cell:
        largest = table[row].get(column)
        if largest is None:
            return _Cell("n/a", "", theme.background)
        if largest == 0:
            return _Cell("OOM", "", theme.band[1], is_oom=True)
        share = log2(largest) / log2(highest) if highest > 1 else 1.0
        return _Cell(str(largest), "", _shade(share, dark))

    return _draw_table(
        (list(table), columns),
        cell,
        words=(
            f"The largest batch that fits {gpu_label(gpu)}",
            dotted(*remarks, "predicted", "OOM: not even a batch of 1", version_words()),
        ),
        keys=list(zip(_shades(dark), ("1", str(round(highest**0.5)), str(highest)), strict=True)),
        dark=dark,
    )


def plot_fits(
    verdicts: Mapping[tuple[str, str], Verdict], *, across: str, gpu: str, dark: bool = False,
    remarks: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw the verdicts of a sweep by (row, column); `across` is the setting in the columns.

    A cell that fits is coloured by the share of the GPU that it needs. The subtitle has `remarks`.

    Raises:
        PlanError: there is no verdict.
    """
    require(list(verdicts))
    rows = list(dict.fromkeys(row for row, _ in verdicts))
    columns = list(dict.fromkeys(column for _, column in verdicts))
    limits = sorted({verdict.limit_bytes for verdict in verdicts.values()})
    usable = f"{' or '.join(f'{limit / GIB:.1f}' for limit in limits)} GiB usable"
    gpus = ", ".join(map(gpu_label, gpu.split(", ")))
    verdict_words = {verdict.word for verdict in verdicts.values()}

    def cell(row: str, column: str, theme: Theme) -> _Cell:
        verdict = verdicts.get((row, column))
        if verdict is None:
            return _Cell("", "", theme.background)
        if verdict.verdict is Outcome.OOM:
            return _Cell("OOM", "", theme.band[1], is_oom=True)
        need_gib = verdict.needs_bytes / GIB
        share = verdict.needs_bytes / max(1, verdict.limit_bytes)
        color = style.VERDICTS.get(verdict.word) or _shade(share, dark)
        return _Cell(f"{need_gib:.1f}", f"{need_gib:.0f}", color)

    return _draw_table(
        (rows, columns),
        cell,
        words=(
            "What fits, and what is out of memory",
            dotted(*remarks, gpus, usable, f"GiB needed by {across}", version_words()),
        ),
        keys=[
            *zip(_shades(dark), ("empty", "half full", "full"), strict=True),
            *((color, word) for word, color in style.VERDICTS.items() if word in verdict_words),
        ],
        dark=dark,
    )


def _shade(share: float, dark: bool) -> str:
    low, high = map(to_rgb, _SCALES[dark])
    red, green, blue = (a + share * (b - a) for a, b in zip(low, high, strict=True))
    return to_hex((red, green, blue))


def _shades(dark: bool) -> list[str]:
    return [_shade(share, dark) for share in (0.0, 0.5, 1.0)]


def _draw_table(
    names: tuple[Sequence[str], Sequence[str]], cell: Callable[[str, str, Theme], _Cell], *,
    words: tuple[str, str], keys: Sequence[tuple[str, str]], dark: bool,
) -> Figure:  # fmt: skip
    rows, columns = names
    inches = (style.HEIGHT - _TOP - _BOTTOM) * max(1.0, len(rows) / MAX_ROWS)
    height = inches + _TOP + _BOTTOM
    left = _LEFT + 0.2 + min(3.6, max(text_width(row, style.VALUE) for row in rows))
    width = style.WIDTH - left - _RIGHT
    with slide(dark=dark, height=height) as canvas:
        theme = canvas.theme
        panel = canvas.panel(left, _BOTTOM, width, inches)
        axes = panel.axes
        axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
        axes.set_axis_off()
        per_x, per_y = panel.per_x, panel.per_y
        cells = [[cell(row, column, theme) for column in columns] for row in rows]
        all_cells = list(chain.from_iterable(cells))
        # the largest size at which all cells can be written
        size = min(24.0, 0.68 * 72 * per_y)
        texts = [item.short or item.text for item in all_cells if not item.is_oom and item.text]
        widest = max((text_width(text, size, bold=True) for text in texts), default=0.0)
        size = max(float(style.SMALL), min(size, size * (per_x - 0.07) / max(widest, 0.01)))
        for i, row in enumerate(rows):
            axes.text(
                -0.15 / per_x, i + 0.5, shortened(row, style.VALUE, left - _LEFT - 0.2),
                ha="right", va="center_baseline", size=style.VALUE,
            )  # fmt: skip
            for j, item in enumerate(cells[i]):
                _draw_cell(panel, (i, j), item, size)
        _write_columns(panel, columns)
        canvas.write_title(*words)
        handles = [theme.key(*item) for item in keys]
        if any(item.is_oom for item in all_cells):
            handles.append(
                Patch(facecolor=theme.band[1], edgecolor=theme.ink, hatch="//", label="OOM")
            )
        canvas.write_legend(handles, top=1.28)
    return canvas.figure


def _draw_cell(panel: Panel, position: tuple[int, int], cell: _Cell, size: float) -> None:
    (i, j), per_x, per_y = position, panel.per_x, panel.per_y
    gap = min(0.02, 0.06 * per_x)
    box = (j + gap / per_x, i + gap / per_y, 1 - 2 * gap / per_x, 1 - 2 * gap / per_y)
    panel.fill(box, facecolor=cell.color, edgecolor="none", gid=f"cell:{i}:{j}")
    if cell.is_oom:
        panel.hatch(box, panel.theme.muted, zorder=2, gid=f"oom:{i}:{j}")
    texts = [t for t in (cell.text, cell.short) if text_width(t, size, bold=True) + 0.06 < per_x]
    text = texts[0] if texts else ""
    if cell.is_oom and text:
        half = (text_width(text, size, bold=True) / 2 + 0.05) / per_x
        high = size / 72 / per_y  # 72 points are an inch
        backdrop = (j + 0.5 - half, i + 0.5 - 0.65 * high, 2 * half, 1.3 * high)
        panel.fill(backdrop, facecolor=cell.color, zorder=3)
    panel.axes.text(
        j + 0.5, i + 0.5, text, ha="center", va="center_baseline", size=size, weight="bold",
        color=text_on(cell.color), zorder=4, gid=f"text:{i}:{j}",
    )  # fmt: skip


def _write_columns(panel: Panel, columns: Sequence[str]) -> None:
    """Write the heads `columns` over the table. A head of several words gets two lines if it is too
    wide for its column. If all heads have one line and the columns are too narrow, only the first
    head and every n-th head are written."""
    per_x = panel.per_x
    heads = [_wrapped(column, per_x - 0.06) for column in columns]
    widest = max(text_width(line, style.TICK) for head in heads for line in head)
    step = 1
    if max(map(len, heads)) == 1:  # numbers: leave some out instead of cutting them
        step = next(n for n in _STEPS if n * per_x > min(widest, 0.6) + 0.12 or n == _STEPS[-1])
    for j in dict.fromkeys((0, *range(step - 1, len(columns), step))):
        lines = heads[j]
        has_room = all(text_width(t, style.TICK) < step * per_x - 0.06 for t in lines)
        size = style.TICK if has_room else style.SMALL
        text = "\n".join(shortened(line, size, step * per_x - 0.06) for line in lines)
        panel.axes.text(
            j + 0.5, -0.14 / panel.per_y, text, ha="center", va="baseline", size=size,
            linespacing=1.1, clip_on=False, gid=f"head:{j}",
        )  # fmt: skip


def _wrapped(text: str, inches: float) -> list[str]:
    words = text.split()
    if text_width(text, style.TICK) <= inches or len(words) < 2:
        return [text]
    middle = min(
        range(1, len(words)), key=lambda n: max(len(" ".join(words[:n])), len(" ".join(words[n:])))
    )
    return [" ".join(words[:middle]), " ".join(words[middle:])]
