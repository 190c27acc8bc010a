"""Largest batches and sweeps as text, JSON Lines and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from memest.estimator.search.largest import Largest
from memest.estimator.search.techniques import TechniqueRow
from memest.report.answer import place_in_words
from memest.report.text import table
from memest.units import GIB, gib_or_mib

_NOUNS = {"batch_size": "batch size", "seq_len": "sequence length"}


def render_largest(rows: Sequence[Largest]) -> str:
    """One line for each GPU, then the assumptions and the end of the search."""
    plan = rows[0].plan
    noun = _NOUNS[rows[0].key]
    lines = [f"{plan.label}: the largest {noun} that fits"]
    cells = [["gpu", "usable", noun, "needs", "uses", "margin", "the next needs"]]
    cells += [[row.gpu, gib_or_mib(row.verdict.limit_bytes), *_figures(row)] for row in rows]
    lines += ["", *table(cells, left=1), ""]
    for row in rows:
        if row.value is None:
            size = getattr(row.plan, row.key)
            lines.append(f"{row.gpu}: {noun} {size} is out of memory at {place_in_words(row.at)}")
        elif row.ceiling:
            lines.append(f"{row.gpu}: memory is left; {row.ceiling}")
        elif row.verdict.is_tight:
            spread = gib_or_mib(row.verdict.spread_bytes)
            lines.append(
                f"{row.gpu}: {noun} {row.value} is tight: a driver may leave {spread} less"
            )
    num_traces, seconds = sum(r.num_traces for r in rows), sum(r.elapsed_s for r in rows)
    lines.append(f"found by replay under each GPU's limit, {num_traces} traces, {seconds:.1f} s")
    return "\n".join(lines)


def render_techniques(rows: Sequence[TechniqueRow], key: str) -> str:
    """Techniques down, GPUs across; in the cells the largest value and the margin."""
    gpus = list(dict.fromkeys(row.gpu for row in rows))
    names = list(dict.fromkeys(row.technique for row in rows))
    by_cell = {(row.technique, row.gpu): row for row in rows}
    cells = [[f"largest {_NOUNS[key]}", *(c for gpu in gpus for c in (gpu, "margin"))]]
    for name in names:
        cells.append([name, *(c for gpu in gpus for c in _cell(by_cell[name, gpu]))])
    lines = table(cells, left=1)
    errors = {row.technique: row.error for row in rows if row.error}
    lines += [f"{name}: {error}" for name, error in errors.items()]
    return "\n".join(lines)


def _cell(row: TechniqueRow) -> tuple[str, str]:
    found = row.largest
    if found is None:
        return "n/a", ""
    value = "OOM" if found.value is None else f"{found.value}{'+' if found.ceiling else ''}"
    return value, f"{found.verdict.margin_bytes / GIB:+.2f} GiB"


def _figures(row: Largest) -> list[str]:
    found = row.verdict
    above = "-" if row.next_needs_bytes is None else gib_or_mib(row.next_needs_bytes)
    figures = [f"{found.margin_bytes / GIB:+.2f} GiB", above]
    if row.value is None:
        return ["none", "-", "-", *figures]
    needs, uses = gib_or_mib(found.needs_bytes), gib_or_mib(found.reserved_bytes)
    return [str(row.value), needs, uses, *figures]


def json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """One JSON object a line."""
    return "\n".join(json.dumps(row) for row in rows)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A head line and one line a row; lists are joined by a space."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: " ".join(v) if isinstance(v, tuple | list) else v for k, v in row.items()}
        )
    return text.getvalue().rstrip("\n")
