"""Pinned environments of public repositories with memest installed there, and one script of each.

    python scripts/pinned.py karpathy/nanochat CHECKOUT ENVIRONMENT    # make, run, store
    python scripts/pinned.py                                           # only write the page

CHECKOUT is the repository at the commit of validation/pinned.json. The interpreter of that file
makes ENVIRONMENT with the repository's requirements (by uv if it is on the path, else by pip). Then
pip installs memest's core. A distribution of another version than before has moved. `prepare` makes
data and dummy checkpoints that the script reads. The page is docs/versions.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pages import ROOT, table, with_part

STORED = ROOT / "validation" / "pinned.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN = "<!-- pinned: scripts/pinned.py -->\n"
END = "<!-- end of pinned -->\n"
GPU = "h100-80gb"
SHOWN = ("torch", "transformers", "numpy")
MIB = 1 << 20


def main() -> int:
    """Run one repository, or write the page; 1 if something moved or the script failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repository", nargs="?")
    parser.add_argument("checkout", nargs="?", type=Path)
    parser.add_argument("environment", nargs="?", type=Path, help="made if it is not there")
    options = parser.parse_args()
    is_good = True
    if options.repository:
        entries = load()
        entry = next(item for item in entries if item["repository"] == options.repository)
        checkout, environment = options.checkout.resolve(), options.environment.resolve()
        found = run(entry, checkout, environment)
        entries = load()  # another run may have stored its result
        next(e for e in entries if e["repository"] == options.repository)["found"] = found
        print(json.dumps(found, indent=1))
        is_good = not found["moved"] and "failed" not in found
        STORED.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(not is_good)


def run(entry: dict[str, Any], checkout: Path, folder: Path) -> dict[str, Any]:
    """Make the environment, install memest there, and run the script."""
    python = folder / "bin" / "python"
    if not python.is_file():
        _make(entry, checkout, folder)
    before = _versions(python)
    before.pop("memest-gpu", None)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-cache-dir", ROOT], check=True)
    after = _versions(python)
    names = [name for name in after if name not in before and name != "memest-gpu"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: after[name] for name in SHOWN if name in after},
        "distributions": len(before),
        "moved": [name for name in before if after.get(name) != before[name]],
        "added": names,
        **_simulate(entry, checkout, folder),
    }


def _make(entry: dict[str, Any], checkout: Path, folder: Path) -> None:
    """Make an environment with the repository's requirements."""
    python = shutil.which(f"python{entry['python']}") or sys.executable
    subprocess.run([python, "-m", "venv", folder], check=True)
    uv = shutil.which("uv")
    inside = folder / "bin" / "python"
    how = [uv, "pip", "install", "-p", str(inside)] if uv else [str(inside), "-m", "pip", "install"]
    subprocess.run([*how, "-q", *entry["install"]], cwd=checkout, check=True)


def _simulate(entry: dict[str, Any], checkout: Path, folder: Path) -> dict[str, Any]:
    """Return the peaks of the script, or the last line of its error."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", **entry.get("environment", {})}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment.update(offline, PATH=path)
    more: dict[str, Any] = {"cwd": checkout, "env": environment}
    subprocess.run(["bash", "-ec", entry.get("prepare", "")], check=True, **more)
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports, "report.json")
        command = [str(folder / "bin" / "memest"), "run", "--gpu", GPU, "--json", str(report)]
        done = subprocess.run(
            [*command, *entry["command"].split()], capture_output=True, text=True, **more
        )
        if done.returncode or not report.is_file():
            print(done.stdout[-4000:], done.stderr[-8000:], file=sys.stderr)
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return {"failed": lines[-1] if lines else f"exit code {done.returncode}"}
        found = json.loads(report.read_text(encoding="utf-8"))
    print(done.stdout[-6000:])
    return {"peaks": [found["peak_allocated_bytes"], found["peak_reserved_bytes"]]}


def _versions(python: Path) -> dict[str, str]:
    """Return the installed distributions of an environment."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name.lower().replace('_', \
'-'): d.version for d in m.distributions()}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def load() -> list[dict[str, Any]]:
    """Return the stored repositories."""
    entries: list[dict[str, Any]] = json.loads(STORED.read_text(encoding="utf-8"))
    return entries


def section(entries: list[dict[str, Any]]) -> str:
    """Return the generated part of the page; repositories that did not run yet are left out."""
    rows = []
    shown = [item for item in entries if "found" in item]
    for entry in sorted(shown, key=lambda item: item["repository"].casefold()):
        found = entry["found"]
        peaks = " / ".join(f"{peak / MIB:,.1f}" for peak in found.get("peaks", ()))
        moved = ", ".join(found["moved"]) or f"0 of {found['distributions']}"
        versions = [found["versions"].get(name, "") for name in SHOWN]
        what = f"`{entry['command']}`"
        result = peaks or f"fails: {found['failed']}"
        cells = [f"{entry['repository']}@{entry['commit'][:9]}", entry["python"], *versions]
        rows.append([*cells, moved, what, result])
    head = ["repository", "Python", *SHOWN, "moved by memest", "script", "MiB"]
    notes = [f"- {e['repository']}: {e['note']}\n" for e in shown if e.get("note")]
    return f"{table(head, rows)}\n{''.join(notes)}"


def page(text: str) -> str:
    """Return the text of the page with its table made again."""
    return with_part(text, BEGIN, END, f"\n{section(load())}\n")


if __name__ == "__main__":
    sys.exit(main())
