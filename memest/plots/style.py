"""Common look of charts, texts on slides, and the writing of figures.

A file of a figure has the same bytes for the same figure, and exists whole or not at all.
"""

import io
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, Rectangle
from matplotlib.textpath import TextPath

from memest.errors import PlanError, shown
from memest.plan.reading import read_table
from memest.plots.words import gpu_label
from memest.units import GIB
from memest.writing import write_whole, writing

FONT = "DejaVu Sans"  # comes with matplotlib, so every machine draws the same
_LINE = 1.2  # matplotlib's line spacing, in sizes of type
_MAX_LETTERS = 250  # more never fit a line
TITLE, LABEL, TICK, VALUE, SMALL = 26, 20, 18, 16, 14  # points; a long list goes below `SMALL`
WIDTH, HEIGHT = 40 / 3, 7.5  # inches of a 16:9 slide; font sizes are in points of a slide program
VERDICTS = {"tight": "#8E44AD", "may": "#7A5C00"}
"""Colours of verdicts by `Verdict.word`; no kind of memory has these colours."""

PNG_DPI = 144  # dots per inch for 1920 x 1080 pixels
KINDS = ("params", "grads", "optimizer", "activations", "buckets", "gathered", "rest")
"""Kinds in the order of the stack, from the axis."""

OF_STRATEGIES = ("buckets", "gathered")  # only runs on several GPUs have these
_HATCH_INCHES = 0.19  # distance between strokes along the axis, inches
DASHES = (0, (3, 2))
Box = tuple[float, float, float, float]  # left, lower edge, width and height, in data
FORMATS = ("png", "svg", "pdf")
_OTHERS = frozenset("bmp eps gif jpeg jpg pgf ps tif tiff webp".split())  # formats a path may name
_METADATA: dict[str, dict[str, Any]] = {  # None omits what matplotlib would write: dates, versions
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_SETTINGS = {
    "svg.hashsalt": "memest",  # ids derive from the drawing, not from a random number
    "svg.fonttype": "none",  # keep text as text, which can be searched, copied and edited
    "pdf.fonttype": 42,  # TrueType, so that the text can be searched and edited
}


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of one line of `text` in inches; `size` is in points."""
    if not text.strip():
        return 0.0
    font = FontProperties(family=FONT, weight="bold" if bold else "normal")
    text = text.replace("$", "S")  # matplotlib would measure a formula
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) / 72


def shortened(text: str, size: float, inches: float, *, bold: bool = False) -> str:
    """Return `text`, with an ellipsis for its middle if wider than `inches` at `size` points."""

    def cut(num_kept: int) -> str:
        tail = num_kept // 2
        return f"{text[: num_kept - tail]}…{text[len(text) - tail :]}"

    text = " ".join(text.split())
    if len(text) <= _MAX_LETTERS and text_width(text, size, bold=bold) <= inches:
        return text
    lengths = range(2, min(len(text), _MAX_LETTERS))
    num_fit = bisect_right(lengths, inches, key=lambda n: text_width(cut(n), size, bold=bold))
    return cut(lengths[num_fit - 1]) if num_fit else "…"


def wrapped(text: str, size: float, inches: float) -> str:
    """Return `text` in lines of at most `inches` at `size` points; its own line breaks stay."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        start = len(lines)
        for word in paragraph.split():
            if len(lines) > start and text_width(f"{lines[-1]} {word}", size) <= inches:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
    return "\n".join(lines)


def fitted(texts: Sequence[str], inches: float, tall: float) -> tuple[list[str], float]:
    """Return (`texts` with line breaks, font size in points). The size is the largest at which each
    text fits `inches` by `tall` inches, or 7 if none does."""
    for size in (VALUE, SMALL, 12, 11, 10, 9, 8, 7):
        paragraphs = [wrapped(text, size, inches) for text in texts]
        num_lines = max((text.count("\n") + 1 for text in paragraphs), default=0)
        widths = [text_width(line, size) for text in paragraphs for line in text.split("\n")]
        if num_lines * size * _LINE / 72 <= tall and max(widths, default=0.0) <= inches:
            break
    return paragraphs, size


def first_size(text: str, sizes: Sequence[float], inches: float, *, bold: bool = False) -> float:
    """Return the first of font `sizes` at which `text` is at most `inches` wide, or the last."""
    return next((s for s in sizes if text_width(text, s, bold=bold) <= inches), sizes[-1])


def limit_text(gpu: str, limit_bytes: int, inches: float) -> str:
    """Return the label of a GPU's limit line: name and GiB usable, at most `inches` wide."""
    text = f"{gpu_label(gpu)}: {limit_bytes / GIB:.1f} GiB usable"
    return shortened(text, VALUE, inches, bold=True)


def row_size(num_rows: int, inches: float) -> float:
    """Return the font size in points at which `num_rows` lines of text fill a height of `inches`.
    The size is at most `VALUE`, 16 points."""
    return min(float(VALUE), 0.86 * 72 * inches / num_rows)


def text_on(color: str) -> str:
    """Return black or white, the one with more contrast on `color` (WCAG 2 relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#FFFFFF"


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """Colours of light or of dark slides."""

    background: str
    ink: str  # colour of text and of the GPUs' limit lines
    muted: str  # colour of secondary text: subtitles, grids, names of limits
    grid: str
    band: tuple[str, str]  # colours of the wide and the narrow error band
    kinds: Mapping[str, str]  # colours by kind of memory
    markers: tuple[str, str]  # markers of peak allocated and of peak reserved

    @property
    def fills(self) -> dict[str, str]:
        """Colours of verdicts other than `fits`, by `Verdict.word`."""
        return {"OOM": self.ink, **VERDICTS}

    def box(self, pad: float = 1.0) -> dict[str, Any]:
        """Return matplotlib's `bbox` that hides what is behind a text; `pad` in points."""
        return {"facecolor": self.background, "edgecolor": "none", "pad": pad}

    def key(self, color: str, label: str) -> Patch:
        """Return the entry of a legend with a patch of `color` and the text `label`."""
        return Patch(facecolor=color, edgecolor=self.background, label=label)

    def dashed_key(self, label: str) -> Patch:
        """Return the entry of a legend with a dashed outline and the text `label`."""
        return Patch(
            facecolor="none", edgecolor=self.ink, linewidth=1.6, linestyle=DASHES, label=label
        )


LIGHT, DARK = (Theme(**colors) for colors in read_table(__file__, "themes.json").values())


@contextmanager
def plain_matplotlib(settings: Mapping[Any, Any]) -> Iterator[None]:
    """Replace matplotlib's settings, in a `with` block, by its defaults and `settings`."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes on a slide, with their size in inches."""

    axes: Axes
    theme: Theme
    width: float
    height: float

    @property
    def per_x(self) -> float:
        """Inches per unit of the x axis."""
        low, high = sorted(self.axes.get_xlim())
        return self.width / (high - low)

    @property
    def per_y(self) -> float:
        """Inches per unit of the y axis."""
        low, high = sorted(self.axes.get_ylim())
        return self.height / (high - low)

    def inches(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Convert `points`, (x, y) in data coordinates, to inches from the axes' lower left."""
        to_shares = self.axes.transData + self.axes.transAxes.inverted()
        return [(x * self.width, y * self.height) for x, y in to_shares.transform(list(points))]

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write `text` at (`x`, `y`) inches from the axes' lower left, in matplotlib's `style`."""
        style = {"va": "center_baseline", **style}
        self.axes.text(
            x / self.width, y / self.height, text, transform=self.axes.transAxes, clip_on=False,
            **style,
        )  # fmt: skip

    def lead(self, *points: tuple[float, float], **style: Any) -> None:
        """Draw a line through `points`, (x, y) in inches from the axes' lower left corner."""
        xs, ys = [x / self.width for x, _ in points], [y / self.height for _, y in points]
        self.axes.plot(xs, ys, transform=self.axes.transAxes, clip_on=False, zorder=2, **style)

    def write_in_row(self, x: float, row: float, text: str, **style: Any) -> None:
        """Write `text` at `x` inches from the axes' left edge, centred at `row` of the y axis."""
        self.axes.text(
            x / self.width, row, text, transform=self.axes.get_yaxis_transform(), clip_on=False,
            va="center_baseline", **style,
        )  # fmt: skip

    def write_in_column(self, column: float, y: float, text: str, **style: Any) -> None:
        """Write `text` at `column` of the x axis, `y` inches from the axes' lower edge."""
        self.axes.text(
            column, y / self.height, text, transform=self.axes.get_xaxis_transform(),
            clip_on=False, **style,
        )  # fmt: skip

    def write_number(self, x: float, y: float, text: str, *, is_inside: bool = False) -> None:
        """Write a bar's number over its top, or under the top if `is_inside`. The middle of the top
        is (`x`, `y`) in data coordinates."""
        self.axes.annotate(
            text, (x, y), (0, -4 if is_inside else 3), textcoords="offset points", ha="center",
            va="top" if is_inside else "bottom", size=VALUE, weight="bold", zorder=5,
            bbox=self.theme.box(),
        )  # fmt: skip

    def draw_limit(self, limit: float, text: str, *, is_right: bool, is_over: bool = True) -> None:
        """Draw a line at `limit` on the y axis. `text` is at its right end if `is_right`, else at
        its left end, and over the line if `is_over`, else under it."""
        axes = self.axes
        axes.axhline(limit, color=self.theme.ink, linewidth=3.0, zorder=3, gid="limit")
        axes.annotate(
            text, (0.995 if is_right else 0.005, limit), (0, 5 if is_over else -5),
            xycoords=axes.get_yaxis_transform(), textcoords="offset points",
            ha="right" if is_right else "left", va="bottom" if is_over else "top", size=VALUE,
            weight="bold", zorder=5, gid="limit:name", bbox=self.theme.box(),
        )  # fmt: skip

    def draw_limit_apart(
        self, gpu: str, limit_bytes: int, points: Iterable[tuple[float, float]]
    ) -> None:
        """Draw a GPU's limit line, with its name where the fewest `points` are: (x, y) on the
        curves, in inches from the axes' lower left corner."""
        text = limit_text(gpu, limit_bytes, self.width - 0.2)
        width, positions = text_width(text, VALUE, bold=True), list(points)
        ((_, limit_y),) = self.inches([(1, limit_bytes / GIB)])

        def crossings(corner: tuple[bool, bool]) -> int:
            is_right, is_over = corner
            left = self.width - width - 0.2 if is_right else -0.1
            low = limit_y if is_over else limit_y - 0.45
            return sum(left < x < left + width + 0.3 and low < y < low + 0.45 for x, y in positions)

        corners = [(True, True), (True, False), (False, True), (False, False)]
        is_right, is_over = min(corners, key=crossings)
        self.draw_limit(limit_bytes / GIB, text, is_right=is_right, is_over=is_over)

    def fill(self, box: Box, **style: Any) -> None:
        """Draw `box`, (left, bottom, width, height) in data coordinates; `style`: matplotlib's."""
        self.axes.add_patch(Rectangle(box[:2], *box[2:], **style))

    def hatch(self, box: Box, color: str, *, zorder: float, gid: str) -> None:
        """Draw diagonal strokes over `box`, the sign of out of memory; `gid` is the id in an SVG.

        matplotlib's own hatches are SVG patterns, which slide programs fill with black.
        """
        x, y, wide, tall = box
        per_x, per_y = self.per_x, self.per_y
        width, height = wide * per_x, tall * per_y
        strokes = []
        for index in range(1, ceil((width + height) / _HATCH_INCHES)):
            foot = index * _HATCH_INCHES - height  # y at which the stroke would meet the box's edge
            start, stop = max(foot, 0.0), min(foot + height, width)
            strokes.append([(x + end / per_x, y + (end - foot) / per_y) for end in (start, stop)])
        lines = LineCollection(strokes, colors=color, linewidths=2.0, zorder=zorder, gid=gid)
        self.axes.add_collection(lines, autolim=False)


@dataclass(frozen=True, slots=True)
class Canvas:
    """A slide to draw on; all positions and sizes are in inches."""

    figure: Figure
    theme: Theme

    @property
    def height(self) -> float:
        """Height of the slide in inches."""
        return self.figure.get_figheight()

    def panel(
        self, left: float, bottom: float, width: float, height: float, *,
        grid: Literal["", "x", "y"] = "",
    ) -> Panel:  # fmt: skip
        """Add axes with lower left (`left`, `bottom`); `grid`: the axis with grid lines, if any."""
        total = self.height
        axes = self.figure.add_axes((left / WIDTH, bottom / total, width / WIDTH, height / total))
        if grid:
            axes.set_axisbelow(True)
            axes.grid(axis=grid, color=self.theme.grid, linewidth=1.0)
            for side in ("top", "right", "left" if grid == "y" else "bottom"):
                axes.spines[side].set_visible(False)
            axes.tick_params(length=0)
        return Panel(axes, self.theme, width, height)

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        """Write `text` at (`left`, `top`), in inches from the slide's left and upper edge."""
        self.figure.text(left / WIDTH, 1 - top / self.height, text, va="top", **style)

    def write_title(self, title: str, subtitle: str) -> None:
        """Write title and subtitle; a long one gets a smaller font, then is cut."""
        room = WIDTH - 0.8
        self.write(0.4, 0.28, weight="bold", gid="title", **_title(title))
        size = first_size(subtitle, (TICK, VALUE, SMALL), room)
        text, color = shortened(subtitle, size, room), self.theme.muted
        self.write(0.4, 0.80, text, size=size, color=color, gid="subtitle")

    def write_legend(
        self, handles: Sequence[Artist], *, top: float, left: float = 0.3, **style: Any
    ) -> None:
        """Write one row of legend entries; its upper edge is `top` inches below the slide's."""
        room = WIDTH - 0.7
        # each entry has a swatch, its label and the space to the next entry
        labels = [str(handle.get_label()) for handle in handles]
        width = sum(text_width(label, VALUE) + 3.0 * VALUE / 72 for label in labels)
        size = VALUE if width <= room else SMALL
        style = {"handlelength": 1.3, "handleheight": 1.0, "columnspacing": 1.2, **style}
        self.figure.legend(
            handles=list(handles), loc="upper left",
            bbox_to_anchor=(left / WIDTH, 1 - top / self.height),
            bbox_transform=self.figure.transFigure, ncols=len(handles), fontsize=size,
            frameon=False, labelcolor=self.theme.ink, handletextpad=0.5, borderaxespad=0.0, **style,
        )  # fmt: skip


@contextmanager
def slide(*, dark: bool, height: float = HEIGHT) -> Iterator[Canvas]:
    """Yield an empty slide to draw on, `height` inches high, in dark or light colours."""
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
        "text.parse_math": False,  # a `$` in an experiment's name is not a formula
    }
    with plain_matplotlib(settings):
        figure = Figure(figsize=(WIDTH, height), facecolor=theme.background, dpi=PNG_DPI)
        FigureCanvasAgg(figure)
        yield Canvas(figure, theme)


def widest_gap(start: float, stop: float, lines: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the longest part of `start` to `stop` that contains none of `lines`."""
    edges = [start, *sorted(x for x in lines if start < x < stop), stop]
    return max(pairwise(edges), key=lambda gap: gap[1] - gap[0])


def _title(text: str) -> dict[str, Any]:
    """Return matplotlib's arguments for a title that fits the slide's width: `text` and `size`."""
    room = WIDTH - 0.8
    size = first_size(text, (TITLE, 23, LABEL), room, bold=True)
    return {"text": shortened(text, size, room, bold=True), "size": size}


def retitle(figure: Figure, title: str) -> Figure:
    """Replace the title of `figure` by `title` unless `title` is empty; return `figure`."""
    for text in figure.texts:
        if title and text.get_gid() == "title":
            text.set(**_title(title))
    return figure


def require(reports: Sequence[object]) -> None:
    """Raise a `PlanError` if `reports` is empty: there is nothing to draw."""
    if not reports:
        raise PlanError("there is no experiment to draw", hint="name a file with at least one")


def save(
    figure: Figure, path: str | os.PathLike[str], formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write `figure` in each of `formats` and return the paths; if one fails, none is written.

    A suffix of `path` that is a format replaces `formats`.

    Raises:
        PlanError: a format does not exist, or the folder cannot be written.
    """
    stem, names = _stem_and_formats(Path(path), formats)
    targets = [stem.with_name(f"{stem.name}.{name}") for name in names]
    with writing(targets[0], "name a folder that you may write to"):
        stem.parent.mkdir(parents=True, exist_ok=True)
        contents = [_render(figure, name) for name in names]
        for target, content in zip(targets, contents, strict=True):
            write_whole(target, content)
    return targets


def parse_formats(text: str) -> list[str]:
    """Return the formats of `text`, such as `png,svg`, each once; `PlanError` if one is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return _stem_and_formats(Path("chart"), names)[1]


def svg_text(figure: Figure) -> str:
    """Return `figure` as SVG text, to be put into an HTML page."""
    text = _render(figure, "svg").decode()
    return text[text.index("<svg") :]


def _render(figure: Figure, name: str) -> bytes:
    """Return `figure` as a file of the format `name`; an SVG has fallbacks for the font."""
    buffer, color = io.BytesIO(), figure.get_facecolor()
    with plain_matplotlib(_SETTINGS):
        figure.savefig(buffer, format=name, dpi=PNG_DPI, metadata=_METADATA[name], facecolor=color)
    content = buffer.getvalue()
    if name == "svg":
        content = content.replace(f"'{FONT}'".encode(), f"'{FONT}', Verdana, sans-serif".encode())
    return content


class Picture:
    """A figure that a notebook displays as SVG, without setup of matplotlib."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def _repr_svg_(self) -> str:
        return svg_text(self.figure)


def _stem_and_formats(path: Path, formats: Sequence[str]) -> tuple[Path, list[str]]:
    if path.name in ("", ".."):
        raise PlanError(f"`{path}` names no file", hint="write it as `charts/phases`")
    suffix = path.suffix.removeprefix(".").lower()
    if suffix in FORMATS:
        return path.with_suffix(""), [suffix]
    names = list(dict.fromkeys(name.lower().removeprefix(".") for name in formats))
    if suffix in _OTHERS:
        names.insert(0, suffix)
    unknown = next((name for name in names if name not in FORMATS), None)
    if unknown is not None or not names:
        problem = f"format {shown(unknown)} does not exist" if unknown is not None else "no format"
        raise PlanError(problem, hint=f"choose from {', '.join(f'`{f}`' for f in FORMATS)}")
    return path, names
