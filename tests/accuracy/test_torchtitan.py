"""Memory that torchtitan has published: the page's table and the README's row, as stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_and_the_readme_have_the_published_figures() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import compare_torchtitan
    finally:
        sys.path.pop(0)
    data = json.loads((ROOT / "validation/torchtitan.json").read_text(encoding="utf-8"))
    rows = data["rows"]
    errors = [row["reserved_bytes"] / (1 << 30) / row["published_gib"] - 1 for row in rows]
    near = sum(abs(error) <= 0.002 for error in errors)
    sizes = sorted({row["gpus"] for row in rows})

    tables = compare_torchtitan.table(data) + compare_torchtitan.four_table(data)
    assert tables in (ROOT / "docs/torchrun.md").read_text(encoding="utf-8")
    line = (
        f"| {len(rows)} trainings of torchtitan on {sizes[0]} to {sizes[-1]} GPUs |"
        f" {near} within 0.2 % reserved; worst {100 * min(errors, key=lambda e: -abs(e)):.0f} % |"
    )
    assert line in (ROOT / "README.md").read_text(encoding="utf-8")
