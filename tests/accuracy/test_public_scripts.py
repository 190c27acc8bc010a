"""The README's rows of scripts, from what was predicted and measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_counts_the_scripts_as_their_page_does() -> None:
    page = (ROOT / "validation/scripts.md").read_text(encoding="utf-8")
    cases = json.loads((ROOT / "validation/scripts/measured.json").read_text(encoding="utf-8"))
    others = sum(case["origin"] != "ours" for case in cases["cases"].values())
    exact = re.search(r"^(\d+) of \d+ runs are exact to the byte in every figure", page, re.M)
    allocated, reserved = re.findall(r"^\| peak \w+ \| \d+ \| \d+ \| (\d+) \|", page, re.M)
    assert exact is not None

    line = (
        f"| {len(cases['cases'])} scripts on one GPU, {others} by others | {exact[1]} exact in"
        f" every figure; {allocated} within 1 % allocated, {reserved} within 1 % reserved |"
    )
    assert line in README


def test_the_readme_counts_the_public_scripts_that_were_measured() -> None:
    stored = json.loads((ROOT / "validation/scripts/public.json").read_text(encoding="utf-8"))
    rows = [row for row in stored["measured"] if "measured" in row]
    exact = sum(row["predicted"] == row["measured"] for row in rows)
    near = sum(
        all(real and abs(made / real - 1) <= 0.01 for made, real in pairs)
        for pairs in (list(zip(r["predicted"], r["measured"], strict=True)) for r in rows)
    )

    line = f"| {len(rows)} public scripts, predicted blind | {exact} exact; {near} within 1 % |"
    assert line in README


def test_the_readme_counts_the_public_scripts_on_four_gpus() -> None:
    stored = json.loads((ROOT / "validation/scripts/public.json").read_text(encoding="utf-8"))
    rows = [row for row in stored["measured_ranks"] if "ranks" in row]
    num_inside = sum(_outside(row) <= 0.005 for row in rows)

    assert all("cause" in row for row in rows if _outside(row) > 0.005)
    line = (
        f"| {len(rows)} public scripts on four GPUs, predicted blind | {num_inside} inside their"
        " intervals, or 0.5 % outside |"
    )
    assert line in README


def _outside(row: dict[str, Any]) -> float:
    figures = [values for ranks in row["ranks"].values() for values in ranks.values()]
    return max(max(low - real, real - high, 0) / real for low, high, real in figures)
