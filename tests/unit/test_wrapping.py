"""Which layers FSDP wraps, and how FSDP2 is applied to them."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from memest.errors import PlanError
from memest.models_meta import sharding
from memest.plan import TrainingPlan


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()


class Model(nn.Module):
    _no_split_modules = ("Outer", "NotHere")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Outer(), Outer()])
        self.layers[1]._no_split_modules = ["Inner"]
        self.config = types.SimpleNamespace(use_cache=True)


def plan(**values: Any) -> TrainingPlan:
    return TrainingPlan(**{"model_name": "m", "strategy": "fsdp2", "devices": 4, **values})


def names(found: Iterable[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, _ in found]


def test_the_model_says_what_is_wrapped_and_so_do_models_inside_it() -> None:
    assert sharding.wrap_class_names(Model(), plan()) == ("Inner", "Outer")


def test_the_plan_wins_over_the_model() -> None:
    assert sharding.wrap_class_names(Model(), plan(wrap_classes=("Inner",))) == ("Inner",)


def test_a_class_that_is_not_there_is_an_error_with_those_that_are() -> None:
    with pytest.raises(PlanError, match="`wrap_classes` names `Block`, which no module of") as one:
        sharding.wrap_class_names(Model(), plan(wrap_classes=("Block",)))
    with pytest.raises(PlanError, match="`activation_checkpointing_policy` names `Block`"):
        sharding.checkpointed_class_names(Model(), plan(activation_checkpointing_policy=("Block",)))

    assert one.value.hint == "its layer classes: `Outer`"


def test_a_model_that_says_nothing_asks_for_the_classes() -> None:
    with pytest.raises(PlanError, match="`m` does not define which layers FSDP wraps"):
        sharding.wrap_class_names(nn.Linear(2, 3), plan())


def test_an_inner_layer_comes_before_the_one_around_it() -> None:
    found = names(sharding.modules_named(Model(), ["Outer", "Inner"]))

    assert found == ["layers.0.inner", "layers.0", "layers.1.inner", "layers.1"]


def test_a_module_in_two_places_is_found_once() -> None:
    model = Model()
    model.again = model.layers[0]

    assert names(sharding.modules_named(model, ["Outer"])) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("devices", "shard_size", "shape"), [(4, 2, (2, 2)), (4, None, (1, 4)), (32, None, (4, 8))]
)
def test_hybrid_sharding_replicates_over_nodes(
    devices: int, shard_size: int | None, shape: tuple[int, int]
) -> None:
    hybrid = plan(devices=devices, shard_size=shard_size, sharding_strategy="HYBRID_SHARD")

    assert sharding.hybrid_shape(hybrid) == shape
    assert sharding.hybrid_shape(plan()) is None


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Calls of `fully_shard`, in order."""
    calls: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(sharding, "fully_shard", lambda m, **options: calls.append((m, options)))
    return calls


def test_layers_are_sharded_before_the_model(
    sharded: list[tuple[nn.Module, dict[str, Any]]],
) -> None:
    model = Model()

    sharding.fully_shard_layers(model, plan(wrap_classes=("Outer",)), "mesh")

    assert [module for module, _ in sharded] == [model.layers[0], model.layers[1], model]
    assert all(options == {"mesh": "mesh"} for _, options in sharded)


def test_mixed_precision_gathers_in_16_bits_and_sums_in_32(
    sharded: list[tuple[nn.Module, dict[str, Any]]],
) -> None:
    mixed = plan(precision="bf16-mixed", sharding_strategy="SHARD_GRAD_OP")

    sharding.fully_shard_layers(Model(), mixed, "mesh")

    _, options = sharded[-1]
    assert options["reshard_after_forward"] is False
    assert options["mp_policy"].param_dtype is torch.bfloat16
    assert options["mp_policy"].reduce_dtype is torch.float32


def test_a_checkpointed_layer_is_sharded_as_its_wrapper_and_caches_nothing(
    sharded: list[tuple[nn.Module, dict[str, Any]]],
) -> None:
    model = Model()
    checked = plan(wrap_classes=("Outer",), activation_checkpointing_policy=("Outer",))

    sharding.fully_shard_layers(model, checked, "mesh")

    kinds = [type(module).__name__ for module, _ in sharded]
    assert kinds == ["CheckpointWrapper", "CheckpointWrapper", "Model"]
    assert model.config.use_cache is False
