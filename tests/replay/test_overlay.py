"""The predicted and the recorded run of one plan, laid over each other request by request."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from memest.estimator.predict import record_plan
from memest.plan import TrainingPlan
from memest.report import Measurement, read_measurements
from memest.validate.experiment import file_stem

ALLOC, FREE, SEGMENT_ALLOC, SEGMENT_FREE = range(4)
ROOT = Path(__file__).parents[2]
RECORDED = {p.name.removesuffix(".npy.gz") for p in Path(__file__).parent.glob("kinds/*.gz")}
RUNS = {
    file_stem(m.name): m
    for results in ("kinds", "flash", "random")
    for m in read_measurements(ROOT / "validation" / "runs" / f"h200-{results}.jsonl")
    if file_stem(m.name) in RECORDED
}
"""What the recorded runs printed, their plans among it."""

TOLERANCE = 0.01
"""Of the peak: the figure that the charts of the lecture are drawn to."""

EXACT = set(RUNS) - {
    "t5-small-bf16-ckpt", "vit-base-fp32", "gpt2-16mixed", "flan-t5-base-1",
    "gpt2-fa2-16mixed-padded",
}  # fmt: skip
"""Every request of the recording is predicted, in its order and to the byte."""


class Curve:
    """The requests of a run from the emptied cache on, and the bytes that they leave allocated."""

    def __init__(self, changes: Sequence[int], start: int) -> None:
        """`changes` in bytes requested, frees below 0; the cache was emptied before `start`."""
        levels = [0, *accumulate(changes)]
        steps = [i for i in range(start, len(changes)) if changes[i] > 0]
        self.requests = [changes[i] for i in steps]
        self.before = [levels[i] for i in steps]
        """Allocated before each request. Frees between two requests are one step: what dies
        together does so in the order of destructors, and no peak lies there."""


def recorded(name: str) -> Curve:
    with gzip.open(Path(__file__).parent / "kinds" / f"{name}.npy.gz") as file:
        table = np.load(file, allow_pickle=False)
    changes: list[int] = []
    starts: list[int] = []
    sizes: dict[int, int] = {}
    for action, address, size in table[:3].T.tolist():
        if action == ALLOC:
            sizes[address] = size
            changes.append(size)
        elif action == FREE:
            changes.append(-sizes.pop(address))
        elif action == SEGMENT_FREE:
            starts.append(len(changes))
    return Curve(changes, min(starts, default=0))


def predicted(measurement: Measurement) -> Curve:
    given = {k: v for k, v in measurement.plan.items() if v not in (None, [])}
    recording = record_plan(TrainingPlan.from_dict(given | {"gpu": [measurement.gpu]}))
    num_bytes = recording.storages.num_bytes
    changes: list[int] = []
    starts: list[int] = []
    for action in recording.actions:
        if action.action == "alloc":
            changes.append(num_bytes[action.stack])
        elif action.action == "free_requested":
            changes.append(-num_bytes[action.stack])
        elif action.action == "segment_free":
            starts.append(len(changes))
    return Curve(changes, min(starts, default=0))


def side_by_side(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Positions in `a` and `b` that belong together; one side waits where the other has more."""
    i = j = 0
    while i < len(a) and j < len(b):
        yield i, j
        if a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        skips = ((x, n - x) for n in range(1, 32) for x in range(n + 1))
        right, down = next((x, y) for x, y in skips if a[i + x : i + x + 4] == b[j + y : j + y + 4])
        yield from ((i + x, j) for x in range(1, right))
        yield from ((i + right, j + y) for y in range(1, down))
        i, j = i + right, j + down


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_the_predicted_run_lies_over_the_recorded_one(name: str) -> None:
    measured, made = recorded(name), predicted(RUNS[name])
    peak = max(map(sum, zip(measured.before, measured.requests, strict=True)))

    apart = [
        abs(measured.before[i] - made.before[j])
        for i, j in side_by_side(measured.requests, made.requests)
    ]

    assert len(apart) >= max(len(measured.requests), len(made.requests)) - 1
    assert max(apart) <= TOLERANCE * peak
    if name in EXACT:
        assert measured.requests == made.requests
        assert measured.before == made.before
