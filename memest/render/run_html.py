"""The report of a script as one HTML page, and as a fragment for a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from memest.render.answer import WORDS
from memest.render.html import chart, html_table, lead, page, stack, verdict_cards
from memest.render.run import (
    answer_of_run,
    heading,
    module_rows,
    rank_rows,
    times,
    warnings_of,
    where,
    why,
)
from memest.report import HeldRow, RunReport
from memest.units import GIB, counted, format_gib, gib_that_add_up, shares_that_add_up

if TYPE_CHECKING:
    from memest.estimator.trace.recording import Recording

_OWN_COLOUR = ("params", "grads", "optimizer", "activations", "buckets", "gathered")
"""Kinds that the page's style knows."""

RANKS = "<!-- by rank -->"
"""Where in a page the table of ranks stands."""


def render_run_page(report: RunReport, *, recording: Recording | None = None) -> str:
    """A page that needs no other file; `recording` is for the timeline of the step of the peak."""
    sections = [f"<h1>{escape(report.name)}</h1>", *_sections(report)]
    if recording is not None and recording.marks:
        from memest.estimator.trace.recording import timeline
        from memest.plots import plot_timeline

        line = timeline(recording)
        drawn = chart(
            lambda dark: plot_timeline(
                line,
                name=report.name,
                gpu=report.gpu,
                gpu_limit_bytes=report.limit_bytes,
                dark=dark,
            ),
            "memory over the events of one step, by what it is held for",
        )
        at = 3 + len(report.warnings)
        sections[at:at] = ["<h2>Over the step of the peak</h2>", drawn]
    return page(f"{report.name}: GPU memory", "\n".join(sections))


def run_fragment(report: RunReport) -> str:
    """Peak, verdicts, modules and lines, for a notebook."""
    rows = [["held at the peak", "GiB", "share"]]
    rows += [cells[:3] for cells in _term_cells(report)]
    rows.append(["peak allocated", f"{report.peak_allocated_bytes / GIB:.3f}", "100.0 %"])
    rows.append(["peak reserved", f"{report.peak_reserved_bytes / GIB:.3f}", ""])
    verdicts = [["GPU", "verdict", "margin, GiB"]]
    verdicts += [
        [name, WORDS[v.verdict], f"{v.margin_bytes / GIB:+.2f}"]
        for name, v in report.verdicts.items()
    ]
    head = "<br>".join(
        escape(line) for line in [*warnings_of(report), *answer_of_run(report), *heading(report)]
    )
    tables = (rows, _line_rows(report.lines[:8]), verdicts)
    return f"<p><b>{head}</b></p>" + "".join(html_table(t, text=1) for t in tables)


def _sections(report: RunReport) -> list[str]:
    facts = " &middot; ".join(escape(line) for line in heading(report)[1:])
    return [
        *(f"<p><b>{escape(line)}</b></p>" for line in warnings_of(report)),
        lead(answer_of_run(report)),
        f'<p class="muted">{facts}</p>',
        verdict_cards(report.verdicts),
        "<h2>What fills the GPU at the peak</h2>"
        + _stack(report)
        + html_table(_term_rows(report), text=1, notes=True),
        RANKS + _ranks(report),
        "<h2>By line of the script</h2>" + html_table(_line_rows(report.lines), text=1, notes=True),
        "<h2>By module</h2>" + html_table(module_rows(report.modules), text=1),
        "<h2>Phases and steps</h2>" + html_table(_level_rows(report), text=1),
        "<h2>Guessed and assumed</h2>" + _assumed(report),
    ]


def _ranks(report: RunReport) -> str:
    if not report.ranks:
        return ""
    return "<h2>By rank</h2>" + html_table(rank_rows(report), text=1, notes=True)


def with_all_ranks(rendered: str, report: RunReport) -> str:
    """The page of one rank, of which nobody knew the others, with the table of all."""
    return rendered.replace(RANKS, _ranks(report), 1)


def _stack(report: RunReport) -> str:
    peak = max(1, report.peak_allocated_bytes)
    parts = [(t.name, t.num_bytes) for t in report.terms if t.name in _OWN_COLOUR]
    parts.append(("rest", peak - sum(size for _, size in parts)))
    return (
        f"<p><b>{format_gib(report.peak_allocated_bytes)}</b> allocated, "
        f"<b>{format_gib(report.peak_reserved_bytes)}</b> reserved, "
        f"<b>{format_gib(report.process_bytes)}</b> in nvidia-smi on {escape(report.gpu)}; "
        f"{escape(where(report))}</p>" + stack(dict(parts))
    )


def _term_rows(report: RunReport) -> list[list[str]]:
    total = ["peak allocated", f"{report.peak_allocated_bytes / GIB:.3f}", "100.0 %", "", ""]
    return [["held for", "GiB", "share", "tensors", ""], *_term_cells(report), total]


def _term_cells(report: RunReport) -> list[list[str]]:
    sizes = [term.num_bytes for term in report.terms]
    shares = shares_that_add_up(sizes, report.peak_allocated_bytes)
    return [
        [term.name, size, share, str(term.num_tensors), why(term.name)]
        for term, size, share in zip(report.terms, gib_that_add_up(sizes, 3), shares, strict=True)
    ]


def _line_rows(lines: tuple[HeldRow, ...]) -> list[list[str]]:
    sizes = gib_that_add_up([row.num_bytes for row in lines], 3)
    cells = [[row.name, size, row.source] for row, size in zip(lines, sizes, strict=True)]
    return [["line", "GiB", "source"], *cells]


def _level_rows(report: RunReport) -> list[list[str]]:
    rows = [["", "allocated after", "peak allocated", "peak reserved"]]
    for phase in report.phases:
        sizes = (phase.peak_allocated_bytes, phase.peak_reserved_bytes)
        rows.append([phase.name, "", *(f"{size / GIB:.3f}" for size in sizes)])
    for step in report.steps:
        levels = (step.allocated_bytes, step.peak_allocated_bytes, step.peak_reserved_bytes)
        rows.append([f"step {step.step + 1}", *(f"{size / GIB:.3f}" for size in levels)])
    return rows


def _assumed(report: RunReport) -> str:
    coverage = report.coverage
    lines = [f"guessed: {g.line} reads {g.what}, {times(g.count)}" for g in report.guesses]
    lines += [*report.notes, *report.assumptions]
    lines.append(f"{coverage['num_modelled']} of {coverage['num_ops']} operator calls are modelled")
    lines += [
        f"not modelled: {op} ({counted(n, 'call')})" for op, n in coverage["unmodelled"].items()
    ]
    lines.append(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    return f'<ul class="muted">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'
