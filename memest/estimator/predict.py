"""The path from a plan to its prediction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memest.child import forked
from memest.estimator.allocator.settings import parse_settings
from memest.estimator.hardware.gpus import DEFAULT_GPUS, Gpu, custom_gpu, find_gpu, libraries_bytes
from memest.estimator.versions import check_torch
from memest.plan import TrainingPlan

if TYPE_CHECKING:
    from memest.estimator.replay.recording import Recording
    from memest.estimator.replay.replay import Replayed
    from memest.estimator.replay.scenarios import Scenario
    from memest.estimator.replay.simulated import TracedPlan
    from memest.report import Prediction, StepTime, Verdict

PRIMARY_GPU = "h200"
"""GPU of a report's head when none is named: the largest of the default set."""


def predict(plan: TrainingPlan, *, trust_remote_code: bool = False, jobs: int = 1) -> Prediction:
    """Predict a run of `plan` on each GPU, without a GPU.

    Args:
        plan: the plan.
        trust_remote_code: whether code that comes with a model may run.
        jobs: processes; under a strategy, a second one takes the GPUs of other chips.

    Raises:
        MemestError: the plan cannot be run, or memest cannot model it.
    """
    check_torch()
    from memest.estimator.summary import summarise

    started = time.perf_counter()
    gpus = target_gpus(plan)
    primary = _primary(plan)
    by_chip: dict[tuple[Any, ...], list[Gpu]] = {}
    for gpu in {g.name: g for g in (primary, *gpus)}.values():
        by_chip.setdefault((gpu.capability, gpu.num_sms), []).append(gpu)
    first, *others = by_chip.values()

    def on_others() -> tuple[dict[str, Verdict], dict[str, StepTime]]:
        verdicts: dict[str, Verdict] = {}
        times: dict[str, StepTime] = {}
        for gpus in others:
            found = _predicted(plan, gpus, trust_remote_code)
            verdicts |= found.verdicts
            times |= found.times
        return verdicts, times

    has_help = bool(others) and jobs > 1 and plan.is_distributed
    if has_help:
        _import_libraries(plan, trust_remote_code)
    with forked(on_others) if has_help else nullcontext(lambda: None) as answer:
        here = _predicted(plan, first, trust_remote_code)
        elsewhere = answer()
    more_verdicts, more_times = on_others() if elsewhere is None else elsewhere
    verdicts, times = here.verdicts | more_verdicts, here.times | more_times
    return summarise(
        plan=plan,
        primary=primary,
        scenarios=here.scenarios,
        results=here.results[primary.name],
        verdicts={g.name: verdicts[g.name] for g in gpus},
        times={g.name: times[g.name] for g in gpus if g.name in times},
        outcome=verdicts[primary.name].verdict,
        elapsed_s=time.perf_counter() - started,
    )


def _import_libraries(plan: TrainingPlan, trust_remote_code: bool) -> None:
    """Import the modules that each run of `plan` needs, for copies of this process."""
    from memest.models_meta.registry import resolve_config

    resolve_config(plan.model_name, trust_remote_code=trust_remote_code)
    for name in ("memest.estimator.replay.simulated_plan", f"memest.loops.{plan.loop}"):
        import_module(name)


@dataclass(slots=True)
class _Predicted:
    """Results on GPUs of equal compute capability and number of multiprocessors.

    Their rates are taken to be those of the first.
    """

    scenarios: list[Scenario]
    verdicts: dict[str, Verdict]
    results: dict[str, tuple[Replayed, ...]]
    times: dict[str, StepTime]


def _predicted(plan: TrainingPlan, gpus: Sequence[Gpu], trust_remote_code: bool) -> _Predicted:
    from memest.estimator.replay.scenarios import scenarios_of, verdict_over
    from memest.estimator.replay.simulated_plan import trace_plan

    rates = gpus[0].memory_gb_s
    by_trace: dict[int, list[Scenario]] = {}
    found = _Predicted([], {}, {}, {})
    for gpu in gpus:
        like_first = replace(gpu, memory_gb_s=rates)
        traced = trace_plan(plan, like_first, trust_remote_code=trust_remote_code)
        if id(traced) not in by_trace:
            by_trace[id(traced)] = scenarios_of(plan, traced)
        scenarios = by_trace[id(traced)]
        limit, spread = usable_and_spread(plan, gpu)
        results = tuple(scenario.under(limit) for scenario in scenarios)
        found.scenarios = found.scenarios or scenarios
        found.results[gpu.name] = results
        time_of_step = _time_of(plan, scenarios[0].traced, gpu)
        if time_of_step is not None:
            found.times[gpu.name] = time_of_step
        found.verdicts[gpu.name] = verdict_over(scenarios, results, limit, spread)
    return found


def _time_of(plan: TrainingPlan, traced: TracedPlan, gpu: Gpu) -> StepTime | None:
    """Return the estimated time of a step.

    None if the plan's own step was not run, or if the host computes a part of it.
    """
    from memest.estimator.hardware.pace import estimate

    if traced.work is None or plan.offloads:
        return None
    return estimate(traced.work, gpu, num_micro_batches=plan.accumulate_grad_batches)


def record_plan(plan: TrainingPlan) -> Recording:
    """Record the run that `predict` predicts, on the GPU of its report's head.

    Raises:
        MemestError: the plan cannot be run, or memest cannot model it.
    """
    from memest.estimator.replay.recording import record_run
    from memest.estimator.replay.scenarios import scenarios_of
    from memest.estimator.replay.simulated_plan import trace_plan

    gpu = _primary(plan)
    traced = trace_plan(plan, gpu)
    scenario = scenarios_of(plan, traced)[0]
    limit = usable_bytes(plan, gpu)
    return record_run(scenario.run, limit, scenario.returns, gpu=gpu.name)


def _primary(plan: TrainingPlan) -> Gpu:
    """Return the GPU of the report's head."""
    is_named = plan.gpu or plan.gpu_memory is not None
    return target_gpus(plan)[0] if is_named else find_gpu(PRIMARY_GPU).beside(plan.beside)


def target_gpus(plan: TrainingPlan) -> list[Gpu]:
    """Return the GPUs of the plan, or the default set.

    Raises:
        MemestError: there is no such GPU, torch refuses the plan's `alloc_conf`, or other processes
            leave no room.
    """
    parse_settings(plan.alloc_conf)
    gpus = [find_gpu(name) for name in plan.gpu]
    if plan.gpu_memory is not None:
        gpus.append(custom_gpu(plan.gpu_memory))
    gpus = gpus or [find_gpu(name) for name in DEFAULT_GPUS]
    return [gpu.beside(plan.beside) for gpu in gpus]


def usable_bytes(plan: TrainingPlan, gpu: Gpu) -> int:
    """Return the bytes that the caching allocator can reserve on `gpu`.

    They are the plan's cap, or the memory without the context and the libraries of several GPUs.
    """
    usable = gpu.limit_bytes - libraries_bytes(plan)
    share = parse_settings(plan.alloc_conf).memory_fraction
    return min(usable, int(share * gpu.memory_bytes), plan.memory_limit or usable)


def usable_and_spread(plan: TrainingPlan, gpu: Gpu) -> tuple[int, int]:
    """Return `usable_bytes`, and its difference between drivers."""
    usable = usable_bytes(plan, gpu)
    return usable, gpu.spread_under(usable, libraries_bytes(plan))
