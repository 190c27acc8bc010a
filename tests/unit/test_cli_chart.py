"""Charts and recordings on the command line: files, their data, and errors."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memest.cli import main

PLAN = ("--model", "gpt2", "--seq-len", "16", "--gpu", "t4")


@pytest.fixture(scope="module")
def few(shallow: Callable[..., str]) -> tuple[str, ...]:
    """`PLAN` with few layers."""
    return ("--model", shallow("gpt2"), *PLAN[2:])


def memest(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    return int(ended.value.code or 0)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_ladder_of_a_suite_has_its_predictions_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        "defaults: {model_name: gpt2, seq_len: 16}\n"
        "experiments:\n"
        "  - {name: one}\n"
        "  - {name: two, model_name: t5-small, attn_implementation: flash_attention_2}\n"
    )
    out = tmp_path / "new" / "charts"

    code = memest(
        "chart", "lab", "--suite", str(suite), "--gpu", "t4", "--out", str(out),
        "--format", "png,svg", "--title", "Mine",
    )  # fmt: skip

    assert code == 0
    assert files(out) == ["mine.jsonl", "mine.png", "mine.svg"]
    assert [(r["name"], r["gpu"]) for r in rows(out / "mine.jsonl")] == [("one", "t4")]
    printed = capsys.readouterr()
    assert [Path(p).name for p in printed.out.split()] == ["mine.png", "mine.svg", "mine.jsonl"]
    assert "not drawn: two: " in printed.err


def test_the_data_of_a_timeline_is_its_points(tmp_path: Path, few: tuple[str, ...]) -> None:
    assert memest("chart", "timeline", *few, "--out", str(tmp_path), "--dark") == 0

    assert files(tmp_path) == ["timeline.jsonl", "timeline.png"]
    points = rows(tmp_path / "timeline.jsonl")
    assert [p["event"] for p in points] == list(range(len(points)))
    order = list(dict.fromkeys(p["phase"] for p in points))
    assert order[:3] == ["forward", "backward", "step"]
    assert points[0]["params_bytes"] == points[-1]["params_bytes"] > 0


def test_the_phases_of_a_plan(tmp_path: Path, few: tuple[str, ...]) -> None:
    assert memest("chart", "phases", *few, "--out", str(tmp_path), "--format", "pdf") == 0

    assert files(tmp_path) == ["phases.jsonl", "phases.pdf"]
    assert rows(tmp_path / "phases.jsonl")[0]["kind"] == "predicted"


def test_predict_writes_a_page_a_snapshot_and_a_trace(tmp_path: Path, few: tuple[str, ...]) -> None:
    page, snapshot, trace = (tmp_path / n for n in ("page.html", "step.pickle", "step.json"))

    code = memest(
        "predict", *few, "--html", str(page), "--snapshot", str(snapshot),
        "--chrome-trace", str(trace),
    )  # fmt: skip

    assert code == 0
    assert files(tmp_path) == ["page.html", "step.json", "step.pickle"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert set(pickle.loads(snapshot.read_bytes())) >= {"segments", "device_traces"}
    assert json.loads(trace.read_text())["traceEvents"]


SWEEP = ("--model", "gpt2", "--seq-len", "16", "--bs", "1:3", "--gpu", "t4", "--jobs", "1")


def test_a_sweep_is_drawn_at_once_or_from_its_file(
    tmp_path: Path, shallow: Callable[..., str]
) -> None:
    made, read = tmp_path / "made", tmp_path / "read"
    options = [shallow("gpt2") if word == "gpt2" else word for word in SWEEP]
    options += ["--lora", "false,true"]

    assert memest("chart", "sweep", *options, "--out", str(made)) == 0
    assert memest("sweep", *options, "-o", str(tmp_path / "s.csv")) == 0
    assert memest("chart", "sweep", str(tmp_path / "s.csv"), "--out", str(read)) == 0

    assert files(made) == files(read) == ["sweep.jsonl", "sweep.png"]
    verdicts = [(int(r["batch_size"]), r["verdict"]) for r in rows(made / "sweep.jsonl")]
    assert verdicts == [(int(r["batch_size"]), r["verdict"]) for r in rows(read / "sweep.jsonl")]
    assert len(verdicts) == 6


def test_a_chart_without_a_gpu_is_of_the_lab_s(tmp_path: Path, few: tuple[str, ...]) -> None:
    assert memest("chart", "phases", *few[:4], "--out", str(tmp_path)) == 0

    assert [r["gpu"] for r in rows(tmp_path / "phases.jsonl")] == ["a100-80gb"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chart", "lab", "--format", "gif"], "format `gif` does not exist"),
        (["chart", "lab", "--format", ","], "no format"),
        (["chart", "lab", "--suite", "no-such"], "there is no suite and no file `no-such`"),
        (["chart", "lab", "--gpu", "a10000"], "`a10000` is not in the"),
        (["chart", "timeline"], "the plan names no model"),
        (["chart", "timeline", *PLAN, "--step", "3"], "`--step 3` is not among the 2 of `gpt2`"),
        (["chart", "validate", "no.jsonl"], "`no.jsonl` cannot be read"),
        (["chart", "batches"], "Missing option '--model'"),
        (["chart", "sweep"], "the plan names no model"),
        (["chart", "sweep", "no.csv"], "`no.csv` cannot be read"),
        (["chart", "sweep", "file.txt"], "`file.txt` is no sweep"),
        (["chart", "sweep", "two.yaml"], "`two.yaml` is no sweep"),
        (["chart", "sweep", "file.txt", *SWEEP], "`file.txt` holds a sweep, and flags define"),
        (["chart", "phases", *PLAN, "--out", "file.txt"], "`file.txt` cannot be made"),
        (["predict", *PLAN, "--html", "no/page.html"], "`no/page.html` cannot be written"),
        (["predict", *PLAN, "--snapshot", "no/s.pickle"], "`no/s.pickle` cannot be written"),
        (["predict", "--suite", "two.yaml", "--snapshot", "s"], "a recording is of one plan"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_mistake_is_two_lines_and_leaves_no_file(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "two.yaml").write_text(
        "defaults: {model_name: gpt2}\nexperiments: [{name: a}, {name: b}]\n"
    )

    assert memest(*args) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 2
    assert message in printed.err
    assert files(tmp_path) == ["file.txt", "two.yaml"]


def test_the_ranks_of_a_script_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Path(__file__).resolve().parents[2] / "validation" / "scripts" / "ranks-64.json"

    assert memest("chart", "ranks", str(report), "--out", str(tmp_path), "--format", "svg") == 0

    assert files(tmp_path) == ["ranks.jsonl", "ranks.svg"]
    assert [row["rank"] for row in rows(tmp_path / "ranks.jsonl")][-2:] == [56, 63]
    drawn = (tmp_path / "ranks.svg").read_text(encoding="utf-8")
    assert ">56<" in drawn
    alone = json.loads(report.read_text(encoding="utf-8")) | {"ranks": []}
    (tmp_path / "alone.json").write_text(json.dumps(alone), encoding="utf-8")
    assert memest("chart", "ranks", str(tmp_path / "alone.json")) == 2
    assert "has no ranks" in capsys.readouterr().err
