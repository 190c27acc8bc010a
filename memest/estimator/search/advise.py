"""Advice: changes that make a plan fit, each an exact prediction.

The search, in the order of the kinds of cost (`changes.Cost`):

1. Each change alone; of graded ones (micro-batch, lengths) the mildest that is enough, by
   bisection, and the next one where its margin is tight.
2. If a kind of cost has no answer yet, and none cheaper has: all changes up to that kind at
   once. If that fits, changes are removed or made milder one by one, dearest first, as long as
   it still fits. If three or more remain, pairs of the strongest changes are tried, and then
   triples, up to the first that fits.

Left out: combinations of dearer kinds than an answer already found. Also left out are answers that
exist only because a stronger or additional change makes a plan larger. `Advice.is_complete` is
False if the search ended for its number of predictions.
"""

import itertools
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from memest.child import forked
from memest.engines import WATCHERS, Event, notify
from memest.errors import MemestError, PlanError, result_or_error
from memest.estimator.hardware.gpus import Gpu, find_gpu, list_gpus
from memest.estimator.predict import import_libraries, predict
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.search.changes import (
    LAST_RESORTS,
    NOT_TRIED,
    Change,
    Cost,
    Technique,
    apply,
    least_bytes,
    only,
    techniques_for,
)
from memest.estimator.search.commands import ModelFacts, predict_command, training_lines
from memest.plan import TrainingPlan
from memest.report import Outcome, Prediction, StepTime, Verdict

SCHEMA = "memest.advice/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A variant of a plan: the changes made to it, and its prediction on one GPU. It also has the
    command that predicts it, and the lines to change in a training script."""

    changes: tuple[Change, ...]  # changes, cheapest first
    plan: TrainingPlan
    verdict: Verdict
    time: StepTime | None  # estimated time of a step, or None
    host_bytes: int  # host memory of the run, such as paged optimizer state
    command: str  # command that predicts it
    training_lines: tuple[str, ...]  # changes of the training script

    @property
    def fits(self) -> bool:
        """True if the plan fits in every simulated scenario of ranks and of GPU timing."""
        return self.verdict.verdict is Outcome.FITS

    @property
    def cost(self) -> Cost:
        """Cost of the most expensive change."""
        return max((change.cost for change in self.changes), default=Cost.NOTHING)

    @property
    def rank(self) -> tuple[Cost, float, int]:
        """Sort key: kind of cost, seconds of a step (infinite if unknown), number of changes."""
        return self.cost, self.time.seconds if self.time else math.inf, len(self.changes)

    @property
    def title(self) -> str:
        """Text of the option's changes, in one line; "as it is" without changes."""
        return " + ".join(change.title for change in self.changes) or "as it is"

    def to_dict(self) -> dict[str, Any]:
        """Return the option as JSON values."""
        return {
            "changes": [
                {"title": c.title, "cost": c.cost.words, "price": c.price, "updates": c.updates}
                for c in self.changes
            ],
            "cost": self.cost.words,
            "plan": self.plan.to_dict(),
            "fits": self.fits,
            "is_tight": self.verdict.is_tight,
            "peak_reserved_bytes": self.verdict.reserved_bytes,
            "needs_bytes": self.verdict.needs_bytes,
            "margin_bytes": self.verdict.margin_bytes,
            "time": asdict(self.time) if self.time else None,
            "host_bytes": self.host_bytes,
            "command": self.command,
            "training_lines": list(self.training_lines),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A change that is not possible for the plan or the model, by its title, with the reason."""

    title: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Result of `advise`: options that make a plan fit one GPU, changes that do not suffice, and
    changes that are not possible. `is_complete` is False if the number of predictions ended the
    search."""

    gpu: str
    limit_bytes: int  # bytes that the caching allocator can reserve, or the plan's `memory_limit`
    current: Option  # the plan without changes
    options: tuple[Option, ...]  # options that fit, cheapest in kind first; empty if `current` fits
    not_enough: tuple[Option, ...]  # single changes that do not fit alone, by their cost
    smallest: Option  # the option with the smallest need
    refused: tuple[Refused, ...]
    not_tried: tuple[str, ...]
    num_predictions: int
    is_complete: bool  # False if the number of predictions ended the search

    @property
    def fits(self) -> bool:
        """True if the plan fits without changes."""
        return self.current.fits

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as JSON values."""
        return {
            "schema": SCHEMA, "gpu": self.gpu, "limit_bytes": self.limit_bytes, "fits": self.fits,
            "current": self.current.to_dict(),
            "options": [option.to_dict() for option in self.options],
            "not_enough": [option.to_dict() for option in self.not_enough],
            "smallest": self.smallest.to_dict(),
            "refused": list(map(asdict, self.refused)),
            "not_tried": list(self.not_tried),
            "num_predictions": self.num_predictions, "is_complete": self.is_complete,
        }  # fmt: skip


class _Spent(Exception):
    """Raised when the search has made `max_predictions` predictions."""


def advise(plan: TrainingPlan, gpu: Gpu | str, *, max_predictions: int = 40) -> Advice:
    """Return changes with which `plan` fits `gpu`; those with the least `Cost` come first. The
    plan's own GPUs are ignored; its `memory_limit` applies. At most `max_predictions` plans are
    predicted, after which the advice is incomplete. Raise `PlanError` if `max_predictions` is below
    1, or there is no such GPU. Raise `MemestError` if the plan cannot be predicted as it is."""
    if max_predictions < 1:
        raise PlanError(
            f"`max_predictions` is {max_predictions}", hint="give at least 1; 40 is plenty"
        )
    target = find_gpu(gpu) if isinstance(gpu, str) else gpu
    search = _Search(_on_gpu(plan, target), target, max_predictions)
    current, prediction = search.predict_current()
    options: dict[TrainingPlan, Option] = {}
    techniques: tuple[Technique, ...] = ()
    is_complete = True
    if not current.fits:
        techniques = techniques_for(search.plan, search.facts(prediction), target)
        search.predict_ahead(techniques)
        try:
            search.run(techniques, options)
        except _Spent:
            is_complete = False
    all_options = search.option_by_plan.values()
    order = [change for technique in techniques for change in technique.changes]
    not_enough = [option for option in all_options if len(option.changes) == 1 and not option.fits]
    not_enough.sort(key=lambda option: (option.cost, order.index(option.changes[0])))
    return Advice(
        gpu=target.name, limit_bytes=prediction.verdicts[target.name].limit_bytes, current=current,
        options=tuple(sorted(options.values(), key=lambda option: option.rank)),
        not_enough=tuple(not_enough),
        smallest=min(all_options, key=lambda option: option.verdict.needs_bytes),
        refused=tuple(search.refused), not_tried=NOT_TRIED, num_predictions=search.num_predictions,
        is_complete=is_complete,
    )  # fmt: skip


MAX_CHANGES = 8  # number of changed plans that `cheapest_change` predicts
MAX_CALLS = 70_000  # operator calls of an answer's runs, 4 s; changed runs count as equally long


def cheapest_change(plan: TrainingPlan, gpu: Gpu | str, prediction: Prediction) -> Option | None:
    """Return the plan with the one change of least `Cost` that makes it fit `gpu`. Return None if
    none is found. `prediction` is that of `plan`, with a verdict for `gpu`. At most `MAX_CHANGES`
    changes are tried, and fewer for a long run (`MAX_CALLS`)."""
    target = find_gpu(gpu) if isinstance(gpu, str) else gpu
    traced = trace_plan(_on_gpu(plan, target), target)
    max_predictions = min(MAX_CHANGES, MAX_CALLS // traced.program.coverage.num_ops - 1)
    search = _Search(_on_gpu(plan, target), target, max_predictions)
    cheapest: Option | None = None
    limit_bytes = prediction.verdicts[target.name].limit_bytes
    techniques = only(  # leave out changes whose lower bound does not fit
        techniques_for(search.plan, search.facts(prediction), target),
        lambda change: least_bytes(change, traced) <= limit_bytes,
    )
    with suppress(_Spent, MemestError):
        for option in search._singles(techniques):
            if cheapest is None or (option.cost == cheapest.cost and not option.verdict.is_tight):
                cheapest = option
            if not cheapest.verdict.is_tight or option.cost != cheapest.cost:
                break
    return cheapest


def _on_gpu(plan: TrainingPlan, gpu: Gpu) -> TrainingPlan:
    if gpu.whole or any(known.name == gpu.name for known in list_gpus()):
        return replace(plan, gpu=(gpu.name,), gpu_memory=None)
    return replace(plan, gpu=(), gpu_memory=gpu.memory_bytes)


@dataclass(slots=True)
class _Search:
    """Search for changes with which `plan` fits `gpu`, and the predictions made for it."""

    plan: TrainingPlan
    gpu: Gpu
    max_predictions: int
    num_predictions: int = 0
    refused: list[Refused] = field(default_factory=list)
    option_by_plan: dict[TrainingPlan, Option] = field(default_factory=dict)  # predicted, in order
    result_by_plan: dict[TrainingPlan, Prediction | MemestError] = field(default_factory=dict)
    jobs: int = os.cpu_count() or 1
    _facts: ModelFacts | None = None

    def predict_current(self) -> tuple[Option, Prediction]:
        """Predict the plan without changes; return (option, prediction)."""
        self.num_predictions += 1
        import_libraries(self.plan.model_name, self.plan.loop, self.plan.trust_remote_code)
        prediction = None
        if self.jobs > 1:  # in a fork, since a process that has run autograd cannot fork again
            with forked(partial(predict, self.plan)) as wait_for_prediction:
                prediction = wait_for_prediction()
        if prediction is None:
            self.jobs = 1
            prediction = predict(self.plan)
        self.option_by_plan[self.plan] = self._option(self.plan, (), prediction)
        return self.option_by_plan[self.plan], prediction

    def predict_ahead(self, techniques: Sequence[Technique]) -> None:
        """Predict each change of `techniques` alone, in forked processes. Store the results by plan
        in `result_by_plan`, from which `predict_with` takes them."""

        def singles(part: int) -> dict[TrainingPlan, Prediction | MemestError]:
            WATCHERS.set(())
            with suppress(_Spent):
                for technique, cost in itertools.product(techniques[part :: self.jobs], Cost):
                    if cost not in LAST_RESORTS:
                        list(self._technique_options(technique, cost))
            return self.result_by_plan

        if self.jobs > 1:
            label = f"single changes in {self.jobs} processes"
            notify(Event(label=label, is_done=False, weight=0, total=0, task=self.plan))
            with ExitStack() as stack:
                parts = [partial(singles, n) for n in range(min(self.jobs, len(techniques)))]
                for wait_for_results in [stack.enter_context(forked(part)) for part in parts]:
                    self.result_by_plan |= wait_for_results() or {}  # None if the fork failed

    def facts(self, prediction: Prediction) -> ModelFacts:
        """Return facts about the plan's model, which `training_lines` needs. `prediction` is the
        plan's."""
        self._facts = _model_facts(self.plan, prediction)
        return self._facts

    def predict_with(self, changes: Iterable[Change]) -> Option | None:
        """Predict the plan with `changes`; return None if they are impossible. Raise `_Spent` if
        `max_predictions` predictions have been made."""
        ordered = tuple(sorted(changes, key=lambda change: change.cost))
        title = " + ".join(change.title for change in ordered)
        try:
            plan = apply(self.plan, ordered)
            if plan not in self.option_by_plan:
                if self.num_predictions >= self.max_predictions:
                    raise _Spent
                self.num_predictions += 1
                if plan not in self.result_by_plan:
                    notify(Event(label=title, is_done=False, weight=0, total=0, task=plan))
                    self.result_by_plan[plan] = result_or_error(predict, plan)
                prediction = self.result_by_plan[plan]
                if isinstance(prediction, MemestError):
                    raise prediction
                self.option_by_plan[plan] = self._option(plan, ordered, prediction)
            option = self.option_by_plan[plan]
            if len(ordered) < len(option.changes):  # the other changes had no effect
                option = self.option_by_plan[plan] = replace(option, changes=ordered)
            return option
        except MemestError as error:
            self.refused.append(Refused(title=title, reason=str(error)))
            return None

    def _fits(self, changes: Iterable[Change]) -> bool:
        option = self.predict_with(changes)
        return option is not None and option.fits

    def _option(
        self, plan: TrainingPlan, changes: tuple[Change, ...], prediction: Prediction
    ) -> Option:
        facts = self._facts
        return Option(
            changes=changes, plan=plan, verdict=prediction.verdicts[self.gpu.name],
            time=prediction.times.get(self.gpu.name), host_bytes=prediction.host_bytes,
            command=predict_command(plan),
            training_lines=training_lines(self.plan, plan, facts) if facts and changes else (),
        )  # fmt: skip

    def run(self, techniques: Sequence[Technique], options: dict[TrainingPlan, Option]) -> None:
        """Search for changes from `techniques` with which the plan fits, and add them to `options`.
        `options` has each option by its plan: single changes first, then combinations. Raise
        `_Spent` if the number of predictions is used up; `options` has those found so far."""
        for option in self._singles(techniques):
            options[option.plan] = option
        titles = {refused.title for refused in self.refused}
        usable = only(techniques, lambda change: change.title not in titles)
        for cost in (c for c in Cost if c not in LAST_RESORTS):
            if any(option.cost <= cost for option in options.values()):
                return
            for option in self._combinations(usable, cost):
                options[option.plan] = option

    def _singles(self, techniques: Sequence[Technique]) -> Iterator[Option]:
        """Yield options with a single change that fit, cheapest first. For each technique and cost,
        yield the weakest change that fits. If its fit is tight, another driver may leave too little
        memory. So a graded technique yields stronger changes too, up to one whose fit is not
        tight."""
        has_found = False
        for cost, technique in itertools.product(Cost, techniques):
            if cost in LAST_RESORTS and has_found:
                continue
            for option in self._technique_options(technique, cost):
                has_found = True
                yield option

    def _technique_options(self, technique: Technique, cost: Cost) -> Iterator[Option]:
        """Yield the option of the technique's weakest change of `cost` that fits, if any. If
        changes are graded, stronger ones follow (see `_graded`)."""
        if technique.is_graded and technique.changes[0].cost is cost:
            yield from self._graded(technique)
        elif not technique.is_graded:
            predicted = (self.predict_with([c]) for c in technique.changes if c.cost is cost)
            fitting = (option for option in predicted if option and option.fits)
            yield from itertools.islice(fitting, 1)

    def _graded(self, technique: Technique) -> Iterator[Option]:
        """Yield the option with the technique's weakest change that fits. Then yield stronger ones,
        up to one whose fit is not tight, so that another driver cannot leave too little memory."""
        mildest = self._weakest_fitting(technique, [])
        if mildest is None:
            return
        for change in technique.changes[technique.changes.index(mildest) :]:
            option = self.predict_with([change])
            if option is None or not option.fits:
                return
            yield option
            if not option.verdict.is_tight:
                return

    def _weakest_fitting(self, technique: Technique, others: Sequence[Change]) -> Change | None:
        """Return the technique's weakest change that fits together with `others`, or None. The
        search is a bisection: each change has to save more than the one before."""
        grades = list(technique.changes)
        while grades and (strongest := self.predict_with([*others, grades[-1]])) is None:
            grades.pop()  # an invalid grade, such as a text too short for its image
        if not grades or strongest is None or not strongest.fits:
            return None
        last = len(grades) - 1  # it fits; `bisect_left` finds the first that does
        return grades[bisect_left(grades, True, hi=last, key=lambda g: self._fits([*others, g]))]

    def _combinations(self, techniques: Sequence[Technique], cost: Cost) -> Iterator[Option]:
        """Yield options with several changes from `techniques`, with which the plan fits. Each
        change is needed: without it, the plan does not fit. The most expensive change of an option
        costs `cost`."""
        strongest = _strongest(techniques, cost)
        if len(strongest) < 2 or _costs(strongest)[-1] < cost:
            return
        if not self._fits(change for _, change in strongest):
            return
        minimal = self._minimized(strongest)
        yield minimal
        for size in range(2, len(minimal.changes)):
            groups = [g for g in itertools.combinations(strongest, size) if _costs(g)[-1] == cost]
            for group in sorted(groups, key=_costs):
                if self._fits(change for _, change in group):
                    yield self._minimized(group)
                    return

    def _minimized(self, group: Sequence[tuple[Technique, Change]]) -> Option:
        """Return the option with only the needed changes of `group`, each as weak as possible."""
        needed = list(group)
        by_cost = sorted(reversed(group), key=lambda pair: pair[1].cost, reverse=True)
        for technique, change in by_cost:
            others = [c for other, c in needed if other is not technique]
            if self._fits(others):
                needed = [pair for pair in needed if pair[0] is not technique]
                continue
            if technique.is_graded:
                milder = self._weakest_fitting(technique, others)
            else:
                earlier = technique.changes[: technique.changes.index(change)]
                milder = next((c for c in earlier if self._fits([*others, c])), None)
            if milder is not None:
                needed = [(technique, milder) if pair[0] is technique else pair for pair in needed]
        option = self.predict_with(change for _, change in needed)
        assert option is not None
        return option


def _strongest(techniques: Sequence[Technique], cost: Cost) -> list[tuple[Technique, Change]]:
    """Return each technique with its strongest change that costs at most `cost`. Techniques without
    one are left out. A change of optimizer counts only if `cost` is `OPTIMIZER`. Offload and more
    GPUs never count."""
    allowed = {c for c in Cost if c <= cost and (c is not Cost.OPTIMIZER or cost is c)}
    allowed -= set(LAST_RESORTS)
    pairs = []
    for technique in techniques:
        changes = [change for change in technique.changes if change.cost in allowed]
        if changes:
            pairs.append((technique, changes[-1]))
    return pairs


def _costs(group: Iterable[tuple[Technique, Change]]) -> list[Cost]:
    return sorted(change.cost for _, change in group)


def _model_facts(plan: TrainingPlan, prediction: Prediction) -> ModelFacts:
    from memest.models_meta.assemble import load_dtype, lora_targets
    from memest.models_meta.build import build_model, vision_config
    from memest.models_meta.registry import resolve_config

    config = resolve_config(plan.model_name, trust_remote_code=plan.trust_remote_code)
    module = build_model(config, dtype=load_dtype(plan, config)).module
    vision = vision_config(config.pretrained)
    towers: list[str] = []
    for name, submodule in module.named_modules() if vision is not None else ():
        is_inside = any(name.startswith(f"{tower}.") for tower in towers)
        if name and not is_inside and type(getattr(submodule, "config", None)) is type(vision):
            towers.append(name)
    targets: Sequence[str] = ()
    with suppress(MemestError):
        targets = lora_targets(module) or ()
    return ModelFacts(
        class_name=str(prediction.model["class"]), vision_modules=tuple(towers),
        lora_targets=tuple(targets), seq_len=max(plan.lengths, default=prediction.plan["seq_len"]),
        image_size=prediction.plan["image_size"],
    )  # fmt: skip
