"""Architectures of transformers ask for what they asked for on an H100, size by size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parents[2]

CHOSEN = (
    "electra/pretrain",  # a loss of labels that are wider than the logits
    "exaone_moe/causal",  # grouped products
    "layoutlm/mlm",  # lookups by columns of a table
    "mamba2/causal",  # scans of what has gaps
    "qwen3_5_text/causal",  # triangular systems
    "xlnet/causal",  # gradients that lie as their inputs do not
)


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of the scripts in copies of a process that has the libraries."""
    monkeypatch.setattr(subprocess, "run", partial(forked.run, imports=("transformers",)))


@pytest.fixture(scope="module")
def compared() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    import compare_architectures

    yield compare_architectures
    sys.path.remove(str(ROOT / "scripts"))


def test_requests_are_those_of_the_gpu(compared: ModuleType) -> None:
    there, here = compared.measured(), compared.simulated(list(CHOSEN))
    cases = [name for name in there if name.rpartition("/")[0] in CHOSEN]

    assert len(cases) >= 3 * len(CHOSEN) - 2
    assert {name: compared.compare(here.get(name), there[name]) for name in cases} == {
        name: [] for name in cases
    }


def test_a_request_that_is_not_there_is_seen(compared: ModuleType) -> None:
    sizes = compared.measured()["bert/mlm/f32"]

    assert compared.compare([*sizes[:40], 5 << 20, *sizes[40:]], sizes)
    assert compared.compare(sizes[:-1], sizes)
    assert not compared.compare(sizes, sizes)


@pytest.mark.parametrize("case", ["bloom/causal/bf16", "electra/causal/amp"])
def test_a_small_training_has_the_measured_peaks(case: str) -> None:
    scripts = ROOT / "validation/scripts"
    peaks = json.loads((scripts / "architecture_peaks.json").read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "memest", "run", "--gpu", "h100-80gb"]
    done = subprocess.run(
        [*command, str(scripts / "train_architecture.py"), case],
        capture_output=True, text=True, check=True, env={**os.environ, "MEMEST_TORCH": "2.11"},
    )  # fmt: skip

    assert [int(peak) for peak in done.stdout.splitlines()[0].split()] == peaks["cases"][case][
        "measured"
    ]
