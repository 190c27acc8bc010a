"""Reports of predicted plans, measured plans and simulated scripts: schema `memest.report/1`."""

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from memest.errors import PlanError
from memest.plan.keys import IN_PLACE
from memest.plan.reading import read_limited
from memest.units import counted

KINDS = (
    "params", "buffers", "grads", "buckets", "gathered", "optimizer", "activations", "temporaries",
    "batch", "workspace", "other",
)  # fmt: skip
WHY = {
    "params": "the weights",
    "grads": "one per trained parameter, from its backward to the next zero_grad",
    "optimizer": "state of the optimizer",
    "buffers": "not trained: tables, scales of quantised weights",
    "activations": "saved for the backward, or in use in the forward",
    "temporaries": "of backward and optimizer",
    "workspace": "of cuBLAS and other kernels",
    "batch": "inputs and labels",
    "buckets": "gradients on their way to the other GPUs and back",
    "gathered": "weights gathered from the shards of all GPUs, while they are used",
    "other": "made before any model ran, and not part of one",
    "rounding": "requests round up to 512 B; up to 1 MiB of a large block is not split off",
}
SCHEMA = "memest.report/1"
OPERATOR = re.compile(r"^(aten|prims|_?c10d\w*|fsdp|bitsandbytes|torchvision|flash_attn\w*)\.\w+")
"""Pattern of the names of operators, which distinguishes them from modules and lines."""

MAX_RESULTS_BYTES = 512 << 20  # Limit of a file of results; a report has some ten KiB


class Phase(StrEnum):
    """Moments at which memory is read: four in each step, and the end of a validation."""

    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    AFTER_BACKWARD = "after_backward"
    AFTER_OPTIMIZER_STEP = "after_optimizer_step"
    AFTER_VALIDATION = "after_validation"


class Outcome(StrEnum):
    """Result of a run on a GPU: it fits, is out of memory, depends on timing, or failed."""

    FITS = "fits"
    OOM = "oom"
    MAY = "may"  # Verdict on several GPUs that depends on when blocks used by two streams are freed
    FAILED = "failed"  # Measured runs only: a crash or the time limit

    @property
    def word(self) -> str:
        """Word for the outcome in reports and charts: its value, with `OOM` in capitals."""
        return "OOM" if self is Outcome.OOM else str(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """Memory at one moment of a run, by kind, and the peak since the row before. The row
    `before_forward` is read before the batch moves to the GPU."""

    step: int  # From 0
    micro_batch: int  # Within the step, from 0
    phase: Phase
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int  # Allocated bytes less parameters, gradients and optimizer state
    allocated_bytes: int
    peak_allocated_bytes: int  # Highest allocated bytes since the previous row
    reserved_bytes: int

    @classmethod
    def of(cls, memory: Any, states: tuple[int, int, int], **place: Any) -> "PhaseRow":
        """Return the row of `memory`, an allocator or a reading of one. The `states` are bytes of
        parameters, gradients and optimizer; `place` has step, micro-batch and phase."""
        params, grads, optimizer = states
        return cls(
            params_bytes=params, grads_bytes=grads, optimizer_bytes=optimizer,
            activations_bytes=memory.allocated_bytes - sum(states),
            allocated_bytes=memory.allocated_bytes, reserved_bytes=memory.reserved_bytes,
            peak_allocated_bytes=memory.peak_allocated_bytes, **place,
        )  # fmt: skip

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of params, grads, optimizer and activations; their sum is the allocated bytes."""
        names = "params", "grads", "optimizer", "activations"
        return {name: getattr(self, f"{name}_bytes") for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Moment at which the allocated bytes are highest: step, phase, module and operator."""

    step: int  # From 0
    phase: str  # Such as `forward`
    module: str  # Name of the running module; empty if there is none
    op: str  # Name of the operator

    @property
    def places(self) -> tuple[str, ...]:
        """Module of the peak, in a tuple; a script's peak adds its line."""
        return (self.module,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Lowest and highest value of a figure over ranks, and over times at which blocks are freed. On
    several GPUs, a block that two streams use is freed at a time that differs between runs."""

    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Answer to whether a run fits one GPU, with the margin to the GPU's limit."""

    verdict: Outcome
    margin_bytes: int  # Limit less the need of the run; negative if the run does not fit
    limit_bytes: int  # Bytes that the caching allocator can reserve on this GPU
    reserved_bytes: int
    """Peak reserved on this GPU, cached blocks included; up to the failure if out of memory."""

    spread_bytes: int = 0  # Bytes of the limit that may be missing with another driver of this GPU
    at: str = ""  # Failed request of an `oom` or a `may`: step, phase, module and operator
    decides: str = ""  # Blocks of a `may`: the verdict depends on when they are freed
    needs_bytes: int = field(init=False)
    """The least limit under which the run fits; on several GPUs, the highest over ranks and free
    timings. A lower bound for a script that ended out of memory."""

    is_tight: bool = field(init=False)
    """True if the run fits, but may not if another driver leaves less."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_bytes", self.limit_bytes - self.margin_bytes)
        is_tight = self.verdict is Outcome.FITS and self.margin_bytes < self.spread_bytes
        object.__setattr__(self, "is_tight", is_tight)

    @property
    def word(self) -> str:
        """The verdict's word in all reports and charts: `fits`, `tight`, `may` or `OOM`."""
        return "tight" if self.is_tight else self.verdict.word


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """Bytes of one kind of memory at the peak, and the arithmetic behind them."""

    kind: str  # One of `KINDS`, or `rounding`
    num_bytes: int
    arithmetic: str  # Computation of the bytes, as text
    why: str  # Reason for the bytes, as text

    source: ClassVar[str] = ""  # Empty: only rows of script lines have a source text

    @property
    def note(self) -> str:
        """Text for tables: arithmetic and reason for the bytes, without the operator's name."""
        if self.kind == "params":
            return self.arithmetic
        head, colon, tail = self.why.rpartition(": ")
        return f"{self.arithmetic}: {head if colon and OPERATOR.match(tail) else self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """Activation bytes of one layer: by the textbook's formula, and as simulated."""

    formula: str
    letters: Mapping[str, int]
    """Letters of the formula: `s` tokens, `b` samples, `h` model width, `a` heads."""

    num_layers: int
    textbook_bytes: int
    traced_bytes: int  # Bytes that the forward pass saves for the backward, the mean over layers
    differences: tuple[Term, ...]  # Terms whose sum is the simulated bytes less the textbook's


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Estimated time of one optimizer step on one GPU. No figure of the memory depends on it."""

    seconds: float
    low_seconds: float
    high_seconds: float
    """Upper bound; three of four measured steps are between the bounds (docs/time.md)."""

    peak_share: float
    """Operations of products, convolutions and attention relative to the peak rate, 0 to 1."""

    bound_by: str  # Bound of most of the step: `host`, `compute`, `memory` or `link`
    origin: str  # GPU whose measured kernel times were used; empty if they are of `gpu` itself
    unmeasured_share: float  # Share of the step in kernels without measured efficiency
    first_seconds: float = 0.0
    """Part of `seconds` in which libraries choose or compile kernels for new sizes."""

    measured_in: str = ""
    """File of `MEMEST_PACE` with the times, of the host at least; empty if it is not set."""


def read_as(kind: Any, value: Any) -> Any:
    """Convert `value`, made of JSON values, to the type `kind`, such as a dataclass or a tuple.

    Unknown keys, and keys of computed fields, are ignored.

    Raises:
        KeyError, TypeError, ValueError: something is missing or of the wrong kind.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # `X | None`
        inner, _ = arguments
        return None if value is None else read_as(inner, value)
    if origin is tuple:  # `tuple[X, ...]`
        return tuple(read_as(arguments[0], item) for item in value)
    if origin is Mapping and arguments[1] is not Any:  # `Mapping[str, X]`
        return {name: read_as(arguments[1], item) for name, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return value
    hints = _hints(kind)
    return kind(
        **{
            f.name: read_as(hints[f.name], value[f.name])
            for f in fields(kind)
            # a field without a default raises a KeyError if `value` lacks it
            if f.init and (f.name in value or f.default is f.default_factory is MISSING)
        }
    )


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


class Levels:
    """Peaks of a run in bytes: allocated, reserved by the allocator, and of the whole process."""

    __slots__ = ()
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int

    @property
    def levels(self) -> dict[str, int]:
        """Bytes of the peaks by name: allocated, reserved, process."""
        return {
            "allocated": self.peak_allocated_bytes,
            "reserved": self.peak_reserved_bytes,
            "process": self.process_bytes,
        }


class JsonReport(Levels):
    """Base of reports, which convert to one line of JSON and back."""

    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"schema": SCHEMA, "kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the report in `values`, which `to_dict` made; unknown keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: something is missing or of the wrong kind.
        """
        return read_as(cls, values)  # type: ignore[no-any-return]

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the report in the file `path`, which `to_json` wrote; None if there is no file."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Report(JsonReport):
    """Base of reports on the run of a plan, predicted or measured, with their common fields."""

    name: str  # Name of the plan
    plan: Mapping[str, Any]  # Values by plan key
    model: Mapping[str, Any]  # `class`, `num_params`, `num_trainable_params`
    gpu: str  # GPU for which the figures are
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int  # Bytes in nvidia-smi: reserved and the CUDA context
    host_bytes: int
    """Predicted: host memory that the run allocates, such as paged optimizer state. Measured: the
    process's highest resident size; of a distributed run, what all ranks hold more than before
    their models were built (`validate/experiment.py`)."""

    phases: tuple[PhaseRow, ...]
    verdict: Outcome  # Outcome on `gpu`
    versions: Mapping[str, str]  # Versions by package
    elapsed_s: float

    @property
    def word(self) -> str:
        """Word for the outcome on the report's GPU: `fits`, `OOM`, `may` or `failed`."""
        return self.verdict.word

    @property
    def is_distributed(self) -> bool:
        """True if the plan has several GPUs, or a strategy other than `auto`."""
        num_gpus = int(self.plan.get("devices") or 1) * int(self.plan.get("num_nodes") or 1)
        return self.plan.get("strategy", "auto") != "auto" or num_gpus > 1


class Simulated:
    """Base of reports on simulated plans and scripts, with their forms as text and HTML."""

    def __str__(self) -> str:
        """The report as text."""
        from memest.report.text import render_text

        return render_text(self, verbose=True)  # type: ignore[arg-type]

    def summary(self, gpu: str = "", *, measured_bytes: int | None = None) -> str:
        """Return one line: memory, the verdict on `gpu` ("": the report's own), and where the peak
        is. It has `measured_bytes`, the peak reserved of a real run, if that is not None."""
        from memest.report.answer import summary_line

        return summary_line(self, gpu, measured_bytes=measured_bytes)  # type: ignore[arg-type]

    def _repr_html_(self) -> str:
        from memest.report.page import fragment

        return fragment(self)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Prediction(Simulated, Report):
    """Report of a plan's predicted run, with verdicts on GPUs."""

    kind: ClassVar[str] = "predicted"

    notes: ClassVar[tuple[str, ...]] = ()
    modules: "ClassVar[tuple[HeldRow, ...]]" = ()
    lines: "ClassVar[tuple[HeldRow, ...]]" = ()
    guesses: "ClassVar[tuple[Guess, ...]]" = ()
    ranks: "ClassVar[tuple[RankRow, ...]]" = ()
    is_cut_short: ClassVar[bool] = False  # False: only scripts can end early
    is_script: ClassVar[bool] = False

    unlimited_reserved_bytes: int
    """Peak reserved on a GPU without a limit; above `peak_reserved_bytes` if the limit mattered."""

    peak: Peak
    verdicts: Mapping[str, Verdict]  # Verdicts by GPU
    terms: tuple[Term, ...]  # Contents of the peak
    coverage: Mapping[str, Any]  # `num_ops`, `num_modelled`, and counts by operator `unmodelled`
    assumptions: tuple[str, ...]
    host_terms: tuple[Term, ...] = ()
    """Host memory of all ranks of a node; the terms add up to `host_bytes`."""

    host_verdict: Verdict | None = None  # Verdict about the host memory, if the plan has a limit
    closed_form: ClosedForm | None = None
    """The textbook's activations of a layer and the simulated ones; None without a formula."""

    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Ranges of `allocated`, `reserved` and `process` at their peaks, over ranks and free timings.

    The report's own figures are those with the most reserved bytes. On one GPU low is high.
    """

    times: Mapping[str, StepTime] = field(default_factory=dict)
    """Estimated time of an optimizer step by GPU; empty if the plan's own step was not run."""

    phase_intervals: tuple[Interval, ...] = ()
    """Ranges of the bytes allocated at each of `phases`; empty on one GPU."""

    warnings: tuple[str, ...] = ()  # GPUs without a verdict, because the plan fails there

    @property
    def needs_bytes(self) -> int:
        """Least allocator limit in bytes under which the plan fits; an upper bound if unknown."""
        verdict = self.verdicts.get(self.gpu)
        return self.unlimited_reserved_bytes if verdict is None else verdict.needs_bytes

    @property
    def word(self) -> str:
        """The verdict's word on the report's own GPU: `fits`, `tight`, `may` or `OOM`."""
        verdict = self.verdicts.get(self.gpu)
        return self.verdict.word if verdict is None else verdict.word


@dataclass(frozen=True, kw_only=True)
class Measurement(Report):
    """Report of a real run of a plan on a GPU."""

    kind: ClassVar[str] = "measured"

    device: Mapping[str, Any]
    """Machine: GPU `name` and `memory_bytes`, `driver`, `sm_clock_mhz` after the last step."""

    context_bytes: int  # Process less reserved: the CUDA context and libraries
    step_seconds: tuple[float, ...] = ()
    """Seconds of each optimizer step after the first, to the end of its kernels."""

    note: str = ""  # Reason of an early end: the out-of-memory error, the crash, the time limit
    ranks: tuple[Mapping[str, Any], ...] = ()
    """Ranks of a run on several GPUs: `rank`, its peaks, `process_bytes`, `host_bytes`.

    The report itself is that of the worst rank; its `host_bytes` is the sum.
    """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the report in `values`; keys of QLoRA that an old plan lacks are added."""
        return super().from_dict({**values, "plan": _plan_as_run(values["plan"])})


class Ending(StrEnum):
    """State of a script at its report: how it ended, or that it still runs."""

    FINISHED = "finished"  # Ended by itself, with any exit code
    STOPPED = "stopped"  # Stopped after the requested number of optimizer steps
    OOM = "oom"  # Ended by a `torch.OutOfMemoryError` that it did not catch
    CRASHED = "crashed"  # Ended by another error that it did not catch
    UNSUPPORTED = "unsupported"  # Ended by an operation that cannot be simulated
    INTERRUPTED = "interrupted"  # Ended by the user
    RUNNING = "running"  # Still running


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRow:
    """Bytes allocated at the peak for one owner: a module, a script line, or a kind of memory."""

    name: str
    """Name of the owner: `activations`, `GPT2LMHeadModel.transformer.h.*` or `train.py:12`."""

    num_bytes: int
    num_tensors: int  # Tensors with these bytes
    kinds: Mapping[str, int]  # Bytes by kind of memory
    source: str = ""  # Source text of the line

    @property
    def kind(self) -> str:
        """Same as `name`, since a row is also read like a `Term`."""
        return self.name

    @property
    def note(self) -> str:
        """Text for tables: the number of tensors, and what a kind of memory is for."""
        tensors = f"{counted(self.num_tensors, 'tensor')}: " if self.num_tensors else ""
        return f"{tensors}{WHY.get(self.name, '')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPhase:
    """Highest allocated and reserved bytes of one phase of the script."""

    name: str  # `setup`, `forward`, `backward`, `optimizer`, `evaluation` or `generation`
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """Memory of one optimizer step, which begins at the end of the previous step."""

    step: int  # Number of the step, from 0
    allocated_bytes: int  # Bytes allocated after the step
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPeak(Peak):
    """Moment, module and script line at which the allocated bytes are highest."""

    line: str

    @property
    def places(self) -> tuple[str, ...]:
        """Module and line of the peak."""
        return self.module, self.line


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """Value that memest assumes, because a script line reads it from a tensor without data."""

    line: str  # Such as `train.py:12`
    what: str  # Value in words, such as `the value of a float32 tensor`
    count: int  # Number of reads


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow(Levels):
    """Memory of one rank of a script on several GPUs."""

    rank: int
    ending: Ending
    num_steps: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Ranges of this rank's figures over the free timings."""


@dataclass(frozen=True, kw_only=True)
class RunReport(Simulated, JsonReport):
    """Report of a script's run on a simulated GPU."""

    kind: ClassVar[str] = "run"

    plan: ClassVar[Mapping[str, Any]] = {}
    host_terms: ClassVar[tuple[Term, ...]] = ()
    host_verdict: ClassVar[Verdict | None] = None
    closed_form: ClassVar[ClosedForm | None] = None
    """None: the textbook's formula applies to plans only."""

    is_script: ClassVar[bool] = True

    name: str  # The script and its arguments, or `a block of code`
    gpu: str
    ending: Ending
    error: str  # Error that ended the script, in a line; empty if the script ended by itself
    verdict: Outcome
    limit_bytes: int  # Bytes that the caching allocator could reserve
    num_steps: int  # Optimizer steps
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int  # Bytes in nvidia-smi: reserved, the CUDA context, and NCCL on several GPUs
    host_bytes: int  # Host memory that tensors without data would hold, at its highest
    peak: RunPeak
    terms: tuple[HeldRow, ...]
    """Contents of the peak, by kind; with `rounding` they add up to the peak."""

    modules: tuple[HeldRow, ...]  # Contents of the peak, by module
    lines: tuple[HeldRow, ...]  # Contents of the peak, by script line
    phases: tuple[RunPhase, ...]
    steps: tuple[RunStep, ...]
    """Memory of the first, the second, the highest and the last optimizer step."""

    verdicts: Mapping[str, Verdict]  # Verdicts by GPU
    guesses: tuple[Guess, ...]
    coverage: Mapping[str, Any]  # `num_ops`, `num_modelled`, and counts by operator `unmodelled`
    warnings: tuple[str, ...] = ()
    """Reasons to trust the figures less, which the report prints first."""

    notes: tuple[str, ...]  # Assumptions and observations that limit the validity of the figures
    assumptions: tuple[str, ...]
    versions: Mapping[str, str]
    elapsed_s: float
    rank: int = 0  # Rank of the report, if there are several
    ranks: tuple[RankRow, ...] = ()  # Ranks that were run; empty on one GPU
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Ranges of `allocated`, `reserved` and `process` at their peaks, over ranks and free timings.

    The report's own figures are those of the worst rank at the latest timing. On one GPU low is
    high.
    """

    times: Mapping[str, StepTime] = field(default_factory=dict)
    """Estimated time of an optimizer step by GPU; empty without a whole step."""

    allocator: str = ""
    """Allocator settings in the form of `PYTORCH_ALLOC_CONF`; empty for the defaults."""

    @property
    def fits(self) -> bool:
        """True unless the script runs out of memory; the verdict `may` counts as fitting."""
        return self.verdict is not Outcome.OOM

    @property
    def is_cut_short(self) -> bool:
        """True if a crash, unsupported operation or user ended the script, or it still runs."""
        return self.ending not in (Ending.FINISHED, Ending.STOPPED, Ending.OOM)

    @property
    def is_distributed(self) -> bool:
        """True if the script ran as several ranks."""
        return bool(self.ranks)


SimulatedReport = Prediction | RunReport  # Report of a simulated run: of a plan or of a script


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPeak:
    """Peak of one test, which the pytest plugin stores in `memest-peaks.json`."""

    gpu: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    versions: Mapping[str, str]  # Versions by package
    lines: tuple[HeldRow, ...]  # Bytes at the peak, by line


def read_measurements(path: Path) -> list[Measurement]:
    """Return the measured reports in a JSON Lines file, in order; errors as in `read_lines`."""
    return read_lines(path, Measurement, "name a results file of `memest validate`")


def read_lines(path: Path, kinds: Any, hint: str) -> list[Any]:
    """Return the reports in a JSON Lines file, in order.

    `kinds` is a report class, or a union of the classes that the file may have.

    Raises:
        PlanError: the file cannot be read, is empty or cut short, or has other content. The error
            has `hint` for an empty file, and for reports of other kinds.
    """
    classes = {kind.kind: kind for kind in get_args(kinds) or (kinds,)}
    reports = []
    lines = read_limited(path, MAX_RESULTS_BYTES, what="reports").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = f"`{path}`, line {number},"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise PlanError(
                f"{location} is no JSON: cut short?", hint="remove the line, or run it again"
            ) from error
        values = values if isinstance(values, dict) else {}
        if values.get("schema") != SCHEMA:
            problem = f"has the schema `{values.get('schema')}`, not `{SCHEMA}`"
            raise PlanError(f"{location} {problem}", hint="write it again with this memest")
        if values.get("kind") not in classes:
            problem = f"is `{values.get('kind')}`, not {' or '.join(classes)}"
            raise PlanError(f"{location} {problem}", hint=hint)
        try:
            reports.append(classes[values["kind"]].from_dict(values))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"{location} is not a whole report: {error}", hint="run it again"
            ) from error
    if not reports:
        raise PlanError(f"`{path}` is empty", hint=hint)
    return reports


def _plan_as_run(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a stored plan; keys of QLoRA that an old plan lacks get the values it ran with."""
    if not plan.get("use_qlora"):
        return {**plan, "quant_skip": []} if plan.get("quant_skip") else plan
    if "quant_load" in plan:
        return plan
    defaults = {"quant_skip": ["lm_head", "wo"], "kbit_ckpt": bool(plan.get("act_ckpt"))}
    return {**defaults, **plan, "quant_load": IN_PLACE}
