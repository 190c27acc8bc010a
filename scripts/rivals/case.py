"""What a rival is asked and what it answers; plain values that cross from one Python to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIB, GIB = 2**20, 2**30

ADAMS = frozenset("adam adam_fused adamw adamw_fused adamw_single".split())
"""Optimizers with two moments in the parameters' dtype."""

EIGHT_BIT_ADAMS = frozenset("adam_8bit adamw_8bit".split())
PAGED_ADAMS = frozenset("paged_adam_8bit paged_adamw_8bit".split())


NOT_OF_THE_PLAN = ("name", "memory_limit", "gpu", "gpu_memory", "steps")
"""Fields in which two runs of one plan may differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measured run as a question: the plan, the model and the card, without the answer."""

    key: str
    """`file/name` of the run."""

    plan: Mapping[str, Any]
    """The fields of `TrainingPlan`."""

    hub_id: str
    config: Mapping[str, Any]
    """The model's config.json."""

    architecture: str
    """The class in it, such as `LlamaForCausalLM`."""

    modality: str
    num_params_published: int
    """What the Hub says of the checkpoint."""

    num_params: int
    """Of the module that was trained, adapters and all."""

    num_trainable_params: int
    limit_bytes: int
    """What the allocator could reserve."""

    gpu_bytes: int
    """The limit and the CUDA context: a card of which the limit is what is left."""

    @property
    def plan_alone(self) -> dict[str, Any]:
        """The plan without name and limits, which all runs of it share."""
        return {k: v for k, v in self.plan.items() if k not in NOT_OF_THE_PLAN}

    @property
    def technique(self) -> str:
        """`full`, `lora` or `qlora`."""
        if self.plan["use_qlora"]:
            return "qlora"
        return "lora" if self.plan["use_lora"] else "full"

    @property
    def is_causal(self) -> bool:
        """Whether it is a language model of one stack of decoder layers."""
        return self.architecture.endswith(("ForCausalLM", "LMHeadModel"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One answer."""

    allocated_bytes: int | None
    """Peak allocated; None where the tool has no such figure."""

    process_bytes: int | None
    """With cache and CUDA context; None where the tool leaves them out."""

    fits: bool
    """Its verdict on the card, by its own rule where it has one."""

    stretch: str = ""
    """What the tool cannot say and its nearest flag stands for; empty where the plan is expressed
    in full.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    """The figure by the tool's own categories, where it has some."""


def refuse_parts(case: Case) -> None:
    """What none of the closed formulas has a word for.

    Raises:
        Refused: parameters are frozen by name, or spread by a strategy.
    """
    if case.plan["strategy"] != "auto":
        raise Refused("a strategy that shards or offloads")
    if case.plan["freeze"]:
        raise Refused("part of the model is frozen by name")


class Refused(Exception):
    """The tool cannot express a run; the text says why, in few words, the same for like runs."""
