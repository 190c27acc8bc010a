"""Many plans, each predicted separately, in one process per core.

`scale` varies the GPUs and the strategy of a plan, and `growths` the settings of the allocator.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, zip_longest
from operator import attrgetter
from typing import Any

from memest.engines import find_engine
from memest.errors import MemestError, PlanError, closest, raise_if_all_failed, result_or_error
from memest.estimator.predict import predict, target_gpus, usable_bytes
from memest.models_meta.registry import check_name
from memest.plan import TrainingPlan
from memest.plan.keys import STRATEGIES
from memest.plan.training_plan import PLAN_KEYS
from memest.report import Prediction

MIN_PLANS_FOR_PROCESSES = 4  # plans below which starting processes costs more than it saves


def predict_all(plans: Sequence[TrainingPlan], *, jobs: int | None = None) -> list[Prediction]:
    """Return the predictions of `plans`, in order, made in `jobs` processes as in `predict_each`.
    If a plan cannot be predicted, raise the first error, with the plan's name if there are several
    plans."""
    predicted, failed = partition(plans, predict_each(plans, jobs=jobs))
    if failed:
        plan, error = failed[0]
        raise error if len(plans) == 1 else with_label(plan, error)
    return [report for _, report in predicted]


def predict_each(
    plans: Sequence[TrainingPlan], *, jobs: int | None = None
) -> list[Prediction | MemestError]:
    """Return the prediction of each of `plans`, or the error if it cannot be predicted. `jobs` is
    the number of processes; None is one per core, or one if plans are few. Raise `MemestError` if a
    plan names a model or a GPU that does not exist."""
    for plan in plans:  # fail at once, before heavy imports
        target_gpus(plan)
        check_name(plan.model_name)
    jobs_per_plan = 1
    if len(plans) == 1:  # its kinds of GPU are divided among processes
        jobs_per_plan = jobs or os.cpu_count() or 1
    if jobs is None and len(plans) < MIN_PLANS_FOR_PROCESSES:
        jobs = 1
    return find_engine("local", jobs).map_groups(
        partial(_predict_group, jobs=jobs_per_plan), plans, work=attrgetter("is_distributed"),
        alike=lambda plan: replace(plan, name="", memory_limit=None, host_memory=None, steps=2),
        label=lambda group: group[0].label + (f" and {len(group) - 1} alike" if group[1:] else ""),
    )  # fmt: skip


def _predict_group(plans: Sequence[TrainingPlan], *, jobs: int) -> list[Prediction | MemestError]:
    return [result_or_error(predict, plan, jobs=jobs) for plan in plans]


def partition(
    plans: Sequence[TrainingPlan], results: Sequence[Prediction | MemestError]
) -> tuple[list[tuple[TrainingPlan, Prediction]], list[tuple[TrainingPlan, MemestError]]]:
    """Split `plans` and their `results`, which are in the same order, into two lists: (plan,
    prediction) pairs and (plan, error) pairs."""
    pairs = list(zip(plans, results, strict=True))
    predicted = [(plan, result) for plan, result in pairs if isinstance(result, Prediction)]
    return predicted, [(plan, result) for plan, result in pairs if isinstance(result, MemestError)]


def with_label(plan: TrainingPlan, error: MemestError) -> MemestError:
    """Return `error` with the name of `plan` in front of its message."""
    labelled = type(error)(f"experiment `{plan.label}`: {error}")
    labelled.hint = error.hint
    return labelled


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLine:
    """Predictions of a plan under one strategy, a report for each number of GPUs. `missing` has the
    numbers of GPUs without a prediction."""

    strategy: str
    reports: Mapping[int, Prediction]  # reports by number of GPUs, without those that failed
    missing: tuple[int, ...] = ()  # numbers of GPUs that could not be predicted
    notes: tuple[str, ...] = ()  # settings of the strategy, or why a number of GPUs is missing

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the reports as JSON values, each with its strategy and number of GPUs as first
        keys."""
        return [
            {"strategy": self.strategy, "devices": devices, **report.to_dict()}
            for devices, report in self.reports.items()
        ]


def scale(
    values: Mapping[str, Any], *, strategies: Sequence[str], devices: Sequence[int],
    jobs: int | None = None,
) -> list[ScalingLine]:  # fmt: skip
    """Predict the plan with keys and values `values` under each of `strategies`. Each is predicted
    on each number of GPUs in `devices`. A combination that contradicts itself, or that memest
    cannot model, is left out with a note. `jobs` is the number of processes, as in `predict_each`.
    Raise `MemestError` if there is no such strategy, or nothing at all can be predicted; the error
    is the first one's."""
    choices = [name for name in STRATEGIES if name != "auto"]
    for strategy in strategies:
        if strategy not in choices:
            matches = closest(strategy, choices) or choices
            raise PlanError(
                f"there is no strategy `{strategy[:100]}` for several GPUs",
                hint=f"choose from {', '.join(f'`{name}`' for name in matches)}",
            )
    for number in devices:
        TrainingPlan(model_name="any", devices=number)  # raises if it is no number of GPUs
    numbers = sorted(set(devices))
    results: dict[tuple[str, int], Any] = {
        (strategy, number): result_or_error(_plan, values, strategy, number)
        for strategy, number in product(dict.fromkeys(strategies), numbers)
    }
    plans = {key: plan for key, plan in results.items() if isinstance(plan, TrainingPlan)}
    reports = predict_each(list(plans.values()), jobs=jobs)
    results |= dict(zip(plans, reports, strict=True))
    raise_if_all_failed(results.values())
    return [
        _line(values, strategy, {n: results[strategy, n] for n in numbers})
        for strategy in dict.fromkeys(strategies)
    ]


def _plan(values: Mapping[str, Any], strategy: str, devices: int) -> TrainingPlan:
    """Return the plan with the keys `values` and `strategy` on `devices` GPUs. Keys that the
    strategy ignores are left out."""
    unread = _unread_keys(values, strategy)
    plan_values = {key: value for key, value in values.items() if key not in unread}
    plan_values |= {"strategy": strategy, "devices": devices}
    if strategy.endswith("_offload"):
        plan_values["optim"] = "deepspeed_cpu"
    return TrainingPlan.from_dict(plan_values)


def _unread_keys(values: Mapping[str, Any], strategy: str) -> list[str]:
    """Return the keys of `values` that `strategy` ignores and that do not have their default."""
    return [
        name
        for name, row in PLAN_KEYS.items()
        if row.need and not strategy.startswith(row.need.only_of)
        and values.get(name) not in (None, [], (), row.default)
    ]  # fmt: skip


def _line(
    values: Mapping[str, Any], strategy: str, results: Mapping[int, Prediction | MemestError]
) -> ScalingLine:
    notes = [f"`{key}` is not read" for key in _unread_keys(values, strategy)]
    reports: dict[int, Prediction] = {}
    numbers_by_error: dict[str, list[int]] = {}
    for number, result in results.items():
        if isinstance(result, MemestError):
            numbers_by_error.setdefault(str(result), []).append(number)
        else:
            reports[number] = result
    if reports and strategy.endswith("_offload") and values.get("optim") != "deepspeed_cpu":
        notes.append("`optim` is `deepspeed_cpu`, the one that offload takes")
    for error, numbers in numbers_by_error.items():
        notes.append(f"not predicted on {', '.join(map(str, numbers))} GPUs: {error}")
    missing = tuple(number for number in results if number not in reports)
    return ScalingLine(strategy=strategy, reports=reports, missing=missing, notes=tuple(notes))


def kind_bytes(report: Prediction) -> dict[str, int]:
    """Return {kind of memory, such as `grads`: bytes} of the allocated peak, largest first."""
    sizes: Counter[str] = Counter()
    for term in report.terms:
        sizes[term.kind] += term.num_bytes
    return dict(sizes.most_common())


def constant_terms(line: ScalingLine) -> dict[str, int]:
    """Return {kind of memory that more GPUs do not shrink: bytes on the most GPUs}, largest first.
    The two largest numbers of GPUs, m < n, are compared. A fully sharded kind takes m/n times as
    many bytes on n GPUs as on m. A kind counts as constant if its own factor is nearer to 1 than to
    m/n. The result is {} for a single number of GPUs."""
    numbers = sorted(line.reports)
    if len(numbers) < 2:
        return {}
    m, n = numbers[-2:]
    bytes_on_m, bytes_on_n = kind_bytes(line.reports[m]), kind_bytes(line.reports[n])
    sizes = {}
    for kind, size in bytes_on_n.items():
        is_constant = 2 * n * size > (n + m) * bytes_on_m.get(kind, 0)  # size/before > (1 + m/n)/2
        if kind != "rounding" and size and is_constant:
            sizes[kind] = size
    return sizes


SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:64")  # compared by default


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Memory at each step of a run with one allocator setting: on a GPU without a limit, and on the
    plan's GPU."""

    alloc_conf: str
    allocated: tuple[int, ...]  # bytes at the peak of each step
    reserved: tuple[int, ...]  # bytes at the end of each step
    on_gpu: tuple[int, ...]  # reserved at the end of each step, up to the step that fails
    failed_step: int | None  # step that runs out of memory on the GPU, from 0

    @property
    def label(self) -> str:
        """The setting as text, or "PyTorch's defaults"."""
        return self.alloc_conf or "PyTorch's defaults"

    def rows(self) -> list[dict[str, Any]]:
        """Return one table row per step, as JSON values."""
        return [
            {
                "alloc_conf": self.alloc_conf,
                "step": step,
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "reserved_on_gpu_bytes": on_gpu,
                "fragmentation_bytes": reserved - allocated,
                "is_oom": step == self.failed_step,
            }
            for step, (allocated, reserved, on_gpu) in enumerate(
                zip_longest(self.allocated, self.reserved, self.on_gpu)
            )
        ]


def growths(
    plan: TrainingPlan, settings: Sequence[str] = SETTINGS
) -> tuple[Prediction, list[Growth]]:
    """Predict `plan`, and its memory at each step under each of `settings` for its first GPU. Each
    setting is a text for `PYTORCH_ALLOC_CONF`; "" is torch's defaults. Raise `MemestError` if torch
    refuses a setting, or the plan cannot be predicted."""
    from memest.estimator.replay.scenarios import run_of_plan
    from memest.estimator.replay.simulated_plan import trace_plan

    plans = [replace(plan, alloc_conf=text) for text in dict.fromkeys(settings)]
    for variant in plans:
        target_gpus(variant)
    gpu = target_gpus(plan)[0]
    traced = trace_plan(plan, gpu)
    results = []
    for variant in plans:
        run = run_of_plan(variant, traced)
        unlimited, limited = run.on(None), run.on(usable_bytes(variant, gpu))
        rows_by_step = [[r for r in unlimited.rows if r.step == step] for step in range(plan.steps)]
        reserved_at_end = {row.step: row.reserved_bytes for row in limited.rows}
        failed_step = None if limited.failed is None else limited.failed.step
        num_whole_steps = plan.steps if failed_step is None else failed_step
        growth = Growth(
            alloc_conf=variant.alloc_conf,
            allocated=tuple(max(row.peak_allocated_bytes for row in rows) for rows in rows_by_step),
            reserved=tuple(rows[-1].reserved_bytes for rows in rows_by_step),
            on_gpu=tuple(reserved_at_end[step] for step in range(num_whole_steps)),
            failed_step=failed_step,
        )
        results.append(growth)
    return predict(plan), results
