"""Which Lightning strategy a plan becomes, and with which arguments."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch.strategies as lightning_strategies
import torch
from torch import nn

from memest import packages
from memest.errors import UnsupportedError
from memest.loops import lightning
from memest.loops.job import make_optimizer
from memest.plan import TrainingPlan


class Layer(nn.Linear):
    pass


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(2, 3)])


def plan(strategy: str, **values: Any) -> TrainingPlan:
    return TrainingPlan(model_name="m", **{"strategy": strategy, "devices": 4, **values})


def make(strategy: str, **values: Any) -> Any:
    return lightning.make_strategy(plan(strategy, **values), Model())


def test_one_gpu_needs_no_strategy() -> None:
    assert make("auto", devices=1) == "auto"


@pytest.mark.parametrize(
    ("strategy", "values", "options"),
    [
        ("auto", {}, {"gradient_as_bucket_view": False}),
        ("ddp", {"bucket_cap_mb": 100},
         {"gradient_as_bucket_view": False, "bucket_cap_mb": 100}),
        ("ddp_find_unused_parameters_true", {"gradient_as_bucket_view": True},
         {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    ],
)  # fmt: skip
def test_ddp_gets_what_the_plan_says_and_else_torchs_defaults(
    strategy: str, values: dict[str, Any], options: dict[str, Any]
) -> None:
    made = make(strategy, **values)

    assert type(made) is lightning_strategies.DDPStrategy
    assert made._ddp_kwargs == options


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of FSDPStrategy or DeepSpeedStrategy, which is not made."""
    arguments: dict[str, Any] = {}
    for name in ("FSDPStrategy", "DeepSpeedStrategy"):
        monkeypatch.setattr(lightning_strategies, name, lambda **options: arguments.update(options))
    return arguments


def test_fsdp_wraps_what_the_model_must_not_split(given: dict[str, Any]) -> None:
    make("fsdp")

    assert given == {"auto_wrap_policy": {Layer}, "sharding_strategy": "FULL_SHARD"}


def test_fsdp_gets_replicas_by_shards_and_checkpointed_classes(given: dict[str, Any]) -> None:
    make(
        "fsdp",
        sharding_strategy="HYBRID_SHARD",
        shard_size=2,
        activation_checkpointing_policy=("Layer",),
    )

    assert given["sharding_strategy"] == "HYBRID_SHARD"
    assert given["device_mesh"] == (2, 2)
    assert given["activation_checkpointing_policy"] == {Layer}


def test_lightning_takes_the_arguments_of_fsdp() -> None:
    made = make("fsdp", sharding_strategy="SHARD_GRAD_OP")

    assert made.sharding_strategy is torch.distributed.fsdp.ShardingStrategy.SHARD_GRAD_OP


@pytest.mark.parametrize(
    ("values", "sizes"),
    [({}, (4, 1)), ({"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}, (2, 2)),
     ({"sharding_strategy": "HYBRID_SHARD"}, (1, 4))],
)  # fmt: skip
def test_fsdp2_has_a_mesh_of_replicas_by_shards(
    values: dict[str, Any], sizes: tuple[int, int]
) -> None:
    made = make("fsdp2", **values)

    assert type(made) is lightning_strategies.ModelParallelStrategy
    assert (made._data_parallel_size, made._tensor_parallel_size) == sizes


def test_fsdp2_shards_over_one_axis_and_hybrid_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes: list[Any] = []
    monkeypatch.setattr(
        lightning.sharding, "fully_shard_layers", lambda model, plan, mesh: meshes.append(mesh)
    )
    mesh = {"data_parallel": "one axis"}

    lightning.shard_model(Model(), plan("fsdp2"), mesh)
    lightning.shard_model(Model(), plan("fsdp2", sharding_strategy="HYBRID_SHARD"), mesh)

    assert meshes == ["one axis", mesh]


@pytest.mark.parametrize(
    ("strategy", "stage", "of_optimizer", "of_params"),
    [
        ("deepspeed_stage_1", 1, False, False),
        ("deepspeed_stage_2", 2, False, False),
        ("deepspeed_stage_2_offload", 2, True, False),
        ("deepspeed_stage_3", 3, False, False),
        ("deepspeed_stage_3_offload", 3, True, True),
    ],
)
def test_deepspeed_gets_its_stage_and_what_lies_in_host_memory(
    strategy: str, stage: int, of_optimizer: bool, of_params: bool, given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(packages, "require", lambda *packages: None)
    optim = "deepspeed_cpu" if of_optimizer else "adamw"

    make(strategy, optim=optim, batch_size=3, reduce_bucket_size=5, allgather_bucket_size=7)

    assert given == {
        "stage": stage, "offload_optimizer": of_optimizer, "offload_parameters": of_params,
        "reduce_bucket_size": 5, "allgather_bucket_size": 7, "logging_batch_size_per_gpu": 3,
    }  # fmt: skip


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "deepspeed")


@pytest.mark.usefixtures("without_deepspeed")
def test_deepspeed_is_asked_for_where_it_is_not_installed() -> None:
    with pytest.raises(UnsupportedError, match="needs the package `deepspeed`") as caught:
        make("deepspeed_stage_2")
    offload = plan("deepspeed_stage_2_offload", optim="deepspeed_cpu")
    with pytest.raises(UnsupportedError, match="needs the package `deepspeed`"):
        make_optimizer(offload, [])

    assert caught.value.hint == "pip install deepspeed"
