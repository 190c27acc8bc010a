"""What `memest run` reports of a script: `memest.report/1`, kind `run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar

from memest.report.records import SCHEMA, Interval, Outcome, Verdict


class Ending(StrEnum):
    """How a script ended."""

    FINISHED = "finished"
    """By itself, whatever its exit code."""

    STOPPED = "stopped"
    """After as many optimizer steps as were asked for."""

    OOM = "oom"
    """By a `torch.OutOfMemoryError` that it did not catch."""

    CRASHED = "crashed"
    """By another error that it did not catch."""

    UNSUPPORTED = "unsupported"
    """Where it did what cannot be simulated."""

    INTERRUPTED = "interrupted"
    """By the user."""

    RUNNING = "running"
    """Not yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRow:
    """Bytes held at the peak by one owner: a module or a line, or all that is of a kind."""

    name: str
    """`activations`; `GPT2LMHeadModel.transformer.h.*`; `train.py:12`."""

    num_bytes: int
    num_tensors: int
    kinds: Mapping[str, int]
    """Bytes by what they are held for."""

    source: str = ""
    """Of a line its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPhase:
    """The highest level of one phase of the script."""

    name: str
    """`setup`, `forward`, `backward`, `optimizer`, `evaluation` or `generation`."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """One optimizer step, from the end of the step before."""

    step: int
    """From 0."""

    allocated_bytes: int
    """After it."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPeak:
    """Where the allocated bytes were highest."""

    step: int
    phase: str
    module: str
    op: str
    line: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """Values that the script read and nobody can know without a GPU."""

    line: str
    what: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """One rank of a script on several GPUs."""

    rank: int
    ending: Ending
    num_steps: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Of this rank, as the report's own are of all."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a script did to the memory of the GPU that it believed in."""

    kind: ClassVar[str] = "run"

    name: str
    """The script and its arguments, or `a block of code`."""

    gpu: str
    ending: Ending
    error: str
    """What ended it, in a line; empty if it ended by itself."""

    verdict: Outcome
    limit_bytes: int
    """What the caching allocator could reserve."""

    num_steps: int
    """Optimizer steps."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    """What nvidia-smi shows: reserved, the CUDA context, and NCCL on several GPUs."""

    host_bytes: int
    """Host memory that tensors without data would hold, at its highest."""

    peak: RunPeak
    terms: tuple[HeldRow, ...]
    """What filled the peak, by kind; with `rounding` they add up to the peak."""

    modules: tuple[HeldRow, ...]
    lines: tuple[HeldRow, ...]
    phases: tuple[RunPhase, ...]
    steps: tuple[RunStep, ...]
    """The first, the second, the one with the peak and the last."""

    verdicts: Mapping[str, Verdict]
    guesses: tuple[Guess, ...]
    coverage: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    """Reasons to trust the figures less, reported above the figures."""

    notes: tuple[str, ...]
    """What was seen in the run and is worth knowing."""

    assumptions: tuple[str, ...]
    versions: Mapping[str, str]
    elapsed_s: float
    rank: int = 0
    """Whose report this is, where there are several."""

    ranks: tuple[RankRow, ...] = ()
    """Those that were run; empty on one GPU."""

    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Of `allocated`, `reserved` and `process` at their peaks: over the ranks that were run, and
    the moments at which blocks can come back that two streams or a collective share. The figures of
    the report are those of the worst rank and the latest moment. On one GPU low is high.
    """

    allocator: str = ""
    """Its settings, as `PYTORCH_ALLOC_CONF` gives them; empty: the defaults."""

    @property
    def fits(self) -> bool:
        """Whether the script went through on its GPU, as far as its memory goes."""
        return self.verdict is not Outcome.OOM

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"schema": SCHEMA, "kind": self.kind, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunReport:
        """A report from what `to_dict` made of it.

        Raises:
            KeyError, TypeError, ValueError: the values are not those of such a report.
        """
        given = {"allocator": "", "intervals": {}, "warnings": (), **values}
        given = {field.name: given[field.name] for field in fields(cls)}
        rows = {
            "terms": HeldRow, "modules": HeldRow, "lines": HeldRow,
            "phases": RunPhase, "steps": RunStep, "guesses": Guess, "ranks": RankRow,
        }  # fmt: skip
        for name, row in rows.items():
            given[name] = tuple(row(**each) for each in given[name])
        ranks = (replace(each, intervals=_intervals(each.intervals)) for each in given["ranks"])
        verdicts = {
            name: Verdict(**{**each, "verdict": Outcome(each["verdict"])})
            for name, each in given["verdicts"].items()
        }
        return cls(
            **{
                **given,
                "ending": Ending(given["ending"]),
                "verdict": Outcome(given["verdict"]),
                "peak": RunPeak(**given["peak"]),
                "verdicts": verdicts,
                "ranks": tuple(ranks),
                "intervals": _intervals(given["intervals"]),
                "warnings": tuple(given["warnings"]),
                "notes": tuple(given["notes"]),
                "assumptions": tuple(given["assumptions"]),
            }
        )

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        """The text report."""
        from memest.render.run import render_run

        return render_run(self, verbose=True)

    def _repr_html_(self) -> str:
        from memest.render.run_html import run_fragment

        return run_fragment(self)


def _intervals(values: Mapping[str, Any]) -> dict[str, Interval]:
    return {name: Interval(**each) for name, each in values.items()}
