"""A replayed run action by action: what the allocator did, for whom, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from memest.errors import PlanError
from memest.estimator.allocator.addresses import AddressSpace
from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.settings import DEFAULT, AllocatorSettings
from memest.estimator.device.storages import MemKind, Returns, StorageTable
from memest.estimator.trace.program import Program
from memest.estimator.trace.replay import Replayed, replay
from memest.report import Phase

KINDS = (
    "params", "buffers", "grads", "optimizer", "activations", "buckets", "gathered", "temporaries",
    "batch", "workspace",
)  # fmt: skip
"""What a byte is held for, in the order of a stack."""


class Act(StrEnum):
    """What the allocator did, by the names of PyTorch's recordings."""

    ALLOC = "alloc"
    FREE = "free"
    FREE_REQUESTED = "free_requested"
    """Of a block that another stream still uses; `FREE_COMPLETED` follows once that is done."""

    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    OOM = "oom"


@dataclass(frozen=True, slots=True)
class Action:
    """One action; a segment and a refused request have no storage or no address (-1)."""

    act: Act
    address: int
    num_bytes: int
    """Of the block or segment; of an `oom` what was asked for."""

    storage: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A probe: `index` actions were done before it."""

    index: int
    step: int
    micro_batch: int
    phase: Phase


@dataclass(slots=True)
class Recording:
    """One run of a program on one GPU."""

    storages: StorageTable
    limit_bytes: int | None
    """What the allocator could reserve."""

    gpu: str = ""

    actions: list[Action] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    result: Replayed = field(default_factory=Replayed)


MAX_EVENTS = 4_000_000
"""Of a recording, as of those of real runs; some GB of memory, and more than a page shows."""


def record_run(
    program: Program,
    *,
    num_steps: int,
    num_micro_batches: int,
    limit_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT,
    is_share: bool = False,
    returns: Returns = Returns.LATEST,
) -> Recording:
    """Replay a run as `replay` does, and write down every action of the allocator.

    Raises:
        PlanError: the run is too long to be written down.
    """
    num_events = _num_events(program, num_steps, num_micro_batches)
    if num_events > MAX_EVENTS:
        raise PlanError(
            f"{num_events} events are too many for a recording",
            hint="simulate fewer `steps`, or fewer micro-batches in each",
        )
    recording = Recording(program.storages, limit_bytes)
    recording.result = replay(
        program,
        num_steps=num_steps,
        num_micro_batches=num_micro_batches,
        limit_bytes=limit_bytes,
        observer=RecordingObserver(recording, ranges_stay=program.ranges_stay),
        settings=settings,
        is_share=is_share,
        returns=returns,
    )
    return recording


def _num_events(program: Program, num_steps: int, num_micro_batches: int) -> int:
    """Births and deaths of a run, all repetitions included."""

    def of(micro: int) -> int:
        return sum(len(part.events) for part in program.play(1, micro, num_micro_batches))

    middle = of(1) * (num_micro_batches - 2) if num_micro_batches > 2 else 0
    last = of(num_micro_batches - 1) if num_micro_batches > 1 else 0
    return len(program.setup) + num_steps * (of(0) + middle + last)


def kind_of(storages: StorageTable, storage: int) -> str:
    """What of `KINDS` a storage is held for.

    What backward and optimizer make for themselves is temporary; what arrives before any module
    runs is the batch.
    """
    kind, site = storages.kinds[storage], storages.sites[storage]
    if kind is not MemKind.ACTIVATIONS:
        return str(kind)
    if site.phase in ("backward", "optimizer"):
        return "temporaries"
    is_batch = not site.module and site.op.startswith("aten.empty")
    return "batch" if is_batch else "activations"


def sign_of(action: Action) -> int:
    """What an action does to the bytes allocated or reserved: adds, takes away, or nothing.

    A block that another stream still uses is not allocated any more once its free is requested.
    """
    if action.act in (Act.ALLOC, Act.SEGMENT_ALLOC):
        return 1
    return 0 if action.act in (Act.OOM, Act.FREE_COMPLETED) else -1


class RecordingObserver:
    """Writes down what it sees of a run.

    Args:
        recording: where.
        ranges_stay: what `AddressSpace` asks.
    """

    def __init__(self, recording: Recording, *, ranges_stay: bool) -> None:
        self.recording = recording
        self.addresses: AddressSpace = _RecordedAddresses(recording.actions, ranges_stay)

    def born(self, storage: int, block: Block) -> None:
        """`storage` was given `block`."""
        self._add(Act.ALLOC, block, storage)

    def dies(self, storage: int, block: Block) -> None:
        """`block` of `storage` is about to be given back."""
        is_deferred = storage in self.recording.storages.deferred
        self._add(Act.FREE_REQUESTED if is_deferred else Act.FREE, block, storage)

    def returned(self, storage: int, block: Block) -> None:
        """`block`, whose free was deferred, returns to its pool."""
        self._add(Act.FREE_COMPLETED, block, storage)

    def reached(self, step: int, micro_batch: int, phase: Phase) -> None:
        """A probe reads the memory."""
        mark = Mark(len(self.recording.actions), step, micro_batch, phase)
        self.recording.marks.append(mark)

    def refused(self, storage: int, num_bytes: int) -> None:
        """No memory was left, and the run ends."""
        self.recording.actions.append(Action(Act.OOM, -1, num_bytes, storage))

    def _add(self, act: Act, block: Block, storage: int) -> None:
        self.recording.actions.append(Action(act, block.address, block.num_bytes, storage))


class _RecordedAddresses(AddressSpace):
    def __init__(self, actions: list[Action], ranges_stay: bool) -> None:
        super().__init__(ranges_stay=ranges_stay)
        self._actions = actions

    def take(self, num_bytes: int) -> int:
        address = super().take(num_bytes)
        self._actions.append(Action(Act.SEGMENT_ALLOC, address, num_bytes, -1))
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        self._actions.append(Action(Act.SEGMENT_FREE, address, num_bytes, -1))
        super().give_back(address, num_bytes)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a step, from one probe to the next: points `start` to `stop` of a timeline."""

    name: str
    """`forward`, `backward` or `step`."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Allocated bytes by kind after every allocation and free of one step."""

    step: int
    kinds: dict[str, Sequence[int]]
    """Of each of `KINDS` one value per point; the first point is the step's beginning."""

    reserved: Sequence[int]
    spans: tuple[Span, ...]
    peak: int
    """The point where most is allocated."""

    where: str
    """Module and operator that made the peak; empty if the step began with it."""

    refused_bytes: int
    """What was asked for when no memory was left, which ended the step; 0 if it went through."""

    def total(self, point: int) -> int:
        """Bytes allocated at a point."""
        return sum(values[point] for values in self.kinds.values())


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
    """One step of a recording; None is the step of the peak.

    A strategy's steps are recorded as far as they were traced; those after are like the last.
    """
    step = recording.result.peak.step if step is None else step
    step = min(step, max((mark.step for mark in recording.marks), default=step))
    marks = [mark for mark in recording.marks if mark.step == step]
    later = [mark for mark in recording.marks if mark.step > step]
    begin = marks[0].index if marks else 0
    end = later[0].index if later else len(recording.actions)
    is_cut = not later and recording.result.failed is not None
    points = {begin: 0}  # the point that the timeline has reached after so many actions
    held = dict.fromkeys(KINDS, 0)
    kinds: dict[str, list[int]] = {kind: [] for kind in KINDS}
    reserved, all_reserved = 0, list[int]()
    storages_made = [-1]

    def write() -> None:
        for kind, values in kinds.items():
            values.append(held[kind])
        all_reserved.append(reserved)

    if begin == 0:
        write()
    for index, action in enumerate(recording.actions[:end], 1):
        sign = sign_of(action)
        if action.act in (Act.SEGMENT_ALLOC, Act.SEGMENT_FREE):
            reserved += sign * action.num_bytes
        elif sign:
            held[kind_of(recording.storages, action.storage)] += sign * action.num_bytes
        if index == begin:
            write()
        elif index > begin:
            if action.storage >= 0 and sign:
                write()
                storages_made.append(action.storage if action.act is Act.ALLOC else -1)
            points[index] = len(all_reserved) - 1
    totals = [sum(column) for column in zip(*kinds.values(), strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    site = recording.storages.sites[storages_made[peak]] if storages_made[peak] >= 0 else None
    return Timeline(
        step=step,
        kinds=dict(kinds),
        reserved=all_reserved,
        spans=_spans(marks, points, len(totals) - 1, is_cut),
        peak=peak,
        where=", ".join(filter(None, (site.module, site.op))) if site else "",
        refused_bytes=recording.result.failed_bytes if is_cut else 0,
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
