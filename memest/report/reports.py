"""The measured reports of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memest.errors import PlanError
from memest.plan.reading import read_limited
from memest.plan.values import IN_PLACE
from memest.report.records import SCHEMA, Measurement

MAX_RESULTS_BYTES = 512 << 20
"""A report is some ten KiB; a file beyond it is something else."""


def read_measurements(path: Path) -> list[Measurement]:
    """The measured reports in a JSON Lines file, in its order.

    Raises:
        PlanError: the file cannot be read, is cut short, or holds something else.
    """
    return list(_measurements(path))


def _measurements(path: Path) -> Iterator[Measurement]:
    lines = read_limited(path, MAX_RESULTS_BYTES, what="measured reports").splitlines()
    if not any(line.strip() for line in lines):
        raise PlanError(f"`{path}` is empty", hint="name a file of measured reports")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"`{path}`, line {number},"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise PlanError(
                f"{where} is no JSON: cut short?", hint="remove the line, or run it again"
            ) from error
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            found = values.get("schema") if isinstance(values, dict) else None
            raise PlanError(
                f"{where} has the schema `{found}`, not `{SCHEMA}`",
                hint="name a results file of memest",
            )
        if values.get("kind") != Measurement.kind:
            raise PlanError(
                f"{where} is `{values.get('kind')}`, not measured",
                hint="name a results file of `memest validate`",
            )
        try:
            yield Measurement.from_dict(values | {"plan": _plan_as_run(values["plan"])})
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"{where} is not a whole report: {error}", hint="run the experiment again"
            ) from error


def _plan_as_run(plan: dict[str, Any]) -> dict[str, Any]:
    """Add how QLoRA ran before plans said it: quantised in place, checkpointing by `act_ckpt`."""
    if not plan.get("use_qlora") or "quant_load" in plan:
        return plan
    return {**plan, "quant_load": IN_PLACE, "kbit_ckpt": bool(plan.get("act_ckpt"))}
