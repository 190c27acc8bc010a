"""What slides say of the plans they show: every chart names plan, card, tokens and version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memest import __version__
from memest.plots.style import card_label
from memest.report import Report

DOT = " \N{MIDDLE DOT} "

_STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP", "fsdp2": "FSDP2"} | {
    f"deepspeed_stage_{stage}": f"ZeRO-{stage}" for stage in (1, 2, 3)
}


def label_of(strategy: str) -> str:
    """A strategy as a slide names it.

    >>> label_of("deepspeed_stage_3_offload"), label_of("fsdp2")
    ('ZeRO-3 offload', 'FSDP2')
    """
    base = strategy.removesuffix("_offload").removesuffix("_find_unused_parameters_true")
    tail = {"_offload": " offload", "": ""}.get(strategy.removeprefix(base), ", unused found")
    return _STRATEGIES.get(base, base) + tail


def setting_words(plan: Mapping[str, Any]) -> list[str]:
    """What distinguishes a plan from others of its model: precision, batch, optimizer, technique.

    >>> setting_words({"precision": "bf16-true", "batch_size": 16, "accumulate_grad_batches": 4,
    ...                "optim": "adamw", "use_lora": True, "lora_r": 8})
    ['bf16-true', 'batch 16 x 4', 'adamw', 'LoRA 8']
    """
    words = []
    if plan.get("precision"):
        words.append(str(plan["precision"]))
    if plan.get("batch_size"):
        count = plan.get("accumulate_grad_batches") or 1
        words.append(f"batch {plan['batch_size']}{f' x {count}' if count > 1 else ''}")
    if plan.get("optim"):
        words.append(str(plan["optim"]))
    return words + technique_words(plan)


def technique_words(plan: Mapping[str, Any]) -> list[str]:
    """Adapters, quantisation, checkpointing, strategy and attention, where they are no defaults."""
    words = []
    adapter = "QLoRA" if plan.get("use_qlora") else "LoRA" if plan.get("use_lora") else ""
    if adapter:
        words.append(f"{adapter} {plan.get('lora_r', '')}".strip())
    if plan.get("use_dora"):
        words.append("DoRA")
    if plan.get("act_ckpt"):
        words.append("checkpointing")
    if plan.get("freeze"):
        words.append("frozen parts")
    if plan.get("attn_implementation") not in (None, "", "sdpa"):
        words.append(str(plan["attn_implementation"]))
    strategy, devices = plan.get("strategy") or "auto", plan.get("devices") or 1
    if strategy != "auto" or devices > 1:
        name = label_of("ddp" if strategy == "auto" else strategy)
        words.append(f"{name} on {devices} GPU{'s' if devices > 1 else ''}")
    if plan.get("memory_limit"):
        words.append(f"capped at {plan['memory_limit'] / 2**30:.4g} GiB")
    return words


def token_words(reports: Sequence[Report]) -> str:
    """The tokens per sample of all reports, and the pixels where they are all one size."""
    lengths = sorted({int(n) for r in reports if (n := r.plan.get("seq_len"))})
    if not lengths:
        return ""
    span = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return f"{span} tokens"


def card_words(reports: Sequence[Report]) -> str:
    """The cards that the reports are for."""
    return ", ".join(dict.fromkeys(card_label(report.gpu) for report in reports))


def version_words(reports: Sequence[Report] = ()) -> str:
    """The memest that made the reports."""
    versions = dict.fromkeys(str(r.versions["memest"]) for r in reports if r.versions.get("memest"))
    return f"memest {', '.join(versions) or __version__}"


def plan_line(reports: Sequence[Report], *others: str) -> str:
    """Plan, card and tokens of reports of one plan, what else there is to say, the version."""
    plan = reports[0].plan
    model = str(plan.get("model_name", ""))
    said = [] if model and model in reports[0].name else [model.rsplit("/", 1)[-1]]
    parts = [
        *said, *setting_words(plan), token_words(reports), card_words(reports), *others,
        version_words(reports),
    ]  # fmt: skip
    return DOT.join(part for part in parts if part)
