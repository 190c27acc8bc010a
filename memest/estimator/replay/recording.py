"""Recording of each allocator action of a replay, and its files for PyTorch and Chrome."""

import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from memest.errors import PlanError
from memest.estimator.allocator.blocks import AddressSpace
from memest.estimator.allocator.memory_history import Context, Entry, MemoryHistory
from memest.estimator.allocator.settings import DEFAULT
from memest.estimator.allocator.statistics import CountingAllocator
from memest.estimator.replay.replay import Player, Replayed, Run
from memest.estimator.tensors.storages import FreeTiming, MemKind, Site, StorageTable
from memest.report import Phase
from memest.writing import write_output

KINDS = (
    "params", "buffers", "grads", "optimizer", "activations", "buckets", "gathered", "temporaries",
    "batch", "workspace",
)  # fmt: skip
"""Kinds of bytes, in the order of a stack."""

SIGNS = {
    "alloc": 1, "segment_alloc": 1, "segment_map": 1,
    "free_requested": -1, "segment_free": -1, "segment_unmap": -1,
}  # fmt: skip
"""Sign of an action's change to allocated or reserved bytes; other actions change neither.

A block that another stream still uses is not allocated any more once its free is requested.
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """End of a phase of a step, after the first `index` actions of the allocator."""

    index: int
    step: int
    micro_batch: int
    phase: Phase


class Recording(Player):
    """A replay on one GPU that records each action of the allocator, such as `alloc` or `free`.
    `limit_bytes` is the allocator's limit (None: no limit), and `gpu` a name. The `stack` of an
    action is the id of the storage whose request caused it."""

    plays_repetitions = True

    def __init__(
        self, storages: StorageTable, limit_bytes: int | None, gpu: str, *,
        addresses: AddressSpace | None = None,
    ) -> None:  # fmt: skip
        allocator = CountingAllocator(limit_bytes, addresses)
        super().__init__(allocator, storages)
        self.limit_bytes, self.gpu = limit_bytes, gpu
        self.marks: list[Mark] = []
        self.result = Replayed()
        frames = cache(_frames_of)  # storages of one call site share one list

        def frames_of(storage: int) -> list[dict[str, Any]]:
            is_known = storage >= 0
            return frames(storages.sites[storage], kind_of(storages, storage)) if is_known else []

        self.history = allocator.history = MemoryHistory(
            lambda: self.storage, frames_of, context=Context.ALLOC, max_entries=sys.maxsize
        )
        self.actions = self.history.entries
        self.segments = allocator.described_segments

    def reached(self, step: int, micro_batch: int, phase: Phase) -> None:
        """Append a `Mark` for the end of `phase` of this step and micro-batch."""
        self.marks.append(Mark(len(self.actions), step, micro_batch, phase))


MAX_RECORDED_EVENTS = 4_000_000  # most events of a recording, as of real ones: some GB of memory


def record_run(
    run: Run, limit_bytes: int | None = None, timing: FreeTiming = FreeTiming.LATEST, *,
    gpu: str = "",
) -> Recording:  # fmt: skip
    """Replay `run` with the arguments of `Run.on`, and record its actions. `gpu` is a name for
    files and charts.

    Raises:
        PlanError: the run has more than `MAX_RECORDED_EVENTS` events.
    """
    program, count = run.program, run.num_micro_batches
    step_parts = (part for micro in range(count) for part in program.parts(1, micro, count))
    num_events = len(program.setup) + run.num_steps * sum(len(part.events) for part in step_parts)
    if num_events > MAX_RECORDED_EVENTS:
        raise PlanError(
            f"{num_events} events are too many for a recording",
            hint="simulate fewer `steps`, or fewer micro-batches in each",
        )
    addresses = AddressSpace(ranges_stay=program.ranges_stay)
    recording = Recording(program.storages, limit_bytes, gpu, addresses=addresses)
    recording.result = run.on(limit_bytes, timing, player=recording)
    return recording


def kind_of(storages: StorageTable, storage: int) -> str:
    """Return the purpose of the storage with id `storage`, one of `KINDS`. Tensors of the backward
    or the optimizer are temporary. Those that `empty` makes outside of modules are the batch."""
    kind, site = storages.kinds[storage], storages.sites[storage]
    if kind is not MemKind.ACTIVATIONS:
        return str(kind)
    if site.phase in ("backward", "optimizer"):
        return "temporaries"
    is_batch = not site.module and site.op.startswith("aten.empty")
    return "batch" if is_batch else "activations"


def is_of_segment(action: Entry) -> bool:
    """Return whether `action` gets or returns memory of the GPU, such as a segment. Other actions
    allocate or free a block within a segment."""
    return action.action.startswith("segment")


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of a step, between two points of a `Timeline`."""

    name: str  # `forward`, `backward` or `step`
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Bytes during one step, at its start and after each of its allocations and frees (points)."""

    step: int
    kinds: dict[str, Sequence[int]]  # a value per point for each of `KINDS`, from the step's start
    reserved: Sequence[int]  # a value per point
    spans: tuple[PhaseSpan, ...]
    peak: int  # point with most allocated
    where: str  # module and operator of the peak; "" if the step began with it
    refused_bytes: int  # bytes of the failed request that ended the step; 0 if none failed

    def total(self, point: int) -> int:
        """Return the allocated bytes at position `point` of the lists, over all kinds."""
        return sum(values[point] for values in self.kinds.values())


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One block of a step, allocated from point `start` to before point `stop` of a `Timeline`."""

    storage: int
    num_bytes: int  # bytes of the block, with its rounding
    start: int  # 0 if it was allocated before the step
    stop: int  # number of points if it outlives the step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBlocks:
    """Lifetimes of all blocks of one step, between points of a `Timeline`."""

    step: int
    num_points: int
    blocks: list[Lifetime]  # blocks, ordered by start
    reserved: list[tuple[int, int]]  # (point, bytes reserved from then on)
    spans: tuple[PhaseSpan, ...]
    refused_bytes: int  # bytes of the failed request that ended the step; 0 if none failed


def step_blocks(recording: Recording, step: int | None = None) -> StepBlocks:
    """Return the lifetime of each block of `step`; None is the step with the peak. For a step after
    the last recorded one, return those of the last."""
    step = recording.result.peak.step if step is None else step
    step = min(step, max((mark.step for mark in recording.marks), default=step))
    marks = [mark for mark in recording.marks if mark.step == step]
    later = [mark for mark in recording.marks if mark.step > step]
    begin = marks[0].index if marks else 0  # the step has the actions from `begin` to `end`
    end = later[0].index if later else len(recording.actions)
    is_cut = not later and recording.result.failed is not None
    live: dict[int, Lifetime] = {}  # by address
    blocks: list[Lifetime] = []
    point, point_by_index = 0, {begin: 0}
    reserved_bytes, reserved_from = 0, {0: 0}  # bytes reserved from a point on
    for index, action in enumerate(islice(recording.actions, end), 1):
        sign, is_in_step = SIGNS.get(action.action, 0), index > begin
        next_point = point + 1 if is_in_step else 0
        if is_of_segment(action):
            reserved_bytes += sign * action.block_bytes
            reserved_from[next_point] = reserved_bytes  # at which the segment's block is allocated
        elif sign:
            point = next_point
            if sign > 0:
                live[action.address] = Lifetime(action.stack, action.block_bytes, point, -1)
            else:
                lifetime = live.pop(action.address)
                if is_in_step:
                    blocks.append(replace(lifetime, stop=point))
        point_by_index[index] = point
    blocks += [replace(block, stop=point + 1) for block in live.values()]
    blocks.sort(key=lambda block: block.start)
    return StepBlocks(
        step=step, num_points=point + 1, blocks=blocks,
        reserved=[(start, size) for start, size in reserved_from.items() if start <= point],
        spans=_spans(marks, point_by_index, point, is_cut),
        refused_bytes=recording.result.failed_bytes if is_cut else 0,
    )  # fmt: skip


_STRETCH_BEFORE = {
    Phase.AFTER_FORWARD: "forward",
    Phase.AFTER_BACKWARD: "backward",
    Phase.AFTER_OPTIMIZER_STEP: "step",
}
# the first of the phases is `BEFORE_FORWARD`
_STRETCH_AFTER = dict(zip(Phase, _STRETCH_BEFORE.values(), strict=False))


def timeline(recording: Recording, step: int | None = None) -> Timeline:
    """Return the bytes during `step`; None is the step with the peak. For a step after the last
    recorded one, return those of the last."""
    import numpy as np  # 0.1 s, which commands without a timeline do not need

    record = step_blocks(recording, step)
    changes = np.zeros((len(KINDS), record.num_points + 1), dtype=np.int64)
    for block in record.blocks:
        kind = KINDS.index(kind_of(recording.storages, block.storage))
        changes[kind, block.start] += block.num_bytes
        changes[kind, block.stop] -= block.num_bytes
    levels = changes[:, :-1].cumsum(axis=1)
    peak = int(levels.sum(axis=0).argmax())
    at_peak = [block.storage for block in record.blocks if block.start == peak > 0]
    site = recording.storages.sites[at_peak[0]] if at_peak else None
    reserved_at = dict(record.reserved)
    reserved = [record.reserved[0][1]]
    for point in range(1, record.num_points):
        reserved.append(reserved_at.get(point, reserved[-1]))
    return Timeline(
        step=record.step, kinds=dict(zip(KINDS, levels.tolist(), strict=True)), reserved=reserved,
        spans=record.spans, peak=peak,
        where=", ".join(filter(None, (site.module, site.op))) if site else "",
        refused_bytes=record.refused_bytes,
    )  # fmt: skip


def _spans(
    marks: Sequence[Mark], points: dict[int, int], last: int, is_cut: bool
) -> tuple[PhaseSpan, ...]:
    spans = [
        PhaseSpan(_STRETCH_BEFORE[after.phase], points[before.index], points[after.index])
        for before, after in pairwise(marks)
        if after.phase in _STRETCH_BEFORE
    ]
    if is_cut and marks and marks[-1].phase in _STRETCH_AFTER:
        spans.append(PhaseSpan(_STRETCH_AFTER[marks[-1].phase], points[marks[-1].index], last))
    return tuple(spans)


def torch_snapshot(recording: Recording) -> dict[str, Any]:
    """Return the recording in the form of `torch.cuda.memory._snapshot()`. As in torch, allocations
    and frees have the requested sizes, blocks the rounded ones. The `category` of an entry colours
    it in the timelines of `_memory_viz`."""
    return {
        "segments": recording.segments(list(recording.blocks.values())),
        "device_traces": [list(_trace(recording))],
        "allocator_settings": DEFAULT.as_in_snapshot(),
        "external_annotations": [  # phases, in the form of `record_function` marks
            {"device": 0, "stage": stage, "name": name, "time_us": time}
            for name, start, stop in _slices(recording)
            for stage, time in (("START", start), ("END", stop))
        ],
    }


def write_snapshot(recording: Recording, path: Path) -> None:
    """Write `torch_snapshot` to `path` as a pickle, as `torch.cuda.memory._dump_snapshot` does."""
    write_output(path, pickle.dumps(torch_snapshot(recording), protocol=4))


def write_chrome_trace(recording: Recording, path: Path) -> None:
    """Write `chrome_trace` to `path` as JSON, for https://ui.perfetto.dev and chrome://tracing."""
    write_output(path, json.dumps(chrome_trace(recording)).encode())


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """Return the recording in Chrome's trace format: bytes over time, phases, the script's lines.
    One action is one microsecond: the order is known, the time is not."""
    rows: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "memest: predicted"}},
        {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "phases"}},
    ]
    for name, start, stop in _slices(recording):
        rows.append({"ph": "X", "pid": 0, "tid": 0, "name": name, "ts": start, "dur": stop - start})
    rows += _line_rows(recording)
    allocated, reserved = dict.fromkeys(KINDS, 0), 0
    for time, action in enumerate(recording.actions, 1):
        sign = SIGNS.get(action.action, 0)
        if action.action == "oom":
            args = {"requested_bytes": action.num_bytes}
            rows.append(
                {"ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": time, "name": "OOM", "args": args}
            )
        elif is_of_segment(action):
            reserved += sign * action.block_bytes
            rows.append(_counter("reserved bytes", time, {"reserved": reserved}))
        elif sign:
            allocated[kind_of(recording.storages, action.stack)] += sign * action.block_bytes
            rows.append(_counter("allocated bytes", time, dict(allocated)))
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _line_rows(recording: Recording) -> list[dict[str, Any]]:
    """Return the trace events of the script's lines; each lasts until another line allocates."""
    starts: list[tuple[int, str]] = []
    for time, action in enumerate(recording.actions):
        if action.action == "alloc":
            line = recording.storages.sites[action.stack].where
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
    """Return stack frames, as in torch's snapshot, of storages of `kind` that `site` allocated."""
    names = _frame_names(site, kind)
    frames = [{"filename": filename, "line": 0, "name": name} for filename, name in names]
    lines = [(site.line, "forward" if site.caller else site.phase), (site.caller, site.phase)]
    for line, name in reversed(lines):
        if line:
            file, _, number = line.rpartition(":")
            frames.insert(1, {"filename": file, "line": int(number), "name": name})
    return frames


def _frame_names(site: Site, kind: str) -> Iterator[tuple[str, str]]:
    """Yield (label such as `module`, name) of each frame of storages of `kind`, innermost first."""
    if site.op:
        yield "operator", site.op
    module = site.module
    while module:
        yield "module", module
        module = module.rpartition(".")[0]
    yield "phase", site.phase or "setup"
    yield "held for", kind


def _trace(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yield each action as an entry of torch's snapshot, with its position as the time."""
    pairs = zip(recording.actions, recording.history.trace(), strict=True)
    for index, (action, entry) in enumerate(pairs):
        category = "unknown"  # `_memory_viz` needs one such event if categories are used
        if not is_of_segment(action) and action.stack >= 0:
            category = kind_of(recording.storages, action.stack)
        yield entry | {"time_us": index, "category": category}


_SLICE_NAMES = _STRETCH_BEFORE | {Phase.AFTER_OPTIMIZER_STEP: "optimizer step"}


def _slices(recording: Recording) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, stop) of the setup and of each phase, as positions in the actions."""
    marks = recording.marks
    if marks:
        yield "setup", 0, marks[0].index
    for before, after in pairwise(marks):
        if after.phase in _SLICE_NAMES:
            where = f"step {after.step + 1}"
            if any(mark.micro_batch for mark in marks):
                where += f", micro-batch {after.micro_batch + 1}"
            yield f"{_SLICE_NAMES[after.phase]} ({where})", before.index, after.index
    if marks and marks[-1].index < len(recording.actions):
        yield "unfinished", marks[-1].index, len(recording.actions)
