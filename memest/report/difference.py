"""Comparisons of reports with earlier reports or with measurements: text, Markdown, JSON, SARIF.

Two reports differ in peaks and in the lines or kinds that grew. Predictions differ from measured
runs in their totals.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memest import __version__
from memest.errors import PlanError
from memest.report import HeldRow, Outcome, SimulatedReport, Term, read_lines
from memest.report.answer import summary_line
from memest.report.text import table
from memest.units import MIB, format_bytes, gib, gib_or_mib
from memest.validate.compare import Comparison, Summary

MAX_ROWS = 8  # most rows in the text; the others are counted
RULES = {
    "out-of-memory": "The script runs out of GPU memory",
    "memory-grew": "A line holds more GPU memory at the peak than before",
}
_HEADER = [
    "experiment", "allocated", "predicted", "error", "reserved", "predicted", "error",
    "process", "predicted", "error", "worst phase", "verdict",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Bytes that a script line or a kind of memory holds at the peak, before and after a change.
    `source` is the text of the script line, and empty for a kind."""

    name: str  # `train.py:12` with its number after the change, or `activations`
    source: str
    before_bytes: int
    after_bytes: int

    @property
    def added_bytes(self) -> int:
        """`after_bytes` minus `before_bytes`; negative if the memory shrank."""
        return self.after_bytes - self.before_bytes

    def __str__(self) -> str:
        sign = "+" if self.added_bytes > 0 else ""
        line = f"{sign}{format_bytes(self.added_bytes)}  {self.name}  {self.source}".rstrip()
        return f"{line}  ({format_bytes(self.before_bytes)} before)"


def changes(
    before: Iterable[HeldRow | Term], after: Iterable[HeldRow | Term]
) -> tuple[Change, ...]:
    """Return a `Change` per script line or kind of memory whose bytes differ, largest growth first.
    `before` and `after` are rows at the peak in two reports. Lines with the same text in the same
    file are one row, so that a line may move."""
    old, new = _bytes_by_row(before), _bytes_by_row(after)
    changed = []
    for key, (name, _) in (old | new).items():
        _, source = key
        _, before_bytes = old.get(key, ("", 0))
        _, after_bytes = new.get(key, ("", 0))
        if before_bytes != after_bytes:
            sizes = {"before_bytes": before_bytes, "after_bytes": after_bytes}
            changed.append(Change(name=name, source=source, **sizes))
    return tuple(sorted(changed, key=lambda change: (-change.added_bytes, change.name)))


def _bytes_by_row(rows: Iterable[HeldRow | Term]) -> dict[tuple[str, str], tuple[str, int]]:
    """Return (name, bytes) by key; rows with the same key are added up. The key is (file, source
    text) for a script line, and (kind of memory, "") for other rows."""
    sizes: dict[tuple[str, str], tuple[str, int]] = {}
    for row in rows:
        file, _, _ = row.kind.rpartition(":")  # `train.py:12` of a script line
        key = (file, row.source) if row.source else (row.kind, "")
        name, size = sizes.get(key, (row.kind, 0))
        sizes[key] = name, size + row.num_bytes
    return sizes


def grown(changes: Sequence[Change]) -> list[str]:
    """Return a line per item of `changes` that grew, at most `MAX_ROWS`, then a count of others."""
    rows = [str(change) for change in changes if change.added_bytes > 0]
    count_line = [f"and {len(rows) - MAX_ROWS} more"] if len(rows) > MAX_ROWS else []
    return rows[:MAX_ROWS] + count_line


def other_versions(
    before: Mapping[str, str], after: Mapping[str, str], what: str = "the stored peak"
) -> str:
    """Return a sentence if the versions of memest or torch differ in two reports, else "". `before`
    and `after` are the reports' dicts of versions by library. `what` is the subject of the
    sentence. Example: "the stored peak is of torch 2.8; this run is of torch 2.9"."""
    names = [n for n in ("memest", "torch") if before.get(n, "") != after.get(n, "")]
    old = ", ".join(f"{n} {before.get(n) or 'unknown'}" for n in names)
    new = ", ".join(f"{n} {after.get(n) or 'unknown'}" for n in names)
    return f"{what} is of {old}; this run is of {new}" if names else ""


def peaks_text(name: str, before_bytes: int, after_bytes: int) -> str:
    """Return a line on the peak `name`, such as `reserved`: bytes before, after, and difference."""
    added = after_bytes - before_bytes
    sign = "+" if added > 0 else ""
    return (
        f"{name} {format_bytes(before_bytes)} -> {format_bytes(after_bytes)}"
        f" ({sign}{format_bytes(added)})"
    )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Reports of the same script or plan, before and after a change."""

    before: SimulatedReport
    after: SimulatedReport

    @property
    def changes(self) -> tuple[Change, ...]:
        """Changes at the peak: by line if both reports are of scripts, else by kind of memory."""
        if self.are_scripts:
            return changes(self.before.lines, self.after.lines)
        return changes(self.before.terms, self.after.terms)

    @property
    def are_scripts(self) -> bool:
        """True if both reports are of scripts."""
        return self.before.is_script and self.after.is_script

    @property
    def peaks(self) -> dict[str, tuple[int, int]]:
        """Bytes of the peaks `allocated` and `reserved`: (before, after) by name."""
        old, new = self.before.levels, self.after.levels
        return {name: (old[name], new[name]) for name in ("allocated", "reserved")}

    @property
    def peak_lines(self) -> list[str]:
        """A line for each peak: before, after and their difference."""
        return [peaks_text(name, *pair) for name, pair in self.peaks.items()]

    @property
    def has_grown(self) -> bool:
        """True if a peak is higher than before."""
        return any(after > before for before, after in self.peaks.values())

    @property
    def notes(self) -> list[str]:
        """Notes on what else differs in the two reports: versions of libraries, and GPUs."""
        notes = [other_versions(self.before.versions, self.after.versions, "the first report")]
        if self.before.gpu != self.after.gpu:
            notes.append(f"the GPUs differ: {self.before.gpu}, {self.after.gpu}")
        return [note for note in notes if note]

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return {
            "name": self.after.name,
            "gpu": self.after.gpu,
            "peaks": {
                name: {"before_bytes": before, "after_bytes": after}
                for name, (before, after) in self.peaks.items()
            },
            "changes": list(map(asdict, self.changes)),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        changes = self.changes
        lines = [self.after.name, summary_line(self.after)]
        lines += self.peak_lines
        lines += [f"  {line}" for line in grown(changes)]
        shrunk = [f"  {change}" for change in reversed(changes) if change.added_bytes < 0]
        return "\n".join([*lines, *shrunk[:MAX_ROWS], *(f"note: {note}" for note in self.notes)])


def read_reports(path: Path) -> list[SimulatedReport]:
    """Return the reports in a JSON Lines file; raise a `PlanError` if it is not such a file."""
    hint = "name files of `memest run --json` or `memest predict --json`"
    return read_lines(path, SimulatedReport, hint)


def differences(
    before: Sequence[SimulatedReport], after: Sequence[SimulatedReport]
) -> list[Difference]:
    """Pair reports with equal names; if each side has only one report, pair them in any case.

    Raises:
        PlanError: no name is on both sides.
    """
    if len(before) == len(after) == 1:
        return [Difference(before=before[0], after=after[0])]
    by_name = {report.name: report for report in before}
    named = [report for report in after if report.name in by_name]
    pairs = [Difference(before=by_name[report.name], after=report) for report in named]
    if not pairs:
        raise PlanError("the files have no plan in common", hint="plans are compared by name")
    return pairs


def unpaired(
    before: Sequence[SimulatedReport], after: Sequence[SimulatedReport], pairs: Sequence[Difference]
) -> list[str]:
    """Return lines with the names of reports that were not compared, since no pair has them. One
    line is for reports only in `before`, the first file. Another is for those only in `after`. A
    side whose reports are all in `pairs` has no line."""
    lines = []
    files = [({d.before.name for d in pairs}, before), ({d.after.name for d in pairs}, after)]
    for ordinal, (paired, reports) in zip(("first", "second"), files, strict=True):
        if names := [report.name for report in reports if report.name not in paired]:
            lines.append(f"not compared, only in the {ordinal} file: {', '.join(names)}")
    return lines


def markdown(report: SimulatedReport, difference: Difference | None, base: str = "") -> str:
    """Return a comment for a pull request, as Markdown: the report's summary and a table of bytes.
    `difference` is the difference from an earlier report, or None. With a difference, the table has
    the lines whose bytes at the peak changed. Without one, it has the script lines that hold memory
    at the peak. `base` is the branch of the earlier report, or empty if it has none."""
    lines = ["### GPU memory", "", f"`{report.name}`: {summary_line(report)}", ""]
    if difference is not None:
        lines += [f"| peak | {base or 'before'} | now | change |", "|---|---:|---:|---:|"]
        lines += [
            f"| {name} | {format_bytes(old)} | {format_bytes(new)} | {format_bytes(new - old)} |"
            for name, (old, new) in difference.peaks.items()
        ]
        rows = [(c.name, c.source, c.added_bytes) for c in difference.changes]
        title = "changed at the peak"
    else:
        rows = [(row.name, row.source, row.num_bytes) for row in report.lines]
        title = "held at the peak"
    if rows:
        lines += ["", f"| line | {title} | |", "|---|---:|---|"]
        for name, source, size in rows[:MAX_ROWS]:
            code = source.replace("|", "\\|").replace("`", "")
            lines.append(f"| {name} | {format_bytes(size)} | {f'`{code}`' if source else ''} |")
    lines += [f"\nNote: {note}." for note in (difference.notes if difference else [])]
    return "\n".join(lines) + "\n"


def sarif(
    pairs: Sequence[tuple[SimulatedReport, Difference | None]], folder: Path
) -> dict[str, Any]:
    """Return SARIF, the JSON format for results of code checks, for the reports in `pairs`. Each
    report that is out of memory is one result. Each script line that holds more memory than before
    is one more result. A pair is (report, its difference from an earlier report); the difference
    may be None. Paths in the result are relative to `folder`, the repository."""
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {
                "name": "memest",
                "version": __version__,
                "rules": [
                    {"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()
                ],
            }},
            "results": [r for pair in pairs for r in _sarif_results(*pair, folder)],
        }],
    }  # fmt: skip


def _sarif_results(
    report: SimulatedReport, difference: Difference | None, folder: Path
) -> Iterator[dict[str, Any]]:
    verdict = report.verdicts.get(report.gpu)
    if verdict is not None and verdict.verdict is Outcome.OOM:
        *_, place = verdict.at.split(", ")
        yield _sarif_result("out-of-memory", "error", summary_line(report), place, folder)
    for change in difference.changes if difference else ():
        if change.added_bytes > 0:
            text = (
                f"holds {format_bytes(change.added_bytes)} more at the peak"
                f" ({format_bytes(change.before_bytes)} before)"
            )
            yield _sarif_result("memory-grew", "warning", text, change.name, folder)


def _sarif_result(rule: str, level: str, text: str, place: str, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"ruleId": rule, "level": level, "message": {"text": text}}
    file, _, number = place.rpartition(":")
    if file and number.isdigit():
        result["locations"] = [{"physicalLocation": {
            "artifactLocation": {"uri": _path_in(folder, file)},
            "region": {"startLine": int(number)},
        }}]  # fmt: skip
    return result


def _path_in(folder: Path, name: str) -> str:
    """Return the path of the file `name`, searched in `folder` and below, relative to `folder`.
    Return `name` if it is not found. Hidden folders and installed libraries are not searched."""
    for root, folders, _ in os.walk(folder):
        folders[:] = sorted(f for f in folders if f[0] != "." and f != "site-packages")
        path = Path(root, name)
        if path.is_file():
            return path.relative_to(folder).as_posix()
    return name


def render_comparison(comparisons: Sequence[Comparison], summary: Summary) -> str:
    """Return text that compares predictions with measurements: a table of peaks, then `summary`.
    For each experiment with a large error, a line has the phase in which the error begins."""
    lines = table([_HEADER, *(_comparison_cells(c) for c in comparisons)], left=1)
    residuals = [  # runs that are off by more than half a percent, or 256 MiB
        f"residual of {c.name}: {c.residual}"
        for c in comparisons
        if c.residual
        and any(
            abs(d.error_percent) > 0.5 or abs(d.error_bytes) > 256 * MIB for d in c.totals.values()
        )
    ]
    lines += ["", *_summary_lines(summary), *residuals, *_warning_lines(comparisons, summary)]
    return "\n".join(lines)


def render_comparison_markdown(comparisons: Sequence[Comparison], summary: Summary) -> str:
    """Return the table of peaks and errors, and `summary`, as Markdown for the documentation."""
    lines = ["| " + " | ".join(_HEADER) + " |", "|" + "---|" * len(_HEADER)]
    lines += ["| " + " | ".join(_comparison_cells(c)) + " |" for c in comparisons]
    remarks = [*_summary_lines(summary), *_warning_lines(comparisons, summary)]
    lines += ["", *(f"- {line}" for line in remarks)]
    return "\n".join(lines)


def comparison_json(comparisons: Sequence[Comparison], summary: Summary) -> dict[str, Any]:
    """Return `comparisons` of predictions with measurements, and `summary`, as JSON values."""
    return {
        "experiments": [
            {
                "name": c.name,
                "verdict": {
                    "measured": str(c.measured.verdict),
                    "predicted": str(c.predicted.verdict),
                },
                "totals": {name: _deviation_json(d) for name, d in c.totals.items()},
                "phases": [_deviation_json(d) for d in c.phases],
                "states": [_deviation_json(d) for d in c.states],
                "residual": c.residual,
            }
            for c in comparisons
        ],
        "median_percent": dict(summary.median_percent),
        "worst_percent": dict(summary.worst_percent),
        "verdicts": [
            {"measured": m, "predicted": p, "experiments": n}
            for (m, p), n in sorted(summary.verdicts.items())
        ],
        "broken": list(summary.broken),
    }


def _comparison_cells(comparison: Comparison) -> list[str]:
    cells = [comparison.name]
    for deviation in comparison.totals.values():
        error = f"{deviation.error_percent:+.3f} %"
        interval, high_text = deviation.predicted, gib_or_mib(deviation.predicted_bytes)
        is_range = interval.low_bytes < interval.high_bytes
        predicted = f"{gib(interval.low_bytes)} to {high_text}" if is_range else high_text
        cells += [gib_or_mib(deviation.measured_bytes), predicted, error]
    worst = comparison.worst_phase
    cells.append(f"{worst.error_percent:+.3f} %" if worst else "")
    measured, verdict = comparison.measured.verdict, comparison.predicted.verdict
    cells.append(str(measured) if measured == verdict else f"{measured}, predicted {verdict}")
    return cells


def _summary_lines(summary: Summary) -> list[str]:
    lines = [
        f"{name}: median {median:.3f} %, worst {summary.worst_percent[name]:+.3f} %"
        for name, median in summary.median_percent.items()
    ]
    num_right = sum(n for (m, p), n in summary.verdicts.items() if m == p)
    num_open = sum(n for (_, p), n in summary.verdicts.items() if p == "may")
    lines.append(
        f"verdicts: {num_right} of {sum(summary.verdicts.values())} right"
        + (f", {num_open} left open" if num_open else "")
    )
    lines += [f"measured {m}, predicted {p}: {n}" for (m, p), n in sorted(summary.verdicts.items())]
    return lines


def _warning_lines(comparisons: Sequence[Comparison], summary: Summary) -> list[str]:
    """Return a line per library whose version differs between prediction and measurement. Another
    line is for each figure, such as the peak reserved, whose error exceeds its tolerance."""
    versions = dict.fromkeys(f"versions differ: {line}" for c in comparisons for line in c.versions)
    return [*versions, *(f"outside its tolerance: {line}" for line in summary.broken)]


def _deviation_json(difference: Any) -> dict[str, Any]:
    return {
        "what": difference.what,
        "predicted_bytes": difference.predicted_bytes,
        "low_bytes": difference.predicted.low_bytes,
        "measured_bytes": difference.measured_bytes,
        "error_percent": difference.error_percent,
    }
