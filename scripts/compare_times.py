"""Compares estimated step times with those of an H100: validation/scripts/step_times.json.

    python scripts/compare_times.py [--given FOLDER] [--write] [NAMES...]

Each case runs under `memest run --gpu h100-80gb`. The measured figure is the median of its
steps after the first, each to the end of its kernels. `--write` stores the estimates and writes
the table of docs/time.md; `--page` writes what is stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import compare_scripts as scripts

DATA = scripts.RESULTS / "step_times.json"
PAGE = scripts.ROOT / "docs" / "time.md"
START, END = "<!-- table: scripts/compare_times.py -->", "<!-- end of the table -->"
STEADY = {"origin": "ours", "script": "field/steady.py"}
"""Script of the cases whose memory was not measured."""

LEAST_S = 0.03
"""Steps that are shorter are not counted in the summary: the host decides their time."""


def main() -> None:
    """Simulate the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--given", type=Path, help="folder of scripts that are not ours")
    parser.add_argument("--write", action="store_true", help="store the estimates, write the page")
    parser.add_argument("--page", action="store_true", help="write the page of what is stored")
    options = parser.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8"))
    for name in [] if options.page else options.names or list(data["cases"]):
        found = estimated(name, options.given)
        if found is not None:
            data["cases"][name] |= found
        print(name, found)
    if options.write:
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.write or options.page:
        write_between(START, END, table(data))
    print(summary(data))


def write_between(start: str, end: str, text: str) -> None:
    """Replace what docs/time.md has between two marks."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(start)
    tail = rest.partition(end)[2]
    PAGE.write_text(f"{head}{start}\n{text}\n{end}{tail}", encoding="utf-8")


def estimated(name: str, given: Path | None) -> dict[str, Any] | None:
    """Return the estimate of a case; None if its script is not there."""
    case = scripts.read("measured")["cases"].get(name) or STEADY | {"args": [name, "12"]}
    if not scripts.is_here(case, given):
        return None
    folder = scripts.RESULTS if case["origin"] == "ours" else given
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.json")
        arguments = [argument.replace("{out}", place) for argument in case["args"]]
        command = [sys.executable, "-m", "memest", "run", "--gpu", scripts.GPU]
        command += ["--max-steps", "12", "--json", str(report), str(Path(folder, case["script"]))]
        subprocess.run([*command, *arguments], cwd=place, capture_output=True, check=False)
        times = json.loads(report.read_text(encoding="utf-8"))["times"] if report.exists() else {}
    if scripts.GPU not in times:
        return None
    time = times[scripts.GPU]
    return {"estimated_s": time["seconds"], "bound_by": time["bound_by"]}


def measured_s(case: dict[str, Any]) -> float:
    """Return the median of the measured steps after the first, each with all optimizers."""
    if "median_s" in case:
        return float(case["median_s"])
    count, each = case.get("optimizers", 1), case["measured_s"]
    steps = [sum(each[i : i + count]) for i in range(count - 1, len(each) - count + 1, count)]
    return statistics.median(steps[1:] if count == 1 else steps)


def table(data: dict[str, Any]) -> str:
    """Return the Markdown table, with a summary."""
    lines = [
        summary(data),
        "",
        "| case | measured | estimated | error | bound by | cause of a miss |",
    ]
    lines.append("|---|---|---|---|---|---|")
    rows = [(name, c) for name, c in data["cases"].items() if "estimated_s" in c]
    for name, case in sorted(rows, key=lambda row: measured_s(row[1])):
        real, made = measured_s(case), case["estimated_s"]
        times = f"{1e3 * real:,.1f} ms | {1e3 * made:,.1f} ms | {100 * (made / real - 1):+.0f} %"
        lines.append(f"| {name} | {times} | {case['bound_by']} | {case.get('cause', '')} |")
    return "\n".join(lines)


def summary(data: dict[str, Any]) -> str:
    """Return the errors of each group in a sentence."""
    sentences = []
    for group, label in (
        ("first", "with which the rules were made"),
        ("second", "held out"),
        ("third", "of other kinds, drawn at random and held out"),
        ("fourth", "drawn at random after that, two of which led to rules"),
        ("fifth", "drawn at random later, two of which led to rules, on a host 1.3 times as slow"),
        ("sixth", "written for this, with 26 steps each, on a host 1.4 times as slow"),
    ):
        errors = sorted(
            abs(case["estimated_s"] / measured_s(case) - 1)
            for case in data["cases"].values()
            if case["group"] == group and "estimated_s" in case and measured_s(case) > LEAST_S
        )
        if not errors:
            continue
        near = sum(error <= 0.25 for error in errors)
        sentences.append(
            f"{len(errors)} scripts {label}, steps of 30 ms or more: median error"
            f" {100 * statistics.median(errors):.0f} %, {near} within 25 %."
        )
    return " ".join(sentences)


if __name__ == "__main__":
    main()
