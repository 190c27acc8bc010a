"""Plans from files: one lab config as YAML, or a suite of experiments as YAML or JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memest.errors import PlanError
from memest.plan.reading import parse_yaml, read_limited
from memest.plan.training_plan import TrainingPlan


def read_config(path: Path, overrides: Mapping[str, Any]) -> TrainingPlan:
    """Return the plan in a lab config; `overrides` win; `PlanError` if it holds no valid plan."""
    return TrainingPlan.from_dict({**_read_mapping(path), **overrides})


def read_suite(path: Path, overrides: Mapping[str, Any]) -> list[TrainingPlan]:
    """Return the plans of a suite, in its order.

    A suite is a mapping: optional `defaults`, then `experiments`, a list of plans with a `name`
    each.

    Raises:
        PlanError: the file cannot be read, or an experiment is invalid or not unique by name.
    """
    suite = _read_mapping(path)
    unknown = sorted(map(str, set(suite) - {"defaults", "experiments"}))
    if unknown:
        raise PlanError(
            f"`{path}` has the key `{unknown[0]}`", hint="a suite has `defaults` and `experiments`"
        )
    defaults = suite.get("defaults") or {}
    experiments = suite.get("experiments")
    if not isinstance(defaults, dict):
        raise PlanError(f"`defaults` in `{path}` is not a mapping", hint="write `key: value` lines")
    if not isinstance(experiments, list) or not experiments:
        raise PlanError(
            f"`{path}` lists no `experiments`", hint="write a list of plans with a `name` each"
        )
    plans: list[TrainingPlan] = []
    names: set[str] = set()
    for number, values in enumerate(experiments, 1):
        name = _experiment_name(path, number, values, names)
        try:
            plans.append(TrainingPlan.from_dict({**defaults, **values, **overrides}))
        except PlanError as error:
            raise PlanError(f"experiment `{name}`: {error}", hint=error.hint) from error
    return plans


def _experiment_name(path: Path, number: int, values: Any, names: set[str]) -> str:
    """Return the name of an experiment, added to `names`."""
    if not isinstance(values, dict):
        raise PlanError(
            f"experiment {number} in `{path}` is not a mapping", hint="write `name: ...`"
        )
    name = values.get("name")
    if not isinstance(name, str) or not name:
        raise PlanError(f"experiment {number} in `{path}` has no `name`", hint="give each its own")
    if name in names:
        raise PlanError(f"`{path}` names two experiments `{name}`", hint="give each its own name")
    names.add(name)
    return name


def _read_mapping(path: Path) -> dict[Any, Any]:
    loaded = parse_yaml(read_limited(path), path)
    if not isinstance(loaded, dict):
        raise PlanError(f"`{path}` holds no mapping", hint="write `key: value` lines")
    return loaded
