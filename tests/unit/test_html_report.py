"""The page says what the report says, needs nothing from anywhere, and is well-formed."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from decimal import Decimal
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from memest import TrainingPlan, predict
from memest.estimator.predict import record_plan
from memest.report import Prediction
from memest.report.difference import Difference
from memest.report.page import PredictionTable, render_difference, render_page
from memest.units import format_bytes

VOID = {"meta", "img", "source", "br", "input"}
PLAN = TrainingPlan(model_name="gpt2", seq_len=16, gpu=("t4", "a100-40gb"), name="a <b> & c")
SMALL = TrainingPlan(model_name="gpt2", seq_len=16, memory_limit=600 << 20, name="small")


class Page(HTMLParser):
    """Checks that tags close in order; collects text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for k, v in attrs if k in ("src", "srcset", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def reports() -> list[Prediction]:
    return [predict(PLAN), predict(SMALL)]


@pytest.fixture(scope="module")
def one(reports: list[Prediction]) -> str:
    return render_page(reports[:1], recording=record_plan(PLAN))


def test_the_page_of_a_plan_has_its_numbers_and_verdicts(
    one: str, reports: list[Prediction]
) -> None:
    text = Page(one).text

    assert f"{reports[0].peak_allocated_bytes / 2**30:.2f} GiB allocated" in text
    assert f"{reports[0].peak_reserved_bytes / 2**30:.2f} GiB reserved" in text
    assert "a <b> & c" in text
    assert one.count(' <b class="verdict">fits</b>') == 2
    assert "124.44e6 parameters, 124.44e6 trained" in text


def test_the_printed_terms_add_up_to_the_printed_peak(one: str) -> None:
    table = next(part for part in one.split("<table") if "held for" in part)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    *terms, peak = [(Decimal(row[1]), Decimal(row[2].removesuffix(" %"))) for row in cells]

    assert tuple(map(sum, zip(*terms, strict=True))) == peak


def test_bars_keep_their_colours_in_print(one: str) -> None:
    style = one.partition("</style>")[0]

    assert re.search(r"\* \{[^}]*(?<!-)print-color-adjust: exact", style)


def test_the_page_needs_nothing_from_the_network(one: str, reports: list[Prediction]) -> None:
    for page in (one, render_page(reports)):
        found = Page(page)
        assert found.addresses
        assert all(address.startswith("data:image/svg+xml;base64,") for address in found.addresses)
        assert "default-src 'none'" in page
        assert page.count("<script>") == 1
        assert "url(" not in page.split("<body>")[0]


def test_every_chart_is_there_for_light_and_for_dark_screens(one: str) -> None:
    charts = [
        ElementTree.fromstring(base64.b64decode(address.partition(",")[2]))
        for address in Page(one).addresses
    ]

    assert [chart.tag for chart in charts] == ["{http://www.w3.org/2000/svg}svg"] * 2
    assert one.count('media="(prefers-color-scheme: dark)"') == 1
    assert one.count('name="viewport"') == 1


def test_the_page_of_a_suite_has_a_row_and_a_section_for_each(reports: list[Prediction]) -> None:
    page = render_page(reports)

    assert page.count("<details>") == 2
    assert re.findall(r'<td class="text">(.*?)</td>', page)[:2] == ["a &lt;b&gt; &amp; c", "small"]
    assert '<td class="bad">OOM</td>' in page
    Page(page)


def test_a_list_of_predictions_is_a_table_in_a_notebook(reports: list[Prediction]) -> None:
    table = PredictionTable(reports)

    assert table[1].name == "small"
    html = table._repr_html_()
    assert html.count("<tr>") == 3
    assert '<td class="bad">OOM</td>' in html
    assert "small" in str(table)
    Page(html)


def test_the_page_of_a_difference_has_peaks_and_changes(reports: list[Prediction]) -> None:
    before, after = reports[0], predict(replace(PLAN, batch_size=512))
    page = render_difference([Difference(before=before, after=after)])
    text = Page(page).text

    assert f"allocated {format_bytes(before.peak_allocated_bytes)}" in text
    grown = re.findall(r'<td class="text">(\w+)</td><td>\+([\d.]+)</td>', page)
    assert grown[0][0] == "activations"
    assert float(grown[0][1]) > 0
    assert page.count('class="stack"') == 2


def test_equal_reports_have_no_change(reports: list[Prediction]) -> None:
    assert "No change." in render_difference([Difference(before=reports[0], after=reports[0])])
