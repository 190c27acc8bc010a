"""Charts of memory over the number of GPUs, by rank, and over steps by allocator setting."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import log2, nan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from memest.errors import PlanError
from memest.estimator.search.many_plans import Growth, ScalingLine, constant_terms, kind_bytes
from memest.plots import style
from memest.plots.slides import draw_slide
from memest.plots.style import Canvas, Panel, Theme, require, shortened, slide, text_width
from memest.plots.words import dotted, gpu_label, label_of, plan_line
from memest.report import Outcome, Prediction, RankRow, RunReport
from memest.report.lecture import Chart, Series, Slide
from memest.units import GIB, counted, format_size

_LEFT, _TOP, _BOTTOM = 1.0, 2.0, 0.95  # inches
_COLUMN = 5.75  # width of the right column, inches: each strategy's name, size and constant terms
_BLOCK_INCHES = 0.86  # inches of one strategy in the column
_CONSTANTS_SIZE = 15  # points of the constant terms' text
_LEADER_INCHES = 0.68  # inches before the text, for leader and marker
_MAX_TERMS = 3  # most terms named per strategy
_MIN_SHARE = 0.01  # share of the peak below which a term is not named
_LOOK_BY_STRATEGY = {
    "ddp": ("", "o"),
    "fsdp": ("#0072B2", "s"),
    "fsdp2": ("#56B4E9", "D"),
    "deepspeed_stage_1": ("#E69F00", "^"),
    "deepspeed_stage_2": ("#D55E00", "v"),
    "deepspeed_stage_3": ("#CC79A7", "P"),
}
"""Colour (empty is the ink) and marker of each strategy, the same in all charts."""

STACK = (*style.KINDS[:-1], "temporaries", "rest")  # rest: buffers, batch, workspaces, rounding
_FAR = 2.0  # a limit above this many times the highest bar is not drawn
_NOT_REACHED = "needed, not reached"  # part of a bar over that at which a run failed
_MAX_NUMBERED = 24  # bars with room for a number under each
_MAX_REMARKED = 4  # most kinds of memory in the line over the bars
_STEPS_TOP = 1.75  # inches
_STEPS_COLUMN = 5.1  # inches at the right: each setting, and its reserved memory
_STEPS_BLOCK = 0.9  # height of one setting in the column, inches
_RUN_LOOKS = (("#D55E00", "-"), ("#0072B2", "--"), ("#CC79A7", "-."), ("#009E73", ":"))
"""Line colours and dashes; the dashes suffice without colour."""


def look_of(strategy: str, theme: Theme) -> dict[str, Any]:
    """Return matplotlib's style for the line of a `strategy`; styles differ also without colour.

    Lines with offload, or with DDP's search for unused parameters, are dashed with hollow markers.
    """
    base = strategy.removesuffix("_offload").removesuffix("_find_unused_parameters_true")
    color, marker = _LOOK_BY_STRATEGY[base]
    color, is_plain = color or theme.ink, base == strategy
    return {
        "color": color, "linestyle": "-" if is_plain else (0, (4, 2)), "marker": marker,
        "markersize": 11, "markerfacecolor": color if is_plain else theme.background,
        "markeredgewidth": 2.2, "markeredgecolor": color,
    }  # fmt: skip


def large_constants(line: ScalingLine) -> dict[str, int]:
    """Return {kind of memory: bytes} that more GPUs do not shrink, if above 1 % of the peak."""
    threshold = _MIN_SHARE * _last_report(line).peak_allocated_bytes
    return {kind: size for kind, size in constant_terms(line).items() if size > threshold}


def plot_scaling(lines: Sequence[ScalingLine], *, dark: bool = False) -> Figure:
    """Draw a line per strategy: bytes needed per GPU over the number of GPUs, both on log scales.

    A cross marks a verdict other than `fits`. At the right are each strategy's need on the largest
    number of GPUs, and the kinds of memory that more GPUs do not shrink.

    Raises:
        PlanError: there is no prediction.
    """
    curves = [line for line in lines if line.reports]
    curves.sort(key=lambda line: _last_report(line).needs_bytes)
    if not curves:
        raise PlanError("there is no prediction to draw", hint="name another strategy")
    with slide(dark=dark) as canvas:
        width, height = style.WIDTH - _LEFT - _COLUMN, style.HEIGHT - _TOP - _BOTTOM
        panel = canvas.panel(_LEFT, _BOTTOM, width, height, grid="y")
        _set_axes(panel.axes, curves)
        for line in curves:
            _draw_line(panel, line)
        _draw_limit(panel, curves)
        _draw_column(panel, curves)
        _write_words(canvas, curves)
    return canvas.figure


def _last_report(line: ScalingLine) -> Prediction:
    return line.reports[max(line.reports)]


def _lowest_limit(lines: Sequence[ScalingLine]) -> int:
    """Return the allocator's lowest limit in bytes; more GPUs may lower it."""
    reports = [report for line in lines for report in line.reports.values()]
    return min(report.verdicts[report.gpu].limit_bytes for report in reports)


def _set_axes(axes: Axes, lines: Sequence[ScalingLine]) -> None:
    numbers = sorted({number for line in lines for number in line.reports})
    sizes = [report.needs_bytes / GIB for line in lines for report in line.reports.values()]
    sizes.append(_lowest_limit(lines) / GIB)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    space = 2 ** (0.06 * max(1.0, log2(numbers[-1] / numbers[0])))
    low, high = min(sizes) / 1.25, max(sizes) * 1.3
    axes.set(xlim=(numbers[0] / space, numbers[-1] * space), ylim=(low, high))
    ticks = [2.0**power for power in range(-10, 16) if low <= 2.0**power <= high]
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("GPUs", size=style.LABEL, labelpad=4)
    axes.set_ylabel("needed per GPU, GiB", size=style.LABEL)


def _verdict_marks(theme: Theme, lines: Sequence[ScalingLine]) -> dict[str, dict[str, Any]]:
    """Return {verdict's word: matplotlib style of its cross} for `lines`, except of `fits`."""
    words = {report.word for line in lines for report in line.reports.values()}
    shape = {"marker": "x", "markersize": 15, "markeredgewidth": 3.2}
    return {word: {"color": color, **shape} for word, color in theme.fills.items() if word in words}


def _draw_line(panel: Panel, line: ScalingLine) -> None:
    axes = panel.axes
    sizes = {number: report.needs_bytes / GIB for number, report in line.reports.items()}
    numbers = sorted({*sizes, *line.missing})  # a line is broken where a figure is missing
    axes.plot(
        numbers, [sizes.get(number, nan) for number in numbers],
        **look_of(line.strategy, panel.theme), linewidth=3.2, zorder=4, clip_on=False,
        gid=f"line:{line.strategy}",
    )  # fmt: skip
    for word, mark in _verdict_marks(panel.theme, [line]).items():
        crosses = [number for number, report in line.reports.items() if report.word == word]
        axes.plot(
            crosses, [sizes[number] for number in crosses], **mark, linestyle="none", zorder=6,
            gid=f"{word.lower()}:{line.strategy}", clip_on=False,
        )  # fmt: skip


def _draw_limit(panel: Panel, lines: Sequence[ScalingLine]) -> None:
    """Draw the GPU's limit line, with its name where the fewest lines of strategies are."""
    points: list[tuple[float, float]] = []
    for line in lines:
        vertices = panel.inches((n, r.needs_bytes / GIB) for n, r in line.reports.items())
        for (x0, y0), (x1, y1) in pairwise([vertices[0], *vertices]):  # a lone vertex, too
            shares = [i / 40 for i in range(41)]  # 41 points on each segment
            points += [(x0 + (x1 - x0) * share, y0 + (y1 - y0) * share) for share in shares]
    panel.draw_limit_apart(_last_report(lines[0]).gpu, _lowest_limit(lines), points)


def _draw_column(panel: Panel, lines: Sequence[ScalingLine]) -> None:
    """Write each strategy's name and need next to the end of its line, without overlap."""
    width, height = panel.width, panel.height
    ends = panel.inches((max(line.reports), _last_report(line).needs_bytes / GIB) for line in lines)
    block = min(_BLOCK_INCHES, height / len(lines))
    positions = spread([end for _, end in ends], block, height)
    size = min(style.LABEL, 72 * block / 2.6)
    for line, (start, end), y in zip(lines, ends, positions, strict=True):
        look = look_of(line.strategy, panel.theme)
        panel.lead((start + 0.02 * width, end), (width + 0.25, y), (width + 0.34, y),
                   color=look["color"], linewidth=1.6)  # fmt: skip
        panel.lead((width + 0.47, y), **(look | {"linestyle": "none"}))
        report, left = _last_report(line), width + _LEADER_INCHES
        text = f"{label_of(line.strategy)}  {format_size(report.needs_bytes)}"
        text += "" if report.word == "fits" else f"  {report.word}"
        panel.write(left, y, text, size=size, weight="bold", gid=f"end:{line.strategy}")
        panel.write(
            left, y - 0.42 * block, _constants_text(line), size=min(_CONSTANTS_SIZE, 0.86 * size),
            color=panel.theme.muted, gid=f"stays:{line.strategy}",
        )  # fmt: skip


def _constants_text(line: ScalingLine) -> str:
    """Return text on the largest kinds of memory that more GPUs do not shrink, as many as fit."""
    terms = [f"{kind} {format_size(size)}" for kind, size in large_constants(line).items()]
    for count in range(min(_MAX_TERMS, len(terms)), 0, -1):
        text = ", ".join(terms[:count])
        if text_width(text, _CONSTANTS_SIZE) < _COLUMN - _LEADER_INCHES - 0.1:
            return text
    return "nothing that stays" if len(line.reports) > 1 else ""


def spread(ends: Sequence[float], gap: float, height: float) -> list[float]:
    """Return positions near the ascending `ends`, at least `gap` apart, from `gap` / 2 to `height`.

    >>> spread([1.0, 1.1, 4.0], 0.5, 5.0)
    [1.0, 1.5, 4.0]
    """
    positions: list[float] = []
    lowest = gap / 2
    for end in ends:  # upwards, each at least `gap` above the one before
        positions.append(max(end, lowest))
        lowest = positions[-1] + gap
    highest = height - 0.1
    for index in reversed(range(len(positions))):  # downwards, if the last one is too high
        positions[index] = min(positions[index], highest)
        highest = positions[index] - gap
    assert all(b - a > 0 for a, b in pairwise(positions))
    return positions


def subtitle_of(report: Prediction) -> str:
    """Return the subtitle of a chart: the report's plan without strategy and number of GPUs."""
    plan = {**report.plan, "devices": 1, "strategy": "auto"}
    return plan_line(replace(report, plan=plan), "per GPU, predicted")


def _write_words(canvas: Canvas, lines: Sequence[ScalingLine]) -> None:
    theme = canvas.theme
    missing = [
        f"{label_of(line.strategy)} on {', '.join(map(str, line.missing))}"
        for line in lines
        if line.missing
    ]
    text = f"not predicted: {'; '.join(missing)}" if missing else ""
    canvas.figure.text(
        _LEFT / style.WIDTH, 0.1 / style.HEIGHT, va="bottom", color=theme.muted, gid="missing",
        s=shortened(text, style.VALUE, style.WIDTH - _LEFT - 0.4), size=style.VALUE,
    )  # fmt: skip
    reference = next((line for line in lines if not line.strategy.endswith("_offload")), lines[0])
    report, largest = _last_report(reference), max(max(line.reports) for line in lines)
    canvas.write_title(f"{report.name} on many GPUs", subtitle_of(report))
    left = style.WIDTH - _COLUMN + _LEADER_INCHES
    canvas.write(
        left, 1.42, f"on {largest} GPUs, GiB", size=style.TICK, weight="bold", gid="column"
    )
    canvas.write(left, 1.74, "and what of it does not shrink", size=style.VALUE, color=theme.muted)
    names = {"OOM": "OOM: what it would need"}
    marks = [
        Line2D([], [], **mark, linestyle="none", label=names.get(word, word))
        for word, mark in _verdict_marks(theme, lines).items()
    ]
    if marks:
        look = {"handlelength": 1.0, "handleheight": 0.7, "columnspacing": 1.4}
        canvas.write_legend(marks, top=1.38, left=_LEFT, **look)


def stack_of(report: Prediction) -> dict[str, int]:
    """Return the allocated bytes at the peak by the kinds of memory in `STACK`."""
    parts = dict.fromkeys(STACK, 0)
    for kind, size in kind_bytes(report).items():
        parts[kind if kind in parts else "rest"] += size
    return parts


def plot_scaling_bars(line: ScalingLine, *, dark: bool = False) -> Figure:
    """Draw a stacked bar for each number of GPUs, with the need and the verdict under it.

    The outline of a run out of memory goes from where it failed to what it would need.

    Raises:
        PlanError: there is no prediction.
    """
    if not line.reports:
        raise PlanError(
            f"`{line.strategy}` has no prediction to draw", hint="name another strategy"
        )
    report = _last_report(line)
    columns = [_bar_parts(report) for report in line.reports.values()]
    labels = (
        f"{counted(number, 'GPU')}\n{format_size(report.needs_bytes)} GiB, {report.word}"
        for number, report in line.reports.items()
    )
    limit_bytes = _lowest_limit([line])
    is_far = limit_bytes > _FAR * max(sum(column.values()) for column in columns)
    color_by_part = {part: part for part in (*STACK, "cached")} | {_NOT_REACHED: "between"}
    parts = {
        (part, color): [column[part] for column in columns] for part, color in color_by_part.items()
    }
    limit = style.limit_text(report.gpu, limit_bytes, style.WIDTH / 2)
    chart = _stacked_chart(parts, labels, 0 if is_far else limit_bytes, limit)
    title = f"{report.name} under {label_of(line.strategy)}"
    page = Slide(title=title, subtitle=subtitle_of(report), notes=(), chart=chart)
    terms = [f"{kind} {format_size(size)}" for kind, size in large_constants(line).items()]
    shown = ", ".join(terms[:_MAX_REMARKED])
    remark = f"Does not shrink, on {max(line.reports)} GPUs: {shown} GiB" if terms else ""
    return draw_slide(page, dark=dark, remark=remark)


def _bar_parts(report: Prediction) -> dict[str, int]:
    """Return {part: bytes} of a bar that ends at `needs_bytes` of `report`. The first parts are
    kinds of memory at the peak. The rest is the part `cached`, or `needed, not reached` if the run
    is out of memory."""
    parts = stack_of(report) | {"cached": 0, _NOT_REACHED: 0}
    last_part = _NOT_REACHED if report.verdict is Outcome.OOM else "cached"
    return parts | {last_part: max(0, report.needs_bytes - sum(parts.values()))}


def plot_ranks(report: RunReport, *, limit_bytes: int, dark: bool = False) -> Figure:
    """Draw the peak of each rank: allocated, cached by the allocator, and outside of it.

    A block that two streams use is freed at a time that differs between runs, so the peak may
    differ too. The outline over a bar goes up to the highest possible peak. `limit_bytes` is the
    memory of the GPU.
    """
    rows = report.ranks
    highest = max(map(_most_bytes, rows))
    is_far = limit_bytes > _FAR * highest
    parts: dict[tuple[str, str], list[int]] = {
        ("allocated", "params"): [row.peak_allocated_bytes for row in rows],
        ("cached", "cached"): [row.peak_reserved_bytes - row.peak_allocated_bytes for row in rows],
        ("context and NCCL", "rest"): [row.process_bytes - row.peak_reserved_bytes for row in rows],
        ("at most, by timing", "between"): [_most_bytes(row) - row.process_bytes for row in rows],
    }
    limit = style.limit_text(report.gpu, limit_bytes, style.WIDTH / 2).replace("usable", "in all")
    labels = [str(row.rank) for row in rows]
    ranks_text = f"{len(rows)} of {max(row.rank for row in rows) + 1} ranks simulated"
    if len(rows) <= _MAX_NUMBERED:
        labels = [f"{row.rank}\n{_most_bytes(row) / GIB:.1f}" for row in rows]
        ranks_text += ", their sum in GiB below"
    chart = _stacked_chart(parts, labels, 0 if is_far else limit_bytes, limit)
    version = f"memest {report.versions['memest']}"
    subtitle = dotted(ranks_text, gpu_label(report.gpu), str(report.verdict), version)
    page = Slide(title=f"{report.name}: peak by rank", subtitle=subtitle, notes=(), chart=chart)
    return draw_slide(page, dark=dark, remark=f"{limit}, above this chart" if is_far else "")


def _stacked_chart(
    parts: Mapping[tuple[str, str], Sequence[int]], labels: Iterable[str], limit_bytes: int,
    limit_name: str,
) -> Chart:  # fmt: skip
    """Return a chart of stacked bars: `parts` are {(name, colour): bytes of each bar}, `labels` a
    text for each bar. `limit_name` labels the line at `limit_bytes`; 0 draws no line."""
    series = (
        Series(name=name, color=color, values=tuple(size / GIB for size in sizes))
        for (name, color), sizes in parts.items()
        if any(sizes)
    )
    return Chart(
        is_upright=True, categories=tuple(labels), series=tuple(series), limit=limit_bytes / GIB,
        limit_name=limit_name,
    )  # fmt: skip


def _most_bytes(row: RankRow) -> int:
    interval = row.intervals.get("process")
    return max(row.process_bytes, interval.high_bytes if interval else 0)


def plot_fragmentation(
    report: Prediction, runs: Sequence[Growth], *, gpu_limit_bytes: int, dark: bool = False
) -> Figure:
    """Draw reserved GiB over optimizer steps, with a line for the allocator setting of each run.

    Thick lines are under the limit `gpu_limit_bytes`, thin ones without a limit. A cross is a step
    that runs out of memory. The area is the memory in use under the first setting. The title has
    the name and the settings of `report`, the plan's prediction; the limit line has its GPU.

    Raises:
        PlanError: there is no run.
    """
    require(list(runs))
    with slide(dark=dark) as canvas:
        width, height = style.WIDTH - _LEFT - _STEPS_COLUMN, style.HEIGHT - _STEPS_TOP - _BOTTOM
        panel = canvas.panel(_LEFT, _BOTTOM, width, height, grid="y")
        _set_step_axes(panel.axes, runs, gpu_limit_bytes)
        steps = range(1, len(runs[0].allocated) + 1)
        values = [value / GIB for value in runs[0].allocated]
        panel.axes.fill_between(
            steps, values, step="mid", color=panel.theme.muted, alpha=0.45, linewidth=0, zorder=2,
            gid="allocated",
        )  # fmt: skip
        panel.axes.annotate(
            "in use at the peak of each step", (0.5, 0.02), xycoords="axes fraction", ha="center",
            va="bottom", size=style.VALUE, weight="bold", zorder=6, gid="allocated:name",
        )  # fmt: skip
        for run, look in zip(runs, _RUN_LOOKS, strict=False):
            _draw_run(panel, run, look, gpu_limit_bytes / GIB)
        _draw_step_limit(panel, report, runs, gpu_limit_bytes)
        _draw_step_column(panel, runs)
        title = "what is reserved, and what is in use"
        if runs[0].failed_step is not None:
            title = f"out of memory in step {runs[0].failed_step + 1}"
        lengths = report.plan.get("lengths")
        span = f"{min(lengths)} to {max(lengths)} tokens" if lengths else ""
        canvas.write_title(f"{report.name}: {title}", plan_line(report, span))
        canvas.write(0.4, 1.2, _oom_note(runs[0], gpu_limit_bytes), size=style.VALUE, gid="reason")
    return canvas.figure


def _oom_note(run: Growth, limit_bytes: int) -> str:
    """Return text on when `run` exceeds `limit_bytes` and how it ends; empty if it never does."""
    step = next((i for i, size in enumerate(run.reserved) if size > limit_bytes), None)
    if step is None:
        return ""
    freeing = "the allocator frees cached blocks to stay under the limit"
    text = f"From step {step + 1}, {freeing}"
    if run.failed_step is not None and run.failed_step <= step:
        text = f"In step {run.failed_step + 1}, {freeing}, which is not enough"
    elif run.failed_step is not None:
        text += f"; in step {run.failed_step + 1} that is not enough"
    return f"{text}.\nThe thin line is what it would reserve without a limit."


def _set_step_axes(axes: Axes, runs: Sequence[Growth], limit_bytes: int) -> None:
    highest = max(max(run.reserved) for run in runs)
    is_near = limit_bytes < 1.6 * highest
    axes.set(xlim=(1, max(2, len(runs[0].allocated))))
    axes.set(ylim=(0, 1.12 * max(highest, limit_bytes if is_near else 0) / GIB))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.set_xlabel("optimizer step", size=style.LABEL, labelpad=4)
    axes.set_ylabel("GiB", size=style.LABEL)
    axes.tick_params(labelsize=style.TICK)


def _draw_run(panel: Panel, run: Growth, look: tuple[str, str], limit: float) -> None:
    axes, (color, dashes) = panel.axes, look
    values = [value / GIB for value in run.on_gpu]
    axes.plot(
        range(1, len(values) + 1), values, color=color, linestyle=dashes, linewidth=3.4, zorder=4,
        gid=f"reserved:{run.alloc_conf}", clip_on=False,
    )  # fmt: skip
    if run.on_gpu != run.reserved:
        axes.plot(
            range(1, len(run.reserved) + 1), [value / GIB for value in run.reserved], color=color,
            linewidth=1.4, alpha=0.7, zorder=3, gid=f"unlimited:{run.alloc_conf}", clip_on=False,
        )  # fmt: skip
    if run.failed_step is not None:
        axes.plot(
            [run.failed_step + 1], [limit], color=panel.theme.ink, linestyle="none",
            marker="x", markersize=17, markeredgewidth=3.4, zorder=6, clip_on=False,
            gid=f"oom:{run.alloc_conf}",
        )  # fmt: skip


def _draw_step_limit(
    panel: Panel, report: Prediction, runs: Sequence[Growth], limit_bytes: int
) -> None:
    """Draw the line of `limit_bytes`, if it is on the axes. Its label has the GPU of `report`. The
    label is at one end of the line, over or under it, where it hides the fewest points of
    `runs`."""
    _, top = panel.axes.get_ylim()
    if limit_bytes / GIB > top:
        return
    across, up = panel.width / len(runs[0].reserved), panel.height / (GIB * top)
    curves = [*(run.reserved for run in runs), runs[0].allocated]
    points = [(step * across, size * up) for curve in curves for step, size in enumerate(curve)]
    panel.draw_limit_apart(report.gpu, limit_bytes, points)


def _draw_step_column(panel: Panel, runs: Sequence[Growth]) -> None:
    """Write each setting and its highest reserved GiB next to the end of its line."""
    width, height = panel.width, panel.height
    _, top = panel.axes.get_ylim()
    order = sorted(range(len(runs)), key=lambda i: runs[i].reserved[-1])
    ends = [runs[i].reserved[-1] / GIB / top * height for i in order]
    positions = spread(ends, min(_STEPS_BLOCK, height / len(runs)), height)
    for index, end, y in zip(order, ends, positions, strict=True):
        run, (color, dashes) = runs[index], _RUN_LOOKS[index % len(_RUN_LOOKS)]
        panel.lead((width, end), (width + 0.3, y), (width + 0.75, y),
                   color=color, linestyle=dashes, linewidth=2.6)  # fmt: skip
        left, room = width + 0.88, _STEPS_COLUMN - 0.98
        oom = f"  OOM in step {run.failed_step + 1}" if run.failed_step is not None else ""
        text = f"{max(run.reserved) / GIB:.1f} GiB{oom}"
        panel.write(left, y, text, size=style.LABEL, weight="bold", gid=f"end:{run.alloc_conf}")
        panel.write(
            left, y - 0.36, shortened(run.label, style.VALUE, room), size=style.VALUE,
            color=panel.theme.muted, gid=f"name:{run.alloc_conf}",
        )  # fmt: skip
