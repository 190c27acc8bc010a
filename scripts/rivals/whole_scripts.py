"""Tools that take a training script: what each says of scripts measured on an H100, and its time.

`measured.json` of `validation/scripts` has the figures of `torch.cuda` on the GPU. memest and
FakeGPU run the script under `watch.py`, which makes the same calls. torch-preflight reads the
script's text. Every command is one process with one thread. Its time is the processor time of the
command, imports included.

FakeGPU and torch-preflight are called in a Python of their own (`--scripts PYTHON`), in which they,
torch and the packages of the scripts are installed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import compare_scripts

from rivals.page import RUNNERS

CASES = (
    "plain-f32",
    "vis-resnet18-f32-nchw",
    "hooks-nonreentrant",
    "zoo-opt-amp",
    "zoo-vit-amp",
    "zoo-whisper-amp",
    "zoo-mixtral-amp",
    "field-gnn-gcn",
    "field-dlrm",
)
"""Scripts of several kinds that a processor computes within minutes."""

READER = "torch_preflight"

TIMEOUT_S = 1800

Figures = dict[str, Any]


def compare(python: Path, given: Path | None, before: Mapping[str, Any]) -> dict[str, Any]:
    """All tools over `CASES`, and the reader over every measured script that is here.

    A case whose script is not here keeps what `before` has.
    """
    cases = compare_scripts.read("measured")["cases"]
    given = given and given.resolve()
    runs = dict(before.get("runs", {}))
    for name in CASES:
        if compare_scripts.is_here(cases[name], given):
            runs[name] = {tool: _run(tool, python, cases[name], given) for tool in RUNNERS}
            print(name, runs[name], file=sys.stderr)
    return {
        "versions": {**_versions(python), "memest": _memest_version()},
        "measured": {name: _peaks(cases[name]) for name in CASES},
        "runs": {name: runs[name] for name in CASES if name in runs},
        "read": _read_all(python, cases, given),
    }


def _peaks(case: Mapping[str, Any]) -> Figures:
    command = " ".join((case["script"], *case["args"]))
    return {"command": command} | {
        f"{kind}_bytes": case[f"peak_{kind}_bytes"] for kind in ("allocated", "reserved")
    }


def _run(tool: str, python: Path, case: Mapping[str, Any], given: Path | None) -> Figures:
    """The peaks that `torch.cuda` reports under the tool, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        watch = str(compare_scripts.RESULTS / "watch.py")
        script = [watch, "--out", str(out), *compare_scripts.watched(case, given, folder)]
        memest = [sys.executable, "-m", "memest", "run", "--gpu", compare_scripts.GPU, *script]
        fakegpu = [str(python), "-m", "fakegpu", "preflight", "--runtime", "fakecuda"]
        fakegpu += ["--profile", "h100", "--report-dir", folder, "--", str(python), *script]
        command = {"memest": memest, "fakegpu": fakegpu}[tool]
        cpu_seconds, done = _timed(command, compare_scripts.environment(case, given), folder)
        if not out.is_file():
            return {"error": _last_line(done.stderr), "cpu_seconds": cpu_seconds}
        figures = json.loads(out.read_text(encoding="utf-8"))
    if figures["status"] != "fits":
        return {"error": figures["error"][:120], "cpu_seconds": cpu_seconds}
    return {
        "allocated_bytes": figures["peak_allocated_bytes"],
        "reserved_bytes": figures["peak_reserved_bytes"],
        "cpu_seconds": cpu_seconds,
    }


def _read_all(
    python: Path, cases: Mapping[str, Mapping[str, Any]], given: Path | None
) -> dict[str, Figures]:
    """The reader's total of each script, with the reserved peak of its first measured command."""
    found: dict[str, Figures] = {}
    for case in cases.values():
        if case["origin"] != "ours" or case["script"] in found:
            continue
        command = [str(python), "-m", READER, "estimate", str(_place(case, given))]
        command += ["--gpu", "h100-80gb", "--format", "json"]
        _, done = _timed(command, compare_scripts.environment(case, given), None)
        try:
            report = json.loads(done.stdout)
        except ValueError:
            found[case["script"]] = {"error": _last_line(done.stderr)}
            continue
        found[case["script"]] = {
            "model": report["model"]["name"].rpartition(":")[2] if report["resolved"] else "",
            "total_bytes": report["total_bytes"],
            "activations_bytes": report["breakdown"]["activations"],
            "reserved_bytes": case["peak_reserved_bytes"],
        }
    return found


def _place(case: Mapping[str, Any], given: Path | None) -> Path:
    return Path(compare_scripts.watched(case, given, "")[0])


def _timed(
    command: list[str], environment: Mapping[str, str], folder: str | None
) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a command with one thread; return its processor time in seconds and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        timeout=TIMEOUT_S,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(seconds, 1), done


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:120] if lines else "no output"


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in ('fakegpu', 'torch-preflight', 'torch')}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {name.replace("-", "_"): text for name, text in json.loads(done.stdout).items()}


def _memest_version() -> str:
    import memest

    return memest.__version__
