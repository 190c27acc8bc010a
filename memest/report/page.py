"""Reports as one HTML page: nothing from the network, light and dark, with one script."""

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from memest import plots
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.recording import KINDS, Recording, StepBlocks, kind_of, step_blocks
from memest.report import HeldRow, Prediction, RunReport, SimulatedReport, Term, Verdict
from memest.report.answer import answer, place_in_words, plain
from memest.report.difference import Change, Difference, changes, peak_changes
from memest.report.text import (
    covered,
    guesses_of,
    heading,
    level_rows,
    module_rows,
    phase_rows,
    rank_rows,
    render_suite,
    term_cells,
    unit_in,
    where,
)
from memest.report.times import time_cells, time_notes
from memest.units import GIB, Unit, counted, gib, gib_or_mib, gib_that_add_up

MAX_BLOCKS = 500_000  # of a step in a page: 5 MB, which a browser reads in a second
UNIT_BYTES = 512  # unit of blocks in a page: `kMinBlockSize` of CUDACachingAllocator.cpp
_FOLDER = Path(__file__).parent
SCRIPT = (_FOLDER / "instrument.js").read_text(encoding="utf-8")  # script of every page
_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{_DIGEST}'"
)
"""Content security policy of a page, which may run this script alone."""


def instrument(recording: Recording, *, limit_bytes: int, gpu: str, sources: dict[str, str]) -> str:
    """Return a timeline, a flame graph and a table of the step of the peak, as HTML.

    `sources` has the text of the script's lines, by `train.py:12`.
    """
    step = step_blocks(recording)
    if len(step.blocks) > MAX_BLOCKS:
        return (
            f"<p>Step {step.step + 1} has {counted(len(step.blocks), 'block')}, more than"
            f" {MAX_BLOCKS:,}, so this page has no timeline; --snapshot writes all of them.</p>"
        )
    data = step_data(recording, step) | {"limit_bytes": limit_bytes, "gpu": gpu}
    lines = {place[4] for place in data["sites"]} | {place[5] for place in data["sites"]}
    data["sources"] = {line: text for line, text in sources.items() if line in lines}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (_FOLDER / "instrument.html").read_text(encoding="utf-8").replace("__DATA__", text)


def step_data(recording: Recording, step: StepBlocks) -> dict[str, Any]:
    """Return the blocks of a step as JSON values; equal sites are one entry.

    `columns` are 32-bit integers, little-endian, deflated, as base64.
    """
    storages = recording.storages
    places: dict[tuple[Any, ...], int] = {}
    sites = []
    for block in step.blocks:
        site = storages.sites[block.storage]
        kind = KINDS.index(kind_of(storages, block.storage))
        key = (kind, site.module, site.op, site.phase, site.line, site.caller)
        sites.append(places.setdefault(key, len(places)))
    sizes = [block.num_bytes for block in step.blocks]
    change = np.zeros(step.num_points + 1, dtype=np.int64)
    for block in step.blocks:
        change[block.start] += block.num_bytes
        change[block.stop] -= block.num_bytes
    levels = change[:-1].cumsum()
    peak = int(levels.argmax())
    columns: tuple[Iterable[int], ...] = (
        (block.start for block in step.blocks),
        (block.stop for block in step.blocks),
        sites,
        map(_units, sizes),
        (point for point, _ in step.reserved),
        (_units(size) for _, size in step.reserved),
    )
    packed = np.fromiter(chain.from_iterable(columns), dtype="<u4")
    return {
        "step": step.step,
        "points": step.num_points,
        "peak": peak,
        "peak_bytes": int(levels[peak]),
        "refused_bytes": step.refused_bytes,
        "kinds": list(KINDS),
        "spans": [[span.name, span.start, span.stop] for span in step.spans],
        "sites": [list(key) for key in places],
        "rows": len(step.blocks),
        "changes": len(step.reserved),
        "columns": base64.b64encode(zlib.compress(packed.tobytes(), 9)).decode(),
    }


def _units(num_bytes: int) -> int:
    units, rest = divmod(num_bytes, UNIT_BYTES)
    assert not rest, f"the allocator has a block of {num_bytes} B"
    return units


_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")

_OWN_COLOUR = ("params", "grads", "optimizer", "activations", "buckets", "gathered")
"""Kinds with a color in the page's style."""

RANKS = "<!-- by rank -->"  # place of the table of ranks in a page


def render_page(reports: Sequence[SimulatedReport], *, recording: Recording | None = None) -> str:
    """Return a page that needs no other file: all of one report, or a table of several plans.

    `recording` is the run of a single report, for the timeline of its step.
    """
    if len(reports) == 1:
        title = f"{reports[0].name}: GPU memory"
        body = _one(reports[0], recording)
    else:
        title = f"{len(reports)} experiments: GPU memory"
        body = _many([report for report in reports if isinstance(report, Prediction)])
    return page(title, body)


def fragment(report: SimulatedReport) -> str:
    """Return the peak and the verdicts as HTML tables for a notebook; of a script also lines."""
    note = "" if report.is_script else "arithmetic"
    unit = unit_in(report)
    held = [["held at the peak", unit.name, note]]
    for term, (kind, size, _, why) in zip(report.terms, term_cells(report), strict=True):
        held.append([kind, size, term.arithmetic if isinstance(term, Term) else why])
    for name in ("allocated", "reserved"):
        held.append([f"peak {name}", unit.of(report.levels[name]), ""])
    verdicts = [["GPU", "verdict", "needs, GiB", "margin, GiB"]]
    verdicts += [
        [name, v.word, gib(v.needs_bytes), f"{v.margin_bytes / GIB:+.2f}"]
        for name, v in report.verdicts.items()
    ]
    tables, head = [held, verdicts], [" ".join(heading(report)[0].split())]
    if report.is_script:
        tables.insert(1, _line_rows(report.lines[:8], unit))
        head = [
            *(f"warning: {line}" for line in report.warnings),
            *map(plain, answer(report)),
            *heading(report),
        ]
    title = "<br>".join(map(escape, head))
    return f"<p><b>{title}</b></p>" + "".join(map(_plain_table, tables))


def _plain_table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def page(title: str, body: str) -> str:
    """A whole page around `body`, in memest's style."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>\n{_STYLE}</style></head>\n"
        f"<body>\n{body}\n<script>{SCRIPT}</script></body></html>\n"
    )


class PredictionTable(list[Prediction]):
    """Predictions that a notebook shows as one table: a row each, its verdict on every GPU.

    PredictionTable(predict(plan) for plan in plans)
    """

    def __str__(self) -> str:
        return render_suite(self)

    def _repr_html_(self) -> str:
        style = (
            ".memest td.bad{font-weight:700;text-decoration:underline}"
            ".memest td.tight{background:#8e44ad;color:#fff}"
            ".memest td.may{background:#7a5c00;color:#fff}"
        )
        rows = _suite_rows(self)
        return f'<style>{style}</style><div class="memest">{html_table(rows)}</div>'


def _suite_rows(reports: Sequence[Prediction]) -> list[list[str]]:
    """A row for each report: its verdict on every GPU, and its peaks in GiB."""
    gpus = list(dict.fromkeys(name for r in reports for name in r.verdicts))
    rows = [["experiment", *gpus, "allocated", "reserved", "process"]]
    for report in reports:
        found = report.verdicts
        verdicts = (found[name].word if name in found else "" for name in gpus)
        rows.append([report.name, *verdicts, *map(gib, report.levels.values())])
    return rows


def _one(report: SimulatedReport, recording: Recording | None) -> str:
    sections = [
        f"<h1>{escape(report.name)}</h1>",
        *(f"<p><b>warning: {escape(line)}</b></p>" for line in report.warnings),
        lead(answer(report)),
        _facts(report),
        verdict_boxes(report.verdicts),
        "<h2>What fills the GPU at the peak</h2>",
        _stack(report),
        _terms(report),
    ]
    if recording is not None and recording.actions:
        sections += _step(report, recording)
    sections += _of_script(report) if isinstance(report, RunReport) else _of_plan(report)
    sections += [_times(report), "<h2>Assumed</h2>", _assumed(report)]
    return "\n".join(sections)


def _times(report: SimulatedReport) -> str:
    """Return the section of estimated times, which no figure of the memory depends on."""
    if not report.times:
        return ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in time_notes(report))
    rows = html_table(time_cells(report))
    return f'<h2>Estimated time of a step</h2>{rows}<ul class="muted">{notes}</ul>'


def _step(report: SimulatedReport, recording: Recording) -> list[str]:
    shown = instrument(
        recording,
        limit_bytes=limit_of(report),
        gpu=report.gpu,
        sources={row.name.rpartition(" of ")[2]: row.source for row in report.lines},
    )
    return ["<h2>Over the step of the peak</h2>", shown]


def _of_plan(report: Prediction) -> list[str]:
    limit = limit_of(report)
    drawn = chart(
        lambda dark: plots.plot_phases(report, None, gpu_limit_bytes=limit, dark=dark),
        "params, grads, optimizer and activations at the four phases of a step",
    )
    return ["<h2>At the four phases</h2>", drawn, html_table(phase_rows(report))]


def _of_script(report: RunReport) -> list[str]:
    return [
        RANKS + _ranks(report),
        "<h2>By line of the script</h2>"
        + html_table(_line_rows(report.lines, unit_in(report)), notes=True),
        "<h2>By module</h2>" + html_table(module_rows(report)),
        "<h2>Phases and steps</h2>" + html_table(level_rows(report)),
    ]


def _ranks(report: RunReport) -> str:
    if not report.ranks:
        return ""
    return "<h2>By rank</h2>" + html_table(rank_rows(report), notes=True)


def with_all_ranks(rendered: str, report: RunReport) -> str:
    """Return the page of one rank, made without the others, with the table of all ranks."""
    return rendered.replace(RANKS, _ranks(report), 1)


def _line_rows(lines: Sequence[HeldRow], unit: Unit) -> list[list[str]]:
    sizes = unit.adding_up([row.num_bytes for row in lines])
    cells = [[row.name, size, row.source] for row, size in zip(lines, sizes, strict=True)]
    return [["line", unit.name, "source"], *cells]


def lead(lines: Sequence[str]) -> str:
    """Return the answer as HTML, its first line large."""
    first, *others = [*map(plain, lines), ""]
    rest = "".join(f"<p>{escape(line)}</p>" for line in others if line)
    return f'<p class="answer">{escape(first)}</p>{rest}'


def render_difference(found: Sequence[Difference]) -> str:
    """Return a page of pairs of reports: peaks, kinds and lines before and after."""
    title = found[0].after.name if len(found) == 1 else f"{len(found)} plans"
    return page(f"{title}: what changed", "\n".join(map(_difference, found)))


def _difference(found: Difference) -> str:
    before, after = found.before, found.after
    sections = [f"<h1>{escape(after.name)}: what changed</h1>", lead(peak_changes(found))]
    sections += [f"<p><b>note: {escape(note)}</b></p>" for note in found.notes]
    scale = max(1, before.peak_allocated_bytes, after.peak_allocated_bytes)
    for word, report in (("before", before), ("after", after)):
        name = "" if report.name == after.name else f" ({report.name})"
        bar = _stack(report, share=report.peak_allocated_bytes / scale)
        sections.append(f"<h2>{word}{escape(name)}</h2>{lead(answer(report)[:1])}{bar}")
    tables = {"held for": changes(before.terms, after.terms)}
    if found.are_scripts:
        tables |= {
            "line": changes(before.lines, after.lines),
            "module": changes(before.modules, after.modules),
        }
    for name, rows in tables.items():
        shown = changed_table(name, rows) if rows else "<p>No change.</p>"
        sections.append(f"<h2>At the peak, by {'kind' if name == 'held for' else name}</h2>{shown}")
    return "\n".join(sections)


def changed_table(name: str, rows: Sequence[Change]) -> str:
    """A table of changes, with a bar for each: to the right if it grew."""
    scale = max(abs(row.added_bytes) for row in rows)
    largest = max(max(row.before_bytes, row.after_bytes) for row in rows)
    unit, word = (GIB, "GiB") if largest >= GIB else (1 << 20, "MiB")
    lines = []
    for row in rows:
        share, is_less = 50 * abs(row.added_bytes) / scale, row.added_bytes < 0
        style = f"left:{50 - share * is_less:.2f}%;width:{share:.2f}%"
        bar = f'<div class="grew"><i class="{"less" * is_less}" style="{style}"></i></div>'
        sizes = (row.added_bytes, row.before_bytes, row.after_bytes)
        texts = (f"{n / unit:{sign}.3f}" for n, sign in zip(sizes, ("+", "", ""), strict=True))
        cells = "".join(f"<td>{text}</td>" for text in texts)
        source = f'<td class="note">{escape(row.source)}</td>'
        lines.append(
            f'<tr><td class="text">{escape(row.name)}</td>{cells}<td>{bar}</td>{source}</tr>'
        )
    head = f'<th class="text">{name}</th>' + "".join(
        f"<th>{text}, {word}</th>" for text in ("change", "before", "after")
    )
    source = '<th></th><th class="note">source</th>' if any(row.source for row in rows) else ""
    body = "".join(lines)
    return f'<div class="wide"><table><tr>{head}{source}</tr>{body}</table></div>'


def _many(reports: Sequence[Prediction]) -> str:
    limits = {plots.gpu_label(n): v.limit_bytes for r in reports for n, v in r.verdicts.items()}
    details = [
        f"<details><summary>{escape(report.name)} &middot; {gib(report.peak_allocated_bytes)} GiB"
        f"</summary>{_facts(report)}{_stack(report)}{_terms(report)}{_assumed(report)}</details>"
        for report in reports
    ]
    return "\n".join(
        [
            f"<h1>GPU memory of {len(reports)} experiments</h1>",
            f'<p class="muted">Predicted; GiB at the peak on {escape(reports[0].gpu)}.</p>',
            html_table(_suite_rows(reports)),
            "<h2>Against the GPUs</h2>",
            chart(
                lambda dark: plots.plot_ladder(reports, limits=limits, dark=dark),
                "every experiment a bar at its peak, against the lines of the GPUs",
            ),
            "<h2>Each experiment</h2>",
            *details,
        ]
    )


def limit_of(report: SimulatedReport) -> int:
    """Return the bytes that the allocator can reserve on the report's GPU."""
    verdict = report.verdicts.get(report.gpu)
    return verdict.limit_bytes if verdict else find_gpu(report.gpu).limit_bytes


def _facts(report: SimulatedReport) -> str:
    facts = [fact for line in heading(report) for fact in line.split("  ")][1:]
    if report.is_distributed and not report.is_script:
        facts.append("every figure is of one GPU")
    return f'<p class="muted">{escape(" · ".join(facts))}</p>'


def verdict_boxes(verdicts: Mapping[str, Verdict]) -> str:
    """A box for each GPU: whether the run fits, its need, its use and the margin."""
    boxes = []
    for name, verdict in verdicts.items():
        share = 100 * min(1.0, verdict.needs_bytes / max(1, verdict.limit_bytes))
        margin = gib_or_mib(abs(verdict.margin_bytes))
        words = f"{margin} {'to spare' if verdict.margin_bytes >= 0 else 'too much'}"
        where = (
            f'<div class="muted">{escape(place_in_words(verdict.at))}</div>' if verdict.at else ""
        )
        boxes.append(
            f'<div class="box {verdict.word}"><b>{escape(name)}</b> '
            f'<b class="verdict">{verdict.word}</b>'
            f'<div class="meter"><i style="width:{share:.1f}%"></i></div>'
            f"needs {gib_or_mib(verdict.needs_bytes)} of {gib_or_mib(verdict.limit_bytes)}: {words}"
            f'<div class="muted">uses {gib_or_mib(verdict.reserved_bytes)}</div>{where}</div>'
        )
    return f'<div class="boxes">{"".join(boxes)}</div>'


def _stack(report: SimulatedReport, share: float = 1.0) -> str:
    """The peak as one bar of the page itself, over a share of its width."""
    parts = dict.fromkeys(_OWN_COLOUR, 0)
    for term in report.terms:
        if term.kind in parts:
            parts[term.kind] += term.num_bytes
    parts = {name: size for name, size in parts.items() if size}
    parts["rest"] = max(1, report.peak_allocated_bytes) - sum(parts.values())
    return (
        f"<p><b>{gib_or_mib(report.peak_allocated_bytes)}</b> allocated, "
        f"<b>{gib_or_mib(report.peak_reserved_bytes)}</b> reserved, "
        f"<b>{gib_or_mib(report.process_bytes)}</b> in nvidia-smi on {escape(report.gpu)}; "
        f"{escape(where(report))}</p>" + stack(parts, share)
    )


def stack(parts: Mapping[str, int], share: float = 1.0) -> str:
    """Parts of a peak as one bar, with a key for each; the printed sizes add up."""
    whole = max(1, sum(parts.values()))
    sizes = dict(zip(parts, gib_that_add_up(list(parts.values())), strict=True))
    bars = "".join(
        f'<i class="{kind}" style="flex:{n / whole:.5f}">{sizes[kind] * (10 * n > whole)}</i>'
        for kind, n in parts.items()
        if n > 0
    )
    keys = "".join(f'<li><i class="{k}"></i>{k} {size} GiB</li>' for k, size in sizes.items())
    wide = f' style="width:{100 * share:.2f}%"' * (share < 1)
    return f'<div class="stack"{wide}>{bars}</div><ul class="keys">{keys}</ul>'


def _terms(report: SimulatedReport) -> str:
    note = "" if report.is_script else "arithmetic"
    rows = [["held for", unit_in(report).name, "share", note], *term_cells(report)]
    rows.append(["peak allocated", unit_in(report).of(report.peak_allocated_bytes), "100.0 %", ""])
    return html_table(rows, notes=True)


def _assumed(report: SimulatedReport) -> str:
    lines = [*guesses_of(report, None), *report.notes, *report.assumptions]
    lines += covered(report.coverage)
    lines.append(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    return f'<ul class="muted">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def html_table(rows: Iterable[Sequence[str]], *, notes: bool = False) -> str:
    """A table whose first column, and the last if it holds `notes`, are words."""
    head, *body = rows
    last = len(head) - 1

    def kind(column: int, cell: str) -> str:
        if notes and column == last:
            return ' class="note"'
        if column == 0:
            return ' class="text"'
        kinds = {"OOM": "bad", "tight": "tight", "may": "may"}
        return f' class="{kinds[cell]}"' if cell in kinds else ""

    lines = [
        "<tr>" + "".join(f"<{tag}{kind(i, c)}>{escape(c)}</{tag}>" for i, c in enumerate(row))
        + "</tr>"
        for tag, group in (("th", [head]), ("td", body))
        for row in group
    ]  # fmt: skip
    kind_of = ' class="noted"' if notes else ""
    return f'<div class="wide"><table{kind_of}>{"".join(lines)}</table></div>'


def chart(draw: Callable[[bool], Any], words: str) -> str:
    """A chart for light and for dark screens; what is not shown is not decoded either."""
    light, dark = (
        "data:image/svg+xml;base64,"
        + base64.b64encode(plots.svg_text(draw(is_dark)).encode()).decode()
        for is_dark in (False, True)
    )
    return (
        f'<div class="chart wide"><span class="cue">wider than the screen: scroll &rarr;</span>'
        '<picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{dark}"><img alt="{escape(words)}" src="{light}"></picture></div>'
    )
