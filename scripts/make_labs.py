"""The labs, run command by command on a virtual GPU, and docs/labs.md from what came out.

python scripts/make_labs.py [--jobs N] [--page] [NAMES...]

Runs every command of `lab_rows.py`, or those whose name holds one of NAMES, in a folder with
dummy checkpoints and random data. Stores the figures in validation/labs.json and writes the page.
With `--page` only the page is written. All of them take minutes. LitGPT must be installed, and
the older Lightning of one row is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lab_rows
import labs_page

os.environ.setdefault("MEMEST_TORCH", "2.11")  # the release that the runs were measured with

ROOT = lab_rows.ROOT
FIGURES = ROOT / "validation" / "labs.json"
PAGE = ROOT / "docs" / "labs.md"
SCRIPTS = ROOT / "docs" / "labs"
TIMEOUT_S = 600

PRINTED = re.compile(r"tokens \((\d+), (\d+)\): allocated ([\d.]+) GiB, reserved ([\d.]+) GiB")
"""What `one_gpu.py` says after each forward."""


def main() -> int:
    """Run what is asked for; 1 where a command could not be run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {}
    rows = [] if options.page else lab_rows.rows()
    rows = [r for r in rows if not options.names or any(n in r.name for n in options.names)]
    has_failed = False
    if rows:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
            prepare(Path(folder), rows)
            for row, figures in zip(
                rows, pool.map(lambda r: run(r, Path(folder)), rows), strict=True
            ):
                has_failed |= "error" in figures
                print(row.name, json.dumps(figures), flush=True)
                kept[row.name] = figures
    names = [row.name for row in lab_rows.rows()]
    lines = [f" {json.dumps(name)}: {json.dumps(kept[name])}" for name in names if name in kept]
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    PAGE.write_text(labs_page.page_of(lab_rows.rows(), kept), encoding="utf-8")
    return int(has_failed)


def prepare(folder: Path, rows: Sequence[lab_rows.Row]) -> None:
    """Fill the folder in which the commands are typed: scripts, recipes, dummy checkpoints."""
    (folder / "config").symlink_to(SCRIPTS / "litgpt")
    for release in {row.lightning for row in rows if row.lightning}:
        target = folder / f"lightning-{release}"
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, f"lightning=={release}"], check=True, stdout=subprocess.DEVNULL)
    for script in (SCRIPTS / "blip2").glob("*.py"):
        (folder / script.name).symlink_to(script)
    arguments = [argument for row in rows for argument in row.target]
    has_litgpt = any(row.lab in (lab_rows.LITGPT, lab_rows.FOUR) for row in rows)
    for layout, names in lab_rows.models().items():
        for name in names:
            if has_litgpt if layout == "litgpt" else f"model_name={name}" in arguments:
                place = f"checkpoints/{name}" if layout == "litgpt" else name
                memest(["checkpoint", name, place, "--format", layout], folder).check_returncode()


def memest(
    arguments: Sequence[str], folder: Path, first: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command line of this checkout, offline, with random rows as the data set.

    Args:
        arguments: after `memest`.
        folder: where it runs.
        first: folder whose packages go before the installed ones.
    """
    given = os.environ.get("PYTHONPATH", "")
    paths = (str(ROOT), str(ROOT / "scripts" / "labs"), first, given)
    return subprocess.run(
        [sys.executable, "-m", "memest", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "TOKENIZERS_PARALLELISM": "false",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def run(row: lab_rows.Row, folder: Path) -> dict[str, Any]:
    """What the report says of a command, and what the run cost."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "report.json")
        command = [row.command[0], "--json", str(path), *row.command[1:]]
        started = time.perf_counter()
        done = memest(command, folder, row.packages)
        seconds = time.perf_counter() - started
        if not path.is_file():
            return {"error": done.stderr.strip()[-300:]}
        figures = figures_of(json.loads(path.read_text(encoding="utf-8")))
    printed = [list(map(float, found)) for found in PRINTED.findall(done.stdout)]
    if printed:
        figures["printed"] = printed[-1]
    return {**figures, **predicted(row, folder), "seconds": round(seconds)}


def predicted(row: lab_rows.Row, folder: Path) -> dict[str, int]:
    """The two peaks of the row as a plan, where it is one."""
    if not row.plan:
        return {}
    with tempfile.TemporaryDirectory() as place:
        plan, report = Path(place, "plan.json"), Path(place, "report.json")
        plan.write_text(json.dumps(row.plan), encoding="utf-8")
        command = ["predict", "--config", str(plan), "--json", "-o", str(report)]
        memest(command, folder).check_returncode()
        return peaks_of_plan(json.loads(report.read_text(encoding="utf-8")))


def peaks_of_plan(report: Mapping[str, Any]) -> dict[str, int]:
    """What the page needs of a prediction."""
    return {
        "plan_allocated_bytes": report["peak_allocated_bytes"],
        "plan_reserved_bytes": report["peak_reserved_bytes"],
    }


def figures_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of a report."""
    if report["ending"] in ("crashed", "unsupported"):
        return {"error": report["error"]}
    figures = {
        "verdict": report["verdict"],
        "allocated_bytes": report["peak_allocated_bytes"],
        "reserved_bytes": report["peak_reserved_bytes"],
        "limit_bytes": report["limit_bytes"],
        "unmodelled": report["coverage"]["unmodelled"],
    }
    for peak in ("allocated", "reserved"):
        phases = [p[f"peak_{peak}_bytes"] for p in report["phases"] if p["name"] != "setup"]
        if max(phases) < figures[f"{peak}_bytes"]:  # building the model takes more
            figures[f"training_{peak}_bytes"] = max(phases)
    return figures


if __name__ == "__main__":
    status = main()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"largest process {usage.ru_maxrss / 2**20:.2f} GiB")
    sys.exit(status)
