"""docs/labs.md, from the commands of the labs and the figures that came out of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import lab_rows
from lab_rows import BLIP2, FOUR, LITGPT, Row

Figures = Mapping[str, Mapping[str, Any]]
GIB = 2**30

TEMPLATE = lab_rows.ROOT / "scripts" / "labs" / "page.md"

PUBLISHED_GIB = 61.97
"""Allocated on one GPU, after the last forward."""


def page_of(rows: Sequence[Row], figures: Figures) -> str:
    """The text of the page."""
    by_lab = {lab: [row for row in rows if row.lab == lab] for lab in (LITGPT, FOUR, BLIP2)}
    parts = {
        "litgpt": _table(by_lab[LITGPT], figures),
        "litgpt unmodelled": _unmodelled(by_lab[LITGPT], figures),
        "four": _printed_table(by_lab[FOUR], figures),
        **_explained(by_lab[FOUR], figures),
        "blip2 unmodelled": _unmodelled(by_lab[BLIP2], figures),
    }
    for gpu in dict.fromkeys(row.gpu for row in by_lab[BLIP2]):
        parts[gpu] = _table([row for row in by_lab[BLIP2] if row.gpu == gpu], figures, True)
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        assert f"{{{name}}}" in text, name
        text = text.replace(f"{{{name}}}", part)
    return text


def _table(rows: Sequence[Row], figures: Figures, has_plans: bool = False) -> str:
    plans = " plan: allocated, reserved |" if has_plans else ""
    lines = [
        f"| experiment | `memest` ... | allocated | reserved |{plans} verdict | published | s |",
        "|---|---|---|---|---|---|---|" + ("---|" if has_plans else ""),
    ]
    for row in rows:
        found = figures.get(row.name)
        cells = ["-", "-", "-", "-"]
        if found is not None and "error" in found:
            cells[2] = found["error"]
        elif found is not None:
            peaks = found["allocated_bytes"], found["reserved_bytes"]
            cells = [f"{num_bytes / GIB:.2f}" for num_bytes in peaks]
            cells += [_verdict(found), str(found["seconds"])]
        allocated, reserved, verdict, seconds = cells
        lines.append(
            f"| {row.what} | {_command(row)} | {allocated} | {reserved} |"
            f"{_of_plan(found) if has_plans else ''} {verdict} "
            f"| {row.published} | {seconds} |"
        )
    return "\n".join(lines)


def _of_plan(found: Mapping[str, Any] | None) -> str:
    """Peaks of the same row as a plan, each with its distance from the script's."""
    if found is None or "plan_allocated_bytes" not in found:
        return " - |"
    cells = []
    for name in ("allocated_bytes", "reserved_bytes"):
        plan, script = found[f"plan_{name}"], found[name]
        cells.append(f"{plan / GIB:.2f} ({100 * (plan / script - 1):+.2f} %)")
    return f" {', '.join(cells)} |"


def _printed_table(rows: Sequence[Row], figures: Figures) -> str:
    lines = [
        "| experiment | `memest` ... | printed: allocated, reserved "
        "| published: allocated, reserved | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        found = figures.get(row.name, {})
        printed = verdict = "-"
        if found:
            verdict = found.get("error") or _verdict(found)
        if "printed" in found:
            batch, tokens, allocated, reserved = found["printed"]
            printed = f"{allocated:.2f}, {reserved:.2f} (batch of {batch:.0f} x {tokens:.0f})"
        cells = row.what, _command(row), printed, row.published, verdict
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _command(row: Row) -> str:
    return f"`{shlex.join(row.command)}`" if row.target else row.note


def _verdict(found: Mapping[str, Any]) -> str:
    verdict = lab_rows.OOM if found["verdict"] == "oom" else lab_rows.FITS
    return verdict + (" \\*" if found["unmodelled"] else "")


def _unmodelled(rows: Sequence[Row], figures: Figures) -> str:
    names = {name for row in rows for name in figures.get(row.name, {}).get("unmodelled", ())}
    said = ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"
    return f"\\* Not modelled: {said}; outputs are counted, workspaces of cuDNN are not."


def _explained(rows: Sequence[Row], figures: Figures) -> dict[str, str]:
    """What a token takes, of the runs with two lengths, and the length of the published line."""
    found = {row.what: figures.get(row.name, {}).get("printed") for row in rows}
    whole, accumulated, shorter = (found[what] for what in lab_rows.ONE_GPU)
    if whole is None or accumulated is None or shorter is None:
        return {"slope": "-", "tokens": "-", "accumulation": "-"}
    slope = (whole[2] - shorter[2]) / (whole[1] - shorter[1])
    tokens = whole[1] - (whole[2] - PUBLISHED_GIB) / slope
    allocated, reserved = accumulated[2] - whole[2], accumulated[3] - whole[3]
    return {
        "slope": f"{slope * 1024:.1f}",
        "tokens": f"{tokens:.0f}",
        "accumulation": f"{allocated:.2f} GiB allocated and {reserved:.2f}",
    }
