"""Ranks of large worlds that one real GPU ran under the fake process group."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked

if TYPE_CHECKING:
    from scripts import compare_parallel

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def comparison() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import compare_parallel

        yield compare_parallel
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of the scripts in copies of a process that has the libraries."""
    monkeypatch.setattr(subprocess, "run", forked.run)


def stored(comparison: compare_parallel) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = json.loads(comparison.MEASURED.read_text(encoding="utf-8"))["rows"]
    return rows, json.loads(comparison.SIMULATED.read_text(encoding="utf-8"))


def test_every_rank_is_within_its_bound(comparison: compare_parallel) -> None:
    rows, kept = stored(comparison)
    off = [comparison.differences(row, kept) for row in rows]

    assert len(off) >= 43
    assert max(abs(allocated) for allocated, _ in off) <= 0.1
    assert max(abs(reserved) for _, reserved in off) <= 1
    assert sum(pair == (0, 0) for pair in off) >= 35


def test_the_page_is_current(comparison: compare_parallel) -> None:
    _, kept = stored(comparison)

    assert comparison.PAGE.read_text(encoding="utf-8") == comparison.page(kept)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tp4", "ep4", "pp4.1f1b"])
def test_a_case_is_simulated_as_stored(comparison: compare_parallel, case: str) -> None:
    """With the installed torch, whose Python code can differ from that of the measured one."""
    rows, kept = stored(comparison)
    world = next(row["world"] for row in rows if row["case"] == case)

    simulated = comparison.simulate(case, world)

    assert simulated.keys() == kept[case].keys()
    for rank, peaks in simulated.items():  # torch 2.13 makes more communicators: no process
        assert peaks[:2] == pytest.approx(kept[case][rank][:2], rel=0.01)
