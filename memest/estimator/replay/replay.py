"""Replay of event streams through the simulated allocator, with rows where a probe would read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memest.estimator.allocator.blocks import AddressSpace, Block
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.allocator.settings import DEFAULT, AllocatorSettings
from memest.estimator.replay.program import MicroBatch, Probe, Program, Shift, ended_by
from memest.estimator.tensors.storages import EMPTIED, FreeTiming, StorageTable, free_of, return_of
from memest.report import Phase, PhaseRow


@dataclass(frozen=True, slots=True)
class Moment:
    """Event of a run: the `index`-th of all, in `step`, which allocated `storage`."""

    index: int
    step: int
    storage: int


@dataclass(slots=True)
class Replayed:
    """Simulated result of one run on one GPU."""

    rows: list[PhaseRow] = field(default_factory=list)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak: Moment = Moment(0, 0, -1)
    failed: Moment | None = None
    """Request for which no memory was left."""

    failed_bytes: int = 0
    lacking_bytes: int = 0
    """Limit in bytes to which requests raised a soft limit; 0 if they did not."""

    setup_reserved_bytes: int = 0
    """Peak reserved while the model was built on the GPU, before the first step."""

    num_retries: int = 0
    """Times that the allocator freed its cache to serve a request."""

    num_events: int = field(default=0, compare=False)
    """Events that were replayed, and those of repeated micro-batches."""

    timing: FreeTiming = FreeTiming.LATEST
    """Free timing: when blocks return whose return depends on the GPU's speed."""


def live_at(
    program: Program,
    num_micro_batches: int,
    moment: Moment,
    timing: FreeTiming = FreeTiming.LATEST,
) -> list[int]:
    """Return the ids of the storages alive just after the event of `moment`."""
    storages = program.storages
    alive: dict[int, None] = {}
    count = 0
    for step in range(moment.step + 1):
        is_immediate = timing.is_immediate(step)
        for shift, events in streams_of(program, step, num_micro_batches):
            rename(alive, shift)
            for event in events:
                count += 1
                if event >= 0:
                    alive[event] = None
                else:
                    alive.pop(ended_by(event, storages, is_immediate=is_immediate), None)
                if count == moment.index:
                    return list(alive)
    return list(alive)


def rename(held: dict[int, Any], shift: Shift) -> None:
    """Rename the storages in `held` by `shift`; the next span makes their old names again."""
    for made, before in shift.items():
        if made in held:
            held[before] = held.pop(made)


def streams_of(
    program: Program, step: int, num_micro_batches: int
) -> Iterable[tuple[Shift, Sequence[int]]]:
    """Yield (renames, events) for each part of a step, in order."""
    if step == 0:
        yield {}, program.setup
    for micro in range(num_micro_batches):
        yield program.shift(step, micro, num_micro_batches), ()
        for part in program.play(step, micro, num_micro_batches):
            yield {}, part.events


class Player:
    """Applies events about `storages` to an allocator."""

    plays_repetitions = False
    """True if steps and micro-batches that repeat another are played, too."""

    def __init__(self, allocator: CachingAllocator, storages: StorageTable) -> None:
        self.allocator, self.storages = allocator, storages
        self.is_immediate = False
        """True if shared blocks return when they are freed."""

        self.blocks: dict[int, Block] = {}
        self.deferred: dict[int, Block] = {}
        """Blocks of freed storages that another stream uses, by the event that returns them."""

        self.step = 0
        self.num_events = 0
        self.storage = -1
        """The last storage that was allocated."""

        self.peak_allocated_bytes = 0
        self.peak = Moment(0, 0, -1)

    def reached(self, step: int, micro_batch: int, phase: Phase) -> None:
        """Note that a probe reads the memory."""

    def refused(self, storage: int, num_bytes: int) -> None:
        """Note a failed request, which ends the run."""

    def play(self, events: Sequence[int]) -> None:
        """Apply events in order.

        Raises:
            OutOfMemory: no memory is left for `storage`.
        """
        storages = self.storages
        if storages.streams or storages.depends_on_time or storages.tried:
            self._play_on_streams(events)
            return
        allocator, blocks, num_bytes = self.allocator, self.blocks, storages.num_bytes
        highest, count = self.peak_allocated_bytes, self.num_events
        malloc, free, pop = allocator.malloc, allocator.free, blocks.pop
        for event in events:
            count += 1
            if event < 0:
                block = pop(free_of(event), None)
                if block is not None:  # a storage that a step makes once is freed once
                    free(block)
                elif event == EMPTIED:
                    allocator.empty_cache()
            elif event not in blocks and num_bytes[event]:  # nor is it allocated again
                self.num_events, self.storage = count, event
                blocks[event] = malloc(num_bytes[event])
                if allocator.allocated_bytes > highest:
                    highest = self.peak_allocated_bytes = allocator.allocated_bytes
                    self.peak = Moment(count, self.step, event)
        self.num_events = count

    def _play_on_streams(self, events: Sequence[int]) -> None:
        """Apply events in order, with pools by stream and blocks that return later."""
        allocator, blocks, num_bytes = self.allocator, self.blocks, self.storages.num_bytes
        for event in events:
            self.num_events += 1
            if event == EMPTIED:
                allocator.empty_cache()
            elif event < 0:
                self._end(event)
            elif event not in blocks and num_bytes[event]:
                self.storage = event
                block = self._block_of(event)
                if block is None:
                    continue
                blocks[event] = block
                if allocator.allocated_bytes > self.peak_allocated_bytes:
                    self.peak_allocated_bytes = allocator.allocated_bytes
                    self.peak = Moment(self.num_events, self.step, event)

    def _block_of(self, index: int) -> Block | None:
        """Return a block; a smaller one for a `tried` storage if memory is short."""
        storages = self.storages
        num_bytes, stream = storages.num_bytes[index], storages.streams.get(index, 0)
        while num_bytes:
            try:
                return self.allocator.malloc(num_bytes, stream)
            except OutOfMemory:
                if index not in storages.tried:
                    raise
                num_bytes //= 2
        return None

    def _end(self, event: int) -> None:
        ended = ended_by(event, self.storages, is_immediate=self.is_immediate)
        block = self.blocks.pop(ended, None)
        if block is None:
            returned = self.deferred.pop(return_of(event), None)
            if returned is not None:
                self.allocator.complete(returned)
        elif ended in self.storages.deferred and not self.is_immediate:
            self.deferred[ended] = block
            self.allocator.defer(block)
        else:
            self.allocator.free(block)


class _Run:
    def __init__(self, program: Program, player: Player, timing: FreeTiming) -> None:
        self.program, self.player, self.timing = program, player, timing
        self.allocator = player.allocator
        self.result = Replayed(timing=timing)
        self.before: MicroBatch | None = None
        self.step = 0

    def steps(self, num_steps: int, num_micro_batches: int) -> None:
        """Play all steps; after one that leaves the allocator unchanged, copy it."""
        # the limit is that of the training: loading of the model is reported, not judged
        limit_bytes, self.allocator.limit_bytes = self.allocator.limit_bytes, None
        self.player.play(self.program.setup)
        self.result.setup_reserved_bytes = self.allocator.peak_reserved_bytes
        self.allocator.empty_cache()
        self.allocator.reset_peaks()
        self.allocator.limit_bytes = limit_bytes
        player = self.player
        player.peak_allocated_bytes = self.allocator.allocated_bytes
        player.peak = Moment(player.num_events, 0, player.storage)
        rows = self.result.rows
        state = None
        for self.step in range(num_steps):
            start = len(rows)
            player.step, player.is_immediate = self.step, self.timing.is_immediate(self.step)
            self._one_step(num_micro_batches)
            if self.step == num_steps - 1:
                return
            if self.step + 1 == self.program.num_known_steps:
                self._repeat(rows[start:], num_steps)
                return
            if self.step + 2 < len(self.program.steps):
                continue  # the steps that follow differ from this one
            previous, state = state, self._state()
            if state == previous and self.step + 1 >= len(self.program.steps):
                self._repeat(rows[start:], num_steps)
                return

    def _repeat(self, rows: Sequence[PhaseRow], num_steps: int) -> None:
        """Repeat the rows of a step for each remaining one."""
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
                    num_events = sum(len(part.events) for part in last_played)
                    self.player.num_events += num_copies * num_events
                    micro += num_copies
            micro += 1

    def _one_micro_batch(self, micro: int, num_micro_batches: int) -> None:
        batch = self.program.play(self.step, micro, num_micro_batches)
        player = self.player
        rename(player.blocks, self.program.shift(self.step, micro, num_micro_batches))
        if batch is self.before:  # what it left waiting is returned where another one follows
            for index in list(player.deferred):
                self.allocator.complete(player.deferred.pop(index))
        self.before = batch
        for part in batch:
            player.play(part.events)
            if part.probe is not None:
                self._probe(part.probe, micro)

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
        self.player.reached(self.step, micro_batch, probe.phase)

    def close_peaks(self) -> None:
        """Copy the allocator's peaks to the result."""
        self.result.peak_allocated_bytes = self.player.peak_allocated_bytes
        self.result.peak = self.player.peak
        self.result.peak_reserved_bytes = max(
            self.result.peak_reserved_bytes, self.allocator.peak_reserved_bytes
        )

    def _state(self) -> tuple[object, ...]:
        """State of the allocator; equal states continue equally.

        It has free blocks, the place of every live storage and the open peak.
        """
        if self.player.plays_repetitions:
            return (object(),)  # never equal
        return (
            self.allocator.layout(),
            self.allocator.peak_allocated_bytes,
            {index: block.address for index, block in self.player.blocks.items()},
        )


def _shifted(rows: Sequence[PhaseRow], *, step: int = 0, micro_batch: int = 0) -> list[PhaseRow]:
    return [
        replace(row, step=row.step + step, micro_batch=row.micro_batch + micro_batch)
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated run of a plan's rank or of a script, which replays on any GPU of its chip."""

    program: Program
    num_steps: int
    num_micro_batches: int = 1
    settings: AllocatorSettings = DEFAULT
    is_share: bool = False
    """True if the run limits itself to a share of each GPU's memory."""

    def on(
        self,
        limit_bytes: int | None = None,
        timing: FreeTiming = FreeTiming.LATEST,
        *,
        player: Player | None = None,
        is_soft: bool = False,
    ) -> Replayed:
        """Replay the run.

        Args:
            limit_bytes: limit of the allocator; None is no limit.
            returns: free timing of blocks that two streams share.
            player: applies the events, with an allocator of this limit.
            is_soft: requests that find no memory raise the limit; not with `settings`, and not
                where a request is `tried`.
        """
        program, storages = self.program, self.program.storages
        if player is None:
            addresses = AddressSpace(ranges_stay=program.ranges_stay)
            player = Player(CachingAllocator(limit_bytes, addresses), storages)
        run = _Run(program, player, timing)
        allocator, result = player.allocator, run.result
        allocator.has_soft_limit = is_soft and not storages.tried
        if not self.settings.is_default:
            allocator.use(self.settings)
            if self.is_share:
                allocator.gpu_bytes, allocator.allowed_bytes = None, limit_bytes
        try:
            run.steps(self.num_steps, self.num_micro_batches)
        except OutOfMemory as error:
            result.failed = Moment(player.num_events, run.step, player.storage)
            result.failed_bytes = error.request_bytes
            player.refused(player.storage, error.request_bytes)
        run.close_peaks()
        if limit_bytes is not None and allocator.limit_bytes != limit_bytes:
            result.lacking_bytes = allocator.limit_bytes or 0
        result.num_retries, result.num_events = allocator.num_retries, player.num_events
        return result
