"""Sweeps, searches, advice and recordings of strategies say what single predictions say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.predict import predict, record_plan
from memest.estimator.replay.recording import (
    chrome_trace,
    is_of_segment,
    record_run,
    timeline,
    torch_snapshot,
)
from memest.estimator.replay.replay import Program, Run, StateBytes
from memest.estimator.replay.reuse import NotInterpolable
from memest.estimator.search.commands import predict_command
from memest.estimator.search.largest import largest, technique_values
from memest.estimator.search.related_plans import TraceSeries
from memest.estimator.search.sweep import sweep
from memest.estimator.tensors.storages import RETURNED, MemKind, Site, StorageTable
from memest.plan import TrainingPlan
from tests.programs import lightning_program

MIB = 1 << 20
FSDP = TrainingPlan(model_name="gpt2", strategy="fsdp", devices=4, seq_len=32, gpu=("rtx-4090",))


def test_a_sweep_of_a_strategy_gives_what_single_predictions_give(
    shallow: Callable[..., str],
) -> None:
    few = FSDP.to_dict() | {"model_name": shallow("gpt2")}
    plans = [TrainingPlan.from_dict(few, batch_size=n) for n in (2, 3, 6)]

    points = sweep(plans, jobs=1)

    for plan, point in zip(plans, points, strict=True):
        alone = predict(plan)
        assert point.peak_allocated_bytes == alone.peak_allocated_bytes
        assert point.process_bytes == alone.process_bytes
        assert point.verdict == alone.verdicts["rtx-4090"]


def test_the_largest_batch_of_a_strategy_is_traced_size_by_size(
    shallow: Callable[..., str],
) -> None:
    few = FSDP.to_dict() | {"model_name": shallow("gpt2", 1)}
    plan = TrainingPlan.from_dict(few, seq_len=512, memory_limit="2GiB")

    found = largest(plan, [find_gpu("rtx-4090")], "batch_size")[0]

    assert found.value is not None
    fits, over = (
        predict(TrainingPlan.from_dict(plan.to_dict(), batch_size=found.value + more))
        for more in (0, 1)
    )
    assert (fits.verdict, over.verdict) == ("fits", "oom")
    assert found.peak_reserved_bytes == fits.peak_reserved_bytes


def test_no_family_is_made_of_a_strategys_traces() -> None:
    series = TraceSeries(FSDP, find_gpu("rtx-4090"))

    with pytest.raises(NotInterpolable, match="`fsdp` is traced size by size"):
        series.interpolation(2)
    series.cover(range(2, 40))
    assert series.num_traces == 0


def test_techniques_keep_the_optimizer_of_offload() -> None:
    plan = TrainingPlan(
        model_name="gpt2", strategy="deepspeed_stage_2_offload", optim="deepspeed_cpu"
    )

    assert technique_values(plan)["bf16"]["optim"] == "deepspeed_cpu"
    assert technique_values(plan)["bf16, sgd"]["optim"] == "sgd"


def test_a_command_repeats_the_keys_of_a_strategy() -> None:
    plan = TrainingPlan(
        model_name="gpt2", strategy="fsdp", devices=8, sharding_strategy="HYBRID_SHARD",
        shard_size=4, wrap_classes=("GPT2Block",), host_memory=64 << 30,
    )  # fmt: skip

    assert predict_command(plan).endswith(
        "--strategy fsdp --devices 8 --sharding HYBRID_SHARD --shard-size 4 --wrap GPT2Block"
        " --host-memory 64GiB"
    )


WEIGHT, WHOLE, OUTPUT = range(3)


def shared() -> Program:
    """One step: a gathered weight on stream 1 that stream 0 still uses when it dies."""
    storages = StorageTable(streams={WHOLE: 1}, deferred={WHOLE})
    storages.add(1024, Site("", "net", "setup"), MemKind.PARAMS)
    storages.add(4 * MIB, Site("aten.empty", "net", "forward"), MemKind.GATHERED)
    storages.add(3 * MIB, Site("aten.mm", "net", "forward"), MemKind.ACTIVATIONS)
    state = StateBytes(1024, 0, 0)
    return lightning_program(
        storages,
        setup=[WEIGHT],
        first=([WHOLE, OUTPUT], [~WHOLE, RETURNED - WHOLE, ~OUTPUT], []),
        optimizer_first=[],
        optimizer_next=[],
        grads=[],
        before=state,
        after=state,
    )


def test_a_deferred_free_is_requested_first_and_completed_later() -> None:
    recording = record_run(Run(shared(), 1))

    acts = [(a.action, a.stack) for a in recording.actions if not is_of_segment(a)]
    assert acts == [
        ("alloc", WEIGHT), ("alloc", WHOLE), ("alloc", OUTPUT),
        ("free_requested", WHOLE), ("free_completed", WHOLE),
        ("free_requested", OUTPUT), ("free_completed", OUTPUT),
    ]  # fmt: skip
    assert recording.result == Run(shared(), 1, 1).on()


def test_a_block_that_waits_is_not_allocated_any_more() -> None:
    """A point each: the step's beginning, two births, two deaths; the return changes nothing."""
    line = timeline(record_run(Run(shared(), 1)))

    assert list(line.kinds["gathered"]) == [0, 4 * MIB, 4 * MIB, 0, 0]
    assert line.total(line.peak) == 7 * MIB + 1024


def test_the_snapshot_gives_each_block_and_segment_its_stream() -> None:
    program = shared()
    program.steps[0][0][2].events.remove(RETURNED - WHOLE)  # the run ends before it is returned

    snapshot = torch_snapshot(record_run(Run(program, 1)))

    (trace,) = snapshot["device_traces"]
    of_whole = [(e["action"], e["stream"]) for e in trace if e["size"] == 4 * MIB]
    assert of_whole == [("alloc", 1), ("free_requested", 1)]
    assert Counter(s["stream"] for s in snapshot["segments"]) == {0: 2, 1: 1}
    (waiting,) = (s for s in snapshot["segments"] if s["stream"] == 1)
    assert waiting["blocks"][0]["state"] == "active_pending_free"
    assert (waiting["allocated_size"], waiting["active_size"]) == (0, 4 * MIB)


def test_a_recorded_strategy_has_the_peak_of_its_prediction(shallow: Callable[..., str]) -> None:
    plan = TrainingPlan.from_dict(FSDP.to_dict() | {"model_name": shallow("gpt2")})
    recording, report = record_plan(plan), predict(plan)

    line = timeline(recording)
    assert line.total(line.peak) == report.peak_allocated_bytes
    assert max(line.kinds["gathered"]) > 0
    assert {a.action for a in recording.actions} >= {"alloc", "free_requested"}
    rows = [r for r in chrome_trace(recording)["traceEvents"] if r["name"] == "allocated bytes"]
    assert max(sum(row["args"].values()) for row in rows) == report.peak_allocated_bytes


def test_a_later_step_than_was_traced_is_drawn_as_the_last_traced_one() -> None:
    recording = record_run(Run(shared(), 1))

    assert timeline(recording, 5) == timeline(recording, 0)
