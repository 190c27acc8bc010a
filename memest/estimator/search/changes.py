"""Changes that make a plan smaller, with their cost, cheapest first."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Self

from memest.estimator.allocator.settings import EXPANDABLE
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.replay.replay import TracedPlan
from memest.estimator.search.commands import ModelFacts
from memest.plan import TrainingPlan
from memest.units import ceil_div

BF16_CAPABILITY = (8, 0)  # tensor cores with bf16 (CUDA C++ Programming Guide)
SHORTEST_SHARE = 8  # largest factor by which a text is shortened, down to `SHORTEST_TEXT`
SHORTEST_TEXT = 16


class Cost(IntEnum):
    """Kind of cost of a change, cheapest first; of combined changes, the most expensive counts."""

    words: str  # text for users

    def __new__(cls, value: int, words: str) -> Self:
        """Make a member whose value is a number and whose `words` are a text."""
        made = int.__new__(cls, value)
        made._value_, made.words = value, words
        return made

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
    """One change of a plan."""

    title: str
    cost: Cost
    price: str  # cost in plain words
    updates: Mapping[str, Any]  # keys of the plan, with their new values


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """Alternative changes of one kind, such as smaller batch sizes, the weakest first."""

    changes: tuple[Change, ...]
    is_graded: bool = False  # each change saves more than the one before: bisection works


NOT_TRIED = (
    "sharding and offload with other changes; predict it with `--strategy fsdp2 --devices 4`",
    "weights on the host, too; predict it with `--strategy deepspeed_stage_3_offload"
    " --optim deepspeed_cpu`",
)
"""Changes that advice leaves out: other hardware or another trainer than the plan's."""

NUMBERS_OF_GPUS = (2, 4, 8)


def apply(plan: TrainingPlan, changes: Iterable[Change]) -> TrainingPlan:
    """Return `plan` with `changes`, without the keys that contradict them.

    Such keys are `freeze` with adapters, which freeze the whole base, `padded` with one row, and
    `momentum` with another optimizer.

    Raises:
        MemestError: the changes contradict the plan.
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


def only(techniques: Iterable[Technique], keeps: Callable[[Change], bool]) -> list[Technique]:
    """Return `techniques` with only those changes for which `keeps` returns True."""
    kept = (replace(each, changes=tuple(filter(keeps, each.changes))) for each in techniques)
    return [technique for technique in kept if technique.changes]


def least_bytes(change: Change, traced: TracedPlan) -> int:
    """Return a lower bound of the peak bytes with `change`, from the traced plan without it.

    It is 0 for other number formats, quantised weights and shards.
    """
    program, keys = traced.program, change.updates.keys()
    if change.cost <= Cost.TIME or keys == {"seq_len"}:
        return program.most_held_bytes("params", "grads", "optimizer")
    if change.cost is Cost.OFFLOAD:
        is_same = set(traced.param_groups["params"]) == {"bfloat16"}  # DeepSpeed's own bf16 weights
        return program.forward_held_bytes() if is_same else 0
    if keys == {"optim"}:
        states = program.most_held_bytes("params", "grads")
        if str(change.updates["optim"]) in ("adam_8bit", "adamw_8bit"):  # as many of a byte or more
            states += sum(traced.param_groups["optimizer"].values())
        return max(states, program.forward_held_bytes())
    return program.most_held_bytes("params") if keys & {"use_lora", "freeze"} else 0


def techniques_for(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> tuple[Technique, ...]:
    """Return techniques that can make `plan` smaller on `gpu`, in the order of their cost."""
    found = (
        Technique(changes=tuple(changes(plan, facts, gpu)), is_graded=changes in _GRADED)
        for changes in _TECHNIQUES
    )
    return tuple(technique for technique in found if technique.changes)


def _change(title: str, cost: Cost, price: str, **updates: Any) -> Change:
    return Change(title=title, cost=cost, price=price, updates=updates)


def _attention(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    if plan.attn_implementation == "eager":
        title = "sdpa attention instead of eager"
        price = "nothing: the same attention by a fused kernel, up to rounding"
        yield _change(title, Cost.NOTHING, price, attn_implementation="sdpa")


def _allocator(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    if "expandable_segments" not in plan.alloc_conf:
        price = "nothing: cached memory is cut and joined in smaller pieces"
        alloc_conf = ",".join(filter(None, (plan.alloc_conf, EXPANDABLE)))
        yield _change("expandable segments", Cost.NOTHING, price, alloc_conf=alloc_conf)


def _offload(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    is_plain = plan.strategy == "auto" and plan.devices == 1 and plan.loop == "lightning"
    if is_plain and not plan.uses_adapters and plan.optim in _FULL_ADAM:
        yield _change(
            "the optimizer on the host (DeepSpeed)",
            Cost.OFFLOAD,
            "slower steps, by the host's arithmetic and its link; DeepSpeed and host memory",
            strategy="deepspeed_stage_2_offload",
            optim="deepspeed_cpu",
        )


def _sharding(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    is_plain = plan.strategy == "auto" and plan.devices <= 1 and plan.loop == "lightning"
    for number in NUMBERS_OF_GPUS if is_plain else ():
        title = f"sharded over {number} GPUs (FSDP2)"
        price = f"{number} GPUs and the traffic between them; as many times the samples a step"
        yield _change(title, Cost.HARDWARE, price, strategy="fsdp2", devices=number)


_FUSED = {"adamw": "adamw_fused", "adamw_single": "adamw_fused", "adam": "adam_fused"}
_FULL_ADAM = {
    "adamw": "adamw", "adamw_fused": "adamw", "adamw_single": "adamw",
    "adam": "adam", "adam_fused": "adam",
}  # fmt: skip


def _optimizer(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    if plan.optim in _FUSED:
        price = "nothing: the same update in one kernel, without temporaries"
        yield _change("fused optimizer", Cost.NOTHING, price, optim=_FUSED[plan.optim])
    if plan.optim in _FULL_ADAM:
        yield _change(
            "8-bit optimizer states",
            Cost.PRECISION,
            "moments are rounded to 8 bits in blocks; training may differ slightly",
            optim=f"{_FULL_ADAM[plan.optim]}_8bit",
        )
    base = _FULL_ADAM.get(plan.optim) or plan.optim.removesuffix("_8bit")
    if base in ("adam", "adamw") and not plan.optim.startswith("paged"):
        yield _change(
            "paged 8-bit optimizer states",
            Cost.PRECISION,
            "as 8-bit states, and the driver moves them between host and GPU: slower steps, host"
            " memory",
            optim=f"paged_{base}_8bit",
        )
    if plan.optim != "sgd":
        yield _change(
            "SGD without momentum",
            Cost.OPTIMIZER,
            "no adaptive step sizes: the learning rate must be tuned again, and transformers often"
            " train worse",
            optim="sgd",
        )


def _accumulation(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    """Yield every smaller micro-batch that divides the batch of a step, largest first."""
    total = plan.batch_size * plan.accumulate_grad_batches
    for size in range(plan.batch_size - 1, 0, -1):
        if total % size == 0 and total // size <= 1 << 16:
            yield _change(
                f"micro-batch {size}, accumulated {total // size} times",
                Cost.TIME,
                f"more and smaller kernels; still {total} samples a step, "
                "the loss being the mean over micro-batches",
                batch_size=size,
                accumulate_grad_batches=total // size,
            )


def _checkpointing(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    if not plan.checkpoints_activations:
        price = "about one more forward per step"
        yield _change("activation checkpointing", Cost.TIME, price, act_ckpt=True)


def _precision(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    has_bf16 = gpu.capability >= BF16_CAPABILITY
    mixed = "bf16-mixed" if has_bf16 else "16-mixed"
    if plan.precision == "32-true":
        scaled = "" if has_bf16 else " of small range, with loss scaling"
        price = f"matrix products in 16 bits{scaled}; weights and states stay in 32"
        yield _change(f"precision {mixed}", Cost.PRECISION, price, precision=mixed)
    if plan.precision in ("32-true", "bf16-mixed", "16-mixed"):
        emulated = "" if has_bf16 else "; this GPU has no bf16 tensor cores, so it is slow"
        price = f"weights, gradients and states in bf16: small updates can round away{emulated}"
        yield _change("precision bf16-true", Cost.PRECISION, price, precision="bf16-true")


def _vision(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    patterns = tuple(f"{name}.*" for name in facts.vision_modules)
    if not plan.uses_adapters and set(patterns) - set(plan.freeze):
        price = "the vision tower keeps its pretrained weights"
        frozen = tuple(dict.fromkeys((*plan.freeze, *patterns)))
        yield _change("vision tower frozen", Cost.TRAINED, price, freeze=frozen)


def _adapters(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    rank = f"rank {plan.lora_r}"
    if not plan.uses_adapters:
        price = "only low-rank adapters learn; often close to a full fine-tune, not always"
        yield _change(f"LoRA, {rank}", Cost.TRAINED, price, use_lora=True)
    if not plan.use_qlora:
        yield _change(
            f"QLoRA, {rank}",
            Cost.TRAINED,
            "only adapters learn, on a base rounded to 4 bits; unpacking it and activation"
            " checkpointing cost time",
            use_qlora=True,
        )
    if not plan.double_quant:
        yield _change(
            f"QLoRA, {rank}, double quantisation",
            Cost.TRAINED,
            "as QLoRA, with the scales rounded too",
            use_qlora=True,
            quant="nf4",
            double_quant=True,
        )


def _text(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    shortest = max(SHORTEST_TEXT, ceil_div(facts.seq_len, SHORTEST_SHARE))
    price = "longer texts are cut: what was cut is not learned"
    length = facts.seq_len // 2
    while length >= shortest:
        title = f"{length} tokens instead of {facts.seq_len}"
        yield _change(title, Cost.INPUTS, price, seq_len=length)
        length //= 2


def _image(plan: TrainingPlan, facts: ModelFacts, gpu: Gpu) -> Iterator[Change]:
    if facts.image_size is not None:
        size = facts.image_size // 2
        title = f"images of {size} pixels instead of {facts.image_size}"
        price = "less detail; the model was pretrained on larger images"
        yield _change(title, Cost.INPUTS, price, image_size=size)


_TECHNIQUES = (
    _attention, _allocator, _optimizer, _accumulation, _checkpointing, _precision, _vision,
    _adapters, _text, _image, _offload, _sharding,
)  # fmt: skip
_GRADED = (_accumulation, _text, _sharding)  # each change saves more than the one before
