"""The Lightning strategy of a plan, as a user of Lightning 2.6 would write it."""

from __future__ import annotations

from typing import Any

from torch import nn

from memest.models_meta.sharding import (
    checkpointed_class_names,
    classes_named,
    fully_shard_layers,
    hybrid_shape,
    wrap_class_names,
)
from memest.plan import TrainingPlan


def make_strategy(plan: TrainingPlan, model: nn.Module) -> Any:
    """Return the value of `Trainer(strategy=...)`: a strategy object, or `auto` on one GPU.

    Raises:
        PlanError: a class to wrap is not there.
        UnsupportedError: DeepSpeed is not installed.
    """
    if plan.is_ddp:
        return _ddp(plan)
    if plan.strategy == "fsdp":
        return _fsdp(plan, model)
    if plan.strategy == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        # replicas by shards, for HSDP's `fully_shard` in `shard_model`
        return ModelParallelStrategy(*(hybrid_shape(plan) or (plan.world_size, 1)))
    if plan.is_deepspeed:
        return _deepspeed(plan)
    return "auto"


def _ddp(plan: TrainingPlan) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    options: dict[str, Any] = {"gradient_as_bucket_view": plan.gradient_as_bucket_view}
    if plan.bucket_cap_mb is not None:
        options["bucket_cap_mb"] = plan.bucket_cap_mb
    if plan.strategy == "ddp_find_unused_parameters_true":
        options["find_unused_parameters"] = True
    return DDPStrategy(**options)


def _fsdp(plan: TrainingPlan, model: nn.Module) -> Any:
    from lightning.pytorch.strategies import FSDPStrategy

    sharding: Any = plan.sharding_strategy
    options: dict[str, Any] = {}
    shape = hybrid_shape(plan)
    if shape:
        options["device_mesh"] = shape
    checkpointed = checkpointed_class_names(model, plan)
    if checkpointed:
        options["activation_checkpointing_policy"] = classes_named(model, checkpointed)
    return FSDPStrategy(
        auto_wrap_policy=classes_named(model, wrap_class_names(model, plan)),
        sharding_strategy=sharding,
        **options,
    )


def _deepspeed(plan: TrainingPlan) -> Any:
    """Make Lightning's registered strategy of that name, with the plan's bucket sizes.

    `logging_batch_size_per_gpu` keeps Lightning from reading the data loader.
    """
    from memest.packages import require

    require("deepspeed")
    from lightning.pytorch.strategies import DeepSpeedStrategy

    stage = int(plan.strategy.removeprefix("deepspeed_stage_")[0])
    return DeepSpeedStrategy(
        stage=stage,
        offload_optimizer=plan.offloads,
        offload_parameters=plan.offloads and stage == 3,
        reduce_bucket_size=plan.reduce_bucket_size,
        allgather_bucket_size=plan.allgather_bucket_size,
        logging_batch_size_per_gpu=plan.batch_size,
    )


def shard_model(model: nn.Module, plan: TrainingPlan, mesh: Any) -> None:
    """Divide the model over the mesh of Lightning's `ModelParallelStrategy`, in place."""
    is_hybrid = hybrid_shape(plan) is not None
    fully_shard_layers(model, plan, mesh if is_hybrid else mesh["data_parallel"])
