"""Errors and verdicts of a tool over the measured runs, from the data of validation/rivals.json."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

OURS = "memest"

Data = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """One tool."""

    num_expressed: int
    """Runs that it answered."""

    allocated: list[float]
    """Signed per cent, of each plan that fits and has such a figure."""

    process: list[float]
    num_oom: int
    """Of the runs expressed, those out of memory when measured."""

    num_unsafe: int
    num_cautious: int
    seconds: float
    """Median over the first estimate of each model."""


def scores_of(data: Data, name: str, *, like: str = "") -> Scores:
    """The scores of `name`, on what it expresses and, where named, `like` expresses too."""
    answers = data["tools"][name]["answers"]
    others = data["tools"][like or name]["answers"]
    keys = [k for k in data["runs"] if "fits" in answers[k] and "fits" in others[k]]
    runs = {key: data["runs"][key] for key in keys}
    first = {run["model"]: answers[key]["seconds"] for key, run in reversed(runs.items())}
    outcomes = [(run["verdict"] == "fits", answers[key]["fits"]) for key, run in runs.items()]
    return Scores(
        num_expressed=len(keys),
        allocated=errors(data, name, "allocated", keys),
        process=errors(data, name, "process", keys),
        num_oom=sum(not fitted for fitted, _ in outcomes),
        num_unsafe=outcomes.count((False, True)),
        num_cautious=outcomes.count((True, False)),
        seconds=median(first.values()) if first else 0.0,
    )


def errors(data: Data, name: str, total: str, keys: Collection[str]) -> list[float]:
    """Signed errors in per cent on the runs of `keys` that fit, each plan once.

    `total` is `allocated` or `process`; the latter only of runs whose allocator had no limit, since
    a limit makes it give back its cache.
    """
    answers = data["tools"][name]["answers"]
    found: dict[str, float] = {}
    # Runs without a limit come first, so that they stand for their plan.
    for key in sorted(keys, key=lambda k: data["runs"][k]["is_limited"]):
        run, predicted = data["runs"][key], answers[key].get(f"{total}_bytes")
        is_comparable = run["verdict"] == "fits" and not (total == "process" and run["is_limited"])
        if is_comparable and predicted is not None:
            measured = run[f"{total}_bytes"]
            found.setdefault(run["plan_id"], 100 * (predicted - measured) / measured)
    return list(found.values())
