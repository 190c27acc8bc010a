"""Every check that a change must pass; developers and CI run this and nothing else.

Arguments go to pytest: `python scripts/check.py -m "not gpu and not slow"`. The tests run on all
cores; `-n 0` runs them in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATIC = {
    "format": ["-m", "ruff", "format", "--check", "."],
    "lint": ["-m", "ruff", "check", "."],
    "spelling": ["-m", "codespell_lib"],
    "size": ["tests/repo/test_size.py"],
}
TYPES = ["-m", "mypy"]
"""Takes longer than the others, and runs beside the tests."""

TESTS = [
    *("-m", "pytest", "-q", "-m", "not gpu", "--durations", "15"),
    *("--dist", "loadfile", "--no-loadscope-reorder"),
]
"""A file stays on one core, where its tests share what they have traced; the longest come early."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The cores are taken by processes."""


def main(pytest_args: list[str]) -> int:
    """Run all checks, the tests last; 0 where every one passed."""
    failed = [name for name, command in STATIC.items() if not _passes(name, command)]
    if failed:
        print(f"failed: {', '.join(failed)}; the tests follow", flush=True)
    print("generated files, of which stale ones are no failure:", flush=True)
    subprocess.run([sys.executable, "scripts/regenerate.py", "--check"], cwd=ROOT, check=False)
    types = subprocess.Popen(
        [sys.executable, *TYPES], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    tests = [*TESTS, "-n", str(num_cores()), *pytest_args]
    if not _passes("tests", tests):
        failed.append("tests")
    said, _ = types.communicate()
    print(f"types: {' '.join(TYPES)}\n{said.decode()}", end="", flush=True)
    if types.returncode:
        failed.append("types")
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed", flush=True)
    return 1 if failed else 0


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _passes(name: str, command: list[str]) -> bool:
    print(f"{name}: {' '.join(command)}", flush=True)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **ONE_THREAD}, check=False
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
