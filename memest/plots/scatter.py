"""Many experiments: predicted against measured, and the error of each."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from memest.plots.style import (
    HEIGHT,
    SMALL,
    VALUE,
    WIDTH,
    Theme,
    bare,
    percent_off,
    require,
    row_size,
    shortened,
    signed_percent,
    slide,
    text_width,
    write_title,
)
from memest.report import Measurement, Outcome, Prediction
from memest.units import GIB

Pair = tuple[Prediction, Measurement]

BANDS = (2.0, 0.5)
"""Per cent: the wide and the narrow band, the worst that is allowed of reserved and allocated."""

MAX_ROWS = 30
"""Of more experiments, those with the largest errors are listed; the diagonals show all."""

_QUANTITIES = ("peak_allocated_bytes", "peak_reserved_bytes")
_NAMES = ("peak allocated", "peak reserved")
_MARKERS = ("o", "D")
_SQUARE = 2.32  # inches
_TOP, _BOTTOM = 1.75, 0.95
_COLUMN = 1.05
"""Inches of a column of printed errors."""


def plot_scatter(pairs: Sequence[Pair], *, dark: bool = False) -> Figure:
    """Peak allocated and peak reserved: predicted over measured, and the signed errors in per cent.

    A pair whose measured run failed without an out-of-memory error is left out and counted. Runs
    that both sides call out of memory are compared by the peaks up to the failure; where the
    verdicts differ the peaks are not of the same run, and the name says so.

    Raises:
        PlanError: no pair is left.
    """
    drawn = [(p, m) for p, m in pairs if m.verdict is not Outcome.FAILED and _is_measured(m)]
    require(drawn)
    with slide(dark=dark) as (figure, theme):
        for index in range(2):
            _draw_diagonal(figure, theme, drawn, index)
        _draw_errors(figure, theme, drawn)
        left_out = len(pairs) - len(drawn)
        write_title(
            figure,
            theme,
            "Predicted against measured",
            _subtitle(len(drawn), left_out),
        )
    return figure


def _is_measured(measured: Measurement) -> bool:
    return min(measured.peak_allocated_bytes, measured.peak_reserved_bytes) > 0


def _subtitle(num_drawn: int, left_out: int) -> str:
    noun = "experiment" if num_drawn == 1 else "experiments"
    text = f"{num_drawn} {noun}; error = (predicted − measured) / measured"
    return text + (f"; {left_out} without a measurement left out" if left_out else "")


def _draw_diagonal(figure: Figure, theme: Theme, pairs: Sequence[Pair], index: int) -> None:
    """One square panel; allocated over reserved, at the left."""
    quantity = _QUANTITIES[index]
    low = HEIGHT - _TOP - _SQUARE - index * (_SQUARE + 0.52)
    axes = figure.add_axes((1.15 / WIDTH, low / HEIGHT, _SQUARE / WIDTH, _SQUARE / HEIGHT))
    points = [(getattr(m, quantity) / GIB, getattr(p, quantity) / GIB) for p, m in pairs]
    end = 1.08 * max(max(point) for point in points)
    for band, color in zip(BANDS, theme.band, strict=True):
        axes.fill_between(
            [0, end], [0, end * (1 - band / 100)], [0, end * (1 + band / 100)], color=color,
            linewidth=0,
        )  # fmt: skip
    axes.plot([0, end], [0, end], color=theme.muted, linewidth=1.2)
    axes.scatter(
        [x for x, _ in points], [y for _, y in points], s=52, marker=_MARKERS[index],
        facecolor=theme.markers[index], edgecolor=theme.background, linewidth=0.8, zorder=3,
        gid=quantity,
    )  # fmt: skip
    bare(axes, theme, grid="y")
    axes.grid(axis="both", color=theme.grid, linewidth=0.8)
    axes.set(xlim=(0, end), ylim=(0, end))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelsize=SMALL)
    axes.set_ylabel("predicted, GiB", size=SMALL)
    if index == 1:
        axes.set_xlabel("measured, GiB", size=SMALL, labelpad=2)
    axes.set_title(_NAMES[index], size=VALUE, weight="bold", loc="left", pad=6)


def _draw_errors(figure: Figure, theme: Theme, pairs: Sequence[Pair]) -> None:
    """A row per experiment: its name, both errors as markers, both errors as numbers."""
    rows = _listed(pairs)
    height = HEIGHT - _TOP - _BOTTOM
    size = row_size(len(rows), height)
    names = [shortened(_row_name(p, m), size, 3.6) for p, m in rows]
    left = 3.95 + max(text_width(name, size) for name in names)
    right = WIDTH - 0.35 - 2 * _COLUMN
    axes = figure.add_axes(
        (left / WIDTH, _BOTTOM / HEIGHT, (right - left) / WIDTH, height / HEIGHT)
    )
    errors = [[percent_off(getattr(p, q), getattr(m, q)) for p, m in rows] for q in _QUANTITIES]
    reach = max(BANDS[0], *(abs(e) for column in errors for e in column)) * 1.12
    for band, color in zip(BANDS, theme.band, strict=True):
        axes.axvspan(-band, band, color=color, linewidth=0, zorder=0)
    axes.axvline(0, color=theme.ink, linewidth=1.6)
    axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.5, -0.5))
    bare(axes, theme, grid="x")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(axis="x", labelsize=VALUE)
    axes.set_xlabel("error, %", size=VALUE, labelpad=2)
    axes.set_yticks(range(len(rows)), names, size=size)
    for index in (1, 0):
        axes.scatter(
            errors[index], range(len(rows)), s=(0.95 * size) ** 2 * (0.62 if index else 0.8),
            marker=_MARKERS[index], facecolor=theme.markers[index], edgecolor=theme.background,
            linewidth=0.8, zorder=3, gid=f"error:{_QUANTITIES[index]}", clip_on=False,
        )  # fmt: skip
    for row, (p, m) in enumerate(rows):
        for index, quantity in enumerate(_QUANTITIES):
            text = signed_percent(getattr(p, quantity), getattr(m, quantity))
            _write_number(axes, right - left, row, index, text.removesuffix(" %"), size)
    _write_heads(figure, theme, pairs, left, right)


def _write_number(
    axes: Axes, width: float, row: int, index: int, text: str, size: float
) -> None:
    x = 1 + (_COLUMN * (index + 0.78) + 0.05) / width
    axes.text(
        x, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center_baseline",
        size=size, clip_on=False,
    )  # fmt: skip


def _write_heads(
    figure: Figure, theme: Theme, pairs: Sequence[Pair], left: float, right: float
) -> None:
    """Over the rows: what the markers are, the median and the worst of all pairs, the columns."""
    for index, quantity in enumerate(_QUANTITIES):
        errors = [percent_off(getattr(p, quantity), getattr(m, quantity)) for p, m in pairs]
        sizes = [abs(e) for e in errors]
        worst = max(errors, key=abs)
        sign = "+" if worst > 0 else "−"
        text = f"{_NAMES[index]}: median {median(sizes):.2f} %, worst {sign}{abs(worst):.2f} %"
        figure.text(
            (4.35 + index * 4.55) / WIDTH, 1 - 1.36 / HEIGHT, text, size=VALUE, weight="bold",
            va="center", gid=f"summary:{quantity}",
        )  # fmt: skip
        figure.add_artist(
            Line2D(
                [(4.15 + index * 4.55) / WIDTH], [1 - 1.36 / HEIGHT], marker=_MARKERS[index],
                markersize=12, markerfacecolor=theme.markers[index],
                markeredgecolor=theme.background,
            )
        )  # fmt: skip


def _listed(pairs: Sequence[Pair]) -> list[Pair]:
    """All pairs in their order, or those with the largest errors where they are too many."""

    def worst(index: int) -> float:
        predicted, measured = pairs[index]
        return max(abs(percent_off(getattr(predicted, q), getattr(measured, q))) for q in _QUANTITIES)

    kept = sorted(sorted(range(len(pairs)), key=worst, reverse=True)[:MAX_ROWS])
    return [pairs[index] for index in kept]


def _row_name(predicted: Prediction, measured: Measurement) -> str:
    if predicted.verdict is not measured.verdict:
        return f"{measured.name} (verdicts differ)"
    return f"{measured.name} (OOM)" if measured.verdict is Outcome.OOM else measured.name


