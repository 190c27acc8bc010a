"""Scripts on two virtual GPUs beside the same ones on two real GPUs, and the page of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked

if TYPE_CHECKING:
    from scripts import compare_ranks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "validation" / "scripts"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


MEASURED, SIMULATED = read("measured_ranks")["cases"], read("simulated_ranks")["cases"]
CAUSES, MISSES = read("misses")["causes"], read("misses")["ranks"]
QUICK = ("field-deepspeed-2-fp16",)  # tests/replay has runs of DDP and FSDP


@pytest.fixture(scope="module")
def comparison() -> compare_ranks:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import compare_ranks
    finally:
        sys.path.pop(0)
    return compare_ranks


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of the scripts in copies of a process that has the libraries."""
    monkeypatch.setattr(subprocess, "run", forked.run)


def test_every_measured_script_was_simulated() -> None:
    assert SIMULATED.keys() == MEASURED.keys()


def test_every_rank_is_in_the_interval_except_known_misses(comparison: compare_ranks) -> None:
    outside = {
        name
        for name, run in MEASURED.items()
        for key in comparison.FIGURES
        if comparison.outside_percent(run, SIMULATED[name], key) > comparison.BOUND_PERCENT
    }

    assert outside == MISSES.keys()
    assert set(MISSES.values()) <= CAUSES.keys()


def test_the_page_is_the_one_that_the_figures_make(comparison: compare_ranks) -> None:
    """Otherwise: `python scripts/compare_ranks.py --page`."""
    assert comparison.PAGE.read_text(encoding="utf-8") == comparison.page()


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_engine_still_says_what_is_kept(name: str, comparison: compare_ranks) -> None:
    again = comparison.simulate(MEASURED[name])

    assert [again.get(key) for key in comparison.FIGURES] == [
        SIMULATED[name][key] for key in comparison.FIGURES
    ], again


def test_each_wide_interval_has_a_cause_with_a_line_of_torch(comparison: compare_ranks) -> None:
    """The causes are those of the stored intervals: `python scripts/interval_causes.py`."""
    stored = read(comparison.CAUSES)
    causes = comparison.causes_of(SIMULATED, stored)
    others = {name for name, _, _ in causes if MEASURED[name]["origin"] != "ours"}

    assert {name for name, _, _ in causes} == stored.keys() | others
    for (name, key, rank), (_, line) in causes.items():
        if name not in others:
            assert line.startswith("`torch/")
            assert stored[name][rank][key][0] > comparison.NARROW_PERCENT, (name, key)
