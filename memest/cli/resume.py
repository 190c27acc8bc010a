"""Stored results of an interrupted command, for `--resume`."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from memest.engines import Event, watched
from memest.errors import MemestError
from memest.estimator.search.many_plans import predict_each
from memest.estimator.search.sweep import Grid, SweepPoint, sweep_grid
from memest.estimator.versions import STACK, library_versions
from memest.plan import TrainingPlan
from memest.report import Prediction
from memest.writing import is_stream, writing


class StoredResults:
    """Results by plan in a JSON Lines file, which is next to the command's output file `target`.

    A command deletes it by `forget` after it has written its output. Without `is_resumed` existing
    results are replaced, with a message to the user.
    """

    def __init__(self, target: Path, *, is_resumed: bool) -> None:
        self.path = _stored_path(target)
        self.known: dict[str, Any] = {}
        from memest.estimator.hardware.pace import PACE

        pace = os.environ.get(PACE, "")
        self._versions = {**library_versions(*STACK), PACE: pace}  # results may depend on each
        found = self._read()
        if is_resumed:
            self.known = found
        elif found:
            click.echo(
                f"{len(found)} results of an interrupted run are there; `--resume` uses them",
                err=True,
            )
        self._is_new = not is_resumed

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return found
        for line in lines:
            try:
                row = json.loads(line)
                if row["version"] == self._versions:
                    found[row["plan"]] = row["result"]
            except (ValueError, LookupError, TypeError):
                continue  # a line that the interrupt cut short
        return found

    def of(self, plans: Iterable[TrainingPlan]) -> dict[TrainingPlan, Any]:
        """Return the stored results of `plans`."""
        keys = ((plan, plan_key(plan)) for plan in plans)
        return {plan: self.known[key] for plan, key in keys if key in self.known}

    def add(self, plan: TrainingPlan, result: Any) -> None:
        """Append the result of `plan`, as JSON values, to the file."""
        row = {"version": self._versions, "plan": plan_key(plan), "result": result}
        mode = "w" if self._is_new else "a"
        with writing(self.path, "name another folder"), self.path.open(mode, encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
        self._is_new = False
        self.known[row["plan"]] = result

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Store the results of each task that ends in the block.

        On an interrupt, the number of stored results is printed.
        """

        def store(event: Event) -> None:
            if event.is_done:
                for plan, result in results_of(event).items():
                    self.add(plan, result)

        try:
            with watched(store):
                yield
        except KeyboardInterrupt:
            if self.known:
                stored = f"{len(self.known)} results are kept in {self.path}"
                click.echo(f"\n{stored}; `--resume` goes on", err=True)
            raise


def forget(target: Path | None) -> None:
    """Delete the stored results for `target`, after that file has been written."""
    if target is not None:
        _stored_path(target).unlink(missing_ok=True)


def _stored_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial.jsonl")


def plan_key(plan: TrainingPlan) -> str:
    """Return a unique text for the plan."""
    return json.dumps(plan.to_dict(), sort_keys=True)


def results_of(event: Event) -> dict[TrainingPlan, Any]:
    """Return the results of a finished task by plan, as JSON values; failed plans are left out."""
    pairs = zip(event.task, event.result, strict=True)
    return {
        plan: [point.to_dict() for point in made] if isinstance(made, list) else made.to_dict()
        for plan, made in pairs
        if not isinstance(made, MemestError)
    }


def predict_resumably(
    plans: Sequence[TrainingPlan], target: Path | None, *, is_resumed: bool, jobs: int | None = None
) -> list[Prediction | MemestError]:
    """Run `predict_each`; store each result in a file next to the output file `target`, if any.

    With `is_resumed`, stored results are read and not predicted again.
    """
    if target is None or is_stream(target):
        return predict_each(plans, jobs=jobs)
    stored = StoredResults(target, is_resumed=is_resumed)
    known = {p: Prediction.from_dict(row) for p, row in stored.of(plans).items()}
    new = [plan for plan in plans if plan not in known]
    with stored.storing():
        made = iter(predict_each(new, jobs=jobs) if new else ())
    return [known[plan] if plan in known else next(made) for plan in plans]


def sweep_resumably(
    grid: Grid, target: Path | None, *, is_resumed: bool, **how: Any
) -> list[dict[str, Any]]:
    """Run `sweep_grid`; store each result in a file next to the output file `target`, if any.

    With `is_resumed`, stored results are read and not predicted again.
    """
    if target is None or is_stream(target):
        return sweep_grid(grid, **how)
    stored = StoredResults(target, is_resumed=is_resumed)
    rows = stored.of([plan for _, plan in grid if isinstance(plan, TrainingPlan)])
    known = {p: [SweepPoint.from_dict(p, row) for row in each] for p, each in rows.items()}
    with stored.storing():
        return sweep_grid(grid, known=known, **how)
