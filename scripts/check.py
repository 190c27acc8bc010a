"""Every check that a change must pass; developers and CI run this and nothing else.

Arguments go to pytest: `python scripts/check.py -m "not gpu and not slow"`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATIC = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "spelling": ["codespell_lib"],
    "types": ["mypy"],
}
TESTS = ["pytest", "-q", "-m", "not gpu"]


def main(pytest_args: list[str]) -> int:
    """Run all checks, the tests last; 0 where every one passed."""
    failed = [name for name, command in STATIC.items() if not _passes(name, command)]
    if failed:
        print(f"failed: {', '.join(failed)}; the tests follow", flush=True)
    passed = _passes("tests", [*TESTS, *pytest_args])
    return 0 if passed and not failed else 1


def _passes(name: str, command: list[str]) -> bool:
    print(f"{name}: {' '.join(command)}", flush=True)
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
