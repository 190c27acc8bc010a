"""The answer in two lines: whether it fits and with what margin, and what fills the peak where.

Steps are counted from 0 in reports and from 1 here, for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from memest.report import Outcome, Prediction, Verdict
from memest.units import format_gib

if TYPE_CHECKING:
    from memest.estimator.search.advise import Option

_PHASES = {
    "setup": "while the model is built", "forward": "in the forward",
    "backward": "in the backward", "optimizer": "while the optimizer steps",
    "evaluation": "in an evaluation", "generation": "while text is generated",
}  # fmt: skip
_STEP = re.compile(r"\bstep (\d+)")
_OPERATOR = re.compile(r"^(aten|prims|_?c10d\w*|fsdp|bitsandbytes|torchvision|flash_attn\w*)\.\w+")
"""Namespaces of operators; what else has a dot is a module or a line."""

_NAMED_PERCENT = 4.5
"""Of the peak; what is less is part of the rest."""

GOOD, BAD, OPEN, DIM, BOLD = "32;1", "31;1", "33;1", "2", "1"
"""Colours of a terminal (ECMA-48, select graphic rendition)."""

WORDS = {Outcome.FITS: "fits", Outcome.MAY: "may", Outcome.OOM: "OOM"}
COLOURS = {Outcome.FITS: GOOD, Outcome.MAY: OPEN, Outcome.OOM: BAD}


def paint(text: str, code: str, *, colour: bool) -> str:
    """`text` in a colour of the terminal, if it has any.

    >>> paint("fits", GOOD, colour=False)
    'fits'
    """
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def is_tight(verdict: Verdict) -> bool:
    """Whether it fits with less to spare than two drivers of one kind of GPU differ by."""
    from memest.estimator.search.advise import TIGHT_SHARE

    is_fit = verdict.verdict is Outcome.FITS
    return is_fit and verdict.margin_bytes < TIGHT_SHARE * verdict.limit_bytes


def verdict_line(verdict: Verdict, gpu: str, *, colour: bool = False, so_far: bool = False) -> str:
    """The verdict on one card, the peak and the margin."""
    usable = format_gib(verdict.limit_bytes)
    if verdict.verdict is Outcome.OOM:
        head = paint("does not fit", BAD, colour=colour)
        needed = format_gib(verdict.limit_bytes - verdict.margin_bytes)
        lacking = format_gib(-verdict.margin_bytes)
        return f"{head} {gpu}: needs {needed}, {lacking} more than the {usable} usable"
    if verdict.verdict is Outcome.MAY:
        head = paint("may or may not fit", OPEN, colour=colour)
        needed = format_gib(verdict.limit_bytes - verdict.margin_bytes)
        return (
            f"{head} {gpu}: needs up to {needed} of {usable} usable, and fits where blocks come"
            " back in time"
        )
    word = "fits so far on" if so_far else "fits"
    tight = ", but tight" if is_tight(verdict) else ""
    head = paint(f"{word} {gpu}{tight}", GOOD, colour=colour)
    line = (
        f"{head}: {format_gib(verdict.reserved_bytes)} of {usable} usable at the peak,"
        f" {format_gib(verdict.margin_bytes)} to spare"
    )
    return line + ("; drivers of one GPU differ by as much" if tight else "")


def why_line(step: int, phase: str, kinds: Iterable[tuple[str, int]], *, is_oom: bool) -> str:
    """What fills the peak, and when it is, without the names of operators."""
    lead = "runs out" if is_oom else "the peak is"
    return f"{lead} {moment(step, phase)}: {shares(kinds)}"


def moment(step: int, phase: str) -> str:
    """When, in plain words.

    >>> moment(1, "optimizer"), moment(0, "setup")
    ('while the optimizer steps, in step 2', 'while the model is built')
    """
    words = _PHASES.get(phase, f"in {phase}" if phase else "in the run")
    if phase == "setup":
        return words
    return f"{words}, in step {step + 1}" if phase == "optimizer" else f"{words} of step {step + 1}"


def shares(kinds: Iterable[tuple[str, int]]) -> str:
    """Each kind's share of the whole, largest first; kinds of one share are named together.

    >>> shares([("params", 32), ("grads", 32), ("batch", 4), ("optimizer", 32)])
    '32 % each for params, grads and optimizer, 4 % for the rest'
    """
    sizes: dict[str, int] = {}
    for kind, num_bytes in kinds:
        sizes[kind] = sizes.get(kind, 0) + num_bytes
    whole = max(1, sum(sizes.values()))
    by_percent: dict[int, list[str]] = {}
    for kind, num_bytes in sorted(sizes.items(), key=lambda item: -item[1]):
        if 100 * num_bytes / whole >= _NAMED_PERCENT:
            by_percent.setdefault(round(100 * num_bytes / whole), []).append(kind)
    parts = []
    for percent, names in by_percent.items():
        each = " each" if len(names) > 1 else ""
        listed = " and ".join([", ".join(names[:-1]), names[-1]] if each else names)
        parts.append(f"{percent} %{each} for {listed}")
    rest = 100 - sum(percent * len(names) for percent, names in by_percent.items())
    if rest > 0:
        parts.append(f"{rest} % for the rest")
    return ", ".join(parts)


def answer(
    prediction: Prediction, *, change: Option | None = None, colour: bool = False
) -> list[str]:
    """The two lines on the card that was asked for; on a no, also what would help.

    `change` is the cheapest change that fits, where it was looked for and found.
    """
    verdict = prediction.verdicts.get(prediction.gpu)
    if verdict is None:
        return []
    peak, is_oom = prediction.peak, verdict.verdict is Outcome.OOM
    lines = [
        verdict_line(verdict, prediction.gpu, colour=colour),
        why_line(
            peak.step, peak.phase, ((t.kind, t.num_bytes) for t in prediction.terms), is_oom=is_oom
        ),
    ]
    lines += _others(prediction)
    if verdict.decides:
        lines.append(f"what decides: {verdict.decides}")
    if is_oom:
        lines += _change_lines(change, colour=colour)
        lines.append(f"more: {advise_command(prediction)}")
    host = prediction.host_verdict
    if host is not None and host.verdict is Outcome.OOM:
        lines.append(
            paint("the host does not hold it", BAD, colour=colour)
            + f": {format_gib(host.reserved_bytes)} of {format_gib(host.limit_bytes)} there"
        )
    return lines


def _others(prediction: Prediction) -> list[str]:
    """The verdicts of the cards beside the first, by name."""
    by_outcome: dict[Outcome, list[str]] = {each: [] for each in WORDS}
    for name, verdict in prediction.verdicts.items():
        if name != prediction.gpu:
            by_outcome[verdict.verdict].append(name)
    told = {**WORDS, Outcome.OOM: "not"}
    words = [f"{told[each]} {', '.join(names)}" for each, names in by_outcome.items() if names]
    return [f"other cards: {'; '.join(words)}"] if words else []


def _change_lines(change: Option | None, *, colour: bool) -> list[str]:
    if change is None:
        return []
    tight = ", tight" if change.is_tight else ""
    title = paint(change.title, BOLD, colour=colour)
    return [
        f"would fit with {title}: {format_gib(change.peak_reserved_bytes)},"
        f" {format_gib(change.margin_bytes)} to spare{tight} ({change.cost.words})"
    ]


def advise_command(prediction: Prediction) -> str:
    """The `memest advise` for the card that heads the report."""
    from memest.estimator.search.commands import predict_command
    from memest.plan import TrainingPlan

    asked = {k: v for k, v in prediction.plan.items() if k not in ("padded", "name")}
    if len(asked.get("gpu") or ()) != 1 and asked.get("gpu_memory") is None:
        asked["gpu"] = [prediction.gpu]
    plan = TrainingPlan.from_dict(asked)
    return predict_command(plan).replace("memest predict", "memest advise", 1)


def people(at: str) -> str:
    """Where a request failed, its steps counted from 1 and the operator left out.

    >>> people("step 0, forward, encoder.layers.1, aten.addmm")
    'step 1, forward, encoder.layers.1'
    """
    text = _STEP.sub(lambda found: f"step {int(found[1]) + 1}", at)
    return ", ".join(part for part in text.split(", ") if not _OPERATOR.match(part))


def without_operator(why: str) -> str:
    """The reason of a term without the operator at its end.

    >>> without_operator("of the optimizer: aten._foreach_sqrt")
    'of the optimizer'
    """
    head, colon, tail = why.rpartition(": ")
    return head if colon and _OPERATOR.match(tail) else why


def operator_of(at: str) -> str:
    """The operator in the text of `Verdict.at`; empty if it names none.

    >>> operator_of("step 0, forward, aten.addmm"), operator_of("host memory")
    ('aten.addmm', '')
    """
    return next((part for part in at.split(", ") if _OPERATOR.match(part)), "")


def failures(verdicts: Mapping[str, Verdict]) -> list[str]:
    """The operators at which cards were out of memory, for the last part of a report."""
    cards: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        if operator_of(verdict.at):
            cards.setdefault(operator_of(verdict.at), []).append(name)
    return [f"out of memory in {op}: {', '.join(names)}" for op, names in cards.items()]
