"""Rows of the BLIP-2 labs, run as scripts and as plans: both peaks within 0.5 %."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.command import memest_here

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
"""One row of each strategy, which runs lighter where not every row runs."""

LIGHTER = {"model_name": "blip2-opt-2.7b", "accumulate_grad_batches": 1}
NUM_LAYERS = 4
"""Layers of each stack of the lighter model: a script and a plan agree on each layer alike."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = list(ROWS) if metafunc.config.getoption("--every-run") else QUICK
    metafunc.parametrize("row", [ROWS[name] for name in names], ids=names)


@pytest.fixture(scope="module")
def checkpoint(shallow: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dummy checkpoint of the lighter model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = shallow(LIGHTER["model_name"], NUM_LAYERS)
    command = ["checkpoint", model, "Salesforce/blip2-opt-2.7b", "--format", "hf"]
    make_labs.memest(command, folder).check_returncode()
    return folder / "Salesforce"


@pytest.fixture(autouse=True)
def plans_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict plans in this process, and run scripts in copies of one that has the libraries."""
    in_a_process = make_labs.memest
    copied = partial(forked.run, imports=("lightning", "transformers", "torch.distributed.fsdp"))
    monkeypatch.setattr(subprocess, "run", copied)

    def memest(arguments: Sequence[str], *rest: Any) -> subprocess.CompletedProcess[str]:
        is_plan = arguments[0] == "predict"
        return memest_here(*arguments) if is_plan else in_a_process(arguments, *rest)

    monkeypatch.setattr(make_labs, "memest", memest)


def lighter(row: lab_rows.Row, model: str) -> lab_rows.Row:
    """Return the row for the dummy checkpoint of `model`, without accumulation."""
    values: dict[str, Any] = {**LIGHTER, "model_name": f"Salesforce/{LIGHTER['model_name']}"}
    kept = [each for each in row.target if each.partition("=")[0] not in values]
    target = (*kept, *(f"{key}={value}" for key, value in values.items()))
    return replace(row, target=target, plan={**row.plan, **LIGHTER, "model_name": model})


@pytest.mark.slow
def test_a_row_has_the_same_peaks_as_a_script_and_as_a_plan(
    row: lab_rows.Row,
    tmp_path: Path,
    shallow: Callable[..., str],
    request: pytest.FixtureRequest,
) -> None:
    if request.config.getoption("--every-run"):
        make_labs.prepare(tmp_path, [row])
    else:
        make_labs.prepare(tmp_path, [])
        (tmp_path / "Salesforce").symlink_to(request.getfixturevalue("checkpoint"))
        row = lighter(row, shallow(LIGHTER["model_name"], NUM_LAYERS))
    found = make_labs.run(row, tmp_path)

    if "error" in found:
        pytest.fail(found["error"])
    off = {
        (row.name, peak)
        for peak in labs_page.PEAKS
        if abs(found[f"plan_{peak}_bytes"] / labs_page.in_training(found, peak) - 1) > 0.005
    }
    assert off == {known for known in lab_rows.MISSES if known[0] == row.name}
