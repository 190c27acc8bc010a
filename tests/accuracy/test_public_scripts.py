"""The README's row of public scripts, from what was predicted and then measured."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_counts_the_public_scripts_that_were_measured() -> None:
    stored = json.loads((ROOT / "validation/scripts/public.json").read_text(encoding="utf-8"))
    rows = [row for row in stored["measured"] if "measured" in row]
    exact = sum(row["predicted"] == row["measured"] for row in rows)
    near = sum(
        all(real and abs(made / real - 1) <= 0.01 for made, real in pairs)
        for pairs in (list(zip(r["predicted"], r["measured"], strict=True)) for r in rows)
    )

    line = f"| {len(rows)} public scripts, predicted first | {exact} exact; {near} within 1 % |"
    assert line in (ROOT / "README.md").read_text(encoding="utf-8")
