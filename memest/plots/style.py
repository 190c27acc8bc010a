"""Common look and words of charts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil
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

from memest import __version__
from memest.errors import PlanError
from memest.report import Report
from memest.units import GIB

WIDTH, HEIGHT = 40 / 3, 7.5
"""Inches of a 16:9 slide; sizes of type are the points of a slide program."""

VERDICTS = {"tight": "#8E44AD", "may": "#7A5C00"}
"""Colours of verdicts by `Verdict.word`; no kind of memory has them."""

PNG_DPI = 144
"""Dots per inch for 1920 x 1080 pixels."""

TITLE, LABEL, TICK, VALUE, SMALL = 26, 20, 18, 16, 14
"""Sizes of type in points; only rows of a long list go below `SMALL`."""

KINDS = ("params", "grads", "optimizer", "activations", "buckets", "gathered", "rest")
"""Kinds in the order of the stack, from the axis."""

OF_STRATEGIES = ("buckets", "gathered")
"""Kinds that only a run on several GPUs has; other legends omit them."""

_HATCH_INCHES = 0.19  # between strokes, along the axis
MINUS = "\N{MINUS SIGN}"  # as wide as a plus
_DASHES = (0, (3, 2))
_MAX_LETTERS = 250  # more never fit a line
Box = tuple[float, float, float, float]
"""Left, lower edge, width and height, in data."""

FONT = "DejaVu Sans"  # comes with matplotlib, so every machine draws the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """Colours of light or of dark slides."""

    background: str
    ink: str
    muted: str
    """Colour of secondary text: subtitles, grids, the limits' names."""

    grid: str
    limit: str
    """Colour of a GPU's line; the GPU's name is next to the line."""

    band: tuple[str, str]
    """Colours of the wide and the narrow error band."""

    kinds: Mapping[str, str]
    markers: tuple[str, str]
    """Markers of peak allocated and of peak reserved."""

    @property
    def fills(self) -> dict[str, str]:
        """Colours of verdicts that do not plainly fit, by `Verdict.word`."""
        return {"OOM": self.ink, **VERDICTS}

    def box(self, pad: float = 1.0) -> dict[str, Any]:
        """Return the box of a text that hides what is behind it; `pad` in points."""
        return {"facecolor": self.background, "edgecolor": "none", "pad": pad}


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
    """Run matplotlib with its defaults and these settings, ignoring the user's configuration."""
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
        """Inches of a unit of the axis x."""
        low, high = sorted(self.axes.get_xlim())
        return self.width / (high - low)

    @property
    def per_y(self) -> float:
        """Inches of a unit of the axis y."""
        low, high = sorted(self.axes.get_ylim())
        return self.height / (high - low)

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write a text with its middle at `y`, in inches from the lower left corner."""
        style = {"va": "center_baseline", **style}
        self.axes.text(
            x / self.width, y / self.height, text, transform=self.axes.transAxes, clip_on=False,
            **style,
        )  # fmt: skip

    def lead(self, *points: tuple[float, float], **style: Any) -> None:
        """Draw a line through points in inches from the lower left corner."""
        xs, ys = [x / self.width for x, _ in points], [y / self.height for _, y in points]
        self.axes.plot(xs, ys, transform=self.axes.transAxes, clip_on=False, zorder=2, **style)

    def write_in_row(self, x: float, row: float, text: str, **style: Any) -> None:
        """Write a text in the middle of a row, at inches from the left edge."""
        self.axes.text(
            x / self.width, row, text, transform=self.axes.get_yaxis_transform(), clip_on=False,
            va="center_baseline", **style,
        )  # fmt: skip

    def write_in_column(self, column: float, y: float, text: str, **style: Any) -> None:
        """Write a text at a place of the axis x, at inches from the lower edge."""
        self.axes.text(
            column, y / self.height, text, transform=self.axes.get_xaxis_transform(),
            clip_on=False, **style,
        )  # fmt: skip

    def draw_limit(self, limit: float, text: str, *, is_right: bool, is_over: bool = True) -> None:
        """Draw the line of a GPU at `limit`, with its name over or under it."""
        axes = self.axes
        axes.axhline(limit, color=self.theme.limit, linewidth=3.0, zorder=3, gid="limit")
        axes.annotate(
            text, (0.995 if is_right else 0.005, limit), (0, 5 if is_over else -5),
            xycoords=axes.get_yaxis_transform(), textcoords="offset points",
            ha="right" if is_right else "left", va="bottom" if is_over else "top", size=VALUE,
            weight="bold", zorder=5, gid="limit:name", bbox=self.theme.box(),
        )  # fmt: skip

    def draw_limit_apart(
        self, gpu: str, limit_bytes: int, inches: float, points: Iterable[tuple[float, float]]
    ) -> None:
        """Draw a GPU's line `inches` up, with its name where the fewest `points` are.

        `points` are those of the curves, in inches from the lower left corner.
        """
        text = limit_text(gpu, limit_bytes, self.width - 0.2)
        wide, found = text_width(text, VALUE, bold=True), list(points)

        def crossings(place: tuple[bool, bool]) -> int:
            is_right, is_over = place
            left = self.width - wide - 0.2 if is_right else -0.1
            low = inches if is_over else inches - 0.45
            return sum(left < x < left + wide + 0.3 and low < y < low + 0.45 for x, y in found)

        places = [(True, True), (True, False), (False, True), (False, False)]
        is_right, is_over = min(places, key=crossings)
        self.draw_limit(limit_bytes / GIB, text, is_right=is_right, is_over=is_over)

    def dashed_box(self, box: Box, gid: str) -> None:
        """Draw a dashed outline: memory that is not in use."""
        ink = self.theme.ink
        self.fill(box, fill=False, edgecolor=ink, linewidth=1.6, linestyle=_DASHES, gid=gid)

    def fill(self, box: Box, **style: Any) -> None:
        """Draw a rectangle."""
        self.axes.add_patch(Rectangle(box[:2], *box[2:], **style))

    def hatch(self, box: Box, color: str, *, zorder: float, gid: str) -> None:
        """Draw diagonal strokes over a box: out of memory.

        matplotlib's own hatches are SVG patterns, which slide programs fill with black.
        """
        x, y, wide, tall = box
        per_x, per_y = self.per_x, self.per_y
        width, height = wide * per_x, tall * per_y
        strokes = []
        for index in range(1, ceil((width + height) / _HATCH_INCHES)):
            foot = index * _HATCH_INCHES - height  # where the stroke would meet the box's edge y
            start, stop = max(foot, 0.0), min(foot + height, width)
            strokes.append([(x + at / per_x, y + (at - foot) / per_y) for at in (start, stop)])
        lines = LineCollection(strokes, colors=color, linewidths=2.0, zorder=zorder, gid=gid)
        self.axes.add_collection(lines, autolim=False)


@dataclass(frozen=True, slots=True)
class Canvas:
    """A slide to draw on; all places and sizes are in inches."""

    figure: Figure
    theme: Theme

    @property
    def height(self) -> float:
        """Height of the slide."""
        return self.figure.get_figheight()

    def panel(
        self,
        left: float,
        bottom: float,
        width: float,
        height: float,
        *,
        grid: Literal["", "x", "y"] = "",
    ) -> Panel:
        """Add axes; with `grid`, without a frame and with a light grid along that axis."""
        tall = self.height
        axes = self.figure.add_axes((left / WIDTH, bottom / tall, width / WIDTH, height / tall))
        if grid:
            axes.set_axisbelow(True)
            axes.grid(axis=grid, color=self.theme.grid, linewidth=1.0)
            for side in ("top", "right", "left" if grid == "y" else "bottom"):
                axes.spines[side].set_visible(False)
            axes.tick_params(length=0)
        return Panel(axes, self.theme, width, height)

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        """Write a text, its upper edge `top` inches under the slide's."""
        self.figure.text(left / WIDTH, 1 - top / self.height, text, va="top", **style)

    def write_title(self, title: str, subtitle: str) -> None:
        """Write title and subtitle; a long subtitle gets smaller type, then is cut."""
        room = WIDTH - 0.8
        text = shortened(title, TITLE, room, bold=True)
        self.write(0.4, 0.28, text, size=TITLE, weight="bold", gid="title")
        size = next((s for s in (TICK, VALUE, SMALL) if text_width(subtitle, s) <= room), SMALL)
        text, color = shortened(subtitle, size, room), self.theme.muted
        self.write(0.4, 0.80, text, size=size, color=color, gid="subtitle")

    def write_legend(self, handles: Sequence[Artist], *, top: float) -> None:
        """Write one row of keys across the slide, its upper edge `top` inches under the slide's."""
        room = WIDTH - 0.7
        size = next((s for s in (VALUE, SMALL) if keys_width(handles, s) <= room), SMALL)
        self.figure.legend(
            handles=list(handles),
            loc="upper left",
            bbox_to_anchor=(0.3 / WIDTH, 1 - top / self.height),
            bbox_transform=self.figure.transFigure,
            ncols=len(handles),
            fontsize=size,
            frameon=False,
            labelcolor=self.theme.ink,
            handlelength=1.3,
            handleheight=1.0,
            handletextpad=0.5,
            columnspacing=1.2,
            borderaxespad=0.0,
        )


@contextmanager
def slide(*, dark: bool, height: float = HEIGHT) -> Iterator[Canvas]:
    """Yield an empty slide to draw on."""
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
        yield Canvas(figure, theme)


def text_on(color: str) -> str:
    """Return black or white, the one with more contrast on `color` (WCAG 2 relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#FFFFFF"


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the inches of one line of `text`."""
    if not text.strip():
        return 0.0
    font = FontProperties(family=FONT, weight="bold" if bold else "normal")
    text = text.replace("$", "S")  # matplotlib would measure a formula
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) / 72


def shortened(text: str, size: float, inches: float, *, bold: bool = False) -> str:
    """Return `text` with its middle replaced by an ellipsis where it is wider than `inches`."""

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
    """Return `name` and `tag`, the name cut where both together are wider than `inches`."""
    return shortened(name, size, inches - text_width(tag, size)) + tag


def widest_gap(start: float, stop: float, lines: Sequence[float]) -> tuple[float, float]:
    """Return the longest part of a bar that no line cuts."""
    edges = [start, *sorted(x for x in lines if start < x < stop), stop]
    return max(pairwise(edges), key=lambda gap: gap[1] - gap[0])


def gpu_label(gpu: str) -> str:
    """Return the name of a GPU for slides.

    >>> gpu_label("a100-80gb"), gpu_label("12.00GiB"), gpu_label("custom")
    ('A100 80GB', '12.00 GiB', 'custom')
    """
    if not any(c.isdigit() for c in gpu):
        return gpu
    return gpu.replace("-", " ").upper().replace("GIB", " GiB")


def retitle(figure: Figure, title: str) -> Figure:
    """Set another title on `figure`; an empty one changes nothing."""
    for text in figure.texts:
        if title and text.get_gid() == "title":
            text.set_text(shortened(title, TITLE, WIDTH - 0.8, bold=True))
    return figure


def keys_width(handles: Sequence[Artist], size: float) -> float:
    """Return inches of a row of keys: each has a swatch, its label and the space to the next."""
    return sum(text_width(str(h.get_label()), size) + 3.0 * size / 72 for h in handles)


def key(color: str, label: str, theme: Theme) -> Patch:
    """Return a legend's key for a filled colour."""
    return Patch(facecolor=color, edgecolor=theme.background, label=label)


def dashed_key(theme: Theme, label: str) -> Patch:
    """Return the key of a dashed outline."""
    return Patch(
        facecolor="none", edgecolor=theme.ink, linewidth=1.6, linestyle=_DASHES, label=label
    )


def limit_text(gpu: str, limit_bytes: int, inches: float) -> str:
    """Return the name of a GPU's line, shortened to `inches`."""
    text = f"{gpu_label(gpu)}: {limit_bytes / GIB:.1f} GiB usable"
    return shortened(text, VALUE, inches, bold=True)


def row_size(num_rows: int, inches: float) -> float:
    """Return the size of type for `num_rows` lines in `inches`."""
    return min(float(VALUE), 0.86 * 72 * inches / num_rows)


def percent_off(predicted_bytes: int, measured_bytes: int) -> float:
    """Return the signed error of a prediction in per cent of the measured figure."""
    return 100 * (predicted_bytes - measured_bytes) / measured_bytes


def signed_percent(predicted_bytes: int, measured_bytes: int) -> str:
    """Return `percent_off` as text; an error that rounds to nothing has no sign.

    >>> signed_percent(201, 200), signed_percent(10**6 + 1, 10**6)
    ('+0.50 %', '±0.00 %')
    """
    error = percent_off(predicted_bytes, measured_bytes)
    if abs(error) < 0.005:
        return "±0.00 %"
    return f"{error:+.2f} %".replace("-", MINUS)


def require(reports: Sequence[object]) -> None:
    """Check that there is something to draw.

    Raises:
        PlanError: there is not.
    """
    if not reports:
        raise PlanError("there is no experiment to draw", hint="name a file with at least one")


DOT = " \N{MIDDLE DOT} "


def dotted(*parts: str) -> str:
    """Return the parts that are not empty, with dots between them."""
    return DOT.join(filter(None, parts))


_STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP", "fsdp2": "FSDP2"} | {
    f"deepspeed_stage_{stage}": f"ZeRO-{stage}" for stage in (1, 2, 3)
}


def label_of(strategy: str) -> str:
    """Return the name of a strategy for slides.

    >>> label_of("deepspeed_stage_3_offload"), label_of("fsdp2")
    ('ZeRO-3 offload', 'FSDP2')
    """
    base = strategy.removesuffix("_offload").removesuffix("_find_unused_parameters_true")
    tail = {"_offload": " offload", "": ""}.get(strategy.removeprefix(base), ", unused found")
    return _STRATEGIES.get(base, base) + tail


def setting_words(plan: Mapping[str, Any]) -> list[str]:
    """Return the settings of a plan within its model: precision, batch, optimizer, technique.

    >>> setting_words({"precision": "bf16-true", "batch_size": 16, "accumulate_grad_batches": 4,
    ...                "optim": "adamw", "use_lora": True, "lora_r": 8})
    ['bf16-true', 'batch 16 x 4', 'adamw', 'LoRA 8']
    """
    words = []
    if plan.get("precision"):
        words.append(str(plan["precision"]))
    if plan.get("batch_size"):
        count = plan.get("accumulate_grad_batches") or 1
        words.append(f"batch {plan['batch_size']}{f' x {count}' if count > 1 else ''}")
    if plan.get("optim"):
        words.append(str(plan["optim"]))
    return words + technique_words(plan)


def technique_words(plan: Mapping[str, Any]) -> list[str]:
    """Return adapters, quantisation, checkpointing, strategy and attention if not default."""
    words = []
    adapter = "QLoRA" if plan.get("use_qlora") else "LoRA" if plan.get("use_lora") else ""
    if adapter:
        words.append(f"{adapter} {plan.get('lora_r', '')}".strip())
    if plan.get("use_dora"):
        words.append("DoRA")
    if plan.get("act_ckpt"):
        words.append("checkpointing")
    if plan.get("freeze"):
        words.append("frozen parts")
    if plan.get("attn_implementation") not in (None, "", "sdpa"):
        words.append(str(plan["attn_implementation"]))
    strategy, devices = plan.get("strategy") or "auto", plan.get("devices") or 1
    if strategy != "auto" or devices > 1:
        name = label_of("ddp" if strategy == "auto" else strategy)
        words.append(f"{name} on {devices} GPU{'s' if devices > 1 else ''}")
    if plan.get("memory_limit"):
        words.append(f"capped at {plan['memory_limit'] / 2**30:.4g} GiB")
    return words


def token_words(reports: Sequence[Report]) -> str:
    """Return the tokens per sample of all reports, and the pixels where they are all one size."""
    lengths = sorted({int(n) for r in reports if (n := r.plan.get("seq_len"))})
    if not lengths:
        return ""
    span = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return f"{span} tokens"


def gpu_words(reports: Sequence[Report]) -> str:
    """Return the GPUs of the reports."""
    return ", ".join(dict.fromkeys(gpu_label(report.gpu) for report in reports))


def version_words(reports: Sequence[Report] = ()) -> str:
    """Return the memest version that made the reports."""
    versions = dict.fromkeys(str(r.versions["memest"]) for r in reports if r.versions.get("memest"))
    return f"memest {', '.join(versions) or __version__}"


def plan_line(reports: Sequence[Report], *others: str) -> str:
    """Return plan, GPU and tokens of reports of one plan, the other words, and the version."""
    plan = reports[0].plan
    model = str(plan.get("model_name", ""))
    said = [] if model and model in reports[0].name else [model.rsplit("/", 1)[-1]]
    return dotted(
        *said, *setting_words(plan), token_words(reports), gpu_words(reports), *others,
        version_words(reports),
    )  # fmt: skip
