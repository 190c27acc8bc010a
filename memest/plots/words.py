"""Common words of charts: settings, GPUs, versions, errors."""

from collections.abc import Mapping, Sequence
from typing import Any

from memest import __version__
from memest.report import Report
from memest.units import GIB, counted

MINUS = "\N{MINUS SIGN}"  # as wide as a plus
DOT = " \N{MIDDLE DOT} "
_STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP", "fsdp2": "FSDP2"} | {
    f"deepspeed_stage_{stage}": f"ZeRO-{stage}" for stage in (1, 2, 3)
}


def gpu_label(gpu: str) -> str:
    """Return the name of a GPU for slides.

    >>> gpu_label("a100-80gb"), gpu_label("12.00GiB"), gpu_label("custom")
    ('A100 80GB', '12.00 GiB', 'custom')
    """
    if not any(c.isdigit() for c in gpu):
        return gpu
    return gpu.replace("-", " ").upper().replace("GIB", " GiB")


def percent_off(predicted_bytes: int, measured_bytes: int) -> float:
    """Return the error of `predicted_bytes` as a signed percentage of `measured_bytes`."""
    return 100 * (predicted_bytes - measured_bytes) / measured_bytes


def signed_percent(predicted_bytes: int, measured_bytes: int) -> str:
    """Return `percent_off` as text; an error that rounds to nothing has no sign.

    >>> signed_percent(201, 200), signed_percent(10**6 + 1, 10**6)
    ('+0.50 %', '±0.00 %')
    """
    error = percent_off(predicted_bytes, measured_bytes)
    return "±0.00 %" if abs(error) < 0.005 else f"{error:+.2f} %".replace("-", MINUS)


def dotted(*parts: str) -> str:
    """Return the non-empty `parts` as one text, with dots between them."""
    return DOT.join(filter(None, parts))


def label_of(strategy: str) -> str:
    """Return the name on slides of `strategy`, a value of the plan's key `strategy`.

    >>> label_of("deepspeed_stage_3_offload"), label_of("fsdp2")
    ('ZeRO-3 offload', 'FSDP2')
    """
    base = strategy.removesuffix("_offload").removesuffix("_find_unused_parameters_true")
    tail = {"_offload": " offload", "": ""}.get(strategy.removeprefix(base), ", unused found")
    return _STRATEGIES.get(base, base) + tail


def setting_words(plan: Mapping[str, Any]) -> list[str]:
    """Return texts of a plan's settings: precision, batch, optimizer, and those not at defaults.

    >>> setting_words({"precision": "bf16-true", "batch_size": 16, "accumulate_grad_batches": 4,
    ...                "optim": "adamw", "use_lora": True, "lora_r": 8})
    ['bf16-true', 'batch 16 x 4', 'adamw', 'LoRA 8']
    """
    count, batch = plan.get("accumulate_grad_batches") or 1, plan.get("batch_size")
    adapter = "QLoRA" if plan.get("use_qlora") else "LoRA"
    strategy, devices = plan.get("strategy") or "auto", plan.get("devices") or 1
    name = label_of("ddp" if strategy == "auto" else strategy)
    limit, attention = plan.get("memory_limit"), plan.get("attn_implementation")
    settings = {
        str(plan.get("precision")): plan.get("precision"),
        f"batch {batch}{f' x {count}' if count > 1 else ''}": batch,
        str(plan.get("optim")): plan.get("optim"),
        f"{adapter} {plan.get('lora_r', '')}".strip(): plan.get("use_qlora")
        or plan.get("use_lora"),
        "DoRA": plan.get("use_dora"),
        "checkpointing": plan.get("act_ckpt"),
        "frozen parts": plan.get("freeze"),
        str(attention): attention not in (None, "", "sdpa"),
        f"{name} on {counted(devices, 'GPU')}": strategy != "auto" or devices > 1,
        f"capped at {(limit or 0) / GIB:.4g} GiB": limit,
    }
    return [text for text, is_shown in settings.items() if is_shown]


def token_words(reports: Sequence[Report]) -> str:
    """Return the tokens per sample of all reports: a number or a range; empty if unknown."""
    lengths = sorted({int(n) for r in reports if (n := r.plan.get("seq_len"))})
    if not lengths:
        return ""
    span = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return f"{span} tokens"


def gpu_words(reports: Sequence[Report]) -> str:
    """Return the names of the reports' GPUs as one text."""
    return ", ".join(dict.fromkeys(gpu_label(report.gpu) for report in reports))


def version_words(reports: Sequence[Report] = ()) -> str:
    """Return as text the memest version that made `reports`, or else the installed version."""
    versions = dict.fromkeys(str(r.versions["memest"]) for r in reports if r.versions.get("memest"))
    return f"memest {', '.join(versions) or __version__}"


def plan_line(report: Report, *others: str) -> str:
    """Return one line: the report's plan, tokens and GPU, the texts `others`, memest's version."""
    model = str(report.plan.get("model_name", ""))
    models = [] if model and model in report.name else [model.rsplit("/", 1)[-1]]
    return dotted(
        *models, *setting_words(report.plan), token_words([report]), gpu_words([report]), *others,
        version_words([report]),
    )  # fmt: skip
