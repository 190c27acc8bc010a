"""Chart of a script on several GPUs: memory of each rank that was simulated."""

from __future__ import annotations

from matplotlib.figure import Figure

from memest.plots.phases import FAR_LIMIT
from memest.plots.style import HEIGHT, VALUE, WIDTH, Panel, limit_text, slide, text_on
from memest.plots.words import dotted, gpu_label
from memest.report import RankRow, RunReport
from memest.units import GIB

_FRAME = (1.15, 1.2, WIDTH - 1.15 - 0.3, HEIGHT - 1.2 - 1.85)  # left, bottom, width, height
_PARTS = ("allocated", "cached", "context and NCCL")
_KINDS = ("params", "optimizer", "rest")  # kinds of other charts whose colours the parts have
_MAX_NUMBERED = 24  # bars that are wide enough for a number over each


def plot_ranks(report: RunReport, *, limit_bytes: int, dark: bool = False) -> Figure:
    """Draw the peak of each rank: allocated, cached by the allocator, and outside of it.

    The dashed outline goes up to the highest figure over the free timings. `limit_bytes` is the
    memory of the GPU.
    """
    rows = report.ranks
    with slide(dark=dark) as canvas:
        panel = canvas.panel(*_FRAME, grid="y")
        axes = panel.axes
        highest = max(map(_high, rows))
        is_far = limit_bytes > FAR_LIMIT * highest
        top = 1.2 * (highest if is_far else max(highest, limit_bytes)) / GIB
        axes.set(xlim=(-0.6, len(rows) - 0.4), ylim=(0, top))
        for place, row in enumerate(rows):
            _draw(panel, place, row, is_numbered=len(rows) <= _MAX_NUMBERED)
        axes.set_ylabel("GPU memory, GiB")
        size = min(VALUE, VALUE * 34 / len(rows))
        axes.set_xticks(range(len(rows)), [str(row.rank) for row in rows], size=size)
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel("rank")
        text = limit_text(report.gpu, limit_bytes, panel.width).replace("usable", "in all")
        if is_far:
            text = f"{text}, above this chart \N{UPWARDS ARROW}"
            look = {"size": VALUE, "weight": "bold", "bbox": canvas.theme.box()}
            panel.write(panel.width - 0.05, panel.height - 0.15, text, ha="right", **look)
        else:
            panel.draw_limit(limit_bytes / GIB, text, is_right=True)
        colors = [canvas.theme.kinds[kind] for kind in _KINDS]
        keys = [canvas.theme.key(c, p) for c, p in zip(colors, _PARTS, strict=True)]
        canvas.write_legend([*keys, canvas.theme.dashed_key("at most, by timing")], top=1.28)
        size_of_world = max(row.rank for row in rows) + 1
        words = f"{len(rows)} of {size_of_world} ranks simulated", gpu_label(report.gpu)
        title = f"{report.name}: peak by rank"
        version = f"memest {report.versions['memest']}"
        canvas.write_title(title, dotted(*words, str(report.verdict), version))
    return canvas.figure


def _high(row: RankRow) -> int:
    found = row.intervals.get("process")
    return max(row.process_bytes, found.high_bytes if found else 0)


def _draw(panel: Panel, place: int, row: RankRow, *, is_numbered: bool) -> None:
    """Draw the bar of one rank, with its height over it."""
    ends = (row.peak_allocated_bytes, row.peak_reserved_bytes, row.process_bytes)
    base = 0.0
    for kind, end in zip(_KINDS, ends, strict=True):
        color, height = panel.theme.kinds[kind], end / GIB - base
        panel.axes.bar(
            place, height, 0.74, base, color=color, edgecolor=panel.theme.background,
            linewidth=1.0, gid=f"rank {row.rank}:{kind}",
        )  # fmt: skip
        if is_numbered and height * panel.per_y > 1.3 * VALUE / 72:
            panel.axes.text(
                place, base + height / 2, f"{height:.1f}", ha="center", va="center_baseline",
                size=VALUE, color=text_on(color),
            )  # fmt: skip
        base = end / GIB
    high = _high(row) / GIB
    if high > base:
        panel.dashed_box((place - 0.37, base, 0.74, high - base), f"rank {row.rank}:high")
    if is_numbered:
        panel.write_number(place, high, f"{high:.1f}")
