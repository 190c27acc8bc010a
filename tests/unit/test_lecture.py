"""Lectures: findings, sums, native charts and exercises, all of them computed."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memest import predict
from memest.cli import main
from memest.estimator.versions import simulating
from memest.plan.training_plan import read_suite
from memest.plots.slides import draw_slide, pdf_bytes
from memest.plots.style import WIDTH
from memest.report.lecture import Lecture, Rows, predicted_rows, stored_rows
from memest.units import GIB
from memest.validate.results import find_suite
from scripts.make_lecture import store_rows

LAB = find_suite("lab-a100")
SUITE = """
defaults: {seq_len: 64, precision: 32-true}
experiments:
  - {name: large batch, model_name: gpt2, batch_size: 128}
  - {name: small batch, model_name: gpt2, batch_size: 16}
  - {name: no state, model_name: gpt2, batch_size: 16, optim: sgd}
  - {name: other rate, model_name: gpt2, batch_size: 16, optim: sgd, lr: 0.1}
  - {name: other model, model_name: opt-125m, batch_size: 16, optim: sgd}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("suite") / "course.yaml"
    found.write_text(SUITE)
    return found


@pytest.fixture(scope="module")
def rows(path: Path) -> Rows:
    return predicted_rows(path, ["t4"], 1)


@pytest.fixture(scope="module")
def lab() -> Lecture:
    found = stored_rows(LAB)
    assert found is not None, "the suite has changed: run `python scripts/make_lecture.py`"
    return Lecture(found)


def test_the_need_of_each_row_is_that_of_predict(rows: Rows, path: Path) -> None:
    for row, plan in zip(rows.rows, read_suite(path, {}), strict=True):
        report = predict(replace(plan, gpu=("t4",)))
        assert row.needs_bytes == report.needs_bytes == sum(row.parts.values())
        assert row.phases == report.phases


def test_a_model_named_like_the_shared_prefix_keeps_its_name(rows: Rows) -> None:
    first, *_ = rows.rows
    larger = replace(first, plan=replace(first.plan, model_name="gpt2-medium"))
    made = Lecture(replace(rows, rows=(first, larger)))

    assert [made.model(row.plan) for row in made.rows.rows] == ["gpt2", "medium"]


def test_each_change_is_against_the_most_similar_row_before(rows: Rows) -> None:
    made = Lecture(rows)
    names = [(step.before.plan.label, step.after.plan.label) for step in made.steps]

    assert names == [
        ("large batch", "small batch"), ("small batch", "no state"), ("no state", "other model"),
    ]  # fmt: skip
    saved = rows.rows[0].needs_bytes - rows.rows[1].needs_bytes
    title = f"Batch 16 saves {saved / GIB:.0f} GiB: gpt2 "
    assert made.title_of(made.steps[0]).startswith(title)
    saved = rows.rows[1].needs_bytes - rows.rows[2].needs_bytes
    title = f"SGD saves {saved / GIB:.1f} GiB: gpt2 still fits"
    assert made.title_of(made.steps[1]).startswith(title)


def test_stored_rows_are_read_as_they_were(rows: Rows, path: Path) -> None:
    store_rows(rows, path)
    found = stored_rows(path)

    assert found is not None
    assert found.rows == rows.rows
    path.write_text(SUITE.replace("16", "8"))
    assert stored_rows(path) is None


def test_the_titles_of_the_lab_are_its_findings(lab: Lecture) -> None:
    titles = [slide.title for slide in lab.slides()]

    assert titles[0] == "12 of 15 experiments fit a100-80gb"
    assert "8-bit Adam saves 43 GiB: flan-t5-xxl fits" in titles
    assert len(titles) == len(set(titles))


def test_a_waterfall_ends_at_the_need_of_its_last_row(lab: Lecture) -> None:
    found = [slide for slide in lab.slides() if slide.subtitle.startswith("From ")]

    assert len(found) == 2
    for slide in found:
        series = {s.color: s.values for s in slide.chart.series}
        level = series["need"][0]
        for more, less in zip(series.get("more", ()) or [0] * 99, series["less"], strict=False):
            level += more - less
        assert level == pytest.approx(series["need"][-1])
        assert series["need"][-1] < slide.chart.limit < series["need"][0]


def test_one_step_is_built_up_in_five_frames(lab: Lecture) -> None:
    frames = [slide for slide in lab.slides() if slide.subtitle.startswith("One step")]

    assert len(frames) == 5
    for number, frame in enumerate(frames, 1):
        heights = [sum(v) for v in zip(*(s.values for s in frame.chart.series), strict=True)]
        assert [height > 0 for height in heights] == [True] * number + [False] * (5 - number)


def test_the_notes_have_arithmetic_that_adds_up_and_the_versions(lab: Lecture) -> None:
    slide = next(s for s in lab.slides() if s.title.startswith("8-bit Adam"))
    changes = [float(n) for n in re.findall(r": ([+-][\d.]+)$", "\n".join(slide.notes), re.M)]
    total = re.search(r"after: ([+-][\d.]+) GiB", "\n".join(slide.notes))

    assert total is not None
    assert sum(changes) == pytest.approx(float(total[1]), abs=0.05)
    assert "memest predict --model blip2-flan-t5-xxl" in "\n".join(slide.notes)
    assert f"memest {lab.rows.versions['memest']}" in slide.notes[-1]


def test_exercises_have_an_answer_each(lab: Lecture) -> None:
    asked, _, answers = lab.exercises().partition("## Answers")

    assert len(re.findall(r"^\d+\. ", asked, re.M)) == len(re.findall(r"^\d+\. ", answers, re.M))
    assert "8-bit Adam saves 43 GiB: flan-t5-xxl fits" in answers


def test_no_text_of_a_slide_is_cut(lab: Lecture) -> None:
    for each in lab.slides():
        figure = draw_slide(each, dark=False)
        drawn, (axes,) = figure.get_tightbbox(), figure.axes
        title = next(text for text in figure.texts if text.get_gid() == "title")
        assert title.get_text() == each.title
        assert 0 <= drawn.x0 < drawn.x1 <= WIDTH
        assert drawn.y0 >= 0
        assert min(t.get_size() for t in (*axes.get_xticklabels(), *axes.get_yticklabels())) >= 10


def test_a_stored_row_is_predicted_again() -> None:
    stored = stored_rows(LAB)
    assert stored is not None
    row = next(r for r in stored.rows if r.plan.label == "opt-2.7b reduced precision")
    with simulating("2.11"):
        report = predict(replace(row.plan, gpu=tuple(stored.limits)))

    assert dict(report.verdicts) == dict(row.verdicts)
    assert report.phases == row.phases
    assert report.peak_allocated_bytes == sum(row.kinds.values())


def test_the_pdf_has_a_page_per_slide(lab: Lecture) -> None:
    slides = lab.slides()[:3]

    assert pdf_bytes(slides, dark=True).count(b"/Type /Page ") == 3


@pytest.mark.parametrize("dark", [False, True])
def test_every_slide_has_a_native_chart_and_notes(lab: Lecture, dark: bool) -> None:
    pptx: Any = pytest.importorskip("pptx")
    from memest.report.slides import pptx_bytes

    slides = lab.slides()
    found = list(pptx.Presentation(io.BytesIO(pptx_bytes(slides, dark=dark))).slides)

    assert len(found) == len(slides)
    for page, slide in zip(found, slides, strict=True):
        charts = [shape.chart for shape in page.shapes if shape.has_chart]
        assert page.shapes.title.text_frame.text == slide.title
        assert page.notes_slide.notes_text_frame.text == "\n".join(slide.notes)
        assert len(charts) == 1
        values = [tuple(series.values) for series in charts[0].plots[0].series]
        order = 1 if slide.chart.is_upright else -1
        assert values == [series.values[::order] for series in slide.chart.series]


def test_the_command_writes_six_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pptx")
    with pytest.raises(SystemExit) as ended:
        main(["lecture", "lab-a100", "-o", str(tmp_path / "out")])

    assert ended.value.code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "exercises.md", "explorer.html", "slides-dark.pdf", "slides-dark.pptx",
        "slides-light.pdf", "slides-light.pptx",
    ]  # fmt: skip
    assert "predicted by memest" in capsys.readouterr().out


def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memest.packages.is_installed", lambda name: name != "pptx")
    for arguments, text in (
        (["lab-b200"], "there is no suite and no file `lab-b200`"),
        (["lab-a100", "--gpu", "a1000"], "a1000"),
        (["lab-a100", "-o", str(tmp_path)], "pip install 'memest-gpu[lecture]'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["lecture", *arguments])
        assert ended.value.code in (2, 3)
        assert text in capsys.readouterr().err
