"""torch-preflight's `estimate`: closed formulas over an architecture, read from a name or a config.

`estimate_config` is called as its command line does for `--model`. The bundled table of the tool
comes first, then the Hub (`--online`), which the bundled config.json stands for.

Flags: `--flash` wherever attention is not `eager` (SDPA keeps no attention matrix either),
`--checkpointing`, `--dtype` and `--optimizer` of the plan, `--seq-len` except for images. The GPU
is given as usable memory, so that the verdict is about the GPU that the run had. The command line
has no flag for LoRA: `frozen_fraction` of the tool's `RunConfig` is given instead.
"""

from __future__ import annotations

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
from rivals.variants import optimizer_family

VERSION_OF = "torch-preflight"
SOURCE = "https://pypi.org/project/torch-preflight/"
PREDICTS = "process; without the terms `CUDA context` and `fragmentation` that is peak allocated"

_OPTIMIZERS = {
    **dict.fromkeys((*ADAMS, "nadam", "radam", "adamw_32bit", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(EIGHT_BIT_ADAMS | PAGED_ADAMS, "adamw-8bit"),
    "adafactor": "adafactor",
    "adagrad": "adagrad",
    "adagrad_32bit": "adagrad",
    "lion_32bit": "lion",
    "lion_8bit": "lion-8bit",
    "paged_lion_8bit": "lion-8bit",
    "rmsprop": "rmsprop",
    "sgd": "sgd",
}


def estimate(case: Case) -> Estimate:
    """The tool's total, with and without context and fragmentation."""
    refuse(case)
    from torch_preflight.vram import costmodel
    from torch_preflight.vram.hardware import Gpu

    config, stretch = _config(case)
    profile = _profile(case, config)
    gpu = Gpu("measured", "measured", case.gpu_bytes // MIB, reserve_fraction=0.0)
    report = costmodel.estimate(profile, config, gpu)
    parts = report.breakdown
    if not parts.activations:
        raise Refused("it has no activations for this model")
    return Estimate(
        allocated_bytes=parts.total - parts.cuda_context - parts.fragmentation,
        process_bytes=parts.total,
        fits=not report.band.is_failure,
        stretch=stretch,
    )


def refuse(case: Case) -> None:
    """Raise `Refused` for plans that no flag of the tool expresses."""
    refuse_parts(case)
    if case.technique == "qlora":
        raise Refused("quantised weights")
    family = optimizer_family(case.plan["optim"])
    if family not in _OPTIMIZERS:
        raise Refused(f"optimizer {family}")


def _profile(case: Case, config: Any) -> Any:
    from torch_preflight.vram.providers import hub, resolve_profile

    hub.available = lambda: True
    hub.fetch_config = lambda _: dict(case.config)
    profile = resolve_profile(case.hub_id, allow_network=True, config=config)
    if not profile.resolved:
        raise Refused("config.json lacks a field that it needs (vision-language models)")
    return profile


def _config(case: Case) -> tuple[Any, str]:
    from torch_preflight.vram.types import OptimizerKind, PrecisionMode, RunConfig

    plan = case.plan
    precision, _, kind = plan["precision"].partition("-")
    family = optimizer_family(plan["optim"])
    name = "sgd-momentum" if family == "sgd" and plan["momentum"] else _OPTIMIZERS[family]
    optimizer = OptimizerKind(name)
    dtype = {"32": "fp32", "bf16": "pure-bf16", "16": "pure-fp16"}[precision]
    dtype = "amp" if kind == "mixed" else dtype
    config = RunConfig(
        batch_size=plan["batch_size"],
        seq_len=None if case.modality == "image" else plan["seq_len"],
        precision=PrecisionMode(dtype),
        optimizer=optimizer,
        gradient_checkpointing=bool(plan["act_ckpt"]),
        flash_attention=plan["attn_implementation"] != "eager",
        accumulation_steps=plan["accumulate_grad_batches"],
        frozen_fraction=1 - case.num_trainable_params / case.num_params,
    )
    stretches = {
        "LoRA: counted as a share of frozen parameters, without adapters": case.technique == "lora",
        "paged optimizer: counted as unpaged": family.startswith("paged"),
        "16-bit parameters: optimizer states are counted in fp32": dtype.startswith("pure")
        and optimizer.states
        and optimizer.bytes_per_state == 4,
    }
    return config, next((text for text, applies in stretches.items() if applies), "")
