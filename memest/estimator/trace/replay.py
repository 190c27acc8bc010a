"""Replay: event streams through the simulated allocator, read off where a probe would read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from memest.estimator.allocator.addresses import AddressSpace
from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.allocator.settings import DEFAULT, AllocatorSettings
from memest.estimator.device.storages import EMPTIED, Returns, death_of, return_of
from memest.estimator.trace.program import MicroBatch, Probe, Program, Shift, ended_by
from memest.report import Phase, PhaseRow


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the run: the `index`-th event of all, which made storage `storage`."""

    index: int
    step: int
    storage: int


@dataclass(slots=True)
class Replayed:
    """What one run on one GPU would have printed."""

    rows: list[PhaseRow] = field(default_factory=list)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak: Moment = Moment(0, 0, -1)
    failed: Moment | None = None
    """The request that no memory was left for."""

    failed_bytes: int = 0
    setup_reserved_bytes: int = 0
    """Peak reserved while the model was built on the GPU, before the first step."""

    num_retries: int = 0
    """Times that the allocator gave back its cache to go on."""

    returns: Returns = Returns.LATEST
    """When blocks returned that depend on the GPU's speed."""


class Observer(Protocol):
    """Sees a run as it is replayed."""

    addresses: AddressSpace
    """Asked for segments, so whoever subclasses it sees those too."""

    def born(self, storage: int, block: Block) -> None:
        """`storage` was given `block`."""

    def dies(self, storage: int, block: Block) -> None:
        """`block` of `storage` is about to be given back."""

    def returned(self, storage: int, block: Block) -> None:
        """`block`, which died while another stream used it, is about to return to its pool."""

    def reached(self, step: int, micro_batch: int, phase: Phase) -> None:
        """A probe reads the memory."""

    def refused(self, storage: int, num_bytes: int) -> None:
        """No memory was left for a request of `num_bytes`, and the run ends."""


def replay(
    program: Program,
    *,
    num_steps: int,
    num_micro_batches: int,
    limit_bytes: int | None = None,
    num_bytes: Sequence[int] | None = None,
    observer: Observer | None = None,
    returns: Returns = Returns.LATEST,
    settings: AllocatorSettings = DEFAULT,
    is_share: bool = False,
) -> Replayed:
    """Run `num_steps` optimizer steps of `num_micro_batches` each.

    Args:
        program: what ran.
        num_steps: optimizer steps.
        num_micro_batches: micro-batches per step.
        limit_bytes: what the allocator may reserve; None is no limit.
        num_bytes: requested bytes by storage id, where they differ from the program's own, as
            on another GPU.
        observer: sees every step and micro-batch, also those that only repeat the one before.
        returns: when blocks come back whose return depends on how fast the GPU is.
        settings: of the allocator.
        is_share: the limit is what is allowed, and the card has more.
    """
    sizes = num_bytes or program.storages.num_bytes
    run = (
        _Run(program, limit_bytes, sizes, returns)
        if observer is None
        else _ObservedRun(program, limit_bytes, sizes, observer, returns)
    )
    if not settings.is_default:
        run.allocator.use(settings)
        if is_share:
            run.allocator.card_bytes, run.allocator.allowed_bytes = None, limit_bytes
    try:
        run.steps(num_steps, num_micro_batches)
    except OutOfMemory as error:
        run.result.failed = Moment(run.num_events, run.step, run.storage)
        run.result.failed_bytes = error.request_bytes
        if observer is not None:
            observer.refused(run.storage, error.request_bytes)
    run.close_peaks()
    run.result.num_retries = run.allocator.num_retries
    return run.result


def live_at(
    program: Program,
    num_micro_batches: int,
    moment: Moment,
    returns: Returns = Returns.LATEST,
) -> list[int]:
    """The ids of the storages alive just after the event of `moment`."""
    storages = program.storages
    alive: dict[int, None] = {}
    count = 0
    for step in range(moment.step + 1):
        at_once = returns.at_once(step)
        for shift, events in streams_of(program, step, num_micro_batches):
            rename(alive, shift)
            for event in events:
                count += 1
                if event >= 0:
                    alive[event] = None
                else:
                    alive.pop(ended_by(event, storages, at_once=at_once), None)
                if count == moment.index:
                    return list(alive)
    return list(alive)


def rename(held: dict[int, Any], shift: Shift) -> None:
    """Let what is held under a name that is to be made again go by the name in `shift`."""
    for made, before in shift.items():
        if made in held:
            held[before] = held.pop(made)


def streams_of(
    program: Program, step: int, num_micro_batches: int
) -> Iterable[tuple[Shift, Sequence[int]]]:
    """The event streams of a step in order, each with what changes its name before it."""
    if step == 0:
        yield {}, program.setup
    for micro in range(num_micro_batches):
        yield program.shift(step, micro, num_micro_batches), ()
        for part in program.play(step, micro, num_micro_batches):
            yield {}, part.events


class _Run:
    def __init__(
        self,
        program: Program,
        limit_bytes: int | None,
        num_bytes: Sequence[int],
        returns: Returns = Returns.LATEST,
    ) -> None:
        self.program = program
        self.returns = returns
        self.num_bytes = num_bytes
        addresses = AddressSpace(ranges_stay=program.ranges_stay)
        self.allocator = CachingAllocator(limit_bytes, addresses)
        self.result = Replayed(returns=returns)
        self.blocks: dict[int, Block] = {}
        self.deferred: dict[int, Block] = {}
        self.before: MicroBatch | None = None
        self.num_events = 0
        self.step = 0
        self.storage = -1

    def steps(self, num_steps: int, num_micro_batches: int) -> None:
        """All steps; once a step leaves the allocator as it found it, the rest are copies of it."""
        # the limit is that of the training: how the model came onto the GPU is told, not judged
        limit_bytes, self.allocator.limit_bytes = self.allocator.limit_bytes, None
        self._apply(self.program.setup)
        self.result.setup_reserved_bytes = self.allocator.peak_reserved_bytes
        self.allocator.empty_cache()
        self.allocator.reset_peaks()
        self.allocator.limit_bytes = limit_bytes
        self.result.peak_allocated_bytes = self.allocator.allocated_bytes
        self.result.peak = Moment(self.num_events, 0, self.storage)
        rows = self.result.rows
        state = None
        for self.step in range(num_steps):
            start = len(rows)
            self._one_step(num_micro_batches)
            if self.step == num_steps - 1:
                return
            if self.step + 1 == self.program.num_known_steps:
                self._repeat(rows[start:], num_steps)
                return
            previous, state = state, self._state()
            if state == previous and self.step + 1 >= len(self.program.steps):
                self._repeat(rows[start:], num_steps)
                return

    def _repeat(self, rows: Sequence[PhaseRow], num_steps: int) -> None:
        """The rows of a step once more for each that is left."""
        for later in range(1, num_steps - self.step):
            self.result.rows += _shifted(rows, step=later)

    def _one_step(self, num_micro_batches: int) -> None:
        rows = self.result.rows
        state = None
        micro = 0
        while micro < num_micro_batches:
            start = len(rows)
            self._one_micro_batch(micro, num_micro_batches)
            num_copies = num_micro_batches - 2 - micro
            play = self.program.play
            last_played = play(self.step, micro, num_micro_batches)
            if num_copies > 0 and play(self.step, micro + 1, num_micro_batches) is last_played:
                previous, state = state, self._state()
                if state == previous:
                    last = rows[start:]
                    for later in range(1, num_copies + 1):
                        rows += _shifted(last, micro_batch=later)
                    self.num_events += num_copies * sum(len(part.events) for part in last_played)
                    micro += num_copies
            micro += 1

    def _one_micro_batch(self, micro: int, num_micro_batches: int) -> None:
        batch = self.program.play(self.step, micro, num_micro_batches)
        rename(self.blocks, self.program.shift(self.step, micro, num_micro_batches))
        if batch is self.before:  # what it left waiting is returned where another one follows
            for index in list(self.deferred):
                self.allocator.complete(self.deferred.pop(index))
        self.before = batch
        for part in batch:
            self._apply(part.events)
            if part.probe is not None:
                self._probe(part.probe, micro)

    def _apply(self, events: Sequence[int]) -> None:
        storages = self.program.storages
        if storages.streams or storages.depends_on_time:
            self._apply_on_streams(events)
            return
        allocator, blocks, num_bytes = self.allocator, self.blocks, self.num_bytes
        result = self.result
        highest = result.peak_allocated_bytes
        count = self.num_events
        malloc, free, pop = allocator.malloc, allocator.free, blocks.pop
        for event in events:
            count += 1
            if event < 0:
                block = pop(death_of(event), None)
                if block is not None:  # what a step makes once and keeps does not die again
                    free(block)
                elif event == EMPTIED:
                    allocator.empty_cache()
            elif event not in blocks and num_bytes[event]:  # nor is it born again
                self.num_events, self.storage = count, event
                blocks[event] = malloc(num_bytes[event])
                if allocator.allocated_bytes > highest:
                    highest = result.peak_allocated_bytes = allocator.allocated_bytes
                    result.peak = Moment(count, self.step, event)
        self.num_events = count

    def _apply_on_streams(self, events: Sequence[int]) -> None:
        """As `_apply`, with pools by stream and blocks that come back later."""
        storages, blocks, result = self.program.storages, self.blocks, self.result
        at_once = self.returns.at_once(self.step)
        for event in events:
            self.num_events += 1
            if event == EMPTIED:
                self.allocator.empty_cache()
            elif event < 0:
                ended = ended_by(event, storages, at_once=at_once)
                block = blocks.pop(ended, None)
                if block is None:
                    returned = self.deferred.pop(return_of(event), None)
                    if returned is not None:
                        self.allocator.complete(returned)
                elif ended in storages.deferred and not at_once:
                    self.deferred[ended] = block
                    self.allocator.defer(block)
                else:
                    self.allocator.free(block)
            elif event not in blocks and self.num_bytes[event]:
                self.storage = event
                stream = storages.streams.get(event, 0)
                blocks[event] = self.allocator.malloc(self.num_bytes[event], stream)
                if self.allocator.allocated_bytes > result.peak_allocated_bytes:
                    result.peak_allocated_bytes = self.allocator.allocated_bytes
                    result.peak = Moment(self.num_events, self.step, event)

    def _probe(self, probe: Probe, micro_batch: int) -> None:
        allocator, state = self.allocator, probe.state
        self.close_peaks()
        self.result.rows.append(
            PhaseRow(
                step=self.step,
                micro_batch=micro_batch,
                phase=probe.phase,
                params_bytes=state.params,
                grads_bytes=state.grads,
                optimizer_bytes=state.optimizer,
                activations_bytes=allocator.allocated_bytes
                - state.params
                - state.grads
                - state.optimizer,
                allocated_bytes=allocator.allocated_bytes,
                peak_allocated_bytes=allocator.peak_allocated_bytes,
                reserved_bytes=allocator.reserved_bytes,
            )
        )
        allocator.peak_allocated_bytes = allocator.allocated_bytes

    def close_peaks(self) -> None:
        """Carry the allocator's peaks into the result."""
        self.result.peak_reserved_bytes = max(
            self.result.peak_reserved_bytes, self.allocator.peak_reserved_bytes
        )

    def _state(self) -> tuple[object, ...]:
        """Equal states continue equally: free blocks, where every live storage lies, open peak."""
        return (
            self.allocator.layout(),
            self.allocator.peak_allocated_bytes,
            {index: block.address for index, block in self.blocks.items()},
        )


class ObservedAllocator(CachingAllocator):
    """An allocator that tells when a deferred block returns, whatever makes it do so."""

    def __init__(self, limit_bytes: int | None, observer: Observer) -> None:
        super().__init__(limit_bytes, observer.addresses)
        self.observer = observer
        self.storages: dict[int, int] = {}
        """Storage by the identity of the block that it had when it died."""

    def complete(self, block: Block) -> None:
        """As `CachingAllocator`'s."""
        if id(block) in self._deferred:
            self.observer.returned(self.storages[id(block)], block)
        super().complete(block)


class _ObservedRun(_Run):
    """A run that is told as it goes, and that leaves no repetition out."""

    def __init__(
        self,
        program: Program,
        limit_bytes: int | None,
        num_bytes: Sequence[int],
        observer: Observer,
        returns: Returns,
    ) -> None:
        super().__init__(program, limit_bytes, num_bytes, returns)
        self.observer = observer
        self.allocator: ObservedAllocator = ObservedAllocator(limit_bytes, observer)

    def _apply(self, events: Sequence[int]) -> None:
        at_once = self.returns.at_once(self.step)
        for event in events:
            ended = ended_by(event, self.program.storages, at_once=at_once) if event < 0 else -1
            if ended in self.blocks:
                block = self.blocks[ended]
                self.allocator.storages[id(block)] = ended
                self.observer.dies(ended, block)
            is_new = event >= 0 and event not in self.blocks
            super()._apply((event,))
            if is_new and event in self.blocks:
                self.observer.born(event, self.blocks[event])

    def _probe(self, probe: Probe, micro_batch: int) -> None:
        super()._probe(probe, micro_batch)
        self.observer.reached(self.step, micro_batch, probe.phase)

    def _state(self) -> tuple[object, ...]:
        return (object(),)  # no state is that of before


def _shifted(rows: Sequence[PhaseRow], *, step: int = 0, micro_batch: int = 0) -> list[PhaseRow]:
    return [
        replace(row, step=row.step + step, micro_batch=row.micro_batch + micro_batch)
        for row in rows
    ]
