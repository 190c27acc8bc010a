"""A grid of plans for a page to play with: what each holds, at its phases and on each card.

Plans that differ in the batch size, the micro-batches and the cards of one chip share a few traces;
every point is replayed on its own, so it says what `predict` says of that plan, to the byte.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memest.errors import MemestError, PlanError
from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.search.processes import over_processes
from memest.models_meta.registry import check_name
from memest.plan import TrainingPlan
from memest.report import Outcome

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 4)
"""Values of the two keys that cost no further trace."""

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
    {"precision": precision, "optim": "adamw", "act_ckpt": is_ckpt, technique: True}
    for technique in ("use_lora", "use_qlora")
    for precision, is_ckpt in (("32-true", False), ("bf16-true", False), ("bf16-true", True))
]
SETTINGS: tuple[Mapping[str, Any], ...] = (*_FULL, *_MIXED, *_ADAPTED)
"""What a group of traces is for; adapters train with AdamW, as in the lab."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explored:
    """One plan of the grid."""

    plan: TrainingPlan
    kinds: Mapping[str, int]
    """Bytes at the peak without a limit, by `KINDS`; they add up to the peak allocated."""

    arithmetic: Mapping[str, str]
    """Of each kind, in words."""

    reserved_bytes: int
    """Reserved at the peak without a limit."""

    phases: tuple[tuple[int, int, int, int, int], ...]
    """Of the last micro-batch of the second step: params, grads, optimizer, activations, peak."""

    cards: Mapping[str, tuple[bool, int, int]]
    """Whether it fits, bytes reserved, margin; as the verdicts of `predict`."""


def explore(
    models: Sequence[str],
    gpus: Sequence[str],
    *,
    settings: Sequence[Mapping[str, Any]] = SETTINGS,
    batches: Sequence[int] = BATCHES,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    seq_len: int | None = None,
    jobs: int | None = None,
) -> list[Explored]:
    """Every model with every setting, batch size and number of micro-batches, on each card.

    What cannot be predicted is left out.

    Raises:
        MemestError: there is no such model or GPU, or nothing at all can be predicted.
    """
    cards = [find_gpu(name) for name in dict.fromkeys(gpus)]
    if not models or not cards or not batches:
        raise PlanError("the grid is empty", hint="name a model, a GPU and a batch size")
    for model in models:
        check_name(model)
    tasks: list[TrainingPlan] = []
    for model, setting in itertools.product(dict.fromkeys(models), settings):
        values = {"model_name": model, "seq_len": seq_len, "batch_size": max(batches), **setting}
        tasks.append(TrainingPlan.from_dict({k: v for k, v in values.items() if v is not None}))
    one = partial(_group, cards=cards, batches=tuple(batches), micro_batches=tuple(micro_batches))
    found = over_processes(
        one, tasks, min(jobs or os.cpu_count() or 1, len(tasks)), label=_label,
        weight=lambda plan: len(batches) * len(micro_batches),
    )  # fmt: skip
    points = [point for group in found if isinstance(group, list) for point in group]
    if not points:
        raise next(error for error in found if isinstance(error, MemestError))
    return points


def _label(plan: TrainingPlan) -> str:
    adapter = " QLoRA" if plan.use_qlora else " LoRA" if plan.use_lora else ""
    return f"{plan.model_name} {plan.precision} {plan.optim}{adapter}"


def _group(
    plan: TrainingPlan,
    *,
    cards: Sequence[Gpu],
    batches: Sequence[int],
    micro_batches: Sequence[int],
) -> list[Explored] | MemestError:
    """All batch sizes and numbers of micro-batches of one plan."""
    from memest.estimator.search.sweep import frozen_garbage
    from memest.estimator.search.trace_series import TraceSeries

    chips = {(gpu.capability, gpu.num_sms): gpu for gpu in reversed(cards)}
    found: list[Explored] = []
    try:
        with frozen_garbage():
            series: dict[Any, TraceSeries] = {}
            for count in micro_batches:
                accumulated = replace(plan, accumulate_grad_batches=count)
                series = {
                    chip: TraceSeries(accumulated, gpu, "batch_size", like=series.get(chip))
                    for chip, gpu in chips.items()
                }
                for each in series.values():
                    each.cover(_progression(batches), asked=batches)
                for batch in batches:
                    traced = {chip: each.at(batch) for chip, each in series.items()}
                    found.append(_point(replace(accumulated, batch_size=batch), traced, cards))
    except MemestError as error:
        return error
    return found


def _progression(batches: Sequence[int]) -> Sequence[int]:
    """Values of one spacing that hold `batches`, so that one family of traces covers them all."""
    rest = sorted(set(batches) - {1})
    step = math.gcd(*rest) if rest else 1
    return range(step, rest[-1] + 1, step) if len(rest) > 4 else batches


def _point(plan: TrainingPlan, traced: Mapping[Any, Any], cards: Sequence[Gpu]) -> Explored:
    from memest.estimator.search.largest import Judged, limit_of
    from memest.estimator.summary import peak_terms

    free: dict[Any, Any] = {}
    verdicts: dict[str, tuple[bool, int, int]] = {}
    for gpu in cards:
        chip = (gpu.capability, gpu.num_sms)
        judged = Judged(traced[chip], plan, limit_of(plan, gpu), free.get(chip))
        free[chip] = judged.free
        verdict = judged.verdict
        verdicts[gpu.name] = (
            verdict.verdict is Outcome.FITS, verdict.reserved_bytes, verdict.margin_bytes,
        )  # fmt: skip
    first = (cards[0].capability, cards[0].num_sms)
    whole = free[first]
    terms = peak_terms(traced[first], plan.accumulate_grad_batches, whole)
    kinds, words = _by_kind(terms)
    last = plan.accumulate_grad_batches - 1
    rows = [row for row in whole.rows if row.step == 1 and row.micro_batch == last]
    return Explored(
        plan=plan,
        kinds=kinds,
        arithmetic=words,
        reserved_bytes=whole.peak_reserved_bytes,
        phases=tuple(
            (r.params_bytes, r.grads_bytes, r.optimizer_bytes, r.activations_bytes,
             r.peak_allocated_bytes)
            for r in rows
        ),
        cards=verdicts,
    )  # fmt: skip


def _by_kind(terms: Iterable[Any]) -> tuple[dict[str, int], dict[str, str]]:
    kinds = dict.fromkeys(KINDS, 0)
    words: dict[str, list[tuple[int, str]]] = {kind: [] for kind in KINDS}
    for term in terms:
        kind = term.kind if term.kind in kinds else "rest"
        kinds[kind] += term.num_bytes
        words[kind].append((term.num_bytes, term.arithmetic if kind != "rest" else term.kind))
    largest = {k: sorted(found, reverse=True)[:2] for k, found in words.items()}
    return kinds, {k: "; ".join(text for _, text in found) for k, found in largest.items()}
