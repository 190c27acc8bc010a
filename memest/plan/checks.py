"""Checks of a plan: the type and range of each key's value, and keys that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memest.errors import PlanError, shown
from memest.plan.keys import ALL_LINEAR, FLASH_ATTENTION_2, LOGGING, Key
from memest.plan.optimizers import OPTIMIZERS
from memest.plan.reading import read_table

if TYPE_CHECKING:
    from memest.plan.training_plan import TrainingPlan

Rows = Mapping[str, Key]
Rule = Callable[["TrainingPlan", Rows], object]  # returns what is wrong, or a false value

WORDS: Mapping[str, tuple[str, str]] = read_table(__file__, "checks.json")
"""Name of a rule -> message and hint; `{found}` stands for what the rule returned."""


def check(plan: TrainingPlan, rows: Rows) -> None:
    """Raise a `PlanError` if a value of `plan` is not allowed or contradicts another key. `rows`
    are the keys by name."""
    for row in rows.values():
        _check_type(row, getattr(plan, row.name))
    for row in rows.values():
        _check_value(row, getattr(plan, row.name))
    _check_rules(RULES, plan, rows)
    for row in rows.values():
        need, is_default = row.need, getattr(plan, row.name) == row.default
        if need is not None and not is_default and not getattr(plan, need.property):
            message = need.error.format(key=row.name, strategy=plan.strategy)
            raise PlanError(message, hint=need.hint)
    _check_rules(RULES_OF_SHARDS, plan, rows)


def _check_rules(rules: Mapping[str, Rule], plan: TrainingPlan, rows: Rows) -> None:
    for name, rule in rules.items():
        if fault := rule(plan, rows):
            logging = ", ".join(f"`{key}`" for key in LOGGING)
            values = {"plan": plan, "rows": rows, "found": fault, "logging": logging}
            message, hint = (text.format(**values) for text in WORDS[name])
            raise PlanError(message, hint=hint)


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


def _excessive_length(plan: TrainingPlan, rows: Rows) -> int:
    longest, bounds = max(plan.lengths, default=0), rows["seq_len"].bounds
    return longest if longest and bounds and not bounds.hold(longest) else 0


def _num_batches_without_validation(plan: TrainingPlan, rows: Rows) -> int:
    num_batches = plan.steps * plan.accumulate_grad_batches
    return num_batches if plan.validates and (plan.val_check_interval or 0) > num_batches else 0


RULES: Mapping[str, Rule] = {
    "no model": lambda p, _: not p.model_name.strip(),
    "no momentum": lambda p, _: p.momentum and not OPTIMIZERS[p.optim].has_momentum,
    "needs momentum": lambda p, _: (
        OPTIMIZERS[p.optim].needs_momentum
        and not (p.momentum or dict(p.optim_options).get("momentum"))
    ),
    "no nesterov": lambda p, _: (
        p.nesterov and not (p.momentum and OPTIMIZERS[p.optim].has_nesterov)
    ),
    "two lengths": lambda p, _: p.lengths and p.seq_len is not None,
    "too long": _excessive_length,
    "trainer options": lambda p, _: next(
        (key for key, _ in p.trainer_options if p.loop != "transformers" or key not in LOGGING), ""
    ),
    "late validation": _num_batches_without_validation,
    "loop of several": lambda p, _: p.loop != "lightning" and p.is_distributed,
    "clips by value": lambda p, _: p.loop != "lightning" and p.gradient_clip_algorithm != "norm",
    "flash in fp32": lambda p, _: (
        p.attn_implementation == FLASH_ATTENTION_2 and p.precision == "32-true" and not p.use_qlora
    ),
    "frozen adapters": lambda p, _: p.freeze and p.uses_adapters,
    "all and others": lambda p, _: (
        ALL_LINEAR in p.lora_target_modules and len(p.lora_target_modules) > 1
    ),
    "double quant": lambda p, _: p.double_quant and p.quant != "nf4",
    "padded": lambda p, _: p.padded and p.batch_size == 1,
    "no offload": lambda p, _: p.optim == "deepspeed_cpu" and not p.offloads,
    "offload": lambda p, _: p.offloads and p.optim != "deepspeed_cpu",
    "sharded bytes": lambda p, _: (
        p.use_qlora and (p.is_fsdp or p.strategy.startswith("deepspeed_stage_3"))
    ),
}
RULES_OF_SHARDS: Mapping[str, Rule] = {  # of keys whose strategy was checked
    "shard size": lambda p, _: p.shard_size is not None and p.world_size % p.shard_size,
    "fsdp2 unsharded": lambda p, _: p.strategy == "fsdp2" and p.sharding_strategy == "NO_SHARD",
    "fsdp2 in fp16": lambda p, _: p.strategy == "fsdp2" and p.precision == "16-mixed",
}

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"), "float": ((float, int), "a number"),
    "str": ((str,), "text"), "bool": ((bool,), "true or false"),
    "tuple": ((tuple,), "a list of names"),
}  # fmt: skip
"""Types of values by the annotation of a key, and the name of such a value for users."""


def _check_type(row: Key, value: Any) -> None:
    annotation = row.type.removesuffix(" | None")
    types, name = _TYPES[annotation.partition("[")[0]]
    is_valid = isinstance(value, types)
    if isinstance(value, bool):  # which is an `int` in Python
        is_valid = row.is_switch
    if value is None and "None" in row.type:
        is_valid = True
    if row.is_repeated and isinstance(value, tuple):
        is_valid = all(isinstance(item, str) and item for item in value)
    if not is_valid:
        raise PlanError(f"`{row.name}` is {shown(value)}", hint=f"give {name}")
