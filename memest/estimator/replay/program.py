"""Programs: the event streams between probes, their order, and facts about a plan's model."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from memest.estimator.tensors.storages import (
    RETURNED,
    Coverage,
    Site,
    StorageTable,
    free_of,
    return_of,
)
from memest.report import Phase, Term

if TYPE_CHECKING:
    from memest.estimator.hardware.work import WorkLog
    from memest.estimator.replay.call_log import CallLog
    from memest.models_meta.geometry import LayerGeometry

Shift = Mapping[int, int]  # renames before a span is replayed: ids it allocates -> ids it frees


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer state at a probe."""

    params: int = 0
    grads: int = 0
    optimizer: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Allocator events in order, then a probe at the end of a phase, or none."""

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
    """A simulated run as data: storages, allocator events of each part, and the probes' figures.

    A replay of more steps repeats the last step. A replay of more micro-batches repeats the middle
    one, or, of two, the last without the optimizer's step.
    """

    storages: StorageTable
    setup: list[int] = field(default_factory=list)  # events before the training
    steps: list[list[MicroBatch]] = field(default_factory=list)
    """Micro-batches of each step: the first, one from the middle if it differs, the last."""

    step_shift: Shift = field(default_factory=dict)  # renames before the last step is played again
    micro_shifts: list[Shift] = field(default_factory=list)
    """Renames of storages of each step, before its middle micro-batch is played again."""

    coverage: Coverage = field(default_factory=Coverage)

    ranges_stay: bool = False  # argument of `AddressSpace`; True for a rank among several GPUs
    num_known_steps: int | None = None  # steps after which further rows repeat the last, or None
    _middles: dict[int, MicroBatch] = field(default_factory=dict, compare=False, repr=False)

    def play(self, step: int, micro: int, num_micro_batches: int) -> MicroBatch:
        """Return micro-batch `micro` of `step`."""
        step = min(step, len(self.steps) - 1)
        ran = self.steps[step]
        if micro == 0 or len(ran) == num_micro_batches:
            return ran[micro]
        if micro == num_micro_batches - 1:
            return ran[-1]
        if len(ran) > 2:
            return ran[1]
        if step not in self._middles:
            self._middles[step] = [part for part in ran[-1] if not part.is_optimizers]
        return self._middles[step]

    def shift(self, step: int, micro: int, num_micro_batches: int) -> Shift:
        """Return the renames before micro-batch `micro` of `step` is played."""
        last = len(self.steps) - 1
        if micro == 0:
            return self.step_shift if step > last else {}
        num_run = len(self.steps[min(step, last)])
        is_first_time = micro == 1 or (num_run > 2 and micro == num_micro_batches - 1)
        if num_run == num_micro_batches or is_first_time or not self.micro_shifts:
            return {}
        return self.micro_shifts[min(step, last)]

    def most_held_bytes(self, *states: str) -> int:
        """Return the largest sum of the fields `states` of `StateBytes` over all probes."""
        parts = (part for step in self.steps for batch in step for part in batch)
        return max((sum(getattr(p.state, name) for name in states) for p in parts), default=0)

    def forward_held_bytes(self) -> int:
        """Return the bytes that are allocated at the end of the first forward."""
        alive = self.alive_after([self.setup, *self.until_forward()])
        return sum(self.storages.num_bytes[index] for index in alive)

    def until_forward(self) -> Iterator[Sequence[int]]:
        """Yield the event streams of the first step up to the end of its forward pass."""
        for part in self.steps[0][0]:
            yield part.events
            if part.phase is Phase.AFTER_FORWARD:
                return

    def alive_after(self, streams: Iterable[Sequence[int]]) -> set[int]:
        """Return the ids of the storages still allocated after these event streams."""
        alive: dict[int, None] = {}
        for events in streams:
            play(events, alive, self.storages)
        return set(alive)

    def streams(self) -> Iterator[Sequence[int]]:
        """Return all event streams, each once."""
        yield self.setup
        for step in self.steps:
            for batch in step:
                for part in batch:
                    yield part.events


def find_shifts(program: Program) -> None:
    """Fill in the renames for parts of `program` that are played again."""
    alive: dict[int, None] = {}
    play(program.setup, alive, program.storages)
    program.micro_shifts = []
    for step in program.steps:
        before_step = set(alive)
        shift: Shift = {}
        for number, batch in enumerate(step):
            before = set(alive)
            for part in batch:
                if part.is_optimizers and number == 1:  # a micro-batch in the middle ends here
                    shift = _renames(program.storages, before, alive)
                play(part.events, alive, program.storages)
            if number == 1 and not any(part.is_optimizers for part in batch):
                shift = _renames(program.storages, before, alive)
        program.micro_shifts.append(shift)
        if len(program.steps) > 1:
            program.step_shift = _renames(program.storages, before_step, alive)


def play(
    events: Sequence[int],
    alive: dict[int, None],
    storages: StorageTable,
    *,
    is_immediate: bool = False,
) -> None:
    """Add storages that `events` allocate to `alive`, and remove freed ones."""
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(ended_by(event, storages, is_immediate=is_immediate), None)


def ended_by(event: int, storages: StorageTable, *, is_immediate: bool = False) -> int:
    """Return the id of the storage that `event` frees, or -1 if it frees none.

    A deferred block counts as freed when it returns to its pool; with `is_immediate`, at once.
    """
    is_return = event <= RETURNED
    index = return_of(event) if is_return else free_of(event)
    is_stashed = index in storages.stashed and not is_immediate
    return index if is_return == is_stashed else -1


def _renames(storages: StorageTable, before: set[int], after: Mapping[int, None]) -> Shift:
    """Pair storages only in `after` with those only in `before`, by size, site and kind."""
    freed: dict[object, list[int]] = defaultdict(list)
    for index in sorted(before.difference(after)):
        freed[_origin(storages, index)].append(index)
    found = {}
    for index in after:
        like = freed.get(_origin(storages, index)) if index not in before else None
        if like:
            found[index] = like.pop(0)
    return found


def _origin(storages: StorageTable, index: int) -> object:
    site = storages.sites[index]
    return site.op, site.module, storages.kinds[index], storages.num_bytes[index]


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """The program of a plan's simulated run on one kind of GPU, with facts about the model."""

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
    """Return `site` with its module named by the path within the model `root`."""
    module = site.module
    inside = module.removeprefix(f"{root}.")
    if not root or inside == module:  # outside of the model, or the model is the outermost module
        inside = "" if f"{root}.".startswith(f"{module}.") else module.partition(".")[2]
    names = (name for name in inside.split(".") if name not in _WRAPPERS)
    return Site(site.op, ".".join(names), site.phase)
