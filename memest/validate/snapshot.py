"""Recordings of the caching allocator: every request of a run, in the form that replays read."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ACTIONS = {
    "alloc": 0, "free_completed": 1, "segment_alloc": 2, "segment_free": 3, "free_requested": 4,
}  # fmt: skip
"""What is kept, and its number in the table. The last says something where a block is used on
several streams alone: from there to `free_completed` it waits for them."""

MAX_EVENTS = 4_000_000
"""Torch drops the oldest beyond it."""


def file_stem(label: str) -> str:
    """A file name for an experiment.

    >>> file_stem("opt-2.7b accumulation, lr x4")
    'opt-2.7b-accumulation-lr-x4'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:80] or "experiment"


def start_recording() -> None:
    """Record from here on, with the Python stack of each request; before the model is built."""
    import torch

    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=MAX_EVENTS
    )


def write_recording(path: Path) -> None:
    """The events so far as a gzipped NumPy array of four rows: action, address, bytes, stream.

    Beside it, as `.pickle`, PyTorch's own snapshot with the stacks, which
    <https://pytorch.org/memory_viz> and `python -m torch.cuda._memory_viz` open.
    """
    import torch

    snapshot = torch.cuda.memory._snapshot()
    trace = snapshot["device_traces"][torch.cuda.current_device()]
    path.parent.mkdir(parents=True, exist_ok=True)
    table = io.BytesIO()
    with gzip.GzipFile(fileobj=table, mode="wb", mtime=0) as file:
        np.save(file, event_table(trace), allow_pickle=False)
    _write(path, table.getvalue())
    _write(snapshot_path(path), pickle.dumps(snapshot, protocol=4))


def snapshot_path(path: Path) -> Path:
    """Where PyTorch's snapshot lies beside a recording.

    >>> snapshot_path(Path("runs/gpt2-fp32.npy.gz")).name
    'gpt2-fp32.pickle'
    """
    return path.with_name(f"{path.name.removesuffix('.npy.gz')}.pickle")


def _write(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def count_events() -> int:
    """Columns of the table if it were written now. Slow; allocates nothing on the GPU."""
    return sum(event["action"] in ACTIONS for event in _trace())


def _trace() -> Any:
    import torch

    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]


def event_table(trace: Iterable[Mapping[str, Any]]) -> npt.NDArray[np.int64]:
    """One column per event; addresses less the lowest, streams by order of appearance.

    Recordings of older versions have no row of streams, and no `free_requested`.

    >>> event_table([{"action": "segment_alloc", "addr": 512, "size": 2048},
    ...              {"action": "alloc", "addr": 1024, "size": 100, "stream": 7}]).tolist()
    [[2, 0], [0, 512], [2048, 100], [0, 1]]
    """
    events = [e for e in trace if e["action"] in ACTIONS]
    lowest = min((e["addr"] for e in events), default=0)
    streams: dict[int, int] = {}
    rows = [
        (
            ACTIONS[e["action"]],
            e["addr"] - lowest,
            e["size"],
            streams.setdefault(e.get("stream", 0), len(streams)),
        )
        for e in events
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4).T
