"""Recordings of the caching allocator: every request of a run, in the form that replays read."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ACTIONS = {"alloc": 0, "free_completed": 1, "segment_alloc": 2, "segment_free": 3}
"""What is kept, and its number in the table; with one stream the rest says nothing more."""

MAX_EVENTS = 4_000_000
"""Torch drops the oldest beyond it."""


def file_stem(label: str) -> str:
    """A file name for an experiment.

    >>> file_stem("opt-2.7b accumulation, lr x4")
    'opt-2.7b-accumulation-lr-x4'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:80] or "experiment"


def start_recording() -> None:
    """Record from here on; before the model is built."""
    import torch

    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=MAX_EVENTS
    )


def write_recording(path: Path) -> None:
    """The events so far as a gzipped NumPy array of three rows: action, address, bytes."""
    import torch

    traces = torch.cuda.memory._snapshot()["device_traces"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        np.save(file, event_table(traces[0]), allow_pickle=False)


def event_table(trace: Iterable[Mapping[str, Any]]) -> npt.NDArray[np.int64]:
    """One column per event; addresses less the lowest.

    >>> event_table([{"action": "segment_alloc", "addr": 512, "size": 2048},
    ...              {"action": "alloc", "addr": 1024, "size": 100}]).tolist()
    [[2, 0], [0, 512], [2048, 100]]
    """
    events = [(ACTIONS[e["action"]], e["addr"], e["size"]) for e in trace if e["action"] in ACTIONS]
    lowest = min((address for _, address, _ in events), default=0)
    rows = [(action, address - lowest, size) for action, address, size in events]
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T
