"""Replay of a program (the allocator events of a simulated run) through the simulated allocator.

A program is the event streams between probes (ends of phases), in order, with facts about the
plan's model. A replay has a report row at each probe.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from memest.estimator.allocator.blocks import AddressSpace, Block
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.allocator.settings import DEFAULT, AllocatorSettings
from memest.estimator.tensors.storages import (
    EMPTIED,
    FIRST_KERNEL,
    RETURNED,
    Coverage,
    FreeTiming,
    Site,
    StorageTable,
    free_of,
    return_of,
)
from memest.report import Phase, PhaseRow, Term

if TYPE_CHECKING:
    from memest.estimator.hardware.work import WorkLog
    from memest.estimator.replay.call_log import CallLog
    from memest.models_meta.geometry import LayerGeometry


Renames = Mapping[int, int]  # renames before a span is replayed: ids it allocates -> ids it frees


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer state at the end of a phase of a step."""

    params: int = 0
    grads: int = 0
    optimizer: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Allocator events of one phase of a micro-batch, and the state bytes at its end. A script's
    steps are not cut into phases: one part has all events of a step, and its `phase` is None."""

    events: Sequence[int]
    phase: Phase | None = None
    state: StateBytes = StateBytes()

    @property
    def is_optimizers(self) -> bool:
        """True if the part is the optimizer's step."""
        return self.phase is Phase.AFTER_OPTIMIZER_STEP


MicroBatch = Sequence[Part]  # in order; frees left by the one before are in the first


@dataclass(slots=True)
class Program:
    """A simulated run as data: its storages, and the allocator events of each phase of each step.

    A replay can have more steps and micro-batches than the run. Further steps repeat the last one.
    If a step of the run has three micro-batches, further ones repeat the second. If it has two,
    further ones repeat the second without its part of the optimizer's step.
    """

    storages: StorageTable
    setup: list[int] = field(default_factory=list)  # events before the training
    steps: list[list[MicroBatch]] = field(default_factory=list)
    """Micro-batches of each step: the first, one from the middle if it differs, the last."""

    step_renames: Renames = field(default_factory=dict)  # before the last step is played again
    micro_renames: list[Renames] = field(default_factory=list)
    """Renames of storages of each step, before its middle micro-batch is played again."""

    coverage: Coverage = field(default_factory=Coverage)

    ranges_stay: bool = False  # argument of `AddressSpace`; True for a rank among several GPUs
    num_known_steps: int | None = None  # steps after which further rows repeat the last, or None
    _middles: dict[int, MicroBatch] = field(default_factory=dict, compare=False, repr=False)

    def parts(self, step: int, micro: int, num_micro_batches: int) -> MicroBatch:
        """Return micro-batch `micro` of `step`, or the one that it repeats, as a part per phase.
        Both are counted from 0; a step of the replay has `num_micro_batches`."""
        step = min(step, len(self.steps) - 1)
        micro_batches = self.steps[step]
        if micro == 0 or len(micro_batches) == num_micro_batches:
            return micro_batches[micro]
        if micro == num_micro_batches - 1:
            return micro_batches[-1]
        if len(micro_batches) > 2:
            return micro_batches[1]
        if step not in self._middles:
            self._middles[step] = [part for part in micro_batches[-1] if not part.is_optimizers]
        return self._middles[step]

    def renames(self, step: int, micro: int, num_micro_batches: int) -> Renames:
        """Return the ids to `rename`, current to new, before micro-batch `micro` of `step` is
        played. They are {} if it is played for the first time. A step has `num_micro_batches`."""
        last_step = len(self.steps) - 1
        if micro == 0:
            return self.step_renames if step > last_step else {}
        num_run = len(self.steps[min(step, last_step)])
        is_first_time = micro == 1 or (num_run > 2 and micro == num_micro_batches - 1)
        if num_run == num_micro_batches or is_first_time or not self.micro_renames:
            return {}
        return self.micro_renames[min(step, last_step)]

    def most_held_bytes(self, *states: str) -> int:
        """Return the sum of the `StateBytes` fields `states`, in the phase where it is highest."""
        sums = (sum(getattr(part.state, name) for name in states) for part in self.all_parts())
        return max(sums, default=0)

    def forward_held_bytes(self) -> int:
        """Return the bytes that are allocated at the end of the first forward."""
        alive = self.alive_after([self.setup, *self.until_forward()])
        return sum(self.storages.num_bytes[index] for index in alive)

    def until_forward(self) -> Iterator[Sequence[int]]:
        """Yield the events of each part of the first step, up to the end of its first forward."""
        for part in self.steps[0][0]:
            yield part.events
            if part.phase is Phase.AFTER_FORWARD:
                return

    def alive_after(self, streams: Iterable[Sequence[int]]) -> set[int]:
        """Return the ids of storages that are still allocated after the event lists `streams`."""
        alive: dict[int, None] = {}
        for events in streams:
            play(events, alive, self.storages)
        return set(alive)

    def all_parts(self) -> Iterator[Part]:
        """Yield the parts of all steps, each once."""
        return (part for step in self.steps for batch in step for part in batch)


def find_renames(program: Program) -> None:
    """Set `step_renames` and `micro_renames` of `program`, which are arguments of `rename`.

    Both map the present id of a storage to the id that it takes before events are played again. For
    example, a step frees storage 7, and allocates an equal storage 12 that stays allocated. If the
    step is played again, it frees storage 7 again. So its renames are {12: 7}. `step_renames` is
    for repetitions of the last step. `micro_renames` has an item for each step, for repetitions of
    its middle micro-batch.
    """
    alive: dict[int, None] = {}
    play(program.setup, alive, program.storages)
    program.micro_renames = []
    for step in program.steps:
        before_step = set(alive)
        renames: Renames = {}
        for number, batch in enumerate(step):
            before_batch = set(alive)
            for part in batch:
                if part.is_optimizers and number == 1:  # a micro-batch in the middle ends here
                    renames = _pair_equal(program.storages, before_batch, alive)
                play(part.events, alive, program.storages)
            if number == 1 and not any(part.is_optimizers for part in batch):
                renames = _pair_equal(program.storages, before_batch, alive)
        program.micro_renames.append(renames)
        if len(program.steps) > 1:
            program.step_renames = _pair_equal(program.storages, before_step, alive)


def play(
    events: Sequence[int], alive: dict[int, None], storages: StorageTable, *,
    is_immediate: bool = False,
) -> None:  # fmt: skip
    """Apply allocator `events` to `alive`, whose keys are the ids of allocated storages.

    An event is a storage id if it allocates, else a negative number that `freed_id` decodes. If a
    collective still uses a storage (`storages.stashed`), the storage is freed at a later event, at
    which the collective has ended. With `is_immediate`, it is freed with its tensor.
    """
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(freed_id(event, storages, is_immediate=is_immediate), None)


def freed_id(event: int, storages: StorageTable, *, is_immediate: bool = False) -> int:
    """Return the id of the storage that `event` frees, or -1 if it frees none. If a collective uses
    a storage (`storages.stashed`), a second event frees it at the end of the use. The first event,
    which frees its tensor, then has the result -1. With `is_immediate`, the first event frees the
    storage, and the second has the result -1."""
    is_return = event <= RETURNED
    index = return_of(event) if is_return else free_of(event)
    is_stashed = index in storages.stashed and not is_immediate
    return index if is_return == is_stashed else -1


def _pair_equal(storages: StorageTable, before: set[int], after: Mapping[int, None]) -> Renames:
    """Return ids of storages only in `after`, mapped to ids of storages only in `before` that have
    equal size, site and kind. A storage without an equal one is omitted."""
    freed: dict[object, list[int]] = defaultdict(list)
    for index in sorted(before.difference(after)):
        freed[_origin(storages, index)].append(index)
    renames = {}
    for index in after:
        candidates = freed.get(_origin(storages, index)) if index not in before else None
        if candidates:
            renames[index] = candidates.pop(0)
    return renames


def _origin(storages: StorageTable, index: int) -> object:
    site = storages.sites[index]
    return site.op, site.module, storages.kinds[index], storages.num_bytes[index]


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """The program of a plan's simulated run on one kind of GPU, with facts for the report.
    `host_bytes` is the host memory that the training needs in all ranks together, such as paged
    optimizer state. `image_size` is None for models without images."""

    program: Program
    model: dict[str, Any]
    param_groups: dict[str, dict[str, int]]  # elements by dtype: all, trained, optimizer state
    host_bytes: int
    notes: tuple[str, ...]
    seq_len: int
    image_size: int | None
    host_terms: tuple[Term, ...] = ()  # host memory of all ranks together
    geometry: "LayerGeometry | None" = None  # geometry of the layers, if the textbook applies
    libraries_bytes: int = 0  # NCCL and others on each GPU, outside the allocator
    work: "WorkLog | None" = field(default=None, compare=False)
    """Launches of the plan's steps; None if the program was interpolated."""

    calls: "CallLog | None" = field(default=None, compare=False)
    """Calls of the run, from which programs at other sizes are made; None if not recorded."""

    others: "tuple[TracedPlan, ...]" = ()  # other traced ranks, of which this is the worst


_WRAPPERS = frozenset(("_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Module names under which torch's wrappers store the wrapped module."""


@cache
def within_model(site: Site, root: str = "") -> Site:
    """Return `site` with its module's path relative to `root`, the path of the model. Names that
    torch's wrappers insert are removed. If `root` is "", the outermost module is the model."""
    module = site.module
    inside = module.removeprefix(f"{root}.")
    if not root or inside == module:  # outside of the model, or the model is the outermost module
        inside = "" if f"{root}.".startswith(f"{module}.") else module.partition(".")[2]
    names = (name for name in inside.split(".") if name not in _WRAPPERS)
    return Site(site.op, ".".join(names), site.phase)


@dataclass(frozen=True, slots=True)
class Moment:
    """Point of a replay: number of the last event, its step, last allocated storage (-1: none)."""

    index: int
    step: int
    storage: int


@dataclass(slots=True)
class Replayed:
    """Result of a replay on one GPU: a row per phase, peaks, and the request that `failed` (or
    None). Under a soft limit, a request without room raises the limit instead of failing. Then
    `lacking_bytes` is the raised limit. It is 0 if the limit was not raised."""

    rows: list[PhaseRow] = field(default_factory=list)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak: Moment = Moment(0, 0, -1)
    failed: Moment | None = None  # request for which no memory was left
    failed_bytes: int = 0
    lacking_bytes: int = 0  # limit to which requests raised a soft limit; 0 if they did not
    setup_reserved_bytes: int = 0  # peak while the model was built, before the first step
    num_retries: int = 0  # times that the allocator freed its cache to serve a request
    num_events: int = field(default=0, compare=False)  # events that were replayed or repeated
    timing: FreeTiming = FreeTiming.LATEST  # when blocks return that the GPU's speed decides


def live_at(
    program: Program, num_micro_batches: int, moment: Moment, timing: FreeTiming = FreeTiming.LATEST
) -> list[int]:
    """Return the ids of the storages that are allocated just after the event of `moment`.
    `num_micro_batches` per step and `timing` of frees are those of the replay."""
    alive: dict[int, None] = {}
    num_left = moment.index
    for step in range(moment.step + 1):
        is_immediate = timing.is_immediate(step)
        for renames, events in streams_of(program, step, num_micro_batches):
            rename(alive, renames)
            play(events[:num_left], alive, program.storages, is_immediate=is_immediate)
            if num_left <= len(events):
                return list(alive)
            num_left -= len(events)
    return list(alive)


def rename(by_id: dict[int, Any], renames: Renames) -> None:
    """Rename keys of `by_id`, which are storage ids, before events are played again. The events
    have the same ids as the first time. For example, a step frees storage 7 of the step before, and
    allocates storage 12, which the next step is to free. Before the step is played again, `renames`
    is {12: 7}. So storage 12 becomes storage 7, and the step frees it."""
    for allocated, freed in renames.items():
        if allocated in by_id:
            by_id[freed] = by_id.pop(allocated)


def streams_of(
    program: Program, step: int, num_micro_batches: int
) -> Iterable[tuple[Renames, Sequence[int]]]:
    """Yield (renames, events) for each part of `step`. `rename` applies the renames before the
    events are played. A step has `num_micro_batches`."""
    if step == 0:
        yield {}, program.setup
    for micro in range(num_micro_batches):
        yield program.renames(step, micro, num_micro_batches), ()
        for part in program.parts(step, micro, num_micro_batches):
            yield {}, part.events


class Player:
    """Applies a program's allocations and frees to a simulated allocator, and records the peak."""

    plays_repetitions = False  # True if steps and micro-batches that repeat another are played, too

    def __init__(self, allocator: CachingAllocator, storages: StorageTable) -> None:
        self.allocator, self.storages = allocator, storages
        self.is_immediate = False  # True if shared blocks return when they are freed
        self.blocks: dict[int, Block] = {}
        self.deferred: dict[int, Block] = {}  # by the event that returns them
        self.step = 0
        self.num_events = 0
        self.storage = -1  # the last storage that was allocated
        self.peak_allocated_bytes = 0
        self.peak = Moment(0, 0, -1)

    def reached(self, step: int, micro_batch: int, phase: Phase) -> None:
        """Record that the run has reached the end of `phase`. The base class does nothing."""

    def play(self, events: Sequence[int]) -> None:
        """Apply `events`, coded as in `play` of this module; most time of a replay is spent here.

        Raises:
            OutOfMemory: no memory is left for the storage with id `self.storage`.
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
                if block is not None:  # a storage that only the first step allocates is freed once
                    free(block)
                elif event <= EMPTIED:
                    self._play_other(event)
            elif event not in blocks and num_bytes[event]:  # and is not allocated again
                self.num_events, self.storage = count, event
                blocks[event] = malloc(num_bytes[event])
                if allocator.allocated_bytes > highest:
                    highest = self.peak_allocated_bytes = allocator.allocated_bytes
                    self.peak = Moment(count, self.step, event)
        self.num_events = count

    def _play_on_streams(self, events: Sequence[int]) -> None:
        """Apply `events` like `play`, for programs with several streams, deferred frees, or
        requests that may fail."""
        storages, allocator, blocks = self.storages, self.allocator, self.blocks
        num_bytes, streams, tried = storages.num_bytes, storages.streams, storages.tried
        malloc, apply_free = allocator.malloc, self._apply_free
        for event in events:
            self.num_events += 1
            if event < 0:
                if event <= EMPTIED:
                    self._play_other(event)
                else:
                    apply_free(event)
            elif event not in blocks and (size := num_bytes[event]):
                self.storage = event
                if event not in tried:
                    blocks[event] = malloc(size, streams.get(event, 0))
                elif (block := self._smaller_block_of(event)) is not None:
                    blocks[event] = block
                else:
                    continue
                if allocator.allocated_bytes > self.peak_allocated_bytes:
                    self.peak_allocated_bytes = allocator.allocated_bytes
                    self.peak = Moment(self.num_events, self.step, event)

    def _play_other(self, event: int) -> None:
        """Apply an event that concerns no storage, such as `EMPTIED`, which empties the cache."""
        if event == EMPTIED:
            self.allocator.empty_cache()
        elif event == FIRST_KERNEL:
            self.allocator.addresses.load_first_kernel()
        else:
            self.allocator.addresses.create_cublas_handle()

    def _smaller_block_of(self, index: int) -> Block | None:
        """Return a block for storage `index`, halving its size until it fits; None if none does."""
        storages = self.storages
        num_bytes, stream = storages.num_bytes[index], storages.streams.get(index, 0)
        while num_bytes:
            with suppress(OutOfMemory):
                return self.allocator.malloc(num_bytes, stream)
            num_bytes //= 2
        return None

    def _apply_free(self, event: int) -> None:
        index = freed_id(event, self.storages, is_immediate=self.is_immediate)
        block = self.blocks.pop(index, None)
        if block is None:
            deferred = self.deferred.pop(return_of(event), None)
            if deferred is not None:
                self.allocator.complete(deferred)
        elif index in self.storages.deferred and not self.is_immediate:
            self.deferred[index] = block
            self.allocator.defer(block)
        else:
            self.allocator.free(block)


class _Replay:
    """One replay of a program by `player`. Steps that repeat another are not played: their rows are
    copied. `timing` is the assumed time of deferred frees."""

    def __init__(self, program: Program, player: Player, timing: FreeTiming) -> None:
        self.program, self.player, self.timing = program, player, timing
        self.allocator = player.allocator
        self.result = Replayed(timing=timing)
        self.step = 0
        self._played: MicroBatch | None = None  # the last micro-batch that was played

    def play_setup(self) -> None:
        """Play the setup without a memory limit: a verdict is about the training only."""
        allocator, player = self.allocator, self.player
        limit_bytes, allocator.limit_bytes = allocator.limit_bytes, None
        player.play(self.program.setup)
        self.result.setup_reserved_bytes = allocator.peak_reserved_bytes
        allocator.empty_cache()
        allocator.reset_peaks()
        allocator.limit_bytes = limit_bytes
        player.peak_allocated_bytes = allocator.allocated_bytes
        player.peak = Moment(player.num_events, 0, player.storage)

    def play_steps(self, num_steps: int, num_micro_batches: int) -> None:
        """Play steps until two end with equal allocator states; then copy the last step's rows."""
        program, rows = self.program, self.result.rows
        state = None
        for self.step in range(num_steps):
            first_row = len(rows)
            self._play_step(num_micro_batches)
            num_played, num_left = self.step + 1, num_steps - 1 - self.step
            repeats = num_played == program.num_known_steps
            if num_left and not repeats and num_played + 1 >= len(program.steps):
                previous, state = state, self._state()
                repeats = num_played >= len(program.steps) and state == previous
            if repeats:
                step_rows = rows[first_row:]
                for later in range(1, num_left + 1):
                    rows += _repeated(step_rows, step=later)
                return

    def _play_step(self, num_micro_batches: int) -> None:
        """Play a step's micro-batches; copy the rows of those that repeat the one before."""
        rows = self.result.rows
        state, micro = None, 0
        while micro < num_micro_batches:
            first_row = len(rows)
            batch = self._play_micro_batch(micro, num_micro_batches)
            micro += 1
            num_alike = num_micro_batches - 1 - micro
            if (
                num_alike < 1
                or self.program.parts(self.step, micro, num_micro_batches) is not batch
            ):
                continue
            previous, state = state, self._state()
            if state == previous:
                batch_rows = rows[first_row:]
                for later in range(1, num_alike + 1):
                    rows += _repeated(batch_rows, micro_batch=later)
                self.player.num_events += num_alike * sum(len(part.events) for part in batch)
                micro += num_alike

    def _play_micro_batch(self, micro: int, num_micro_batches: int) -> MicroBatch:
        batch = self.program.parts(self.step, micro, num_micro_batches)
        player = self.player
        player.step, player.is_immediate = self.step, self.timing.is_immediate(self.step)
        rename(player.blocks, self.program.renames(self.step, micro, num_micro_batches))
        if batch is self._played:  # its deferred blocks return in the next micro-batch
            for index in list(player.deferred):
                self.allocator.complete(player.deferred.pop(index))
        self._played = batch
        for part in batch:
            player.play(part.events)
            if part.phase is not None:
                self._probe(part, part.phase, micro)
        return batch

    def _probe(self, part: Part, phase: Phase, micro_batch: int) -> None:
        allocator, state = self.allocator, part.state
        states = state.params, state.grads, state.optimizer
        self.close_peaks()
        place = {"step": self.step, "micro_batch": micro_batch, "phase": phase}
        self.result.rows.append(PhaseRow.of(allocator, states, **place))
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        self.player.reached(self.step, micro_batch, phase)

    def close_peaks(self) -> None:
        """Copy the allocator's peaks to the result."""
        result, player, reserved = self.result, self.player, self.allocator.peak_reserved_bytes
        result.peak_allocated_bytes, result.peak = player.peak_allocated_bytes, player.peak
        result.peak_reserved_bytes = max(result.peak_reserved_bytes, reserved)

    def _state(self) -> tuple[object, ...]:
        """Return the state of the allocator: free blocks, addresses of live storages, the peak so
        far. A step that starts in the same state as the one before repeats it."""
        if self.player.plays_repetitions:
            return (object(),)  # never equal
        return (
            self.allocator.layout(),
            self.allocator.peak_allocated_bytes,
            {index: block.address for index, block in self.player.blocks.items()},
        )


def _repeated(rows: Sequence[PhaseRow], *, step: int = 0, micro_batch: int = 0) -> list[PhaseRow]:
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
    is_share: bool = False  # True if the run limits itself to a share of each GPU's memory

    def on(
        self, limit_bytes: int | None = None, timing: FreeTiming = FreeTiming.LATEST, *,
        player: Player | None = None, is_soft: bool = False,
    ) -> Replayed:  # fmt: skip
        """Replay the run under an allocator limit of `limit_bytes`; None means no limit.

        `timing` decides when blocks of several streams are freed. `player` applies the events, to
        an allocator of this limit. With `is_soft`, a request without room raises the limit instead
        of failing. The limit is not soft if the allocator's `settings` are not the defaults, or if
        a library tries requests that may fail.
        """
        program, storages = self.program, self.program.storages
        if player is None:
            addresses = AddressSpace(ranges_stay=program.ranges_stay)
            player = Player(CachingAllocator(limit_bytes, addresses), storages)
        replay = _Replay(program, player, timing)
        allocator, result = player.allocator, replay.result
        allocator.has_soft_limit = is_soft and not storages.tried
        if not self.settings.is_default:
            allocator.use(self.settings)
            if self.is_share:
                allocator.gpu_bytes, allocator.allowed_bytes = None, limit_bytes
        try:
            replay.play_setup()
            replay.play_steps(self.num_steps, self.num_micro_batches)
        except OutOfMemory as error:
            result.failed = Moment(player.num_events, replay.step, player.storage)
            result.failed_bytes = error.request_bytes
        replay.close_peaks()
        if limit_bytes is not None and allocator.limit_bytes != limit_bytes:
            result.lacking_bytes = allocator.limit_bytes or 0
        result.num_retries, result.num_events = allocator.num_retries, player.num_events
        return result
