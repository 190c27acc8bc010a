"""From a plan to its program on one kind of GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.trace.traced import TracedPlan
from memest.estimator.trace.virtual_run import canonical, run_plan, shortened
from memest.plan import TrainingPlan

_SAME_CHIP: dict[str, Any] = {
    "name": "",
    "label": "",
    "memory_bytes": 1 << 50,
    "context_bytes": 0,
    "source": "",
}
"""What two cards of one chip may differ in: the run sees one with all memory that it asks for."""


def trace_plan(plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False) -> TracedPlan:
    """The program of `plan` on `gpu`, of several ranks that of the worst, with the others.

    Plans that differ in limits and steps alone share it.
    """
    return _run(canonical(plan), replace(gpu, **_SAME_CHIP), trust_remote_code)


@functools.lru_cache(maxsize=8)
def _run(plan: TrainingPlan, gpu: Gpu, trust_remote_code: bool) -> TracedPlan:
    if plan.is_distributed:
        from memest.estimator.ranks import run_ranks

        worst, *others = run_ranks(plan, gpu, trust_remote_code=trust_remote_code)
        return replace(worst, others=tuple(others))
    plan, num_ahead = shortened(plan)
    return run_plan(plan, gpu, num_ahead=num_ahead, trust_remote_code=trust_remote_code)
