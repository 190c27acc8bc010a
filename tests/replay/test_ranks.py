"""Recorded runs of one rank of four: what is asked for, on which stream, and where it lies."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memest.estimator.allocator.blocks import AddressSpace, Block
from memest.estimator.allocator.caching import CachingAllocator
from memest.estimator.gpu.timeline import MAIN
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.replay import Program
from memest.estimator.replay.simulated_plan import run_rank
from memest.estimator.replay.virtual_run import canonical, rank_of
from memest.plan import TrainingPlan

ALLOC, FREE, SEGMENT_ALLOC, SEGMENT_FREE, FREE_REQUESTED = range(5)
FOLDER = Path(__file__).parent / "ranks"
RUNS: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))

NOT_MIRRORED = {"gpt2-ds3": 8}
"""Of this run requests of so many bytes are left out: DeepSpeed makes a double more than its mirror
while it combines norms."""

Request = tuple[int, int]
"""Bytes and stream."""

Events = list[tuple[int, int, int, int]]


def recorded(name: str) -> Events:
    with gzip.open(FOLDER / f"{name}.npy.gz") as file:
        table = np.load(file, allow_pickle=False)
    return [(action, address, size, stream) for action, address, size, stream in table.T.tolist()]


class RecordedAddresses(AddressSpace):
    """Segments where the driver put them."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._next = iter([e for e in events if e[0] == SEGMENT_ALLOC])

    def take(self, num_bytes: int) -> int:
        _, address, size, _ = next(self._next)
        assert size == num_bytes
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        pass


def run(name: str, allocator: CachingAllocator, *, check_addresses: bool = False) -> int:
    """Apply the requests; how many blocks came back later than they were freed."""
    events = recorded(name)
    start = RUNS[name]["event_marks"][0]
    live: dict[int, Block] = {}
    waiting: dict[int, Block] = {}
    num_deferred = 0
    for index, (action, address, size, stream) in enumerate(events):
        if index == start:
            allocator.reset_peaks()
        if action == ALLOC:
            live[address] = allocator.malloc(size, stream)
            assert not check_addresses or live[address].address == address
        elif action == FREE_REQUESTED:
            if events[index + 1][:2] == (FREE, address):
                allocator.free(live.pop(address))
            else:
                waiting[address] = live.pop(address)
                allocator.defer(waiting[address])
                num_deferred += 1
        elif action == FREE and address in waiting:
            allocator.complete(waiting.pop(address))
        elif action == SEGMENT_FREE and events[index - 1][0] != SEGMENT_FREE:
            allocator.empty_cache()
    return num_deferred


@pytest.mark.parametrize("name", RUNS)
def test_every_block_lies_where_cuda_put_it(name: str) -> None:
    """Given the driver's segments: every address, and both peaks of training, to the byte."""
    allocator = CachingAllocator(addresses=RecordedAddresses(recorded(name)))

    run(name, allocator, check_addresses=True)

    assert allocator.peak_reserved_bytes == RUNS[name]["peak_reserved_bytes"]
    assert allocator.peak_allocated_bytes == RUNS[name]["peak_allocated_bytes"]


@pytest.mark.parametrize("name", RUNS)
def test_as_much_is_reserved_wherever_the_driver_maps_segments(name: str) -> None:
    """Allocated bytes may differ by the rest of a block that a tie leaves whole: 1 MiB each."""
    allocator = CachingAllocator()

    run(name, allocator)

    assert allocator.peak_reserved_bytes == RUNS[name]["peak_reserved_bytes"]


def test_blocks_come_back_late_where_streams_share_them() -> None:
    """DDP's gradients and FSDP1's gathered layers, which are marked by `record_stream`."""
    late = {name: run(name, CachingAllocator()) for name in ("gpt2-ddp", "gpt2-fsdp")}

    assert all(late.values())


def test_each_kind_of_strategy_has_a_recording() -> None:
    strategies = {TrainingPlan.from_dict(r["plan"]).strategy for r in RUNS.values()}

    assert strategies == {
        "ddp", "fsdp", "fsdp2", "deepspeed_stage_1", "deepspeed_stage_2_offload",
        "deepspeed_stage_3", "deepspeed_stage_3_offload",
    }  # fmt: skip


def recorded_requests(name: str) -> list[list[Request]]:
    """What each phase asked for: from the first forward on."""
    events, marks = recorded(name), RUNS[name]["event_marks"]
    phases = [events[a:b] for a, b in pairwise(marks)]
    left_out = NOT_MIRRORED.get(name)
    return [[(e[2], e[3]) for e in phase if e[0] == ALLOC and e[2] != left_out] for phase in phases]


def predicted_requests(name: str) -> list[list[Request]]:
    plan = TrainingPlan.from_dict(RUNS[name]["plan"] | {"gpu": ["h200"]})
    program = run_rank(canonical(plan), find_gpu("h200"), rank_of(plan)).program
    storages = program.storages
    return [
        [
            (storages.num_bytes[e], storages.streams.get(e, MAIN))
            for e in phase
            if e >= 0 and storages.num_bytes[e] not in (0, NOT_MIRRORED.get(name))
        ]
        for phase in event_phases(plan, program)
    ]


def event_phases(plan: TrainingPlan, program: Program) -> list[list[int]]:
    """Events between the probes, from the first forward on."""
    num_micro_batches = plan.accumulate_grad_batches
    return [
        list(part.events)
        for step in range(plan.steps)
        for micro in range(num_micro_batches)
        for part in program.parts(step, micro, num_micro_batches)
        if part.phase is not None
    ][1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_predicted_requests_are_the_recorded_ones(name: str) -> None:
    """In every phase: their order, bytes, and streams up to the numbers that these have."""
    made, measured = predicted_requests(name), recorded_requests(name)

    assert len(made) == len(measured)
    for here, there in zip(made, measured, strict=True):
        assert [size for size, _ in here] == [size for size, _ in there]
    pairs = {
        (a, b)
        for here, there in zip(made, measured, strict=True)
        for (_, a), (_, b) in zip(here, there, strict=True)
    }
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
