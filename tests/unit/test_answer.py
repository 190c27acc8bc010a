"""The answer over a report: two lines that say whether it fits, by how much, and why."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from memest import Prediction, TrainingPlan, predict
from memest.cli.terminal import has_colour
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.search import advise
from memest.estimator.search.advise import cheapest_change
from memest.report import Outcome, Verdict
from memest.report.answer import (
    NAMES,
    SCHEDULERS,
    DoesNotFitError,
    answer,
    moment,
    place_in_words,
    plain,
    resource_lines,
    shares,
    summary_line,
    verdict_line,
)
from memest.report.text import render_text

FITS = Verdict(verdict=Outcome.FITS, margin_bytes=50 << 30, limit_bytes=78 << 30,
               reserved_bytes=28 << 30)  # fmt: skip
PLAN = TrainingPlan(
    model_name="gpt2",
    batch_size=4,
    precision="32-true",
    seq_len=128,
    gpu=("t4",),
    memory_limit=2 << 30,
)


@pytest.fixture(scope="module")
def too_large() -> Prediction:
    return predict(PLAN)


def test_a_plan_that_fits_says_how_much_is_left() -> None:
    line = plain(verdict_line(FITS, "a100-80gb"))

    assert line == "fits a100-80gb: needs 28.00 GiB of 78.00 GiB usable, 50.00 GiB to spare"


def test_a_tight_plan_says_what_drivers_differ_by() -> None:
    verdict = dataclasses.replace(FITS, margin_bytes=1 << 29, spread_bytes=1 << 30)

    assert plain(verdict_line(verdict, "a100-80gb")) == (
        "fits a100-80gb, but tight: needs 77.50 GiB of 78.00 GiB usable, 0.50 GiB to spare;"
        " drivers of it differ by 1.00 GiB"
    )


def test_the_first_line_of_a_report_is_the_verdict(too_large: Prediction) -> None:
    first, second, *_ = render_text(too_large).splitlines()

    assert first.startswith("does not fit t4: needs ")
    assert first.endswith("more than the 2.00 GiB usable")
    assert second.startswith("runs out ")
    assert "step 1" in second or "step 2" in second


def test_a_no_names_a_change_that_fits_and_the_command_for_more(too_large: Prediction) -> None:
    change = cheapest_change(PLAN, "t4", too_large)

    assert change is not None
    assert predict(change.plan).verdict is Outcome.FITS
    lines = list(map(plain, answer(too_large, change=change)))
    assert any(line.startswith(f"would fit with {change.title}: ") for line in lines)
    more = [line for line in lines if line.startswith("more: ")]
    assert len(more) == 1
    assert more[0].startswith("more: memest advise --model gpt2 --bs 4 --precision 32-true")


def test_a_long_run_has_no_run_beside_it(
    too_large: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_plan(PLAN, find_gpu("t4"))
    monkeypatch.setattr(advise, "MAX_CALLS", trace.program.coverage.num_ops * 2 - 1)

    assert cheapest_change(PLAN, "t4", too_large) is None


def test_operators_are_named_in_the_last_part_alone(too_large: Prediction) -> None:
    *parts, last = render_text(too_large).split("\n\n")

    assert "aten." in last
    assert "aten." not in "".join(parts)


def test_without_verbose_the_assumptions_are_counted(too_large: Prediction) -> None:
    count = len(too_large.assumptions)

    assert f"; {count - 1} more with --verbose" in render_text(too_large)
    verbose = render_text(too_large, verbose=True)
    assert all(f"assumed: {line}" in verbose for line in too_large.assumptions)


def test_colours_change_no_word(too_large: Prediction) -> None:
    import re

    coloured = render_text(too_large, colour=True)

    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_text(too_large)


@pytest.mark.parametrize(
    ("env", "is_terminal", "expected"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False),
     ({}, False, False), ({"NO_COLOR": ""}, True, True)],
)  # fmt: skip
def test_colours_are_for_terminals_where_nobody_asked_for_none(
    env: dict[str, str], is_terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for key, value in ({"TERM": "xterm"} | env).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: is_terminal))

    assert has_colour() is expected


def test_steps_are_counted_from_one_for_people() -> None:
    assert place_in_words("step 0, backward, model.layers.3, aten.mm, train.py:4") == (
        "step 1, backward, model.layers.3, train.py:4"
    )
    assert place_in_words("after step 9") == "after step 10"
    assert moment(0, "forward") == "in the forward of step 1"
    assert moment(1, "") == "in step 2"


def test_shares_add_up_to_a_hundred() -> None:
    assert shares([("params", 50), ("grads", 50)]) == "50 % each for params and grads"
    assert shares([("params", 97), ("batch", 3)]) == "97 % for params, 3 % for the rest"


def test_the_summary_names_the_failed_request(too_large: Prediction) -> None:
    verdict = too_large.verdicts["t4"]
    start = f"memest: {verdict.needs_bytes / 2**30:.1f} of 2.0 GiB (OOM) on t4, out of memory in "
    at = {
        verdict.at: "step 1 optimizer",
        "step 0, forward, h.4, aten.addmm, train.py:3": "step 1 forward at train.py:3",
        "step 0, setup, aten.empty, train.py:1": "setup at train.py:1",
        "step 1, backward, train.py:3, backward of train.py:2": "step 2 backward at train.py:2",
    }
    for text, words in at.items():
        failed = dataclasses.replace(verdict, at=text)
        report = dataclasses.replace(too_large, verdicts={"t4": failed})

        assert summary_line(report) == start + words


def test_the_summary_of_a_run_that_fits_has_its_reserved_memory(too_large: Prediction) -> None:
    report = dataclasses.replace(too_large, verdicts={"t4": FITS})
    peak = report.peak
    moment = f"step {peak.step + 1} {peak.phase}" + (f" at {peak.module}" if peak.module else "")

    assert summary_line(report) == f"memest: 28.0 of 78.0 GiB (fits) on t4, peak in {moment}"
    assert "predicted 28.0, measured 27.0 of 78.0 GiB" in summary_line(
        report, measured_bytes=27 << 30
    )


def test_the_smallest_gpu_that_fits_is_emitted(too_large: Prediction) -> None:
    tight = dataclasses.replace(FITS, margin_bytes=1, spread_bytes=2, limit_bytes=39 << 30)
    verdicts = {"b200": FITS, "a100-40gb": tight, "a100-80gb": FITS, "h100-pcie-80gb": FITS}
    verdicts["b200"] = dataclasses.replace(FITS, limit_bytes=177 << 30)
    report = dataclasses.replace(too_large, verdicts=verdicts)
    lines = {each: resource_lines(report, each, num_gpus=4, num_nodes=2) for each in SCHEDULERS}

    assert "(fits) on a100-80gb" in lines["sky"]
    assert lines["sky"].splitlines()[1:] == [
        "num_nodes: 2", "resources:", "  accelerators: A100-80GB:4"
    ]  # fmt: skip
    assert lines["dstack"].splitlines()[1:] == ["nodes: 2", "resources:", "  gpu: A100:80GB:4"]
    assert lines["slurm"].splitlines()[2:] == [
        "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=nvidia_a100-sxm4-80gb:4"
    ]  # fmt: skip


def test_nothing_is_emitted_where_no_gpu_fits(too_large: Prediction) -> None:
    with pytest.raises(DoesNotFitError, match="which fits none of t4") as raised:
        resource_lines(too_large, "sky")
    assert raised.value.exit_code == 5


def test_every_gpu_that_schedulers_name_is_in_the_catalogue() -> None:
    assert [find_gpu(name).name for name in NAMES] == list(NAMES)
