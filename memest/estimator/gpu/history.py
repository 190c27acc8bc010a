"""Memory of a run over time: its events, its peaks by phase and by step, and their contents.

Nothing here grows with the number of steps. The first events are stored for replays, later ones
until it is known whether they held the peak.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from memest.estimator.allocator.caching import CachingAllocator
from memest.estimator.tensors.storages import (
    EMPTIED,
    RETURNED,
    MemKind,
    Site,
    StorageTable,
    free_of,
    return_of,
)
from memest.report import RunStep

MAX_EVENTS = 2_000_000  # 16 MB, and 120 MB of storages; two hundred steps of GPT-2
WINDOW = 1 << 18  # number of new events after which `fold` searches them for the peak
MAX_MARKS = 100_000  # largest number of stored marks


@dataclass(slots=True)
class EventLog:
    """Log of a run's allocations and frees, in order. Ids are indices of a `StorageTable`."""

    events: "array[int]" = field(default_factory=lambda: array("q"))
    """First `MAX_EVENTS` events, packed. An id is an allocation, its `free_of` a free, and its
    `return_of` the return of a deferred block. `EMPTIED` is an `empty_cache`; smaller ones are
    events of the driver."""

    marks: list[tuple[int, str]] = field(default_factory=list)  # (number of events before, name)
    open: "array[int]" = field(default_factory=lambda: array("q"))
    """Array for the next event: `events`, or once it is full a window that is discarded."""

    start: int = 0  # start of the part of `open` that was not searched yet
    is_full: bool = False
    num_dropped: int = 0

    def __post_init__(self) -> None:
        self.open = self.events

    def mark(self, name: str) -> None:
        """Store the position in the log as `name`: a phase that begins, or a step that ended."""
        if not self.is_full and len(self.marks) < MAX_MARKS:
            self.marks.append((len(self.events), name))

    @property
    def num_events(self) -> int:
        """Number of all events so far, including those that are not stored."""
        return len(self.events) + self.num_dropped + (len(self.open) if self.is_full else 0)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps among the stored events."""
        return sum(name == "after_optimizer_step" for _, name in self.marks)


@dataclass(frozen=True, slots=True)
class Held:
    """Total of the storages of one kind and origin that are allocated at the peak of memory."""

    kind: MemKind
    site: Site
    num_bytes: int
    count: int  # number of storages


class History:
    """Peaks of GPU memory of a running script: by phase, by step and overall, with their contents.
    `storages` has the size, kind and origin of each storage."""

    def __init__(self, allocator: CachingAllocator, storages: StorageTable) -> None:
        self.log = EventLog()
        self.peak_allocated_bytes = 0  # since the start, whatever `reset_peak_memory_stats` does
        self.peak_reserved_bytes = 0
        self.peak_site: Site | None = None  # origin of the allocation that made the peak
        self.peak_step = 0
        self.phases: dict[str, tuple[int, int]] = {}  # (allocated, reserved) peaks, by first use
        self.first_steps: list[RunStep] = []
        self.highest_step: RunStep | None = None
        self.last_step: RunStep | None = None
        self.num_steps = 0
        self._allocator = allocator
        self._storages = storages
        self.phase = ""  # phase of the last allocated storage
        # most allocated bytes since the last `_close`, position in `log.open` and storage then
        self._top = self._top_at = self._top_id = 0
        self._top_reserved = 0
        self._step_top = self._step_top_reserved = 0
        self._peak_at = -1  # position in `log.open` of a peak that `fold` has not found yet
        self._alive: set[int] = set()  # ids of the live storages at `log.start`
        self._at_peak: list[int] = []
        self._held: list[Held] | None = []  # contents of the peak; None: not summed yet
        self._first_reused = 0  # smaller ids are in the stored events, so they are not reused

    def allocated(self, index: int, site: Site) -> None:
        """Record the log's last event: an allocation of the storage with id `index`, at `site`."""
        allocator = self._allocator
        if site.phase != self.phase:
            self._close()
            self.phase = site.phase
            self.log.mark(site.phase)
            self._top_id = index
        if allocator.allocated_bytes > self._top:
            self._top = allocator.allocated_bytes
            self._top_at, self._top_id = len(self.log.open), index
        if allocator.reserved_bytes > self._top_reserved:
            self._top_reserved = allocator.reserved_bytes

    def _close(self) -> None:
        """Raise the peaks of phase, step and run to the highest memory since the last call."""
        top, reserved = self._top, self._top_reserved
        if self.phase:
            old_top, old_reserved = self.phases.get(self.phase, (0, 0))
            self.phases[self.phase] = max(old_top, top), max(old_reserved, reserved)
        self._step_top = max(self._step_top, top)
        self._step_top_reserved = max(self._step_top_reserved, reserved)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        if top > self.peak_allocated_bytes:
            self.peak_allocated_bytes = top
            self.peak_site = self._storages.sites[self._top_id]
            self.peak_step = self.num_steps
            self._peak_at = self._top_at
        self._top, self._top_at = self._allocator.allocated_bytes, len(self.log.open)
        self._top_reserved = self._allocator.reserved_bytes

    def stepped(self) -> None:
        """Record the peaks of an optimizer step. Call it after the step's temporaries are freed."""
        self._close()
        allocated = self._allocator.allocated_bytes
        row = RunStep(
            step=self.num_steps,
            allocated_bytes=allocated,
            peak_allocated_bytes=self._step_top,
            peak_reserved_bytes=self._step_top_reserved,
        )
        if len(self.first_steps) < 2:
            self.first_steps.append(row)
        highest = self.highest_step
        if highest is None or row.peak_allocated_bytes > highest.peak_allocated_bytes:
            self.highest_step = row
        self.last_step = row
        self.num_steps += 1
        self._step_top, self._step_top_reserved = allocated, self._allocator.reserved_bytes

    def emptied(self) -> None:
        """Log that the allocator has freed its cached memory, as `empty_cache` does."""
        self._close()
        self.log.open.append(EMPTIED)

    @property
    def is_fold_due(self) -> bool:
        """True if `fold` should be called, as enough events have been logged."""
        return len(self.log.open) - self.log.start > WINDOW

    def fold(self) -> None:
        """Process the events since the last call: if the peak is among them, find the storages that
        are live then. Once the log is full, discard the events, and reuse ids of freed storages."""
        self._close()
        log, alive = self.log, self._alive
        position, events = log.start, log.open
        if self._peak_at >= 0:
            self._follow_alive(events[position : self._peak_at])
            position = max(position, self._peak_at)
            self._at_peak, self._peak_at = list(alive), -1
            # the ids are reused once the log is full
            self._held = self._sum_by_origin() if log.is_full else None
        self._follow_alive(events[position:])
        if log.is_full:
            self._forget_freed()
            log.num_dropped += len(events)
            del events[:]
        elif len(events) > MAX_EVENTS:
            log.is_full, log.open = True, array("q")
            self._first_reused = len(self._storages.num_bytes)
        log.start = len(log.open)
        self._top_at = len(log.open)

    def _follow_alive(self, events: "array[int]") -> None:
        """Update the ids of live storages by `events`. An event `index` is an allocation of the
        storage with this id, and `free_of(index)` is its free. A storage that a collective used
        (`stashed`) is freed by `return_of(index)` instead."""
        alive, stashed = self._alive, self._storages.stashed
        for event in events:
            if event >= 0:
                alive.add(event)
            elif event <= RETURNED:
                alive.discard(return_of(event))
            elif free_of(event) not in stashed:
                alive.discard(free_of(event))

    def _forget_freed(self) -> None:
        """Let new storages use the ids of freed storages. The frees are read from `log.open`, which
        has the events since the last `fold` once the log is full."""
        storages, first_index, alive = self._storages, self._first_reused, self._alive
        for event in self.log.open:
            if event >= 0 or event <= EMPTIED:
                continue
            index = free_of(event)
            if event <= RETURNED:
                index = return_of(event)
            elif index in storages.deferred or index in storages.stashed:
                continue
            if index >= first_index and index not in alive:
                storages.forget(index)

    def held_at_peak(self) -> list[Held]:
        """Return the storages that are live at the peak, summed by kind and origin."""
        self.fold()
        if self._held is None:
            self._held = self._sum_by_origin()
        return self._held

    def _sum_by_origin(self) -> list[Held]:
        storages = self._storages
        num_bytes: Counter[tuple[MemKind, Site]] = Counter()
        counts: Counter[tuple[MemKind, Site]] = Counter()
        for index in self._at_peak:
            origin = storages.kinds[index], storages.sites[index]
            num_bytes[origin] += storages.num_bytes[index]
            counts[origin] += 1
        return [Held(*origin, num_bytes[origin], count) for origin, count in counts.items()]
