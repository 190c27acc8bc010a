"""A grid of plans for an interactive page: memory of each plan, at its phases and on each GPU.

Plans of one model share traces (`related_plans`); every point equals its prediction to the byte.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memest.engines import find_engine
from memest.errors import MemestError, PlanError, raise_if_all_failed, result_or_error
from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.predict import trials
from memest.models_meta.registry import check_name
from memest.plan import TrainingPlan
from memest.report import PhaseRow, Term, Verdict

if TYPE_CHECKING:
    from memest.estimator.search.related_plans import RelatedPlans

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4)  # numbers of micro-batches in the grid; they need no traces
KINDS = ("params", "grads", "optimizer", "activations", "temporaries", "rest")

_FULL = [
    {"precision": precision, "optim": optim, "act_ckpt": is_ckpt}
    for precision in ("32-true", "bf16-true")
    for optim in ("adamw", "sgd", "adam_8bit")
    for is_ckpt in (False, True)
    if precision == "bf16-true" or optim == "adamw" or not is_ckpt
]
_MIXED = [{"precision": "bf16-mixed", "optim": "adamw", "act_ckpt": False}]
_ADAPTED = [
    {"precision": precision, "optim": "adamw", "act_ckpt": is_ckpt, "use_lora": True}
    for precision, is_ckpt in (("32-true", False), ("bf16-true", False), ("bf16-true", True))
]
_QUANTIZED = [
    {"precision": precision, "optim": "adamw", "act_ckpt": True, "use_qlora": True}
    for precision in ("32-true", "bf16-true")
]
SETTINGS: tuple[Mapping[str, Any], ...] = (*_FULL, *_MIXED, *_ADAPTED, *_QUANTIZED)
"""Plan keys of each setting. Adapters train with AdamW, and 4-bit weights are multiplied in
bf16, as in QLoRA's paper (arXiv:2305.14314). QLoRA checkpoints activations, which is
peft's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explored:
    """A plan of the grid, and its predicted memory."""

    plan: TrainingPlan
    kinds: Mapping[str, int]  # at the peak by `KINDS`, without a limit; the sum is the peak
    arithmetic: Mapping[str, str]  # explanation of each kind
    reserved_bytes: int  # peak reserved on a GPU without a limit
    phases: tuple[tuple[int, int, int, int, int], ...]
    """Bytes by kind and their peak at each phase of the second step's last micro-batch."""

    verdicts: Mapping[str, Verdict]  # results on each GPU, as in `predict`


def explore(
    models: Sequence[str],
    gpus: Sequence[str],
    *,
    settings: Sequence[Mapping[str, Any]] = SETTINGS,
    batches: Sequence[int] = BATCHES,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    seq_len: int | None = None,
    jobs: int | None = None,
    engine: str = "local",
) -> list[Explored]:
    """Predict every model with every setting, batch size and number of micro-batches, on each GPU.

    Plans that cannot be predicted are left out. `jobs` is the number of the engine's workers.

    Raises:
        MemestError: there is no such model or GPU, or nothing at all can be predicted.
    """
    targets = [find_gpu(name) for name in dict.fromkeys(gpus)]
    if not models or not targets or not batches:
        raise PlanError("the grid is empty", hint="name a model, a GPU and a batch size")
    for model in models:
        check_name(model)
    from memest.estimator.search.related_plans import SAME_MODEL

    tasks: dict[Any, list[TrainingPlan]] = {}
    for model, setting in itertools.product(dict.fromkeys(models), settings):
        values = {"model_name": model, "seq_len": seq_len, "batch_size": max(batches), **setting}
        plan = TrainingPlan.from_dict({k: v for k, v in values.items() if v is not None})
        tasks.setdefault(replace(plan, **SAME_MODEL), []).append(plan)
    one = partial(
        _group, targets=targets, batches=tuple(batches), micro_batches=tuple(micro_batches)
    )
    found = find_engine(engine, jobs).map(
        one, list(tasks.values()), died=lambda plans, error: [error] * len(plans), label=_label,
        weight=lambda plans: len(plans) * len(batches) * len(micro_batches),
    )  # fmt: skip
    groups = list(itertools.chain.from_iterable(found))
    raise_if_all_failed(groups)
    return [point for group in groups if isinstance(group, list) for point in group]


def explored(plan: TrainingPlan, gpus: Sequence[str]) -> Explored:
    """Return one plan as a point of a grid; `MemestError` if it cannot be predicted."""
    found = _group(
        [plan], targets=[find_gpu(name) for name in gpus], batches=(plan.batch_size,),
        micro_batches=(plan.accumulate_grad_batches,),
    )[0]  # fmt: skip
    if isinstance(found, MemestError):
        raise found
    return found[0]


def _label(plans: Sequence[TrainingPlan]) -> str:
    plan = plans[0]
    adapter = " QLoRA" if plan.use_qlora else " LoRA" if plan.use_lora else ""
    return f"{plan.model_name} {plan.precision}{adapter}"


def _group(
    plans: Sequence[TrainingPlan],
    *,
    targets: Sequence[Gpu],
    batches: Sequence[int],
    micro_batches: Sequence[int],
) -> list[list[Explored] | MemestError]:
    """Predict plans that differ in batch size and micro-batches only."""
    from memest.estimator.search.related_plans import RelatedPlans

    steps = _progression(batches)
    chips = {gpu.chip: RelatedPlans(gpu, steps, batches) for gpu in reversed(targets)}

    def points(plan: TrainingPlan) -> list[Explored]:
        grid = itertools.product(micro_batches, batches)
        sized = (replace(plan, accumulate_grad_batches=n, batch_size=b) for n, b in grid)
        return [_point(each, chips, targets) for each in sized]

    return [result_or_error(points, plan) for plan in plans]


def _progression(batches: Sequence[int]) -> Sequence[int]:
    """Return equally spaced values that include `batches`, so that few runs cover them all."""
    rest = sorted(set(batches) - {1})
    step = math.gcd(*rest) if rest else 1
    return range(step, rest[-1] + 1, step) if len(rest) > 4 else batches


def _point(
    plan: TrainingPlan, chips: "Mapping[Any, RelatedPlans]", targets: Sequence[Gpu]
) -> Explored:
    from memest.estimator.summary import peak_terms

    traced = {chip: related.at(plan) for chip, related in chips.items()}
    found = list(trials(plan, targets, lambda gpu: traced[gpu.chip]))
    verdicts = {gpu.name: trial.verdict for gpu, trial in found}
    first = found[0][1]
    whole = first.scenarios[0].unlimited
    terms = peak_terms(first.traced, plan.accumulate_grad_batches, whole)
    return point_of(plan, terms, whole.peak_reserved_bytes, whole.rows, verdicts)


def point_of(
    plan: TrainingPlan,
    terms: Iterable[Term],
    reserved_bytes: int,
    rows: Iterable[PhaseRow],
    verdicts: Mapping[str, Verdict],
) -> Explored:
    """Return the grid's entry for a plan, from the terms at its peak and the rows of its phases."""
    kinds, words = by_kind(terms)
    last = plan.accumulate_grad_batches - 1
    return Explored(
        plan=plan,
        kinds=kinds,
        arithmetic=words,
        reserved_bytes=reserved_bytes,
        phases=tuple(
            (r.params_bytes, r.grads_bytes, r.optimizer_bytes, r.activations_bytes,
             r.peak_allocated_bytes)
            for r in rows if r.step == 1 and r.micro_batch == last
        ),
        verdicts=verdicts,
    )  # fmt: skip


def by_kind(terms: Iterable[Term]) -> tuple[dict[str, int], dict[str, str]]:
    """Return bytes and explanations of the terms of a peak, by `KINDS`."""
    kinds = dict.fromkeys(KINDS, 0)
    words: dict[str, list[tuple[int, str]]] = {kind: [] for kind in KINDS}
    for term in terms:
        kind = term.kind if term.kind in kinds else "rest"
        kinds[kind] += term.num_bytes
        words[kind].append((term.num_bytes, term.arithmetic if kind != "rest" else term.kind))
    largest = {k: sorted(found, reverse=True)[:2] for k, found in words.items()}
    return kinds, {k: "; ".join(text for _, text in found) for k, found in largest.items()}
