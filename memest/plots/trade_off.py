"""Chart of the trade: memory that is left on a GPU, and the estimated time of a step."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from memest.plots.style import (
    HEIGHT,
    SMALL,
    VALUE,
    VERDICTS,
    WIDTH,
    Panel,
    require,
    row_size,
    shortened,
    slide,
    text_width,
)
from memest.plots.words import dotted, gpu_label, token_words, version_words
from memest.report import Outcome, Prediction, StepTime
from memest.units import GIB

MAX_ROWS = 16  # above which the slide becomes taller instead of the type smaller
_TOP, _BOTTOM, _NAMES, _GAP, _RIGHT = 1.95, 0.45, 4.4, 0.55, 0.9  # inches
_BAR = 0.62  # of the height of a row
_BOUND = {"host": "#8C8C8C", "compute": "#0072B2", "memory": "#E69F00", "link": "#009E73"}
"""Colours of what binds a step: Okabe and Ito, readable by the colour-blind."""

_LEFT, _LACK = "#56B4E9", "#D55E00"
"""Colours of memory that is left, and of memory that lacks."""


def plot_trade_off(reports: Sequence[Prediction], *, gpu: str, dark: bool = False) -> Figure:
    """Draw per experiment the memory left on `gpu`, in GiB, and the time of a step, in seconds.

    The line over a bar of the time is its interval. An experiment that does not fit has its lack
    of memory to the left of the zero, and its bar of the time is faint.

    Raises:
        PlanError: there is no report.
    """
    require(reports)
    height = max(HEIGHT, HEIGHT * len(reports) / MAX_ROWS)
    inner = height - _TOP - _BOTTOM
    half = (WIDTH - _NAMES - _GAP - _RIGHT) / 2
    size = row_size(len(reports), inner)
    with slide(dark=dark, height=height) as canvas:
        theme = canvas.theme
        left, right = (
            canvas.panel(start, _BOTTOM, half, inner, grid="x")
            for start in (_NAMES, _NAMES + half + _GAP)
        )
        _draw_memory(left, reports, gpu, size)
        _draw_time(right, reports, gpu, size)
        for panel, title in ((left, "GiB left"), (right, "seconds a step, estimated")):
            panel.axes.set_title(title, size=VALUE, loc="left", color=theme.ink)
            panel.axes.set_ylim(len(reports) - 0.5, -0.5)
            panel.axes.set_yticks([])
        bound = {time.bound_by for r in reports if (time := r.times.get(gpu))}
        used = {name: color for name, color in _BOUND.items() if name in bound}
        handles: list[Patch] = [theme.key(c, f"bound by {n}") for n, c in used.items()]
        canvas.write_legend(handles, top=1.2)
        words = (token_words(reports), "line: interval of the estimate", version_words(reports))
        canvas.write_title(f"Memory against time on {gpu_label(gpu)}", dotted(*words))
    return canvas.figure


def _draw_memory(panel: Panel, reports: Sequence[Prediction], gpu: str, size: float) -> None:
    axes = panel.axes
    left = [r.verdicts[gpu].margin_bytes / GIB for r in reports]
    low, high = min(0.0, *left), max(0.0, *left)
    number = max(text_width(f"{value:+.1f}", min(size, VALUE)) for value in left) + 0.15
    reach = (high - low or 1.0) / (1 - number * (1 + (low < 0)) / panel.width)
    per_inch = reach / panel.width
    axes.set_xlim(low - number * per_inch * (low < 0), high + number * per_inch)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    for row, (report, value) in enumerate(zip(reports, left, strict=True)):
        word = report.verdicts[gpu].word
        color = VERDICTS.get(word) or (_LACK if word == "OOM" else _LEFT)
        axes.barh(row, value, height=_BAR, color=color, gid=f"memory-{row}")
        beside = 0.05 * per_inch if value >= 0 else -0.05 * per_inch
        axes.text(
            value + beside, row, f"{value:+.1f}" if value < 0 else f"{value:.1f}",
            ha="left" if value >= 0 else "right", va="center", size=min(size, VALUE),
        )  # fmt: skip
        name = shortened(report.name, size, _NAMES - 0.7)
        axes.annotate(
            name, (0, row), xycoords=("axes fraction", "data"), xytext=(-10, 0),
            textcoords="offset points", ha="right", va="center", size=size, gid=f"name-{row}",
        )  # fmt: skip
    axes.axvline(0, color=panel.theme.ink, linewidth=1.2)


def _draw_time(panel: Panel, reports: Sequence[Prediction], gpu: str, size: float) -> None:
    axes, theme = panel.axes, panel.theme
    times: list[StepTime | None] = [r.times.get(gpu) for r in reports]
    axes.set_xlim(0, 1.3 * max((t.high_seconds for t in times if t), default=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    for row, (report, time) in enumerate(zip(reports, times, strict=True)):
        if time is None:
            axes.text(0, row, " no estimate", va="center", size=SMALL, color=theme.muted)
            continue
        color = _BOUND[time.bound_by]
        is_oom = report.verdicts[gpu].verdict is Outcome.OOM
        faint = 0.4 if is_oom else 1.0
        axes.barh(row, time.seconds, height=_BAR, color=color, alpha=faint, gid=f"time-{row}")
        axes.plot([time.low_seconds, time.high_seconds], [row, row], color=theme.ink, linewidth=1.6)
        text = f" {time.seconds:.3g}" + " OOM" * is_oom
        axes.text(time.high_seconds, row, text, va="center", size=min(size, VALUE))
