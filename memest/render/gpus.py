"""The catalogue of GPUs as text: their figures, and what of them was measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memest.render.text import table
from memest.units import format_bytes, format_gib

if TYPE_CHECKING:
    from memest.estimator.hardware.gpus import Gpu


def evidence(gpu: Gpu) -> str:
    """`measured` with memest on the card, `sources` of others, or a context that is the H200's."""
    if "not measured on this card" in gpu.source:
        return "sources, context of the H200"
    is_own = "`memest validate`" in gpu.source or "results/" in gpu.source
    return "measured" if is_own else "sources"


def render_gpus(gpus: Iterable[Gpu], *, verbose: bool = False) -> str:
    """The catalogue of GPUs; `verbose` adds where each figure is from."""
    gpus = list(gpus)
    rows = [["gpu", "memory", "context", "usable", "compute", "SMs", "figures", "name"]]
    rows += [
        [
            g.name,
            format_gib(g.memory_bytes),
            format_bytes(g.context_bytes),
            format_gib(g.limit_bytes),
            f"{g.capability[0]}.{g.capability[1]}",
            str(g.num_sms),
            evidence(g),
            g.label,
        ]
        for g in gpus
    ]
    lines = table(rows, left=1, last_left=True)
    lines += [
        "",
        "measured: with memest on the card; sources: from public threads and data sheets, which"
        " --verbose names",
    ]
    if verbose:
        lines += ["", *(f"{g.name}: {g.source}" for g in gpus)]
    return "\n".join(lines)
