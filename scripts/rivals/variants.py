"""What a plan says that a closed formula has no word for, and what makes no difference to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IMPLEMENTATIONS = ("single", "foreach", "fused")

SEVEN_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_ARCHITECTURES_OF_SEVEN = tuple(
    f"{family}ForCausalLM"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Olmo2")
)


def optimizer_family(optim: str) -> str:
    """The optimizer without the name of its implementation, which changes no state.

    >>> optimizer_family("adamw_single"), optimizer_family("adamw_8bit"), optimizer_family("sgd")
    ('adamw', 'adamw_8bit', 'sgd')
    """
    family, _, implementation = optim.rpartition("_")
    return family if implementation in _IMPLEMENTATIONS else optim


def lora_targets(plan: Mapping[str, Any], architecture: str) -> list[str]:
    """The targets by name, `all-linear` too where the layers have `SEVEN_TARGETS` and no more.

    None named: query and value, as PEFT has it for most families.
    """
    targets = list(plan["lora_target_modules"]) or ["q_proj", "v_proj"]
    if targets == ["all-linear"] and architecture in _ARCHITECTURES_OF_SEVEN:
        return list(SEVEN_TARGETS)
    return targets


def beyond_plain_lora(plan: Mapping[str, Any]) -> str:
    """What `stretch` says of adapters that are more than two factors; else the empty text."""
    more = {
        "DoRA": plan.get("use_dora"),
        "trained biases": plan.get("lora_bias", "none") != "none",
        "whole modules trained besides the adapters": plan.get("lora_modules_to_save"),
    }
    said = [name for name, is_there in more.items() if is_there]
    return f"{' and '.join(said)}: counted as plain LoRA" if said else ""
