"""Predicted beside measured, with figures made by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memest.errors import PlanError
from memest.report import Measurement, Outcome, Peak, Phase, PhaseRow, Prediction, read_measurements
from memest.report.difference import comparison_json, render_comparison, render_comparison_markdown
from memest.validate.compare import compare, parse_tolerances, plan_of, summarise

GIB = 2**30


def row(step: int, phase: Phase, allocated: int, grads: int = 0) -> PhaseRow:
    return PhaseRow(
        step=step, micro_batch=0, phase=phase, params_bytes=GIB, grads_bytes=grads,
        optimizer_bytes=0,
        activations_bytes=allocated - GIB - grads, allocated_bytes=allocated,
        peak_allocated_bytes=allocated, reserved_bytes=allocated,
    )  # fmt: skip


def common(peak: int, rows: tuple[PhaseRow, ...], verdict: Outcome) -> dict[str, Any]:
    return {
        "name": "run", "plan": {"model_name": "gpt2", "batch_size": 3}, "model": {}, "gpu": "h200",
        "peak_allocated_bytes": peak, "peak_reserved_bytes": 2 * peak, "process_bytes": 3 * peak,
        "host_bytes": 0, "phases": rows, "verdict": verdict, "versions": {"torch": "2.11.0+cu130"},
        "elapsed_s": 1.0,
    }  # fmt: skip


ROWS = (row(0, Phase.BEFORE_FORWARD, 2 * GIB), row(0, Phase.AFTER_FORWARD, 4 * GIB))


def measured(**changes: Any) -> Measurement:
    report = Measurement(
        **common(10 * GIB, ROWS, Outcome.FITS),
        device={"name": "NVIDIA H200", "memory_bytes": 143155 << 20, "driver": "580"},
        context_bytes=GIB,
    )
    return dataclasses.replace(report, **changes)


def predicted(**changes: Any) -> Prediction:
    report = Prediction(
        **common(10 * GIB, ROWS, Outcome.FITS),
        unlimited_reserved_bytes=20 * GIB,
        peak=Peak(step=0, phase="forward", module="", op="aten.mm"),
        verdicts={}, terms=(), coverage={}, assumptions=(),
    )  # fmt: skip
    return dataclasses.replace(report, **changes)


def test_equal_reports_differ_nowhere() -> None:
    (comparison,) = compare([measured()], [predicted()])

    assert {d.error_bytes for d in comparison.totals.values()} == {0}
    assert comparison.states == ()
    assert comparison.residual == ""
    assert summarise([comparison]).broken == ()


def test_errors_are_signed_and_of_what_was_measured() -> None:
    (comparison,) = compare([measured()], [predicted(peak_allocated_bytes=9 * GIB)])

    assert comparison.totals["allocated"].error_bytes == -GIB
    assert comparison.totals["allocated"].error_percent == -10.0
    assert summarise([comparison]).broken == (
        "run: allocated is off by -10.00 % (tolerance 0.5 %)",
    )


def test_a_wrong_verdict_and_a_wrong_byte_of_state_break_any_tolerance() -> None:
    wrong = (ROWS[0], row(0, Phase.AFTER_FORWARD, 4 * GIB, grads=1))
    (comparison,) = compare([measured(verdict=Outcome.OOM)], [predicted(phases=wrong)])

    broken = summarise(
        [comparison], dict.fromkeys(("allocated", "reserved", "process", "phase"), 99)
    ).broken

    assert broken == (
        "run: grads_bytes step 0.0 after_forward differs by 1 bytes",
        "run: measured `oom`, predicted `fits`",
    )


def test_the_residual_names_the_phase_in_which_it_begins() -> None:
    off = (ROWS[0], row(0, Phase.AFTER_FORWARD, 5 * GIB))
    (comparison,) = compare([measured()], [predicted(phases=off)])

    assert comparison.residual == "+1024.0 MiB in allocated from step 0.0 after_forward on"


def test_versions_that_differ_are_said() -> None:
    (comparison,) = compare([measured()], [predicted(versions={"torch": "2.13.0+cpu"})])

    assert comparison.versions == ("torch 2.11.0+cu130 measured, 2.13.0+cpu predicted with",)


def test_a_measured_plan_is_judged_on_its_own_gpu() -> None:
    assert plan_of(measured()).gpu == ("h200",)
    assert plan_of(measured(gpu="unheard-of")).gpu_memory == 143155 << 20


def test_tolerances_are_parsed_or_refused() -> None:
    assert parse_tolerances(["phase=0.25"])["phase"] == 0.25
    for text in ("phase", "phase=x", "phase=-1", "phases=1", "phase=inf"):
        with pytest.raises(PlanError, match="is not understood"):
            parse_tolerances([text])


def test_every_rendering_has_the_run_and_its_error() -> None:
    comparisons = compare([measured()], [predicted(peak_allocated_bytes=9 * GIB)])
    summary = summarise(comparisons)

    for text in (
        render_comparison(comparisons, summary),
        render_comparison_markdown(comparisons, summary),
    ):
        assert "run" in text
        assert "-10.000 %" in text
    assert comparison_json(comparisons, summary)["experiments"][0]["totals"]["allocated"] == {
        "what": "peak_allocated_bytes", "predicted_bytes": 9 * GIB, "low_bytes": 9 * GIB,
        "measured_bytes": 10 * GIB,
        "error_percent": -10.0,
    }  # fmt: skip


def test_measurements_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(measured().to_json() + "\n")

    assert read_measurements(path) == [measured()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"schema": "memest.report/1", "ki', "is no JSON: cut short?"),
        ("[1]", "has the schema `None`"),
        ('{"schema": "other/1"}', "has the schema `other/1`"),
        ('{"schema": "memest.report/1", "kind": "predicted"}', "is `predicted`, not measured"),
        ('{"schema": "memest.report/1", "kind": "measured"}', "is not a whole report"),
    ],
)
def test_a_results_file_of_another_kind_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)

    with pytest.raises(PlanError, match=message):
        read_measurements(path)


def test_json_of_a_measurement_has_the_schema() -> None:
    values = json.loads(measured().to_json())

    assert values["schema"] == "memest.report/1"
    assert values["kind"] == "measured"
