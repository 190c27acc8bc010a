"""The schema that predictions and measurements share: `memest.report/1`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, Self

SCHEMA = "memest.report/1"


class Phase(StrEnum):
    """The four moments of a step at which the lab reads the memory, and the end of a validation."""

    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    AFTER_BACKWARD = "after_backward"
    AFTER_OPTIMIZER_STEP = "after_optimizer_step"
    AFTER_VALIDATION = "after_validation"


class Outcome(StrEnum):
    """How a run of a plan ends."""

    FITS = "fits"
    OOM = "oom"
    MAY = "may"
    """Predicted on several GPUs: it depends on when blocks come back that streams share."""

    FAILED = "failed"
    """Of a measured run alone: it crashed, or ran out of time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """What a probe reads at one moment. `before_forward` is read before the batch is moved to the
    GPU.
    """

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
class Interval:
    """Between what the figure of a rank should lie."""

    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a plan runs on one GPU, and with how much to spare."""

    verdict: Outcome
    margin_bytes: int
    """Limit less the peak reserved; of an `oom` less the peak that it would have without a limit.
    """

    limit_bytes: int
    """What the caching allocator can reserve on it."""

    reserved_bytes: int
    """Peak reserved on this GPU, up to the failure if it is out of memory."""

    at: str = ""
    """Of an `oom` or a `may`: step, phase, module and operator of the request that failed."""

    decides: str = ""
    """Of a `may`: the blocks on whose return it depends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """Bytes alive at the peak, with the arithmetic behind them."""

    kind: str
    num_bytes: int
    arithmetic: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """The textbook's activations of one layer beside the traced ones; all bytes are per layer."""

    formula: str
    letters: Mapping[str, int]
    """Of the formula: `s` tokens, `b` samples, `h` model width, `a` heads."""

    num_layers: int
    textbook_bytes: int
    traced_bytes: int
    """What the forward leaves behind, the mean over layers."""

    differences: tuple[Term, ...]
    """What leads from the textbook to the trace; they add up."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What predictions and measurements have in common."""

    kind: ClassVar[str] = ""

    name: str
    plan: Mapping[str, Any]
    model: Mapping[str, Any]
    """`class`, `num_params`, `num_trainable_params`."""

    gpu: str
    """The GPU that the figures are for."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    """What nvidia-smi shows: reserved and the CUDA context."""

    host_bytes: int
    """Predicted: host memory that the run holds on purpose, such as paged optimizer state.
    Measured: the process's highest resident size; of a distributed run, what all ranks hold more
    than before their models were built (`validate/host.py`).
    """

    phases: tuple[PhaseRow, ...]
    verdict: Outcome
    versions: Mapping[str, str]
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"schema": SCHEMA, "kind": self.kind, **asdict(self)}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The report that `to_dict` wrote; keys that it does not know are passed over.

        Raises:
            KeyError, TypeError, ValueError: something is missing or of the wrong kind.
        """
        names = {f.name for f in fields(cls)}
        given = {k: v for k, v in values.items() if k in names}
        given["verdict"] = Outcome(given["verdict"])
        row_names = {f.name for f in fields(PhaseRow)}
        given["phases"] = tuple(
            PhaseRow(
                **{k: v for k, v in row.items() if k in row_names} | {"phase": Phase(row["phase"])}
            )
            for row in given["phases"]
        )
        return cls(**given)


def _verdict(values: Mapping[str, Any]) -> Verdict:
    return Verdict(**{**values, "verdict": Outcome(values["verdict"])})


def _terms(values: Iterable[Mapping[str, Any]]) -> tuple[Term, ...]:
    return tuple(Term(**term) for term in values)


@dataclass(frozen=True, kw_only=True)
class Prediction(Report):
    """What a run of the plan would print, known without running it."""

    kind: ClassVar[str] = "predicted"

    unlimited_reserved_bytes: int
    """Peak reserved on a GPU without end; more than `peak_reserved_bytes` where the limit was felt.
    """

    peak: Peak
    verdicts: Mapping[str, Verdict]
    terms: tuple[Term, ...]
    coverage: Mapping[str, Any]
    assumptions: tuple[str, ...]
    host_terms: tuple[Term, ...] = ()
    """What all ranks of a node hold in host memory; the terms add up to `host_bytes`."""

    host_verdict: Verdict | None = None
    """Whether that is there, where the plan says how much there is."""

    closed_form: ClosedForm | None = None
    """The textbook's formula, where it applies; no figure of the report is made of it."""

    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Of `allocated`, `reserved` and `process` at their peaks, over the ranks that differ and the
    moments at which blocks can come back that two streams or a collective share. The figures of the
    report are of the reading that reserves most. On one GPU low is high.
    """

    phase_intervals: tuple[Interval, ...] = ()
    """Of the bytes allocated at each of `phases`; empty on one GPU."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """As `Report`'s."""
        own = dict(values)
        own["peak"] = Peak(**values["peak"])
        own["verdicts"] = {k: _verdict(v) for k, v in values["verdicts"].items()}
        own["terms"] = _terms(values["terms"])
        own["host_terms"] = _terms(values.get("host_terms", ()))
        own["assumptions"] = tuple(values["assumptions"])
        own["intervals"] = {k: Interval(**v) for k, v in values.get("intervals", {}).items()}
        own["phase_intervals"] = tuple(Interval(**v) for v in values.get("phase_intervals", ()))
        host, closed = values.get("host_verdict"), values.get("closed_form")
        own["host_verdict"] = None if host is None else _verdict(host)
        if closed is not None:
            own["closed_form"] = ClosedForm(
                **closed | {"differences": _terms(closed["differences"])}
            )
        return super().from_dict(own)

    def __str__(self) -> str:
        """The text report."""
        from memest.render.text import render_text

        return render_text(self, verbose=True)

    def _repr_html_(self) -> str:
        from memest.render.text import render_html_table

        return render_html_table(self)


@dataclass(frozen=True, kw_only=True)
class Measurement(Report):
    """What a real run of the plan printed."""

    kind: ClassVar[str] = "measured"

    device: Mapping[str, Any]
    """Of the machine: `name` and `memory_bytes` of the GPU, `driver`."""

    context_bytes: int
    """Process less reserved: the CUDA context and libraries."""

    note: str = ""
    """Why a run ended early: the out-of-memory error, the crash, the time limit."""

    ranks: tuple[Mapping[str, Any], ...] = ()
    """Of a run on several GPUs, one for each: `rank`, its peaks, `process_bytes`, `host_bytes`. The
    report itself is that of the worst rank; its `host_bytes` is the sum.
    """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """As `Report`'s."""
        return super().from_dict({**values, "ranks": tuple(values.get("ranks", ()))})
