"""The smoke set with each release of torch and the libraries of its time.

    python scripts/matrix.py 2.6            # make an environment, run all cases, store them
    python scripts/matrix.py 2.6 qlora      # one case; the stored results of the others stay
    python scripts/matrix.py 2.6 --check    # exit code 1 if a result is not the stored one
    python scripts/matrix.py                # only write the page, in a second

An environment takes 3 to 7 GB while its row runs. Results are in validation/matrix.json, the page
is docs/versions.md. Cases, and the release of torch that is simulated, are those of
scripts/smoke.py. All rows have the same kernels, so a figure differs where the code of a library
differs. The cause of a difference is written into the file by hand; a new difference has `?`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import smoke
from pages import ROOT, table, with_part

STORED = ROOT / "validation" / "matrix.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN = "<!-- matrix: scripts/matrix.py -->\n"
END = "<!-- end of matrix -->\n"
UNKNOWN = "?"
MIB = 1 << 20

LIBRARIES = (
    "torch", "torchvision", "transformers", "lightning", "peft", "accelerate", "bitsandbytes",
    "deepspeed",
)  # fmt: skip
"""Distributions that a row pins, in the order of its numbers in `PINS`."""

PINS = {
    "2.5": "2.5.1 0.20.1 4.51.3 2.5.0.post0 0.14.0 1.2.0 0.45.2 0.16.9",
    "2.6": "2.6.0 0.21.0 4.51.3 2.5.0.post0 0.14.0 1.2.0 0.45.2 0.16.9",
    "2.7": "2.7.1 0.22.1 4.52.4 2.5.1.post0 0.15.2 1.7.0 0.46.0 0.17.1",
    "2.8": "2.8.0 0.23.0 4.55.4 2.5.3 0.17.1 1.10.1 0.47.0 0.17.5",
    "2.9": "2.9.1 0.24.1 4.57.1 2.5.6 0.18.0 1.11.0 0.48.2 0.18.2",
    "2.10": "2.10.0 0.25.0 5.0.0 2.6.0 0.18.1 1.12.0 0.49.1 0.18.5",
    "2.12": "2.12.1 0.27.1 5.10.2 2.6.5 0.19.1 1.13.0 0.49.2 0.19.0",
}
"""Releases of `LIBRARIES` from one time; the oldest row has the bounds of pyproject.toml."""

REQUIREMENTS = {
    **{
        row: tuple(map("==".join, zip(LIBRARIES, pins.split(), strict=True)))
        for row, pins in PINS.items()
    },
    "2.14": ("-c", str(ROOT / "constraints-cuda.txt"), "torch", "torchvision"),
    "2.15": ("torch==2.15.*", *LIBRARIES[1:]),
}
"""Arguments of pip for each row. The developed environment is 2.14; the newest has no pins."""

PYTHON_3_14 = "2.14, Python 3.14"
REQUIREMENTS[PYTHON_3_14] = REQUIREMENTS["2.14"]
"""The developed environment with another Python, which runs this script for that row."""

EXTRA = dict.fromkeys(("2.5", "2.6"), ("numpy==2.2.6",))
"""Further arguments of pip."""

VERSIONS = """
import importlib.metadata, json, platform, sys, torch
found = {name: importlib.metadata.version(name) for name in sys.argv[1:]}
print(json.dumps({"python": platform.python_version(), **found, "torch": torch.__version__}))
"""


def main() -> int:
    """Run a row, or write the page; with `--check`, 1 if a result is not the stored one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("row", nargs="?", choices=REQUIREMENTS)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(smoke.CASES))
    parser.add_argument("--folder", type=Path, help="environment to make, or to use if it is there")
    parser.add_argument("--snapshots", type=Path, help="folder for snapshots, to find causes")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_intermixed_args()  # cases may follow an option
    is_same = True
    if options.row:
        with tempfile.TemporaryDirectory() as folder:
            further = ["--snapshots", str(options.snapshots)] if options.snapshots else []
            further += ["--jobs", str(options.jobs), *options.cases]
            found = run(options.row, options.folder or Path(folder), further)
        rows = load()["rows"]
        kept = rows.get(options.row, {"cases": {}})["cases"]
        is_same = all(
            result(kept.get(name)) == result(case) for name, case in found["cases"].items()
        )
        if options.check:
            print(f"row {options.row}: {'as' if is_same else 'not as'} stored", flush=True)
        else:
            store(options.row, found)
    if not options.check:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(not is_same and options.check)


def run(row: str, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Make the row's environment if `folder` has none, and run scripts/smoke.py there."""
    python = folder / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [python, "-m", "pip", "install"]
        if shutil.which("uv"):  # takes less than half of pip's time
            install = ["uv", "pip", "install", "--python", python]
        packages = [f"{ROOT}[plans]", *REQUIREMENTS[row], *EXTRA.get(row, ())]
        subprocess.run([*install, "-q", "--no-cache-dir", "-e", *packages], check=True)
    with tempfile.TemporaryDirectory() as results:
        file = Path(results, "results.json")
        command = [python, ROOT / "scripts" / "smoke.py", "--json", file, *arguments]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        subprocess.run(command, check=False, env=environment)
        given = json.loads(file.read_text(encoding="utf-8"))
    code = [python, "-c", VERSIONS, *LIBRARIES]
    versions = subprocess.run(code, check=True, capture_output=True, text=True).stdout
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": json.loads(versions),
        "cases": {name: _case(found) for name, found in given.items()},
    }


def _case(found: list[int] | str) -> dict[str, Any]:
    """Return what is stored of a result: the peaks, or the line of the error."""
    if isinstance(found, str):
        lines = found.strip().splitlines()
        errors = [line for line in lines if re.match(r"[\w.]*[a-z]Error: ", line)]
        return {"failed": (errors or lines)[-1].replace(str(ROOT), ".")}
    return {"peaks": found}


def result(case: dict[str, Any] | None) -> Any:
    """Return the part of a stored case that was measured."""
    return case and (case.get("failed") or case["peaks"])


def load() -> dict[str, Any]:
    """Return the stored results."""
    if not STORED.is_file():
        return {"causes": {}, "rows": {}}
    content: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return content


def store(row: str, found: dict[str, Any]) -> None:
    """Store a row. Causes stay where the result is the same; other differences get `?`."""
    content = load()
    before = content["rows"].get(row, {"cases": {}})["cases"]
    for name, case in found["cases"].items():
        old = before.get(name, {})
        if differs(name, case):
            is_same = old and result(old) == result(case)
            case["cause"] = old.get("cause", UNKNOWN) if is_same else UNKNOWN
    found["cases"] = {**before, **found["cases"]}
    rows = {**content["rows"], row: found}
    content["rows"] = {name: rows[name] for name in REQUIREMENTS if name in rows}
    STORED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@cache
def developed() -> dict[str, tuple[int, ...]]:
    """Return the peaks that the developed environment has to have."""
    stored = json.loads(smoke.STORED.read_text(encoding="utf-8"))
    return {name: smoke.expected_peaks(name, stored) for name in smoke.CASES}


def differs(name: str, case: dict[str, Any]) -> bool:
    """Return whether a case failed or has other peaks than the developed environment."""
    return "failed" in case or tuple(case["peaks"]) != developed()[name]


def page(text: str) -> str:
    """Return the text of the page with its tables made again."""
    return with_part(text, BEGIN, END, f"\n{section(load())}\n")


def section(content: dict[str, Any]) -> str:
    """Return the generated part of the page."""
    rows, causes = content["rows"], content["causes"]
    versions = [
        [name, row["date"], *(row["versions"][each] for each in ("python", *LIBRARIES))]
        for name, row in rows.items()
    ]
    cases = [
        [name, " / ".join(f"{peak / MIB:,.1f}" for peak in peaks),
         *(_cell(row["cases"].get(name), peaks) for row in rows.values())]
        for name, peaks in developed().items()
    ]  # fmt: skip
    parts = [
        table(["environment", "date", "Python", *LIBRARIES], versions),
        table(["case", "developed", *rows], cases),
        "".join(f"- **{letter}**: {text}\n" for letter, text in causes.items()),
    ]
    return "\n".join(parts)


def _cell(case: dict[str, Any] | None, expected: tuple[int, ...]) -> str:
    """Return `=`, or how a case differs and the letters of the causes."""
    if case is None:
        return "not run"
    if "cause" not in case:
        return "="
    letters = f"**{case['cause']}**"
    if "failed" in case:
        return f"fails {letters}"
    shares = (f"{found / old - 1:+.2%}" for found, old in zip(case["peaks"], expected, strict=True))
    return f"{' / '.join(shares)} {letters}"


if __name__ == "__main__":
    sys.exit(main())
