"""What is kept of predictions is what is predicted: of a few runs that differ in every way that was
measured, and of all of them with `pytest tests/accuracy --every-run`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memest import predict
from memest.validate.compare import plan_of

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import stored_predictions as kept
finally:
    sys.path.pop(0)

RUNS = kept.stored()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = [(name, i) for name, (measured, _) in RUNS.items() for i in range(len(measured))]
    keys = every if metafunc.config.getoption("--every-run") else kept.representative(RUNS)
    metafunc.parametrize("file, index", keys, ids=[f"{f}: {RUNS[f][0][i].name}" for f, i in keys])


@pytest.mark.slow
def test_a_prediction_is_the_one_that_is_kept(file: str, index: int) -> None:
    """Otherwise: `python scripts/make_docs.py`."""
    measured, predictions = RUNS[file]
    expected = predictions[index]

    found = kept.lasting(predict(plan_of(measured[index])))

    assert replace(found, versions=expected.versions) == expected
