"""Compares memory that torchtitan has published with memest: validation/torchtitan.json.

    python scripts/compare_torchtitan.py OLD NEW [--rows NAMES...]    # run rows, store, write
    python scripts/compare_torchtitan.py                              # only write the page

OLD and NEW are checkouts of pytorch/torchtitan at the commits of the file. The environment has
torch, torchdata, datasets, tiktoken, blobfile, tyro and torchao. The published figure is the
maximum of `reserved_bytes.all.peak` over all GPUs, which torchtitan logs. A row runs its own
command for three steps, with the data of torchtitan's tests. Its tokenizer has as many words as
the model's. The page is docs/torchrun.md.

The rows of `four` ran on four GPUs under validation/scripts/rank_peaks.py, which also runs here.
Their flavors have to be added to the checkouts: 8B4 and 8B8 are 8B with 4 and 8 layers; `small` is
Llama 4 of 8 layers, width 1024, 16 and 4 heads, 8 experts.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pages
from pages import ROOT

DATA = ROOT / "validation" / "torchtitan.json"
PAGE = ROOT / "docs" / "torchrun.md"
BEGIN, END = "<!-- torchtitan: scripts/compare_torchtitan.py -->\n", "<!-- end of torchtitan -->\n"
STEPS = 3
PEAKS = ROOT / "validation" / "scripts" / "rank_peaks.py"
TOKENIZER = "TOKENIZER"
"""Stands for the tokenizer's file in a command."""

NUM_WORDS = 128_000
"""Words of Llama 3's tokenizer without its 256 special ones."""

GIB = 1 << 30


def main() -> None:
    """Run the rows, store what is reserved, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rows", nargs="*")
    options = parser.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8"))
    if options.checkouts:
        folders = dict(zip(data["benchmarks"], options.checkouts, strict=True))
        for row in data["rows"]:
            if not options.rows or row["name"] in options.rows:
                benchmark = data["benchmarks"][row["benchmark"]]
                row["reserved_bytes"] = reserved(row, benchmark, folders[row["benchmark"]])
                print(row["name"], row["published_gib"], row["reserved_bytes"] / GIB, flush=True)
        for row in data["four"]["rows"]:
            if not options.rows or row["name"] in options.rows:
                row["simulated"] = on_four(row, folders[row["benchmark"]], data)
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    pages.write_part(PAGE, BEGIN, END, table(data) + four_table(data))


def reserved(row: dict[str, Any], benchmark: dict[str, Any], checkout: Path) -> int:
    """Return the most bytes that a rank reserves."""
    command = ["--torch", benchmark["torch"], "--gpu", benchmark["gpu"], "--nproc-per-node", "8"]
    command += ["--nnodes", str(row["gpus"] // 8), "--max-steps", str(STEPS)]
    command += [*benchmark["command"].split(), "--model.tokenizer_path", TOKENIZER]
    ranks = run([*command, *row["options"].split()], checkout)
    return max(int(rank["intervals"]["reserved"]["high_bytes"]) for rank in ranks)


def on_four(row: dict[str, Any], checkout: Path, data: dict[str, Any]) -> dict[str, list[int]]:
    """Return the bytes that each simulated rank of four allocates and reserves at most."""
    script = data["benchmarks"][row["benchmark"]]["command"].split()[0]
    with tempfile.TemporaryDirectory() as folder:
        command = ["--gpu", "h200", "--nproc-per-node", "4", str(PEAKS), folder, script]
        ranks = run([*command, *row["options"].split()], checkout)
    names = "peak_allocated_bytes", "peak_reserved_bytes"
    return {str(rank["rank"]): [rank[name] for name in names] for rank in ranks}


def run(arguments: list[str], checkout: Path) -> list[dict[str, Any]]:
    """Return the report's ranks of a run in `checkout`, with a tokenizer for `TOKENIZER`."""
    with tempfile.TemporaryDirectory() as folder:
        report, tokenizer = Path(folder, "report.json"), Path(folder, "tokenizer.model")
        tokenizer.write_bytes(b"\n".join(words()) + b"\n")
        given = [str(tokenizer) if one == TOKENIZER else one for one in arguments]
        command = [sys.executable, "-m", "memest", "run", "--json", str(report), *given]
        paths = [str(ROOT), str(checkout), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(command, cwd=checkout, env=environment, check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    return found


def words() -> list[bytes]:
    """Return the lines of a tokenizer file: each byte, then strings of letters."""
    letters = b"abcdefghijklmnopqrstuvwxyz "
    longer = (bytes(w) for n in itertools.count(2) for w in itertools.product(letters, repeat=n))
    found = [*(bytes([n]) for n in range(256)), *itertools.islice(longer, NUM_WORDS - 256)]
    return [base64.b64encode(word) + b" %d" % rank for rank, word in enumerate(found)]


def table(data: dict[str, Any]) -> str:
    """Return the Markdown table."""
    rows = []
    for row in data["rows"]:
        made, published = row["reserved_bytes"] / GIB, row["published_gib"]
        gpus = f"{row['gpus']} {data['benchmarks'][row['benchmark']]['label']}"
        error = f"{100 * (made / published - 1):+.2f} %"
        rows.append([row["what"], gpus, f"{published}", f"{made:.2f}", error])
    head = ["Llama 3.1", "GPUs", "published, GiB", "simulated", "error"]
    return f"\n{pages.table(head, rows)}\n"


def four_table(data: dict[str, Any]) -> str:
    """Return the Markdown table of what ran on four GPUs: the largest errors of any rank."""
    rows = []
    for row in data["four"]["rows"]:
        most = max(peaks[1] for peaks in row["measured"].values()) / GIB
        off = [f"{error:+.2f} %" if error else "exact" for error in errors_of(row)]
        rows.append([row["what"], f"{most:.2f}", *off])
    head = [f"torchtitan on four {data['four']['gpu']}s", "GiB", "allocated", "reserved"]
    return f"{pages.table(head, rows)}\n"


def errors_of(row: dict[str, Any]) -> list[float]:
    """Return the largest error of a simulated rank, allocated and reserved, percent."""
    pairs = [(row["simulated"][rank], row["measured"][rank]) for rank in row["simulated"]]
    errors = [[100 * (made[i] / real[i] - 1) for made, real in pairs] for i in range(2)]
    return [max(each, key=abs) for each in errors]


if __name__ == "__main__":
    main()
