"""Programs rebuilt from the calls of a trace, with other bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from memest.estimator.replay.interpolate.call_log import Call, LoggedTrace, Span
from memest.estimator.replay.interpolate.requests import Form
from memest.estimator.replay.program import Part, Program, Shift
from memest.estimator.replay.virtual_run import within_model
from memest.estimator.tensors.storages import EMPTIED, MemKind, Site, StorageTable, death_of

NO_CALL = -1
"""Mark in place of a template: a storage that existed before the trace."""

ZERO = -2
"""Mark in place of a template: an output that meta makes and CUDA does not."""

NOTHING: Mapping[int, Set[int]] = MappingProxyType({})


class _Rebuilder:
    """Makes the event streams of a program from the forms of its calls.

    `slots` has the place of each storage's bytes: (template, position in its `num_bytes`).
    """

    def __init__(
        self, sample: LoggedTrace, forms: Sequence[Form], dropped: Mapping[int, Set[int]]
    ) -> None:
        self.base = sample.traced.program
        self.storages = StorageTable()
        self.slots: list[tuple[int, int]] = []
        self.ids: dict[int, int] = {}
        self.unmodelled: Counter[str] = Counter()
        self._forms = forms
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
            self._call(call, self._forms[call.template], events)
            done = call.end
        self._copy(span.events[done:], events)
        return events

    def _copy(self, old: Sequence[int], events: list[int]) -> None:
        """Copy frees, and allocations outside of calls."""
        for event in old:
            if event == EMPTIED:
                events.append(event)
            elif event < 0 and death_of(event) not in self.ids:  # workspaces are freed in order
                first = next(iter(self._workspaces))
                events.append(death_of(self._workspaces.pop(first)))
            elif event < 0:
                events.append(death_of(self.ids[death_of(event)]))
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

    def _call(self, call: Call, form: Form, events: list[int]) -> None:
        """Replay the requests of a call, as `KernelCalls.request` does."""
        if form.is_partial:
            self.unmodelled[self._names[call.template]] += 1
        born = dict(call.born)
        site = within_model(call.site)
        temporary: dict[int, int] = {}
        dropped: list[int] = []
        count = num_temporary = 0
        for request in form.requests:
            if isinstance(request, tuple):
                events.append(death_of(temporary.pop(request[0])))
                continue
            if request is None:
                index = self._add((call.template, count), site, MemKind.WORKSPACE)
                events.append(index)
                temporary[num_temporary] = index
                num_temporary += 1
            elif request in born:
                events.append(self._born(born.pop(request), (call.template, count)))
            elif request in self._dropped.get(call.template, ()):
                kind = self.base.storages.kinds[call.born[0][1]]
                events.append(self._add((call.template, count), site, kind))
                dropped.append(events[-1])
            count += 1
        passing = list(temporary.values())
        for position in range(form.num_copies + form.num_cublas):
            workspace = (call.in_backward, position - form.num_copies)
            if workspace in self._workspaces:
                continue
            slot = (call.template, count + position)
            events.append(self._add(slot, site, MemKind.WORKSPACE))
            if position < form.num_copies:
                passing.append(events[-1])
            else:
                self._workspaces[workspace] = events[-1]
        events.extend(death_of(index) for index in (*reversed(passing), *dropped))
        for old in born.values():
            events.append(self._born(old, (ZERO, 0)))


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A program without its bytes, for all sizes at which the calls have the same forms."""

    program: Program
    slots: tuple[tuple[int, int], ...]


def rebuild(
    sample: LoggedTrace, forms: Sequence[Form], dropped: Mapping[int, Set[int]] = NOTHING
) -> Rebuilt:
    """Rebuild the program of `sample` with these forms, one for each template of its log.

    `dropped` has the positions of outputs, by template, that are freed at the end of the call.
    """
    base = sample.traced.program
    weaver = _Rebuilder(sample, forms, dropped)
    streams = iter(weaver.streams)
    setup = next(streams)
    steps: list[Any] = [
        [[Part(next(streams), part.probe) for part in batch] for batch in step]
        for step in base.steps
    ]
    program = Program(
        storages=weaver.storages,
        setup=setup,
        steps=steps,
        step_shift=weaver.renamed(base.step_shift),
        micro_shifts=[weaver.renamed(shift) for shift in base.micro_shifts],
        coverage=replace(base.coverage, unmodelled=weaver.unmodelled),
    )
    return Rebuilt(program, tuple(weaver.slots))
