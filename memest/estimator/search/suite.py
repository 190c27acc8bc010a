"""Many plans, each predicted separately, in one process per core."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memest.engines import find_engine
from memest.errors import MemestError, result_or_error
from memest.estimator.predict import predict, target_gpus
from memest.models_meta.registry import check_name
from memest.plan import TrainingPlan
from memest.report import Prediction

MIN_PLANS_FOR_PROCESSES = 4  # plans below which starting processes costs more than it saves


def predict_all(plans: Sequence[TrainingPlan], *, jobs: int | None = None) -> list[Prediction]:
    """Return the predictions of `plans` in their order, or raise the first error with its name."""
    predicted, failed = partition(plans, predict_each(plans, jobs=jobs))
    if failed:
        raise failed[0][1] if len(plans) == 1 else with_label(*failed[0])
    return [report for _, report in predicted]


def predict_each(
    plans: Sequence[TrainingPlan], *, jobs: int | None = None
) -> list[Prediction | MemestError]:
    """Return predictions like `predict_all`, with an error for each plan that cannot be predicted.

    Raises:
        MemestError: a plan names a model or a GPU that does not exist.
    """
    for plan in plans:  # fail at once, before heavy imports
        target_gpus(plan)
        check_name(plan.model_name)
    alone = (jobs or os.cpu_count() or 1) if len(plans) == 1 else 1
    one = partial(result_or_error, predict, jobs=alone)
    groups = list(_alike(plans).values())
    if jobs is None and len(plans) < MIN_PLANS_FOR_PROCESSES:
        jobs = 1
    found = find_engine("local", jobs).map(
        partial(_each, one=one), [[plans[i] for i in group] for group in groups],
        died=lambda plans, error: [error] * len(plans), weight=len,
        label=lambda plans: plans[0].label + f" and {len(plans) - 1} alike" * (len(plans) > 1),
    )  # fmt: skip
    by_index = {
        index: result
        for group, results in zip(groups, found, strict=True)
        for index, result in zip(group, results, strict=True)
    }
    return [by_index[i] for i in range(len(plans))]


def partition(
    plans: Sequence[TrainingPlan], found: Sequence[Prediction | MemestError]
) -> tuple[list[tuple[TrainingPlan, Prediction]], list[tuple[TrainingPlan, MemestError]]]:
    """Separate plans with a prediction from plans with an error."""
    pairs = list(zip(plans, found, strict=True))
    predicted = [(plan, each) for plan, each in pairs if isinstance(each, Prediction)]
    return predicted, [(plan, each) for plan, each in pairs if isinstance(each, MemestError)]


def with_label(plan: TrainingPlan, error: MemestError) -> MemestError:
    """Return `error` with the name of the experiment in front of its message."""
    made = type(error)(f"experiment `{plan.label}`: {error}")
    made.hint = error.hint
    return made


def _alike(plans: Sequence[TrainingPlan]) -> dict[TrainingPlan, list[int]]:
    """Return positions of plans by the simulated run that they share; the slowest first."""
    groups: dict[TrainingPlan, list[int]] = {}
    for index, plan in enumerate(plans):
        traced = replace(plan, name="", memory_limit=None, host_memory=None, steps=2)
        groups.setdefault(traced, []).append(index)
    return dict(sorted(groups.items(), key=lambda item: not item[0].is_distributed))


def _each(plans: Sequence[TrainingPlan], *, one: Callable[[TrainingPlan], Any]) -> list[Any]:
    return [one(plan) for plan in plans]
