"""A replayed run action by action, and PyTorch's and Chrome's files of its actions."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from memest.errors import PlanError
from memest.estimator.allocator.blocks import AddressSpace, Block
from memest.estimator.allocator.caching import CachingAllocator
from memest.estimator.allocator.memory_history import POOL, segment_of, settings_entry
from memest.estimator.allocator.settings import DEFAULT
from memest.estimator.replay.replay import Player, Replayed, Run
from memest.estimator.tensors.storages import FreeTiming, MemKind, Site, StorageTable
from memest.report import Phase
from memest.writing import write_output

KINDS = (
    "params", "buffers", "grads", "optimizer", "activations", "buckets", "gathered", "temporaries",
    "batch", "workspace",
)  # fmt: skip
"""Kinds of bytes, in the order of a stack."""


class Act(StrEnum):
    """Actions of the allocator, by the names of PyTorch's recordings."""

    ALLOC = "alloc"
    FREE = "free"
    FREE_REQUESTED = "free_requested"  # of a block in use on another stream; completed later
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    OOM = "oom"


@dataclass(frozen=True, slots=True)
class Action:
    """Action of the allocator; `storage` is -1 for segments, `address` for refused requests."""

    act: Act
    address: int
    num_bytes: int  # bytes of the block or segment; for an `oom` the requested bytes
    storage: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A probe after `index` actions."""

    index: int
    step: int
    micro_batch: int
    phase: Phase


@dataclass(slots=True)
class Recording:
    """One run of a program on one GPU."""

    storages: StorageTable
    limit_bytes: int | None  # bytes that the allocator could reserve
    gpu: str = ""

    actions: list[Action] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    result: Replayed = field(default_factory=Replayed)
    player: RecordingPlayer | None = None  # with the blocks at the end of the run


MAX_EVENTS = 4_000_000  # limit of events of a recording, as of real ones: some GB of memory


def record_run(
    run: Run,
    limit_bytes: int | None = None,
    timing: FreeTiming = FreeTiming.LATEST,
    *,
    gpu: str = "",
) -> Recording:
    """Replay a run as `Run.on`, and record all actions; `PlanError` if it is too long."""
    program, count = run.program, run.num_micro_batches
    of_step = (part for micro in range(count) for part in program.play(1, micro, count))
    num_events = len(program.setup) + run.num_steps * sum(len(part.events) for part in of_step)
    if num_events > MAX_EVENTS:
        raise PlanError(
            f"{num_events} events are too many for a recording",
            hint="simulate fewer `steps`, or fewer micro-batches in each",
        )
    recording = Recording(program.storages, limit_bytes, gpu)
    player = RecordingPlayer(recording, ranges_stay=program.ranges_stay)
    recording.result = run.on(limit_bytes, timing, player=player)
    return recording


def kind_of(storages: StorageTable, storage: int) -> str:
    """Return the kind of a storage, one of `KINDS`.

    Storages of backward and optimizer are temporary; those before any module runs are the batch.
    """
    kind, site = storages.kinds[storage], storages.sites[storage]
    if kind is not MemKind.ACTIVATIONS:
        return str(kind)
    if site.phase in ("backward", "optimizer"):
        return "temporaries"
    is_batch = not site.module and site.op.startswith("aten.empty")
    return "batch" if is_batch else "activations"


def sign_of(action: Action) -> int:
    """Return the sign of an action's change to allocated or reserved bytes: 1, -1 or 0.

    A block that another stream still uses is not allocated any more once its free is requested.
    """
    if action.act in (Act.ALLOC, Act.SEGMENT_ALLOC):
        return 1
    return 0 if action.act in (Act.OOM, Act.FREE_COMPLETED) else -1


class _RecordedAllocator(CachingAllocator):
    """Allocator that records its actions; `player` has the storage that requests a block.

    An expandable segment that grows is recorded as one that is freed and a larger one.
    """

    player: RecordingPlayer

    def __init__(self, recording: Recording, ranges_stay: bool) -> None:
        super().__init__(recording.limit_bytes, AddressSpace(ranges_stay=ranges_stay))
        self._actions = recording.actions
        self._owners: dict[int, int] = {}  # storages, by the identity of their blocks
        self._ends: dict[int, int] = {}  # of mapped ranges, by their beginning

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        block = super().malloc(num_bytes, stream)
        block.requested_bytes = num_bytes
        self._owners[id(block)] = self.player.storage
        self._add(Act.ALLOC, block)
        return block

    def free(self, block: Block) -> None:
        if id(block) in self._owners:  # else it was deferred, and is complete
            self._add(Act.FREE, block)
            del self._owners[id(block)]
        super().free(block)

    def defer(self, block: Block) -> None:
        self._add(Act.FREE_REQUESTED, block)
        super().defer(block)

    def complete(self, block: Block) -> None:
        if id(block) in self._deferred:
            self._add(Act.FREE_COMPLETED, block)
            del self._owners[id(block)]
        super().complete(block)

    def taken(self, block: Block) -> None:
        self._add_segment(Act.SEGMENT_ALLOC, block.address, block.num_bytes, block.stream)

    def release(self, block: Block) -> None:
        self._add_segment(Act.SEGMENT_FREE, block.address, block.num_bytes, block.stream)
        super().release(block)

    def mapped(self, address: int, num_bytes: int, block: Block) -> None:
        super().mapped(address, num_bytes, block)
        begin, end = address, address + num_bytes
        for first, last in list(self._ends.items()):
            if first == end or last == begin:
                self._drop_range(first, block.stream)
                begin, end = min(begin, first), max(end, last)
        self._add_range(begin, end, block.stream)

    def unmapped(self, address: int, num_bytes: int, block: Block) -> None:
        super().unmapped(address, num_bytes, block)
        end = address + num_bytes
        first = next(f for f, last in self._ends.items() if f <= address and end <= last)
        last = self._drop_range(first, block.stream)
        self._add_range(first, address, block.stream)
        self._add_range(end, last, block.stream)

    def _drop_range(self, first: int, stream: int) -> int:
        last = self._ends.pop(first)
        self._add_segment(Act.SEGMENT_FREE, first, last - first, stream)
        return last

    def _add_range(self, first: int, last: int, stream: int) -> None:
        if first < last:
            self._ends[first] = last
            self._add_segment(Act.SEGMENT_ALLOC, first, last - first, stream)

    def _add(self, act: Act, block: Block) -> None:
        storage = self._owners[id(block)]
        self._actions.append(Action(act, block.address, block.num_bytes, storage, block.stream))

    def _add_segment(self, act: Act, address: int, num_bytes: int, stream: int) -> None:
        self._actions.append(Action(act, address, num_bytes, -1, stream))


class RecordingPlayer(Player):
    """Player that fills `recording` with the actions of a run."""

    plays_repetitions = True

    def __init__(self, recording: Recording, *, ranges_stay: bool = False) -> None:
        allocator = _RecordedAllocator(recording, ranges_stay)
        super().__init__(allocator, recording.storages)
        self.recording = recording
        recording.player = allocator.player = self

    def reached(self, step: int, micro_batch: int, phase: Phase) -> None:
        """Record a probe."""
        mark = Mark(len(self.recording.actions), step, micro_batch, phase)
        self.recording.marks.append(mark)

    def refused(self, storage: int, num_bytes: int) -> None:
        """Record a failed request, which ends the run."""
        stream = self.storages.streams.get(storage, 0)
        self.recording.actions.append(Action(Act.OOM, -1, num_bytes, storage, stream))


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a step, from one probe to the next: points `start` to `stop` of a timeline."""

    name: str  # name: `forward`, `backward` or `step`
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Allocated bytes by kind after every allocation and free of one step."""

    step: int
    kinds: dict[str, Sequence[int]]  # a value per point for each of `KINDS`, from the step's start
    reserved: Sequence[int]
    spans: tuple[Span, ...]
    peak: int  # point with most allocated
    where: str  # module and operator of the peak; empty if the step began with it
    refused_bytes: int  # bytes of the failed request that ended the step; 0 if none failed

    def total(self, point: int) -> int:
        """Return bytes allocated at a point."""
        return sum(values[point] for values in self.kinds.values())


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One block in a step: it is allocated at the points from `start` until before `stop`."""

    storage: int
    num_bytes: int  # bytes of the block, with its rounding
    start: int  # 0 if it was allocated before the step
    stop: int  # number of points if it outlives the step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBlocks:
    """Blocks of one step, whose points are those of `Timeline`."""

    step: int
    num_points: int
    blocks: list[Lifetime]  # blocks, ordered by start
    reserved: list[tuple[int, int]]  # (point, bytes reserved from then on)
    spans: tuple[Span, ...]
    refused_bytes: int  # bytes of the failed request that ended the step; 0 if none failed


def step_blocks(recording: Recording, step: int | None = None) -> StepBlocks:
    """Return the lifetime of every block in one step; None is the step of the peak."""
    step = recording.result.peak.step if step is None else step
    step = min(step, max((mark.step for mark in recording.marks), default=step))
    marks = [mark for mark in recording.marks if mark.step == step]
    later = [mark for mark in recording.marks if mark.step > step]
    begin = marks[0].index if marks else 0  # the step has the actions after it, up to `end`
    end = later[0].index if later else len(recording.actions)
    is_cut = not later and recording.result.failed is not None
    live: dict[int, Lifetime] = {}  # by address
    blocks: list[Lifetime] = []
    points, point, reserved, changes = {begin: 0}, 0, 0, {0: 0}
    for index, action in enumerate(recording.actions[:end], 1):
        sign, is_inside = sign_of(action), index > begin
        if action.act in (Act.SEGMENT_ALLOC, Act.SEGMENT_FREE):
            reserved += sign * action.num_bytes
            changes[point + is_inside] = reserved  # the block of the segment is the next point
        elif sign and action.storage >= 0:
            point += is_inside
            if sign > 0:
                live[action.address] = Lifetime(action.storage, action.num_bytes, point, -1)
            else:
                ended = live.pop(action.address)
                if is_inside:
                    blocks.append(replace(ended, stop=point))
        points[index] = point
    blocks += [replace(block, stop=point + 1) for block in live.values()]
    blocks.sort(key=lambda block: block.start)
    return StepBlocks(
        step=step,
        num_points=point + 1,
        blocks=blocks,
        reserved=[(at, size) for at, size in changes.items() if at <= point],
        spans=_spans(marks, points, point, is_cut),
        refused_bytes=recording.result.failed_bytes if is_cut else 0,
    )


_STRETCH = {
    Phase.AFTER_FORWARD: "forward",
    Phase.AFTER_BACKWARD: "backward",
    Phase.AFTER_OPTIMIZER_STEP: "step",
}
_NEXT = {
    Phase.BEFORE_FORWARD: "forward",
    Phase.AFTER_FORWARD: "backward",
    Phase.AFTER_BACKWARD: "step",
}


def timeline(recording: Recording, step: int | None = None) -> Timeline:
    """Return one step of a recording; None is the step of the peak.

    A strategy's steps are recorded as far as they were traced; later ones are like the last.
    """
    found = step_blocks(recording, step)
    changes = {kind: [0] * (found.num_points + 1) for kind in KINDS}
    for block in found.blocks:
        of_kind = changes[kind_of(recording.storages, block.storage)]
        of_kind[block.start] += block.num_bytes
        of_kind[block.stop] -= block.num_bytes
    kinds: dict[str, Sequence[int]] = {
        kind: list(accumulate(values[:-1])) for kind, values in changes.items()
    }
    totals = [sum(column) for column in zip(*kinds.values(), strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    made = next((b.storage for b in found.blocks if b.start == peak), None) if peak else None
    site = None if made is None else recording.storages.sites[made]
    changed = dict(found.reserved)
    reserved = accumulate(
        range(1, len(totals)),
        lambda before, point: changed.get(point, before),
        initial=found.reserved[0][1],
    )
    return Timeline(
        step=found.step,
        kinds=kinds,
        reserved=list(reserved),
        spans=found.spans,
        peak=peak,
        where=", ".join(filter(None, (site.module, site.op))) if site else "",
        refused_bytes=found.refused_bytes,
    )


def _spans(
    marks: Sequence[Mark], points: dict[int, int], last: int, is_cut: bool
) -> tuple[Span, ...]:
    found = []
    for before, after in pairwise(marks):
        name = _STRETCH.get(after.phase)
        if name:
            found.append(Span(name, points[before.index], points[after.index]))
    if is_cut and marks and marks[-1].phase in _NEXT:
        found.append(Span(_NEXT[marks[-1].phase], points[marks[-1].index], last))
    return tuple(found)


def torch_snapshot(recording: Recording) -> dict[str, Any]:
    """Return the recording in the form of `torch.cuda.memory._snapshot()`.

    As torch records them, allocations and frees have their requested sizes, blocks their own. The
    timelines of `_memory_viz` colour by `category`.
    """
    made = _Snapshot(recording)
    return {
        "segments": made.segments(),
        "device_traces": [list(made.trace())],
        "allocator_settings": settings_entry(DEFAULT),
        "external_annotations": [  # phases, in the form of `record_function` marks
            {"device": 0, "stage": stage, "name": name, "time_us": time}
            for name, start, stop in _slices(recording)
            for stage, time in (("START", start), ("END", stop))
        ],
    }


def write_snapshot(recording: Recording, path: Path) -> None:
    """Pickle the snapshot as `torch.cuda.memory._dump_snapshot` does."""
    write_output(path, pickle.dumps(torch_snapshot(recording), protocol=4))


def write_chrome_trace(recording: Recording, path: Path) -> None:
    """Write `chrome_trace` as JSON, which https://ui.perfetto.dev and chrome://tracing open."""
    write_output(path, json.dumps(chrome_trace(recording)).encode())


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """Return counters of allocated bytes by kind and of reserved bytes; phases and lines as slices.

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
    """Return the trace events of the script's lines; each lasts until another line allocates."""
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


def _frames_of(site: Site, kind: str) -> list[dict[str, Any]]:
    """Return the frames of storages of one call site."""
    frames = [
        {"filename": filename, "line": 0, "name": name}
        for filename, name in _frame_names(site, kind)
    ]
    lines = [(site.line, "forward" if site.caller else site.phase), (site.caller, site.phase)]
    for line, name in reversed(lines):
        if line:
            file, _, number = line.rpartition(":")
            frames.insert(1, {"filename": file, "line": int(number), "name": name})
    return frames


def _frame_names(site: Site, kind: str) -> Iterator[tuple[str, str]]:
    """Return (kind of place, name) from the operator outwards; never empty."""
    if site.op:
        yield "operator", site.op
    module = site.module
    while module:
        yield "module", module
        module = module.rpartition(".")[0]
    yield "phase", site.phase or "setup"
    yield "held for", kind


class _Snapshot:
    """Parts of a snapshot; storages of one call site share one list of frames."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._storages = recording.storages
        self._frames_of = cache(_frames_of)

    def _frames(self, storage: int) -> list[dict[str, Any]]:
        return self._frames_of(self._storages.sites[storage], kind_of(self._storages, storage))

    def trace(self) -> Iterator[dict[str, Any]]:
        """Yield an entry for each action, two for a free that no stream defers."""
        for index, action in enumerate(self._recording.actions):
            entry = self._entry(action, index)
            acts = [action.act] if action.act is not Act.FREE else [
                Act.FREE_REQUESTED, Act.FREE_COMPLETED,
            ]  # fmt: skip
            for act in acts:
                yield entry | {"action": str(act), "stream": action.stream}

    def _entry(self, action: Action, index: int) -> dict[str, Any]:
        storage, recording = action.storage, self._recording
        entry: dict[str, Any] = {
            "action": str(action.act),
            "addr": action.address,
            "size": action.num_bytes,
            "time_us": index,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": POOL,
            "frames": self._frames(storage) if storage >= 0 else [],
            # the page needs one event that is `unknown` where there are categories at all
            "category": kind_of(self._storages, storage) if storage >= 0 else "unknown",
        }
        if action.act is Act.OOM:
            del entry["addr"]
            reserved = recording.result.peak_reserved_bytes
            entry["device_free"] = max(0, (recording.limit_bytes or reserved) - reserved)
        elif storage >= 0:
            entry["size"] = self._storages.num_bytes[storage]
        return entry

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments at the end, each tiled with its blocks, by their addresses."""
        player = self._recording.player
        if player is None:
            return []
        allocator = player.allocator
        live = {
            block.address: storage
            for blocks in (player.blocks, player.deferred)
            for storage, block in blocks.items()
        }
        return [
            segment_of(first, allocator.is_deferred, lambda address: self._frames(live[address]))
            for first in allocator.segments(list(player.blocks.values()))
        ]


_AFTER = _STRETCH | {Phase.AFTER_OPTIMIZER_STEP: "optimizer step"}


def _slices(recording: Recording) -> Iterator[tuple[str, int, int]]:
    """Return (name, start, stop) of setup and phases, by positions in the actions."""
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
