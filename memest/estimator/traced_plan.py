"""From a plan to its program on one kind of GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import StorageTable
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.trace.one_gpu import canonical, trace_one
from memest.estimator.trace.traced import TracedPlan
from memest.estimator.trace.virtual_run import canonical as canonical_run, run_plan, shortened
from memest.models_meta.flash_attention import stand_in
from memest.models_meta.registry import quiet_transformers
from memest.plan import TrainingPlan

_SAME_CHIP: dict[str, Any] = {
    "name": "",
    "label": "",
    "memory_bytes": 0,
    "context_bytes": 0,
    "source": "",
}
"""What two cards of one chip may differ in."""


def trace_plan(plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False) -> TracedPlan:
    """The program of `plan` on `gpu`; plans that differ in limits and steps alone share it."""
    if plan.is_distributed:
        with quiet_transformers(), stand_in(plan.attn_implementation):
            return _trace(canonical(plan), replace(gpu, **_SAME_CHIP), trust_remote_code)
    return _run(canonical_run(plan), replace(gpu, **_SAME_CHIP), trust_remote_code)


@functools.lru_cache(maxsize=8)
def _run(plan: TrainingPlan, gpu: Gpu, trust_remote_code: bool) -> TracedPlan:
    plan, num_ahead = shortened(plan)
    return run_plan(plan, gpu, num_ahead=num_ahead, trust_remote_code=trust_remote_code)


@functools.lru_cache(maxsize=8)
def _trace(plan: TrainingPlan, gpu: Gpu, trust_remote_code: bool) -> TracedPlan:
    if plan.is_distributed:
        from memest.estimator.parallel.rank import trace_worst_rank

        return trace_worst_rank(plan, gpu, trust_remote_code=trust_remote_code)
    return trace_one(plan, Recorder(gpu, StorageTable()), trust_remote_code)
