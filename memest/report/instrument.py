"""One step of a run to hover, zoom and scrub, as a part of a page."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from memest.estimator.replay.recording import KINDS, Recording, StepBlocks, kind_of, step_blocks
from memest.units import counted

MAX_BLOCKS = 500_000  # of a step in a page: 5 MB, which a browser reads in a second
UNIT_BYTES = 512  # unit of blocks in a page: `kMinBlockSize` of CUDACachingAllocator.cpp
_FOLDER = Path(__file__).parent
SCRIPT = (_FOLDER / "instrument.js").read_text(encoding="utf-8")  # script of every page


def script_source() -> str:
    """Return the only script that a page may run, for its content security policy."""
    digest = hashlib.sha256(SCRIPT.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def instrument(recording: Recording, *, limit_bytes: int, gpu: str, sources: dict[str, str]) -> str:
    """Return a timeline, a flame graph and a table of the step of the peak, as HTML.

    `sources` has the text of the script's lines, by `train.py:12`.
    """
    step = step_blocks(recording)
    if len(step.blocks) > MAX_BLOCKS:
        return (
            f"<p>Step {step.step + 1} has {counted(len(step.blocks), 'block')}, more than"
            f" {MAX_BLOCKS:,}, so this page has no timeline; --snapshot writes all of them.</p>"
        )
    data = step_data(recording, step) | {"limit_bytes": limit_bytes, "gpu": gpu}
    lines = {place[4] for place in data["sites"]} | {place[5] for place in data["sites"]}
    data["sources"] = {line: text for line, text in sources.items() if line in lines}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (_FOLDER / "instrument.html").read_text(encoding="utf-8").replace("__DATA__", text)


def step_data(recording: Recording, step: StepBlocks) -> dict[str, Any]:
    """Return the blocks of a step as JSON values; equal sites are one entry."""
    storages = recording.storages
    places: dict[tuple[Any, ...], int] = {}
    sites = []
    for block in step.blocks:
        site = storages.sites[block.storage]
        kind = KINDS.index(kind_of(storages, block.storage))
        key = (kind, site.module, site.op, site.phase, site.line, site.caller)
        sites.append(places.setdefault(key, len(places)))
    sizes = [block.num_bytes for block in step.blocks]
    peak, peak_bytes = _peak(step)
    columns: tuple[Iterable[int], ...] = (
        (block.start for block in step.blocks),
        (block.stop for block in step.blocks),
        sites,
        map(_units, sizes),
        (point for point, _ in step.reserved),
        (_units(size) for _, size in step.reserved),
    )
    return {
        "step": step.step,
        "points": step.num_points,
        "peak": peak,
        "peak_bytes": peak_bytes,
        "refused_bytes": step.refused_bytes,
        "kinds": list(KINDS),
        "spans": [[span.name, span.start, span.stop] for span in step.spans],
        "sites": [list(key) for key in places],
        "rows": len(step.blocks),
        "changes": len(step.reserved),
        "columns": _packed(columns),
    }


def _units(num_bytes: int) -> int:
    units, rest = divmod(num_bytes, UNIT_BYTES)
    assert not rest, f"the allocator has a block of {num_bytes} B"
    return units


def _packed(columns: Iterable[Iterable[int]]) -> str:
    """Return 32-bit integers, little-endian, deflated, as base64."""
    values = np.fromiter(chain.from_iterable(columns), dtype="<u4")
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


def _peak(step: StepBlocks) -> tuple[int, int]:
    """Return the point with most allocated, and its bytes."""
    change = np.zeros(step.num_points + 1, dtype=np.int64)
    for block in step.blocks:
        change[block.start] += block.num_bytes
        change[block.stop] -= block.num_bytes
    levels = change[:-1].cumsum()
    peak = int(levels.argmax())
    return peak, int(levels[peak])
