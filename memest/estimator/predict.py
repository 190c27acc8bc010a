"""Predictions of plans: each GPU's verdict, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memest.child import forked
from memest.errors import MemestError
from memest.estimator.allocator.settings import parse_settings
from memest.estimator.hardware.gpus import DEFAULT_GPUS, Gpu, custom_gpu, find_gpu, libraries_bytes
from memest.estimator.versions import check_torch
from memest.packages import require
from memest.plan import TrainingPlan
from memest.plan.optimizers import BITSANDBYTES, DEEPSPEED, OPTIMIZERS

if TYPE_CHECKING:
    from memest.estimator.replay.recording import Recording
    from memest.estimator.replay.replay import Replayed, TracedPlan
    from memest.estimator.replay.scenarios import Scenario
    from memest.report import Prediction, StepTime, Verdict

PRIMARY_GPU = "h200"  # GPU of a report's head when none is named: the largest of the default set


def predict(plan: TrainingPlan, *, trust_remote_code: bool = False, jobs: int = 1) -> Prediction:
    """Predict the memory of a run of `plan` on each of its GPUs, without a GPU.

    A GPU on which the plan fails has a warning and no verdict.

    Args:
        plan: the plan.
        trust_remote_code: whether code that comes with a model may run.
        jobs: processes among which the kinds of GPU are divided.

    Raises:
        MemestError: the plan cannot be run on any of the GPUs, or memest cannot model it.
    """
    check_torch()
    from memest.estimator.summary import summarise

    if trust_remote_code:
        plan = replace(plan, trust_remote_code=True)

    start_time = time.perf_counter()
    gpus = target_gpus(plan)
    unique_gpus = {gpu.name: gpu for gpu in (_primary(plan), *gpus)}.values()
    gpus_by_chip: dict[tuple[Any, ...], list[Gpu]] = {}
    for gpu in unique_gpus:
        gpus_by_chip.setdefault((gpu.capability, gpu.num_sms), []).append(gpu)
    require(*packages_of(plan))
    import_libraries(plan.model_name, plan.loop, plan.trust_remote_code)
    outcome = _results_on_chips(plan, list(gpus_by_chip.values()), jobs)
    primary = next(gpu for gpu in unique_gpus if gpu.name in outcome.results)
    return summarise(
        plan=plan, primary=primary, scenarios=outcome.scenarios,
        results=outcome.results[primary.name],
        verdicts={g.name: outcome.verdicts[g.name] for g in gpus if g.name in outcome.verdicts},
        times={g.name: outcome.times[g.name] for g in gpus if g.name in outcome.times},
        warnings=[f"fails on {', '.join(names)}: {why}" for why, names in outcome.failed.items()],
        elapsed_s=time.perf_counter() - start_time,
    )  # fmt: skip


def packages_of(plan: TrainingPlan) -> Iterator[str]:
    """Yield the packages that the plan's quantisation, strategy and optimizer need."""
    library = OPTIMIZERS[plan.optim].library
    if plan.use_qlora or library == BITSANDBYTES:
        yield BITSANDBYTES
    if plan.is_deepspeed or library == DEEPSPEED:
        yield DEEPSPEED


@cache
def import_libraries(model_name: str, loop: str, trust_remote_code: bool) -> None:
    """Import the libraries of a plan's model and training `loop`, before processes are forked. The
    processes share them, and the garbage collector does not scan them during a run."""
    from memest.models_meta.registry import resolve_config

    resolve_config(model_name, trust_remote_code=trust_remote_code)
    with _without_metrics():
        for name in ("memest.estimator.replay.simulated_plan", f"memest.loops.{loop}"):
            import_module(name)


@contextmanager
def _without_metrics() -> Iterator[None]:
    """Make torchmetrics skip its imports of matplotlib and scipy in the block, which take 1.4 s."""
    from unittest import mock

    from lightning_utilities.core import imports

    true_bool, true_available = imports.RequirementCache.__bool__, imports.package_available
    slow = ("matplotlib", "scipy")
    is_met = lambda self: self.requirement not in slow and true_bool(self)  # noqa: E731
    is_available = lambda name: name not in slow and true_available(name)  # noqa: E731
    with (
        mock.patch.object(imports.RequirementCache, "__bool__", is_met),
        mock.patch.object(imports, "package_available", is_available),
    ):
        yield


@dataclass(slots=True)
class _Results:
    """Results of a plan on several GPUs, by name of the GPU. `times` are those of one optimizer
    step. `failed` maps the text of an error to the names of the GPUs on which it occurs. A scenario
    is the run of one rank, with an assumed time of deferred frees. `scenarios` and `results`, their
    replays, are those of the first chip. A chip is a kind of GPU: compute capability and number of
    multiprocessors."""

    scenarios: list[Scenario] = field(default_factory=list)
    results: dict[str, tuple[Replayed, ...]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    times: dict[str, StepTime] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: _Results) -> None:
        """Add `other`, the results on other GPUs; `scenarios` and `results` are not changed."""
        self.verdicts |= other.verdicts
        self.times |= other.times
        for why, names in other.failed.items():
            self.failed[why] = [*self.failed.get(why, ()), *names]


def _results_on_chips(plan: TrainingPlan, chips: Sequence[Sequence[Gpu]], jobs: int) -> _Results:
    """Return the results on all `chips`, in up to `jobs` processes. An item of `chips` has the GPUs
    of one chip. The fields `scenarios` and `results` are those of the first chip. If the plan fails
    on the first chip, the newest of the other chips becomes the first, since a newer chip may
    support more. If no other chip is newer, raise the error (`MemestError`)."""
    first_chip, *other_chips = chips
    trial_by_run: dict[int, Trial] = {}

    def results_on(group: Sequence[Sequence[Gpu]]) -> _Results:
        outcome = _Results()
        for gpus in group:
            try:
                outcome.add(_results_on_chip(plan, gpus, trial_by_run))
            except MemestError as error:
                outcome.add(_Results(failed={str(error): [gpu.name for gpu in gpus]}))
        return outcome

    num_groups = max(1, min(jobs, len(chips)))
    own_chips, *forked_groups = (chips[n::num_groups] for n in range(num_groups))
    try:
        if not plan.is_distributed:  # the forks below begin with this run
            _trace(plan, first_chip[0])
        with ExitStack() as stack:
            forks = [stack.enter_context(forked(partial(results_on, g))) for g in forked_groups]
            outcome = _results_on_chip(plan, first_chip, trial_by_run)
            outcome.add(results_on(own_chips[1:]))
            for wait_for_results, group in zip(forks, forked_groups, strict=True):
                results = wait_for_results()
                outcome.add(results_on(group) if results is None else results)
    except MemestError as error:
        other_chips.sort(key=lambda gpus: gpus[0].capability, reverse=True)  # newest first
        if not other_chips or other_chips[0][0].capability <= first_chip[0].capability:
            raise
        outcome = _results_on_chips(plan, other_chips, jobs)
        outcome.add(_Results(failed={str(error): [gpu.name for gpu in first_chip]}))
    return outcome


def _trace(plan: TrainingPlan, gpu: Gpu) -> TracedPlan:
    from memest.estimator.replay.simulated_plan import trace_plan

    return trace_plan(plan, gpu)


def _results_on_chip(
    plan: TrainingPlan, gpus: Sequence[Gpu], trial_by_run: dict[int, Trial]
) -> _Results:
    """Return the results on `gpus` of one chip, from one simulated run on the first of them.
    `trial_by_run` has trials on other chips by the `id` of their run, for reuse if the run is the
    same."""
    from memest.estimator.hardware.pace import estimate

    outcome = _Results()

    def trace(gpu: Gpu) -> TracedPlan:
        return _trace(plan, replace(gpu, memory_gb_s=gpus[0].memory_gb_s))

    for gpu, trial in trials(plan, gpus, trace, trial_by_run):
        if not outcome.scenarios:
            outcome.scenarios = trial.scenarios
        outcome.results[gpu.name] = trial.results
        outcome.verdicts[gpu.name] = trial.verdict
        work = trial.scenarios[0].traced.work
        if work is None or plan.offloads:  # an interpolated program, or the host computes a part
            continue
        step_time = estimate(work, gpu, num_micro_batches=plan.accumulate_grad_batches)
        if step_time is not None:
            outcome.times[gpu.name] = step_time
    return outcome


def record_plan(plan: TrainingPlan) -> Recording:
    """Return a recording of the predicted run of `plan`, on the first GPU of its report."""
    from memest.estimator.replay.recording import record_run

    gpu = _primary(plan)
    scenario = Trial(_trace(plan, gpu), plan, gpu).scenarios[0]
    return record_run(scenario.run, usable_bytes(plan, gpu), scenario.timing, gpu=gpu.name)


def _primary(plan: TrainingPlan) -> Gpu:
    """Return the GPU of the report's figures: the first that the plan names, or `PRIMARY_GPU`."""
    if plan.gpu or plan.gpu_memory is not None:
        return target_gpus(plan)[0]
    return find_gpu(PRIMARY_GPU).beside(plan.beside)


def target_gpus(plan: TrainingPlan) -> list[Gpu]:
    """Return the GPUs that the plan names, or `DEFAULT_GPUS`.

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
    """Return the bytes that the caching allocator can reserve on `gpu`. They are the least of: the
    GPU's memory without CUDA context and libraries, `alloc_conf`'s share, the plan's limit."""
    usable = gpu.limit_bytes - libraries_bytes(plan)
    share = parse_settings(plan.alloc_conf).memory_fraction
    return min(usable, int(share * gpu.memory_bytes), plan.memory_limit or usable)


class Trial:
    """Result of a plan on one GPU; each attribute is computed when it is first read. `traced` is
    the plan's simulated run. Replays of `like`, its result on another GPU, are reused."""

    def __init__(
        self, traced: TracedPlan, plan: TrainingPlan, gpu: Gpu, like: Trial | None = None
    ) -> None:
        self.traced, self._plan, self._gpu = traced, plan, gpu
        self._limit = usable_bytes(plan, gpu)
        if like is not None:
            self.scenarios = like.scenarios

    @cached_property
    def scenarios(self) -> list[Scenario]:
        """Runs of each rank, one for each assumed time of deferred frees (`FreeTiming`). The run
        with the most reserved bytes comes first."""
        from memest.estimator.replay.scenarios import scenarios_of

        return scenarios_of(self._plan, self.traced)

    @cached_property
    def results(self) -> tuple[Replayed, ...]:
        """Replays of `scenarios` on this GPU, in the same order."""
        return tuple(scenario.under(self._limit) for scenario in self.scenarios)

    @cached_property
    def verdict(self) -> Verdict:
        """Verdict on the run on this GPU: `fits` if every scenario fits, OOM if a rank fails in all
        its scenarios, otherwise `may` (`verdict_over`)."""
        from memest.estimator.replay.scenarios import verdict_over

        spread = self._gpu.spread_under(self._limit, libraries_bytes(self._plan))
        return verdict_over(self.scenarios, self.results, self._limit, spread)

    @property
    def fits(self) -> bool:
        """True if the run fits in every scenario."""
        return all(result.failed is None for result in self.results)


def trials(
    plan: TrainingPlan, gpus: Iterable[Gpu], trace: Callable[[Gpu], TracedPlan],
    trial_by_run: dict[int, Trial] | None = None,
) -> Iterator[tuple[Gpu, Trial]]:  # fmt: skip
    """Yield (GPU, its `Trial`) for each GPU; GPUs with the same program share replays. `trace`
    returns the plan's simulated run on a GPU. `trial_by_run` has earlier trials by the `id` of that
    run (None: no trials). They are reused, and new ones are added."""
    trial_by_run = {} if trial_by_run is None else trial_by_run
    for gpu in gpus:
        traced = trace(gpu)
        trial = Trial(traced, plan, gpu, trial_by_run.get(id(traced)))
        trial_by_run[id(traced)] = trial
        yield gpu, trial
