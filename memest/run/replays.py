"""The events of a script once more: on other cards, and for those who record them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memest.estimator.allocator.addresses import AddressSpace
from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.allocator.settings import DEFAULT, AllocatorSettings
from memest.estimator.device.history import EventLog
from memest.estimator.device.storages import EMPTIED, Returns, StorageTable, return_of
from memest.estimator.device.virtual_gpu import VirtualGpu
from memest.estimator.trace.program import ended_by
from memest.estimator.trace.recording import Act, Action, Mark, Recording, RecordingObserver
from memest.estimator.trace.replay import Moment, ObservedAllocator, Replayed
from memest.report import Phase, RunReport


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request that a card had no memory left for."""

    position: int
    """Of its event."""

    storage: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LogReplay:
    """What the events of a script do to one card."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_retries: int
    refusal: Refusal | None


def replay_log(
    log: EventLog,
    storages: StorageTable,
    limit_bytes: int | None,
    settings: AllocatorSettings = DEFAULT,
    *,
    is_share: bool = False,
    returns: Returns = Returns.LATEST,
) -> LogReplay:
    """The events that are kept, on a card whose allocator can reserve `limit_bytes`.

    The script is taken to do the same there: it does not see that the card is another.

    Args:
        log: the events.
        storages: what they are about.
        limit_bytes: what can be reserved; None is a card without end.
        settings: of the allocator.
        is_share: the limit is what is allowed, and the card has more.
        returns: when blocks come back whose return depends on how fast the GPU is.
    """
    allocator = CachingAllocator(limit_bytes, settings=settings)
    if is_share:
        allocator.card_bytes, allocator.allowed_bytes = None, limit_bytes
    run = _Replay(allocator, storages, at_once=returns.at_once(0))
    refusal, first = None, 0
    if returns is Returns.AT_ONCE_AT_FIRST:
        ends = (at for at, name in log.marks if name == "after_optimizer_step")
        first = next(ends, len(log.events))
        refusal = run.run(log.events[:first])
        run.at_once = False
    if refusal is None:
        refusal = run.run(log.events[first:], first)
    return LogReplay(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.num_retries,
        refusal,
    )


def record_log(
    log: EventLog,
    storages: StorageTable,
    limit_bytes: int | None,
    gpu: str,
    refused_bytes: int = 0,
    like: CachingAllocator | None = None,
) -> Recording:
    """Every action of the allocator for the events that are kept.

    Args:
        log: the events.
        storages: what they are about.
        limit_bytes: what the allocator could reserve.
        gpu: the card's name.
        refused_bytes: of the request that ended the script, or 0.
        like: an allocator whose settings count; None is the defaults.
    """
    recording = Recording(storages, limit_bytes, gpu)
    observer = RecordingObserver(recording, ranges_stay=False)
    observer.addresses = _RecordedAddresses(recording.actions)
    allocator = ObservedAllocator(limit_bytes, observer)
    if like is not None:
        allocator.use(like.settings)
        allocator.card_bytes, allocator.allowed_bytes = like.card_bytes, like.allowed_bytes
    run = _ObservedReplay(allocator, storages, observer)
    result = Replayed()
    position, steps = 0, _Steps()
    for at, name in log.marks:
        run.run(log.events[position:at])
        position = at
        steps.reached(name, observer)
    run.run(log.events[position:])
    if refused_bytes:
        observer.refused(-1, refused_bytes)
        result.failed, result.failed_bytes = Moment(len(log.events), steps.step, -1), refused_bytes
    result.peak_allocated_bytes = run.allocator.peak_allocated_bytes
    result.peak_reserved_bytes = run.allocator.peak_reserved_bytes
    result.peak = Moment(run.peak_position, _step_at(recording.marks, run.peak_actions), -1)
    recording.result = result
    return recording


class _RecordedAddresses(AddressSpace):
    """Writes down what the driver gives and takes.

    An expandable segment that grows is written as one that goes and a larger one that comes.
    """

    def __init__(self, actions: list[Action]) -> None:
        super().__init__()
        self._actions = actions
        self._ends: dict[int, int] = {}  # of what is mapped, by its beginning

    def take(self, num_bytes: int) -> int:
        address = super().take(num_bytes)
        self._add(Act.SEGMENT_ALLOC, address, num_bytes)
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        self._add(Act.SEGMENT_FREE, address, num_bytes)
        super().give_back(address, num_bytes)

    def mapped(self, address: int, num_bytes: int) -> None:
        begin, end = address, address + num_bytes
        for first, last in list(self._ends.items()):
            if first == end or last == begin:
                self._drop(first)
                begin, end = min(begin, first), max(end, last)
        self._keep(begin, end)

    def unmapped(self, address: int, num_bytes: int) -> None:
        end = address + num_bytes
        first = next(f for f, last in self._ends.items() if f <= address and end <= last)
        last = self._drop(first)
        self._keep(first, address)
        self._keep(end, last)

    def _drop(self, first: int) -> int:
        last = self._ends.pop(first)
        self._add(Act.SEGMENT_FREE, first, last - first)
        return last

    def _keep(self, first: int, last: int) -> None:
        if first < last:
            self._ends[first] = last
            self._add(Act.SEGMENT_ALLOC, first, last - first)

    def _add(self, act: Act, address: int, num_bytes: int) -> None:
        self._actions.append(Action(act, address, num_bytes, -1))


class _Replay:
    def __init__(
        self, allocator: CachingAllocator, storages: StorageTable, *, at_once: bool = False
    ) -> None:
        self.at_once = at_once
        self.allocator = allocator
        self.storages = storages
        self.blocks: dict[int, Block] = {}
        self.deferred: dict[int, Block] = {}

    def run(self, events: Sequence[int], first: int = 0) -> Refusal | None:
        """Apply events, of which `first` is the position of the first one, in order.

        The request that no memory was left for ends it.
        """
        allocator, blocks, num_bytes = self.allocator, self.blocks, self.storages.num_bytes
        for position, event in enumerate(events, first):
            if event >= 0:
                if not num_bytes[event]:
                    continue
                block = self._block_of(event)
                if block is not None:
                    blocks[event] = block
                elif event not in self.storages.tried:
                    return Refusal(position, event, num_bytes[event])
            elif event == EMPTIED:
                allocator.empty_cache()
            else:
                self._ends(event)
        return None

    def _block_of(self, index: int) -> Block | None:
        """For a storage; for less than all of it where it is one that is `tried`."""
        num_bytes, stream = self.storages.num_bytes[index], self.storages.streams.get(index, 0)
        while num_bytes:
            try:
                return self.allocator.malloc(num_bytes, stream)
            except OutOfMemory:
                num_bytes = num_bytes // 2 if index in self.storages.tried else 0
        return None

    def _ends(self, event: int) -> None:
        allocator, storages = self.allocator, self.storages
        ended = ended_by(event, storages, at_once=self.at_once)
        block = self.blocks.pop(ended, None)
        if block is None:
            block = self.deferred.pop(return_of(event), None)
            if block is not None:
                allocator.complete(block)
        elif ended in storages.deferred and not self.at_once:
            self.deferred[ended] = block
            allocator.defer(block)
        else:
            allocator.free(block)


class _ObservedReplay(_Replay):
    """A replay that an observer is told of."""

    def __init__(
        self, allocator: ObservedAllocator, storages: StorageTable, observer: RecordingObserver
    ) -> None:
        super().__init__(allocator, storages)
        self.observer = observer
        self.peak_position = self.peak_actions = 0
        self._names = allocator.storages
        self._highest = self._position = 0

    def run(self, events: Sequence[int], first: int = 0) -> Refusal | None:
        """As without an observer, event by event."""
        for event in events:
            self._position += 1
            ended = ended_by(event, self.storages) if event < 0 else -1
            if ended in self.blocks:
                block = self.blocks[ended]
                self._names[id(block)] = ended
                self.observer.dies(ended, block)
            refusal = super().run((event,))
            if refusal is not None:
                return refusal
            if event in self.blocks:
                self.observer.born(event, self.blocks[event])
                if self.allocator.allocated_bytes > self._highest:
                    self._highest = self.allocator.allocated_bytes
                    self.peak_position = self._position
                    self.peak_actions = len(self.observer.recording.actions)
        return None


_PROBES = {
    "forward": Phase.BEFORE_FORWARD,
    "backward": Phase.AFTER_FORWARD,
    "before_optimizer_step": Phase.AFTER_BACKWARD,
    "optimizer": Phase.AFTER_BACKWARD,
    "after_optimizer_step": Phase.AFTER_OPTIMIZER_STEP,
}


class _Steps:
    """Turns what a script reached into the probes of a recording."""

    def __init__(self) -> None:
        self.step = self.micro_batch = 0
        self._last: Phase | None = None

    def reached(self, name: str, observer: RecordingObserver) -> None:
        phase = _PROBES.get(name)
        if phase is None or phase is self._last:
            return
        if phase is Phase.BEFORE_FORWARD:
            if self._last is Phase.AFTER_FORWARD:  # no step since the last backward
                self.micro_batch += 1
            elif self._last is Phase.AFTER_OPTIMIZER_STEP:
                self.step, self.micro_batch = self.step + 1, 0
        self._last = phase
        observer.reached(self.step, self.micro_batch, phase)


def _step_at(marks: Sequence[Mark], num_actions: int) -> int:
    return max((mark.step for mark in marks if mark.index < num_actions), default=0)


def record_run_of(virtual: VirtualGpu, report: RunReport) -> Recording:
    """Every action of the allocator in the run of `virtual`, of which `report` is."""
    mode = virtual.mode
    refused = mode.memory.refused[0] if mode.memory.refused and not report.fits else 0
    return record_log(
        mode.memory.log,
        mode.memory.storages,
        report.limit_bytes,
        report.gpu,
        refused,
        virtual.allocator,
    )
