"""Predictions as text for a terminal and as a table for a notebook."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memest.render.answer import (
    COLOURS,
    DIM,
    WORDS,
    answer,
    failures,
    is_tight,
    paint,
    people,
    without_operator,
)
from memest.report import Interval, Outcome, Phase, PhaseRow, Prediction, Verdict
from memest.units import (
    MIB,
    counted,
    format_bytes,
    format_count,
    format_gib,
    gib_that_add_up,
    rounded_to_sum,
    shares_that_add_up,
)

if TYPE_CHECKING:
    from memest.estimator.search.advise import Option
    from memest.models_meta.registry import ModelEntry


def render_text(
    prediction: Prediction,
    *,
    change: Option | None = None,
    colour: bool = False,
    verbose: bool = False,
) -> str:
    """The whole report: the answer, then plan, terms, phases, totals, verdicts, coverage.

    `change` is the cheapest that fits, where one was looked for; `verbose` adds all that is
    assumed and the versions.
    """
    sections = [
        answer(prediction, change=change, colour=colour),
        _heading(prediction),
        _terms(prediction),
        _totals(prediction),
        _phases(prediction),
        _closed_form(prediction),
        verdict_table(prediction.verdicts, colour=colour),
        [paint(line, DIM, colour=colour) for line in _assumed(prediction, verbose=verbose)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def render_suite(predictions: Sequence[Prediction]) -> str:
    """One line per plan."""
    gpus = list(dict.fromkeys(name for p in predictions for name in p.verdicts))
    header = ["experiment", "allocated", "reserved", "process", *gpus]
    rows = [
        [
            p.name,
            format_gib(p.peak_allocated_bytes),
            format_gib(p.peak_reserved_bytes),
            format_gib(p.process_bytes),
            *(str(p.verdicts[g].verdict) if g in p.verdicts else "" for g in gpus),
        ]
        for p in predictions
    ]
    return "\n".join(table([header, *rows], left=1))


def render_models(entries: Iterable[ModelEntry]) -> str:
    """The bundled models."""
    rows = [["model", "family", "modality", "parameters", "Hugging Face id"]]
    rows += [[e.name, e.family, e.modality, format_count(e.num_params), e.hub_id] for e in entries]
    return "\n".join(table(rows, left=3, last_left=True))


def render_html_table(prediction: Prediction) -> str:
    """Terms and verdicts as two HTML tables, for a notebook."""
    terms = [["held at the peak", "GiB", "arithmetic"]]
    held = gib_that_add_up([t.num_bytes for t in prediction.terms])
    rows = zip(held, prediction.terms, strict=True)
    terms += [[term.kind, size, term.arithmetic] for size, term in rows]
    terms.append(["peak allocated", f"{prediction.peak_allocated_bytes / 2**30:.2f}", ""])
    terms.append(["peak reserved", f"{prediction.peak_reserved_bytes / 2**30:.2f}", ""])
    verdicts = [["GPU", "verdict", "margin, GiB"]]
    verdicts += [
        [name, str(v.verdict), f"{v.margin_bytes / 2**30:+.2f}"]
        for name, v in prediction.verdicts.items()
    ]
    title = html.escape(" ".join(_heading(prediction)[0].split()))
    return f"<p><b>{title}</b></p>" + _html(terms) + _html(verdicts)


def _heading(prediction: Prediction) -> list[str]:
    plan, model = prediction.plan, prediction.model
    facts = [
        prediction.name,
        plan["precision"],
        plan["optim"] + (f" momentum {plan['momentum']}" if plan["momentum"] else ""),
        f"batch {plan['batch_size']}",
    ]
    if plan["accumulate_grad_batches"] > 1:
        facts.append(f"accumulation {plan['accumulate_grad_batches']}")
    facts.append(tokens_of(plan))
    if plan["strategy"] != "auto" or plan["devices"] > 1:
        facts.append(_strategy(plan))
    if plan["act_ckpt"]:
        facts.append("activation checkpointing")
    if plan["use_qlora"] or plan["use_lora"]:
        facts.append(f"{'QLoRA' if plan['use_qlora'] else 'LoRA'} rank {plan['lora_r']}")
    if plan["use_qlora"] and plan["kbit_ckpt"] is not False and not plan["act_ckpt"]:
        facts.append("activation checkpointing by peft")
    lines = ["  ".join(facts)]
    if prediction.name != plan["model_name"]:
        lines.append(f"model {plan['model_name']}")
    lines.append(f"{model['class']}: {parameters_of(model)}")
    return lines


def parameters_of(model: Mapping[str, Any]) -> str:
    """Parameters of a model and how many are trained, as a report says them."""
    trained = format_count(model["num_trainable_params"])
    return f"{format_count(model['num_params'])} parameters, {trained} trained"


def _strategy(plan: Mapping[str, Any]) -> str:
    gpus = "1 GPU" if plan["devices"] == 1 else f"{plan['devices']} GPUs"
    name = "ddp" if plan["strategy"] == "auto" else plan["strategy"]
    sharding = f" {plan['sharding_strategy']}" if name.startswith("fsdp") else ""
    return f"{gpus}, {name}{sharding}"


def _terms(prediction: Prediction) -> list[str]:
    rows = [["held at the peak", "", "share", "arithmetic"]]
    peak = prediction.peak_allocated_bytes
    sizes = [term.num_bytes for term in prediction.terms]
    figures = zip(gib_that_add_up(sizes, 3), shares_that_add_up(sizes, peak), strict=True)
    for term, (size, share) in zip(prediction.terms, figures, strict=True):
        why = without_operator(term.why)
        note = f"{term.arithmetic}: {why}" if term.kind != "params" else term.arithmetic
        rows.append([term.kind, f"{size} GiB", share, note])
    rows.append(["peak allocated", format_gib(peak, 3), "100.0 %", _where(prediction)])
    return table(rows, left=1, last_left=True)


def _where(prediction: Prediction) -> str:
    peak = prediction.peak
    module = f", {peak.module}" if peak.module else ""
    return f"step {peak.step + 1}, {peak.phase}{module}"


def _totals(prediction: Prediction) -> list[str]:
    slack = prediction.peak_reserved_bytes - prediction.peak_allocated_bytes
    context = prediction.process_bytes - prediction.peak_reserved_bytes
    allocated, reserved = prediction.peak_allocated_bytes, prediction.peak_reserved_bytes
    process = format_gib(prediction.process_bytes)
    is_single = prediction.plan["strategy"] == "auto" and prediction.plan["devices"] == 1
    beside = "CUDA context" if is_single else "CUDA context and NCCL"
    rows = [
        ["allocated", format_gib(allocated), "torch.cuda.max_memory_allocated"],
        ["reserved", format_gib(reserved), f"cached beside it {format_bytes(slack)}"],
        ["process", process, f"nvidia-smi; {beside} {format_bytes(context)}"],
    ]
    if prediction.host_bytes:
        rows.append(["host", format_gib(prediction.host_bytes), _host_note(prediction)])
        held = gib_that_add_up([t.num_bytes for t in prediction.host_terms])
        rows += [
            ["", f"{size} GiB", f"{t.kind}: {t.arithmetic}, {t.why}"]
            for size, t in zip(held, prediction.host_terms, strict=True)
        ]
    say_intervals(rows, prediction.intervals)
    return [f"peak on {prediction.gpu}", *table(rows, left=1, last_left=True)]


def tokens_of(plan: Mapping[str, Any]) -> str:
    """Tokens of a sample, as a report says them.

    >>> tokens_of({"seq_len": 512}), tokens_of({"seq_len": None, "lengths": [96, 512]})
    ('512 tokens', '2 lengths from 96 to 512 tokens')
    """
    lengths = plan.get("lengths")
    if not lengths:
        return f"{plan['seq_len']} tokens"
    return f"{len(lengths)} lengths from {min(lengths)} to {max(lengths)} tokens"


def say_intervals(rows: Iterable[list[str]], intervals: Mapping[str, Interval]) -> None:
    """Add to the note of each of `rows` between what its figure lies, by the name in front."""
    for row in rows:
        found = intervals.get(row[0])
        if found is not None and found.low_bytes < found.high_bytes:
            low, high = (f"{n / 2**30:.2f}" for n in (found.low_bytes, found.high_bytes))
            row[-1] += f"; on a rank between {low} and {high}"


def _host_note(prediction: Prediction) -> str:
    verdict = prediction.host_verdict
    note = "of all GPUs of the node" if prediction.host_terms else "paged optimizer state"
    if verdict is None:
        return note
    outcome = "OOM" if verdict.verdict is Outcome.OOM else "fits"
    margin = f"{verdict.margin_bytes / 2**30:+.2f} GiB"
    return f"{note}; {format_gib(verdict.limit_bytes)} there: {outcome}, {margin}"


def _phases(prediction: Prediction) -> list[str]:
    rows = ["GiB by phase,params,grads,optimizer,activations,all,peak,reserved".split(",")]
    last = prediction.plan["accumulate_grad_batches"] - 1
    for row in prediction.phases:
        if row.step <= 1 and row.micro_batch in (0, last):
            rows.append(_phase_cells(row, last))
    return table(rows, left=1)


_PHASES = {
    Phase.BEFORE_FORWARD: "before forward",
    Phase.AFTER_FORWARD: "after forward",
    Phase.AFTER_BACKWARD: "after backward",
    Phase.AFTER_OPTIMIZER_STEP: "after step",
}


def _phase_cells(row: PhaseRow, last_micro_batch: int) -> list[str]:
    step = step_name(row.step, row.micro_batch if last_micro_batch else None)
    return [f"{step} {_PHASES[row.phase]}", *phase_figures(row)]


def phase_figures(row: PhaseRow) -> list[str]:
    """GiB of the four kinds, which add up to what is allocated; allocated, peak and reserved."""
    kinds = row.params_bytes, row.grads_bytes, row.optimizer_bytes, row.activations_bytes
    levels = row.allocated_bytes, row.peak_allocated_bytes, row.reserved_bytes
    return [*gib_that_add_up(kinds), *(f"{level / 2**30:.2f}" for level in levels)]


def step_name(step: int, micro_batch: int | None) -> str:
    """A step as people count it, with its micro-batch where it has several.

    >>> step_name(0, None), step_name(1, 3)
    ('1', '2.4')
    """
    return f"{step + 1}" if micro_batch is None else f"{step + 1}.{micro_batch + 1}"


def _closed_form(prediction: Prediction) -> list[str]:
    """The textbook's bytes per layer, and what leads from them to the traced ones."""
    found = prediction.closed_form
    if found is None:
        return []
    letters = ", ".join(f"{k} = {v}" for k, v in found.letters.items())
    sizes = [found.textbook_bytes, *(t.num_bytes for t in found.differences)]
    textbook, *others = rounded_to_sum([size / MIB for size in sizes], 2)
    rows = [["textbook", f"{textbook:.2f}", f"{found.formula}, {letters}"]]
    rows += [
        [t.kind, f"{size:+.2f}", f"{t.arithmetic}: {t.why}"]
        for size, t in zip(others, found.differences, strict=True)
    ]
    rows.append(["traced", f"{found.traced_bytes / MIB:.2f}", f"mean of {found.num_layers} layers"])
    title = "MiB that a layer keeps for its backward; textbook: Korthikanti et al. 2022, 16 bit"
    return [title, *table(rows, left=1, last_left=True)]


def verdict_table(verdicts: Mapping[str, Verdict], *, colour: bool = False) -> list[str]:
    """A line for each card: whether the run fits, and what it leaves free."""
    rows = [["gpu", "usable", "reserved", "verdict", "margin", ""]]
    rows += [_verdict_cells(name, verdict) for name, verdict in verdicts.items()]
    lines = table(rows, left=1, last_left=True)
    codes = [COLOURS[v.verdict] for v in verdicts.values()]
    words = [WORDS[v.verdict] for v in verdicts.values()]
    return lines[:1] + [
        line.replace(f" {word} ", f" {paint(word, code, colour=colour)} ", 1)
        for line, word, code in zip(lines[1:], words, codes, strict=True)
    ]


def _verdict_cells(name: str, verdict: Verdict) -> list[str]:
    note = f"at {people(verdict.at)}" if verdict.at else "tight" if is_tight(verdict) else ""
    return [
        name,
        format_gib(verdict.limit_bytes),
        format_gib(verdict.reserved_bytes),
        WORDS[verdict.verdict],
        f"{verdict.margin_bytes / 2**30:+.2f} GiB",
        note,
    ]


def _assumed(prediction: Prediction, *, verbose: bool) -> list[str]:
    """What is assumed, all of it or the first line, and what is not modelled."""
    coverage = prediction.coverage
    lines = brief(prediction.assumptions, verbose=verbose)
    known, all_ops = coverage["num_modelled"], coverage["num_ops"]
    lines.append(f"coverage: {known} of {all_ops} operator calls modelled")
    for op, count in coverage["unmodelled"].items():
        lines.append(f"not modelled: workspace of {op} ({counted(count, 'call')})")
    lines.append(f"peak allocated in {prediction.peak.op}")
    lines += failures(prediction.verdicts)
    versions = ", ".join(f"{k} {v}" for k, v in prediction.versions.items())
    lines.append(f"versions: {versions}; {prediction.elapsed_s:.1f} s")
    return lines


def brief(assumptions: Sequence[str], *, verbose: bool) -> list[str]:
    """A line for each assumption; without `verbose` the first, and how many more there are."""
    lines = [f"assumed: {line}" for line in assumptions[: None if verbose else 1]]
    if more := len(assumptions) - len(lines):
        lines[-1] += f"; {more} more with --verbose"
    return lines


def table(rows: Sequence[Sequence[str]], *, left: int, last_left: bool = False) -> list[str]:
    """Columns: the first `left` and, if asked, the last to the left, the rest to the right."""
    num_columns = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(num_columns)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width)
            if i < left or (last_left and i == num_columns - 1)
            else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def fold(text: str, width: int) -> str:
    """`text` with lines of at most `width` columns, broken between words.

    The rest of a line stands under its last column. Commands stay whole, so that they can be
    copied. A word longer than `width` stays whole too.
    """
    return "\n".join(_folded(line, width) for line in text.split("\n"))


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_COMMAND = re.compile(r"^\s*(more:|check|train)\s|`memest ")


def _folded(line: str, width: int) -> str:
    bare = _ESCAPES.sub("", line)
    if len(bare) <= width or _COMMAND.search(bare):
        return line
    gaps = [found.end() for found in re.finditer(r"(?<=\S)  +", bare)]
    indent = next((end for end in reversed(gaps) if end <= 0.6 * width), 2)
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def _html(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows[1:]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
