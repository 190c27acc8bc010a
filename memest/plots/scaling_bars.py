"""One strategy over the number of GPUs: what fills each GPU at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from memest.errors import PlanError
from memest.estimator.search.scaling import ScalingLine, kind_bytes
from memest.plots.scaling import (
    large_constants,
    needed_bytes,
    subtitle_of,
)
from memest.plots.style import (
    HEIGHT,
    KINDS,
    LABEL,
    TICK,
    VALUE,
    WIDTH,
    Theme,
    bare,
    card_label,
    hatch,
    key,
    shortened,
    slide,
    text_on,
    text_width,
    write_legend,
    write_title,
)
from memest.plots.timeline import color_of
from memest.plots.words import label_of
from memest.report import Outcome, Prediction
from memest.units import GIB, format_size

STACK = (*KINDS[:-1], "temporaries", "rest")
"""From the axis; the rest is buffers, the batch, workspaces and rounding."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 1.0, 0.3, 2.15, 0.95  # inches
_GAP = 1.1  # inches between the two panels
_BAR = 0.72  # of the distance between bars
_SMALL = 0.4
"""Bars below this part of the highest are drawn once more, larger, at the right."""

_MAX_ENLARGED = 4


def stack_of(report: Prediction) -> dict[str, int]:
    """Bytes of each of `STACK`; they add up to the peak allocated."""
    parts = dict.fromkeys(STACK, 0)
    for kind, size in kind_bytes(report).items():
        parts[kind if kind in parts else "rest"] += size
    return parts


def plot_scaling_bars(line: ScalingLine, *, dark: bool = False) -> Figure:
    """A stacked bar at the peak for each number of GPUs, the small ones once more at the right.

    The dashed outline over a bar is what is reserved beside it, and the number at its top is what
    is reserved in all. A bar that is out of memory is
    hatched and ends where the run failed. The kinds that do not shrink say so in the legend.

    Raises:
        PlanError: there is no prediction.
    """
    if not line.reports:
        raise PlanError(
            f"`{line.strategy}` has no prediction to draw", hint="name another strategy"
        )
    highest = max(report.peak_allocated_bytes for report in line.reports.values())
    small = {
        number: report
        for number, report in line.reports.items()
        if needed_bytes(report) < _SMALL * highest
    }
    enlarged = dict(list(small.items())[-_MAX_ENLARGED:])
    with slide(dark=dark) as (figure, theme):
        height = HEIGHT - _TOP - _BOTTOM
        room = WIDTH - _LEFT - _RIGHT - (_GAP if enlarged else 0)
        wide = room * (len(line.reports) / (len(line.reports) + 1.5 * len(enlarged)))
        panels = [(_LEFT, wide, dict(line.reports))]
        if enlarged:
            panels.append((_LEFT + wide + _GAP, room - wide, enlarged))
        for left, width, reports in panels:
            box = (left / WIDTH, _BOTTOM / HEIGHT, width / WIDTH, height / HEIGHT)
            axes = figure.add_axes(box)
            _draw_panel(axes, theme, reports, (width, height), is_whole=left == _LEFT)
        _write_words(figure, theme, line, is_enlarged=bool(enlarged))
    return figure


def _draw_panel(
    axes: Axes,
    theme: Theme,
    reports: Mapping[int, Prediction],
    panel: tuple[float, float],
    *,
    is_whole: bool,
) -> None:
    bare(axes, theme, grid="y")
    limit = min(r.verdicts[r.gpu].limit_bytes for r in reports.values())
    highest = max(
        r.peak_allocated_bytes if r.verdict is Outcome.OOM else r.peak_reserved_bytes
        for r in reports.values()
    )
    has_line = limit < 2.0 * highest
    top = 1.16 * max(highest, limit if has_line else 0) / GIB
    axes.set(xlim=(-0.5, len(reports) - 0.5), ylim=(0, top))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_xticks(range(len(reports)), [str(number) for number in reports])
    axes.set_xlabel("GPUs" if is_whole else "GPUs, enlarged", size=LABEL, labelpad=4)
    if is_whole:
        axes.set_ylabel("reserved per GPU, GiB", size=LABEL)
    for position, report in enumerate(reports.values()):
        _draw_bar(axes, theme, position, report, panel, limit / GIB)
    if has_line:
        gpu = card_label(next(iter(reports.values())).gpu)
        axes.axhline(limit / GIB, color=theme.limit, linewidth=3.0, zorder=4, gid="limit")
        text = shortened(f"{gpu}: {limit / GIB:.1f} GiB usable", VALUE, panel[0] - 0.1, bold=True)
        axes.annotate(
            text, (0.995, limit / GIB), (0, 4), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", ha="right", va="bottom", size=VALUE, weight="bold",
            gid="limit:name",
        )  # fmt: skip


def _draw_bar(
    axes: Axes,
    theme: Theme,
    position: int,
    report: Prediction,
    panel: tuple[float, float],
    limit: float,
) -> None:
    per_gib = panel[1] / axes.get_ylim()[1]
    width = _BAR * panel[0] / (axes.get_xlim()[1] - axes.get_xlim()[0])
    is_oom = report.verdict is Outcome.OOM
    reserved = report.peak_reserved_bytes / GIB
    is_inside = not is_oom and limit - 0.35 / per_gib < reserved <= limit
    free = reserved - (0.35 / per_gib if is_inside else 0.0)
    base = 0.0
    for kind, num_bytes in stack_of(report).items():
        tall, color = num_bytes / GIB, color_of(theme, kind)
        axes.bar(
            position, tall, _BAR, base, color=color, edgecolor=theme.background, linewidth=0.8,
            gid=f"{report.plan['devices']}:{kind}",
        )  # fmt: skip
        if is_oom and tall:
            box = (position - _BAR / 2, base, _BAR, tall)
            hatch(axes, box, text_on(color), zorder=2, gid=f"oom:{kind}")
        if not is_oom:
            part = (base, min(base + tall, free))
            _write_size(axes, position, part, (width, per_gib), num_bytes, text_on(color))
        base += tall
    cached = 0.0 if is_oom else max(0.0, reserved - base)
    axes.add_patch(
        Rectangle(
            (position - _BAR / 2, base), _BAR, cached, fill=False,
            edgecolor=theme.ink, linewidth=1.6, linestyle=(0, (3, 2)), gid="reserved",
        )
    )  # fmt: skip
    part = (base, min(base + cached, free))
    _write_size(axes, position, part, (width, per_gib), round(cached * GIB), theme.ink)
    text, y, offset, anchor = format_size(report.peak_reserved_bytes), reserved, 5, "bottom"
    if is_oom:
        text, y, offset, anchor = "OOM", base / 2, 0, "center"
    elif is_inside:  # a number over the line would say that the bar is higher
        offset, anchor = -4, "top"
    axes.annotate(
        text, (position, y), (0, offset), textcoords="offset points", ha="center",
        va=anchor, size=TICK, weight="bold", zorder=3,
        gid=f"{report.plan['devices']}:total",
        bbox={"facecolor": theme.background, "edgecolor": "none", "pad": 2.0},
    )  # fmt: skip


def _write_size(
    axes: Axes,
    position: int,
    part: tuple[float, float],
    inches: tuple[float, float],
    num_bytes: int,
    color: str,
) -> None:
    """The size of a part of a bar in its middle, if the part has room for it."""
    (low, high), (width, per_gib), text = part, inches, format_size(num_bytes)
    if (high - low) * per_gib > 1.25 * VALUE / 72 and text_width(text, VALUE) + 0.08 < width:
        axes.text(
            position, (low + high) / 2, text, ha="center", va="center_baseline", size=VALUE,
            color=color, zorder=5,
        )  # fmt: skip


def _write_words(figure: Figure, theme: Theme, line: ScalingLine, *, is_enlarged: bool) -> None:
    report = line.reports[max(line.reports)]
    write_title(
        figure, theme, f"{report.name} under {label_of(line.strategy)}", subtitle_of(report)
    )
    used = {kind for r in line.reports.values() for kind, size in stack_of(r).items() if size}
    handles: list[Patch] = [key(color_of(theme, k), k, theme) for k in STACK if k in used]
    handles.append(
        Patch(
            facecolor="none", edgecolor=theme.ink, linewidth=1.6, linestyle=(0, (3, 2)),
            label="cached",
        )
    )  # fmt: skip
    write_legend(figure, theme, handles, top=1.28)
    stays = _sentence(large_constants(line), max(line.reports))
    figure.text(
        0.4 / WIDTH, 1 - 1.72 / HEIGHT, shortened(stays, VALUE, WIDTH - 0.8), size=VALUE, va="top",
        weight="bold", gid="stays",
    )  # fmt: skip


def _sentence(terms: Mapping[str, int], devices: int) -> str:
    """What stays, as a line of text."""
    named: Sequence[str] = [f"{kind} {format_size(size)}" for kind, size in terms.items()][:4]
    return f"Does not shrink, on {devices} GPUs: {', '.join(named)} GiB" if named else ""
