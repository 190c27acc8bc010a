"""Scripts on the virtual GPU beside the same ones on a real GPU, and the page that shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked

if TYPE_CHECKING:
    from scripts import compare_scripts

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "validation" / "scripts"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


MEASURED, SIMULATED = read("measured")["cases"], read("simulated")["cases"]
CAUSES, MISSES = read("misses")["causes"], read("misses")["cases"]
FIGURES = ("status", "peak_allocated_bytes", "peak_reserved_bytes", "end_allocated_bytes", "steps")
QUICK = ("enc-gru", "enc-lstm1", "zoo-mamba-amp", "len-cap", "pref-fused")


@pytest.fixture(scope="module")
def comparison() -> compare_scripts:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import compare_scripts
    finally:
        sys.path.pop(0)
    return compare_scripts


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of the scripts in copies of a process that has the libraries."""
    monkeypatch.setattr(subprocess, "run", partial(forked.run, imports=("transformers.trainer",)))


def figures_of(run: Mapping[str, Any]) -> dict[str, Any]:
    return {key: run[key] for key in FIGURES}


def test_every_measured_script_was_simulated() -> None:
    assert SIMULATED.keys() == MEASURED.keys()
    failed = {name for name, run in SIMULATED.items() if run["status"] == "failed"}
    assert failed == {name for name, cause in MISSES.items() if cause in ("refused", "stopped")}


def test_a_script_runs_out_of_memory_where_it_did() -> None:
    assert {n for n, run in SIMULATED.items() if run["status"] == "oom"} == {
        n for n, run in MEASURED.items() if run["status"] == "oom"
    }


def test_scripts_are_simulated_to_the_byte_except_known_misses() -> None:
    off = {n for n, run in MEASURED.items() if figures_of(SIMULATED[n]) != figures_of(run)}

    assert off == MISSES.keys()
    assert set(MISSES.values()) <= CAUSES.keys()


def test_the_page_is_the_one_that_the_figures_make(comparison: compare_scripts) -> None:
    """Otherwise: `python scripts/compare_scripts.py --page`."""
    assert comparison.PAGE.read_text(encoding="utf-8") == comparison.page()


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_engine_still_says_what_is_kept(name: str, comparison: compare_scripts) -> None:
    assert MEASURED[name]["origin"] == "ours"
    again = comparison.simulate(MEASURED[name])

    assert figures_of(again) == figures_of(SIMULATED[name]), again["error"]
