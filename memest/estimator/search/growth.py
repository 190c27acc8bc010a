"""One run under several settings of the allocator: reserved memory after every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memest.estimator.predict import predict, target_gpus, usable_bytes
from memest.plan import TrainingPlan
from memest.report import Prediction

SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:64")  # compared by default


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """One run under one setting of the allocator, on an unlimited GPU and on the plan's own."""

    alloc_conf: str
    allocated: tuple[int, ...]  # bytes at the peak of each step
    reserved: tuple[int, ...]  # bytes at the end of each step
    on_gpu: tuple[int, ...]  # reserved at the end of each step, up to the step that fails
    failed_step: int | None  # step that runs out of memory on the GPU, from 0

    @property
    def label(self) -> str:
        """Text of the setting, or a name for the defaults."""
        return self.alloc_conf or "PyTorch's defaults"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per step, as JSON values."""
        return [
            {
                "alloc_conf": self.alloc_conf,
                "step": step,
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "reserved_on_gpu_bytes": dict(enumerate(self.on_gpu)).get(step),
                "fragmentation_bytes": reserved - allocated,
                "is_oom": step == self.failed_step,
            }
            for step, (allocated, reserved) in enumerate(
                zip(self.allocated, self.reserved, strict=True)
            )
        ]


def growths(
    plan: TrainingPlan, settings: Sequence[str] = SETTINGS
) -> tuple[Prediction, list[Growth]]:
    """Predict `plan`, and its growth under each of `settings`; the run is traced once.

    Raises:
        MemestError: torch refuses a setting, or the plan cannot be predicted.
    """
    from memest.estimator.replay.scenarios import run_of_plan
    from memest.estimator.replay.simulated_plan import trace_plan

    plans = [replace(plan, alloc_conf=text) for text in dict.fromkeys(settings)]
    for each in plans:
        target_gpus(each)
    gpu = target_gpus(plan)[0]
    traced = trace_plan(plan, gpu)
    found = []
    for each in plans:
        run = run_of_plan(each, traced)
        free, limited = run.on(None), run.on(usable_bytes(each, gpu))
        by_step = [[row for row in free.rows if row.step == step] for step in range(plan.steps)]
        on_gpu = {row.step: row.reserved_bytes for row in limited.rows}
        failed = None if limited.failed is None else limited.failed.step
        growth = Growth(
            alloc_conf=each.alloc_conf,
            allocated=tuple(max(row.peak_allocated_bytes for row in rows) for rows in by_step),
            reserved=tuple(rows[-1].reserved_bytes for rows in by_step),
            on_gpu=tuple(on_gpu[step] for step in range(plan.steps if failed is None else failed)),
            failed_step=failed,
        )
        found.append(growth)
    return predict(plan), found
