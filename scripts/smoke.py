"""Smoke test of the installed libraries: compares the peaks of each case with expected ones.

    python scripts/smoke.py              # all cases, two at a time; exit code 1 if one differs
    python scripts/smoke.py compiled     # one case
    python scripts/smoke.py --write      # store the peaks of this environment
    python scripts/smoke.py --json FILE  # also write what each case gave, for scripts/matrix.py

CI runs it with a CUDA build of torch, Triton, torchvision and the newest transformers
(`constraints-cuda.txt`). It simulates the release of torch with which runs were measured. A case
that was measured on an H100 has to have the measured peaks, to the byte. The peaks of the others
are stored in tests/smoke/figures.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "tests" / "smoke" / "figures.json"
SCRIPTS = ROOT / "validation" / "scripts"
TIMEOUT_S = 900
TORCH = "2.11"
"""Release that is simulated: runs were measured with it."""

KEYS = ("peak_allocated_bytes", "peak_reserved_bytes")
Peaks = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A command of memest, and the run on an H100 that it simulates, if there is one."""

    arguments: tuple[str, ...]
    measured: str = ""
    """Name in measured.json, or in measured_ranks.json for several ranks."""


def _script(name: str, *arguments: str, measured: str = "", ranks: int = 1) -> Case:
    options = ("--nproc-per-node", str(ranks)) if ranks > 1 else ()
    found = (SCRIPTS / "field" / name, ROOT / "tests" / "smoke" / name)
    path = next(str(path) for path in found if path.is_file())
    return Case(("run", "--gpu", "h100-80gb", *options, path, *arguments), measured)


PREDICT = ("predict", "--gpu", "h100-80gb", "--model", "gpt2")
_EIGHT_BIT = ("--bits", "8", "--optim", "adamw8bit", "--r", "16")
_ZERO_2 = ("2", "fp16", "--accumulate", "2", "--clip", "1.0")
CASES = {
    "compiled": _script("compiled.py"),
    "checkpointed": _script("checkpointed.py"),
    "bitsandbytes-8-bit": _script("n06_qlora_byhand.py", *_EIGHT_BIT, measured="field-n06-lora8"),
    "qlora": _script("n06_qlora_byhand.py", measured="field-n06-qlora4"),
    "torchvision": _script("resnet50.py"),
    "trainer": _script("n18_hf_trainer.py", measured="field-n18-trainer"),
    "lightning": _script(
        "e105_patchtst_forecast_lightning.py", measured="field-e105-patchtst-forecast-lightning"
    ),
    "accelerate": _script("s08_accelerate.py", measured="field-s08-accelerate"),
    "deepspeed": _script("z01_deepspeed.py", *_ZERO_2, ranks=2, measured="field-deepspeed-2-fp16"),
    "fsdp": _script("d03_fsdp1.py", "full", ranks=2),  # an interval: the measured run is in it
    "predict": Case(PREDICT),
    "predict-deepspeed": Case((*PREDICT, "--devices", "2", "--strategy", "deepspeed_stage_2")),
}


def main() -> int:
    """Run the cases; 1 if one fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--write", action="store_true", help="store peaks that were not measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="peaks, or why a case failed")
    parser.add_argument("--snapshots", type=Path, metavar="FOLDER", help="to compare event streams")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    names = options.names or list(CASES)
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.is_file() else {}
    run_one = partial(run, snapshots=options.snapshots)
    wrong, given = [], {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, (found, seconds) in zip(names, pool.map(run_one, names), strict=True):
            if options.write and not CASES[name].measured and not isinstance(found, str):
                stored[name] = list(found)
            given[name] = found
            if options.json:  # after each case, so that an interrupted run has the others
                options.json.write_text(json.dumps(given), encoding="utf-8")
            expected = expected_peaks(name, stored)
            wrong += [name] if found != expected else []
            print(f"{name:<20}{seconds:5.0f} s  {line_of(found, expected)}", flush=True)
    if options.write:
        STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(f"differ: {', '.join(wrong)}" if wrong else "all as expected")
    return int(bool(wrong))


def run(name: str, snapshots: Path | None = None) -> tuple[Peaks | str, float]:
    """Run a case; return its peaks, or why it failed, and its seconds."""
    started = time.monotonic()
    kind, *rest = CASES[name].arguments
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        to_file = ("--json", str(report)) if kind == "run" else ("--json", "-o", str(report))
        if snapshots:
            to_file += ("--snapshot", str(snapshots.resolve() / f"{name}.pickle"))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "memest", kind, "--torch", TORCH, *to_file, *rest],
                cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no report after {TIMEOUT_S} s", time.monotonic() - started
        seconds = time.monotonic() - started
        if done.returncode or not report.is_file():
            return f"exit code {done.returncode}\n{done.stderr[-2000:]}", seconds
        content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    if content.get("warnings"):
        return f"warnings: {'; '.join(content['warnings'])}", seconds
    return (content[KEYS[0]], content[KEYS[1]]), seconds


def expected_peaks(name: str, stored: dict[str, list[int]]) -> tuple[int, ...]:
    """Return the measured peaks of a case, or those of the developed environment."""
    return measured_peaks(CASES[name].measured) or tuple(stored.get(name, ()))


def measured_peaks(name: str) -> Peaks | None:
    """Return the highest peaks of all ranks and steps of a measured run."""
    for file in ("measured.json", "measured_ranks.json"):
        cases = json.loads((SCRIPTS / file).read_text(encoding="utf-8"))["cases"]
        if name in cases:
            case = cases[name]
            whole = [case[key] for key in KEYS if key in case]  # a script may reset it in between
            steps = [step[-2:] for rank in case.get("ranks", [case.get("steps")]) for step in rank]
            allocated, reserved = zip(*steps, *[whole] if whole else [], strict=True)
            return max(allocated), max(reserved)
    return None


def line_of(found: Peaks | str, expected: tuple[int, ...]) -> str:
    """Return the peaks and whether they are the expected ones, or the failure."""
    if isinstance(found, str):
        return f"failed: {found}"
    peaks = "  ".join(f"{peak:>15,}" for peak in found)
    return f"{peaks}  {'as expected' if found == expected else f'expected: {expected}'}"


if __name__ == "__main__":
    sys.exit(main())
