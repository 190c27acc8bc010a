"""Slides with one chart of stacked bars, drawn by matplotlib: PDF of a lecture, scaling, ranks."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memest.plots import style
from memest.plots.style import Panel, Theme, shortened, slide, text_on, text_width
from memest.plots.timeline import TEMPORARIES
from memest.report.lecture import Chart, Series, Slide

_CACHED = {True: "#6B7378", False: "#C4C4C4"}
_AXIS, _NAMES, _AT_LEFT = 1.2, 1.2, 4.6  # inches: numbers of an axis, names below, at the left


def colors_of(theme: Theme) -> Mapping[str, str]:
    """Return {name of a part: colour in `theme`} for the parts of stacked bars. Names are the kinds
    of memory, such as `grads`, and others, such as `cached`. `Series.color` has such a name."""
    is_dark = theme.ink > theme.background
    more, less = theme.kinds["grads"], theme.kinds["gathered"]
    return {
        **theme.kinds, "temporaries": TEMPORARIES, "cached": _CACHED[is_dark],
        "between": theme.background, "need": theme.muted, "more": more, "less": less,
    }  # fmt: skip


def pdf_bytes(slides: Sequence[Slide], *, dark: bool) -> bytes:
    """Return the slides as a PDF file, whose pages have the speaker's notes as annotations."""
    file = io.BytesIO()
    dates = {"CreationDate": None, "Creator": None, "Producer": None}
    with style.plain_matplotlib({"pdf.fonttype": 42}), PdfPages(file, metadata=dates) as pages:
        for page in slides:
            figure = draw_slide(page, dark=dark)
            pages.attach_note("\n".join(page.notes), positionRect=[0, 0, 20, 20])
            pages.savefig(figure, facecolor=figure.get_facecolor())
    return file.getvalue()


def draw_slide(page: Slide, *, dark: bool, remark: str = "") -> Figure:
    """Draw the slide `page`: its title, its chart, and the text `remark` over the chart."""
    chart = page.chart
    left, bottom = (_AXIS, _NAMES + 0.1) if chart.is_upright else (_AT_LEFT, 1.1)
    width, height = style.WIDTH - left - 0.5, style.HEIGHT - 2.2 - bottom
    with slide(dark=dark) as canvas:
        panel = canvas.panel(left, bottom, width, height, grid="y" if chart.is_upright else "x")
        _draw_parts(panel, chart)
        _draw_limit(panel, chart)
        if chart.has_legend:
            theme, colors = canvas.theme, colors_of(canvas.theme)
            keys = [
                theme.dashed_key(s.name)
                if s.color == "between"
                else theme.key(colors[s.color], s.name)
                for s in chart.series
            ]
            canvas.write_legend(keys, top=1.25)
        canvas.write_title(page.title, page.subtitle)
        if remark:
            text = shortened(remark, style.VALUE, style.WIDTH - 0.8, bold=True)
            canvas.write(0.4, 1.72, text, size=style.VALUE, weight="bold", gid="remark")
    return canvas.figure


def _draw_parts(panel: Panel, chart: Chart) -> None:
    axes, theme = panel.axes, panel.theme
    positions, colors = range(len(chart.categories)), colors_of(theme)
    floors = [0.0] * len(chart.categories)
    bar = axes.bar if chart.is_upright else axes.barh
    for series in chart.series:
        if series.color:
            look: dict[str, Any] = {"color": colors[series.color], "linewidth": 1.0}
            look["edgecolor"] = theme.background
            if series.color == "between":
                look |= {"edgecolor": theme.ink, "linewidth": 1.6, "linestyle": style.DASHES}
            look["bottom" if chart.is_upright else "left"] = floors
            bars = bar(positions, series.values, 0.74, **look)
            for value, patch in zip(series.values, bars, strict=True):
                patch.set_visible(value > 0)  # its edge would hide that of the part below
            _write_values(panel, chart, series, floors)
        floors = [a + b for a, b in zip(floors, series.values, strict=True)]
    names = [name if chart.is_upright else name.replace("\n", ", ") for name in chart.categories]
    if chart.is_upright:
        names, size = style.fitted(names, 0.9 * panel.width / len(names), _NAMES - 0.1)
        axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, chart.top))
        axes.set_xticks(positions, names, size=size)
    else:
        names, size = style.fitted(names, _AT_LEFT - 0.3, 0.9 * panel.height / len(names))
        axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, chart.top))
        axes.set_yticks(positions, names, size=size)
    axes.tick_params(length=0)
    value_axis = axes.yaxis if chart.is_upright else axes.xaxis
    value_axis.set_major_locator(MaxNLocator(6))
    value_axis.set_major_formatter("{x:g} GiB")


def _write_values(panel: Panel, chart: Chart, series: Series, floors: Sequence[float]) -> None:
    theme, kind = panel.theme, series.color
    color = theme.ink if kind == "between" else text_on(colors_of(theme)[kind])
    size = style.SMALL if len(floors) < 8 else 10
    for index, (value, floor) in enumerate(zip(series.values, floors, strict=True)):
        text = f"{value:.1f}"
        is_wide = not chart.is_upright or text_width(text, size) < 0.7 * panel.per_x
        if value > 0.05 * chart.top and is_wide:
            x, y = (index, floor + value / 2) if chart.is_upright else (floor + value / 2, index)
            panel.axes.text(x, y, text, ha="center", va="center", size=size, color=color)


def _draw_limit(panel: Panel, chart: Chart) -> None:
    if not chart.limit:
        return
    axes, theme = panel.axes, panel.theme
    if chart.is_upright:
        axes.axhline(chart.limit, color=theme.ink, linewidth=3)
        anchor, offset = (axes.get_xlim()[1], chart.limit), (0, 5)
    else:
        axes.axvline(chart.limit, color=theme.ink, linewidth=3)
        anchor, offset = (chart.limit, -0.6), (0, 4)
    axes.annotate(
        chart.limit_name, anchor, offset, textcoords="offset points", annotation_clip=False,
        ha="right", va="bottom", size=style.VALUE, weight="bold", color=theme.ink,
    )  # fmt: skip
