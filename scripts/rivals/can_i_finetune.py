"""canifinetune: closed formulas, fitted on an RTX 4080, for causal language models.

`canifinetune.estimator.estimate` is called with a full request. The Hub is answered for from the
bundled configs: config.json and the published parameter count; its own table of known models comes
first, as it would for a user. What it prints for encoders, encoder-decoders and vision models is
not counted: it claims causal language models alone.

Flags: `sdpa` or `eager` as the plan says, `base_dtype` that of the parameters, the LoRA scope with
q and v alone or with all linear layers. Its total is 8 % of the card for context, fragmentation and
workspaces, and 5 % of the card for safety, on top of its terms. The safety margin is taken off the
process figure, and both off peak allocated; its verdict keeps all (`no` is out of memory, `yes` and
`marginal` fit).
"""

from __future__ import annotations

from typing import Any

from rivals.case import (
    ADAMS,
    EIGHT_BIT_ADAMS,
    GIB,
    PAGED_ADAMS,
    Case,
    Estimate,
    Refused,
    refuse_parts,
)
from rivals.variants import beyond_plain_lora, optimizer_family

VERSION_OF = "canifinetune"
SOURCE = "https://pypi.org/project/canifinetune/"
PREDICTS = "process without its safety margin; without its CUDA overhead that is peak allocated"

_OPTIMIZERS = {
    **dict.fromkeys(ADAMS, "adamw_torch"),
    **dict.fromkeys(EIGHT_BIT_ADAMS, "adamw_8bit"),
    **dict.fromkeys(PAGED_ADAMS, "paged_adamw_8bit"),
    # Neither makes the temporary of the `foreach` implementation.
    "adam_fused": "adamw_torch_fused",
    "adamw_fused": "adamw_torch_fused",
    "adam_single": "adamw_torch_fused",
    "adamw_single": "adamw_torch_fused",
    "sgd": "sgd",
}


def estimate(case: Case) -> Estimate:
    """The tool's total, less what it adds for safety."""
    from canifinetune.estimator import memory

    _refuse_what_it_does_not_claim(case)
    request, stretch = _request(case)
    _answer_for_the_hub(case)
    try:
        found = memory.estimate(request)
    except ValueError as error:
        if "target-module mapping" in str(error):
            raise Refused("LoRA on an architecture that is not in its list of modules") from error
        if "Cannot resolve metadata" in str(error):
            raise Refused("config.json lacks a field that it needs") from error
        raise
    parts = found.memory
    process = parts.total_estimated_gb - parts.safety_margin_gb
    return Estimate(
        allocated_bytes=round((process - parts.cuda_overhead_gb) * GIB),
        process_bytes=round(process * GIB),
        fits=found.feasible != "no",
        stretch=stretch,
    )


def _refuse_what_it_does_not_claim(case: Case) -> None:
    if not case.is_causal:
        raise Refused("no causal language model")
    refuse_parts(case)
    family = optimizer_family(case.plan["optim"])
    if family not in _OPTIMIZERS:
        raise Refused(f"optimizer {family}")
    if family == "sgd" and case.plan["momentum"]:
        raise Refused("sgd with momentum")
    if case.technique != "full" and _lora_scope(case) is None:
        raise Refused("LoRA targets of the user's own")


def _optimizer(case: Case) -> str:
    name = case.plan["optim"]
    return _OPTIMIZERS.get(name) or _OPTIMIZERS[optimizer_family(name)]


def _lora_scope(case: Case) -> str | None:
    targets = tuple(case.plan["lora_target_modules"])
    return {(): "conservative", ("all-linear",): "all_linear"}.get(targets)


def _request(case: Case) -> tuple[Any, str]:
    from canifinetune.estimator.memory import EstimateRequest

    plan = case.plan
    precision, _, kind = plan["precision"].partition("-")
    is_mixed = kind == "mixed"
    dtype = "fp32" if is_mixed else {"32": "fp32", "bf16": "bf16", "16": "fp16"}[precision]
    request = EstimateRequest(
        model_id=case.hub_id,
        method=case.technique,
        seq_len=plan["seq_len"],
        micro_batch_size=plan["batch_size"],
        gradient_accumulation_steps=plan["accumulate_grad_batches"],
        base_dtype=dtype,
        quantization="nf4_double_quant" if plan["double_quant"] else plan["quant"],
        lora_rank=plan["lora_r"],
        lora_alpha=int(plan["lora_alpha"]),
        lora_dropout=plan["lora_dropout"],
        lora_target_scope=_lora_scope(case) or "",
        optimizer=_optimizer(case),
        gradient_checkpointing=bool(plan["act_ckpt"]),
        attention_implementation=plan["attn_implementation"] or "sdpa",
        gpu_vram_gb=case.gpu_bytes / GIB,
    )
    stretch = "autocast: activations are counted in fp32, like the weights" if is_mixed else ""
    return request, stretch or beyond_plain_lora(plan)


def _answer_for_the_hub(case: Case) -> None:
    from canifinetune.estimator import model_metadata

    model_metadata.fetch_model_config = lambda *_, **__: dict(case.config)
    model_metadata.fetch_model_parameter_count = lambda *_, **__: case.num_params_published
