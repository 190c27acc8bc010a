"""Rows of the BLIP-2 labs, run as scripts and as plans: both peaks within 0.5 %."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("deepspeed")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import lab_rows
    import labs_page
    import make_labs
finally:
    sys.path.pop(0)

ROWS = {row.name: row for row in lab_rows.rows() if row.plan}
QUICK = (
    "a100-80gb: opt-2.7b on 1 GPU",
    "a100-80gb: opt-2.7b on 4 GPUs, DDP",
    "a100-80gb: opt-2.7b on 4 GPUs, FSDP",
    "a100-80gb: flan-t5-xxl DeepSpeed CPU offload",
)
"""One row of each strategy, which runs with `LIGHTER` where not every row runs."""

LIGHTER = {"model_name": "blip2-opt-2.7b", "accumulate_grad_batches": 1}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--every-run")
    rows = list(ROWS.values()) if every else [lighter(ROWS[name]) for name in QUICK]
    metafunc.parametrize("row", [with_its_cause(row) for row in rows])


def with_its_cause(row: lab_rows.Row) -> Any:
    """Return a parameter; a known miss is a strict failure with its cause."""
    causes = [cause for (name, _), cause in lab_rows.MISSES.items() if name == row.name]
    marks = [
        pytest.mark.xfail(reason=cause, raises=AssertionError, strict=True) for cause in causes
    ]
    return pytest.param(row, id=row.name, marks=marks)


def lighter(row: lab_rows.Row) -> lab_rows.Row:
    """Return the row for a smaller model and without accumulation."""
    values: dict[str, Any] = {**LIGHTER, "model_name": f"Salesforce/{LIGHTER['model_name']}"}
    kept = [each for each in row.target if each.partition("=")[0] not in values]
    target = (*kept, *(f"{key}={value}" for key, value in values.items()))
    return replace(row, target=target, plan={**row.plan, **LIGHTER})


@pytest.mark.slow
def test_a_row_has_the_same_peaks_as_a_script_and_as_a_plan(
    row: lab_rows.Row, tmp_path: Path
) -> None:
    make_labs.prepare(tmp_path, [row])
    found = make_labs.run(row, tmp_path)

    if "error" in found:
        pytest.fail(found["error"])
    for peak in labs_page.PEAKS:
        script = labs_page.in_training(found, peak)
        assert found[f"plan_{peak}_bytes"] == pytest.approx(script, rel=0.005)
