"""A predicted run in the formats of other tools: PyTorch's memory snapshot, Chrome's trace.

The snapshot has the form that `torch.cuda.memory._snapshot()` returns (torch 2.11 and 2.13, the
classes in its docstring), so https://pytorch.org/memory_viz and `torch.cuda._memory_viz` open it as
if it had been recorded. What a simulation cannot know is written as what it is: `time_us` counts
events, not microseconds, and a frame's line is 0 but for that of a script. Frames name what made
the memory, innermost first: operator, line of the script, modules outwards, phase.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from memest.errors import PlanError
from memest.estimator.allocator.caching import SMALL_SEGMENT_BYTES
from memest.estimator.allocator.torch_format import (
    POOL,
    SETTINGS,
    block_entry,
    free_block_entry,
    segment_entry,
)
from memest.estimator.device.storages import Site, StorageTable
from memest.estimator.trace.recording import KINDS, Act, Action, Recording, kind_of, sign_of
from memest.report import Phase


def torch_snapshot(recording: Recording) -> dict[str, Any]:
    """The recording as `torch.cuda.memory._snapshot()` returns one of a real run.

    Sizes of allocations and frees are what was asked for, those of blocks and segments what they
    take, as torch records them. `category` is read by the timelines of `_memory_viz`, which colour
    by it.
    """
    frames = _Frames(recording.storages)
    streams = _streams(recording)
    trace: list[dict[str, Any]] = []
    for index, action in enumerate(recording.actions):
        trace.extend(
            entry | {"stream": streams[index]}
            for entry in _entries(action, index, recording, frames)
        )
    return {
        "segments": _segments(recording, frames, streams),
        "device_traces": [trace],
        "allocator_settings": dict(SETTINGS),
        "external_annotations": _annotations(recording),
    }


def write_snapshot(recording: Recording, path: Path) -> None:
    """Pickle the snapshot as `torch.cuda.memory._dump_snapshot` does.

    Raises:
        PlanError: the file cannot be written.
    """
    _write(path, pickle.dumps(torch_snapshot(recording), protocol=4))


def write_chrome_trace(recording: Recording, path: Path) -> None:
    """Write `chrome_trace` as JSON, which https://ui.perfetto.dev and chrome://tracing open.

    Raises:
        PlanError: the file cannot be written.
    """
    _write(path, json.dumps(chrome_trace(recording)).encode())


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """Counters of allocated bytes by kind and of reserved bytes; phases and lines as slices.

    One event is one microsecond: the order is known, the time is not.
    """
    rows: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "memest: predicted"}},
        {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "phases"}},
    ]
    for name, start, stop in _slices(recording):
        rows.append({"ph": "X", "pid": 0, "tid": 0, "name": name, "ts": start, "dur": stop - start})
    rows += _line_rows(recording)
    held, reserved = dict.fromkeys(KINDS, 0), 0
    for time, action in enumerate(recording.actions, 1):
        sign = sign_of(action)
        if action.act is Act.OOM:
            args = {"requested_bytes": action.num_bytes}
            rows.append(
                {"ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": time, "name": "OOM", "args": args}
            )
        elif action.storage < 0:
            reserved += sign * action.num_bytes
            rows.append(_counter("reserved bytes", time, {"reserved": reserved}))
        elif sign:
            held[kind_of(recording.storages, action.storage)] += sign * action.num_bytes
            rows.append(_counter("allocated bytes", time, dict(held)))
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _line_rows(recording: Recording) -> list[dict[str, Any]]:
    """A track of the script's lines; a slice lasts until another line allocates."""
    starts: list[tuple[int, str]] = []
    for time, action in enumerate(recording.actions):
        if action.act is Act.ALLOC:
            line = recording.storages.sites[action.storage].where
            if not starts or starts[-1][1] != line:
                starts.append((time, line))
    track = {"pid": 0, "tid": 1}
    slices = [
        {"ph": "X", **track, "name": line, "ts": start, "dur": stop - start}
        for (start, line), (stop, _) in pairwise([*starts, (len(recording.actions), "")])
        if line
    ]
    name = {"ph": "M", **track, "name": "thread_name", "args": {"name": "lines of the script"}}
    return [name, *slices] if slices else []


def _counter(name: str, time: int, args: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": 0, "name": name, "ts": time, "args": args}


class _Frames:
    """The frames of storages; those born at one place share one list."""

    def __init__(self, storages: StorageTable) -> None:
        self._storages = storages
        self._made: dict[tuple[Site, str], list[dict[str, Any]]] = {}

    def of(self, storage: int) -> list[dict[str, Any]]:
        site, kind = self._storages.sites[storage], kind_of(self._storages, storage)
        frames = self._made.get((site, kind))
        if frames is None:
            frames = self._made[site, kind] = [
                {"filename": filename, "line": 0, "name": name}
                for filename, name in _places(site, kind)
            ]
            if site.line:
                made = [(site.line, site.phase)]
                if site.caller:
                    made = [(site.line, "forward"), (site.caller, site.phase)]
                frames[1:1] = [_line_frame(*each) for each in made]
        return frames


def _line_frame(line: str, name: str) -> dict[str, Any]:
    file, _, number = line.rpartition(":")
    return {"filename": file, "line": int(number), "name": name}


def _places(site: Site, kind: str) -> Iterator[tuple[str, str]]:
    """(what it is, its name) from the operator outwards; never empty."""
    if site.op:
        yield "operator", site.op
    module = site.module
    while module:
        yield "module", module
        module = module.rpartition(".")[0]
    yield "phase", site.phase or "setup"
    yield "held for", kind


def _entries(
    action: Action, index: int, recording: Recording, frames: _Frames
) -> Iterator[dict[str, Any]]:
    storages = recording.storages
    entry: dict[str, Any] = {
        "action": str(action.act),
        "addr": action.address,
        "size": action.num_bytes,
        "time_us": index,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": POOL,
        "frames": frames.of(action.storage) if action.storage >= 0 else [],
        # the page needs one event that is `unknown` where there are categories at all
        "category": kind_of(storages, action.storage) if action.storage >= 0 else "unknown",
    }
    if action.act is Act.OOM:
        del entry["addr"]
        reserved = recording.result.peak_reserved_bytes
        yield entry | {"device_free": max(0, (recording.limit_bytes or reserved) - reserved)}
    elif action.act is Act.FREE:
        entry["size"] = storages.num_bytes[action.storage]
        yield entry | {"action": "free_requested"}
        yield entry | {"action": "free_completed"}
    else:
        if action.storage >= 0:
            entry["size"] = storages.num_bytes[action.storage]
        yield entry


def _streams(recording: Recording) -> list[int]:
    """The stream of every action; a segment is that of the block which it is asked for."""
    streams, of_segments = recording.storages.streams, dict[int, int]()
    found = []
    for index, action in enumerate(recording.actions):
        stream = streams.get(action.storage, 0)
        if action.act is Act.SEGMENT_ALLOC:
            stream = streams.get(recording.actions[index + 1].storage, 0)
            of_segments[action.address] = stream
        elif action.act is Act.SEGMENT_FREE:
            stream = of_segments[action.address]
        found.append(stream)
    return found


def _segments(
    recording: Recording, frames: _Frames, streams: Sequence[int]
) -> list[dict[str, Any]]:
    """The segments at the end, each tiled with its blocks, in the order of their addresses."""
    segments: dict[int, tuple[int, int]] = {}  # bytes and stream
    live: dict[int, Action] = {}
    for action, stream in zip(recording.actions, streams, strict=True):
        if action.act is Act.SEGMENT_ALLOC:
            segments[action.address] = action.num_bytes, stream
        elif action.act is Act.SEGMENT_FREE:
            del segments[action.address]
        elif action.act in (Act.ALLOC, Act.FREE_REQUESTED):
            live[action.address] = action
        elif action.act in (Act.FREE, Act.FREE_COMPLETED):
            del live[action.address]
    starts = sorted(segments)
    inside: dict[int, list[Action]] = defaultdict(list)
    position = 0
    for address in sorted(live):
        while position + 1 < len(starts) and starts[position + 1] <= address:
            position += 1
        inside[starts[position]].append(live[address])
    return [_segment(start, *segments[start], inside[start], recording, frames) for start in starts]


def _segment(
    start: int,
    num_bytes: int,
    stream: int,
    live: list[Action],
    recording: Recording,
    frames: _Frames,
) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    free_from = start
    for action in live:
        if action.address > free_from:
            blocks.append(free_block_entry(free_from, action.address - free_from))
        blocks.append(
            block_entry(
                action.address,
                action.num_bytes,
                recording.storages.num_bytes[action.storage],
                _STATES[action.act],
                frames.of(action.storage),
            )
        )
        free_from = action.address + action.num_bytes
    if free_from < start + num_bytes:
        blocks.append(free_block_entry(free_from, start + num_bytes - free_from))
    return segment_entry(
        start,
        num_bytes,
        stream=stream,
        is_small=num_bytes == SMALL_SEGMENT_BYTES,
        blocks=blocks,
        frames=[],
    )


_STATES = {Act.ALLOC: "active_allocated", Act.FREE_REQUESTED: "active_pending_free"}


_AFTER = {
    Phase.AFTER_FORWARD: "forward",
    Phase.AFTER_BACKWARD: "backward",
    Phase.AFTER_OPTIMIZER_STEP: "optimizer step",
}


def _slices(recording: Recording) -> Iterator[tuple[str, int, int]]:
    """(name, start, stop) of the setup and of each phase, in actions."""
    marks = recording.marks
    if marks:
        yield "setup", 0, marks[0].index
    for before, after in pairwise(marks):
        if after.phase in _AFTER:
            where = f"step {after.step + 1}"
            if any(mark.micro_batch for mark in marks):
                where += f", micro-batch {after.micro_batch + 1}"
            yield f"{_AFTER[after.phase]} ({where})", before.index, after.index
    if marks and marks[-1].index < len(recording.actions):
        yield "unfinished", marks[-1].index, len(recording.actions)


def _annotations(recording: Recording) -> list[dict[str, Any]]:
    """The phases, as torch writes what `record_function` marks."""
    return [
        {"device": 0, "stage": stage, "name": name, "time_us": time}
        for name, start, stop in _slices(recording)
        for stage, time in (("START", start), ("END", stop))
    ]


def _write(path: Path, content: bytes) -> None:
    """Write beside and rename, so that nothing half-written is ever there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        raise PlanError(
            f"`{path}` cannot be written: {error.strerror}", hint="name another file"
        ) from error
    finally:
        beside.unlink(missing_ok=True)
