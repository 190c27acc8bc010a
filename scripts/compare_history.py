"""Compares two histories of an allocator: one recorded on a GPU, one on the virtual GPU.

python scripts/compare_history.py REAL.json.gz SIMULATED.json.gz

Each file holds `[[action, address, size, stream], ...]`, in the order of the entries of
`torch.cuda.memory._snapshot()["device_traces"][0]`. Addresses are not compared.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

Entry = tuple[str, int]
AROUND = 3


def main(real: Path, simulated: Path) -> int:
    """Print how the two differ; 1 if they do."""
    ours, theirs = _read(simulated), _read(real)
    print(f"{len(theirs)} entries on the GPU, {len(ours)} simulated")
    if ours == theirs:
        print("the same actions and sizes in the same order")
        return 0
    pairs = zip(theirs, ours, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    print(f"first difference at {first}:")
    for index in range(max(0, first - AROUND), first + AROUND):
        print(f"  {index:>8}  {_shown(theirs, index):<32}  {_shown(ours, index)}")
    more, fewer = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
    print(f"only simulated: {sum(more.values())}, only on the GPU: {sum(fewer.values())}")
    for action in dict.fromkeys(action for action, _ in theirs):
        same = [e for e in ours if e[0] == action] == [e for e in theirs if e[0] == action]
        print(f"  {action:<16} {'the same order' if same else 'another order'}")
    return 1


def _read(path: Path) -> list[Entry]:
    with gzip.open(path, "rt") as file:
        return [(action, size) for action, _, size, _ in json.load(file)]


def _shown(entries: list[Entry], index: int) -> str:
    return "{} {}".format(*entries[index]) if index < len(entries) else "-"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
