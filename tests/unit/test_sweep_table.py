"""The rows of a sweep as a table of what fits."""

from __future__ import annotations

from typing import Any

import pytest

from memest.errors import PlanError
from memest.estimator.search.sweep import fits_table
from memest.report import Outcome


def row(verdict: str, **keys: Any) -> dict[str, Any]:
    figures = {
        "margin_bytes": 1,
        "spread_bytes": 0,
        "limit_bytes": 10,
        "peak_reserved_bytes": 9,
        "oom_at": "",
    }
    return {"model_name": "gpt2", **keys, "gpu": "t4", "verdict": verdict, **figures}


ROWS = [
    row("fits", batch_size=1, precision="32-true", use_lora=False),
    row("oom", batch_size=2, precision="32-true", use_lora=False),
    row("", batch_size=3, precision="32-true", use_lora=False),
    row("fits", batch_size=1, precision="32-true", use_lora=True),
]


def test_the_longest_key_is_the_columns_and_the_rest_the_rows() -> None:
    table = fits_table(ROWS)

    assert table.across == "batch size"
    assert table.gpus == ("t4",)
    assert {key: verdict.verdict for key, verdict in table.verdicts.items()} == {
        ("no LoRA", "1"): Outcome.FITS,
        ("no LoRA", "2"): Outcome.OOM,
        ("LoRA", "1"): Outcome.FITS,
    }


def test_figures_are_read_as_a_csv_file_has_them() -> None:
    texts = [{key: str(value) for key, value in row.items()} for row in ROWS]

    assert fits_table(texts).verdicts == fits_table(ROWS).verdicts


def test_any_key_that_varies_may_be_the_columns() -> None:
    assert list(fits_table(ROWS, "use_lora").verdicts) == [
        ("batch 1", "no LoRA"), ("batch 2", "no LoRA"), ("batch 1", "LoRA"),
    ]  # fmt: skip


def test_a_sweep_of_one_point_is_a_table_of_one_cell() -> None:
    assert list(fits_table(ROWS[:1]).verdicts) == [("gpt2", "t4")]


def test_a_key_that_does_not_vary_is_refused() -> None:
    with pytest.raises(PlanError, match="`precision` has one value or none in this sweep") as found:
        fits_table(ROWS, "precision")
    assert found.value.hint == "keys that vary: batch_size, use_lora"
