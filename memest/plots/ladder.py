"""Chart of many experiments: the memory that each needs, and the GPUs that hold it."""

import re
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from memest.plots import style
from memest.plots.style import Canvas, Panel, require, shortened, slide, text_on, text_width
from memest.plots.words import (
    dotted,
    gpu_label,
    gpu_words,
    setting_words,
    token_words,
    version_words,
)
from memest.report import Outcome, Prediction, StepTime
from memest.units import GIB, counted

_NO_LETTER = re.compile(r"\W|_")
CACHED = "cached"  # reserved at the peak and not allocated
UNKNOWN = "unknown"  # kind of the need beyond a failure, whose contents were not predicted
MAX_ROWS = 18  # rows above which the slide becomes taller instead of the type smaller
_TOP, _BOTTOM, _LEFT, _RIGHT = 1.68, 0.42, 0.3, 0.25  # inches
_TOTAL, _GPU = 1.02, 1.05  # inches of the columns at the right: needs, and each GPU's verdicts
_NAME = 4.5  # widest row label, inches; longer ones lose their middle
_FAR = 1.5  # a GPU with this many times the longest bar gets only a column
_LINE_INCHES = 0.30  # height of a line of text over the chart, inches
_BAR_SHARE = 0.78  # height of a bar, as a share of its row
_MAX_ROW_INCHES = 0.62  # largest height of a row, inches
_MAX_TRADES = 16  # rows above which the slide becomes taller instead of the type smaller
_TRADE_TOP, _TRADE_BOTTOM = 1.95, 0.45  # inches
_TRADE_NAMES, _TRADE_GAP, _TRADE_RIGHT = 4.4, 0.55, 0.9  # inches
_TRADE_BAR = 0.62  # height of a bar, as a share of its row
_BOUND = {"host": "#8C8C8C", "compute": "#0072B2", "memory": "#E69F00", "link": "#009E73"}
"""Colours of a step's bottleneck: Okabe and Ito, for the colour-blind."""

_SPARE, _LACK = "#56B4E9", "#D55E00"  # colours of free memory and of missing memory


def peak_parts(report: Prediction) -> dict[str, int]:
    """Return the allocated bytes at the peak by kind of memory, one of `style.KINDS`."""
    parts = dict.fromkeys(style.KINDS, 0)
    for term in report.terms:
        parts[term.kind if term.kind in parts else "rest"] += term.num_bytes
    return {k: n for k, n in parts.items() if n or k not in style.OF_STRATEGIES}


def need_parts(report: Prediction, unlimited: Prediction | None = None) -> dict[str, int]:
    """Return `report.needs_bytes` split by kind of memory, with cached blocks as the part `CACHED`.

    For a plan that does not fit, the kinds are from `unlimited`, its prediction on a GPU that holds
    it. If `unlimited` is None, the kinds are from the peak before the failure. The rest of the need
    is then the part `UNKNOWN`, in place of `CACHED`.
    """
    is_oom = report.verdict is Outcome.OOM
    parts = peak_parts(unlimited if is_oom and unlimited is not None else report)
    remainder = report.needs_bytes
    for kind, size in parts.items():
        parts[kind] = min(size, remainder)
        remainder -= parts[kind]
    return parts | {UNKNOWN if is_oom and unlimited is None else CACHED: remainder}


def word_on(report: Prediction, limit_bytes: int, gpu: str = "") -> str:
    """Return `fits`, `tight`, `may`, `OOM` or `?` for a GPU that can reserve `limit_bytes`.

    If `report` has a verdict on this limit, or on the GPU with the label `gpu`, the result is the
    word of the verdict. Without a verdict, it is `OOM` for a limit below the peak allocated. It is
    `fits` for a limit of the peak reserved or more, and `?` for a limit between the two peaks.
    `tight` and `may` are only words of verdicts.
    """
    for name, verdict in report.verdicts.items():
        is_gpu = gpu_label(name) == gpu and not report.plan.get("memory_limit")
        if is_gpu or verdict.limit_bytes == limit_bytes:
            return verdict.word
    if report.peak_allocated_bytes > limit_bytes:
        return Outcome.OOM.word
    return Outcome.FITS.word if report.unlimited_reserved_bytes <= limit_bytes else "?"


class _Layout:
    """Font sizes in points, and sizes of the chart in inches, at which all rows and columns fit.
    `labels` are (name, settings) of each report. `gpus` are (name, limit in bytes), ascending;
    those in `drawn` have a line in the chart."""

    def __init__(
        self, reports: Sequence[Prediction], labels: Sequence[tuple[str, str]],
        gpus: Sequence[tuple[str, int]],
    ) -> None:  # fmt: skip
        longest = max(report.needs_bytes for report in reports)
        self.gpus = gpus
        near = [(name, limit) for name, limit in gpus if limit <= _FAR * longest]
        self.drawn = near or gpus[:1]
        self.lines = [limit / GIB for _, limit in self.drawn]
        span = 1.03 * max(longest, 1, *(limit for _, limit in self.drawn)) / GIB
        rows = min(len(reports), MAX_ROWS)
        row = min(_MAX_ROW_INCHES, (style.HEIGHT - _TOP - 0.3 - _BOTTOM) / rows)
        name, detail = min(float(style.VALUE), 33 * row), min(float(style.SMALL), 25 * row)
        self.name = _fit_size([name for name, _ in labels], name, 10, bold=True)
        self.detail = _fit_size([detail for _, detail in labels], min(detail, self.name), 8)
        widths = (
            (text_width(n, self.name, bold=True), text_width(d, self.detail)) for n, d in labels
        )
        self.left = _LEFT + 0.12 + min(_NAME, max(map(max, widths)))
        self.width = style.WIDTH - _RIGHT - _TOTAL - len(gpus) * _GPU - self.left
        self.per_gib = self.width / span
        self.labels = _limit_labels(self.drawn, self.per_gib, span)
        levels = [1.0, 1.6 if len(gpus) > 1 else 1.0, *(1.0 + level for *_, level in self.labels)]
        self.top = _TOP + _LINE_INCHES * max(levels)
        self.row = min(_MAX_ROW_INCHES, (style.HEIGHT - self.top - _BOTTOM) / rows)
        self.part, self.value = min(float(style.SMALL), 38 * self.row), min(20.0, 50 * self.row)
        self.height = max(style.HEIGHT, self.top + self.row * len(reports) + _BOTTOM)


def plot_ladder(
    reports: Sequence[Prediction], *, limits: Mapping[str, int], dark: bool = False,
    unlimited: Mapping[str, Prediction] | None = None, suite: str = "",
) -> Figure:  # fmt: skip
    """Draw the memory each experiment needs as a stacked bar, against lines of the GPUs' limits.

    `limits` are {GPU: bytes that the allocator can reserve}. `unlimited` are {name of an experiment
    that does not fit: its prediction on a GPU that holds it}. `suite` is a name for the subtitle.

    Raises:
        PlanError: there is no report.
    """
    require(reports)
    parts = [need_parts(r, (unlimited or {}).get(r.name)) for r in reports]
    labels = [_name_and_settings(report, reports) for report in reports]
    layout = _Layout(reports, labels, sorted(limits.items(), key=lambda item: item[1]))
    rows = len(reports)
    with slide(dark=dark, height=layout.height) as canvas:
        low = layout.height - layout.top - rows * layout.row
        panel = canvas.panel(layout.left, low, layout.width, rows * layout.row, grid="x")
        axes = panel.axes
        axes.spines["left"].set_visible(False)
        axes.set(xlim=(0, layout.width / layout.per_gib), ylim=(rows - 0.5, -0.5), yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.tick_params(axis="x", labelsize=style.SMALL, pad=3)
        for index, report in enumerate(reports):
            _write_name(panel, index, labels[index], layout)
            _draw_bar(panel, index, report, parts[index], layout)
        color = panel.theme.ink
        for (name, limit), (text, x, level) in zip(layout.drawn, layout.labels, strict=True):
            panel.axes.axvline(
                limit / GIB, color=color, linewidth=3.0, zorder=7, gid=f"limit:{name}"
            )
            panel.write_in_column(
                x, panel.height + 0.06 + _LINE_INCHES * level, text, ha="center", va="bottom",
                size=style.VALUE, weight="bold",
            )  # fmt: skip
        _draw_columns(panel, reports, layout)
        _write_title(canvas, reports, limits, suite)
        _write_keys(canvas, reports, parts)
    return canvas.figure


def _name_and_settings(report: Prediction, reports: Sequence[Prediction]) -> tuple[str, str]:
    """Return (experiment's name, settings), with tokens only if those of `reports` differ."""
    details = setting_words(report.plan)
    *_, model = str(report.plan.get("model_name", "")).split("/")
    first_word, *_ = [*report.name.split(), ""]
    is_named = _NO_LETTER.sub("", first_word.casefold()) in _NO_LETTER.sub("", model.casefold())
    if model and model != report.name and not is_named:
        details.insert(0, model)
    if len({r.plan.get("seq_len") for r in reports}) > 1 and report.plan.get("seq_len"):
        details.append(f"{report.plan['seq_len']} tokens")
    return report.name, dotted(*details)


def _fit_size(texts: Sequence[str], size: float, min_size: float, *, bold: bool = False) -> float:
    """Return the largest font size, in points, at which each of `texts` is at most `_NAME` inches
    wide. It is at most `size`, and `min_size` if no larger size fits."""
    widest = max(text_width(text, size, bold=bold) for text in texts)
    return size if widest <= _NAME else max(min(min_size, size), size * _NAME / widest)


def _own_limit(report: Prediction, layout: _Layout) -> float | None:
    """Return the limit of the report's own GPU, in GiB, if the run is out of memory there; else
    None. The limit is from the verdict on this GPU. Without this verdict, it is the limit of this
    GPU in `layout.gpus`. If this GPU is not in `layout.gpus`, it is the lowest of `layout.lines`,
    or None if that list is empty. `layout.lines` has the limits that the chart shows as lines, in
    GiB."""
    if report.verdict is not Outcome.OOM:
        return None
    if report.gpu in report.verdicts:
        return report.verdicts[report.gpu].limit_bytes / GIB
    limits = [limit / GIB for gpu, limit in layout.gpus if gpu == gpu_label(report.gpu)]
    return limits[0] if limits else min(layout.lines, default=None)


def _write_name(panel: Panel, row: int, label: tuple[str, str], layout: _Layout) -> None:
    room, (name, detail) = layout.left - _LEFT - 0.12, label
    panel.write_in_row(
        -0.12, row + (-0.19 if detail else 0.0), shortened(name, layout.name, room, bold=True),
        ha="right", size=layout.name, weight="bold", gid=f"{row}:name",
    )  # fmt: skip
    panel.write_in_row(
        -0.12, row + 0.27, shortened(detail, layout.detail, room), ha="right", size=layout.detail,
        color=panel.theme.muted, gid=f"{row}:detail",
    )  # fmt: skip


def _draw_bar(
    panel: Panel, row: int, report: Prediction, parts: Mapping[str, int], layout: _Layout
) -> None:
    axes, theme = panel.axes, panel.theme
    limit, base = _own_limit(report, layout), 0.0
    lines = layout.lines if limit is None else [*layout.lines, limit]
    for kind, num_bytes in parts.items():
        length = num_bytes / GIB
        color = {UNKNOWN: theme.background, CACHED: theme.band[1], **theme.kinds}[kind]
        axes.barh(
            row, length, _BAR_SHARE, base, color=color, linewidth=0.8, gid=f"{row}:{kind}",
            edgecolor=theme.muted if kind in (CACHED, UNKNOWN) and length else theme.background,
        )  # fmt: skip
        start, stop = style.widest_gap(base, base + length, lines)
        text = f"{length:.1f}"
        is_marked = limit is not None and start >= limit  # is under the strokes
        if text_width(text, layout.part) < (stop - start) * layout.per_gib - 0.1 and not is_marked:
            axes.text(
                (start + stop) / 2, row, text, ha="center", va="center_baseline",
                size=layout.part, color=text_on(color), zorder=6, gid=f"{row}:{kind}:size",
            )  # fmt: skip
        base += length
    if limit is not None:
        _mark_excess(panel, row, limit, base)


def _mark_excess(panel: Panel, row: int, limit: float, end: float) -> None:
    """Frame and hatch the part of the bar in `row` from the GPU's `limit` to `end`, in GiB."""
    theme = panel.theme
    start = min(limit, end)
    if end <= start:
        return
    box = (start, row - _BAR_SHARE / 2, end - start, _BAR_SHARE)
    panel.fill(box, facecolor=theme.background, alpha=0.45, edgecolor="none", zorder=3)
    panel.fill(box, fill=False, edgecolor=theme.ink, linewidth=2.0, zorder=5, gid=f"{row}:excess")
    panel.hatch(box, theme.ink, zorder=4, gid=f"{row}:excess:strokes")


def _limit_labels(
    gpus: Sequence[tuple[str, int]], per_gib: float, edge: float
) -> list[tuple[str, float, int]]:
    """Return (text, x, row) of a label for each of `gpus`, (name, limit in bytes). The middle of
    the text is at x GiB on the axis. Labels are in rows over the chart, and row 0 is the lowest.
    Each label is in the lowest row with room. The axis has `per_gib` inches per GiB and ends at
    `edge` GiB."""
    labels: list[tuple[str, float, int]] = []
    ends: list[float] = []  # of the last label in each row, in inches
    for label, limit in gpus:
        text = f"{label}: {limit / GIB:.1f} GiB"
        half = text_width(text, style.VALUE, bold=True) / 2
        x = max(half, min(limit / GIB * per_gib, edge * per_gib - half))
        row = next((i for i, end in enumerate(ends) if end + 0.15 < x - half), len(ends))
        ends[row : row + 1] = [x + half]  # adds a row if all are full
        labels.append((text, x / per_gib, row))
    return labels


def _draw_columns(panel: Panel, reports: Sequence[Prediction], layout: _Layout) -> None:
    """Write each need in GiB, then a column per GPU: fits, tight, may, OOM, or ? where unknown."""
    right = panel.width + _TOTAL - 0.1
    _write_column_head(panel, "needs", right, align="right")
    for row, report in enumerate(reports):
        panel.write_in_row(
            right, row, f"{report.needs_bytes / GIB:.1f}", size=layout.value, weight="bold",
            ha="right", gid=f"{row}:total",
        )  # fmt: skip
    for column, (label, limit) in enumerate(layout.gpus):
        x = panel.width + _TOTAL + (column + 0.5) * _GPU
        if len(layout.gpus) > 1:
            words = label.split()
            head = "\n".join(
                shortened(word, style.SMALL, _GPU - 0.06, bold=True) for word in words[:2]
            )
            _write_column_head(panel, head, x, align="center")
        for row, report in enumerate(reports):
            word = word_on(report, limit, label)
            _write_verdict(panel, x, row, word, layout.value, f"{row}:on:{label}")


def _write_verdict(panel: Panel, x: float, row: int, text: str, size: float, gid: str) -> None:
    theme, color = panel.theme, panel.theme.ink
    half = 0.46 * _GPU / panel.width
    if text in theme.fills:
        color = text_on(theme.fills[text])
        panel.fill(
            (x / panel.width - half, row - 0.43, 2 * half, 0.86), facecolor=theme.fills[text],
            edgecolor=theme.ink, linewidth=2.0, clip_on=False,
            transform=panel.axes.get_yaxis_transform(),
        )  # fmt: skip
    weight = "bold" if text == "OOM" else "normal"
    panel.write_in_row(x, row, text, ha="center", size=size, weight=weight, color=color, gid=gid)


def _write_column_head(panel: Panel, text: str, x: float, *, align: str) -> None:
    panel.write(
        x, panel.height + 0.06, text, ha=align, va="bottom", size=style.SMALL, weight="bold",
        linespacing=1.1,
    )  # fmt: skip


def _write_title(
    canvas: Canvas, reports: Sequence[Prediction], limits: Mapping[str, int], suite: str
) -> None:
    has_several_gpus = any((report.plan.get("devices") or 1) > 1 for report in reports)
    suite_text = f" of {suite}" if suite else ""
    nccl, nccl_bytes = "", 0
    for report in reports:
        for name, verdict in report.verdicts.items():
            limit = limits.get(gpu_label(name))
            if limit is not None and not report.plan.get("memory_limit"):
                nccl_bytes = max(nccl_bytes, limit - verdict.limit_bytes)
    if nccl_bytes and has_several_gpus:
        nccl = f"NCCL takes up to {nccl_bytes / GIB:.1f} GiB off each line"
    subtitle = dotted(
        f"{counted(len(reports), 'experiment')}{suite_text}, predicted for {gpu_words(reports)}",
        token_words(reports),
        nccl,
        version_words(reports),
    )
    subject = "each GPU" if has_several_gpus else "the GPU"
    canvas.write_title(f"What {subject} has to hold at the peak, GiB", subtitle)


def _write_keys(
    canvas: Canvas, reports: Sequence[Prediction], parts: Sequence[Mapping[str, int]]
) -> None:
    theme = canvas.theme
    kinds = {kind for row in parts for kind, size in row.items() if size}
    names = {"rest": "temporaries, rest"}
    handles = [theme.key(theme.kinds[k], names.get(k, k)) for k in style.KINDS if k in kinds]
    if CACHED in kinds:
        handles.append(Patch(facecolor=theme.band[1], edgecolor=theme.muted, label="cached"))
    if UNKNOWN in kinds:
        handles.append(Patch(facecolor=theme.background, edgecolor=theme.muted, label="and more"))
    if any(report.verdict is Outcome.OOM for report in reports):
        handles.append(
            Patch(
                facecolor=theme.background, edgecolor=theme.ink, linewidth=1.6, hatch="//",
                label="beyond the GPU",
            )
        )  # fmt: skip
    canvas.write_legend(handles, top=1.28)


def plot_trade_off(reports: Sequence[Prediction], *, gpu: str, dark: bool = False) -> Figure:
    """Draw, for each experiment, the memory left on `gpu` in GiB and the time of a step in seconds.

    The line over a time bar is its interval. For an experiment that does not fit, the missing
    memory is left of zero and the time bar is faint.

    Raises:
        PlanError: there is no report.
    """
    require(reports)
    height = max(style.HEIGHT, style.HEIGHT * len(reports) / _MAX_TRADES)
    inner_height = height - _TRADE_TOP - _TRADE_BOTTOM
    width = (style.WIDTH - _TRADE_NAMES - _TRADE_GAP - _TRADE_RIGHT) / 2
    size = style.row_size(len(reports), inner_height)
    with slide(dark=dark, height=height) as canvas:
        theme = canvas.theme
        left, right = (
            canvas.panel(start, _TRADE_BOTTOM, width, inner_height, grid="x")
            for start in (_TRADE_NAMES, _TRADE_NAMES + width + _TRADE_GAP)
        )
        _draw_memory(left, reports, gpu, size)
        _draw_time(right, reports, gpu, size)
        for panel, title in ((left, "GiB left"), (right, "seconds a step, estimated")):
            panel.axes.set_title(title, size=style.VALUE, loc="left", color=theme.ink)
            panel.axes.set_ylim(len(reports) - 0.5, -0.5)
            panel.axes.set_yticks([])
        bounds = {time.bound_by for r in reports if (time := r.times.get(gpu))}
        colors = {name: color for name, color in _BOUND.items() if name in bounds}
        handles: list[Patch] = [theme.key(c, f"bound by {n}") for n, c in colors.items()]
        canvas.write_legend(handles, top=1.2)
        details = (token_words(reports), "line: interval of the estimate", version_words(reports))
        canvas.write_title(f"Memory against time on {gpu_label(gpu)}", dotted(*details))
    return canvas.figure


def _draw_memory(panel: Panel, reports: Sequence[Prediction], gpu: str, size: float) -> None:
    axes = panel.axes
    margins = [r.verdicts[gpu].margin_bytes / GIB for r in reports]
    low, high = min(0.0, *margins), max(0.0, *margins)
    room = max(text_width(f"{value:+.1f}", min(size, style.VALUE)) for value in margins) + 0.15
    left_room = room if low < 0 else 0.0
    per_inch = (high - low or 1.0) / (panel.width - left_room - room)
    axes.set_xlim(low - left_room * per_inch, high + room * per_inch)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    for row, (report, value) in enumerate(zip(reports, margins, strict=True)):
        word = report.verdicts[gpu].word
        color = style.VERDICTS.get(word) or (_LACK if word == "OOM" else _SPARE)
        axes.barh(row, value, height=_TRADE_BAR, color=color, gid=f"memory-{row}")
        offset = 0.05 * per_inch if value >= 0 else -0.05 * per_inch
        axes.text(
            value + offset, row, f"{value:+.1f}" if value < 0 else f"{value:.1f}",
            ha="left" if value >= 0 else "right", va="center", size=min(size, style.VALUE),
        )  # fmt: skip
        name = shortened(report.name, size, _TRADE_NAMES - 0.7)
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
            axes.text(0, row, " no estimate", va="center", size=style.SMALL, color=theme.muted)
            continue
        color = _BOUND[time.bound_by]
        is_oom = report.verdicts[gpu].verdict is Outcome.OOM
        alpha = 0.4 if is_oom else 1.0
        axes.barh(row, time.seconds, height=_TRADE_BAR, color=color, alpha=alpha, gid=f"time-{row}")
        axes.plot([time.low_seconds, time.high_seconds], [row, row], color=theme.ink, linewidth=1.6)
        text = f" {time.seconds:.3g}{' OOM' if is_oom else ''}"
        axes.text(time.high_seconds, row, text, va="center", size=min(size, style.VALUE))
