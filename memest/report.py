"""The schema that predictions and measurements share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = "memest.report/1"


class Phase(StrEnum):
    """The four moments of a step at which the lab reads the memory."""

    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    AFTER_BACKWARD = "after_backward"
    AFTER_OPTIMIZER_STEP = "after_optimizer_step"


class Outcome(StrEnum):
    """Whether a plan runs on a GPU."""

    FITS = "fits"
    OOM = "oom"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """What a probe reads at one moment. `before_forward` is read before the batch is moved to the GPU."""

    step: int
    micro_batch: int
    phase: Phase
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Allocated less the three above, as the lab defines it."""

    allocated_bytes: int
    peak_allocated_bytes: int
    """The highest since the row before."""

    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Where the allocated bytes are highest."""

    step: int
    phase: str
    module: str
    op: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a plan runs on one GPU, and with how much to spare."""

    verdict: Outcome
    margin_bytes: int
    """Limit less the peak reserved on this GPU; below 0 the bytes of the request that failed beyond what was left."""

    limit_bytes: int
    """What the caching allocator can reserve on it."""

    reserved_bytes: int
    """Peak reserved on this GPU, up to the failure if it is out of memory."""

    at: str = ""
    """Of an `oom`: step, phase, module and operator of the request that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """Bytes alive at the peak, with the arithmetic behind them."""

    kind: str
    num_bytes: int
    arithmetic: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a run of the plan would print, known without running it."""

    name: str
    plan: Mapping[str, Any]
    model: Mapping[str, Any]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    host_bytes: int
    peak: Peak
    phases: tuple[PhaseRow, ...]
    verdict: Outcome
    verdicts: Mapping[str, Verdict]
    terms: tuple[Term, ...]
    coverage: Mapping[str, Any]
    assumptions: tuple[str, ...]
    versions: Mapping[str, str]
    elapsed_s: float
    kind: str = field(default="predicted")

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, in the order of the schema."""
        values = asdict(self)
        kind = values.pop("kind")
        return {"schema": SCHEMA, "kind": kind, **values}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        """The text report."""
        from memest.render import render_text

        return render_text(self)

    def _repr_html_(self) -> str:
        from memest.render import render_html_table

        return render_html_table(self)
