"""From a plan to a prediction: the one path through the rooms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memest.estimator.allocator.settings import parse_settings
from memest.estimator.forked import forked
from memest.estimator.hardware.gpus import DEFAULT_GPUS, Gpu, custom_gpu, find_gpu
from memest.estimator.hardware.libraries import libraries_bytes
from memest.plan import TrainingPlan

if TYPE_CHECKING:
    from memest.estimator.readings import Reading
    from memest.estimator.trace.recording import Recording
    from memest.estimator.trace.replay import Replayed
    from memest.report import Prediction, Verdict


PRIMARY_GPU = "h200"
"""Whose figures head a report when no GPU is asked for: the largest of the default set."""


def predict(plan: TrainingPlan, *, trust_remote_code: bool = False, jobs: int = 1) -> Prediction:
    """What a run of `plan` would print on each GPU, without a GPU.

    Args:
        plan: what would run.
        trust_remote_code: whether code that comes with a model may run.
        jobs: processes; a second one takes the cards of other chips than the first.

    Raises:
        MemestError: the plan cannot be run, or memest cannot model it.
    """
    from memest.estimator.summary import summarise

    started = time.perf_counter()
    gpus = target_gpus(plan)
    primary = gpus[0] if plan.gpu or plan.gpu_memory else find_gpu(PRIMARY_GPU)
    by_chip: dict[tuple[Any, ...], list[Gpu]] = {}
    for gpu in {g.name: g for g in (primary, *gpus)}.values():
        by_chip.setdefault((gpu.capability, gpu.num_sms), []).append(gpu)
    first, *others = by_chip.values()

    def on_others() -> dict[str, Verdict]:
        verdict = [_predicted(plan, cards, trust_remote_code) for cards in others]
        return {name: verdict for each in verdict for name, verdict in each.verdicts.items()}

    has_help = bool(others) and jobs > 1
    if has_help:
        _import_libraries(plan, trust_remote_code)
    with forked(on_others) if has_help else nullcontext(lambda: None) as beside:
        here = _predicted(plan, first, trust_remote_code)
        elsewhere = beside()
    verdicts = here.verdicts | (on_others() if elsewhere is None else elsewhere)
    return summarise(
        plan=plan,
        primary=primary,
        readings=here.readings,
        results=here.results[primary.name],
        verdicts={g.name: verdicts[g.name] for g in gpus},
        outcome=verdicts[primary.name].verdict,
        elapsed_s=time.perf_counter() - started,
    )


def _import_libraries(plan: TrainingPlan, trust_remote_code: bool) -> None:
    """What each run of `plan` imports: copies of this process have it then."""
    from memest.models_meta.registry import resolve_config

    resolve_config(plan.model_name, trust_remote_code=trust_remote_code)
    for name in ("memest.estimator.traced_plan", f"memest.loops.{plan.loop}"):
        import_module(name)


@dataclass(frozen=True, slots=True)
class _Predicted:
    """The cards of one chip, which differ in rates alone, as readings do."""

    readings: list[Reading]
    verdicts: dict[str, Verdict]
    results: dict[str, tuple[Replayed, ...]]


def _predicted(plan: TrainingPlan, cards: Sequence[Gpu], trust_remote_code: bool) -> _Predicted:
    from memest.estimator.readings import readings_of, verdict_over
    from memest.estimator.traced_plan import trace_plan

    traced = trace_plan(plan, cards[0], trust_remote_code=trust_remote_code)
    found = _Predicted(readings_of(plan, traced), {}, {})
    for gpu in cards:
        verdict = verdict_over(found.readings, usable_bytes(plan, gpu))
        found.verdicts[gpu.name], found.results[gpu.name] = verdict
    return found


def record_plan(plan: TrainingPlan, *, trust_remote_code: bool = False) -> Recording:
    """The run that `predict` predicts, on the GPU that heads its report.

    Raises:
        MemestError: the plan cannot be run, or memest cannot model it.
    """
    from memest.estimator.readings import is_share, readings_of, settings_of
    from memest.estimator.trace.recording import record_run
    from memest.estimator.traced_plan import trace_plan

    is_asked = plan.gpu or plan.gpu_memory is not None
    gpu = target_gpus(plan)[0] if is_asked else find_gpu(PRIMARY_GPU)
    traced = trace_plan(plan, gpu, trust_remote_code=trust_remote_code)
    reading = readings_of(plan, traced)[0]
    recording = record_run(
        reading.traced.program,
        num_steps=plan.steps,
        num_micro_batches=plan.accumulate_grad_batches,
        limit_bytes=usable_bytes(plan, gpu),
        settings=settings_of(plan),
        is_share=is_share(plan),
        returns=reading.returns,
    )
    recording.gpu = gpu.name
    return recording


def target_gpus(plan: TrainingPlan) -> list[Gpu]:
    """The GPUs that the plan asks about, or the default set.

    Raises:
        MemestError: there is no such GPU, or torch refuses the plan's `alloc_conf`.
    """
    parse_settings(plan.alloc_conf)
    gpus = [find_gpu(name) for name in plan.gpu]
    if plan.gpu_memory is not None:
        gpus.append(custom_gpu(plan.gpu_memory))
    return gpus or [find_gpu(name) for name in DEFAULT_GPUS]


def usable_bytes(plan: TrainingPlan, gpu: Gpu) -> int:
    """What the caching allocator can reserve on `gpu`: the plan's cap, or all that is left beside
    the context and the libraries of several GPUs.
    """
    usable = gpu.limit_bytes - libraries_bytes(plan)
    share = parse_settings(plan.alloc_conf).memory_fraction
    return min(usable, int(share * gpu.memory_bytes), plan.memory_limit or usable)
