"""SARIF 2.1.0: the line that runs out of memory, and the lines that grew, for code scanning."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memest.report import Outcome, SimulatedReport
from memest.report.answer import summary_line
from memest.report.difference import Difference
from memest.units import format_bytes

RULES = {
    "out-of-memory": "The script runs out of GPU memory",
    "memory-grew": "A line holds more GPU memory at the peak than before",
}


def sarif(
    pairs: Sequence[tuple[SimulatedReport, Difference | None]], folder: Path
) -> dict[str, Any]:
    """Return a log with one result per line; paths are relative to `folder`, the repository.

    `pairs` are reports, each with its difference from the one before.
    """
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {
                "name": "memest",
                "version": pairs[0][0].versions.get("memest", ""),
                "rules": [
                    {"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()
                ],
            }},
            "results": [r for pair in pairs for r in _results(*pair, folder)],
        }],
    }  # fmt: skip


def _results(
    report: SimulatedReport, found: Difference | None, folder: Path
) -> Iterator[dict[str, Any]]:
    verdict = report.verdicts.get(report.gpu)
    if verdict is not None and verdict.verdict is Outcome.OOM:
        where = verdict.at.rpartition(", ")[2]
        yield _result("out-of-memory", "error", summary_line(report), where, folder)
    for change in found.changes if found else ():
        if change.added_bytes > 0:
            text = (
                f"holds {format_bytes(change.added_bytes)} more at the peak"
                f" ({format_bytes(change.before_bytes)} before)"
            )
            yield _result("memory-grew", "warning", text, change.name, folder)


def _result(rule: str, level: str, text: str, where: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"ruleId": rule, "level": level, "message": {"text": text}}
    file, _, number = where.rpartition(":")
    if file and number.isdigit():
        found["locations"] = [{"physicalLocation": {
            "artifactLocation": {"uri": _path_in(folder, file)},
            "region": {"startLine": int(number)},
        }}]  # fmt: skip
    return found


def _path_in(folder: Path, name: str) -> str:
    """Return the path of a report's file, such as `train.py`, in the repository.

    Hidden folders and installed libraries are left out.
    """
    for root, folders, _ in os.walk(folder):
        folders[:] = sorted(f for f in folders if f[0] != "." and f != "site-packages")
        path = Path(root, name)
        if path.is_file():
            return path.relative_to(folder).as_posix()
    return name
