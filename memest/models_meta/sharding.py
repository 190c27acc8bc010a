"""How a model is divided by FSDP2 and its layers checkpointed, as Lightning's users do it.

One place for both sides: a prediction runs this on the meta device, a measured run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from memest.models_meta.assemble import half_dtype
from memest.models_meta.wrapping import (
    checkpointed_class_names,
    classes_named,
    modules_named,
    shard_size,
    stop_caching,
    wrap_class_names,
)
from memest.plan import TrainingPlan


def hybrid_shape(plan: TrainingPlan) -> tuple[int, int] | None:
    """Replicas and the GPUs that share each, under `HYBRID_SHARD`; None without it."""
    if plan.sharding_strategy != "HYBRID_SHARD":
        return None
    return plan.world_size // shard_size(plan), shard_size(plan)


def fully_shard_layers(model: nn.Module, plan: TrainingPlan, mesh: Any) -> None:
    """`fully_shard` on each layer to wrap, then on the model, in place; FSDP2.

    The mixed precision is that of Lightning's own example: parameters in 16 bits, gradients summed
    in 32. Checkpointed layers are wrapped first, as Lightning does for FSDP1.

    Args:
        model: what is divided.
        plan: of `strategy: fsdp2`.
        mesh: of one axis, or two under `HYBRID_SHARD`: replicas by shards.

    Raises:
        PlanError: a class to wrap or to checkpoint is not there.
    """
    layers = modules_named(model, wrap_class_names(model, plan))
    checkpoint_layers(model, plan)
    options: dict[str, Any] = {"mesh": mesh}
    if plan.precision.endswith("-mixed"):
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=half_dtype(plan), reduce_dtype=torch.float32
        )
    if plan.sharding_strategy == "SHARD_GRAD_OP":
        options["reshard_after_forward"] = False
    for name, _ in layers:  # by name: a checkpointed layer stands inside its wrapper now
        fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)


def checkpoint_layers(model: nn.Module, plan: TrainingPlan) -> None:
    """`activation_checkpointing_policy`: without reentering, as Lightning sets it up for FSDP1.

    Raises:
        PlanError: a class is not there.
    """
    names = checkpointed_class_names(model, plan)
    if names:
        stop_caching(model)
        classes = tuple(classes_named(model, names))
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, classes))
