"""fitcheck-llm: closed formulas over the Hub's config.json, for decoder-only language models.

`fitcheck.fetch_model_config` and `fitcheck.estimate` are called as its command line does. The Hub
is answered for from the bundled configs: config.json and the published parameter count.

Flags: `--flash-attn` wherever attention is not `eager` (torch's SDPA keeps no attention matrix
either), `--optimizer-dtype bf16` where parameters are, the LoRA targets of the plan (`all-linear`
as names). The card is given as usable memory to the byte instead of `--vram-mib`, which takes 5 %
off, so that its verdict is about the card that the run had. Its `fits` is taken; it also calls what
is within 20 % of the card `uncertain`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rivals.case import (
    ADAMS,
    EIGHT_BIT_ADAMS,
    MIB,
    PAGED_ADAMS,
    Case,
    Estimate,
    Refused,
    refuse_parts,
)
from rivals.variants import beyond_plain_lora, lora_targets, optimizer_family

VERSION_OF = "fitcheck-llm"
SOURCE = "https://pypi.org/project/fitcheck-llm/"
PREDICTS = "process, and its terms; without the term `overhead` they are peak allocated"

_REFUSALS = {
    "Mixture-of-Experts": "mixture of experts",
    "multimodal model": "vision-language model",
    "parameters according to the Hub": "its parameter formula is off by more than 2 %",
    "config.json field": "config.json lacks a field that it needs (encoder-decoder, vision, GPT-2)",
}


def estimate(case: Case) -> Estimate:
    """The tool's total, with and without its overhead."""
    import fitcheck

    refuse_parts(case)
    model = _model_config(case)
    training, stretch = _training_config(case)
    usable_mib: Any = case.gpu_bytes / MIB
    card = fitcheck.GpuSpec("measured", int(usable_mib), usable_mib)
    try:
        report = fitcheck.estimate(model, training, card)
    except ValueError as error:
        if "Unsupported LoRA target" in str(error):
            raise Refused("LoRA targets other than the seven of a Llama layer") from error
        raise Refused(f"says: {error}") from error
    return Estimate(
        allocated_bytes=round((report.total_mib - report.overhead_mib) * MIB),
        process_bytes=round(report.total_mib * MIB),
        fits=report.fits,
        stretch=stretch,
    )


def _model_config(case: Case) -> Any:
    from fitcheck import config_parser

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(case.config), encoding="utf-8")
        config_parser.hf_hub_download = lambda **_: str(path)
        config_parser._reported_param_count = lambda *_: case.num_params_published
        try:
            return config_parser.fetch_model_config(case.hub_id)
        except ValueError as error:
            for words, reason in _REFUSALS.items():
                if words in str(error):
                    raise Refused(reason) from error
            raise


def _training_config(case: Case) -> tuple[Any, str]:
    from fitcheck import TrainingConfig

    plan, technique = case.plan, case.technique
    precision, _, kind = plan["precision"].partition("-")
    optimizer, stretch = _optimizer(plan)
    lora: dict[str, Any] = {"lora_rank": None}
    if technique == "full":
        if kind == "true" and precision != "32":
            stretch = stretch or "full fine-tune in 16 bit: an fp32 master copy is counted"
    else:
        wanted = lora_targets(plan, case.architecture)
        lora = {"lora_rank": plan["lora_r"], "lora_targets": wanted}
        stretch = stretch or beyond_plain_lora(plan)
        if kind == "mixed":
            stretch = stretch or "LoRA under autocast: the base is counted in 16 bit"
    training = TrainingConfig(
        precision={"32": "fp32", "bf16": "bf16", "16": "fp16"}[precision],
        quantization=plan["quant"] if technique == "qlora" else "none",
        double_quant=bool(plan["double_quant"]),
        optimizer=optimizer,
        optimizer_dtype="bf16" if kind == "true" and precision != "32" else "fp32",
        batch_size=plan["batch_size"],
        seq_len=plan["seq_len"],
        grad_checkpoint=bool(plan["act_ckpt"]),
        flash_attn=plan["attn_implementation"] != "eager",
        grad_accum_steps=plan["accumulate_grad_batches"],
        **lora,
    )
    return training, stretch


def _optimizer(plan: Any) -> tuple[str, str]:
    name = optimizer_family(plan["optim"])
    if name in ADAMS:
        return "adamw", ""
    if name in EIGHT_BIT_ADAMS:
        return "adam8bit", ""
    if name in PAGED_ADAMS:
        return "adam8bit", "paged optimizer: counted as unpaged"
    if name == "sgd":
        return ("sgd-momentum" if plan["momentum"] else "sgd"), ""
    raise Refused(f"optimizer {name}")
