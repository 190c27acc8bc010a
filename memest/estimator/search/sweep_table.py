"""The rows of a sweep as a table of two keys, and read back from the file that holds them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.errors import PlanError, shown
from memest.plan.reading import read_limited
from memest.report import Outcome, Verdict

MAX_SWEEP_BYTES = 64 << 20
"""A row is some hundred bytes; a file beyond it is something else."""

_FIRST_RESULT = "verdict"
"""The columns before it say which plan and card a row is of."""


@dataclass(frozen=True, slots=True)
class FitsTable:
    """Verdicts by (row, column) in the order of the sweep; a plan that does not exist has none."""

    verdicts: dict[tuple[str, str], Verdict]
    across: str
    """What the columns are, `batch size`."""

    gpus: tuple[str, ...]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that `memest sweep -o` wrote, from CSV or JSON Lines by the file's ending.

    Raises:
        PlanError: the file cannot be read or is no sweep.
    """
    text = read_limited(path, MAX_SWEEP_BYTES, what="`memest sweep -o`")
    try:
        rows: list[Any]
        if path.suffix == ".csv":
            rows = list(csv.DictReader(text.splitlines()))
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        for row in rows:
            _verdict(row)
    except (csv.Error, json.JSONDecodeError, LookupError, TypeError, ValueError) as error:
        raise _no_sweep(path) from error
    if not rows:
        raise _no_sweep(path)
    return rows


def _no_sweep(path: Path) -> PlanError:
    return PlanError(f"`{path}` is no sweep", hint="write one with `memest sweep -o sweep.csv`")


def fits_table(rows: Sequence[Mapping[str, Any]], across: str = "") -> FitsTable:
    """Which rows fit: `across` over the columns, all that varies besides down the rows.

    By default the columns are the key with the most values, of equals the last.

    Raises:
        PlanError: `across` does not vary.
    """
    names = list(rows[0])
    keys = names[: names.index(_FIRST_RESULT)]
    values = {key: list(dict.fromkeys(_text(row[key]) for row in rows)) for key in keys}
    varied = [key for key in keys if len(values[key]) > 1]
    if across and across not in varied:
        raise PlanError(
            f"{shown(across)} has one value or none in this sweep",
            hint=f"keys that vary: {', '.join(varied) or 'none'}",
        )
    chosen = across or max(reversed(varied or keys), key=lambda key: len(values[key]))
    down = [key for key in varied if key != chosen] or [k for k in keys if k != chosen][:1]
    verdicts: dict[tuple[str, str], Verdict] = {}
    for row in rows:
        verdict = _verdict(row)
        if verdict is not None:
            name = _row_name([_label(key, _text(row[key])) for key in down])
            verdicts[name, _column(chosen, _text(row[chosen]))] = verdict
    return FitsTable(verdicts, chosen.replace("_", " "), tuple(values["gpu"]))


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


_SHORT = {
    "accumulate_grad_batches": "acc", "act_ckpt": "ckpt", "batch_size": "batch",
    "use_lora": "LoRA", "use_qlora": "QLoRA",
}  # fmt: skip


def _label(key: str, text: str) -> str:
    """What a value is called beside others.

    >>> _label("precision", "32-true"), _label("use_lora", "False"), _label("batch_size", "8")
    ('32-true', 'no LoRA', 'batch 8')
    """
    name = _SHORT.get(key, key.replace("_", " "))
    if text in ("True", "False"):
        return name if text == "True" else f"no {name}"
    if text in ("", "None"):
        return f"no {name}"
    return f"{name} {text}" if _is_number(text) else text


def _row_name(labels: Sequence[str]) -> str:
    """Labels in a row; what is not there is left out where something is.

    >>> _row_name(["adamw", "no ckpt"]), _row_name(["no LoRA", "no ckpt"])
    ('adamw', 'no LoRA, no ckpt')
    """
    return ", ".join([x for x in labels if not x.startswith("no ")] or labels)


def _column(key: str, text: str) -> str:
    return text if _is_number(text) else _label(key, text)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _verdict(row: Mapping[str, Any]) -> Verdict | None:
    if not row["verdict"]:
        return None
    return Verdict(
        verdict=Outcome(row["verdict"]),
        margin_bytes=int(row["margin_bytes"]),
        limit_bytes=int(row["limit_bytes"]),
        reserved_bytes=int(row["peak_reserved_bytes"]),
        at=row["oom_at"],
    )
