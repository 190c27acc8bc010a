"""What is shown while a command computes, and what an interrupted one keeps."""

from __future__ import annotations

import io
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memest import Prediction, TrainingPlan, predict, writing
from memest.cli import main
from memest.cli.resume import (
    StoredResults,
    forget,
    plan_key,
    predict_resumably,
    results_of,
)
from memest.cli.terminal import progress_bar, result_lines
from memest.engines import Event, Local, notify, watched
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.search import many_plans
from memest.estimator.search.largest import largest

PLANS = [
    TrainingPlan(model_name="gpt2", batch_size=b, seq_len=16, gpu=("t4",), name=f"b{b}")
    for b in (1, 2)
]


@pytest.fixture(scope="module")
def reports() -> list[Prediction]:
    return [predict(plan) for plan in PLANS]


def died(task: object, error: Exception) -> Exception:
    return error


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("num_processes", [1, 2])
def test_who_watches_is_told_of_every_task_that_begins_and_ends(num_processes: int) -> None:
    events: list[Event] = []
    with watched(events.append):
        assert Local(workers=num_processes).map(abs, [-3, -1, -2], died=died) == [3, 1, 2]

    assert sorted((e.label, e.result) for e in events if e.is_done) == [
        ("-1", 1), ("-2", 2), ("-3", 3),
    ]  # fmt: skip
    assert [e.label for e in events if not e.is_done] == ["-3", "-1", "-2"]
    assert {e.total for e in events} == {3}


def test_an_error_in_a_process_ends_the_others() -> None:
    with pytest.raises(TypeError):
        Local(workers=2).map(len, ["a", 3, "b"], died=died)  # type: ignore[arg-type,list-item]


def test_progress_is_for_terminals_alone(
    capsys: pytest.CaptureFixture[str], reports: list[Prediction]
) -> None:
    with progress_bar():
        Local(workers=1).map(abs, [-1, 2], died=died)

    assert capsys.readouterr() == ("", "")


def test_a_log_has_a_line_every_half_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0, 20)
    monkeypatch.setattr("memest.cli.terminal.monotonic", lambda: next(clock))
    with progress_bar():
        Local(workers=1).map(abs, [-1, 2, 3, 4, 5], died=died)

    assert capsys.readouterr().err == ("2/5 done, about 1 min left\n4/5 done, about 1 min left\n")


def test_a_search_reports_the_size_it_tries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0, 20)
    monkeypatch.setattr("memest.cli.terminal.monotonic", lambda: next(clock))
    with progress_bar():
        largest(PLANS[0], [find_gpu("t4")], "batch_size")
    lines = capsys.readouterr().err.splitlines()
    assert "b1: batch_size 8 on t4" in lines

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("memest.cli.terminal._DELAY_SECONDS", 0.0)
    with progress_bar("looking"):
        notify(Event(label="b1: batch_size 32", is_done=False, weight=0, total=0, task=32))
    assert "b1: batch_size 32" in terminal.getvalue()


def test_a_terminal_sees_what_is_under_way_and_each_result(
    monkeypatch: pytest.MonkeyPatch, reports: list[Prediction]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("memest.cli.terminal._DELAY_SECONDS", 0.0)
    monkeypatch.setattr("memest.cli.terminal._REFRESH_SECONDS", 0.01)

    def slow(index: int) -> Prediction:
        time.sleep(0.05)
        return reports[index]

    with progress_bar("waiting"):
        Local(workers=1).map(slow, [0, 1], died=died, label=lambda i: PLANS[i].label)

    frames = terminal.getvalue()
    assert "0/2" in frames
    assert "1/2" in frames
    assert "b2" in frames
    assert result_lines(reports[0])[0] in frames
    assert result_lines(reports[0])[0].startswith("fits ")


def test_a_prediction_is_read_back_from_its_json(reports: list[Prediction]) -> None:
    for report in reports:
        again = Prediction.from_dict(json.loads(report.to_json()))
        assert again.to_json() == report.to_json()
        assert str(again) == str(report)


def test_an_interrupted_suite_keeps_what_is_done_and_goes_on_from_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reports: list[Prediction],
) -> None:
    asked: list[str] = []
    answers: Iterator[Prediction | KeyboardInterrupt] = iter([reports[0], KeyboardInterrupt()])

    def interrupted(plan: TrainingPlan, **options: object) -> Prediction:
        asked.append(plan.label)
        answer = next(answers)
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        return answer

    monkeypatch.setattr(many_plans, "predict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        predict_resumably(PLANS, tmp_path / "lab", is_resumed=False, jobs=1)
    assert "1 results are kept" in capsys.readouterr().err

    answers = iter([reports[1]])
    found = predict_resumably(PLANS, tmp_path / "lab", is_resumed=True, jobs=1)

    assert asked == ["b1", "b2", "b2"]
    assert [r.to_json() for r in found if isinstance(r, Prediction)] == [
        r.to_json() for r in reports
    ]
    assert [path.name for path in tmp_path.iterdir()] == [".lab.partial.jsonl"]
    forget(tmp_path / "lab")
    assert list(tmp_path.iterdir()) == []


def test_results_stay_until_the_output_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep.csv"
    args = ["sweep", "--model", "gpt2", "--seq-len", "16", "--bs", "1", "--gpu", "t4", "-o",
            str(out), "--jobs", "1"]  # fmt: skip

    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_whole", full)
    with pytest.raises(SystemExit) as ended:
        main(args)

    assert ended.value.code == 2
    assert len(StoredResults(out, is_resumed=True).known) == 1


def test_results_of_another_release_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoredResults(tmp_path / "out.csv", is_resumed=False).add(PLANS[0], {"a": 1})
    monkeypatch.setenv("MEMEST_TORCH", "2.7")

    assert StoredResults(tmp_path / "out.csv", is_resumed=True).known == {}


def test_a_line_cut_short_and_one_of_another_version_are_passed_over(
    tmp_path: Path, reports: list[Prediction]
) -> None:
    kept = StoredResults(tmp_path / "out.csv", is_resumed=False)
    kept.add(PLANS[0], {"a": 1})
    text = kept.path.read_text()
    kept.path.write_text(
        text + text.replace('"memest": "', '"memest": "0.0.').replace("b1", "b9") + text[:40]
    )

    assert StoredResults(tmp_path / "out.csv", is_resumed=True).known == {
        plan_key(PLANS[0]): {"a": 1}
    }


def test_a_sweep_takes_what_was_kept(tmp_path: Path) -> None:
    """A figure that no prediction gives shows where it came from."""
    out = tmp_path / "sweep.jsonl"
    args = ["sweep", "--model", "gpt2", "--seq-len", "16", "--bs", "1,2", "--gpu", "t4", "-o",
            str(out), "--jobs", "1"]  # fmt: skip
    plan = TrainingPlan(model_name="gpt2", batch_size=1, seq_len=16, gpu=("t4",))
    StoredResults(out, is_resumed=False).add(
        plan,
        [{"gpu": "t4", "verdict": None, "peak_allocated_bytes": 7, "process_bytes": 0,
          "unlimited_reserved_bytes": 0, "error": ""}],
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*args, "--resume"])

    assert ended.value.code == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["peak_allocated_bytes"] == 7
    assert second["peak_allocated_bytes"] > 7
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.jsonl"]


def test_errors_are_not_kept(reports: list[Prediction]) -> None:
    from memest.errors import PlanError

    event = Event(label="", is_done=True, weight=2, total=2, task=PLANS,
                  result=[reports[0], PlanError("no")])  # fmt: skip

    assert list(results_of(event)) == [PLANS[0]]
