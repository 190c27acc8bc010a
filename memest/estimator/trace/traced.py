"""A plan's program with what the report says of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memest.errors import TraceError
from memest.estimator.trace.program import Program
from memest.models_meta.geometry import LayerGeometry
from memest.plan import TrainingPlan
from memest.report import Term


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """A plan's program on one kind of GPU, with what the report says about the model."""

    program: Program
    model: dict[str, Any]
    param_groups: dict[str, dict[str, int]]
    """Numbers of elements by dtype: of all parameters, the trained ones, and optimizer state."""

    host_bytes: int
    notes: tuple[str, ...]
    seq_len: int
    image_size: int | None
    host_terms: tuple[Term, ...] = ()
    """What every rank together holds in host memory."""

    geometry: LayerGeometry | None = None
    """Of the model's layers, where a textbook knows them."""

    libraries_bytes: int = 0
    """Of NCCL and others on each GPU, beside the allocator and the context."""

    others: tuple[TracedPlan, ...] = ()
    """The other ranks that were traced as they differ, where this is the worst of several."""


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
        hint="a GPU would most likely say the same; if not, memest cannot predict this plan",
    )


def elements_by_dtype(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Numbers of elements of `tensors` by the name of their dtype."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        key = str(tensor.dtype).removeprefix("torch.")
        counts[key] = counts.get(key, 0) + tensor.numel()
    return counts
