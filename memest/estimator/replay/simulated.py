"""A plan's program with facts about its model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memest.errors import TraceError
from memest.estimator.hardware.work_log import WorkLog
from memest.estimator.replay.program import Program
from memest.models_meta.geometry import LayerGeometry
from memest.plan import TrainingPlan
from memest.report import Term


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """A plan's program on one kind of GPU, with the report's facts about the model."""

    program: Program
    model: dict[str, Any]
    param_groups: dict[str, dict[str, int]]
    """Numbers of elements by dtype: of all parameters, the trained ones, and optimizer state."""

    host_bytes: int
    notes: tuple[str, ...]
    seq_len: int
    image_size: int | None
    host_terms: tuple[Term, ...] = ()
    """Host memory of all ranks together."""

    geometry: LayerGeometry | None = None
    """Geometry of the model's layers, where the textbook applies."""

    libraries_bytes: int = 0
    """Bytes of NCCL and other libraries on each GPU, outside the allocator and the context."""

    work: WorkLog | None = field(default=None, compare=False)
    """Launches of the plan's steps; None if the program was interpolated."""

    others: tuple[TracedPlan, ...] = ()
    """Other traced ranks, where this is the worst of several that differ."""


def model_failure(plan: TrainingPlan, model: nn.Module | None, error: Exception) -> TraceError:
    """Name the innermost module of `model` in which its code raised."""
    names = {} if model is None else {id(m): name for name, m in model.named_modules()}
    where, frames = "", error.__traceback__
    while frames is not None:
        where = names.get(id(frames.tb_frame.f_locals.get("self")), where)
        frames = frames.tb_next
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return TraceError(
        f"`{where or plan.model_name}` fails: {first_line}",
        hint="a GPU would most likely fail too; if not, memest cannot predict this plan",
    )


def elements_by_dtype(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return numbers of elements of `tensors` by the name of their dtype."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        key = str(tensor.dtype).removeprefix("torch.")
        counts[key] = counts.get(key, 0) + tensor.numel()
    return counts
