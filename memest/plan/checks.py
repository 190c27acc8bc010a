"""Checks of a plan: types and ranges from the key rows, and keys that contradict each other."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memest.errors import PlanError, shown
from memest.plan.keys import ALL_LINEAR, FLASH_ATTENTION_2, LOGGING, Key
from memest.plan.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from memest.plan.training_plan import TrainingPlan


def check(plan: "TrainingPlan", rows: Mapping[str, Key]) -> None:
    """Raise a `PlanError` if a value of `plan` does not exist or contradicts another key."""
    for row in rows.values():
        _check_type(row, getattr(plan, row.name))
    for row in rows.values():
        _check_value(row, getattr(plan, row.name))
    if not plan.model_name.strip():
        raise PlanError("`model_name` is empty", hint="`memest models` lists what is bundled")
    _check_combinations(plan, rows)
    for row in rows.values():
        if row.need is None or getattr(plan, row.name) == row.default or row.need.is_met(plan):
            continue
        message = row.need.error.format(key=row.name, strategy=plan.strategy)
        raise PlanError(message, hint=row.need.hint)
    if plan.shard_size is not None and plan.world_size % plan.shard_size:
        raise PlanError(
            f"`shard_size` {plan.shard_size} does not divide {plan.world_size} GPUs",
            hint="give a divisor of `devices`",
        )
    if plan.strategy == "fsdp2" and plan.sharding_strategy == "NO_SHARD":
        raise PlanError("`fsdp2` has no `NO_SHARD`", hint="use `ddp`, which keeps all on every GPU")
    if plan.strategy == "fsdp2" and plan.precision == "16-mixed":
        raise PlanError(
            "Lightning's `ModelParallelStrategy`, which is `fsdp2`, refuses `16-mixed`",
            hint="use `bf16-mixed`, or `strategy: fsdp`",
        )


def _check_value(row: Key, value: Any) -> None:
    if value is None:
        return
    if row.choices and value not in row.choices:
        raise PlanError(
            f"`{row.name}` cannot be {shown(value)}",
            hint=f"allowed: {', '.join(f'`{choice}`' for choice in sorted(row.choices))}",
        )
    if row.bounds and not row.bounds.hold(value):
        raise PlanError(f"`{row.name}` is {shown(value)}", hint=row.bounds.hint)


def _check_combinations(plan: "TrainingPlan", rows: Mapping[str, Key]) -> None:
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
    most = rows["seq_len"].bounds
    if plan.lengths and most and not most.hold(max(plan.lengths)):
        raise PlanError(
            f"`lengths` has {max(plan.lengths)}", hint=f"give at most {most.high} tokens"
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


def _check_loop(plan: "TrainingPlan") -> None:
    for key, _ in plan.trainer_options:
        if plan.loop != "transformers" or key not in LOGGING:
            raise PlanError(
                f"`trainer_options` has `{key}`, with `loop` `{plan.loop}`",
                hint=f"with `loop: transformers` it takes {', '.join(f'`{k}`' for k in LOGGING)}",
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


def _check_adapters(plan: "TrainingPlan") -> None:
    if ALL_LINEAR in plan.lora_target_modules and len(plan.lora_target_modules) > 1:
        raise PlanError(
            f"`lora_target_modules` names `{ALL_LINEAR}` and other modules",
            hint=f"give `{ALL_LINEAR}` alone, or names alone",
        )
    if plan.double_quant and plan.quant != "nf4":
        raise PlanError(
            f"`double_quant` does not go with `quant` `{plan.quant}`, whose scales are fp32",
            hint="leave one of them out",
        )


def _check_strategy(plan: "TrainingPlan") -> None:
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
            f"`{strategy}` cannot shard a quantised base: its weights are packed bytes next to"
            " 16-bit ones",
            hint="use `ddp` or `deepspeed_stage_2`, or LoRA without quantisation",
        )


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "str": (str,), "bool": (bool,), "float": (float, int),
    "tuple[str, ...]": (tuple,), "tuple[int, ...]": (tuple,),
    "tuple[tuple[str, Any], ...]": (tuple,),
}  # fmt: skip
_KIND_NAMES = {
    int: "a whole number", str: "text", bool: "true or false", float: "a number",
    tuple: "a list of names",
}  # fmt: skip


def _check_type(row: Key, value: Any) -> None:
    kinds = _KINDS[row.type.removesuffix(" | None")]
    is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if value is None and "None" in row.type:
        is_right = True
    if row.is_repeated and isinstance(value, tuple):
        is_right = all(isinstance(item, str) and item for item in value)
    if not is_right:
        raise PlanError(f"`{row.name}` is {shown(value)}", hint=f"give {_KIND_NAMES[kinds[0]]}")
