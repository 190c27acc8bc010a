"""Stored results of an interrupted command, for `--resume`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memest import __version__
from memest.errors import MemestError, PlanError
from memest.estimator.search.processes import Event, watched
from memest.plan import TrainingPlan

if TYPE_CHECKING:
    from memest.estimator.search.sweep import Grid
    from memest.report import Prediction


class Kept:
    """Results by plan, in a JSON Lines file that grows with each and is deleted when all exist.

    Args:
        target: output file of the command; the results are stored next to it.
        is_resumed: use existing results. Otherwise they are replaced, with a message to the user.
    """

    def __init__(self, target: Path, *, is_resumed: bool) -> None:
        self.path = target.with_name(f".{target.name}.partial.jsonl")
        self.target = target
        self.known: dict[str, Any] = {}
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
                if row["version"] == __version__:
                    found[row["plan"]] = row["result"]
            except (ValueError, LookupError, TypeError):
                continue  # cut short where it was interrupted
        return found

    def add(self, plan: TrainingPlan, result: Any) -> None:
        """Write a result, as JSON values."""
        row = {"version": __version__, "plan": plan_key(plan), "result": result}
        try:
            with self.path.open("w" if self._is_new else "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise PlanError(
                f"`{self.path}` cannot be written: {error.strerror}", hint="name another folder"
            ) from error
        self._is_new = False
        self.known[plan_key(plan)] = result

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)

    @contextmanager
    def growing(self, results_of: Callable[[Event], Mapping[TrainingPlan, Any]]) -> Iterator[None]:
        """Write every result as it comes; on an interrupt, print how many are stored."""

        def keep(event: Event) -> None:
            if event.is_done:
                for plan, result in results_of(event).items():
                    self.add(plan, result)

        try:
            with watched(keep):
                yield
        except KeyboardInterrupt:
            if self.known:
                click.echo(
                    f"\n{len(self.known)} results are kept in {self.path}; `--resume` goes on",
                    err=True,
                )
            raise


def plan_key(plan: TrainingPlan) -> str:
    """Return the plan as a text that is unique to it."""
    return json.dumps(plan.to_dict(), sort_keys=True)


def predictions_of(event: Event) -> dict[TrainingPlan, Any]:
    """Return the predictions that a task of `predict_each` has made; errors are made again."""
    from memest.report import Prediction

    pairs: Sequence[Any] = list(zip(event.task, event.result, strict=True))
    return {plan: made.to_dict() for plan, made in pairs if isinstance(made, Prediction)}


def predict_kept(
    plans: Sequence[TrainingPlan],
    target: Path | None,
    *,
    is_resumed: bool,
    jobs: int | None = None,
    trust_remote_code: bool = False,
) -> list[Prediction | MemestError]:
    """Run `predict_each`, storing results next to `target`, if the command writes one."""
    from memest.estimator.search.suite import predict_each
    from memest.report import Prediction

    if target is None:
        return predict_each(plans, jobs=jobs, trust_remote_code=trust_remote_code)
    kept = Kept(target, is_resumed=is_resumed)
    known = {
        plan: Prediction.from_dict(kept.known[plan_key(plan)])
        for plan in plans
        if plan_key(plan) in kept.known
    }
    new = [plan for plan in plans if plan not in known]
    with kept.growing(predictions_of):
        made = predict_each(new, jobs=jobs, trust_remote_code=trust_remote_code) if new else []
    kept.remove()
    rest = iter(made)
    return [known[plan] if plan in known else next(rest) for plan in plans]


def sweep_kept(
    grid: Grid,
    target: Path | None,
    *,
    is_resumed: bool,
    jobs: int | None = None,
    trust_remote_code: bool = False,
) -> list[dict[str, Any]]:
    """Run `sweep_grid`, storing results next to `target`, if the command writes one."""
    from memest.estimator.search.sweep import SweepPoint, sweep_grid

    if target is None:
        return sweep_grid(grid, jobs=jobs, trust_remote_code=trust_remote_code)
    kept = Kept(target, is_resumed=is_resumed)
    plans = [plan for _, plan in grid if isinstance(plan, TrainingPlan)]
    known = {
        plan: [SweepPoint.from_dict(plan, point) for point in kept.known[plan_key(plan)]]
        for plan in plans
        if plan_key(plan) in kept.known
    }
    with kept.growing(points_of):
        rows = sweep_grid(grid, jobs=jobs, trust_remote_code=trust_remote_code, known=known)
    kept.remove()
    return rows


def points_of(event: Event) -> dict[TrainingPlan, Any]:
    """Return the points that a task of a sweep has made; errors are made again."""
    plans, _ = event.task
    pairs = zip(plans, event.result, strict=True)
    return {plan: [p.to_dict() for p in made] for plan, made in pairs if isinstance(made, list)}
