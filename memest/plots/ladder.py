"""Many experiments under each other: what fills the memory at the peak, and which cards hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from memest.plots.style import (
    HEIGHT,
    KINDS,
    OF_STRATEGIES,
    SMALL,
    VALUE,
    WIDTH,
    Theme,
    bare,
    card_label,
    hatch,
    key,
    named,
    require,
    row_size,
    runs_distributed,
    shortened,
    slide,
    text_on,
    text_width,
    widest_gap,
    write_legend,
    write_title,
)
from memest.report import Measurement, Outcome, Phase, PhaseRow, Prediction
from memest.units import GIB

MAX_ROWS = 28
"""Of more experiments the slide becomes taller instead of the type smaller."""

_TOP, _BOTTOM, _LEFT, _RIGHT = 2.42, 0.78, 0.4, 0.3  # inches
_TOTAL, _CARD = 0.95, 0.9
"""Inches of the columns at the right: the peak, and the verdicts of each card."""

_NAME = 4.35
"""Inches that a name may take before its middle is left out."""

_FAR = 1.5
"""A card that holds this many times the longest bar is left to its column."""

_LINES = 0.5  # inches of two lines over the chart
_BAR = 0.80  # of the height of a row


def peak_parts(report: Prediction | Measurement) -> dict[str, int]:
    """Bytes at the peak by the kinds of `KINDS`; they add up to the peak allocated.

    Kinds that only strategies have are left out where there are none.

    A prediction has its terms. A measurement has only what the probe read at the two phases around
    the peak, so what is alive at either counts as alive at the peak: exact but for a peak inside
    the first backward of a step, where some gradients may be yet to come. What is over the
    activations of these phases is the rest. Of a forward that ran out of memory, what was allocated
    since it began is activations.
    """
    if isinstance(report, Prediction):
        parts = dict.fromkeys(KINDS, 0)
        for term in report.terms:
            parts[term.kind if term.kind in parts else "rest"] += term.num_bytes
        return {k: n for k, n in parts.items() if n or k not in OF_STRATEGIES}
    around = _around_peak(report)
    left, parts = report.peak_allocated_bytes, {}
    for kind in KINDS[:4]:
        parts[kind] = min(left, max((getattr(r, f"{kind}_bytes") for r in around), default=0))
        left -= parts[kind]
    if len(around) == 1 and around[0].phase is Phase.BEFORE_FORWARD:
        return parts | {"activations": parts["activations"] + left, "rest": 0}
    return parts | {"rest": left}


def _around_peak(report: Measurement) -> list[PhaseRow]:
    """The phases before and after the peak; the last alone where the run ended in between."""
    rows = report.phases
    highest = max(rows, key=lambda row: row.peak_allocated_bytes, default=None)
    if highest is None or highest.peak_allocated_bytes < report.peak_allocated_bytes:
        return list(rows[-1:])
    index = rows.index(highest)
    return list(rows[max(0, index - 1) : index + 1])


def outcome_on(
    report: Prediction | Measurement, limit_bytes: int, card: str = ""
) -> Outcome | None:
    """Whether the experiment fits a card whose allocator can reserve `limit_bytes`.

    A prediction may have replayed exactly this limit, or on several GPUs that of `card` less what
    the libraries take. Else: a run that was never refused memory
    fits whatever holds its peak reserved, and does not fit what cannot hold its peak allocated.
    None in between, where the allocator's cache decides, and for a run that failed otherwise. A run
    that fitted one card is taken to fit a larger one.
    """
    if report.verdict is Outcome.FAILED:
        return None
    verdicts = report.verdicts if isinstance(report, Prediction) else {}
    for name, verdict in verdicts.items():
        is_card = card_label(name) == card and not report.plan.get("memory_limit")
        if is_card or verdict.limit_bytes == limit_bytes:
            return verdict.verdict
    if report.peak_allocated_bytes > limit_bytes:
        return Outcome.OOM
    reserved = report.peak_reserved_bytes
    if isinstance(report, Prediction):
        reserved = report.unlimited_reserved_bytes
    elif report.verdict is Outcome.OOM:
        return None  # how much it would have needed was not measured
    return Outcome.FITS if reserved <= limit_bytes else None


def plot_ladder(
    reports: Sequence[Prediction | Measurement],
    *,
    limits: Mapping[str, int],
    dark: bool = False,
) -> Figure:
    """Every experiment a stacked bar at its peak, against the lines of the cards.

    `limits` maps a card's name to the bytes that the caching allocator can reserve on it. A bar is
    hatched where the experiment is out of memory on the GPU that its report is for: it ends where
    the run failed, and, for predictions, an empty outline goes on to what would be reserved if
    there were no limit. The columns at the right give the verdict for each card; a card that is far
    beyond the longest bar has no line.

    Raises:
        PlanError: there is no report.
    """
    require(reports)
    cards = sorted(limits.items(), key=lambda item: item[1])
    drawn, longest = _drawn(reports, cards)
    inches = (HEIGHT - _TOP - _BOTTOM) * max(1, len(reports) / MAX_ROWS)
    size = row_size(len(reports), inches)
    is_mixed = len({report.kind for report in reports}) > 1
    tags = [f" ({r.kind})" if is_mixed else "" for r in reports]
    wide = max(text_width(r.name + tag, size) for r, tag in zip(reports, tags, strict=True))
    name_size = size if wide <= _NAME else min(size, SMALL)
    names = [named(r.name, tag, name_size, _NAME) for r, tag in zip(reports, tags, strict=True)]
    left = _LEFT + 0.12 + max(text_width(name, name_size) for name in names)
    width = WIDTH - _RIGHT - _TOTAL - len(cards) * _CARD - left
    per_gib = width / (1.02 * longest)
    labels = _limit_labels(drawn, per_gib, 1.02 * longest)
    top = _TOP + _LINES * max((label[2] for label in labels), default=0)
    height = max(HEIGHT, top + inches + _BOTTOM) if len(reports) > MAX_ROWS else HEIGHT
    inches = height - top - _BOTTOM
    size = min(size, row_size(len(reports), inches))
    with slide(dark=dark, height=height) as (figure, theme):
        axes = figure.add_axes((left / WIDTH, _BOTTOM / height, width / WIDTH, inches / height))
        bare(axes, theme, grid="x")
        axes.spines["left"].set_visible(False)
        axes.set(xlim=(0, 1.02 * longest), ylim=(len(reports) - 0.5, -0.5))
        axes.set_yticks(range(len(reports)), names, size=min(size, name_size))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_xlabel(f"allocated at the peak{_per_gpu(reports)}, GiB", size=VALUE, labelpad=3)
        for row, report in enumerate(reports):
            _draw_bar(axes, theme, row, report, size, per_gib, [x / GIB for _, x in drawn])
        _draw_limits(axes, theme, drawn, labels, inches)
        _draw_verdicts(axes, theme, reports, cards, size, (width, inches))
        is_unsure = any(outcome_on(r, n, card) is None for r in reports for card, n in cards)
        _write_words(figure, theme, reports, limits, is_unsure=is_unsure)
    return figure


def _drawn(
    reports: Sequence[Prediction | Measurement], cards: Sequence[tuple[str, int]]
) -> tuple[list[tuple[str, int]], float]:
    """The cards that get a line, and how many GiB the chart reaches to."""
    longest = max([_end(report) for report in reports])
    drawn = [card for card in cards if card[1] <= _FAR * longest] or list(cards[:1])
    return drawn, max(longest, 1, *(limit for _, limit in drawn)) / GIB


def _taken_bytes(report: Prediction | Measurement, limits: Mapping[str, int]) -> int:
    """How much less than a card's line several GPUs leave: their libraries lie beside it."""
    if not isinstance(report, Prediction) or report.plan.get("memory_limit"):
        return 0
    usable = {card_label(name): verdict.limit_bytes for name, verdict in report.verdicts.items()}
    return max((limits[card] - n for card, n in usable.items() if card in limits), default=0)


def _per_gpu(reports: Sequence[Prediction | Measurement]) -> str:
    return " of one GPU" if any(map(runs_distributed, reports)) else ""


def _end(report: Prediction | Measurement) -> int:
    """How far the bar, or the outline after it, reaches."""
    if isinstance(report, Prediction) and report.verdict is Outcome.OOM:
        return max(report.peak_allocated_bytes, report.unlimited_reserved_bytes)
    return report.peak_allocated_bytes


def _draw_bar(
    axes: Axes,
    theme: Theme,
    row: int,
    report: Prediction | Measurement,
    size: float,
    per_gib: float,
    lines: Sequence[float],
) -> None:
    is_oom = report.verdict is Outcome.OOM
    base = 0.0
    for kind, num_bytes in peak_parts(report).items():
        length, color = num_bytes / GIB, theme.kinds[kind]
        ink = text_on(color)
        axes.barh(
            row, length, _BAR, base, color=color, edgecolor=theme.background, linewidth=0.8,
            gid=f"{row}:{kind}",
        )  # fmt: skip
        if is_oom and length:
            box = (base, row - _BAR / 2, length, _BAR)
            hatch(axes, box, ink, zorder=2, gid=f"{row}:{kind}:oom")
        start, stop = widest_gap(base, base + length, lines)
        room = (stop - start) * per_gib - 0.12
        text = next(
            (t for t in (f"{length:.1f}", f"{length:.0f}") if text_width(t, size) < room), ""
        )
        if text:
            if is_oom:  # no hatching behind the number
                half = (text_width(text, size) / 2 + 0.04) / per_gib
                corner = ((start + stop) / 2 - half, row - 0.47 * _BAR)
                axes.add_patch(Rectangle(corner, 2 * half, 0.94 * _BAR, facecolor=color, zorder=3))
            axes.text(
                (start + stop) / 2, row, text, ha="center", va="center_baseline",
                size=0.92 * size, color=ink, zorder=6,
            )  # fmt: skip
        base += length
    if is_oom:
        _draw_shortage(axes, theme, row, base, _end(report) / GIB)
    if report.verdict is not Outcome.FITS:
        text = "OOM" if is_oom else "failed"
        wide = text_width(text, size, bold=True) + 0.16
        axes.text(
            _verdict_at(base, _end(report) / GIB, wide / per_gib, lines, axes.get_xlim()[1]), row,
            text, ha="center", va="center_baseline", size=size, weight="bold", zorder=7,
            gid=f"{row}:verdict", clip_on=False,
        )  # fmt: skip


def _verdict_at(
    reached: float, end: float, wide: float, lines: Sequence[float], edge: float
) -> float:
    """The middle of the word OOM: in the dashed outline where there is room, else after it."""
    start, stop = widest_gap(reached, end, lines)
    if stop - start > wide:
        return (start + stop) / 2
    x = end
    for line in sorted(lines):
        if x < line < x + wide:
            x = line
    return min(x, edge - wide) + wide / 2


def _draw_shortage(axes: Axes, theme: Theme, row: int, reached: float, end: float) -> None:
    """A frame round the bar, and a dashed one on to what would be reserved without a limit."""
    for start, stop, line in ((0.0, reached, "-"), (reached, end, "--")):
        if stop > start:
            axes.add_patch(
                Rectangle(
                    (start, row - _BAR / 2), stop - start, _BAR, fill=False, linestyle=line,
                    edgecolor=theme.ink, linewidth=1.4, zorder=5,
                    gid=f"{row}:{'reached' if line == '-' else 'shortage'}",
                )
            )  # fmt: skip


def _limit_labels(
    cards: Sequence[tuple[str, int]], per_gib: float, edge: float
) -> list[tuple[str, float, int]]:
    """(text, middle, level) of each card's label: on the lowest level where it touches no other."""
    labels: list[tuple[str, float, int]] = []
    ends: list[float] = []  # of each level, in inches
    for label, limit in cards:
        text = f"{label}\n{limit / GIB:.1f} GiB"
        half = max(text_width(line, SMALL, bold=True) for line in text.split("\n")) / 2
        x = min(limit / GIB * per_gib, edge * per_gib - half)
        level = next((i for i, end in enumerate(ends) if end + 0.1 < x - half), len(ends))
        ends[level : level + 1] = [x + half]
        labels.append((text, x / per_gib, level))
    return labels


def _draw_limits(
    axes: Axes,
    theme: Theme,
    cards: Sequence[tuple[str, int]],
    labels: Sequence[tuple[str, float, int]],
    inches: float,
) -> None:
    """A line per card, its label over it."""
    for (name, limit), (text, x, level) in zip(cards, labels, strict=True):
        axes.axvline(limit / GIB, color=theme.limit, linewidth=2.6, zorder=4, gid=f"limit:{name}")
        axes.text(
            x, 1 + (0.08 + _LINES * level) / inches, text, transform=axes.get_xaxis_transform(),
            ha="center", va="bottom", size=SMALL, weight="bold", linespacing=1.1, clip_on=False,
        )  # fmt: skip


def _draw_verdicts(
    axes: Axes,
    theme: Theme,
    reports: Sequence[Prediction | Measurement],
    cards: Sequence[tuple[str, int]],
    size: float,
    panel: tuple[float, float],
) -> None:
    """The peaks as numbers, then a column per card: fits, OOM, or ? where it is not known."""
    width, inches = panel
    _write_head(axes, "peak\nGiB", 1 + (_TOTAL - 0.12) / width, inches, align="right")
    for row, report in enumerate(reports):
        axes.text(
            1 + (_TOTAL - 0.12) / width, row, f"{report.peak_allocated_bytes / GIB:.1f}",
            transform=axes.get_yaxis_transform(), ha="right", va="center_baseline", size=size,
            weight="bold", clip_on=False, gid=f"{row}:total",
        )  # fmt: skip
    for column, (label, limit) in enumerate(cards):
        x = 1 + (_TOTAL + (column + 0.5) * _CARD) / width
        head = "\n".join(shortened(part, SMALL, _CARD - 0.06, bold=True) for part in label.split())
        _write_head(axes, head, x, inches, align="center")
        for row, report in enumerate(reports):
            outcome = outcome_on(report, limit, label)
            if outcome is Outcome.OOM:
                half = 0.46 * _CARD / width
                axes.add_patch(
                    Rectangle(
                        (x - half, row - _BAR / 2), 2 * half, _BAR, facecolor=theme.ink,
                        clip_on=False, transform=axes.get_yaxis_transform(),
                    )
                )  # fmt: skip
            text = {None: "?", Outcome.OOM: "OOM"}.get(outcome, "fits")
            axes.text(
                x, row, text, transform=axes.get_yaxis_transform(), ha="center",
                va="center_baseline", size=size, clip_on=False, gid=f"{row}:on:{label}",
                weight="bold" if outcome is Outcome.OOM else "normal",
                color=theme.background if outcome is Outcome.OOM else theme.ink,
            )  # fmt: skip


def _write_head(axes: Axes, text: str, x: float, inches: float, *, align: str) -> None:
    axes.text(
        x, 1 + 0.08 / inches, text, transform=axes.transAxes, ha=align, va="bottom", size=SMALL,
        weight="bold", linespacing=1.1, clip_on=False,
    )  # fmt: skip


def _write_words(
    figure: Figure,
    theme: Theme,
    reports: Sequence[Prediction | Measurement],
    limits: Mapping[str, int],
    *,
    is_unsure: bool,
) -> None:
    kinds = " and ".join(dict.fromkeys(report.kind for report in reports))
    gpus = ", ".join(dict.fromkeys(report.gpu for report in reports))
    noun = "experiment" if len(reports) == 1 else "experiments"
    has_several = any(map(runs_distributed, reports))
    taken = max((_taken_bytes(report, limits) for report in reports), default=0)
    nccl = f"; NCCL takes up to {taken / GIB:.1f} GiB off each line" if taken else ""
    unsure = "; ? = the peaks alone cannot tell" if is_unsure else ""
    write_title(
        figure,
        theme,
        f"What fills {'each' if has_several else 'the'} GPU at the peak",
        f"{len(reports)} {noun}, {kinds} on {gpus}{nccl}{unsure}",
    )
    used = {kind for report in reports for kind in peak_parts(report)}
    handles = [key(theme.kinds[kind], kind, theme) for kind in KINDS if kind in used]
    if any(_end(report) > report.peak_allocated_bytes for report in reports):
        handles.append(
            Patch(
                facecolor="none", edgecolor=theme.ink, linestyle="--", linewidth=1.4,
                label="would be reserved without a limit",
            )
        )  # fmt: skip
    write_legend(figure, theme, handles, top=1.28)
