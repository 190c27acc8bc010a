"""Memory per GPU under each strategy, over the number of GPUs, and its constant terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from memest.errors import MemestError, PlanError, closest, raise_if_all_failed, result_or_error
from memest.estimator.search.suite import predict_each
from memest.plan import TrainingPlan
from memest.plan.keys import STRATEGIES
from memest.plan.training_plan import PLAN_KEYS
from memest.report import Prediction

DEVICES = (1, 2, 4, 8, 16, 32, 64)  # default numbers of GPUs
DEFAULT_STRATEGIES = ("ddp", "deepspeed_stage_2", "deepspeed_stage_3", "fsdp", "fsdp2")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLine:
    """Reports of one strategy for each number of GPUs."""

    strategy: str
    reports: Mapping[int, Prediction]  # by the number of GPUs, without those that failed
    missing: tuple[int, ...] = ()  # numbers of GPUs that could not be predicted
    notes: tuple[str, ...] = ()  # settings of the strategy, or why a number of GPUs is missing

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the reports as JSON values, each with its strategy and number of GPUs in front."""
        return [
            {"strategy": self.strategy, "devices": devices, **report.to_dict()}
            for devices, report in self.reports.items()
        ]


def scale(
    values: Mapping[str, Any],
    *,
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    devices: Sequence[int] = DEVICES,
    jobs: int | None = None,
) -> list[ScalingLine]:
    """Predict the plan of `values` under each of `strategies` on each number of GPUs.

    A combination that contradicts itself, or that memest cannot model, is left out with a note.

    Raises:
        MemestError: there is no such strategy, or nothing at all can be predicted; the error is
            the first one's.
    """
    for strategy in strategies:
        _check_strategy(strategy)
    for number in devices:
        TrainingPlan(model_name="any", devices=number)
    numbers = sorted(set(devices))
    found: dict[tuple[str, int], Any] = {
        (strategy, number): result_or_error(_plan, values, strategy, number)
        for strategy, number in product(dict.fromkeys(strategies), numbers)
    }
    plans = {key: plan for key, plan in found.items() if isinstance(plan, TrainingPlan)}
    reports = predict_each(list(plans.values()), jobs=jobs)
    found |= dict(zip(plans, reports, strict=True))
    raise_if_all_failed(found.values())
    return [
        _line(values, strategy, {n: found[strategy, n] for n in numbers})
        for strategy in dict.fromkeys(strategies)
    ]


def _check_strategy(strategy: str) -> None:
    known = [name for name in STRATEGIES if name != "auto"]
    if strategy not in known:
        near = closest(strategy, known) or known
        raise PlanError(
            f"there is no strategy `{strategy[:100]}` for several GPUs",
            hint=f"choose from {', '.join(f'`{name}`' for name in near)}",
        )


def _plan(values: Mapping[str, Any], strategy: str, devices: int) -> TrainingPlan:
    """Return the plan under one strategy, without the keys that only other strategies read."""
    unread = _unread(values, strategy)
    kept = {key: value for key, value in values.items() if key not in unread}
    kept |= {"strategy": strategy, "devices": devices}
    if strategy.endswith("_offload"):
        kept["optim"] = "deepspeed_cpu"
    return TrainingPlan.from_dict(kept)


def _unread(values: Mapping[str, Any], strategy: str) -> list[str]:
    """Return the keys of `values` that are not at their defaults and that `strategy` ignores."""
    return [
        name
        for name, row in PLAN_KEYS.items()
        if row.need and not strategy.startswith(row.need.only_of)
        and values.get(name) not in (None, [], (), row.default)
    ]  # fmt: skip


def _line(
    values: Mapping[str, Any], strategy: str, results: Mapping[int, Prediction | MemestError]
) -> ScalingLine:
    notes = [f"`{key}` is not read" for key in _unread(values, strategy)]
    reports = {n: r for n, r in results.items() if isinstance(r, Prediction)}
    optim = values.get("optim")
    if reports and strategy.endswith("_offload") and optim != "deepspeed_cpu":
        notes.append("`optim` is `deepspeed_cpu`, the one that offload takes")
    reasons: dict[str, list[int]] = {}
    for number, result in results.items():
        if isinstance(result, MemestError):
            reasons.setdefault(str(result), []).append(number)
    for reason, numbers in reasons.items():
        notes.append(f"not predicted on {', '.join(map(str, numbers))} GPUs: {reason}")
    missing = tuple(number for number in results if number not in reports)
    return ScalingLine(strategy=strategy, reports=reports, missing=missing, notes=tuple(notes))


def kind_bytes(report: Prediction) -> dict[str, int]:
    """Return bytes at the peak by kind of term, the largest first."""
    sizes: dict[str, int] = {}
    for term in report.terms:
        sizes[term.kind] = sizes.get(term.kind, 0) + term.num_bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def constant_terms(line: ScalingLine) -> dict[str, int]:
    """Return the terms that do not shrink: bytes by kind on most GPUs, the largest first.

    Between the two largest numbers of GPUs, m and n, a kind of a bytes falls to b. It is constant
    if b / a > (1 + m / n) / 2. A single number of GPUs has no constant terms.
    """
    numbers = sorted(line.reports)
    if len(numbers) < 2:
        return {}
    m, n = numbers[-2:]
    before, last = kind_bytes(line.reports[m]), kind_bytes(line.reports[n])
    return {
        kind: size
        for kind, size in last.items()
        if kind != "rounding" and size and 2 * n * size > (n + m) * before.get(kind, 0)
    }
