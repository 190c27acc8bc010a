"""Chart of one step, event by event: allocated memory by kind."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from memest.estimator.replay.recording import PhaseSpan, Timeline
from memest.plots import style
from memest.plots.style import Canvas, Panel, Theme, shortened, slide, text_on, text_width
from memest.plots.words import dotted, gpu_label, setting_words, version_words
from memest.units import GIB

MAX_COLUMNS = 600  # with more events, each column shows its highest event
TEMPORARIES = "#CC79A7"
"""Okabe and Ito's reddish purple; its luminance, 0.62, is far from the yellow or green below it."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 1.15, 0.35, 2.28, 0.85  # inches
_BAND = 0.42  # height of the strip that names the phases, inches
_LABEL_INCHES = 0.34  # least height of an area with its name, inches
_ABBREVIATIONS = {"forward": ("fwd", "F"), "backward": ("bwd", "B")}  # used if there is little room
_KINDS_BY_AREA = {
    **{kind: (kind,) for kind in (*style.KINDS[:-1], "temporaries")},
    "rest": ("buffers", "batch", "workspace"),
}
"""Areas: the kinds of the timeline in each, from the axis upwards."""


def plot_timeline(
    timeline: Timeline, *, name: str, gpu: str, gpu_limit_bytes: int | None = None,
    dark: bool = False, plan: Mapping[str, Any] | None = None,
) -> Figure:  # fmt: skip
    """Draw memory over the events of one step, as stacked areas under the line of reserved memory.

    The horizontal axis counts allocations and frees; it is not time. `rest` is buffers, the batch
    and workspaces. `name` and settings in `plan` are for the title. Without `gpu_limit_bytes` there
    is no limit line.
    """
    columns = _column_events(timeline)
    areas = {
        area: [sum(timeline.kinds[k][i] for k in kinds) / GIB for i in columns]
        for area, kinds in _KINDS_BY_AREA.items()
    }
    reserved = [timeline.reserved[i] / GIB for i in columns]
    limit = gpu_limit_bytes / GIB if gpu_limit_bytes else 0.0
    highest = max(*reserved, timeline.total(timeline.peak) / GIB, 1e-9)
    has_line = 0 < limit < 1.5 * highest
    top = 1.34 * limit if has_line else 1.22 * highest  # room for the text over it
    with slide(dark=dark) as canvas:
        width, height = style.WIDTH - _LEFT - _RIGHT, style.HEIGHT - _TOP - _BOTTOM
        panel = canvas.panel(_LEFT, _BOTTOM, width, height, grid="y")
        axes = panel.axes
        axes.set(xlim=(0, max(1, len(timeline.reserved) - 1)), ylim=(0, top))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(axis="x", pad=7)
        axes.set_ylabel("allocated, GiB", size=style.LABEL)
        axes.set_xlabel("allocations and frees of the step, in order", size=style.VALUE, labelpad=3)
        _draw_areas(panel, columns, areas)
        axes.step(
            columns, reserved, where="post", color=panel.theme.ink, linewidth=1.8,
            linestyle=(0, (4, 2)), gid="reserved",
        )  # fmt: skip
        if has_line:
            text = style.limit_text(gpu, gpu_limit_bytes or 0, width - 0.2)
            peak_inches = width * timeline.peak / axes.get_xlim()[1]
            is_left = peak_inches > text_width(text, style.VALUE, bold=True) + 0.2
            panel.draw_limit(limit, text, is_right=not is_left)
        _draw_spans(panel, timeline.spans)
        _mark_peak(panel, timeline)
        plan = plan or {}
        length = f"{plan['seq_len']} tokens" if plan.get("seq_len") else ""
        step = f"step {timeline.step + 1}"
        subtitle = dotted(*setting_words(plan), length, gpu_label(gpu), step, version_words())
        canvas.write_title(f"Memory over one step: {name}", subtitle)
        _write_keys(canvas, [area for area, sizes in areas.items() if any(sizes)])
    return canvas.figure


def _column_events(timeline: Timeline) -> list[int]:
    num_points = len(timeline.reserved)
    size = -(-num_points // MAX_COLUMNS)
    return [
        max(range(start, min(start + size, num_points)), key=timeline.total)
        for start in range(0, num_points, size)
    ]


def color_of(theme: Theme, area: str) -> str:
    """Return the colour of the stacked area called `area`."""
    return TEMPORARIES if area == "temporaries" else theme.kinds[area]


def _draw_areas(panel: Panel, columns: Sequence[int], areas: Mapping[str, Sequence[float]]) -> None:
    """Draw stacked `areas`, {name: GiB at each event of `columns`}; write names that have room."""
    axes, theme = panel.axes, panel.theme
    x = [*columns, int(axes.get_xlim()[1])]
    floors = [[0.0] * len(columns)]
    for sizes in areas.values():
        floors.append([a + b for a, b in zip(floors[-1], sizes, strict=True)])
    for area, lower, upper in zip(areas, floors, floors[1:], strict=False):
        color = color_of(theme, area)
        axes.fill_between(
            x, [*lower, lower[-1]], [*upper, upper[-1]], step="post", color=color, linewidth=0.4,
            gid=area,
        )  # fmt: skip
        if area in ("params", "grads", "optimizer"):  # kinds whose top line cannot hide a spike
            axes.step(x, [*upper, upper[-1]], where="post", color=theme.background, linewidth=1.0)
        center = _place_for_text(panel, area, columns, lower, upper)
        if center:
            axes.text(
                *center, area, size=style.VALUE, color=text_on(color), ha="center", va="center",
                gid=f"label:{area}",
            )  # fmt: skip


def _place_for_text(
    panel: Panel, text: str, columns: Sequence[int], lower: Sequence[float], upper: Sequence[float]
) -> tuple[float, float] | None:
    """Return (x, GiB) for the middle of `text` in an area of the chart; None if it has too little
    room. `lower` and `upper` are the edges of the area, in GiB at each x of `columns`. The middle
    is where the edges are furthest apart over the width of `text`."""
    width = (text_width(text, style.VALUE) + 0.2) / panel.per_x
    best, center = _LABEL_INCHES / panel.per_y, None
    for start in range(0, len(columns), max(1, len(columns) // 100)):  # at most 200 places
        stop = start
        while stop < len(columns) and columns[stop] < columns[start] + width:
            stop += 1
        if stop == len(columns):
            break
        floor, ceiling = max(lower[start:stop]), min(upper[start:stop])
        if ceiling - floor > 1.02 * best:  # among equals, the first
            best, center = ceiling - floor, (columns[start] + width / 2, (floor + ceiling) / 2)
    return center


def _draw_spans(panel: Panel, spans: Sequence[PhaseSpan]) -> None:
    """Draw a strip with the names forward, backward and step, and lines between these phases."""
    axes, theme, per_x, height = panel.axes, panel.theme, panel.per_x, panel.height
    shades = {"forward": theme.band[0], "backward": theme.band[1], "step": theme.band[0]}
    for span in spans:
        start, width = span.start, span.stop - span.start
        panel.fill(
            (start, 1 + 0.06 / height, width, _BAND / height), facecolor=shades[span.name],
            edgecolor=theme.ink, linewidth=0.8, transform=axes.get_xaxis_transform(),
            clip_on=False, gid=f"phase:{span.name}",
        )  # fmt: skip
        texts = (span.name, *_ABBREVIATIONS.get(span.name, ()))
        text = next((t for t in texts if text_width(t, style.TICK) + 0.08 < width * per_x), "")
        spills = not text and span is spans[-1]  # the text extends into the strip before it
        panel.write_in_column(
            span.stop if spills else start + width / 2, height + 0.06 + _BAND / 2,
            f"{span.name} " if spills else text, ha="right" if spills else "center",
            va="center_baseline", size=style.TICK,
        )  # fmt: skip
        if start and width * per_x > 0.1:
            axes.axvline(start, color=theme.ink, linewidth=1.0, linestyle=":")


def _mark_peak(panel: Panel, timeline: Timeline) -> None:
    """Label the peak with its size and cause, or with the failed request if out of memory."""
    axes, theme = panel.axes, panel.theme
    peak = timeline.total(timeline.peak) / GIB
    (_, edge), (_, top) = axes.get_xlim(), axes.get_ylim()
    text = f"peak {peak:.2f} GiB"
    is_left = timeline.peak < edge / 2
    room = panel.width * max(timeline.peak, edge - timeline.peak) / edge - 0.2
    location = shortened(timeline.where, style.VALUE, room) if timeline.where else ""
    if timeline.refused_bytes:
        text += f", then OOM: {timeline.refused_bytes / GIB:.2f} GiB more were requested"
    axes.annotate(
        "", (timeline.peak, peak), (timeline.peak, 0.985 * top),
        arrowprops={"arrowstyle": "-|>", "color": theme.ink, "linewidth": 1.8, "shrinkB": 0},
    )  # fmt: skip
    for line, (caption, weight) in enumerate(((text, "bold"), (location, "normal"))):
        axes.text(
            timeline.peak + (0.012 if is_left else -0.012) * edge, (0.985 - 0.068 * line) * top,
            caption, ha="left" if is_left else "right", va="top", weight=weight, gid=f"peak:{line}",
            size=style.VALUE if line else style.TICK, bbox=theme.box(1.5),
        )  # fmt: skip


def _write_keys(canvas: Canvas, areas: Sequence[str]) -> None:
    theme = canvas.theme
    handles: list[Patch | Line2D] = [theme.key(color_of(theme, area), area) for area in areas]
    handles.append(
        Line2D([], [], color=theme.ink, linewidth=1.8, linestyle=(0, (4, 2)), label="reserved")
    )
    canvas.write_legend(handles, top=1.28)
