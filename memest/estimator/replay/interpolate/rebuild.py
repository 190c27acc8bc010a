"""Programs rebuilt from the calls of a trace, with requests by other numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from memest.estimator.gpu.kernel_calls import Recipe, recipe_of
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.matmul import CublasWorkspaces
from memest.estimator.ops.registry import op_of
from memest.estimator.ops.temporaries import OLDEST
from memest.estimator.replay.interpolate.call_log import (
    Call,
    LoggedTrace,
    Span,
    Template,
    count_numbers,
    is_plain,
    on_gpu,
    put_numbers,
    storage_bytes,
)
from memest.estimator.replay.program import Part, Program, Shift
from memest.estimator.replay.virtual_run import within_model
from memest.estimator.tensors.storages import EMPTIED, MemKind, Site, StorageTable, free_of

NO_CALL = -1  # mark in place of a template: a storage that existed before the trace
ZERO = -2  # mark in place of a template: an output that meta makes and CUDA does not
NOTHING: Mapping[int, Set[int]] = MappingProxyType({})


class _Rebuilder:
    """Makes the event streams of a program from the requests of its calls.

    `slots` has the place of each storage's bytes: (template, position in its `num_bytes`).
    """

    def __init__(
        self, sample: LoggedTrace, orders: Sequence[RequestOrder], dropped: Mapping[int, Set[int]]
    ) -> None:
        self.base = sample.traced.program
        self.storages = StorageTable()
        self.slots: list[tuple[int, int]] = []
        self.ids: dict[int, int] = {}
        self.unmodelled: Counter[str] = Counter()
        self._orders = orders
        self._dropped = dropped
        self._names = [str(t.shape.items[0]).removesuffix(".default") for t in sample.log.templates]
        self._workspaces: dict[tuple[bool, int], int] = {}
        self.streams = [self._stream(span) for span in sample.log.spans]

    def _stream(self, span: Span) -> list[int]:
        events: list[int] = []
        done = 0
        for call in span.calls:
            if call.start > done:
                self._copy(span.events[done : call.start], events)
            self._call(call, self._orders[call.template], events)
            done = call.end
        self._copy(span.events[done:], events)
        return events

    def _copy(self, old: Sequence[int], events: list[int]) -> None:
        """Copy frees, and allocations outside of calls."""
        for event in old:
            if event == EMPTIED:
                events.append(event)
            elif event < 0 and free_of(event) not in self.ids:  # workspaces are freed in order
                first = next(iter(self._workspaces))
                events.append(free_of(self._workspaces.pop(first)))
            elif event < 0:
                events.append(free_of(self.ids[free_of(event)]))
            else:
                events.append(self._born(event, (NO_CALL, event)))

    def renamed(self, shift: Shift) -> dict[int, int]:
        """Return `shift` with the ids of the rebuilt program."""
        return {self.ids[made]: self.ids[before] for made, before in shift.items()}

    def _born(self, old: int, slot: tuple[int, int]) -> int:
        table = self.base.storages
        index = self.ids[old] = self._add(slot, table.sites[old], table.kinds[old])
        return index

    def _add(self, slot: tuple[int, int], site: Site, kind: MemKind) -> int:
        self.slots.append(slot)
        return self.storages.add(0, site, kind)

    def _call(self, call: Call, order: RequestOrder, events: list[int]) -> None:
        """Replay the requests of a call, as `KernelCalls.request` does."""
        if order.is_partial:
            self.unmodelled[self._names[call.template]] += 1
        new_storages = dict(call.new_storages)
        site = within_model(call.site)
        temporary: dict[int, int] = {}
        dropped: list[int] = []
        count = num_temporary = 0
        for request in order.requests:
            if isinstance(request, tuple):
                events.append(free_of(temporary.pop(request[0])))
                continue
            if request is None:
                index = self._add((call.template, count), site, MemKind.WORKSPACE)
                events.append(index)
                temporary[num_temporary] = index
                num_temporary += 1
            elif request in new_storages:
                events.append(self._born(new_storages.pop(request), (call.template, count)))
            elif request in self._dropped.get(call.template, ()):
                kind = self.base.storages.kinds[call.new_storages[0][1]]
                events.append(self._add((call.template, count), site, kind))
                dropped.append(events[-1])
            count += 1
        passing = list(temporary.values())
        for position in range(order.num_copies + order.num_cublas):
            workspace = (call.in_backward, position - order.num_copies)
            if workspace in self._workspaces:
                continue
            slot = (call.template, count + position)
            events.append(self._add(slot, site, MemKind.WORKSPACE))
            if position < order.num_copies:
                passing.append(events[-1])
            else:
                self._workspaces[workspace] = events[-1]
        events.extend(free_of(index) for index in (*reversed(passing), *dropped))
        for old in new_storages.values():
            events.append(self._born(old, (ZERO, 0)))


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A program without its bytes, for all sizes at which the calls have the same orders."""

    program: Program
    slots: tuple[tuple[int, int], ...]

    def with_bytes(self, requests: Sequence[Requests], sample: LoggedTrace) -> Program:
        """Return the program with the bytes of `requests`, one for each template of `sample`."""
        tables: list[Sequence[int]] = [each.num_bytes for each in requests]
        tables += [(0,), sample.traced.program.storages.num_bytes]  # at `ZERO` and `NO_CALL`
        num_bytes = [tables[i][position] for i, position in self.slots]
        return replace(self.program, storages=replace(self.program.storages, num_bytes=num_bytes))


def rebuild(
    sample: LoggedTrace, orders: Sequence[RequestOrder], dropped: Mapping[int, Set[int]] = NOTHING
) -> Rebuilt:
    """Rebuild the program of `sample` with `orders`, one for each template of its log.

    `dropped` has the positions of outputs, by template, that are freed at the end of the call.
    """
    base = sample.traced.program
    rebuilder = _Rebuilder(sample, orders, dropped)
    streams = iter(rebuilder.streams)
    setup = next(streams)
    steps: list[Any] = [
        [[Part(next(streams), part.probe) for part in batch] for batch in step]
        for step in base.steps
    ]
    program = Program(
        storages=rebuilder.storages,
        setup=setup,
        steps=steps,
        step_shift=rebuilder.renamed(base.step_shift),
        micro_shifts=[rebuilder.renamed(shift) for shift in base.micro_shifts],
        coverage=replace(base.coverage, unmodelled=rebuilder.unmodelled),
    )
    return Rebuilt(program, tuple(rebuilder.slots))


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one call to the allocator."""

    order: RequestOrder  # requests without bytes; equal orders make the same stream of events
    num_bytes: tuple[int, ...]  # of each storage that the call allocates, in order


class RequestOrder(NamedTuple):
    """The requests of a call, in order, without their bytes."""

    requests: tuple[int | tuple[int] | None, ...]
    """Position of an output made here, (n,) for a free of temporary n, or None to make one."""

    num_copies: int  # contiguous operands of a matrix product: temporaries after the outputs
    num_cublas: int  # workspaces that it needs: that of the handle, then that of cuBLASLt
    is_partial: bool


def requests_of(gpu: Gpu, template: Template, numbers: Sequence[int]) -> Requests:
    """Return the requests of a call with these numbers on `gpu`, by the rules of its kernel."""
    items = template.shape.items
    start = sum(map(count_numbers, items[:3]))
    own = storage_bytes(items[3], iter(numbers[start:]))
    op = op_of(items[0])
    if is_plain(op):
        positions = [i for i, is_made in enumerate(on_gpu(items[3])) if is_made]
        order = RequestOrder(tuple(positions), 0, 0, False)
        return Requests(order, tuple(own[i] for i in positions))
    func, args, kwargs, out, more = put_numbers(template, numbers)
    recipe = recipe_of(gpu, op, args, kwargs, out, more)
    cublas: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    if op.takes_handle:
        fresh = CublasWorkspaces(gpu.capability)
        cublas, copies = fresh.bytes_for(func, args, kwargs, ("main", 0))
    requests, num_bytes = _requests(recipe, own)
    order = RequestOrder(requests, len(copies), len(cublas), recipe.is_partial)
    return Requests(order, (*num_bytes, *copies, *cublas))


def _requests(
    recipe: Recipe, own: Sequence[int]
) -> tuple[tuple[int | tuple[int] | None, ...], list[int]]:
    """Return the order of a recipe's requests, and the bytes of each allocation."""
    requests: list[int | tuple[int] | None] = []
    num_bytes: list[int] = []
    temporary: list[tuple[int, int]] = []  # (ordinal, bytes)
    for n, position in recipe.events:
        if position is not None and position != OLDEST:
            requests.append(position)
            num_bytes.append(own[position] if n is None else n)
        elif n is not None and n < 0:
            among = temporary if position == OLDEST else reversed(temporary)
            freed = next(t for t in among if t[1] == -n)
            temporary.remove(freed)
            requests.append((freed[0],))
        else:
            assert n is not None
            temporary.append((sum(r is None for r in requests), n))
            requests.append(None)
            num_bytes.append(n)
    return tuple(requests), num_bytes
