"""The report of a script as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from memest.render.answer import (
    BAD,
    DIM,
    failures,
    paint,
    verdict_line,
    why_line,
)
from memest.render.text import brief, say_intervals, table, verdict_table
from memest.report import Ending, HeldRow, Interval, Outcome, RunReport
from memest.units import (
    GIB,
    counted,
    format_bytes,
    format_gib,
    gib_that_add_up,
    shares_that_add_up,
)

MAX_ROWS = 12
"""Modules and lines in the text; JSON has all."""

LEAST_BYTES = GIB // 2000
"""Lines that hold less are one row of the text: they would be printed as 0.000 GiB."""

MAX_GUESSES = 12

COLUMNS = ("params", "grads", "optimizer", "activations")
"""Kinds that have a column of their own in the table of modules."""

_WHY = {
    "params": "the weights",
    "grads": "one per trained parameter, from its backward until it is freed",
    "optimizer": "what the optimizer keeps between steps",
    "buffers": "of modules: tables, statistics, scales of quantised weights",
    "activations": "kept for the backward, or passing through the forward",
    "temporaries": "of backward and optimizer",
    "workspace": "cuBLAS, and kernels' scratch",
    "batch": "copied from the host: inputs and labels",
    "buckets": "gradients on their way to other GPUs and back",
    "gathered": "weights put together from shards",
    "other": "made before any model ran, and part of none that did",
    "rounding": "requests round up to 512 B; up to 1 MiB of a large block is not split off",
}


def render_run(report: RunReport, *, colour: bool = False, verbose: bool = False) -> str:
    """The whole report: the answer, what filled the peak, steps, phases, verdicts, what is assumed.

    `verbose` adds all that is assumed.
    """
    sections = [
        [paint(line, BAD, colour=colour) for line in warnings_of(report)],
        answer_of_run(report, colour=colour),
        heading(report),
        _terms(report),
        _totals(report),
        _ranks(report),
        _modules(report.modules),
        _lines(report.lines),
        _levels(report),
        verdict_table(report.verdicts, colour=colour),
        _guesses(report),
        [paint(line, DIM, colour=colour) for line in _assumed(report, verbose=verbose)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def warnings_of(report: RunReport) -> list[str]:
    """Reasons to trust the figures less, for the first lines of a report."""
    return [f"warning: {text}" for text in report.warnings]


_ENDINGS = {
    Ending.FINISHED: "ran to its end",
    Ending.STOPPED: "stopped after the steps asked for",
    Ending.OOM: "ran out of memory",
    Ending.CRASHED: "ended with an error of its own",
    Ending.UNSUPPORTED: "ended where it cannot be simulated",
    Ending.INTERRUPTED: "was interrupted",
    Ending.RUNNING: "is running",
}


_CUT_SHORT = (Ending.CRASHED, Ending.UNSUPPORTED, Ending.INTERRUPTED, Ending.RUNNING)


def answer_of_run(report: RunReport, *, colour: bool = False) -> list[str]:
    """Whether the script fits its card, and what fills the peak, in two lines."""
    verdict, is_oom = report.verdicts.get(report.gpu), report.verdict is Outcome.OOM
    if verdict is None:
        return []
    if is_oom:  # how much the script would have asked for after this nobody knows
        head = paint("does not fit", BAD, colour=colour)
        first = (
            f"{head} {report.gpu}: {format_gib(verdict.reserved_bytes)} of"
            f" {format_gib(verdict.limit_bytes)} usable are reserved, and the next request needs"
            f" {format_gib(-verdict.margin_bytes)} more than is left"
        )
    else:
        so_far = report.ending in _CUT_SHORT
        first = verdict_line(verdict, report.gpu, colour=colour, so_far=so_far)
    kinds = ((term.name, term.num_bytes) for term in report.terms)
    why = why_line(report.peak.step, report.peak.phase, kinds, is_oom=False)
    return [first, why, *([f"what decides: {verdict.decides}"] if verdict.decides else [])]


_OUTCOMES = {
    Outcome.FITS: "fits",
    Outcome.MAY: "may or may not fit",
    Outcome.OOM: "out of memory",
}


def heading(report: RunReport) -> list[str]:
    """What ran, where, and how it ended."""
    steps = f"{report.num_steps} optimizer step{'s' if report.num_steps != 1 else ''}"
    verdict = _OUTCOMES[report.verdict]
    if report.ending in _CUT_SHORT:
        verdict = "fits so far"
    lines = [f"{report.name}", f"{_ENDINGS[report.ending]}; {steps} on {report.gpu}: {verdict}"]
    if report.allocator:
        lines.append(f"allocator: {report.allocator}")
    if report.error:
        lines.append(report.error)
    return lines


def why(kind: str) -> str:
    """What bytes of a kind are there for."""
    return _WHY.get(kind, "")


def where(report: RunReport) -> str:
    """Where the peak was: step, phase, module, line."""
    peak = report.peak
    parts = (f"step {peak.step + 1}", peak.phase, peak.module, peak.line)
    return ", ".join(part for part in parts if part)


def _terms(report: RunReport) -> list[str]:
    rows = [["held at the peak", "", "share", ""]]
    peak = report.peak_allocated_bytes
    sizes = [term.num_bytes for term in report.terms]
    shares = shares_that_add_up(sizes, peak)
    for term, size, share in zip(report.terms, gib_that_add_up(sizes, 3), shares, strict=True):
        tensors = f"{counted(term.num_tensors, 'tensor')}: " if term.num_tensors else ""
        rows.append([term.name, f"{size} GiB", share, f"{tensors}{why(term.name)}"])
    rows.append(["peak allocated", format_gib(peak, 3), "100.0 %", where(report)])
    return table(rows, left=1, last_left=True)


def _totals(report: RunReport) -> list[str]:
    slack = report.peak_reserved_bytes - report.peak_allocated_bytes
    context = report.process_bytes - report.peak_reserved_bytes
    rows = [
        ["allocated", format_gib(report.peak_allocated_bytes), "torch.cuda.max_memory_allocated"],
        ["reserved", format_gib(report.peak_reserved_bytes),
         f"torch.cuda.max_memory_reserved; cached beside it {format_bytes(slack)}"],
        ["process", format_gib(report.process_bytes),
         f"nvidia-smi; CUDA context {'and NCCL ' if report.ranks else ''}{format_bytes(context)}"],
    ]  # fmt: skip
    say_intervals(rows, report.intervals)
    if report.host_bytes:
        note = "of the host, for tensors that memest keeps without data"
        rows.append(["host", format_gib(report.host_bytes), note])
    return [f"peak on {report.gpu}", *table(rows, left=1, last_left=True)]


def rank_rows(report: RunReport) -> list[list[str]]:
    """A table of the ranks that were run in GiB, with a head."""
    rows = [["by rank, GiB", "allocated", "reserved", "process", "steps", ""]]
    for row in report.ranks:
        sizes = {
            "allocated": row.peak_allocated_bytes,
            "reserved": row.peak_reserved_bytes,
            "process": row.process_bytes,
        }
        cells = [_between(size, row.intervals.get(name)) for name, size in sizes.items()]
        rows.append([f"rank {row.rank}", *cells, str(row.num_steps), _ENDINGS[row.ending]])
    return rows


def _between(num_bytes: int, interval: Interval | None) -> str:
    if interval is None or interval.low_bytes == interval.high_bytes:
        return _gib(num_bytes)
    return f"{_gib(interval.low_bytes)} to {_gib(interval.high_bytes)}"


def _ranks(report: RunReport) -> list[str]:
    return table(rank_rows(report), left=1, last_left=True) if report.ranks else []


def module_rows(rows: Sequence[HeldRow], limit: int | None = None) -> list[list[str]]:
    """A table of modules in GiB, with a head; the smallest in one row where there are many."""
    shown = list(rows[:limit])
    found = [["by module, GiB at the peak", *COLUMNS, "other", "all"]]
    found += [_module_cells(row.name, [row]) for row in shown]
    rest = rows[len(shown) :]
    if rest:
        found.append(_module_cells(counted(len(rest), "other"), rest))
    return found


def _module_cells(name: str, rows: Sequence[HeldRow]) -> list[str]:
    sizes = [sum(row.kinds.get(kind, 0) for row in rows) for kind in COLUMNS]
    total = sum(row.num_bytes for row in rows)
    parts = gib_that_add_up([*sizes, total - sum(sizes)], 3)
    return [name, *parts, f"{total / GIB:.3f}"]


def _modules(rows: Sequence[HeldRow]) -> list[str]:
    return table(module_rows(rows, MAX_ROWS), left=1) if rows else []


def _lines(rows: Sequence[HeldRow]) -> list[str]:
    if not rows:
        return []
    num_shown = min(MAX_ROWS, sum(row.num_bytes >= LEAST_BYTES for row in rows) or 1)
    shown, rest = rows[:num_shown], rows[num_shown:]
    sizes = [row.num_bytes for row in shown]
    names = [(row.name, row.source) for row in shown]
    if rest:
        sizes.append(sum(row.num_bytes for row in rest))
        names.append((counted(len(rest), "other"), ""))
    figures = zip(gib_that_add_up(sizes, 3), shares_that_add_up(sizes, sum(sizes)), strict=True)
    cells = [["by line of the script", "", "share", ""]]
    for (name, source), (size, share) in zip(names, figures, strict=True):
        cells.append([name, f"{size} GiB", share, source])
    return table(cells, left=1, last_left=True)


def _levels(report: RunReport) -> list[str]:
    rows = [["GiB", "allocated after", "peak allocated", "peak reserved"]]
    for phase in report.phases:
        rows.append(
            [phase.name, "", _gib(phase.peak_allocated_bytes), _gib(phase.peak_reserved_bytes)]
        )
    for step in report.steps:
        sizes = (step.allocated_bytes, step.peak_allocated_bytes, step.peak_reserved_bytes)
        rows.append([f"step {step.step + 1}", *map(_gib, sizes)])
    return table(rows, left=1) if len(rows) > 1 else []


def _guesses(report: RunReport) -> list[str]:
    lines = [
        f"guessed: {guess.line} reads {guess.what}, {times(guess.count)}"
        for guess in report.guesses[:MAX_GUESSES]
    ]
    if rest := report.guesses[MAX_GUESSES:]:
        count = times(sum(guess.count for guess in rest))
        lines.append(f"guessed: {len(rest)} other readings, {count}")
    return lines


def times(count: int) -> str:
    """How often."""
    return "once" if count == 1 else f"{count} times"


def _assumed(report: RunReport, *, verbose: bool) -> list[str]:
    coverage = report.coverage
    lines = [f"note: {line}" for line in report.notes]
    lines += brief(report.assumptions, verbose=verbose)
    known, all_ops = coverage["num_modelled"], coverage["num_ops"]
    lines.append(f"coverage: {known} of {all_ops} operator calls modelled")
    for op, count in coverage["unmodelled"].items():
        lines.append(f"not modelled: workspace of {op} ({counted(count, 'call')})")
    if report.peak.op:
        lines.append(f"peak allocated in {report.peak.op}")
    lines += failures(report.verdicts)
    versions = ", ".join(f"{k} {v}" for k, v in report.versions.items())
    lines.append(f"versions: {versions}; {report.elapsed_s:.1f} s")
    return lines


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f}"
