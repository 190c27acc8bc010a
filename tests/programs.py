"""Small programs whose every byte is known, in the form in which a run of Lightning leaves one."""

from __future__ import annotations

from collections.abc import Sequence

from memest.estimator.replay.replay import (
    MicroBatch,
    Part,
    Program,
    StateBytes,
    find_renames,
)
from memest.estimator.tensors.storages import StorageTable
from memest.report import Phase

NOTHING = StateBytes(0, 0, 0)

Streams = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Of a micro-batch: the forward, the backward, and what is freed after all probes."""


def lightning_program(
    storages: StorageTable,
    *,
    setup: Sequence[int],
    first: Streams,
    accumulating: Streams | None = None,
    optimizer_first: Sequence[int] = (),
    optimizer_next: Sequence[int] = (),
    grads: Sequence[int] = (),
    before: StateBytes = NOTHING,
    after: StateBytes = NOTHING,
) -> Program:
    """Two steps; with `accumulating`, of three micro-batches each.

    `grads` are freed after the first forward of a step, `before` is held before the first forward,
    `after` after the first step.
    """
    program = Program(storages, setup=list(setup))
    made = StateBytes(after.params, after.grads, before.optimizer)
    for step, optimizer in enumerate((optimizer_first, optimizer_next)):
        batches: list[MicroBatch] = []
        streams = [first] if accumulating is None else [first, accumulating, accumulating]
        for number, (forward, backward, release) in enumerate(streams):
            held = after if step else made if number else before
            kept = after if step else made
            freed = [] if number else [~index for index in grads]
            without = kept if number else StateBytes(kept.params, 0, kept.optimizer)
            parts = [
                Part((), Phase.BEFORE_FORWARD, held),
                Part([*forward, *freed], Phase.AFTER_FORWARD, without),
                Part(list(backward), Phase.AFTER_BACKWARD, kept),
            ]
            if number == len(streams) - 1:
                parts.append(Part(list(optimizer), Phase.AFTER_OPTIMIZER_STEP, after))
            batches.append([*parts, Part(list(release))])
        program.steps.append(batches)
    find_renames(program)
    return program
