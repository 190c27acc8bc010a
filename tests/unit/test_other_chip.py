"""Programs on another chip that are made from the calls of a run on the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.replay import simulated_plan
from memest.estimator.replay.replay import Run, TracedPlan
from memest.estimator.replay.reuse import NotInterpolable, on_other_chip
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.replay.virtual_run import canonical, logged_trace
from memest.plan import TrainingPlan

PLANS: dict[str, dict[str, Any]] = {
    "flash in place of cuDNN": {"model_name": "gpt2", "precision": "bf16-mixed"},
    "under checkpointing": {"model_name": "SmolLM2-135M", "act_ckpt": True},
    "a mask": {"model_name": "SmolLM2-135M", "precision": "bf16-true", "batch_size": 3},
    "convolutions": {"model_name": "vit-base-patch16-224", "precision": "bf16-true"},
    "float32": {"model_name": "bert-base-uncased", "precision": "32-true"},
    "QLoRA": {"model_name": "SmolLM2-135M", "use_qlora": True},
}
WITH_OTHER_STRIDES = {"gpt2", "SmolLM2-135M"}
"""Models to which cuDNN returns gradients with other strides than the kernels of older chips."""

H200 = find_gpu("h200")


@pytest.fixture(scope="module")
def plan_of(shallow: Callable[..., str]) -> Callable[[dict[str, Any]], TrainingPlan]:
    """`plan_of(values)`: a plan for few layers of a model."""

    def made(values: dict[str, Any]) -> TrainingPlan:
        given = {"batch_size": 2, "seq_len": 48, "precision": "bf16-mixed"} | values
        given["model_name"] = shallow(given["model_name"])
        return canonical(TrainingPlan.from_dict(given))

    return made


def figures(traced: TracedPlan) -> tuple[int, int]:
    run = Run(traced.program, 3, 1).on()
    return run.peak_allocated_bytes, run.peak_reserved_bytes


def requests(traced: TracedPlan) -> Counter[Any]:
    """Count the storages by bytes, operator, module, phase and kind."""
    table = traced.program.storages
    rows = zip(table.num_bytes, table.sites, table.kinds, strict=True)
    return Counter((n, s.op, s.module, s.phase, kind) for n, s, kind in rows if n)


@pytest.fixture(scope="module", params=PLANS)
def logged(
    request: pytest.FixtureRequest, plan_of: Callable[[dict[str, Any]], TrainingPlan]
) -> tuple[TrainingPlan, TracedPlan]:
    plan = plan_of(PLANS[request.param])
    return plan, logged_trace(plan, H200)


@pytest.mark.parametrize("name", ["a100-80gb", "rtx-4090", "h100-80gb"])
def test_a_program_is_that_of_its_own_run(
    logged: tuple[TrainingPlan, TracedPlan], name: str
) -> None:
    plan, trace = logged
    gpu = find_gpu(name)

    if Path(plan.model_name).name in WITH_OTHER_STRIDES and gpu.capability != H200.capability:
        with pytest.raises(NotInterpolable, match="strides"):
            on_other_chip(trace, H200, gpu)
        return

    made, run = on_other_chip(trace, H200, gpu), logged_trace(plan, gpu)

    assert figures(made) == figures(run)
    assert requests(made) == requests(run)
    assert made.program.coverage.unmodelled == run.program.coverage.unmodelled
    assert replace(made, program=run.program) == run


def test_chips_with_the_same_requests_share_a_program(
    plan_of: Callable[[dict[str, Any]], TrainingPlan],
) -> None:
    trace = logged_trace(plan_of(PLANS["a mask"]), H200)
    with_conv = logged_trace(plan_of(PLANS["convolutions"]), H200)
    h100, l4, l40s, a100 = map(find_gpu, ("h100-80gb", "l4", "l40s", "a100-80gb"))

    assert on_other_chip(trace, H200, h100) is trace
    assert on_other_chip(with_conv, H200, l4) is on_other_chip(with_conv, H200, l4)
    assert on_other_chip(with_conv, H200, a100) is not on_other_chip(with_conv, H200, l40s)


def test_the_other_way_round(plan_of: Callable[[dict[str, Any]], TrainingPlan]) -> None:
    a100 = find_gpu("a100-80gb")
    plan = plan_of(PLANS["convolutions"])

    made = on_other_chip(logged_trace(plan, a100), a100, H200)

    assert figures(made) == figures(logged_trace(plan, H200))


def test_a_chip_that_makes_other_calls_has_its_own_run(
    plan_of: Callable[[dict[str, Any]], TrainingPlan],
) -> None:
    """A T4 has no flash attention."""
    plan = plan_of({"model_name": "gpt2", "precision": "16-mixed", "seq_len": 40})
    t4 = find_gpu("t4")
    with pytest.raises(NotInterpolable, match=r"decision|strides"):
        on_other_chip(logged_trace(plan, H200), H200, t4)
    simulated_plan._cached_traces.cache_clear()

    trace_plan(plan, H200)

    assert figures(trace_plan(plan, t4)) == figures(logged_trace(plan, t4))


def test_code_that_reads_the_capability_has_its_own_run(
    monkeypatch: pytest.MonkeyPatch, plan_of: Callable[[dict[str, Any]], TrainingPlan]
) -> None:
    """transformers multiplies the experts of a mixture in another way on some chips."""
    runs: list[Gpu] = []
    run_on = simulated_plan.logged_trace

    def counted(plan: TrainingPlan, gpu: Gpu, **options: Any) -> TracedPlan:
        runs.append(gpu)
        trace = run_on(plan, gpu, **options)
        trace.calls.is_for_one_chip = True
        return trace

    monkeypatch.setattr(simulated_plan, "logged_trace", counted)
    plan = plan_of({"model_name": "gpt2", "seq_len": 24})
    for name in ("h200", "a100-80gb", "h200"):
        trace_plan(plan, find_gpu(name))

    assert [gpu.capability for gpu in runs] == [(9, 0), (8, 0)]
