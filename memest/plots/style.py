"""One look for all charts: a slide, read from the back of a lecture room.

The colours are those of Okabe and Ito, "Color Universal Design" (https://jfly.uni-koeln.de/color/),
made to be told apart with every common kind of colour blindness. Of the eight, those were taken
whose luminance also rises from kind to kind in the order of the stack, so that a greyscale print
keeps them apart: blue 0.34, vermilion 0.47, sky blue 0.62, yellow 0.84 (ITU-R BT.601 luma). What
only several GPUs have lies over the yellow and falls again: orange 0.64, bluish green 0.42. The
rest is near black on light slides and near white on dark ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from memest.errors import PlanError
from memest.report import Report

WIDTH, HEIGHT = 40 / 3, 7.5
"""Inches of a 16:9 slide, in which the sizes of type are what a slide program calls them."""

PNG_DPI = 144
"""1920 x 1080 pixels."""

TITLE, LABEL, TICK, VALUE, SMALL = 26, 20, 18, 16, 14
"""Sizes of type in points; only rows of a long list go below `SMALL`."""

KINDS = ("params", "grads", "optimizer", "activations", "buckets", "gathered", "rest")
"""In the order of the stack, from the axis."""

OF_STRATEGIES = ("buckets", "gathered")
"""Kinds that only a run on several GPUs has; elsewhere they are left out of legends."""

_HATCH_INCHES = 0.19  # between strokes, along the axis
MINUS = "\N{MINUS SIGN}"  # as wide as a plus
_MAX_LETTERS = 250  # more never fit a line
FONT = "DejaVu Sans"  # comes with matplotlib, so every machine draws the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """The colours of light or of dark slides."""

    background: str
    ink: str
    muted: str
    """Of what is read second: subtitles, grids, the limits' names."""

    grid: str
    limit: str
    """Of a GPU's line; never by colour alone, it has its name beside it."""

    band: tuple[str, str]
    """Of the wide and of the narrow error band."""

    kinds: Mapping[str, str]
    markers: tuple[str, str]
    """Of peak allocated and of peak reserved."""


_STATES = {
    "params": "#0072B2", "grads": "#D55E00", "optimizer": "#56B4E9", "activations": "#F0E442",
    "buckets": "#E69F00", "gathered": "#009E73",
}  # fmt: skip

LIGHT = Theme(
    background="#FFFFFF",
    ink="#111111",
    muted="#444444",
    grid="#D0D0D0",
    limit="#111111",
    band=("#ECECEC", "#CFCFCF"),
    kinds=_STATES | {"rest": "#3C3C3C"},
    markers=("#0072B2", "#D55E00"),
)
DARK = Theme(
    background="#111417",
    ink="#F5F5F5",
    muted="#C4C8CC",
    grid="#3A3F45",
    limit="#F5F5F5",
    band=("#23282D", "#3B434A"),
    kinds=_STATES | {"rest": "#F2F2F2"},
    markers=("#56B4E9", "#E69F00"),
)


@contextmanager
def plain_matplotlib(settings: Mapping[Any, Any]) -> Iterator[None]:
    """matplotlib as it comes, with these settings, whatever the user has configured."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


@contextmanager
def slide(*, dark: bool, height: float = HEIGHT) -> Iterator[tuple[Figure, Theme]]:
    """An empty slide to draw on, with its theme."""
    theme = DARK if dark else LIGHT
    settings = {
        "font.family": [FONT],
        "text.color": theme.ink,
        "axes.edgecolor": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.facecolor": theme.background,
        "axes.labelsize": LABEL,
        "axes.linewidth": 1.2,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "xtick.labelsize": TICK,
        "ytick.labelsize": TICK,
        "text.usetex": False,
        "text.parse_math": False,  # a `$` in an experiment's name is a `$`
    }
    with plain_matplotlib(settings):
        figure = Figure(figsize=(WIDTH, height), facecolor=theme.background, dpi=PNG_DPI)
        FigureCanvasAgg(figure)
        yield figure, theme


def text_on(color: str) -> str:
    """Black or white, whichever stands out more on `color` (WCAG 2 relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#FFFFFF"


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Inches that one line of `text` takes."""
    if not text.strip():
        return 0.0
    font = FontProperties(family=FONT, weight="bold" if bold else "normal")
    text = text.replace("$", "S")  # matplotlib would measure a formula
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) / 72


def shortened(text: str, size: float, inches: float, *, bold: bool = False) -> str:
    """`text`, its middle replaced by an ellipsis where it is wider than `inches`."""

    def cut(num_kept: int) -> str:
        tail = num_kept // 2
        return f"{text[: num_kept - tail]}…{text[len(text) - tail :]}"

    text = " ".join(text.split())
    if len(text) <= _MAX_LETTERS and text_width(text, size, bold=bold) <= inches:
        return text
    kept = range(2, min(len(text), _MAX_LETTERS))
    num_fit = bisect_right(kept, inches, key=lambda n: text_width(cut(n), size, bold=bold))
    return cut(kept[num_fit - 1]) if num_fit else "…"


def named(name: str, tag: str, size: float, inches: float) -> str:
    """`name` and `tag`, the name cut where both together are wider than `inches`."""
    return shortened(name, size, inches - text_width(tag, size)) + tag


def widest_gap(start: float, stop: float, lines: Sequence[float]) -> tuple[float, float]:
    """The longest part of a bar that no line cuts."""
    edges = [start, *sorted(x for x in lines if start < x < stop), stop]
    return max(pairwise(edges), key=lambda gap: gap[1] - gap[0])


def write_title(figure: Figure, theme: Theme, title: str, subtitle: str) -> None:
    """The two lines at the top left of a slide; the second is set smaller before it is cut."""
    height = figure.get_figheight()
    room = WIDTH - 0.8
    figure.text(
        0.4 / WIDTH,
        1 - 0.28 / height,
        shortened(title, TITLE, room, bold=True),
        size=TITLE,
        weight="bold",
        va="top",
        gid="title",
    )
    size = next((s for s in (TICK, VALUE, SMALL) if text_width(subtitle, s) <= room), SMALL)
    figure.text(
        0.4 / WIDTH,
        1 - 0.80 / height,
        shortened(subtitle, size, room),
        size=size,
        color=theme.muted,
        va="top",
        gid="subtitle",
    )


def card_label(gpu: str) -> str:
    """A card of the catalogue as a slide names it.

    >>> card_label("a100-80gb"), card_label("12.00GiB"), card_label("custom")
    ('A100 80GB', '12.00 GiB', 'custom')
    """
    if not any(c.isdigit() for c in gpu):
        return gpu
    return gpu.replace("-", " ").upper().replace("GIB", " GiB")


def runs_distributed(report: Report) -> bool:
    """Whether a strategy of several GPUs ran the plan of a report."""
    plan = report.plan
    return int(plan.get("devices") or 1) > 1 or plan.get("strategy", "auto") != "auto"


def retitle(figure: Figure, title: str) -> Figure:
    """`figure` with another title; an empty one leaves it as it is."""
    for text in figure.texts:
        if title and text.get_gid() == "title":
            text.set_text(shortened(title, TITLE, WIDTH - 0.8, bold=True))
    return figure


def write_legend(figure: Figure, theme: Theme, handles: Sequence[Patch], *, top: float) -> None:
    """One row of keys across the slide, its upper edge `top` inches under the slide's."""
    room = WIDTH - 0.7
    size = next((s for s in (VALUE, SMALL) if keys_width(handles, s) <= room), SMALL)
    figure.legend(
        handles=list(handles),
        loc="upper left",
        bbox_to_anchor=(0.3 / WIDTH, 1 - top / figure.get_figheight()),
        bbox_transform=figure.transFigure,
        ncols=len(handles),
        fontsize=size,
        frameon=False,
        labelcolor=theme.ink,
        handlelength=1.3,
        handleheight=1.0,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0.0,
    )


def keys_width(handles: Sequence[Patch], size: float) -> float:
    """Inches of a row of keys: each has a swatch, its label and the space to the next."""
    return sum(text_width(str(h.get_label()), size) + 3.0 * size / 72 for h in handles)


def key(color: str, label: str, theme: Theme) -> Patch:
    """A legend's key for a filled colour."""
    return Patch(facecolor=color, edgecolor=theme.background, label=label)


def hatch(
    axes: Axes, box: tuple[float, float, float, float], color: str, *, zorder: float, gid: str
) -> None:
    """Diagonal strokes over a box (x, y, width, height in data): out of memory.

    Drawn stroke by stroke: slide programs and small viewers fill matplotlib's own hatches, which
    are SVG patterns, with black.
    """
    x, y, wide, tall = box
    panel = axes.get_position()
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    (x0, x1), (y0, y1) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
    per_x = panel.width * figure.get_figwidth() / (x1 - x0)  # inches
    per_y = panel.height * figure.get_figheight() / (y1 - y0)
    width, height = wide * per_x, tall * per_y
    strokes = []
    for index in range(1, ceil((width + height) / _HATCH_INCHES)):
        foot = index * _HATCH_INCHES - height  # where the stroke would meet the box's edge y
        start, stop = max(foot, 0.0), min(foot + height, width)
        strokes.append([(x + at / per_x, y + (at - foot) / per_y) for at in (start, stop)])
    lines = LineCollection(strokes, colors=color, linewidths=2.0, zorder=zorder, gid=gid)
    axes.add_collection(lines, autolim=False)


def bare(axes: Axes, theme: Theme, *, grid: str) -> None:
    """Drop the frame and draw a quiet grid along one axis, behind everything."""
    axes.set_axisbelow(True)
    axes.grid(axis="x" if grid == "x" else "y", color=theme.grid, linewidth=1.0)
    for side in ("top", "right", "left" if grid == "y" else "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def row_size(num_rows: int, inches: float) -> float:
    """Size of type for `num_rows` lines under each other in `inches`."""
    return min(float(VALUE), 0.86 * 72 * inches / num_rows)


def percent_off(predicted_bytes: int, measured_bytes: int) -> float:
    """The signed error of a prediction in per cent of what was measured."""
    return 100 * (predicted_bytes - measured_bytes) / measured_bytes


def signed_percent(predicted_bytes: int, measured_bytes: int) -> str:
    """`percent_off` as text; an error that rounds to nothing has no sign.

    >>> signed_percent(201, 200), signed_percent(10**6 + 1, 10**6)
    ('+0.50 %', '±0.00 %')
    """
    error = percent_off(predicted_bytes, measured_bytes)
    if abs(error) < 0.005:
        return "±0.00 %"
    return f"{error:+.2f} %".replace("-", MINUS)


def require(reports: Sequence[object]) -> None:
    """There is something to draw.

    Raises:
        PlanError: there is not.
    """
    if not reports:
        raise PlanError("there is no experiment to draw", hint="name a file with at least one")
