"""Chart of many experiments: predicted against measured, and the error of each."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, MultipleLocator

from memest.plots import style, words
from memest.plots.style import Canvas, require, shortened, slide, text_width
from memest.plots.words import MINUS, percent_off, signed_percent
from memest.report import Measurement, Outcome, Prediction
from memest.units import GIB, counted

Pair = tuple[Prediction, Measurement]
BANDS = (2.0, 0.5)  # per cent: the largest allowed error of reserved and of allocated
MAX_ROWS = 30  # number of rows above which only the largest errors are listed


class _Quantity(NamedTuple):
    field: str  # of the reports
    name: str
    head: str  # of its column of errors
    marker: str


_QUANTITIES = (
    _Quantity("peak_allocated_bytes", "peak allocated", "alloc.", "o"),
    _Quantity("peak_reserved_bytes", "peak reserved", "reserved", "D"),
)
# All figures in inches.
_SQUARE = 2.35
_DIAGONALS_TOP, _ERRORS_TOP, _ERRORS_BOTTOM = 1.68, 2.08, 0.5
_ERRORS_LEFT = 4.15
_COLUMN = 1.05  # width of the printed errors
_MIN_REACH = 0.6  # smallest span of the errors' axis on each side, per cent


def plot_scatter(pairs: Sequence[Pair], *, dark: bool = False) -> Figure:
    """Draw predicted over measured peaks, and signed errors in per cent.

    Failed runs are left out and counted. Runs out of memory are compared by the peaks up to the
    failure. A mark at the name is a wrong verdict.

    Raises:
        PlanError: no pair is left.
    """
    runs = [
        (p, m)
        for p, m in pairs
        if m.verdict is not Outcome.FAILED and m.peak_allocated_bytes > 0 < m.peak_reserved_bytes
    ]
    require(runs)
    with slide(dark=dark) as canvas:
        sizes = [getattr(r, q.field) for pair in runs for r in pair for q in _QUANTITIES]
        for index in range(len(_QUANTITIES)):
            _draw_diagonal(canvas, runs, index, end=1.08 * max(sizes) / GIB)
        _draw_errors(canvas, runs)
        subtitle = _subtitle([p for p, _ in runs], len(pairs) - len(runs))
        canvas.write_title("Predicted against measured", subtitle)
    return canvas.figure


def _subtitle(predicted: Sequence[Prediction], left_out: int) -> str:
    num_drawn = len(predicted)
    has_intervals = any(i.low_bytes < i.high_bytes for p in predicted for i in p.intervals.values())

    selection = f", the {MAX_ROWS} furthest off listed" if num_drawn > MAX_ROWS else ""
    experiments = f"{counted(num_drawn, 'experiment')}{selection}"
    return words.dotted(
        experiments, words.gpu_words(predicted), words.token_words(predicted),
        f"shaded {' and '.join(f'±{band:g} %' for band in sorted(BANDS))}",
        "off the interval" if has_intervals else "",
        f"{left_out} without a measurement left out" if left_out else "",
        words.version_words(predicted),
    )  # fmt: skip


def _draw_diagonal(canvas: Canvas, pairs: Sequence[Pair], index: int, end: float) -> None:
    """Draw predicted over measured peaks to `end` GiB: allocated (`index` 0) or reserved (1)."""
    theme = canvas.theme
    quantity = _QUANTITIES[index]
    low = style.HEIGHT - _DIAGONALS_TOP - _SQUARE - index * (_SQUARE + 0.4)
    axes = canvas.panel(1.15, low, _SQUARE, _SQUARE, grid="y").axes
    peaks = [_peak_bytes(pair, quantity) for pair in pairs]
    for band, color in zip(BANDS, theme.band, strict=True):
        axes.fill_between(
            [0, end], [0, end * (1 - band / 100)], [0, end * (1 + band / 100)], color=color,
            linewidth=0,
        )  # fmt: skip
    axes.plot([0, end], [0, end], color=theme.muted, linewidth=1.2)
    axes.scatter(
        [measured / GIB for _, measured in peaks], [predicted / GIB for predicted, _ in peaks],
        s=52, marker=quantity.marker, facecolor=theme.markers[index],
        edgecolor=theme.background, linewidth=0.8, zorder=3, gid=quantity.field,
    )  # fmt: skip
    axes.grid(axis="both", color=theme.grid, linewidth=0.8)
    axes.set(xlim=(0, end), ylim=(0, end))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelsize=style.SMALL, pad=7)
    axes.set_ylabel("predicted, GiB", size=style.SMALL)
    if index == 0:
        axes.set_xticklabels([])
    else:
        axes.set_xlabel("measured, GiB", size=style.SMALL, labelpad=2)
    axes.set_title(quantity.name, size=style.VALUE, weight="bold", loc="left", pad=6)


def _draw_errors(canvas: Canvas, pairs: Sequence[Pair]) -> None:
    """Draw a row per experiment: its name, both errors as markers, both errors as numbers."""
    theme = canvas.theme
    rows = _worst_pairs(pairs)
    height = style.HEIGHT - _ERRORS_TOP - _ERRORS_BOTTOM
    size = style.row_size(len(rows), height)
    names = [_name_with_tag(*pair, size) for pair in rows]
    left = _ERRORS_LEFT + 0.1 + max(text_width(name, size) for name in names)
    width = style.WIDTH - 0.3 - 2 * _COLUMN - left
    panel = canvas.panel(left, _ERRORS_BOTTOM, width, height, grid="x")
    axes = panel.axes
    reach, tick = _end_and_tick(max(map(_worst_error, rows)))
    for band, color in zip(BANDS, theme.band, strict=True):
        if band < reach:
            axes.axvspan(-band, band, color=color, linewidth=0, zorder=0)
    axes.axvline(0, color=theme.ink, linewidth=1.6)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.set_major_locator(MultipleLocator(tick))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.3g} %".replace("-", MINUS) if x else "0")
    axes.tick_params(axis="x", labelsize=style.VALUE)
    axes.set_yticks(range(len(rows)), names, size=size)
    diameter = min(11.0, 0.46 * 72 * height / len(rows))
    for index, quantity in enumerate(_QUANTITIES):
        axes.scatter(
            [_error(pair, quantity) for pair in rows],
            [row + 0.36 * (index - 0.5) for row in range(len(rows))],  # one over the other
            s=diameter**2 * (0.75 if index else 1), marker=quantity.marker,
            facecolor=theme.markers[index], edgecolor="none", zorder=3,
            gid=f"error:{quantity.field}", clip_on=False,
        )  # fmt: skip
        x = width + (index + 1) * _COLUMN
        for row, pair in enumerate(rows):
            text = signed_percent(*_peak_bytes(pair, quantity))
            panel.write_in_row(x, row, text.removesuffix(" %"), ha="right", size=size)
        panel.write(
            x, height + 0.08, quantity.head, ha="right", va="bottom", size=style.SMALL,
            color=theme.muted,
        )  # fmt: skip
    _write_summary(canvas, pairs)


def _end_and_tick(worst: float) -> tuple[float, float]:
    """Return (end of the errors' axis, tick distance) in per cent, for the largest error `worst`.

    >>> _end_and_tick(0.1), _end_and_tick(1.32), _end_and_tick(7.0)
    ((0.6, 0.5), (2.0, 2.0), (10.0, 10.0))
    """
    if worst <= 0.95 * _MIN_REACH:
        return _MIN_REACH, 0.5
    ticks = (n * 10.0**power for power in range(-1, 9) for n in (1, 2, 5))  # 0.1, 0.2, 0.5, 1, ...
    tick = next(tick for tick in ticks if tick > 1.02 * worst)
    return tick, tick


def _write_summary(canvas: Canvas, pairs: Sequence[Pair]) -> None:
    """Write the meaning of the markers, and the median and worst error of all pairs."""
    for index, quantity in enumerate(_QUANTITIES):
        middle = median(abs(_error(pair, quantity)) for pair in pairs)
        worst = max(pairs, key=lambda pair: abs(_error(pair, quantity)))
        text = f"{quantity.name}: median {middle:.3f} %, "
        text += f"worst {signed_percent(*_peak_bytes(worst, quantity))}"
        y = 1 - (1.42 + 0.34 * index) / style.HEIGHT  # share of the slide's height
        canvas.figure.text(
            (_ERRORS_LEFT + 0.35) / style.WIDTH, y, text, size=style.TICK, weight="bold",
            va="center_baseline", gid=f"summary:{quantity.field}",
        )  # fmt: skip
        canvas.figure.add_artist(
            Line2D(
                [(_ERRORS_LEFT + 0.1) / style.WIDTH], [y], marker=quantity.marker,
                markersize=13 - 2 * index, markeredgecolor="none",
                markerfacecolor=canvas.theme.markers[index],
            )
        )  # fmt: skip


def _peak_bytes(pair: Pair, quantity: _Quantity) -> tuple[int, int]:
    """Return (predicted, measured) bytes of `quantity`. A prediction that is an interval gives its
    value nearest to the measured one."""
    prediction, _ = pair
    predicted, measured = (getattr(report, quantity.field) for report in pair)
    interval = prediction.intervals.get(quantity.name.removeprefix("peak "))
    if interval is not None and interval.low_bytes < interval.high_bytes:
        predicted = min(max(measured, interval.low_bytes), interval.high_bytes)
    return predicted, measured


def _error(pair: Pair, quantity: _Quantity) -> float:
    return percent_off(*_peak_bytes(pair, quantity))


def _worst_error(pair: Pair) -> float:
    return max(abs(_error(pair, quantity)) for quantity in _QUANTITIES)


def _worst_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the `MAX_ROWS` pairs with the largest errors, in the order of `pairs`."""
    errors = list(map(_worst_error, pairs))
    indices = sorted(range(len(pairs)), key=errors.__getitem__, reverse=True)[:MAX_ROWS]
    return [pairs[index] for index in sorted(indices)]


def _name_with_tag(predicted: Prediction, measured: Measurement, size: float) -> str:
    """Return the run's name and a tag: `(verdicts differ)`, else `(OOM)` if the measured run was
    out of memory, else none. The name is cut so that name and tag fit 3.4 inches at `size`
    points."""
    tag = ""
    if predicted.verdict is not measured.verdict:
        tag = " (verdicts differ)"
    elif measured.verdict is Outcome.OOM:
        tag = " (OOM)"
    return shortened(measured.name, size, 3.4 - text_width(tag, size)) + tag
