"""docs/labs.md, from the commands of the labs and the figures that came out of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import compare_host
import lab_rows
from lab_rows import BLIP2, FOUR, FOUR_BLIP2, LITGPT, Row

PEAKS = ("allocated", "reserved")
Figures = Mapping[str, Mapping[str, Any]]
GIB = 2**30

TEMPLATE = lab_rows.ROOT / "scripts" / "labs" / "page.md"

PUBLISHED_GIB = 61.97
"""Allocated on one GPU, after the last forward."""

PUBLISHED_OF_8_GIB = 59.51
"""Allocated on the rank with the shortest rows, under FSDP with batches of eight."""


def page_of(rows: Sequence[Row], figures: Figures) -> str:
    """The text of the page."""
    by_lab = {lab: [row for row in rows if row.lab == lab] for lab in lab_rows.LABS}
    parts = {
        "litgpt": _table(by_lab[LITGPT], figures),
        "litgpt unmodelled": _unmodelled(by_lab[LITGPT], figures),
        "four": _printed_table(by_lab[FOUR], figures),
        "four measured": _measured(),
        "fsdp reserved": _span(_peaks("litgpt-fsdp-421", "reserved")),
        **_explained(by_lab[FOUR], figures),
        "four blip2": _table(by_lab[FOUR_BLIP2], figures, True),
        "blip2 unmodelled": _not_compared(by_lab[BLIP2], figures),
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
        f"| | experiment | allocated | reserved |{plans} verdict | published | s |",
        "|--:|---|--:|--:|" + ("---|" if has_plans else "") + "---|---|--:|",
    ]
    for number, row in enumerate(rows, start=1):
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
            f"| {number} | {row.what} | {allocated} | {reserved} |"
            f"{_of_plan(found) if has_plans else ''} {verdict} "
            f"| {row.published} | {seconds} |"
        )
    return "\n".join([*lines, "", *_commands(rows)])


def _commands(rows: Sequence[Row]) -> list[str]:
    """The command of each row, to be copied."""
    lines = ["```sh"]
    for number, row in enumerate(rows, start=1):
        first = f"PYTHONPATH={row.packages} " if row.packages else ""
        lines += [f"# {number}. {row.what}", f"{first}memest {shlex.join(row.command)}"]
    return [*lines, "```"]


def _of_plan(found: Mapping[str, Any] | None) -> str:
    """Peaks of the same row as a plan, each with its distance from the script's."""
    if found is None or "plan_allocated_bytes" not in found:
        return " - |"
    cells = []
    for peak in PEAKS:
        plan, script = found[f"plan_{peak}_bytes"], in_training(found, peak)
        cells.append(f"{plan / GIB:.2f} ({100 * (plan / script - 1):+.2f} %)")
    return f" {', '.join(cells)} |"


def in_training(found: Mapping[str, Any], peak: str) -> int:
    """Peak of a script from the first forward on, as a plan counts it."""
    num_bytes: int = found.get(f"training_{peak}_bytes", found[f"{peak}_bytes"])
    return num_bytes


def _printed_table(rows: Sequence[Row], figures: Figures) -> str:
    lines = [
        "| | experiment | printed: allocated, reserved "
        "| published: allocated, reserved | verdict |",
        "|--:|---|---|---|---|",
    ]
    for number, row in enumerate(rows, start=1):
        found = figures.get(row.name, {})
        printed = verdict = "-"
        if found:
            verdict = found.get("error") or _verdict(found)
        if "printed" in found:
            batch, tokens, allocated, reserved = found["printed"]
            printed = f"{allocated:.2f}, {reserved:.2f} (batch of {batch:.0f} x {tokens:.0f})"
        lines.append(f"| {number} | {row.what} | {printed} | {row.published} | {verdict} |")
    return "\n".join([*lines, "", *_commands(rows)])


MEASURED = {
    "litgpt-fsdp-421": "7B, FSDP, batches of 4, rows of up to 421 tokens",
    "litgpt-ddp-421": "7B, DDP, the same rows, under the A100's 77.83 GiB",
    "litgpt-fsdp": "7B, FSDP, batches of 4",
    "litgpt-fsdp-8": "7B, FSDP, batches of 8",
    "litgpt-zero3-offload": "7B, ZeRO-3, optimizer offloaded, batches of 4",
    "litgpt-finetune_full": "`litgpt finetune_full`, OpenLLaMA 3B, FSDP",
    "litgpt-finetune_lora": "`litgpt finetune_lora`, OpenLLaMA 3B, FSDP",
    "blip2-ddp": "BLIP-2 opt-2.7b, DDP",
    "blip2-fsdp": "BLIP-2 opt-2.7b, FSDP",
    "blip2-zero2": "BLIP-2 opt-2.7b, ZeRO-2",
}
"""Cases of validation/parallel.md that are commands of the labs."""


def _measured() -> str:
    """Return the table of lab scripts that ran on four real GPUs."""
    simulated = compare_host.stored(compare_host.SIMULATED)
    lines = [
        "| on four H200s | allocated | simulated | reserved | simulated |",
        "|---|---|---|---|---|",
    ]
    for name, what in MEASURED.items():
        cells = [what]
        for peak in PEAKS:
            real = _peaks(name, peak)
            made = [num for rank in simulated[name]["ranks"].values() for num in rank[peak]]
            cells += [_span(real), _span(made)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _peaks(name: str, peak: str) -> list[int]:
    """Return a peak of each measured rank, bytes."""
    return [rank[peak] for rank in compare_host.stored(compare_host.MEASURED)[name].values()]


def _span(values: Sequence[int]) -> str:
    """Return the lowest and the highest of several sizes, GiB."""
    low, high = f"{min(values) / GIB:.2f}", f"{max(values) / GIB:.2f}"
    return low if low == high else f"{low} to {high}"


def _verdict(found: Mapping[str, Any]) -> str:
    verdict = lab_rows.OOM if found["verdict"] == "oom" else lab_rows.FITS
    return verdict + (" \\*" if found["unmodelled"] else "")


def _unmodelled(rows: Sequence[Row], figures: Figures) -> str:
    names = _unmodelled_names(rows, figures)
    return f"\\* Not modelled: {names}; outputs are counted, workspaces of cuDNN are not."


def _not_compared(rows: Sequence[Row], figures: Figures) -> str:
    names = _unmodelled_names(rows, figures)
    return f"\\* Workspaces of {names} are those that cuDNN 9.19 returns for an A100. Not measured."


def _unmodelled_names(rows: Sequence[Row], figures: Figures) -> str:
    names = {name for row in rows for name in figures.get(row.name, {}).get("unmodelled", ())}
    return ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"


def _explained(rows: Sequence[Row], figures: Figures) -> dict[str, str]:
    """MiB per token of a batch, from runs with two lengths, and lengths of published lines."""
    printed = {row.what: figures[row.name]["printed"] for row in rows}
    whole, accumulated, shorter = (printed[what] for what in lab_rows.ONE_GPU)
    slope = (whole[2] - shorter[2]) / (whole[1] - shorter[1])
    allocated, reserved = accumulated[2] - whole[2], accumulated[3] - whole[3]
    of_8, in_fp32 = printed[lab_rows.BATCH_8], printed[lab_rows.BATCH_8_AS_PUBLISHED]
    slope_of_8 = slope * of_8[0] / whole[0]
    longer = of_8[1] - in_fp32[1]
    return {
        "slope": f"{slope * 1024:.1f}",
        "tokens": f"{whole[1] - (whole[2] - PUBLISHED_GIB) / slope:.0f}",
        "accumulation": f"{allocated:.2f} GiB allocated and {reserved:.2f}",
        "fp32 shards": f"{in_fp32[2] + longer * slope_of_8 - of_8[2]:.1f}",
        "shorter tokens": f"{in_fp32[1] - (in_fp32[2] - PUBLISHED_OF_8_GIB) / slope_of_8:.0f}",
    }
