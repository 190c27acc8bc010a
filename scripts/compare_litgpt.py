"""Compares LitGPT's published trainings on one A10G with estimates: validation/litgpt_a10g.json.

    python scripts/compare_litgpt.py RECIPES [--write] [NAMES...]

RECIPES is the folder `config_hub/finetune` of a checkout of LitGPT. Each recipe runs for a few
steps under `memest run --gpu a10g`, with dummy checkpoints and rows of Alpaca2k's lengths. The
minutes are those of a step times the steps of the recipe, with validation: 100 batches every 100
steps or fewer. The 100 tokens that are generated each time are left out. `--write` stores what is
found, and writes the table of validation/litgpt.md; `--page` writes what is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pages
import yaml
from pages import ROOT

DATA = ROOT / "validation" / "litgpt_a10g.json"
PAGE = ROOT / "validation" / "litgpt.md"
START, END = "<!-- table: scripts/compare_litgpt.py -->", "<!-- end of LitGPT's table -->"
NUM_ROWS = 2000
"""Rows of Alpaca2k, of which a recipe holds a part back."""

DEFAULT_SPLIT = 0.03847
"""Part that LitGPT holds back where a recipe gives none (`litgpt/data/alpaca_2k.py`)."""

MICRO_BATCHES = 48
"""Micro-batches that a run has about."""


def main() -> None:
    """Simulate the recipes that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipes", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="store the estimates, write the page")
    parser.add_argument("--page", action="store_true", help="write the page of what is stored")
    options = parser.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8"))
    for row in [] if options.page else data["rows"]:
        if not options.names or row["recipe"] in options.names:
            row |= estimated(options.recipes / row["recipe"])
            print(row, flush=True)
            if options.write:
                DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.write or options.page:
        pages.write_part(PAGE, START, END, f"\n{table(data)}")
    print(summary(data["rows"]))


def estimated(recipe: Path) -> dict[str, Any]:
    """Return the minutes of the training, its interval and its peak; empty if it fails."""
    plan = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    train, batch = plan["train"], plan["train"]["global_batch_size"]
    num_steps = steps_of(plan)
    steps_here = max(6, min(12, MICRO_BATCHES * train["micro_batch_size"] // batch))
    with tempfile.TemporaryDirectory() as place:
        folder = plan["checkpoint_dir"]
        _memest(["checkpoint", Path(folder).name, folder, "--format", "litgpt"], place)
        run = ["run", "--gpu", "a10g", "--max-steps", str(steps_here), "--json", "report.json"]
        kind = "finetune_full" if recipe.stem == "full" else "finetune_lora"
        run += ["-m", "litgpt", kind, "--config", str(recipe.resolve())]
        _memest([*run, "--eval.interval", "100000"], place)
        path = Path(place, "report.json")
        report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    time = report.get("times", {}).get("a10g")
    if time is None:
        return {}
    each = ("seconds", "low_seconds", "high_seconds")
    repeated = 1 - time["first_seconds"] / time["seconds"]
    repeated *= 1 + validations_of(plan, recipe.stem)
    minutes = [round(num_steps * repeated * time[name] / 60, 2) for name in each]
    return {"estimated_minutes": minutes, "allocated_bytes": report["peak_allocated_bytes"]}


def steps_of(plan: dict[str, Any]) -> int:
    """Return the optimizer steps of a recipe."""
    train, rows = plan["train"], round(NUM_ROWS * (1 - _split(plan)))
    return int(train["epochs"] * rows // train["global_batch_size"])


def validations_of(plan: dict[str, Any], name: str) -> float:
    """Return the time of a recipe's validations relative to that of its steps.

    A validation is the forward of batches as large as micro-batches (`validate` of
    litgpt/finetune/lora.py). The forward has a third of the operations of a full training's
    micro-batch. It has half of LoRA's, whose frozen weights need no gradient.
    """
    train, settings, num_steps = plan["train"], plan["eval"], steps_of(plan)
    num_batches = -(-round(NUM_ROWS * _split(plan)) // train["micro_batch_size"])
    forwards = num_steps // settings["interval"] * min(num_batches, settings["max_iters"])
    micro_batches = num_steps * train["global_batch_size"] / train["micro_batch_size"]
    return (1 / 3 if name == "full" else 1 / 2) * forwards / micro_batches


def _split(plan: dict[str, Any]) -> float:
    """Return the part of the rows that a recipe holds back."""
    return float(plan["data"]["init_args"].get("val_split_fraction", DEFAULT_SPLIT))


def _memest(arguments: list[str], folder: str) -> None:
    paths = (str(ROOT), str(ROOT / "scripts" / "litgpt_rows"), os.environ.get("PYTHONPATH", ""))
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    settings["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "memest", *arguments]
    subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, check=False)


def table(data: dict[str, Any]) -> str:
    """Return the Markdown table, with a summary."""
    rows = []
    for row in data["rows"]:
        if "allocated_bytes" in row:
            real, gb, times = row["minutes"], row["allocated_bytes"] / 1e9, ["", ""]
            if "estimated_minutes" in row:
                made, low, high = row["estimated_minutes"]
                times = [
                    f"{made:.2f} ({low:.1f} to {high:.1f})",
                    f"{100 * (made / real - 1):+.0f} %",
                ]
            memory = f"{row['gb']:.2f} GB", f"{gb:.2f}", f"{100 * (gb / row['gb'] - 1):+z.1f} %"
            rows.append([row["recipe"].removesuffix(".yaml"), f"{real:.2f} min", *times, *memory])
    head = ["recipe", "published", "estimated", "error", "published", "allocated", "error"]
    return f"{summary(data['rows'])}\n\n{pages.table(head, rows)}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the errors of all recipes, and of those without and with 4-bit weights."""
    sentences = []
    known = [row for row in rows if "estimated_minutes" in row]
    plain = [row for row in known if "qlora" not in row["recipe"]]
    others = [row for row in known if row not in plain]
    for label, found in (
        ("of all kinds", known),
        ("without 4-bit weights", plain),
        ("with 4-bit weights", others),
    ):
        if found:
            errors = [r["estimated_minutes"][0] / r["minutes"] - 1 for r in found]
            middle = 100 * statistics.median(map(abs, errors))
            mean = 100 * statistics.median(errors)
            bounds = [(r["minutes"], *r["estimated_minutes"][1:]) for r in found]
            inside = sum(low <= real <= high for real, low, high in bounds)
            sentences.append(
                f"{len(found)} recipes {label}: median error {middle:.0f} % ({mean:+.0f} % in the"
                f" median with its sign), {inside} inside the interval."
            )
    memory = [abs(r["allocated_bytes"] / 1e9 / r["gb"] - 1) for r in rows if "allocated_bytes" in r]
    if memory:
        sentences.append(f"Memory: median error {100 * statistics.median(memory):.1f} %.")
    return " ".join(sentences)


if __name__ == "__main__":
    main()
