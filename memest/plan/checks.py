"""What a plan may ask for: kinds, ranges, and keys that go together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from memest.errors import PlanError, closest, shown
from memest.plan.optimizers import OPTIMIZERS
from memest.plan.values import (
    ALL_LINEAR,
    ATTENTIONS,
    CLIPPING,
    FLASH_ATTENTION_2,
    FROM_PRETRAINED,
    LOGGING,
    LOOPS,
    LORA_BIASES,
    PRECISIONS,
    QUANT_LOADS,
    QUANTISATIONS,
    SHARDINGS,
    STRATEGIES,
)

if TYPE_CHECKING:
    from memest.plan.training_plan import TrainingPlan

_LIMITS = {
    "batch_size": 1 << 16,
    "accumulate_grad_batches": 1 << 16,
    "seq_len": 1 << 22,
    "image_size": 1 << 14,
    "lora_r": 1 << 14,
    "steps": 1000,
    "devices": 1 << 14,
    "num_nodes": 1 << 12,
    "val_batch_size": 1 << 16,
    "val_check_interval": 1 << 20,
    "bucket_cap_mb": 1 << 20,
    "shard_size": 1 << 14,
    "reduce_bucket_size": 1 << 40,
    "allgather_bucket_size": 1 << 40,
}
"""The largest value that is taken for a request and not for a slip."""

_LARGEST_ALPHA = 1e6

_MOST_VAL_BATCHES = 1000


def check(plan: TrainingPlan) -> None:
    """Refuse what does not exist, is out of range, or contradicts another key.

    Raises:
        PlanError: with what would do.
    """
    _check_types(plan)
    for key, allowed in (
        ("precision", PRECISIONS),
        ("loop", LOOPS),
        ("gradient_clip_algorithm", CLIPPING),
        ("strategy", STRATEGIES),
        ("attn_implementation", ATTENTIONS),
        ("quant", QUANTISATIONS),
        ("quant_load", QUANT_LOADS),
        ("lora_bias", LORA_BIASES),
        ("sharding_strategy", SHARDINGS),
    ):
        value = getattr(plan, key)
        if value is not None and value not in allowed:
            raise PlanError(
                f"`{key}` cannot be {shown(value)}", hint=suggest(value, allowed, "allowed")
            )
    for key, largest in _LIMITS.items():
        value = getattr(plan, key)
        if value is not None and not 1 <= value <= largest:
            raise PlanError(
                f"`{key}` is {shown(value)}", hint=f"give a whole number from 1 to {largest}"
            )
    _check_numbers(plan)
    _check_combinations(plan)


def _check_numbers(plan: TrainingPlan) -> None:
    if not plan.model_name.strip():
        raise PlanError("`model_name` is empty", hint="`memest models` lists what is bundled")
    if not 0 <= plan.lora_dropout < 1:
        raise PlanError(f"`lora_dropout` is {shown(plan.lora_dropout)}", hint="give 0 <= p < 1")
    for key in ("weight_decay", "gradient_clip_val"):
        value = getattr(plan, key)
        if value is not None and not 0 <= value < float("inf"):
            raise PlanError(f"`{key}` is {shown(value)}", hint="give a number from 0 on")
    if not 0 <= plan.limit_val_batches <= _MOST_VAL_BATCHES:
        raise PlanError(
            f"`limit_val_batches` is {shown(plan.limit_val_batches)}",
            hint=f"give a whole number from 0 to {_MOST_VAL_BATCHES}; they are alike",
        )
    if not 0 <= plan.momentum < 1:
        raise PlanError(f"`momentum` is {shown(plan.momentum)}", hint="give 0 <= momentum < 1")
    if not 0 < plan.lora_alpha <= _LARGEST_ALPHA:
        raise PlanError(f"`lora_alpha` is {shown(plan.lora_alpha)}", hint="give a positive number")
    for key in ("gpu_memory", "memory_limit", "host_memory"):
        value = getattr(plan, key)
        if value is not None and value <= 0:
            raise PlanError(f"`{key}` is {shown(value)}", hint="write it as `78.4GiB`")


def _check_combinations(plan: TrainingPlan) -> None:
    row = OPTIMIZERS[plan.optim]
    if plan.momentum and not row.has_momentum:
        raise PlanError(
            f"`momentum` {plan.momentum} does not go with `optim` `{plan.optim}`",
            hint="use it with `sgd` or `rmsprop`",
        )
    if row.needs_momentum and not (plan.momentum or dict(plan.optim_options).get("momentum")):
        raise PlanError(
            f"`optim` `{plan.optim}` of bitsandbytes cannot be made without `momentum`",
            hint="give a `momentum` above 0, such as 0.9",
        )
    if plan.nesterov and not (plan.momentum and row.has_nesterov):
        raise PlanError(
            f"`nesterov` does not go with `optim` `{plan.optim}`, momentum {plan.momentum}",
            hint="use it with `sgd` and a `momentum` above 0",
        )
    if plan.lengths and plan.seq_len is not None:
        raise PlanError("`lengths` and `seq_len` are both given", hint="leave out one of them")
    if plan.lengths and max(plan.lengths) > _LIMITS["seq_len"]:
        raise PlanError(
            f"`lengths` has {max(plan.lengths)}", hint=f"give at most {_LIMITS['seq_len']} tokens"
        )
    _check_loop(plan)
    if (
        plan.attn_implementation == FLASH_ATTENTION_2
        and plan.precision == "32-true"
        and not plan.use_qlora
    ):
        raise PlanError(
            "`attn_implementation` `flash_attention_2` takes fp16 or bf16, and `32-true` gives"
            " it fp32",
            hint="use `bf16-true` or `bf16-mixed`, or `attn_implementation: sdpa`",
        )
    if plan.freeze and (plan.use_lora or plan.use_qlora):
        raise PlanError(
            "`freeze` does not go with LoRA, which freezes the whole base",
            hint="leave `freeze` out, or narrow `lora_target_modules`",
        )
    _check_adapters(plan)
    if plan.padded and plan.batch_size == 1:
        raise PlanError(
            "`padded` is true for `batch_size` 1: its only row is the longest",
            hint="leave `padded` out or raise `batch_size`",
        )
    _check_strategy(plan)


def _check_loop(plan: TrainingPlan) -> None:
    for key, _ in plan.trainer_options:
        if plan.loop != "transformers" or key not in LOGGING:
            raise PlanError(
                f"`trainer_options` has `{key}`, with `loop` `{plan.loop}`",
                hint=f"with `loop: transformers` it takes {', '.join(f'`{k}`' for k in LOGGING)}",
            )
    for key in ("val_batch_size", "val_check_interval"):
        if getattr(plan, key) is not None and not plan.validates:
            raise PlanError(
                f"`{key}` is given and `limit_val_batches` is 0: nothing is validated",
                hint="give `limit_val_batches`, or leave it out",
            )
    if plan.validates and plan.val_check_interval is not None:
        num_batches = plan.steps * plan.accumulate_grad_batches
        if plan.val_check_interval > num_batches:
            raise PlanError(
                f"`val_check_interval` {plan.val_check_interval} is beyond the {num_batches}"
                " micro-batches of the run",
                hint="raise `steps`, or leave it out to validate at the end",
            )
    if plan.loop == "lightning":
        return
    if plan.is_distributed:
        raise PlanError(
            f"`loop` `{plan.loop}` does not go with `strategy` `{plan.strategy}` on"
            f" {plan.world_size} GPUs, which is Lightning's",
            hint="leave `loop` out, or predict one GPU",
        )
    if plan.gradient_clip_algorithm != "norm":
        raise PlanError(
            f"`gradient_clip_algorithm` `value` does not go with `loop` `{plan.loop}`",
            hint="use `norm`, or `loop: lightning`",
        )


def _check_adapters(plan: TrainingPlan) -> None:
    for key in (
        "lora_target_modules", "lora_modules_to_save", "lora_bias", "use_rslora", "use_dora",
    ):  # fmt: skip
        if getattr(plan, key) not in ((), "none", False) and not plan.uses_adapters:
            raise PlanError(
                f"`{key}` is given for a full fine-tune",
                hint="add `use_lora: true` (`--lora`) or leave it out",
            )
    if ALL_LINEAR in plan.lora_target_modules and len(plan.lora_target_modules) > 1:
        raise PlanError(
            f"`lora_target_modules` names `{ALL_LINEAR}` and other modules",
            hint=f"give `{ALL_LINEAR}` alone, or names alone",
        )
    for key, is_given in (
        ("double_quant", plan.double_quant),
        ("quant", plan.quant != "nf4"),
        ("kbit_ckpt", plan.kbit_ckpt is not None),
        ("quant_load", plan.quant_load != FROM_PRETRAINED),
    ):
        if is_given and not plan.use_qlora:
            ckpt = "; without it `act_ckpt` checkpoints" if key == "kbit_ckpt" else ""
            raise PlanError(
                f"`{key}` is given without QLoRA", hint=f"add `use_qlora: true` (`--qlora`){ckpt}"
            )
    if plan.double_quant and plan.quant != "nf4":
        raise PlanError(
            f"`double_quant` does not go with `quant` `{plan.quant}`, whose scales are fp32",
            hint="leave one of them out",
        )


def _check_strategy(plan: TrainingPlan) -> None:
    strategy = plan.strategy
    if plan.optim == "deepspeed_cpu" and not plan.offloads:
        raise PlanError(
            f"`deepspeed_cpu` needs an offload strategy, not `{strategy}`",
            hint="use `deepspeed_stage_2_offload` or `deepspeed_stage_3_offload`",
        )
    if plan.offloads and plan.optim != "deepspeed_cpu":
        raise PlanError(
            f"`{strategy}` updates on the CPU and refuses `optim` `{plan.optim}`",
            hint="use `optim: deepspeed_cpu`",
        )
    if plan.use_qlora and (plan.is_fsdp or strategy.startswith("deepspeed_stage_3")):
        raise PlanError(
            f"`{strategy}` cannot divide a quantised base: its weights are packed bytes beside"
            " 16-bit ones",
            hint="use `ddp` or `deepspeed_stage_2`, or LoRA without quantisation",
        )
    _check_keys_of_strategy(plan)
    if plan.shard_size is not None and plan.world_size % plan.shard_size:
        raise PlanError(
            f"`shard_size` {plan.shard_size} does not divide {plan.world_size} GPUs",
            hint="give a divisor of `devices`",
        )


def _check_keys_of_strategy(plan: TrainingPlan) -> None:
    """Keys that only one family of strategies reads."""
    is_hybrid = plan.is_fsdp and plan.sharding_strategy == "HYBRID_SHARD"
    defaults = {f.name: f.default for f in dataclasses.fields(plan)}
    for keys, applies, where in (
        (("gradient_as_bucket_view", "bucket_cap_mb"), plan.is_ddp, "`strategy: ddp`"),
        (
            ("sharding_strategy", "wrap_classes", "activation_checkpointing_policy"),
            plan.is_fsdp,
            "`strategy: fsdp`",
        ),
        (("shard_size",), is_hybrid, "`sharding_strategy: HYBRID_SHARD` of FSDP"),
        (
            ("reduce_bucket_size", "allgather_bucket_size"),
            plan.is_deepspeed,
            "a DeepSpeed strategy",
        ),
    ):
        for key in keys:
            if not applies and getattr(plan, key) != defaults[key]:
                raise PlanError(
                    f"`{key}` does not go with `strategy` `{plan.strategy}`",
                    hint=f"it is read by {where}",
                )
    if plan.strategy == "fsdp2" and plan.sharding_strategy == "NO_SHARD":
        raise PlanError("`fsdp2` has no `NO_SHARD`", hint="use `ddp`, which keeps all on every GPU")
    if plan.strategy == "fsdp2" and plan.precision == "16-mixed":
        raise PlanError(
            "Lightning's `ModelParallelStrategy`, which is `fsdp2`, refuses `16-mixed`",
            hint="use `bf16-mixed`, or `strategy: fsdp`",
        )


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "int | None": (int,), "str": (str,), "str | None": (str,), "bool": (bool,),
    "bool | None": (bool,), "float": (float, int), "float | None": (float, int),
    "tuple[str, ...]": (tuple,), "tuple[int, ...]": (tuple,),
    "tuple[tuple[str, Any], ...]": (tuple,),
}  # fmt: skip
_KIND_NAMES = {
    int: "a whole number", str: "text", bool: "true or false", float: "a number",
    tuple: "a list of names",
}  # fmt: skip


def _check_types(plan: TrainingPlan) -> None:
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        kinds = _KINDS[str(field.type)]
        is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is None and "None" in str(field.type):
            is_right = True
        holds_names = str(field.type) == "tuple[str, ...]" and isinstance(value, tuple)
        if holds_names and not all(isinstance(item, str) and item for item in value):
            is_right = False
        if not is_right:
            raise PlanError(
                f"`{field.name}` is {shown(value)}", hint=f"give {_KIND_NAMES[kinds[0]]}"
            )


def suggest(value: str, allowed: Any, what: str) -> str:
    """The allowed values, or the keys closest to `value`, as a hint."""
    near = closest(value, allowed)
    listed = ", ".join(f"`{a}`" for a in (near if what == "keys" and near else sorted(allowed)))
    return f"the closest {what}: {listed}" if what == "keys" and near else f"{what}: {listed}"
