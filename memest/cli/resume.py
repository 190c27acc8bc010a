"""Stored results of an interrupted command, for `--resume`."""

import json
import os
from collections.abc import Iterator, Sequence
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
    """Store of a command's results, one per plan, with which an interrupted command goes on. They
    are in a JSON Lines file next to the output file `target`. With `is_resumed`, results of an
    interrupted run are read into `known`: {`plan_key`: result}. Else they are overwritten."""

    def __init__(self, target: Path, *, is_resumed: bool) -> None:
        from memest.estimator.hardware.pace import PACE

        self.path = _stored_path(target)
        self._mode = "a" if is_resumed else "w"  # of the next line
        pace = os.environ.get(PACE, "")
        self._versions = {**library_versions(*STACK), PACE: pace}  # results may depend on each
        self.known = self._read()
        if self.known and not is_resumed:
            message = f"{len(self.known)} results of an interrupted run are there"
            click.echo(f"{message}; `--resume` uses them", err=True)
            self.known = {}

    def _read(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return results
        for line in lines:
            try:
                row = json.loads(line)
                if row["version"] == self._versions:
                    results[row["plan"]] = row["result"]
            except (ValueError, LookupError, TypeError):
                continue  # a line that the interrupt cut short
        return results

    def add(self, plan: TrainingPlan, result: Any) -> None:
        """Append `result`, the JSON values of the result of `plan`, to the file."""
        row = {"version": self._versions, "plan": plan_key(plan), "result": result}
        with (
            writing(self.path, "name another folder"),
            self.path.open(self._mode, encoding="utf-8") as file,
        ):
            file.write(json.dumps(row) + "\n")
        self._mode = "a"
        self.known[row["plan"]] = result


def forget(target: Path | None) -> None:
    """Delete the results stored for the output file `target`, if there are any."""
    if target is not None:
        _stored_path(target).unlink(missing_ok=True)


def _stored_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial.jsonl")


def plan_key(plan: TrainingPlan) -> str:
    """Return a text that identifies the plan: its keys and values as JSON."""
    return json.dumps(plan.to_dict(), sort_keys=True)


def results_of(event: Event) -> dict[TrainingPlan, Any]:
    """Return {plan: its result as JSON values} of the ended task in `event`. `event.task` is a list
    of plans, and `event.result` has a result for each plan. Plans whose result is an error are left
    out."""
    pairs = zip(event.task, event.result, strict=True)
    return {
        plan: [point.to_dict() for point in value] if isinstance(value, list) else value.to_dict()
        for plan, value in pairs
        if not isinstance(value, MemestError)
    }


@contextmanager
def _results_stored(
    plans: Sequence[TrainingPlan], target: Path | None, *, is_resumed: bool
) -> Iterator[dict[TrainingPlan, Any]]:
    """Yield those results of `plans` that an interrupted command has stored: {plan: result as JSON
    values}. Also store the results of all tasks that end in the block. Stored results are in a file
    next to the output file `target`. If `target` is None or a stream, read and store nothing.
    Unless `is_resumed`, discard older results. On Ctrl-C, print how many results are stored."""
    if target is None or is_stream(target):
        yield {}
        return
    stored = StoredResults(target, is_resumed=is_resumed)

    def store(event: Event) -> None:
        for plan, result in results_of(event).items() if event.is_done else ():
            stored.add(plan, result)

    try:
        with watched(store):
            keys = {plan: plan_key(plan) for plan in plans}
            yield {plan: stored.known[key] for plan, key in keys.items() if key in stored.known}
    except KeyboardInterrupt:
        if stored.known:
            message = f"{len(stored.known)} results are kept in {stored.path}"
            click.echo(f"\n{message}; `--resume` goes on", err=True)
        raise


def predict_resumably(
    plans: Sequence[TrainingPlan], target: Path | None, *, is_resumed: bool, jobs: int | None = None
) -> list[Prediction | MemestError]:
    """Return the prediction of each plan, or its error. `jobs` is the number of workers, None for
    one per core. Each prediction is stored next to the output file `target` (None: nowhere) for a
    later run. With `is_resumed`, stored predictions are read and not made again."""
    with _results_stored(plans, target, is_resumed=is_resumed) as rows:
        stored = {plan: Prediction.from_dict(row) for plan, row in rows.items()}
        missing = [plan for plan in plans if plan not in stored]
        predictions = iter(predict_each(missing, jobs=jobs) if missing else ())
    return [stored[plan] if plan in stored else next(predictions) for plan in plans]


def sweep_resumably(
    grid: Grid, target: Path | None, *, is_resumed: bool, **options: Any
) -> list[dict[str, Any]]:
    """Return the table rows of `sweep_grid(grid, **options)`; `options` has `jobs` and `engine`.
    `target` and `is_resumed` are as in `predict_resumably`."""
    plans = [plan for _, plan in grid if isinstance(plan, TrainingPlan)]
    with _results_stored(plans, target, is_resumed=is_resumed) as tables:
        stored = {p: [SweepPoint.from_dict(p, row) for row in rows] for p, rows in tables.items()}
        return sweep_grid(grid, known=stored, **options)
