"""Training scripts on all GPUs of a host: their simulation, and the same ranks on real GPUs.

python scripts/compare_host.py --prepare FOLDER [--given GIVEN]
python scripts/compare_host.py --root FOLDER [CASES...]
python scripts/compare_host.py --measured FILE [--events FOLDER CASES...]

The first makes the folders of validation/scripts/parallel_cases.json: scripts, dummy checkpoints,
random data. GIVEN has checkouts of nanoGPT and lit-llama. The second runs cases under `memest run`
and keeps their figures in simulated_host.json. The third adds to measured_host.json what
measure_parallel.py wrote on GPUs. FOLDER has the allocator's events of cases without other figures
(`CASE/events.json.RANK.gz`). `python scripts/compare_parallel.py --page` writes the tables.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "validation" / "scripts"
CASES = FOLDER / "parallel_cases.json"
MEASURED, SIMULATED = FOLDER / "measured_host.json", FOLDER / "simulated_host.json"
GPU = "h200"
TIMEOUT_S = 1800
NUM_RECORDED = 3  # of watch.py
MAX_BESIDE_BYTES = 8 << 30
"""Context, NCCL and kernels of a process. More means that an earlier process still ran."""

CHECKPOINTS = (
    ("open-llama-7b", "litgpt", "checkpoints/openlm-research/open_llama_7b"),
    ("open-llama-3b", "litgpt", "checkpoints/openlm-research/open_llama_3b"),
    ("blip2-opt-2.7b", "hf", "Salesforce/blip2-opt-2.7b"),
)
TOKENS = (("nanoGPT", "data/synth", 50_000), ("lit-llama", "data/shakespeare", 100))
"""Checkout, its data folder, and the number of different tokens."""


def main() -> int:
    """Do what is asked for; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--given", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--events", type=Path)
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    if options.prepare:
        prepare(options.prepare.resolve(), options.given)
    if options.measured:
        add(options.measured)
    if options.events:
        add_events(options.events, options.cases)
    return simulate_all(options.root.resolve(), options.cases) if options.root else 0


def prepare(folder: Path, given: Path | None) -> None:
    """Make the folders in which the cases run."""
    labs, scripts = folder / "labs", folder / "scripts"
    shutil.copytree(ROOT / "docs" / "labs" / "litgpt", labs / "config", dirs_exist_ok=True)
    shutil.copy(ROOT / "docs" / "labs" / "blip2" / "fine_tune.py", labs)
    (labs / "stubs").mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "labs" / "datasets.py", labs / "stubs")
    scripts.mkdir(exist_ok=True)
    for name in ("parallel.py", "library_parallel.py"):
        shutil.copy(FOLDER / name, scripts)
    for model, layout, place in CHECKPOINTS:
        command = [sys.executable, "-m", "memest", "checkpoint", model, place, "--format", layout]
        subprocess.run(command, cwd=labs, check=True, env=environment())
    for name, place, vocabulary in TOKENS if given else ():
        assert given is not None
        shutil.copytree(given / name, folder / name, dirs_exist_ok=True)
        (folder / name / place).mkdir(parents=True, exist_ok=True)
        draw = random.Random(0)
        for part, count in (("train", 400_000), ("val", 100_000)):
            tokens = array("H", (draw.randrange(vocabulary) for _ in range(count)))
            (folder / name / place / f"{part}.bin").write_bytes(tokens.tobytes())


def environment(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment of a process with this checkout, offline."""
    paths = (*packages, str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TOKENIZERS_PARALLELISM": "false",
    }


def simulate_all(root: Path, names: list[str]) -> int:
    """Run cases under memest and keep what is reported; 1 if one failed."""
    cases = json.loads(CASES.read_text(encoding="utf-8"))["cases"]
    num_failed = 0
    for name in names or cases:
        try:
            found = simulate(cases[name], root)
        except RuntimeError as error:
            num_failed += 1
            print(f"{name}: {error}", flush=True)
            continue
        kept = stored(SIMULATED)
        write(SIMULATED, {**kept, name: found})
        print(name, json.dumps(found), flush=True)
    return int(num_failed > 0)


def simulate(case: dict[str, Any], root: Path, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the intervals of each rank, in bytes, and the time of a step, in seconds.

    Raises:
        RuntimeError: the script failed.
    """
    folder = root / case["folder"]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "report.json")
        command = [sys.executable, "-m", "memest", "run", "--torch", "2.11", "--gpu", GPU]
        command += ["--ranks", "all"] if case.get("has_all_ranks") else []
        command += ["--nproc-per-node", str(case.get("world", 4)), "--json", str(path)]
        command += ["--max-steps", str(case["max_steps"]), *more]
        if "limit_gib" in case:
            command += ["--memory-limit", f"{case['limit_gib']}GiB"]
        packages = tuple(str(root / each) for each in case.get("packages", ()))
        done = subprocess.run(
            [*command, *case["command"]], cwd=folder, capture_output=True, text=True, check=False,
            timeout=TIMEOUT_S, env={**environment(packages), **case.get("env", {})},
        )  # fmt: skip
        if not path.is_file():
            raise RuntimeError(done.stderr[-600:])
        report = json.loads(path.read_text(encoding="utf-8"))
    if report["ending"] in ("crashed", "unsupported"):
        raise RuntimeError(f"{report['error']}\n{done.stderr[-1500:]}")
    time = report["times"].get(GPU, {})
    names = ("seconds", "low_seconds", "high_seconds", "first_seconds")
    return {
        "verdict": report["verdict"],
        "ranks": {str(rank["rank"]): figures(rank) for rank in report["ranks"]},
        "seconds": [round(time[name], 5) for name in names] if time else None,
        "unmodelled": report["coverage"]["unmodelled"],
        "elapsed_s": round(report["elapsed_s"], 1),
    }


def figures(rank: dict[str, Any]) -> dict[str, list[int]]:
    """Return the lowest and the highest of each total."""
    return {
        name: [rank["intervals"][name]["low_bytes"], rank["intervals"][name]["high_bytes"]]
        for name in ("allocated", "reserved", "process")
    }


def add(path: Path) -> None:
    """Add measured ranks, which replace older ones."""
    cases = json.loads(CASES.read_text(encoding="utf-8"))["cases"]
    kept = stored(MEASURED)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("status") != "fits":
            continue
        last = cases[row["case"]]["max_steps"] - 1
        peaks = row["reserved_and_used_bytes"]
        reserved, process = peaks[min(last, len(peaks) - 1)]
        reserved = max(reserved, row["steps"][last][2])
        is_alone = process < reserved + MAX_BESIDE_BYTES
        calls = cases[row["case"]].get("optimizer_calls", 1)
        kept.setdefault(row["case"], {})[str(row["rank"])] = {
            "allocated": row["steps"][last][1],
            "reserved": reserved,
            "process": process if is_alone else None,
            "steps": row["steps"][: last + 1],
            "step_seconds": step_seconds(row["step_seconds"], calls) if is_alone else None,
        }
    write(MEASURED, kept)


def add_events(folder: Path, names: list[str]) -> None:
    """Add the peaks of events, with blocks of whole 512 bytes."""
    kept = stored(MEASURED)
    for path in sorted(path for name in names for path in folder.glob(f"{name}/events.json.*.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            allocated, reserved = peaks_of(json.load(file))
        rank = path.name.split(".")[2]
        kept.setdefault(path.parent.name, {})[rank] = {
            "allocated": allocated, "reserved": reserved, "process": None, "step_seconds": None,
        }  # fmt: skip
    write(MEASURED, kept)


def peaks_of(events: list[tuple[str, int, int, int]]) -> tuple[int, int]:
    """Return the highest allocated and reserved bytes of the allocator's events."""
    blocks: dict[int, int] = {}
    allocated = reserved = most_allocated = most_reserved = 0
    for action, num_bytes, address, _ in events:
        if action == "alloc":
            blocks[address] = -(-num_bytes // 512) * 512
            allocated += blocks[address]
        elif action == "free_completed":
            allocated -= blocks.pop(address, 0)
        elif action in ("segment_alloc", "segment_free"):
            reserved += num_bytes if action == "segment_alloc" else -num_bytes
        most_allocated = max(most_allocated, allocated)
        most_reserved = max(most_reserved, reserved)
    return most_allocated, most_reserved


def step_seconds(intervals: list[float], calls: int) -> float:
    """Return the median time of a step, of `calls` calls of the optimizer.

    Events are written after the third call, so intervals begin after the next. Where there are
    none, it is the interval before.
    """
    later = intervals[NUM_RECORDED + calls - 1 :]
    steps = [sum(later[n : n + calls]) for n in range(0, len(later) - calls + 1, calls)]
    return round(statistics.median(steps or intervals[NUM_RECORDED - 2 : NUM_RECORDED - 1]), 5)


HEAD = """
## All ranks of four GPUs, with their step times

Four H200s of one host ran [parallel_cases.json](scripts/parallel_cases.json) with NCCL. The cases
are the labs' own scripts, [library_parallel.py](scripts/library_parallel.py),
[parallel.py](scripts/parallel.py), and public scripts. They have {versions}. Every figure of the
simulation was stored before the first case ran{later}.
Ranks with equal figures share a line.

`litgpt-ddp-421` ran under a limit of 77.83 GiB, the usable memory of an A100 80GB. A limit of time
ended its run, and its peaks are those of the allocator's events.

{counts}

| case | ranks | allocated | simulated | off | reserved | simulated | off |
|---|---|---|---|---|---|---|---|
{memory}

Causes of what is outside:

- `dconf-tp`, `hf-ddp-compile`: the tensors at the peak are the simulated ones, byte by byte. Parts
  of blocks that are too small to split off differ. Addresses of the driver decide between equal
  blocks. The simulated allocator was given the recorded events and the driver's addresses of the
  segments. It then places each of the 3,706 and 3,797 blocks as the GPU did, and both peaks are
  exact ([test_allocator.py](../tests/unit/test_allocator.py)).
- `litgpt-finetune_full`: collectives wait for other ranks longer than the 2 ms that are assumed.
  With 10 ms, ranks 2 and 3 are within their intervals.
- `pp4.zb`: blocks of messages return when the neighbour has taken them.
- `blip2-fsdp`: ranks 0 and 1 reserve more than under the latest free times that are simulated.

`step` is the median time from one optimizer step to the next, after the fourth, of the slowest
rank. The estimates are blind. {estimates} Under `hf-zero1` to
`hf-zero3` each group of parameters counted as a step. The later estimates have the present rules,
which count the Python of FSDP1, FSDP2 and DTensors. {later_estimates}
Those of `ds-zero3` and `hf-zero3` count the Python of ZeRO-3, and the others were made before. No
rule has a time from these steps. The host's work on images in `blip2` does not count.

| case | step, ms | estimated, ms | between | off | later, ms | off |
|---|--:|--:|---|--:|--:|--:|
{times}

To repeat it: `compare_host.py --prepare WORK --given GIVEN` makes the folders, and
`compare_host.py --root WORK` simulates the cases. `measure_parallel.py --root WORK --out FILE` runs
them on the GPUs, and `compare_host.py --measured FILE` adds what it wrote. The figures of two GPUs
come from `torchrun --nproc-per-node 2 watch.py --out FILE --max-steps 4 parallel.py CASE`.
"""

LATER = ", except ranks 1 and 2 of twelve cases"
"""Ranks that were simulated after they were measured, those of cases with `has_all_ranks`."""

VERSIONS = (
    "torch 2.11.0+cu130, transformers 5.17.0, lightning 2.6.6, accelerate 1.15.0, peft 0.21.0,"
    " deepspeed 0.19.8, litgpt 0.5.13, driver 580"
)


def section() -> str:
    """Return the part of validation/parallel.md on the cases of a host."""
    measured, simulated = stored(MEASURED), stored(SIMULATED)
    memory, times, worst = [], [], []
    inside, errors, later = 0, list[float](), list[float]()
    for name, ranks in measured.items():
        if name not in simulated:
            continue
        lines = rank_lines(name, ranks, simulated[name]["ranks"])
        memory += [line for line, _, _ in lines]
        worst += [off for _, off, count in lines for _ in range(count)]
        if all(figures["step_seconds"] for figures in ranks.values()):
            step = max(figures["step_seconds"] for figures in ranks.values())
            later_s = simulated[name].get("later_seconds")
            times.append(time_line(name, step, later_s, *simulated[name]["seconds"]))
            errors.append(abs(repeated(*simulated[name]["seconds"])[0] / step - 1))
            later += [abs(later_s / step - 1)] if later_s else []
            low, high = repeated(*simulated[name]["seconds"])[1:]
            inside += low <= step <= high
    counts = (
        f"{sum(not off for off in worst)} of {len(worst)} ranks are within their intervals,"
        f" {sum(off <= 0.5 for off in worst)} at most 0.5 % outside in both figures."
    )
    estimates = (
        f"Their median error is {100 * statistics.median(errors):.0f} %, and {inside} of"
        f" {len(errors)} steps are in their interval."
    )
    later_estimates = (
        f"Their median error is {100 * statistics.median(later):.0f} % in {len(later)} cases."
    )
    return HEAD.format(
        versions=VERSIONS, counts=counts, memory="\n".join(memory), times="\n".join(times),
        estimates=estimates, later=LATER, later_estimates=later_estimates,
    )  # fmt: skip


def rank_lines(
    name: str, ranks: dict[str, Any], simulated: dict[str, Any]
) -> list[tuple[str, float, int]]:
    """Return the lines of a case, each with its worst distance in percent and its ranks."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for rank in sorted(ranks):
        found = simulated.get(rank, simulated["0"])
        key = tuple((ranks[rank][name], *found[name]) for name in ("allocated", "reserved"))
        groups.setdefault(key, []).append(rank)
    lines = []
    for key, members in groups.items():
        cells, worst = [f"`{name}`", ", ".join(members)], 0.0
        for value, low, high in key:
            off = 100 * (min(max(value, low), high) / value - 1)
            span = f"{low:,}" + (f" to {high:,}" if low < high else "")
            cells += [f"{value:,}", "" if low == high == value else span]
            cells.append(f"{off:+.2f} %" if off else "")
            worst = max(worst, abs(off))
        lines.append((f"| {' | '.join(cells)} |", worst, len(members)))
    return lines


def repeated(seconds: float, low: float, high: float, first: float) -> tuple[float, ...]:
    """Return the estimate and its interval, without first calls of libraries."""
    return tuple(each * (1 - first / seconds) for each in (seconds, low, high))


def time_line(name: str, step: float, later_s: float | None, *estimated: float) -> str:
    """Return the line of a case's step time."""
    seconds, low, high = repeated(*estimated)
    cells = [f"`{name}`", f"{1e3 * step:.1f}", f"{1e3 * seconds:.1f}"]
    cells += [f"{1e3 * low:.1f} to {1e3 * high:.1f}", f"{100 * (seconds / step - 1):+.0f} %"]
    cells += (
        [f"{1e3 * later_s:.1f}", f"{100 * (later_s / step - 1):+.0f} %"] if later_s else ["", ""]
    )
    return f"| {' | '.join(cells)} |"


def stored(path: Path) -> dict[str, Any]:
    """Return the figures of a file by case; none where it does not exist."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def write(path: Path, value: dict[str, Any]) -> None:
    """Write JSON with one case a line."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value[key])}" for key in sorted(value))
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
