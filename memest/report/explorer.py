"""An interactive page of predicted plans, in one file without a server or a network."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from memest import __version__
from memest.estimator.search.sweep import KINDS, Explored
from memest.plan import TrainingPlan

MAX_PAGE_BYTES = 3 << 20  # largest size of a page, small enough for a course's web site
_PAGE = Path(__file__).with_name("explorer.html")


def technique_of(plan: TrainingPlan) -> str:
    """Return what the plan trains: `full` for the whole model, `LoRA` or `QLoRA`."""
    return "QLoRA" if plan.use_qlora else "LoRA" if plan.use_lora else "full"


_AXES: dict[str, tuple[str, Any]] = {
    "model": ("model", lambda plan: plan.model_name),
    "batch": ("batch", lambda plan: plan.batch_size),
    "accumulation": ("accumulation", lambda plan: plan.accumulate_grad_batches),
    "precision": ("precision", lambda plan: plan.precision),
    "optimizer": ("optimizer", lambda plan: plan.optim),
    "checkpointing": ("checkpointing", lambda plan: plan.checkpoints_activations),
    "technique": ("trained", technique_of),
}
"""Axes of the grid by their key in the page and its links: (title, value of a plan)."""


def explorer_page(data: dict[str, Any]) -> str:
    """Return the HTML page of `data`, the result of `explorer_data`."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.read_text(encoding="utf-8").replace("__DATA__", text)


def explorer_data(
    points: Sequence[Explored], limits: dict[str, int], *, tokens: str,
    presets: Sequence[TrainingPlan] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the data of the interactive page as JSON values: its choices, and figures per plan.

    `points` are predicted plans. `limits` has the bytes that the allocator can reserve, by GPU.
    `tokens` is text on the inputs, such as `512 tokens`. `presets` are plans to choose by name;
    those that are not among `points` are left out.
    """
    settings = [_settings(point.plan) for point in points]
    axes: dict[str, dict[str, Any]] = {}
    for name, (title, _) in _AXES.items():
        values = _axis_values([row[name] for row in settings])
        axes[name] = {"title": title, "values": values, "labels": [_label(v) for v in values]}
    gpus = list(limits)
    seq_len = points[0].plan.seq_len
    choices = {_choices(point.plan) for point in points}
    return {
        "axes": axes | {"gpu": {"title": "GPU", "values": gpus, "labels": gpus}},
        "start": settings[0] | {"gpu": gpus[0]},
        "kinds": list(KINDS),
        "limits": limits,
        "flags": "" if seq_len is None else f" --seq-len {seq_len}",
        "facts": f"{len(points)} plans, {tokens}; predicted by memest {__version__}, to be played "
        "with by mouse, keyboard or link.",
        "presets": {plan.label: _settings(plan) for plan in presets if _choices(plan) in choices},
        "points": {
            ".".join(str(axes[name]["values"].index(value)) for name, value in row.items()): {
                "kinds": list(point.kinds.values()),
                "why": list(point.arithmetic.values()),
                "phases": point.phases,
                "gpus": [
                    [v.word, v.needs_bytes, v.reserved_bytes, v.spread_bytes]
                    for v in map(point.verdicts.__getitem__, gpus)
                ],
            }
            for row, point in zip(settings, points, strict=True)
        },
    }


def _settings(plan: TrainingPlan) -> dict[str, Any]:
    """Return the value of `plan` on each of `_AXES`."""
    return {name: get(plan) for name, (_, get) in _AXES.items()}


def _choices(plan: TrainingPlan) -> tuple[Any, ...]:
    """Return the settings that identify a plan on the page. The first settings are those of
    `_AXES`, in its order: model, batch, accumulation and so on. Then come the LoRA rank (None
    without LoRA), the sequence length, and the strategy."""
    lora_r = plan.lora_r if plan.use_lora or plan.use_qlora else None
    return *_settings(plan).values(), lora_r, plan.seq_len, plan.strategy


def _axis_values(values: Sequence[Any]) -> list[Any]:
    unique = list(dict.fromkeys(values))
    return sorted(unique) if all(isinstance(value, int) for value in unique) else unique


def _label(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return escape(str(value))
