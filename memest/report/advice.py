"""Advice as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memest.report import Verdict
from memest.report.text import table
from memest.report.times import seconds, time_words
from memest.units import gib_or_mib

if TYPE_CHECKING:
    from memest.estimator.search.advise import Advice, Option


def render_advice(advice: Advice) -> str:
    """The verdict, what makes the plan fit, what is not enough, and what was not looked at."""
    sections = [
        _heading(advice),
        *([_nothing(advice)] if not (advice.fits or advice.options) else []),
        *(_option(number, option) for number, option in enumerate(advice.options, 1)),
        _not_enough(advice),
        _left_out(advice),
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
    head = f"{number}. "
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
    return [f"{head}{option.title}", *(f"   {word:<5}  {text}" for word, text in rows)]


def _not_enough(advice: Advice) -> list[str]:
    if not advice.not_enough:
        return []
    rows = [["not enough alone", "needs", "margin", "a step"]]
    rows += [
        [
            o.title,
            gib_or_mib(o.verdict.needs_bytes),
            gib_or_mib(o.verdict.margin_bytes),
            seconds(o.time.seconds) if o.time else "",
        ]
        for o in advice.not_enough
    ]
    return table(rows, left=1)


def _left_out(advice: Advice) -> list[str]:
    lines = [f"refused: {r.title}: {r.reason}" for r in advice.refused]
    if not advice.fits:
        lines += [f"not tried: {what}" for what in advice.not_tried]
    count = f"{advice.num_predictions} prediction" + "s" * (advice.num_predictions != 1)
    if not advice.is_complete:
        count += ", all that were allowed: there may be more (`--max-predictions`)"
    return [*lines, count]
