"""Where a strategy keeps params, gradients and optimizer state; the same on the meta device."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memest.models_meta import sharding as states
from memest.models_meta.sharding import States


def sizes(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


class ZeroOptimizer:
    """What a probe finds of DeepSpeed: a wrapper around the optimizer over the master copies."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.averaged_gradients: dict[int, list[Tensor] | None] = {}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_whole_model_has_its_parameters_gradients_and_moments(device: str) -> None:
    model = nn.Linear(3, 5, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    kept = States(model, optimizer)
    assert (sizes(kept.params()), sizes(kept.grads()), sizes(kept.optimizer())) == ([15, 5], [], [])

    model(torch.ones(2, 3, device=device)).sum().backward()
    optimizer.step()

    assert sizes(kept.grads()) == [15, 5]
    assert sizes(t for t in kept.optimizer() if t.dim()) == [15, 15, 5, 5]


def test_gradients_of_one_storage_and_offset_count_once_on_the_meta_device() -> None:
    """Where no tensor has an address: the pieces of a buffer lie at offsets of their own."""
    model = nn.Linear(3, 5, device="meta")
    buffer = torch.empty(20, device="meta")
    model.weight.grad, model.bias.grad = buffer[:15].view(5, 3), buffer[15:]
    optimizer = ZeroOptimizer(torch.optim.SGD(model.parameters()))
    optimizer.averaged_gradients[0] = [buffer[:15], torch.empty(7, device="meta")]

    assert sizes(States(model, optimizer).grads()) == [15, 5, 7]


def test_fsdp1_keeps_the_shards_of_its_flat_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    flat: Any = types.SimpleNamespace(
        _local_shard=torch.ones(7), grad=None, _saved_grad_shard=torch.ones(3)
    )
    plain: Any = nn.Parameter(torch.ones(2))
    monkeypatch.setattr(states, "_flat_parameters", lambda model: [flat, plain])

    kept = States(nn.Linear(3, 5), torch.optim.SGD([plain]))

    assert (sizes(kept.params()), sizes(kept.grads())) == ([7, 2], [3])


def test_the_local_part_counts_of_a_tensor_over_several_gpus() -> None:
    whole: Any = nn.Parameter(torch.ones(8))
    whole._local_tensor = torch.ones(2)
    model = nn.Module()
    model.weight = whole

    assert sizes(States(model, torch.optim.SGD([whole])).params()) == [2]


def test_deepspeed_2_keeps_averaged_and_accumulated_gradients_and_masters() -> None:
    model = nn.Linear(3, 5, bias=False)
    master = nn.Parameter(torch.ones(4))
    optimizer: Any = ZeroOptimizer(torch.optim.SGD([master]))
    accumulated = torch.ones(6)
    model.weight.grad_accum = accumulated  # type: ignore[attr-defined]
    optimizer.averaged_gradients = {0: None, 1: [torch.ones(11)]}
    optimizer.all_grad_tensors = {0: [accumulated, torch.ones(13)]}

    kept = States(model, optimizer)

    assert sizes(kept.grads()) == [11, 6, 13]
    assert sizes(kept.optimizer()) == [4]


def test_deepspeed_3_keeps_partitions_a_flat_buffer_and_masters() -> None:
    model = nn.Linear(3, 5, bias=False)
    partition, master = torch.ones(4), torch.ones(4, dtype=torch.float64)
    model.weight.ds_tensor = partition  # type: ignore[attr-defined]
    model.weight.data = torch.ones(0)
    optimizer: Any = ZeroOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    optimizer.optimizer.param_groups[0]["params"] = []
    optimizer.grad_partitions_flat_buffer = torch.ones(9)
    optimizer.fp32_partitioned_groups_flat = [master]

    kept = States(model, optimizer)

    assert list(kept.params()) == [partition]
    assert (sizes(kept.grads()), sizes(kept.optimizer())) == ([9], [4])


def test_a_master_that_is_the_parameters_own_partition_is_no_copy() -> None:
    """In fp32 there is nothing to copy to."""
    model = nn.Linear(3, 5, bias=False)
    model.weight.ds_tensor = torch.ones(4)  # type: ignore[attr-defined]
    optimizer: Any = ZeroOptimizer(torch.optim.SGD([model.weight]))
    optimizer.optimizer.param_groups[0]["params"] = [model.weight.ds_tensor.view(-1)]

    assert sizes(States(model, optimizer).optimizer()) == []
