"""docs/img/rivals.png: predicted over measured, a strip for each tool."""

from __future__ import annotations

from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from memest.plots.style import HEIGHT, SMALL, VALUE, WIDTH, Canvas, slide
from rivals.page import LABELS
from rivals.scores import OURS, scores_of

TOTALS = {"allocated": "peak allocated", "process": "process (nvidia-smi)"}
TICKS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# All in inches.
_LEFT, _TOP, _BOTTOM, _GAP, _RIGHT = 3.45, 1.95, 0.9, 0.6, 0.4


def draw(data: dict[str, Any]) -> Figure:
    """Two panels, peak allocated and process, with a common axis of ratios."""
    names = [name for name in data["tools"] if scores_of(data, name).num_expressed]
    ratios = {
        (name, total): [1 + error / 100 for error in getattr(scores_of(data, name), total)]
        for name in names
        for total in TOTALS
    }
    everything = [ratio for column in ratios.values() for ratio in column]
    reach = (min(everything) / 1.15, max(everything) * 1.15)
    with slide(dark=False) as canvas:
        canvas.write_title(
            "Predicted over measured, by tool",
            "each dot a plan measured on an H200 or H100 that the tool can express; marks: median",
        )
        for index, total in enumerate(TOTALS):
            columns = [ratios[name, total] for name in names]
            _draw_panel(canvas, index, total, list(zip(names, columns, strict=True)), reach)
    return canvas.figure


def _draw_panel(
    canvas: Canvas,
    index: int,
    total: str,
    rows: list[tuple[str, list[float]]],
    reach: tuple[float, float],
) -> None:
    width = (WIDTH - _LEFT - _GAP - _RIGHT) / 2
    height = HEIGHT - _TOP - _BOTTOM
    left = _LEFT + index * (width + _GAP)
    theme = canvas.theme
    axes = canvas.panel(left, _BOTTOM, width, height, grid="x").axes
    axes.set_xscale("log")
    axes.spines["left"].set_visible(False)
    axes.set(xlim=reach, ylim=(len(rows) - 0.5, -0.5))
    axes.axvline(1, color=theme.ink, linewidth=1.6, zorder=1)
    for row, (name, column) in enumerate(rows):
        if not column:
            axes.text(
                1.1, row, "not predicted", size=SMALL, color=theme.muted, va="center_baseline",
                bbox=theme.box(2),
            )  # fmt: skip
            continue
        # A fixed zigzag keeps dots of like value apart, the same in every run of the script.
        offsets = [row + 0.48 * (((i + 1) * 0.618034) % 1 - 0.5) for i in range(len(column))]
        axes.scatter(
            column, offsets, s=46, facecolor=theme.markers[name != OURS], alpha=0.55,
            edgecolor=theme.background, linewidth=0.6, zorder=3, gid=f"{total}:{name}",
        )  # fmt: skip
        for side in (-1, 1):  # above and under the dots, which they would hide
            axes.vlines(
                median(column), row + side * 0.28, row + side * 0.44, color=theme.ink, linewidth=4,
                zorder=4,
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), _names(rows) if index == 0 else [], size=VALUE)
    axes.xaxis.set_major_locator(FixedLocator([t for t in TICKS if reach[0] < t < reach[1]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.tick_params(axis="x", labelsize=SMALL, pad=6)
    axes.set_xlabel("predicted / measured", size=SMALL, labelpad=6)
    axes.set_title(TOTALS[total], size=VALUE, weight="bold", loc="left", pad=10)


def _names(rows: list[tuple[str, list[float]]]) -> list[str]:
    return [f"{LABELS[name]} ({len(column)})" for name, column in rows]
