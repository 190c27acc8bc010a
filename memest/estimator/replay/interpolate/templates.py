"""Programs made from parts of others: fewer micro-batches, another optimizer.

Forward and backward do not depend on the optimizer, nor its step on the batch. So a trace of two
micro-batches includes that of one, and a short trace with another optimizer gives its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memest.estimator.replay.interpolate.reuse import NotInterpolable
from memest.estimator.replay.program import (
    MicroBatch,
    Part,
    Probe,
    Program,
    TracedPlan,
    find_shifts,
)
from memest.estimator.tensors.storages import EMPTIED, StorageTable, free_of
from memest.report import Phase


def of_one_micro_batch(traced: TracedPlan) -> TracedPlan:
    """Return the plan without accumulation, from its trace with two micro-batches in a step.

    Raises:
        NotInterpolable: an omitted micro-batch frees or keeps storages that no other does.
    """
    program = traced.program
    made = StorageTable()
    source = _Source(program.storages, made)
    setup = source.again(program.setup)
    steps: list[list[MicroBatch]] = []
    for number, (first, last) in enumerate(program.steps):
        parts = [Part(source.again(part.events), part.probe) for part in first]
        source.skip([p.events for p in last if not p.is_optimizers], program.micro_shifts[number])
        parts += [Part(source.again(p.events), p.probe) for p in last if p.is_optimizers]
        steps.append([parts])
    return replace(traced, program=_finished(made, setup, steps, program), work=None)


class OptimizerStep:
    """The events of one optimizer's step, from plans of one micro-batch with it and with another.

    Raises:
        NotInterpolable: they differ in more than the step.
    """

    def __init__(self, own: TracedPlan, other: TracedPlan) -> None:
        self._own = own
        self._parts = [{_phase(part): part for part in step[0]} for step in own.program.steps]
        made = self.put_into(other)
        if replace(made, program=replace(made.program, coverage=own.program.coverage)) != own:
            raise NotInterpolable("more than the optimizer's step is another")

    def put_into(self, traced: TracedPlan) -> TracedPlan:
        """Return `traced` with this optimizer; its coverage is that of the run.

        Raises:
            NotInterpolable: a step frees storages made outside of steps, or has other phases.
        """
        program = traced.program
        made = StorageTable()
        theirs = _Source(program.storages, made)
        ours = _Source(self._own.program.storages, made)
        setup = theirs.again(program.setup)
        steps: list[list[MicroBatch]] = [
            [list(self._micro_batch(batch, number, theirs, ours)) for batch in step]
            for number, step in enumerate(program.steps)
        ]
        groups = traced.param_groups | {"optimizer": self._own.param_groups["optimizer"]}
        return replace(
            traced,
            program=_finished(made, setup, steps, program),
            param_groups=groups,
            host_bytes=self._own.host_bytes,
            libraries_bytes=self._own.libraries_bytes,
            work=None,
        )

    def _micro_batch(
        self, parts: Sequence[Part], step: int, theirs: _Source, ours: _Source
    ) -> Iterator[Part]:
        for part in parts:
            own = self._parts[step].get(_phase(part))
            if part.probe is None or own is None or own.probe is None:
                raise NotInterpolable("the loop has other phases")
            is_step = part.is_optimizers
            events = ours.again(own.events) if is_step else theirs.again(part.events)
            state = replace(part.probe.state, optimizer=own.probe.state.optimizer)
            yield Part(events, Probe(part.probe.phase, state))


def _phase(part: Part) -> Phase | None:
    return None if part.probe is None else part.probe.phase


def _finished(
    storages: StorageTable, setup: list[int], steps: list[list[MicroBatch]], like: Program
) -> Program:
    program = Program(storages=storages, setup=setup, steps=steps, coverage=like.coverage)
    find_shifts(program)
    return program


@dataclass(slots=True)
class _Source:
    """A program whose storages are copied into another table."""

    table: StorageTable
    made: StorageTable
    ids: dict[int, int] = field(default_factory=dict)  # in the other table, by those in this

    def __post_init__(self) -> None:
        if self.table.streams or self.table.depends_on_time:
            raise NotInterpolable("more than one stream runs")

    def again(self, events: Sequence[int]) -> list[int]:
        """Return `events` with the ids of the other table."""
        old, made, ids = self.table, self.made, self.ids
        found = []
        for event in events:
            if event >= 0:
                ids[event] = made.add(old.num_bytes[event], old.sites[event], old.kinds[event])
                found.append(ids[event])
            elif event == EMPTIED:
                found.append(event)
            elif free_of(event) in ids:
                found.append(free_of(ids.pop(free_of(event))))
            else:
                raise NotInterpolable("a part frees what another made")
        return found

    def skip(self, streams: Sequence[Sequence[int]], shift: Mapping[int, int]) -> None:
        """Skip `streams`; `shift` maps storages that they leave to equal ones that they free."""
        made: set[int] = set()
        freed: set[int] = set()
        for event in (event for events in streams for event in events):
            if event >= 0:
                made.add(event)
            elif free_of(event) in made:
                made.remove(free_of(event))
            else:
                freed.add(free_of(event))
        if made != shift.keys() or freed != set(shift.values()) or not freed <= self.ids.keys():
            raise NotInterpolable("what is left out keeps other things than it frees")
        for kept, before in shift.items():
            self.ids[kept] = self.ids.pop(before)
