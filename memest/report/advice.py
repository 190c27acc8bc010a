"""Advice, largest batches and sweeps as text, CSV and JSON Lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memest.report import Verdict
from memest.report.answer import place_in_words
from memest.report.text import table
from memest.report.times import seconds, time_words
from memest.units import GIB, counted, gib_or_mib

if TYPE_CHECKING:
    from memest.estimator.search.advise import Advice, Option
    from memest.estimator.search.largest import Largest, TechniqueRow


def render_advice(advice: Advice) -> str:
    """Return the advice as text: verdict, changes that fit, that do not fit, and not tried."""
    small = [["not enough alone", "needs", "margin", "a step"]]
    for option in advice.not_enough:
        sizes = (option.verdict.needs_bytes, option.verdict.margin_bytes)
        time = seconds(option.time.seconds) if option.time else ""
        small.append([option.title, *map(gib_or_mib, sizes), time])
    left_out = [f"refused: {r.title}: {r.reason}" for r in advice.refused]
    if not advice.fits:
        left_out += [f"not tried: {what}" for what in advice.not_tried]
    count = counted(advice.num_predictions, "prediction")
    if not advice.is_complete:
        count += ", all that were allowed: there may be more (`--max-predictions`)"
    sections = [
        _heading(advice),
        [] if advice.fits or advice.options else _nothing(advice),
        *(_option(number, option) for number, option in enumerate(advice.options, 1)),
        table(small, left=1) if advice.not_enough else [],
        [*left_out, count],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _heading(advice: Advice) -> list[str]:
    current = advice.current
    plan = current.plan
    facts = [plan.label, plan.precision, plan.optim, f"batch {plan.batch_size}"]
    if plan.accumulate_grad_batches > 1:
        facts.append(f"accumulation {plan.accumulate_grad_batches}")
    if plan.is_distributed:
        facts.append(f"{plan.strategy} on {plan.world_size} GPUs")
    facts.append(f"on {advice.gpu}")
    found = current.verdict
    figures = f"needs {gib_or_mib(found.needs_bytes)} of {gib_or_mib(found.limit_bytes)} usable"
    if advice.fits:
        return ["  ".join(facts), f"fits as it is: {figures}, {_to_spare(found)}"]
    lines = [f"does not fit: {figures}, {gib_or_mib(-found.margin_bytes)} too much"]
    if current.time:
        lines.append(f"with enough memory: about {time_words(current.time)}")
    return ["  ".join(facts), *lines]


def _to_spare(verdict: Verdict) -> str:
    tight = "; tight: a driver may leave less" if verdict.is_tight else ""
    return f"{gib_or_mib(verdict.margin_bytes)} to spare{tight}"


def _nothing(advice: Advice) -> list[str]:
    smallest = advice.smallest
    searched = "" if advice.is_complete else " among what was tried"
    return [
        f"nothing on this GPU{searched}: the smallest found needs"
        f" {gib_or_mib(smallest.verdict.needs_bytes)},"
        f" {gib_or_mib(-smallest.verdict.margin_bytes)} too much",
        f"   {smallest.title}",
        f"   check  {smallest.command}",
    ]


def _option(number: int, option: Option) -> list[str]:
    rows = [
        ("needs", f"{gib_or_mib(option.verdict.needs_bytes)}, {_to_spare(option.verdict)}"),
        *([("time", f"about {time_words(option.time)}")] if option.time else []),
        ("kind", option.cost.words),
        *(("cost", change.price) for change in option.changes),
    ]
    if option.host_bytes:
        rows.append(("host", f"{gib_or_mib(option.host_bytes)} of paged optimizer state"))
    rows.append(("check", option.command))
    rows += [("train", line) for line in option.training_lines]
    return [f"{number}. {option.title}", *(f"   {word:<5}  {text}" for word, text in rows)]


_NOUNS = {"batch_size": "batch size", "seq_len": "sequence length"}


def render_largest(rows: Sequence[Largest]) -> str:
    """Return a line for each GPU, then the assumptions and how the search ended."""
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
    """Return a table: a row per technique, a column per GPU, largest value and margin."""
    gpus = list(dict.fromkeys(row.gpu for row in rows))
    names = list(dict.fromkeys(row.technique for row in rows))
    by_cell = {(row.technique, row.gpu): row for row in rows}
    cells = [[f"largest {_NOUNS[key]}", *(c for gpu in gpus for c in (gpu, "margin"))]]
    for name in names:
        line = [name]
        for found in (by_cell[name, gpu].largest for gpu in gpus):
            if found is None:
                line += ["n/a", ""]
                continue
            value = "OOM" if found.value is None else f"{found.value}{'+' if found.ceiling else ''}"
            line += [value, f"{found.verdict.margin_bytes / GIB:+.2f} GiB"]
        cells.append(line)
    lines = table(cells, left=1)
    errors = {row.technique: row.error for row in rows if row.error}
    lines += [f"{name}: {error}" for name, error in errors.items()]
    return "\n".join(lines)


def _figures(row: Largest) -> list[str]:
    found = row.verdict
    above = "-" if row.next_needs_bytes is None else gib_or_mib(row.next_needs_bytes)
    figures = [f"{found.margin_bytes / GIB:+.2f} GiB", above]
    if row.value is None:
        return ["none", "-", "-", *figures]
    needs, uses = gib_or_mib(found.needs_bytes), gib_or_mib(found.reserved_bytes)
    return [str(row.value), needs, uses, *figures]


def json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return JSON Lines: an object for each row."""
    return "\n".join(json.dumps(row) for row in rows)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV text: a header, then a line per row; lists are joined by a space."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: " ".join(v) if isinstance(v, tuple | list) else v for k, v in row.items()}
        )
    return text.getvalue().rstrip("\n")
