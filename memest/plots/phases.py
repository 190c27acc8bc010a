"""Chart of one experiment: memory at the four phases of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from memest.plots import style
from memest.plots.style import Canvas, Panel, slide, text_on, text_width
from memest.plots.words import gpu_label, plan_line, signed_percent
from memest.report import Measurement, Outcome, Phase, PhaseRow, Prediction, Report
from memest.units import GIB, format_size

STACK = style.KINDS[:4]
_PHASES = tuple(Phase)[:4]  # phases of a step; the last phase is of a validation
_NUMBER_INCHES = 0.35  # width of a number over a bar, inches
_BAR_GAP = 0.03  # between the two bars of a phase, in units of the x axis
FAR_LIMIT = 2.2  # a limit above this many times the highest bar is named at the edge, not drawn


@dataclass(frozen=True, slots=True)
class Column:
    """One bar of the chart, with the figures of a phase in `row`. Without figures `row` is None,
    and the bar is hatched up to `failed_at_bytes`. If `failed_at_bytes` is 0, a text such as `none`
    is in place of the bar."""

    report: Report
    row: PhaseRow | None
    failed_at_bytes: int = 0  # bytes in use when the first phase ran out of memory
    is_at_least: bool = False  # the peak was earlier, so the end is a lower bound


def step_columns(report: Report, step: int, micro_batch: int) -> list[Column]:
    """Return a bar for each phase of `micro_batch` in `step`, both from 0. If the run is out of
    memory, the first phase without figures has a mark up to the bytes allocated at the failure."""
    rows = {r.phase: r for r in report.phases if (r.step, r.micro_batch) == (step, micro_batch)}
    columns = [Column(report, rows.get(phase)) for phase in _PHASES]
    first_missing = next((i for i, phase in enumerate(_PHASES) if phase not in rows), None)
    if report.verdict is Outcome.OOM and first_missing is not None:
        peak_bytes = report.peak_allocated_bytes
        # if a phase with figures has the peak, only the bytes at the last phase are known
        is_before_failure = any(row.peak_allocated_bytes >= peak_bytes for row in report.phases)
        failed_at_bytes = report.phases[-1].allocated_bytes if is_before_failure else peak_bytes
        columns[first_missing] = Column(report, None, failed_at_bytes, is_before_failure)
    return columns


def shown_step(reports: Sequence[Report]) -> tuple[int, int]:
    """Return (step, micro-batch) to draw, both from 0. It is the one in which a run is out of
    memory, or else the last micro-batch of step 1 (of step 0, if the run has one step)."""
    failures = [report.phases for report in reports if report.verdict is Outcome.OOM]
    if failures:
        return min((rows[-1].step, rows[-1].micro_batch) if rows else (0, 0) for rows in failures)
    rows = [row for report in reports for row in report.phases]
    step = min(1, max((row.step for row in rows), default=0))
    return step, max((row.micro_batch for row in rows if row.step == step), default=0)


def plot_phases(
    predicted: Prediction | None, measured: Measurement | None, *, gpu_limit_bytes: int,
    dark: bool = False,
) -> Figure:  # fmt: skip
    """Draw params, gradients, optimizer state and activations at the four phases of a step.

    Bars of `predicted` and `measured` are side by side; one of them may be None. The dashed outline
    is the highest allocation since the phase before. `gpu_limit_bytes` is the allocator's limit.
    """
    reports: list[Report] = [r for r in (predicted, measured) if r is not None]
    if not reports:
        raise ValueError("neither a prediction nor a measurement")
    step, micro_batch = shown_step(reports)
    groups = list(
        zip(*(step_columns(report, step, micro_batch) for report in reports), strict=True)
    )
    with slide(dark=dark) as canvas:
        width, height = style.WIDTH - 1.15 - 0.3, style.HEIGHT - 1.4 - 1.75
        panel = canvas.panel(1.15, 1.4, width, height, grid="y")
        axes = panel.axes
        highest = max((_top_bytes(c) for group in groups for c in group), default=0)
        is_far = gpu_limit_bytes > FAR_LIMIT * highest > 0
        ceiling = max(1, highest) if is_far else max(highest, gpu_limit_bytes)
        axes.set_ylim(0, 1.2 * ceiling / GIB)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        for position, group in enumerate(groups):
            _draw_group(panel, position, group, gpu_limit_bytes / GIB)
        tops = [max(_top_bytes(column) for column in group) for group in groups]
        _draw_limit(panel, reports[0], gpu_limit_bytes, tops, is_far=is_far)
        axes.set_ylabel("allocated, GiB")
        axes.set_xticks([])
        _write_words(canvas, reports, step, micro_batch)
        _write_keys(canvas, is_distributed=any(r.is_distributed for r in reports))
    return canvas.figure


def _top_bytes(column: Column) -> int:
    row = column.row
    return max(row.allocated_bytes, row.peak_allocated_bytes) if row else column.failed_at_bytes


def _draw_group(panel: Panel, position: int, group: Sequence[Column], limit: float) -> None:
    """Draw the bars of a phase around `position` of the x axis, where phases are 1 apart."""
    phase, is_pair = _PHASES[position], len(group) > 1
    width = 0.42 if is_pair else 0.6
    first_x = position - (len(group) - 1) / 2 * (width + _BAR_GAP)
    for index, column in enumerate(group):
        x = first_x + index * (width + _BAR_GAP)
        _draw_column(panel, x, width, column, limit, f"{column.report.kind}:{phase}")
        if is_pair:
            _write_under(panel, x, 0.10, column.report.kind, size=style.VALUE)
    name, inches = str(phase).replace("_", " "), 0.48 if is_pair else 0.14
    _write_under(panel, position, inches, name, size=style.TICK, weight="bold")
    if not is_pair:
        return
    predicted, measured = (column.row for column in group)
    if predicted and measured and measured.peak_allocated_bytes:
        error = signed_percent(predicted.peak_allocated_bytes, measured.peak_allocated_bytes)
        look = {"size": style.VALUE, "color": panel.theme.muted}
        _write_under(panel, position, 0.86, f"peak {error}", **look)


def _write_under(panel: Panel, x: float, inches: float, text: str, **look: Any) -> None:
    """Write `text` under the axis at `x`, `inches` below it; `look` is for matplotlib's `text`."""
    panel.write_in_column(x, -inches, text, ha="center", va="top", **look)


def _draw_column(
    panel: Panel, x: float, width: float, column: Column, limit: float, gid: str
) -> None:
    axes, theme, row = panel.axes, panel.theme, column.row
    if row is None:
        _draw_missing(panel, x, width, column, gid)
        return
    peak = max(row.peak_allocated_bytes, row.allocated_bytes) / GIB
    is_inside = peak < limit and (limit - peak) * panel.per_y < _NUMBER_INCHES
    text_top = peak - (_NUMBER_INCHES / panel.per_y if is_inside else 0.0)
    base = 0.0
    for kind, num_bytes in row.kinds.items():
        height = max(0, num_bytes) / GIB
        color = theme.kinds[kind]
        axes.bar(
            x, height, width, base, color=color, edgecolor=theme.background, linewidth=1.0,
            gid=f"{gid}:{kind}",
        )  # fmt: skip
        text = format_size(round(height * GIB))
        start, stop = style.widest_gap(base, min(base + height, text_top), [limit])
        is_tall = (stop - start) * panel.per_y > 1.25 * style.VALUE / 72
        if is_tall and width * panel.per_x > text_width(text, style.VALUE):
            axes.text(
                x, (start + stop) / 2, text, ha="center", va="center_baseline", size=style.VALUE,
                color=text_on(color),
            )  # fmt: skip
        base += height
    panel.fill(
        (x - width / 2, base, width, peak - base), fill=False, edgecolor=theme.ink, linewidth=1.6,
        linestyle=style.DASHES, gid=f"{gid}:peak",
    )  # fmt: skip
    panel.write_number(x, peak, format_size(round(peak * GIB)), is_inside=is_inside)


def _draw_missing(panel: Panel, x: float, width: float, column: Column, gid: str) -> None:
    """Hatch a bar up to the bytes at the failure, or write that the phase has no figures. `x` is
    the middle of the bar. `x` and `width` are in data coordinates. `gid` is the first part of the
    bar's ids in an SVG."""
    theme = panel.theme
    failure_gib = column.failed_at_bytes / GIB
    if not failure_gib:  # in a run that fits, this micro-batch has no optimizer step
        is_cut = column.report.verdict is not Outcome.FITS
        panel.write_number(x, 0.0, "not\nreached" if is_cut else "none")
        return
    box = (x - width / 2, 0, width, failure_gib)
    panel.fill(box, fill=False, edgecolor=theme.ink, linewidth=1.6, gid=f"{gid}:oom")
    panel.hatch(box, theme.ink, zorder=2, gid=f"{gid}:hatch")
    panel.axes.text(
        x, failure_gib / 2, "OOM", ha="center", va="center", size=style.LABEL, weight="bold",
        color=theme.background, bbox={"facecolor": theme.ink, "edgecolor": "none", "pad": 5},
    )  # fmt: skip
    panel.write_number(x, failure_gib, f"{'≥ ' if column.is_at_least else ''}{failure_gib:.1f}")


def _draw_limit(
    panel: Panel, report: Report, limit_bytes: int, tops: Sequence[int], *, is_far: bool
) -> None:
    """Draw a line at `limit_bytes`, with a text such as `usable on T4: 14.6 GiB`. The text is on
    the side of the chart that has lower bars. The GPU's name in the text is that of `report`. If
    the plan of `report` has a `memory_limit`, the text has the word `capped`.

    `tops` are the heights of the bars in bytes. If `is_far`, the limit is too far above the bars
    for a line, so only the text is written, at the upper edge.
    """
    suffix = ", capped" if report.plan.get("memory_limit") else ""
    text = f"usable on {gpu_label(report.gpu)}{suffix}: {limit_bytes / GIB:.1f} GiB"
    y, offset, anchor = limit_bytes / GIB, 5, "bottom"
    left, right = max(tops[:2]), max(tops[2:])  # of the first two and of the last two phases
    # the axis reaches from -0.5 to 3.5
    x, align, highest = (-0.48, "left", left) if left < right else (3.48, "right", right)
    if is_far:
        y, offset, anchor, text = panel.axes.get_ylim()[1], -2, "top", f"{text}, above this chart ↑"
    else:
        panel.axes.axhline(y, color=panel.theme.ink, linewidth=3.0, zorder=4, gid="limit")
    if highest > limit_bytes:  # two lines over the lowest bars
        highest = min(tops)
        x, align, text = tops.index(highest), "center", text.replace(": ", ":\n")
        y = max(y, highest / GIB)
    if not is_far and (y - highest / GIB) * panel.per_y < _NUMBER_INCHES:
        offset += 22  # above the numbers over the bars
    panel.axes.annotate(
        text, (x, y), (0, offset), textcoords="offset points", ha=align, va=anchor, weight="bold",
        size=style.VALUE, zorder=6, gid="limit-name", bbox=panel.theme.box(),
    )  # fmt: skip


def _write_words(canvas: Canvas, reports: Sequence[Report], step: int, micro_batch: int) -> None:
    count = reports[0].plan.get("accumulate_grad_batches") or 1
    batch = f"micro-batch {micro_batch + 1} of {count}" if count > 1 else ""
    if len({report.word for report in reports}) == 1:
        outcome = f"{' and '.join(r.kind for r in reports)}: {reports[0].word}"
    else:
        outcome = ", ".join(f"{r.kind}: {r.word}" for r in reports)
    title = f"{reports[0].name}: step {step + 1}"
    canvas.write_title(title, plan_line(reports[0], batch, outcome))


def _write_keys(canvas: Canvas, *, is_distributed: bool) -> None:
    # a row distinguishes only the first three kinds: the fourth is the rest
    labels = {"activations": "activations, buckets, gathered"} if is_distributed else {}
    theme = canvas.theme
    handles = [theme.key(theme.kinds[kind], labels.get(kind, kind)) for kind in STACK]
    handles.append(theme.dashed_key("peak since the phase before"))
    canvas.write_legend(handles, top=1.28)
