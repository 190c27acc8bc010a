"""Changes that make a plan smaller, with their cost, cheapest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from memest.estimator.allocator.settings import EXPANDABLE
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.replay.simulated import TracedPlan
from memest.estimator.search.commands import ModelFacts
from memest.plan import TrainingPlan

BF16_CAPABILITY = (8, 0)
"""Compute capability from which tensor cores multiply bf16 (CUDA C++ Programming Guide, table of
arithmetic).
"""

SHORTEST_SHARE = 8
"""A text is not cut below this part of its length, nor below `SHORTEST_TEXT` tokens."""

SHORTEST_TEXT = 16


class Cost(IntEnum):
    """Cost of a change, cheapest first; a combination has the cost of its dearest change."""

    NOTHING = 0
    TIME = 1
    PRECISION = 2
    OFFLOAD = 3
    OPTIMIZER = 4
    TRAINED = 5
    INPUTS = 6
    HARDWARE = 7

    @property
    def words(self) -> str:
        """Text for a reader."""
        return _COST_WORDS[self]


_COST_WORDS = {
    Cost.NOTHING: "same mathematics, no more time",
    Cost.TIME: "same mathematics, more time",
    Cost.PRECISION: "numbers of fewer bits",
    Cost.OFFLOAD: "same mathematics, more time, host memory",
    Cost.OPTIMIZER: "another optimizer",
    Cost.TRAINED: "fewer parameters trained",
    Cost.INPUTS: "smaller inputs",
    Cost.HARDWARE: "more GPUs",
}

LAST_RESORTS = (Cost.OFFLOAD, Cost.HARDWARE)
"""Costs that are tried without other changes, if nothing cheaper fits. They need another trainer or
hardware.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of a plan."""

    title: str
    cost: Cost
    price: str
    """Cost in plain words."""

    updates: Mapping[str, Any]
    """Keys of the plan, with their new values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """Alternative changes of one thing, mildest first."""

    changes: tuple[Change, ...]
    is_graded: bool = False
    """True if each change saves more than the one before, so that bisection finds the mildest
    enough.
    """


NOT_TRIED = (
    "sharding and offload with other changes; predict it with `--strategy fsdp2 --devices 4`",
    "weights on the host, too; predict it with `--strategy deepspeed_stage_3_offload"
    " --optim deepspeed_cpu`",
)
"""Further help that needs other hardware or another trainer than the plan's."""

NUMBERS_OF_GPUS = (2, 4, 8)


def apply(plan: TrainingPlan, changes: Iterable[Change]) -> TrainingPlan:
    """Return `plan` with `changes`, without the keys that contradict them.

    These are `freeze` under adapters, which freeze the whole base, `padded` with one row, and
    `momentum` with another optimizer.

    Raises:
        MemestError: the changes do not go with the plan.
    """
    updates: dict[str, Any] = {}
    for change in changes:
        updates |= change.updates
    if plan.lengths and "seq_len" in updates:
        longest = updates.pop("seq_len")
        updates["lengths"] = tuple(min(length, longest) for length in plan.lengths)
    if updates.get("use_lora") or updates.get("use_qlora"):
        updates["freeze"] = ()
    if updates.get("batch_size") == 1 and plan.padded:
        updates["padded"] = None
    if updates.get("optim", plan.optim) != plan.optim:
        updates |= {"momentum": 0.0, "nesterov": False}
    return replace(plan, **updates)


def that_may_be_enough(
    techniques: Iterable[Technique], traced: TracedPlan, limit_bytes: int
) -> list[Technique]:
    """Return the changes that may make a plan fit `limit_bytes`; `traced` is the plan's run.

    Changes that are known to need more are left out.
    """
    kept = (
        replace(
            each, changes=tuple(c for c in each.changes if least_bytes(c, traced) <= limit_bytes)
        )
        for each in techniques
    )
    return [technique for technique in kept if technique.changes]


def least_bytes(change: Change, traced: TracedPlan) -> int:
    """Return a lower bound of the memory of a run with `change`, from the run without it.

    Images of another size may need another table of positions. For other number formats, quantised
    weights and shards the bound is 0.
    """
    program, keys = traced.program, change.updates.keys()
    if change.cost <= Cost.TIME or keys == {"seq_len"}:
        return program.most_held_bytes("params", "grads", "optimizer")
    if change.cost is Cost.OFFLOAD:
        is_same = set(traced.param_groups["params"]) == {"bfloat16"}  # DeepSpeed's own format
        return program.forward_held_bytes() if is_same else 0
    if keys == {"optim"}:
        states = program.most_held_bytes("params", "grads")
        if str(change.updates["optim"]) in ("adam_8bit", "adamw_8bit"):  # as many of a byte or more
            states += sum(traced.param_groups["optimizer"].values())
        return max(states, program.forward_held_bytes())
    return program.most_held_bytes("params") if keys & {"use_lora", "freeze"} else 0


def techniques_for(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> tuple[Technique, ...]:
    """Return techniques that can make `plan` smaller, in the order of their cost."""
    found = (
        _attention(plan),
        _allocator(plan),
        _optimizer(plan),
        _accumulation(plan),
        _checkpointing(plan),
        _precision(plan, gpu),
        _vision(plan, facts),
        _adapters(plan),
        _text(plan, facts),
        _image(facts),
        _offload(plan),
        _sharding(plan),
    )
    return tuple(technique for technique in found if technique.changes)


def _attention(plan: TrainingPlan) -> Technique:
    if plan.attn_implementation != "eager":
        return Technique(changes=())
    change = Change(
        title="sdpa attention instead of eager",
        cost=Cost.NOTHING,
        price="nothing: the same attention by a fused kernel, up to rounding",
        updates={"attn_implementation": "sdpa"},
    )
    return Technique(changes=(change,))


def _allocator(plan: TrainingPlan) -> Technique:
    if "expandable_segments" in plan.alloc_conf:
        return Technique(changes=())
    change = Change(
        title="expandable segments",
        cost=Cost.NOTHING,
        price="nothing: cached memory is cut and joined in smaller pieces",
        updates={"alloc_conf": ",".join(filter(None, (plan.alloc_conf, EXPANDABLE)))},
    )
    return Technique(changes=(change,))


def _offload(plan: TrainingPlan) -> Technique:
    is_plain = plan.strategy == "auto" and plan.devices == 1 and plan.loop == "lightning"
    if not is_plain or plan.uses_adapters or plan.optim not in _FULL_ADAM:
        return Technique(changes=())
    change = Change(
        title="the optimizer on the host (DeepSpeed)",
        cost=Cost.OFFLOAD,
        price="slower steps, by the host's arithmetic and its link; DeepSpeed and host memory",
        updates={"strategy": "deepspeed_stage_2_offload", "optim": "deepspeed_cpu"},
    )
    return Technique(changes=(change,))


def _sharding(plan: TrainingPlan) -> Technique:
    if plan.strategy != "auto" or plan.devices > 1 or plan.loop != "lightning":
        return Technique(changes=())
    changes = (
        Change(
            title=f"sharded over {number} GPUs (FSDP2)",
            cost=Cost.HARDWARE,
            price=f"{number} GPUs and the traffic between them; as many times the samples a step",
            updates={"strategy": "fsdp2", "devices": number},
        )
        for number in NUMBERS_OF_GPUS
    )
    return Technique(changes=tuple(changes), is_graded=True)


_FUSED = {"adamw": "adamw_fused", "adamw_single": "adamw_fused", "adam": "adam_fused"}
_FULL_ADAM = {
    "adamw": "adamw", "adamw_fused": "adamw", "adamw_single": "adamw",
    "adam": "adam", "adam_fused": "adam",
}  # fmt: skip


def _optimizer(plan: TrainingPlan) -> Technique:
    changes = []
    if plan.optim in _FUSED:
        changes.append(
            Change(
                title="fused optimizer",
                cost=Cost.NOTHING,
                price="nothing: the same update in one kernel, without temporaries",
                updates={"optim": _FUSED[plan.optim]},
            )
        )
    if plan.optim in _FULL_ADAM:
        changes.append(
            Change(
                title="8-bit optimizer states",
                cost=Cost.PRECISION,
                price="moments are rounded to 8 bits in blocks; training may differ slightly",
                updates={"optim": f"{_FULL_ADAM[plan.optim]}_8bit"},
            )
        )
    base = _FULL_ADAM.get(plan.optim) or plan.optim.removesuffix("_8bit")
    if base in ("adam", "adamw") and not plan.optim.startswith("paged"):
        changes.append(
            Change(
                title="paged 8-bit optimizer states",
                cost=Cost.PRECISION,
                price="as 8-bit states, and the driver moves them between host and GPU: slower "
                "steps, host memory",
                updates={"optim": f"paged_{base}_8bit"},
            )
        )
    if plan.optim != "sgd":
        changes.append(
            Change(
                title="SGD without momentum",
                cost=Cost.OPTIMIZER,
                price="no adaptive step sizes: the learning rate must be tuned again, and "
                "transformers often train worse",
                updates={"optim": "sgd"},
            )
        )
    return Technique(changes=tuple(changes))


def _accumulation(plan: TrainingPlan) -> Technique:
    """Every smaller micro-batch that divides the batch of a step, largest first."""
    total = plan.batch_size * plan.accumulate_grad_batches
    sizes = [
        n for n in range(plan.batch_size - 1, 0, -1) if total % n == 0 and total // n <= 1 << 16
    ]
    changes = (
        Change(
            title=f"micro-batch {size}, accumulated {total // size} times",
            cost=Cost.TIME,
            price=f"more and smaller kernels; still {total} samples a step, "
            "the loss being the mean over micro-batches",
            updates={"batch_size": size, "accumulate_grad_batches": total // size},
        )
        for size in sizes
    )
    return Technique(changes=tuple(changes), is_graded=True)


def _checkpointing(plan: TrainingPlan) -> Technique:
    if plan.act_ckpt or plan.kbit_checkpoints:
        return Technique(changes=())
    change = Change(
        title="activation checkpointing",
        cost=Cost.TIME,
        price="about one more forward per step",
        updates={"act_ckpt": True},
    )
    return Technique(changes=(change,))


def _precision(plan: TrainingPlan, gpu: Gpu) -> Technique:
    has_bf16 = gpu.capability >= BF16_CAPABILITY
    mixed = "bf16-mixed" if has_bf16 else "16-mixed"
    changes = []
    if plan.precision == "32-true":
        scaled = "" if has_bf16 else " of small range, with loss scaling"
        changes.append(
            Change(
                title=f"precision {mixed}",
                cost=Cost.PRECISION,
                price=f"matrix products in 16 bits{scaled}; weights and states stay in 32",
                updates={"precision": mixed},
            )
        )
    if plan.precision in ("32-true", "bf16-mixed", "16-mixed"):
        emulated = "" if has_bf16 else "; this GPU has no bf16 tensor cores, so it is slow"
        changes.append(
            Change(
                title="precision bf16-true",
                cost=Cost.PRECISION,
                price="weights, gradients and states in bf16: small updates can round away"
                + emulated,
                updates={"precision": "bf16-true"},
            )
        )
    return Technique(changes=tuple(changes))


def _vision(plan: TrainingPlan, facts: ModelFacts) -> Technique:
    patterns = tuple(f"{name}.*" for name in facts.vision_modules)
    if plan.uses_adapters or not set(patterns) - set(plan.freeze):
        return Technique(changes=())
    change = Change(
        title="vision tower frozen",
        cost=Cost.TRAINED,
        price="the vision tower keeps its pretrained weights",
        updates={"freeze": tuple(dict.fromkeys((*plan.freeze, *patterns)))},
    )
    return Technique(changes=(change,))


def _adapters(plan: TrainingPlan) -> Technique:
    changes = []
    if not plan.uses_adapters:
        changes.append(
            Change(
                title=f"LoRA, rank {plan.lora_r}",
                cost=Cost.TRAINED,
                price="only low-rank adapters learn; often close to a full fine-tune, not always",
                updates={"use_lora": True},
            )
        )
    if not plan.use_qlora:
        changes.append(
            Change(
                title=f"QLoRA, rank {plan.lora_r}",
                cost=Cost.TRAINED,
                price="only adapters learn, on a base rounded to 4 bits; unpacking it and"
                " activation checkpointing cost time",
                updates={"use_qlora": True},
            )
        )
    if not plan.double_quant:
        changes.append(
            Change(
                title=f"QLoRA, rank {plan.lora_r}, double quantisation",
                cost=Cost.TRAINED,
                price="as QLoRA, with the scales rounded too",
                updates={"use_qlora": True, "quant": "nf4", "double_quant": True},
            )
        )
    return Technique(changes=tuple(changes))


def _text(plan: TrainingPlan, facts: ModelFacts) -> Technique:
    shortest = max(SHORTEST_TEXT, -(-facts.seq_len // SHORTEST_SHARE))
    lengths, length = [], facts.seq_len // 2
    while length >= shortest:
        lengths.append(length)
        length //= 2
    changes = (
        Change(
            title=f"{length} tokens instead of {facts.seq_len}",
            cost=Cost.INPUTS,
            price="longer texts are cut: what was cut is not learned",
            updates={"seq_len": length},
        )
        for length in lengths
    )
    return Technique(changes=tuple(changes), is_graded=True)


def _image(facts: ModelFacts) -> Technique:
    if facts.image_size is None:
        return Technique(changes=())
    size = facts.image_size // 2
    change = Change(
        title=f"images of {size} pixels instead of {facts.image_size}",
        cost=Cost.INPUTS,
        price="less detail; the model was pretrained on larger images",
        updates={"image_size": size},
    )
    return Technique(changes=(change,))
