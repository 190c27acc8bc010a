"""Between what a run on several GPUs lies: ranks that differ, blocks that come back later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memest import TrainingPlan, predict
from memest.estimator.replay.replay import Part, Program, Run, freed_id, live_at
from memest.estimator.tensors.storages import RETURNED, FreeTiming, MemKind, Site, StorageTable
from memest.report import Interval, Outcome, Prediction
from memest.units import MIB

DDP = TrainingPlan(
    model_name="gpt2", strategy="ddp", devices=2, batch_size=2, seq_len=64, gpu=("h100-80gb",)
)
BUCKETS = -(-124_439_808 * 2 // (2 * MIB)) * 2 * MIB
"""GPT-2's gradients in bfloat16, which share a bucket in the first step: a segment, from which less
than 1 MiB is not split off.
"""


@pytest.fixture(scope="module")
def ddp() -> Prediction:
    return predict(DDP)


def program(*, kept: bool) -> Program:
    """A block of 40 MiB that dies, another of as much, and then the return of the first."""
    storages = StorageTable()
    for _ in range(2):
        storages.add(40 * MIB, Site("aten.empty", "", "forward"), MemKind.ACTIVATIONS)
    (storages.stashed if kept else storages.deferred).add(0)
    events = [0, ~0, 1, RETURNED - 0, ~1]
    return Program(storages=storages, setup=[], steps=[[[Part(events, None)]]])


def test_on_one_gpu_low_is_high() -> None:
    report = predict(replace(DDP, strategy="auto", devices=1))

    assert report.intervals["reserved"] == Interval(
        low_bytes=report.peak_reserved_bytes, high_bytes=report.peak_reserved_bytes
    )
    assert report.phase_intervals == ()
    assert all(found.low_bytes == found.high_bytes for found in report.intervals.values())


def test_the_first_buckets_of_ddp_may_live_through_the_second_step(ddp: Prediction) -> None:
    """As measured: all of them or nothing (h100-spread.jsonl, ranks.md of validation/)."""
    wide = [i for i, found in enumerate(ddp.phase_intervals) if found.low_bytes != found.high_bytes]

    spans = [ddp.phase_intervals[i].high_bytes - ddp.phase_intervals[i].low_bytes for i in wide]
    assert spans == [BUCKETS] * 3
    assert [(ddp.phases[i].step, ddp.phases[i].phase) for i in wide] == [
        (1, "after_forward"),
        (1, "after_backward"),
        (1, "after_optimizer_step"),
    ]
    assert ddp.peak_allocated_bytes == ddp.intervals["allocated"].high_bytes
    assert sum(term.num_bytes for term in ddp.terms) == ddp.peak_allocated_bytes


def test_a_long_optimizer_step_gives_the_watchdog_time_to_look() -> None:
    found = predict(replace(DDP, model_name="blip2-opt-2.7b", batch_size=1, seq_len=None))

    span = found.intervals["allocated"]
    assert span.high_bytes - span.low_bytes < 8 * MIB


def test_between_low_and_high_the_verdict_is_left_open(ddp: Prediction) -> None:
    found = ddp.intervals["allocated"]
    limits = (found.low_bytes - MIB, found.high_bytes - 8 * MIB, ddp.peak_reserved_bytes)
    below, between, above = (predict(replace(DDP, memory_limit=limit)) for limit in limits)

    assert (below.verdict, above.verdict) == (Outcome.OOM, Outcome.FITS)
    assert between.verdict is Outcome.MAY
    verdict = between.verdicts["h100-80gb"]
    assert "of the first step's buckets may live on" in verdict.decides
    assert verdict.margin_bytes < 0
    assert "may or may not fit h100-80gb" in str(between)
    assert Prediction.from_dict(between.to_dict()) == between


def test_ranks_of_fsdp_that_hold_less_are_within_the_interval() -> None:
    report = predict(replace(DDP, strategy="fsdp"))
    found = report.intervals["allocated"]

    assert found.low_bytes < found.high_bytes
    assert found.low_bytes <= report.peak_allocated_bytes <= found.high_bytes
    assert any("one of those that differ" in line for line in report.assumptions)


@pytest.mark.parametrize(("kept", "late_mib"), [(False, 40), (True, 80)])
def test_what_is_kept_counts_as_allocated_and_what_is_deferred_does_not(
    kept: bool, late_mib: int
) -> None:
    late, prompt = (
        Run(program(kept=kept), 1, 1).on(timing=timing)
        for timing in (FreeTiming.LATEST, FreeTiming.IMMEDIATE)
    )

    assert late.peak_allocated_bytes == late_mib * MIB
    assert late.peak_reserved_bytes == 80 * MIB
    assert (prompt.peak_allocated_bytes, prompt.peak_reserved_bytes) == (40 * MIB, 40 * MIB)
    assert len(live_at(program(kept=kept), 1, late.peak)) == late_mib // 40
    assert live_at(program(kept=kept), 1, prompt.peak, FreeTiming.IMMEDIATE) == [0]


def test_an_event_ends_a_storage_once() -> None:
    storages = program(kept=True).storages

    assert [freed_id(event, storages) for event in (~0, RETURNED - 0, ~1)] == [-1, 0, 1]
    assert [freed_id(e, storages, is_immediate=True) for e in (~0, RETURNED - 0, ~1)] == [0, -1, 1]
