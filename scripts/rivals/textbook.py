"""The textbook: states by dtype, and the activations of Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models" (arXiv:2205.05198).

Shapes: s tokens, b batch, h width, a heads, v vocabulary, L layers, k bytes of an activation.

In 16 bit a layer keeps s b h (34 + 5 a s / h) bytes (equation 1). 32 of the 34 are sixteen values
of two bytes and 2 are masks of one; 4 of the 5 are two values and 1 is a mask, so that

    s b h (16 k + 2) + a s^2 b (2 k + 1)    bytes a layer,
    s b h (1 + 2 k) + 4 s b v               bytes outside (dropout after the embeddings, the last
                                            norm and the output layer's input, logits in fp32).

Checkpointing keeps k s b h a layer, and one layer whole. The a s^2 term is left out where attention
is not `eager`: `textbook` does so, `textbook_with_matrix` never does.

Weights and gradients have the dtype of the parameters; Adam keeps two values of it, 8-bit Adam two
bytes, a paged one nothing on the GPU. The measured run's own parameter counts are taken. No cache,
no CUDA context, no workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rivals.case import ADAMS, EIGHT_BIT_ADAMS, PAGED_ADAMS, Case, Estimate, Refused, refuse_parts
from rivals.variants import optimizer_family

VERSION_OF = "arXiv:2205.05198v1"
SOURCE = "https://arxiv.org/abs/2205.05198"
PREDICTS = "peak allocated"

_TEXT_ENCODERS = ("BertFor", "RobertaFor")


def estimate(case: Case, *, has_matrix: bool | None = None) -> Estimate:
    """States and activations; `has_matrix` says whether the attention matrix is kept."""
    refuse_parts(case)
    if case.technique == "qlora":
        raise Refused("quantised weights")
    if not case.is_causal and not case.architecture.startswith(_TEXT_ENCODERS):
        raise Refused("not one stack of equal text layers")
    if any(case.config.get(key) for key in ("num_local_experts", "num_experts")):
        raise Refused("mixture of experts")
    if has_matrix is None:
        has_matrix = case.plan["attn_implementation"] == "eager"
    precision = case.plan["precision"]
    states = state_bytes(
        case.num_params,
        case.num_trainable_params,
        itemsize=2 if precision in ("bf16-true", "16-true") else 4,
        optim=optimizer_family(case.plan["optim"]),
        momentum=case.plan["momentum"],
    )
    allocated = states + activation_bytes(
        case.config,
        s=case.plan["seq_len"],
        b=case.plan["batch_size"],
        k=4 if precision == "32-true" else 2,
        has_matrix=has_matrix,
        is_checkpointed=case.plan["act_ckpt"],
    )
    return Estimate(
        allocated_bytes=allocated,
        process_bytes=None,
        fits=allocated <= case.limit_bytes,
        stretch="LoRA: layers are counted as trained" if case.technique == "lora" else "",
    )


def state_bytes(
    num_params: int, num_trainable: int, *, itemsize: int, optim: str, momentum: float
) -> int:
    """Weights, gradients and optimizer state."""
    return num_params * itemsize + num_trainable * (
        itemsize + _optimizer_bytes(optim, itemsize, momentum)
    )


def activation_bytes(
    config: Mapping[str, Any], *, s: int, b: int, k: int, has_matrix: bool, is_checkpointed: bool
) -> int:
    """What the forward keeps, of a config under its usual names."""
    h = _first(config, "hidden_size", "n_embd", "d_model")
    a = _first(config, "num_attention_heads", "n_head")
    num_layers = _first(config, "num_hidden_layers", "n_layer")
    v = _first(config, "vocab_size")
    layer = s * b * h * (16 * k + 2)
    if has_matrix:
        layer += a * s * s * b * (2 * k + 1)
    layers = num_layers * k * s * b * h + layer if is_checkpointed else num_layers * layer
    return layers + s * b * h * (1 + 2 * k) + 4 * s * b * v


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise Refused(f"config.json names no {names[0]}")


def _optimizer_bytes(optim: str, itemsize: int, momentum: float) -> int:
    """Bytes for each trained parameter."""
    if optim in ADAMS:
        return 2 * itemsize
    if optim in EIGHT_BIT_ADAMS:
        return 2
    if optim in PAGED_ADAMS:
        return 0
    if optim == "sgd":
        return itemsize if momentum else 0
    raise Refused(f"optimizer {optim}")
