"""Memory per GPU over the number of GPUs: a line for each strategy, and what of it stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2, nan

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from memest.errors import PlanError
from memest.estimator.search.scaling import ScalingLine, constant_terms
from memest.plots.style import (
    HEIGHT,
    LABEL,
    TICK,
    VALUE,
    WIDTH,
    Theme,
    bare,
    card_label,
    shortened,
    slide,
    text_width,
    write_title,
)
from memest.plots.words import label_of, plan_line
from memest.report import Outcome, Prediction
from memest.units import GIB, format_size

_LEFT, _TOP, _BOTTOM = 1.0, 2.0, 0.95  # inches
_COLUMN = 5.75
"""Inches at the right: each strategy's name, size and the terms that stay."""

_BLOCK = 0.86  # inches of one strategy in the column
_STAYS = 15  # points of the terms that stay
_BEFORE = 0.68  # inches of its leader and marker
_TERMS = 3
"""Terms that are named of each strategy."""

_MIN_SHARE = 0.01
"""Of the peak; what is less is not named."""

_FAMILIES = {
    "ddp": ("", "o"),
    "fsdp": ("#0072B2", "s"),
    "fsdp2": ("#56B4E9", "D"),
    "deepspeed_stage_1": ("#E69F00", "^"),
    "deepspeed_stage_2": ("#D55E00", "v"),
    "deepspeed_stage_3": ("#CC79A7", "P"),
}
"""Colour (empty is the ink) and marker, each strategy's own, whatever is drawn beside it."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a strategy is drawn; markers and dashes tell without colour too."""

    color: str
    marker: str
    dashes: str | tuple[int, tuple[int, ...]]
    fill: str


def look_of(strategy: str, theme: Theme) -> Look:
    """A colour and marker for each family; offload, and DDP's search, are dashed and hollow."""
    base = strategy.removesuffix("_offload").removesuffix("_find_unused_parameters_true")
    color, marker = _FAMILIES[base]
    color = color or theme.ink
    if base == strategy:
        return Look(color, marker, "-", color)
    return Look(color, marker, (0, (4, 2)), theme.background)


def large_constants(line: ScalingLine) -> dict[str, int]:
    """The terms that do not shrink, without what nobody would see."""
    least = _MIN_SHARE * _last(line).peak_allocated_bytes
    return {kind: size for kind, size in constant_terms(line).items() if size > least}


def needed_bytes(report: Prediction) -> int:
    """Bytes reserved at the peak; of a run out of memory, what it would be without a limit."""
    if report.verdict is Outcome.OOM:
        return report.unlimited_reserved_bytes
    return report.peak_reserved_bytes


def plot_scaling(lines: Sequence[ScalingLine], *, dark: bool = False) -> Figure:
    """Bytes reserved per GPU over the number of GPUs, both axes in powers of two.

    Under the line of the card a strategy fits; a cross over it is a run out of memory, at what it
    would reserve without a limit. At the right, in the order of the lines' ends: what is reserved
    on the largest number of GPUs, and the terms of the peak that do not shrink with it.

    Raises:
        PlanError: there is no prediction.
    """
    drawn = [line for line in lines if line.reports]
    if not drawn:
        raise PlanError("there is no prediction to draw", hint="name another strategy")
    drawn.sort(key=lambda line: needed_bytes(_last(line)))
    with slide(dark=dark) as (figure, theme):
        width, height = WIDTH - _LEFT - _COLUMN, HEIGHT - _TOP - _BOTTOM
        axes = figure.add_axes((_LEFT / WIDTH, _BOTTOM / HEIGHT, width / WIDTH, height / HEIGHT))
        bare(axes, theme, grid="y")
        _set_axes(axes, drawn)
        for line in drawn:
            _draw_line(axes, theme, line)
        _draw_limit(axes, theme, drawn, (width, height))
        _draw_column(axes, theme, drawn, (width, height))
        _write_words(figure, theme, drawn)
    return figure


def _last(line: ScalingLine) -> Prediction:
    return line.reports[max(line.reports)]


def _limits(lines: Sequence[ScalingLine]) -> list[int]:
    """What the allocator may reserve; less where more libraries take their part."""
    reports = [report for line in lines for report in line.reports.values()]
    return sorted({report.verdicts[report.gpu].limit_bytes for report in reports})


def _set_axes(axes: Axes, lines: Sequence[ScalingLine]) -> None:
    numbers = sorted({number for line in lines for number in line.reports})
    sizes = [needed_bytes(report) / GIB for line in lines for report in line.reports.values()]
    sizes.append(_limits(lines)[0] / GIB)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    space = 2 ** (0.06 * max(1.0, log2(numbers[-1] / numbers[0])))
    axes.set(xlim=(numbers[0] / space, numbers[-1] * space))
    axes.set(ylim=(min(sizes) / 1.25, max(sizes) * 1.3))
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(number) for number in numbers])
    ticks = [2.0**power for power in range(-10, 16) if min(sizes) / 1.25 <= 2.0**power]
    ticks = [tick for tick in ticks if tick <= 1.3 * max(sizes)]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels([f"{tick:g}" for tick in ticks])
    axes.set_xlabel("GPUs", size=LABEL, labelpad=4)
    axes.set_ylabel("reserved per GPU, GiB", size=LABEL)


def _draw_line(axes: Axes, theme: Theme, line: ScalingLine) -> None:
    look = look_of(line.strategy, theme)
    sizes = {number: needed_bytes(report) / GIB for number, report in line.reports.items()}
    numbers = sorted({*sizes, *line.missing})  # a line is broken where a figure is missing
    axes.plot(
        numbers, [sizes.get(number, nan) for number in numbers],
        color=look.color, linewidth=3.2, linestyle=look.dashes,
        marker=look.marker, markersize=11, markerfacecolor=look.fill, markeredgewidth=2.2,
        markeredgecolor=look.color, zorder=4, gid=f"line:{line.strategy}", clip_on=False,
    )  # fmt: skip
    failed = [n for n, report in line.reports.items() if report.verdict is Outcome.OOM]
    if failed:
        axes.plot(
            failed, [sizes[n] for n in failed], color=theme.ink, linestyle="none", marker="x",
            markersize=17, markeredgewidth=3.4, zorder=6, gid=f"oom:{line.strategy}",
            clip_on=False,
        )  # fmt: skip


def _draw_limit(
    axes: Axes, theme: Theme, lines: Sequence[ScalingLine], panel: tuple[float, float]
) -> None:
    """The card's line, its name over or under it where no strategy passes, if there is room."""
    limits = _limits(lines)
    label = card_label(_last(lines[0]).gpu)
    text = f"{label}: {limits[0] / GIB:.1f} GiB usable"
    text = shortened(text, VALUE, panel[0] - 0.2, bold=True)
    is_right, is_over = _free_place(axes, lines, text_width(text, VALUE, bold=True), panel)
    axes.axhline(limits[0] / GIB, color=theme.limit, linewidth=3.0, zorder=3, gid="limit")
    axes.annotate(
        text, (0.995 if is_right else 0.005, limits[0] / GIB), (0, 5 if is_over else -5),
        xycoords=axes.get_yaxis_transform(), textcoords="offset points",
        ha="right" if is_right else "left", va="bottom" if is_over else "top", size=VALUE,
        weight="bold", zorder=5, gid="limit:name",
        bbox={"facecolor": theme.background, "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip


def _free_place(
    axes: Axes, lines: Sequence[ScalingLine], wide: float, panel: tuple[float, float]
) -> tuple[bool, bool]:
    """(at the right, over the line) where a text of `wide` inches meets the fewest strategies."""
    x_low, x_high = (log2(edge) for edge in axes.get_xlim())
    y_low, y_high = (log2(edge) for edge in axes.get_ylim())
    per_x, per_y = panel[0] / (x_high - x_low), panel[1] / (y_high - y_low)
    limit = (log2(_limits(lines)[0] / GIB) - y_low) * per_y
    points: list[tuple[float, float]] = []
    for line in lines:
        ends = [
            ((log2(n) - x_low) * per_x, (log2(needed_bytes(r) / GIB) - y_low) * per_y)
            for n, r in line.reports.items()
        ]
        for (x0, y0), (x1, y1) in pairwise([ends[0], *ends]):
            points += [(x0 + (x1 - x0) * i / 40, y0 + (y1 - y0) * i / 40) for i in range(41)]

    def crossings(place: tuple[bool, bool]) -> int:
        is_right, is_over = place
        left = panel[0] - wide - 0.2 if is_right else -0.1
        low = limit if is_over else limit - 0.45
        return sum(left < x < left + wide + 0.3 and low < y < low + 0.45 for x, y in points)

    return min([(True, True), (True, False), (False, True), (False, False)], key=crossings)


def _draw_column(
    axes: Axes, theme: Theme, lines: Sequence[ScalingLine], panel: tuple[float, float]
) -> None:
    """A block for each strategy, beside the end of its line where others leave room."""
    width, height = panel
    low, high = (log2(limit) for limit in axes.get_ylim())
    ends = [(log2(needed_bytes(_last(line)) / GIB) - low) / (high - low) * height for line in lines]
    block = min(_BLOCK, height / len(lines))
    places = spread(ends, block, height)
    size = min(LABEL, 72 * block / 2.6)
    for line, end, place in zip(lines, ends, places, strict=True):
        look = look_of(line.strategy, theme)
        x = _end_of(axes, line) * width
        axes.plot(
            [x / width + 0.02, 1 + 0.25 / width, 1 + 0.34 / width],
            [end / height, place / height, place / height],
            transform=axes.transAxes, color=look.color, linewidth=1.6, clip_on=False, zorder=2,
        )  # fmt: skip
        axes.plot(
            [1 + 0.47 / width], [place / height], transform=axes.transAxes, marker=look.marker,
            color=look.color, markersize=11, markerfacecolor=look.fill, markeredgewidth=2.2,
            linestyle="none", clip_on=False,
        )  # fmt: skip
        report, left = _last(line), 1 + _BEFORE / width
        is_oom = report.verdict is Outcome.OOM
        text = f"{label_of(line.strategy)}  {format_size(needed_bytes(report))}"
        axes.text(
            left, place / height, f"{text}  OOM" if is_oom else text, transform=axes.transAxes,
            size=size, weight="bold", va="center_baseline", clip_on=False,
            gid=f"end:{line.strategy}",
        )  # fmt: skip
        axes.text(
            left, (place - 0.42 * block) / height, _stays(line), transform=axes.transAxes,
            size=min(_STAYS, 0.86 * size), color=theme.muted, va="center_baseline", clip_on=False,
            gid=f"stays:{line.strategy}",
        )  # fmt: skip


def _end_of(axes: Axes, line: ScalingLine) -> float:
    """Where a line ends, as a part of the axis."""
    low, high = (log2(limit) for limit in axes.get_xlim())
    return (log2(max(line.reports)) - low) / (high - low)


def _stays(line: ScalingLine) -> str:
    """The largest terms that do not shrink, as many as there is room for."""
    terms = [f"{kind} {format_size(size)}" for kind, size in large_constants(line).items()]
    for count in range(min(_TERMS, len(terms)), 0, -1):
        text = ", ".join(terms[:count])
        if text_width(text, _STAYS) < _COLUMN - _BEFORE - 0.1:
            return text
    return "nothing that stays" if len(line.reports) > 1 else ""


def spread(ends: Sequence[float], gap: float, height: float) -> list[float]:
    """Ascending places near `ends`, at least `gap` apart, from `gap` / 2 up to `height`.

    >>> spread([1.0, 1.1, 4.0], 0.5, 5.0)
    [1.0, 1.5, 4.0]
    """
    places: list[float] = []
    for end in ends:
        places.append(max(end, places[-1] + gap if places else gap / 2))
    top = height - 0.1
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], top)
        top = places[index] - gap
    assert all(b - a > 0 for a, b in pairwise(places))
    return places


def subtitle_of(report: Prediction) -> str:
    """What is trained, and how, whatever the number of GPUs."""
    plan = {**report.plan, "devices": 1, "strategy": "auto"}
    return plan_line([replace(report, plan=plan)], "per GPU, predicted")


def _missing_words(lines: Sequence[ScalingLine]) -> str:
    """The figures that a chart lacks, as a line of text."""
    named = [
        f"{label_of(line.strategy)} on {', '.join(map(str, line.missing))}"
        for line in lines
        if line.missing
    ]
    return f"not predicted: {'; '.join(named)}" if named else ""


def _write_words(figure: Figure, theme: Theme, lines: Sequence[ScalingLine]) -> None:
    figure.text(
        _LEFT / WIDTH, 0.1 / HEIGHT, shortened(_missing_words(lines), VALUE, WIDTH - _LEFT - 0.4),
        size=VALUE, color=theme.muted, va="bottom", gid="missing",
    )  # fmt: skip
    plain = next((line for line in lines if not line.strategy.endswith("_offload")), lines[0])
    report, largest = _last(plain), max(max(line.reports) for line in lines)
    write_title(figure, theme, f"{report.name} on many GPUs", subtitle_of(report))
    figure.text(
        1 - (_COLUMN - _BEFORE) / WIDTH, 1 - 1.42 / HEIGHT, f"on {largest} GPUs, GiB", size=TICK,
        weight="bold", va="top", gid="column",
    )  # fmt: skip
    figure.text(
        1 - (_COLUMN - _BEFORE) / WIDTH, 1 - 1.74 / HEIGHT, "and what of it does not shrink",
        size=VALUE, color=theme.muted, va="top",
    )  # fmt: skip
    if any(r.verdict is Outcome.OOM for line in lines for r in line.reports.values()):
        mark = Line2D(
            [], [], color=theme.ink, linestyle="none", marker="x", markersize=13,
            markeredgewidth=3.0, label="out of memory: what it would need",
        )  # fmt: skip
        figure.legend(
            handles=[mark], loc="upper left", fontsize=VALUE, frameon=False, handlelength=1.0,
            bbox_to_anchor=(_LEFT / WIDTH, 1 - 1.38 / HEIGHT), labelcolor=theme.ink,
            bbox_transform=figure.transFigure, borderaxespad=0.0, handletextpad=0.5,
        )  # fmt: skip
