"""Changes that make a plan smaller, with their cost, cheapest first."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Self

from memest.estimator.allocator.settings import EXPANDABLE
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.replay.replay import TracedPlan
from memest.estimator.search.commands import ModelFacts
from memest.plan import TrainingPlan
from memest.plan.reading import read_table
from memest.units import ceil_div

BF16_CAPABILITY = (8, 0)  # tensor cores with bf16 (CUDA C++ Programming Guide)
SHORTEST_SHARE = 8  # largest factor by which a text is shortened, down to `SHORTEST_TEXT`
SHORTEST_TEXT = 16


class Cost(IntEnum):
    """Kind of cost of a change, from cheap to expensive. A combination costs what its most
    expensive change costs."""

    words: str  # text for users

    def __new__(cls, value: int, words: str) -> Self:
        """Make a member of `value`, by which members are sorted, with a text (`words`) for
        users."""
        member = int.__new__(cls, value)
        member._value_, member.words = value, words
        return member

    NOTHING = 0, "same mathematics, no more time"
    TIME = 1, "same mathematics, more time"
    PRECISION = 2, "numbers of fewer bits"
    OFFLOAD = 3, "same mathematics, more time, host memory"
    OPTIMIZER = 4, "another optimizer"
    TRAINED = 5, "fewer parameters trained"
    INPUTS = 6, "smaller inputs"
    HARDWARE = 7, "more GPUs"


LAST_RESORTS = (Cost.OFFLOAD, Cost.HARDWARE)  # tried alone, if nothing cheaper fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a plan: new values of plan keys, with a title, its kind of cost, and its cost in
    words."""

    title: str
    cost: Cost
    price: str  # cost in plain words
    updates: Mapping[str, Any]  # keys of the plan, with their new values


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """Alternative changes of one kind, such as smaller batch sizes, from the weakest on."""

    changes: tuple[Change, ...]
    is_graded: bool = False  # each change saves more than the one before: bisection works


NOT_TRIED = (
    "sharding and offload with other changes; predict it with `--strategy fsdp2 --devices 4`",
    "weights on the host, too; predict it with `--strategy deepspeed_stage_3_offload"
    " --optim deepspeed_cpu`",
)
"""Changes that advice leaves out: other hardware or another trainer than the plan's."""


def apply(plan: TrainingPlan, changes: Iterable[Change]) -> TrainingPlan:
    """Return `plan` with `changes`. Plan keys that contradict the changes are reset. Adapters reset
    `freeze`, since they freeze the whole base model. A batch size of 1 resets `padded`. Another
    optimizer resets `momentum` and `nesterov`. Raise `MemestError` if the changes contradict the
    plan."""
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


def only(techniques: Iterable[Technique], keeps: Callable[[Change], bool]) -> list[Technique]:
    """Return `techniques` with only the changes for which `keeps(change)` is True. Techniques
    without a change are left out."""
    reduced = (replace(t, changes=tuple(filter(keeps, t.changes))) for t in techniques)
    return [technique for technique in reduced if technique.changes]


def least_bytes(change: Change, traced: TracedPlan) -> int:
    """Return a lower bound of the peak bytes of a plan with `change`. `traced` is the run of the
    plan without the change. Return 0, which is no bound, if the change sets another number format
    or image size, quantises weights or shards them. For an offload, return 0 unless all weights of
    the plan are bfloat16."""
    program, keys = traced.program, change.updates.keys()
    if change.cost <= Cost.TIME or keys == {"seq_len"}:
        return program.most_held_bytes("params", "grads", "optimizer")
    if change.cost is Cost.OFFLOAD:
        is_same = set(traced.param_groups["params"]) == {"bfloat16"}  # DeepSpeed's own bf16 weights
        return program.forward_held_bytes() if is_same else 0
    if keys == {"optim"}:
        state_bytes = program.most_held_bytes("params", "grads")
        if str(change.updates["optim"]) in ("adam_8bit", "adamw_8bit"):  # as many of a byte or more
            state_bytes += sum(traced.param_groups["optimizer"].values())
        return max(state_bytes, program.forward_held_bytes())
    return program.most_held_bytes("params") if keys & {"use_lora", "freeze"} else 0


WORDS: dict[str, tuple[str, str, str]] = read_table(__file__, "changes.json")
"""Name of a change -> cost, title and price; braces stand for values of the plan or the change."""

Found = Iterator[tuple[str, dict[str, Any]]]  # name of a change, and the keys that it updates


def techniques_for(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> tuple[Technique, ...]:
    """Return techniques that can make `plan` smaller on `gpu`, in the order of the search. `facts`
    gives module names, length and image size for the changes."""
    samples = plan.batch_size * plan.accumulate_grad_batches

    def change(name: str, updates: dict[str, Any]) -> Change:
        cost, *texts = WORDS[name]
        values = {"plan": plan, "facts": facts, "samples": samples, **updates}
        title, price = (text.format(**values) for text in texts)
        return Change(title=title, cost=Cost[cost], price=price, updates=updates)

    techniques = []
    for technique in _TECHNIQUES:
        changes = tuple(itertools.starmap(change, technique(plan, facts, gpu)))
        if changes:
            techniques.append(Technique(changes=changes, is_graded=technique in _GRADED))
    return tuple(techniques)


def _attention(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    if plan.attn_implementation == "eager":
        yield "sdpa", {"attn_implementation": "sdpa"}


def _allocator(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    if "expandable_segments" not in plan.alloc_conf:
        yield "segments", {"alloc_conf": ",".join(filter(None, (plan.alloc_conf, EXPANDABLE)))}


def _offload(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    is_plain = plan.strategy == "auto" and plan.devices == 1 and plan.loop == "lightning"
    if is_plain and not plan.uses_adapters and plan.optim in _FULL_ADAM:
        yield "offload", {"strategy": "deepspeed_stage_2_offload", "optim": "deepspeed_cpu"}


def _sharding(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    is_plain = plan.strategy == "auto" and plan.devices <= 1 and plan.loop == "lightning"
    for number in (2, 4, 8) if is_plain else ():
        yield "sharding", {"strategy": "fsdp2", "devices": number}


_FUSED = {"adamw": "adamw_fused", "adamw_single": "adamw_fused", "adam": "adam_fused"}
_FULL_ADAM = {
    "adamw": "adamw", "adamw_fused": "adamw", "adamw_single": "adamw",
    "adam": "adam", "adam_fused": "adam",
}  # fmt: skip


def _optimizer(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    if plan.optim in _FUSED:
        yield "fused", {"optim": _FUSED[plan.optim]}
    if plan.optim in _FULL_ADAM:
        yield "8bit", {"optim": f"{_FULL_ADAM[plan.optim]}_8bit"}
    base = _FULL_ADAM.get(plan.optim) or plan.optim.removesuffix("_8bit")
    if base in ("adam", "adamw") and not plan.optim.startswith("paged"):
        yield "paged", {"optim": f"paged_{base}_8bit"}
    if plan.optim != "sgd":
        yield "sgd", {"optim": "sgd"}


def _accumulation(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    """Yield changes that split the batch of a step into smaller micro-batches, the largest first.
    The batch of a step stays the same: a batch of 8 becomes 2 micro-batches of 4, then 4 of 2, then
    8 of 1. `facts` and `gpu` have no effect."""
    total = plan.batch_size * plan.accumulate_grad_batches
    for size in range(plan.batch_size - 1, 0, -1):
        if total % size == 0 and total // size <= 1 << 16:
            count = total // size
            yield "accumulation", {"batch_size": size, "accumulate_grad_batches": count}


def _checkpointing(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    if not plan.checkpoints_activations:
        yield "checkpointing", {"act_ckpt": True}


def _precision(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    has_bf16 = gpu.capability >= BF16_CAPABILITY
    if plan.precision == "32-true":
        mixed = "bf16-mixed" if has_bf16 else "16-mixed"
        yield mixed, {"precision": mixed}
    if plan.precision in ("32-true", "bf16-mixed", "16-mixed"):
        yield "bf16-true" if has_bf16 else "bf16-emulated", {"precision": "bf16-true"}


def _vision(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    patterns = tuple(f"{name}.*" for name in facts.vision_modules)
    if not plan.uses_adapters and set(patterns) - set(plan.freeze):
        yield "vision", {"freeze": tuple(dict.fromkeys((*plan.freeze, *patterns)))}


def _adapters(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    if not plan.uses_adapters:
        yield "lora", {"use_lora": True}
    if not plan.use_qlora:
        yield "qlora", {"use_qlora": True}
    if not plan.double_quant:
        yield "double", {"use_qlora": True, "quant": "nf4", "double_quant": True}


def _text(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    shortest = max(SHORTEST_TEXT, ceil_div(facts.seq_len, SHORTEST_SHARE))
    length = facts.seq_len // 2
    while length >= shortest:
        yield "text", {"seq_len": length}
        length //= 2


def _image(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Found:
    if facts.image_size is not None:
        yield "image", {"image_size": facts.image_size // 2}


_TECHNIQUES = (
    _attention, _allocator, _optimizer, _accumulation, _checkpointing, _precision, _vision,
    _adapters, _text, _image, _offload, _sharding,
)  # fmt: skip
_GRADED = (_accumulation, _text, _sharding)  # each change saves more than the one before
