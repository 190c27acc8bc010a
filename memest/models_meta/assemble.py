"""Assembly of the module that a plan trains: build, tie, quantise, adapt, freeze, cast, checkpoint.

Measured runs and predictions share this sequence, with peft's and bitsandbytes' own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from memest.errors import PlanError, UnsupportedError
from memest.models_meta.adapters import apply_lora, linear_names
from memest.models_meta.batch import num_image_tokens, unwrapped
from memest.models_meta.build import (
    BuiltModel,
    build_model,
    freeze,
    num_positions,
    set_tied_embeddings,
)
from memest.models_meta.flash_attention import mark_quantized
from memest.models_meta.quantized import layers_to_quantize, skipped_modules
from memest.models_meta.registry import ModelConfig
from memest.plan import TrainingPlan
from memest.plan.values import ALL_LINEAR, FLASH_ATTENTION_2, IN_PLACE

DEFAULT_SEQ_LEN = {"image-text": 25, "text": 512, "audio": 128, "image": 1}
"""Tokens per sample where the plan gives none. 25 for image-text matches published verdicts of the
lab's captions; the others are assumed. Every report prints the value used.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """Module in training mode, with notes on the decisions made while it was assembled."""

    module: nn.Module
    notes: tuple[str, ...]


def assemble(
    plan: TrainingPlan,
    config: ModelConfig,
    *,
    device: torch.device | str,
    load: Callable[[BuiltModel], nn.Module] | None = None,
    initialise: Callable[[nn.Module], Any] | None = None,
    quantize: Callable[[nn.Module, TrainingPlan], Any] | None = None,
) -> Assembled:
    """Assemble the module as Lightning trains it.

    Args:
        plan: the plan to train.
        config: config of its model.
        device: device of the parameters.
        load: loads the module that is built on meta, quantised if the plan quantises while
            loading; None builds it on `device`.
        initialise: sets the weights before anything is derived from them.
        quantize: replaces the linear layers in place, for QLoRA.

    Raises:
        MemestError: the model class, the adapters or the patterns do not go together.
    """
    built = build_model(
        config,
        dtype=load_dtype(plan, config),
        attn_implementation=plan.attn_implementation,
        device=device if load is None else "meta",
    )
    notes = [*built.notes, *_checkpointing_notes(plan)]
    if plan.use_qlora:  # an error if there are none; transformers only logs a warning
        layers_to_quantize(built.module, skipped_modules(built.module, plan))
    model = built.module if load is None else load(built)
    if plan.tie_word_embeddings is not None:
        set_tied_embeddings(model, plan.tie_word_embeddings)
    if initialise is not None:
        initialise(model)
    if quantize is not None:
        quantize(model, plan)
        mark_quantized(model)
    if plan.use_qlora:
        _prepare_for_kbit_training(model, plan)
    if plan.uses_adapters:
        is_every = plan.lora_target_modules == (ALL_LINEAR,)
        targets = ALL_LINEAR if is_every else plan.lora_target_modules or lora_targets(model)
        model = apply_lora(model, plan, targets)
    if plan.freeze:
        freeze(model, plan.freeze)
    if input_dtype(plan) is not None:
        model = model.to(input_dtype(plan))
    model.train()
    if plan.act_ckpt and not plan.kbit_checkpoints:
        _enable_checkpointing(model, plan)
    return Assembled(module=model, notes=tuple(notes))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the optimizer gets.

    Raises:
        PlanError: there are none.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise PlanError("nothing is left to train", hint="narrow `freeze`")
    return trained


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return class and parameter counts for reports; a quantised weight counts its bytes."""
    return {
        "class": type(unwrapped(model)).__name__,
        "num_params": sum(p.numel() for p in model.parameters()),
        "num_trainable_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def loss_of(model: nn.Module, inputs: dict[str, Any], output: str) -> Tensor:
    """Return the model's loss, or the mean of the output named `output`."""
    out = model(**inputs)
    if output == "loss":
        return out.loss
    return getattr(out, output).float().mean()


def half_dtype(plan: TrainingPlan) -> torch.dtype:
    """Return the 16-bit dtype of the plan's precision."""
    return torch.bfloat16 if plan.precision.startswith("bf16") else torch.float16


def input_dtype(plan: TrainingPlan) -> torch.dtype | None:
    """Return the dtype of Lightning's float inputs (`HalfPrecision.convert_input`), or None."""
    return half_dtype(plan) if plan.precision in ("bf16-true", "16-true") else None


def load_dtype(plan: TrainingPlan, config: ModelConfig) -> torch.dtype:
    """Return the dtype in which the weights are loaded: the checkpoint's for quantised models.

    FlashAttention-2 needs 16 bits, so its users set one.
    """
    if not plan.use_qlora:
        return input_dtype(plan) or torch.float32
    is_half = config.saved_dtype in (torch.float16, torch.bfloat16)
    if plan.quant_load == IN_PLACE or (
        plan.attn_implementation == FLASH_ATTENTION_2 and not is_half
    ):
        return input_dtype(plan) or compute_dtype(plan)
    return config.saved_dtype


def compute_dtype(plan: TrainingPlan) -> torch.dtype:
    """Return the dtype in which a 4-bit layer multiplies (`bnb_4bit_compute_dtype`)."""
    return torch.float16 if plan.precision.startswith("16") else torch.bfloat16


def sequence_length(plan: TrainingPlan, config: ModelConfig) -> int:
    """Return tokens per sample: the plan's, or the modality's default cut to the model's positions.

    Raises:
        PlanError: the model has fewer positions.
    """
    positions = num_positions(config.pretrained)
    modality = config.entry.modality if config.entry is not None else "text"
    asked = max(plan.lengths, default=plan.seq_len)
    if asked is None:
        default = DEFAULT_SEQ_LEN[modality] + num_image_tokens(config.pretrained, plan.image_size)
        return min(default, positions) if positions else default
    if positions is not None and asked > positions:
        key = "lengths" if plan.lengths else "seq_len"
        raise PlanError(
            f"`{key}` {asked} is beyond the {positions} positions of `{config.name}`",
            hint=f"give at most {positions}",
        )
    return asked


def _checkpointing_notes(plan: TrainingPlan) -> list[str]:
    if not plan.kbit_checkpoints or plan.kbit_ckpt or plan.act_ckpt:
        return []
    return [
        "`prepare_model_for_kbit_training` of peft turns activation checkpointing on, which is its"
        " default; `kbit_ckpt: false` leaves it off"
    ]


def _prepare_for_kbit_training(model: Any, plan: TrainingPlan) -> None:
    """Freeze the quantised base and cast the rest to fp32, by peft."""
    from peft import prepare_model_for_kbit_training

    options: dict[str, Any] = {}
    if "auto_clear_cache" in signature(prepare_model_for_kbit_training).parameters:
        # older peft clears nothing; in place, runs were measured without it
        options["auto_clear_cache"] = plan.loads_quantized
    try:
        prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
            model, use_gradient_checkpointing=plan.kbit_checkpoints, **options
        )
    except ValueError as error:
        raise UnsupportedError(
            "`prepare_model_for_kbit_training` turns activation checkpointing on, which"
            f" `{plan.model_name}` does not offer: {error}",
            hint="add `kbit_ckpt: false` (`--no-kbit-ckpt`)",
        ) from error


def _enable_checkpointing(model: Any, plan: TrainingPlan) -> None:
    try:
        model.gradient_checkpointing_enable()
        if plan.uses_adapters:
            model.enable_input_require_grads()
    except ValueError as error:
        raise UnsupportedError(
            f"`act_ckpt` is not offered by `{plan.model_name}`: {error}",
            hint="leave `act_ckpt` out",
        ) from error


def lora_targets(model: Any) -> Sequence[str] | None:
    """Return the model's names of its q and v projections, or of the fused product that holds them.

    None leaves the choice to peft.
    """
    names = set(linear_names(model))
    for pair in (["q_proj", "v_proj"], ["q", "v"], ["query", "value"]):
        if names.issuperset(pair):
            return pair
    for fused in ("qkv_proj", "query_key_value", "c_attn"):  # one product for all three
        if fused in names:
            return [fused]
    return None
