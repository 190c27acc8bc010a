"""Rows of a lecture: the predictions of a suite, stored with the package or made now."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from memest.errors import MemestError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.search.explore import explored, point_of
from memest.estimator.search.suite import partition, predict_each
from memest.plan import TrainingPlan
from memest.plan.files import read_suite
from memest.report import Outcome, PhaseRow, Verdict, read_as
from memest.report.explorer import explorer_data


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One experiment of a lecture."""

    plan: TrainingPlan
    kinds: Mapping[str, int]  # at the peak by `explore.KINDS`; without a limit, unless `is_cut`
    arithmetic: Mapping[str, str]
    verdicts: Mapping[str, Verdict]
    phases: tuple[PhaseRow, ...]  # probes of the prediction on the first GPU, up to a failure
    num_params: int
    num_trained: int
    is_cut: bool  # True if the run ends out of memory and `kinds` are those of that moment

    @property
    def gpu(self) -> str:
        """The first GPU."""
        return next(iter(self.verdicts))

    @property
    def needs_bytes(self) -> int:
        """The least limit under which the plan fits, on the first GPU."""
        return self.verdicts[self.gpu].needs_bytes

    @property
    def word(self) -> str:
        """The verdict on the first GPU."""
        return self.verdicts[self.gpu].word

    @property
    def fits(self) -> bool:
        """True if the plan fits the first GPU."""
        return self.verdicts[self.gpu].verdict is Outcome.FITS

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the need: kinds, and cached blocks that no request fits."""
        cached = max(0, self.needs_bytes - sum(self.kinds.values()))
        return {**self.kinds, "cached": cached}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of a suite, and the explorer of the same models."""

    name: str
    rows: tuple[Row, ...]
    versions: Mapping[str, str]
    limits: Mapping[str, int]  # bytes that the allocator can reserve, by GPU
    explorer: Mapping[str, Any]  # data of the explorer's page
    failed: Mapping[str, str]  # plans that could not be predicted, and the reasons


def stored_rows(path: Path) -> Rows | None:
    """Return the stored rows of a suite's file; None if there are none."""
    stored = path.with_suffix(".json.gz")
    if not stored.is_file():
        return None
    values = json.loads(gzip.decompress(stored.read_bytes()))
    rows = tuple(_read_row(row) for row in values["rows"])
    if [row.plan for row in rows] != read_suite(path, {}):
        return None  # the suite has changed
    names = ("versions", "limits", "explorer", "failed")
    return Rows(name=path.stem, rows=rows, **{n: values[n] for n in names})


def store_rows(rows: Rows, path: Path) -> None:
    """Store rows in the folder of a suite's file."""
    names = ("versions", "limits", "explorer", "failed")
    values = {name: getattr(rows, name) for name in names}
    made = [
        {f.name: getattr(row, f.name) for f in fields(Row)}
        | {
            "plan": row.plan.to_dict(),
            "phases": [asdict(phase) for phase in row.phases],
            "verdicts": {gpu: asdict(verdict) for gpu, verdict in row.verdicts.items()},
        }
        for row in rows.rows
    ]
    text = json.dumps(values | {"rows": made}, separators=(",", ":"))
    path.with_suffix(".json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _read_row(values: Mapping[str, Any]) -> Row:
    read = {
        "plan": TrainingPlan.from_dict(values["plan"]),
        "phases": tuple(read_as(PhaseRow, phase) for phase in values["phases"]),
        "verdicts": {gpu: read_as(Verdict, v) for gpu, v in values["verdicts"].items()},
    }
    return Row(**{**values, **read})


def predicted_rows(path: Path, gpus: Sequence[str], jobs: int | None) -> Rows:
    """Predict a suite; its explorer has the rows alone."""
    plans = read_suite(path, {})
    found = predict_each([replace(plan, gpu=tuple(gpus)) for plan in plans], jobs=jobs)
    predicted, failed = partition(plans, found)
    if not predicted:
        raise failed[0][1]
    rows, points = [], []
    for plan, report in predicted:
        whole = (report.terms, report.unlimited_reserved_bytes, report.phases, report.verdicts)
        point, is_cut = point_of(plan, *whole), report.verdict is Outcome.OOM
        with suppress(MemestError):  # a strategy without a grid has the figures of its prediction
            point, is_cut = explored(plan, gpus), False
        points.append(point)
        row = Row(
            plan=point.plan,
            kinds=point.kinds,
            arithmetic=point.arithmetic,
            verdicts=report.verdicts,
            phases=report.phases,
            num_params=report.model["num_params"],
            num_trained=report.model["num_trainable_params"],
            is_cut=is_cut,
        )
        rows.append(row)
    limits = {name: find_gpu(name).limit_bytes for name in gpus}
    lengths = {plan.seq_len for plan in plans}
    tokens = f"{lengths.pop()} tokens" if len(lengths) == 1 else "tokens of each row"
    return Rows(
        name=path.stem,
        rows=tuple(rows),
        versions=predicted[0][1].versions,
        limits=limits,
        explorer=explorer_data(points, limits, tokens=tokens, presets=plans),
        failed={plan.label: str(error) for plan, error in failed},
    )
