"""Programs put together from the parts of others, against the trace of each plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.replay import TracedPlan
from memest.estimator.replay.reuse import (
    NotInterpolable,
    OptimizerStep,
    of_one_micro_batch,
)
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.search.related_plans import RelatedPlans, TraceSeries
from memest.plan import TrainingPlan

GPU = find_gpu("a100-40gb")
BATCHES = (1, 2, 4, 8, 16)
MODELS: dict[str, dict[str, Any]] = {
    "text": {"model_name": "gpt2", "seq_len": 24},
    "encoder and decoder": {"model_name": "t5-small", "precision": "bf16-mixed", "seq_len": 40},
    "qlora": {"model_name": "opt-125m", "use_qlora": True, "precision": "bf16-true"},
}
OPTIMIZERS = ("adamw", "sgd", "paged_adamw_8bit")
NUM_OPTIMIZERS = {"gpt2": 3, "t5-small": 2, "opt-125m": 1}
NUM_LAYERS = {"gpt2": 2, "t5-small": 1, "opt-125m": 2}  # T5 has as many in each of its stacks


@pytest.fixture(scope="module")
def text(shallow: Callable[..., str]) -> TrainingPlan:
    return TrainingPlan(model_name=shallow("gpt2"), seq_len=24)


def but_for_coverage(traced: TracedPlan) -> TracedPlan:
    """What ran for a program that was put together is more or less than what runs in it."""
    program = replace(traced.program, coverage=type(traced.program.coverage)())
    return replace(traced, program=program)


@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS)
def test_every_related_plan_is_what_its_trace_says(
    values: dict[str, Any], shallow: Callable[..., str]
) -> None:
    """A batch of 8 comes from other sizes, one of 1 with the first optimizer is its own trace."""
    name = values["model_name"]
    first = TrainingPlan(**{**values, "model_name": shallow(name, NUM_LAYERS[name])})
    related = RelatedPlans(GPU, range(2, 17, 2), BATCHES)
    optimizers = OPTIMIZERS[: NUM_OPTIMIZERS[name]]

    for i, (optim, is_ckpt) in enumerate(itertools.product(optimizers, (False, True))):
        size, count = (1, 4) if i in (2, 5) else (8, 1)
        plan = replace(
            first, optim=optim, act_ckpt=is_ckpt, batch_size=size, accumulate_grad_batches=count
        )
        alone = trace_plan(plan, GPU)
        assert but_for_coverage(related.at(plan)) == but_for_coverage(alone), plan


@pytest.mark.parametrize("loop", ["lightning", "plain"])
def test_a_step_of_two_micro_batches_holds_that_of_one(loop: str, text: TrainingPlan) -> None:
    plan = replace(text, loop=loop, gradient_clip_val=1.0)
    two = trace_plan(replace(plan, accumulate_grad_batches=2), GPU)

    assert but_for_coverage(of_one_micro_batch(two)) == but_for_coverage(trace_plan(plan, GPU))


def test_a_step_that_frees_what_the_backward_made_is_shared(text: TrainingPlan) -> None:
    """The scaler of 16-mixed does; one optimizer makes its state before the first step."""
    first = replace(text, precision="16-mixed", batch_size=2)
    related = RelatedPlans(GPU, (2, 3), (2, 3), accumulates=False)
    related.at(first)

    for optim in ("sgd", "adagrad"):
        plan = replace(first, optim=optim, batch_size=3)
        assert but_for_coverage(related.at(plan)) == but_for_coverage(trace_plan(plan, GPU))
    assert len(related._series) == 1


def test_another_loop_is_traced_plan_by_plan(text: TrainingPlan) -> None:
    plan = replace(text, loop="transformers", batch_size=2)
    related = RelatedPlans(GPU, (2,), (2,))

    assert related.at(plan) == trace_plan(plan, GPU)


def test_sizes_that_double_take_three_traces(text: TrainingPlan) -> None:
    """The ends, and a batch of one."""
    series = TraceSeries(text, GPU)
    series.cover(range(2, 65, 2), queried=(1, 2, 4, 8, 16, 32, 64))

    made = {size: series.at(size) for size in (1, 2, 4, 8, 16, 32, 64)}
    assert sorted(series._traces) == [1, 2, 64]
    for size in (4, 8, 16, 32):
        assert made[size] == trace_plan(replace(text, batch_size=size), GPU), size
    assert series.num_traces == 3


def test_a_step_is_not_taken_from_a_plan_that_differs_in_more(text: TrainingPlan) -> None:
    plan = replace(text, batch_size=2)
    own = trace_plan(replace(plan, optim="sgd"), GPU)
    other = trace_plan(replace(plan, act_ckpt=True), GPU)

    with pytest.raises(NotInterpolable, match="more than the optimizer's step"):
        OptimizerStep(own, other)


def test_a_micro_batch_that_keeps_more_than_it_frees_is_not_left_out(text: TrainingPlan) -> None:
    plan = replace(text, batch_size=2, accumulate_grad_batches=2)
    two = trace_plan(plan, GPU)
    program = two.program
    _, last = program.steps[1]
    kept = max(e for part in last for e in part.events if e >= 0 and ~e not in part.events)
    more = program.storages.add(512, program.storages.sites[kept], program.storages.kinds[kept])
    leaking = replace(last[1], events=[*last[1].events, more])
    steps = [program.steps[0], [program.steps[1][0], [last[0], leaking, *last[2:]]]]

    with pytest.raises(NotInterpolable, match="keeps other things"):
        of_one_micro_batch(replace(two, program=replace(program, steps=steps)))


def test_a_step_frees_nothing_that_was_made_outside(text: TrainingPlan) -> None:
    plan = replace(text, batch_size=2)
    own = trace_plan(plan, GPU)
    first = own.program.steps[0][0]
    stranger = next(e for e in first[2].events if e >= 0)
    parts = [*first[:-1], replace(first[-1], events=[~stranger, *first[-1].events])]
    steps = [[parts], own.program.steps[1]]

    with pytest.raises(NotInterpolable):
        OptimizerStep(replace(own, program=replace(own.program, steps=steps)), own)


def test_a_batch_of_one_alone_is_one_trace(
    shallow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NotInterpolable("the steps differ")

    plan = TrainingPlan(model_name=shallow("gpt2", 2), seq_len=64, optim="adamw")
    related = RelatedPlans(GPU, BATCHES, BATCHES)
    related.at(replace(plan, batch_size=8))
    monkeypatch.setattr(OptimizerStep, "applied_to", fail)

    related.at(replace(plan, batch_size=1, optim="sgd"))

    assert [series.num_traces for series in related._series.values()][-1] == 1
