"""Slides as PowerPoint files, whose charts are native and editable."""

import io
from collections.abc import Sequence
from typing import Any

from pptx import Presentation
from pptx.chart.data import CategoryChartData
from pptx.dml.color import RGBColor
from pptx.enum.chart import XL_CHART_TYPE, XL_LEGEND_POSITION, XL_TICK_LABEL_POSITION
from pptx.enum.shapes import MSO_CONNECTOR
from pptx.enum.text import PP_ALIGN
from pptx.oxml import parse_xml
from pptx.util import Inches, Pt

from memest.plots.slides import colors_of
from memest.plots.style import DARK, HEIGHT, LIGHT, WIDTH, Theme, text_on
from memest.report.lecture import Chart, Slide

_TITLE_ONLY = 5  # index of this layout in the default template
_BOX = (0.4, 1.55, WIDTH - 0.8, HEIGHT - 1.75)  # left, top, width and height of a chart, inches
_MAX_TITLE = 44  # characters of a title that fit a line in the full size
_LAYOUT = (
    '<c:layout xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/chart"><c:manualLayout>'
    '<c:layoutTarget val="inner"/><c:xMode val="edge"/><c:yMode val="edge"/><c:x val="{}"/>'
    '<c:y val="{}"/><c:w val="{}"/><c:h val="{}"/></c:manualLayout></c:layout>'
)


def pptx_bytes(slides: Sequence[Slide], *, dark: bool) -> bytes:
    """Return `slides` as the bytes of a PPTX file; `dark` selects the dark colours."""
    presentation = Presentation()
    presentation.slide_width, presentation.slide_height = Inches(WIDTH), Inches(HEIGHT)
    theme = DARK if dark else LIGHT
    for slide in slides:
        _add_slide(presentation, slide, theme)
    file = io.BytesIO()
    presentation.save(file)
    return file.getvalue()


def _add_slide(presentation: Any, slide: Slide, theme: Theme) -> None:
    page = presentation.slides.add_slide(presentation.slide_layouts[_TITLE_ONLY])
    page.background.fill.solid()
    page.background.fill.fore_color.rgb = _rgb(theme.background)
    title = page.shapes.title
    title.left, title.top, title.width, title.height = map(Inches, (0.4, 0.2, WIDTH - 0.8, 0.8))
    size = 30 if len(slide.title) <= _MAX_TITLE else 30 * _MAX_TITLE / len(slide.title)
    _write_text(title.text_frame, slide.title, size, theme.ink, bold=True)
    box = page.shapes.add_textbox(*map(Inches, (0.4, 0.95, WIDTH - 0.8, 0.5)))
    _write_text(box.text_frame, slide.subtitle, 18, theme.muted)
    _add_chart(page, slide.chart, theme)
    page.notes_slide.notes_text_frame.text = "\n".join(slide.notes)


def _write_text(frame: Any, text: str, size: float, color: str, *, bold: bool = False) -> None:
    frame.word_wrap = True
    frame.text = text
    paragraph = frame.paragraphs[0]
    paragraph.alignment = PP_ALIGN.LEFT
    paragraph.font.size, paragraph.font.bold = Pt(size), bold
    paragraph.font.color.rgb = _rgb(color)


def _add_chart(page: Any, chart: Chart, theme: Theme) -> None:
    order = slice(None) if chart.is_upright else slice(None, None, -1)  # bars start at the bottom
    data = CategoryChartData(number_format="0.00")
    separator = "\n" if chart.is_upright else ", "
    data.categories = [name.replace("\n", separator) for name in chart.categories[order]]
    for series in chart.series:
        data.add_series(series.name or "floor", series.values[order])
    kind = XL_CHART_TYPE.COLUMN_STACKED if chart.is_upright else XL_CHART_TYPE.BAR_STACKED
    native = page.shapes.add_chart(kind, *map(Inches, _BOX), data).chart
    is_long = len(chart.categories) > 6
    native.font.size, native.font.color.rgb = Pt(13 if is_long else 16), _rgb(theme.ink)
    _format_axes(native, chart, theme)
    _colour_bars(native, chart, theme)
    native.has_legend = chart.has_legend
    if chart.has_legend:
        native.legend.position = XL_LEGEND_POSITION.BOTTOM
        native.legend.include_in_layout = False
    # left, top, width and height of the axes as shares of the chart
    inner = (0.08, 0.04, 0.91, 0.7) if chart.is_upright else (0.36, 0.06, 0.62, 0.77)
    area = native._chartSpace.chart.plotArea  # python-pptx has no layout
    for layout in area.findall("{*}layout"):
        area.remove(layout)
    area.insert(0, parse_xml(_LAYOUT.format(*inner)))
    _draw_limit(page, chart, theme, inner)


def _format_axes(native: Any, chart: Chart, theme: Theme) -> None:
    values, names = native.value_axis, native.category_axis
    values.minimum_scale, values.maximum_scale = 0, round(chart.top, 2)
    values.major_unit = 20 if chart.top > 50 else 5
    values.major_gridlines.format.line.color.rgb = _rgb(theme.grid)
    values.tick_labels.number_format = '0" GiB"'
    values.tick_labels.number_format_is_linked = False
    values.format.line.fill.background()
    names.format.line.color.rgb = _rgb(theme.ink)
    names.tick_label_position = XL_TICK_LABEL_POSITION.LOW


def _colour_bars(native: Any, chart: Chart, theme: Theme) -> None:
    plot, colors = native.plots[0], colors_of(theme)
    plot.gap_width, plot.overlap = 35, 100
    for series, native_series in zip(chart.series, plot.series, strict=True):
        fill = native_series.format.fill
        if not series.color:
            fill.background()
            continue
        color = colors[series.color]
        if series.color == "between":
            fill.background()
            native_series.format.line.color.rgb = _rgb(theme.ink)
            native_series.format.line.width = Pt(1.5)
        else:
            fill.solid()
            fill.fore_color.rgb = _rgb(color)
        labels = native_series.data_labels
        labels.show_value = True
        labels.number_format = f'[>={0.05 * chart.top:.2f}]0.0;""'  # too small for a number
        labels.number_format_is_linked = False
        ink = theme.ink if series.color == "between" else text_on(color)
        labels.font.size = Pt(11 if len(series.values) > 6 else 14)
        labels.font.color.rgb = _rgb(ink)


def _draw_limit(page: Any, chart: Chart, theme: Theme, inner: Sequence[float]) -> None:
    """Draw a labelled line at the GPU's memory limit over `chart` on `page`, a PowerPoint slide.
    `inner` is the plot area's (left, top, width, height) as shares of the chart's box."""
    box_left, box_top, box_width, box_height = _BOX
    left_share, top_share, width_share, height_share = inner
    left, top = box_left + left_share * box_width, box_top + top_share * box_height
    width, height = width_share * box_width, height_share * box_height
    share = chart.limit / round(chart.top, 2)
    if chart.is_upright:
        position = top + height * (1 - share)
        ends = (left, position, left + width, position)
        label_box = (left + width - 4.0, position - 0.36, 4.0, 0.36)
    else:
        position = left + width * share
        ends = (position, top - 0.1, position, top + height)
        label_box = (position - 4.0, top - 0.42, 4.0, 0.36)
    line = page.shapes.add_connector(MSO_CONNECTOR.STRAIGHT, *map(Inches, ends))
    line.shadow.inherit = False
    line.line.color.rgb, line.line.width = _rgb(theme.ink), Pt(3)
    box = page.shapes.add_textbox(*map(Inches, label_box))
    _write_text(box.text_frame, chart.limit_name, 16, theme.ink, bold=True)
    box.text_frame.paragraphs[0].alignment = PP_ALIGN.RIGHT


def _rgb(color: str) -> RGBColor:
    return RGBColor.from_string(color.removeprefix("#"))
