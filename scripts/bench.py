"""How long things take and how much memory they need; prints, asserts nothing.

python scripts/bench.py            # everything, a few minutes
python scripts/bench.py --quick    # the main command and the start-up of the rest
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEMEST = [sys.executable, "-m", "memest"]
MAIN = ["predict", "--model", "blip2-flan-t5-xxl", "--optim", "adam_8bit", "--bs", "2"]
STARTUP = [
    ["--help"],
    ["models"],
    ["gpus"],
    ["predict", "--model", "gpt2", "--bs", "0"],
    ["predict", "--model", "no-such-model"],
    ["predict", "--model", "gpt2", "--optim", "adamv"],
]
SCALING = [
    "gpt2", "gpt2-xl", "llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "qwen2.5-32b",
    "llama-3.1-70b",
]  # fmt: skip


def main(args: list[str]) -> None:
    """Print one line per command: wall seconds (the best of the runs), peak resident memory."""
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    report("main command", MAIN, runs=3)
    traced = json.loads(run([*MAIN, "--json"])[2])
    print(f"{'  of which the library call':<50} {traced['elapsed_s']:6.2f} s")
    for command in STARTUP:
        report(" ".join(command), command, runs=3)
    if "--quick" in args:
        return
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "suite.json"
        lines = (ROOT / "results" / "lab-h200.jsonl").read_text(encoding="utf-8").splitlines()
        plans = [{**json.loads(line)["plan"], "name": json.loads(line)["name"]} for line in lines]
        suite.write_text(json.dumps({"experiments": plans}), encoding="utf-8")
        report("26 plans, default GPUs", ["predict", "--suite", str(suite), "--json"], runs=1)
    for model in SCALING:
        report(f"{model}, batch 1", ["predict", "--model", model, "--gpu", "h200"], runs=1)


def report(label: str, command: list[str], runs: int) -> None:
    """Run `memest` with `command` and print its figures."""
    seconds = []
    for _ in range(runs):
        wall, peak_bytes, _ = run(command)
        seconds.append(wall)
    print(f"{label:<50} {min(seconds):6.2f} s  {peak_bytes / 2**30:5.2f} GiB", flush=True)


def run(command: list[str]) -> tuple[float, int, str]:
    """Wall seconds, the largest resident set of all children so far, and stdout."""
    started = time.perf_counter()
    done = subprocess.run([*MEMEST, *command], capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return wall, peak_bytes, done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
