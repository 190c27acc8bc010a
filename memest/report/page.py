"""Reports as one HTML page: nothing from the network, light and dark, with one script."""

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from memest import plots
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.recording import KINDS, Recording, StepBlocks, kind_of, step_blocks
from memest.report import HeldRow, Prediction, RunReport, SimulatedReport, Term, difference, text
from memest.report.answer import answer, plain
from memest.report.difference import Change, Difference
from memest.report.text import heading, term_cells, unit_in
from memest.units import GIB, MIB, Unit, counted, gib, gib_that_add_up

MAX_BLOCKS = 500_000  # blocks of a step in a page: 5 MB, which a browser reads in a second
UNIT_BYTES = 512  # unit of blocks in a page: `kMinBlockSize` of CUDACachingAllocator.cpp
_FOLDER = Path(__file__).parent
SCRIPT = (_FOLDER / "instrument.js").read_text(encoding="utf-8")  # script of every page
_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{_DIGEST}'"
)
"""Content security policy of a page, which allows only this script."""

_COLOURED_KINDS = ("params", "grads", "optimizer", "activations", "buckets", "gathered")
"""Kinds with a color in the page's style."""

RANKS = "<!-- by rank -->"  # placeholder for the table of ranks in a page


def instrument(recording: Recording, *, limit_bytes: int, gpu: str, sources: dict[str, str]) -> str:
    """Return HTML on the step with the peak: timeline, flame graph and table of its memory blocks.
    `limit_bytes` is the allocator's limit on the GPU named `gpu`. `sources` has the text of script
    lines by place, such as `train.py:12`."""
    step = step_blocks(recording)
    if len(step.blocks) > MAX_BLOCKS:
        return (
            f"<p>Step {step.step + 1} has {counted(len(step.blocks), 'block')}, more than"
            f" {MAX_BLOCKS:,}, so this page has no timeline; --snapshot writes all of them.</p>"
        )
    data = step_data(recording, step) | {"limit_bytes": limit_bytes, "gpu": gpu}
    lines: set[str] = set()
    for *_, line, caller in data["sites"]:
        lines.update((line, caller))
    data["sources"] = {line: text for line, text in sources.items() if line in lines}
    values = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (_FOLDER / "instrument.html").read_text(encoding="utf-8").replace("__DATA__", values)


def step_data(recording: Recording, step: StepBlocks) -> dict[str, Any]:
    """Return the memory blocks of `step` as JSON values, for the script of a page. `sites` is a
    list, without repetition, of the places in code that make blocks. `columns` is a string of
    32-bit integers, little-endian, compressed with zlib, in base64. They are these columns, one
    after the other:

        start of each block           point of the step (see `Timeline`)
        stop of each block            point of the step
        site of each block            index in `sites`
        size of each block            units of `UNIT_BYTES` (512 bytes)
        changes of reserved memory    point of the step for each change
        reserved memory from then on  units of `UNIT_BYTES`
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
        "step": step.step, "points": step.num_points,
        "peak": peak, "peak_bytes": int(levels[peak]),
        "refused_bytes": step.refused_bytes,
        "kinds": list(KINDS),
        "spans": [[span.name, span.start, span.stop] for span in step.spans],
        "sites": [list(key) for key in places],
        "rows": len(step.blocks),
        "changes": len(step.reserved),
        "columns": base64.b64encode(zlib.compress(packed.tobytes(), 9)).decode(),
    }  # fmt: skip


def _units(num_bytes: int) -> int:
    units, remainder = divmod(num_bytes, UNIT_BYTES)
    assert not remainder, f"the allocator has a block of {num_bytes} B"
    return units


def render_page(reports: Sequence[SimulatedReport], *, recording: Recording | None = None) -> str:
    """Return an HTML page that needs no other file: all of one report, or a table of several plans.
    For a single report, `recording` has the allocator's actions, shown as a timeline of the step
    with the peak; None leaves it out."""
    if len(reports) == 1:
        (report,) = reports
        step = ""
        if recording is not None and recording.actions:
            sources = {row.name.rpartition(" of ")[2]: row.source for row in report.lines}
            limit = limit_of(report)
            step = instrument(recording, limit_bytes=limit, gpu=report.gpu, sources=sources)
        return page(f"{report.name}: GPU memory", _macros().one(report, step))
    plans = [report for report in reports if isinstance(report, Prediction)]
    return page(f"{len(reports)} experiments: GPU memory", _macros().many(plans))


def page(title: str, body: str) -> str:
    """Return a whole HTML page in memest's style, with `title` and the HTML `body`."""
    return str(_macros().page(title, body))


def fragment(report: SimulatedReport) -> str:
    """Return HTML tables for a notebook: contents of the peak, verdicts, and a script's lines."""
    note = "" if report.is_script else "arithmetic"
    unit = unit_in(report)
    contents = [["held at the peak", unit.name, note]]
    for term, (kind, size, _, term_note) in zip(report.terms, term_cells(report), strict=True):
        contents.append([kind, size, term.arithmetic if isinstance(term, Term) else term_note])
    for name in ("allocated", "reserved"):
        contents.append([f"peak {name}", unit.of(report.levels[name]), ""])
    verdicts = [["GPU", "verdict", "needs, GiB", "margin, GiB"]]
    verdicts += [
        [name, v.word, gib(v.needs_bytes), f"{v.margin_bytes / GIB:+.2f}"]
        for name, v in report.verdicts.items()
    ]
    tables = [contents, verdicts]
    title, *_ = heading(report)
    head = [" ".join(title.split())]
    if report.is_script:
        tables.insert(1, _line_rows(report.lines[:8], unit))
        warnings = [f"warning: {line}" for line in report.warnings]
        head = [*warnings, *map(plain, answer(report)), *heading(report)]
    return str(_macros().fragment(head, tables))


class PredictionTable(list[Prediction]):
    """List of predictions that a notebook shows as a table: a row each, with verdicts by GPU.

    PredictionTable(predict(plan) for plan in plans)
    """

    def __str__(self) -> str:
        return text.render_suite(self)

    def _repr_html_(self) -> str:
        style = (
            ".memest td.bad{font-weight:700;text-decoration:underline}"
            ".memest td.tight{background:#8e44ad;color:#fff}"
            ".memest td.may{background:#7a5c00;color:#fff}"
        )
        table = _macros().table(_suite_rows(self))
        return f'<style>{style}</style><div class="memest">{table}</div>'


def with_all_ranks(rendered: str, report: RunReport) -> str:
    """Return `rendered`, the HTML page of one rank, with a table of all ranks from `report`."""
    return rendered.replace(RANKS, _macros().ranks(report), 1)


def render_difference(differences: Sequence[Difference]) -> str:
    """Return an HTML page on `differences`: peaks, kinds of memory and lines that differ."""
    title = differences[0].after.name if len(differences) == 1 else f"{len(differences)} plans"
    return page(f"{title}: what changed", "\n".join(map(_macros().difference, differences)))


def limit_of(report: SimulatedReport) -> int:
    """Return the bytes that the allocator can reserve on the report's GPU."""
    verdict = report.verdicts.get(report.gpu)
    return verdict.limit_bytes if verdict else find_gpu(report.gpu).limit_bytes


@cache
def _macros() -> Any:
    """Return the macros of the template `page.jinja`; they call functions of this module."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters["e"] = escape
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    environment.globals |= {**vars(text), **vars(difference), **globals(), "style": style}
    return environment.get_template("page.jinja").module


def _suite_rows(reports: Sequence[Prediction]) -> list[list[str]]:
    """Return rows of a table: a header, then per report its name, verdicts by GPU, peaks in GiB."""
    gpus = list(dict.fromkeys(name for r in reports for name in r.verdicts))
    rows = [["experiment", *gpus, "allocated", "reserved", "process"]]
    for report in reports:
        verdicts = report.verdicts
        cells = (verdicts[name].word if name in verdicts else "" for name in gpus)
        rows.append([report.name, *cells, *map(gib, report.levels.values())])
    return rows


def _line_rows(lines: Sequence[HeldRow], unit: Unit) -> list[list[str]]:
    sizes = unit.adding_up([row.num_bytes for row in lines])
    cells = [[row.name, size, row.source] for row, size in zip(lines, sizes, strict=True)]
    return [["line", unit.name, "source"], *cells]


def _held_rows(report: SimulatedReport) -> list[list[str]]:
    unit, note = unit_in(report), "" if report.is_script else "arithmetic"
    total = ["peak allocated", unit.of(report.peak_allocated_bytes), "100.0 %", ""]
    return [["held for", unit.name, "share", note], *term_cells(report), total]


def _scale(rows: Sequence[Change]) -> tuple[int, str, int]:
    """Return (bytes of the unit, name of the unit, bytes of the largest change) for a table of
    `rows`. The unit is GiB if a size is that large, else MiB. The largest change is the largest
    absolute value of `added_bytes`; the page draws its bar at full length."""
    largest = max(max(row.before_bytes, row.after_bytes) for row in rows)
    unit = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    return *unit, max(abs(row.added_bytes) for row in rows)


def _facts(report: SimulatedReport) -> str:
    _, *facts = (fact for line in heading(report) for fact in line.split("  "))  # no name
    if report.is_distributed and not report.is_script:
        facts.append("every figure is of one GPU")
    return " · ".join(facts)


def _shares(report: SimulatedReport) -> list[tuple[str, float, str]]:
    """Return rows (kind of memory, share of the peak, GiB as text), for a coloured bar. The last
    row, `rest`, is the sum of all kinds that have no colour of their own on the page."""
    parts = dict.fromkeys(_COLOURED_KINDS, 0)
    for term in report.terms:
        if term.kind in parts:
            parts[term.kind] += term.num_bytes
    parts = {name: size for name, size in parts.items() if size}
    parts["rest"] = max(1, report.peak_allocated_bytes) - sum(parts.values())
    total, sizes = max(1, sum(parts.values())), gib_that_add_up(list(parts.values()))
    return [(k, n / total, size) for (k, n), size in zip(parts.items(), sizes, strict=True)]


def _assumed(report: SimulatedReport) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [*text.guesses_of(report, None), *report.notes, *report.assumptions]
    return [*lines, *text.covered(report.coverage), versions]


def _chart_of_phases(report: Prediction) -> str:
    limit = limit_of(report)
    return _chart(
        lambda dark: plots.plot_phases(report, None, gpu_limit_bytes=limit, dark=dark),
        "params, grads, optimizer and activations at the four phases of a step",
    )


def _chart_of_gpus(reports: Sequence[Prediction]) -> str:
    limits = {plots.gpu_label(n): v.limit_bytes for r in reports for n, v in r.verdicts.items()}
    return _chart(
        lambda dark: plots.plot_ladder(reports, limits=limits, dark=dark),
        "every experiment a bar at its peak, against the lines of the GPUs",
    )


def _chart(draw: Callable[[bool], Any], alt_text: str) -> str:
    svgs = (plots.svg_text(draw(is_dark)).encode() for is_dark in (False, True))
    urls = (f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}" for svg in svgs)
    return str(_macros().chart(*urls, alt_text))
