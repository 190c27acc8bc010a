"""Architectures of transformers, request by request: what an H100 was asked for, and what is here.

    python scripts/compare_architectures.py [NAME/TASK ...]

Runs validation/scripts/architectures.py under `memest run --gpu h100-80gb` for those of
validation/scripts/architectures.json.gz, or for those that are named, and prints which ask for the
same sizes in the same order, or else the first that differ. Left out are the workspaces of cuBLAS,
which a process takes once: another case was the first there.
"""

from __future__ import annotations

import difflib
import gzip
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("MEMEST_TORCH", "2.11")  # the release that the runs were measured with

SCRIPTS = Path(__file__).resolve().parents[1] / "validation" / "scripts"
WORKSPACES = {32 << 20, 1 << 20, 33_562_624, 8_519_680, 8_454_144}
BLOCK_BYTES = 512
PROCESSES = 4
MOST_SHOWN = 4

Found = dict[str, list[int] | str]


def measured() -> Found:
    """The sizes of each case on a GPU, or why it failed."""
    found: Found = json.loads(gzip.decompress((SCRIPTS / "architectures.json.gz").read_bytes()))[
        "cases"
    ]
    return found


def simulated(cases: list[str]) -> Found:
    """The same here."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "memest", "run", "--gpu", "h100-80gb"]
        command += [str(SCRIPTS / "architectures.py"), str(out), "--only", ",".join(cases)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: Found = json.loads(out.read_text())
        return found


def blocks(sizes: list[int]) -> list[int]:
    """Requests of a model, in blocks of the allocator."""
    return [-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes if size not in WORKSPACES]


def differences(ours: list[int], theirs: list[int]) -> list[str]:
    """Where requests differ: what was measured, and what is here."""
    matcher = difflib.SequenceMatcher(None, blocks(theirs), blocks(ours), autojunk=False)
    return [
        f"{matcher.a[a:b][:MOST_SHOWN]} here {matcher.b[c:d][:MOST_SHOWN]}"
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]


def compare(ours: list[int] | str | None, theirs: list[int] | str) -> list[str]:
    """Where a case differs."""
    if isinstance(theirs, str) or isinstance(ours, str) or ours is None:
        return (
            [] if isinstance(ours, str) and isinstance(theirs, str) else [f"{theirs} here {ours}"]
        )
    return differences(ours, theirs)


def main() -> None:
    """Compare all, or those that are named."""
    there = measured()
    chosen = sys.argv[1:] or sorted({name.rpartition("/")[0] for name in there})
    with ThreadPoolExecutor(PROCESSES) as pool:
        shares = [chosen[i::PROCESSES] for i in range(PROCESSES) if chosen[i:]]
        parts = list(pool.map(simulated, shares))
    here = {name: sizes for part in parts for name, sizes in part.items()}
    cases = [name for name in there if name.rpartition("/")[0] in chosen]
    num_equal = 0
    for name in cases:
        found = compare(here.get(name), there[name])
        num_equal += not found
        if found:
            print(f"{name}: {len(found)} differ, the first {found[0][:200]}")
    print(f"{num_equal} of {len(cases)} equal")


if __name__ == "__main__":
    main()
