"""Changes of a model on the host before it moves to the GPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    prune,
    vector_to_parameters,
)

import memest
from memest.errors import UnsupportedError

LAST = torch.channels_last


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 5)
    )


def parametrized(make: Callable[[nn.Module], object], index: int = 0) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = network()
        make(model[index])
        return model

    return made


def loaded() -> nn.Module:
    model, buffer = network(), io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer))
    return model


def shrunk() -> nn.Module:
    model = network()
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())
    return model


def emptied() -> nn.Module:
    with torch.device("meta"):
        model = network()
    return model.to_empty(device="cpu").to(memory_format=LAST)


def trained() -> nn.Module:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return model


def averaged() -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(network())


CHANGES: dict[str, Callable[[], nn.Module]] = {
    "channels last": lambda: network().to(memory_format=LAST),
    "half": lambda: network().half(),
    "a dtype and channels last": lambda: network().to("cpu", torch.bfloat16, memory_format=LAST),
    "double and back": lambda: network().double().float(),
    "a type": lambda: network().type(torch.bfloat16),
    "a copy": lambda: copy.deepcopy(network()),
    "weight norm": parametrized(parametrizations.weight_norm),
    "spectral norm": parametrized(parametrizations.spectral_norm),
    "orthogonal": parametrized(parametrizations.orthogonal, index=4),
    "pruned": parametrized(lambda m: prune.l1_unstructured(m, "weight", amount=0.3)),
    "loaded": loaded,
    "a vector": shrunk,
    "meta first": emptied,
    "a step on the host": trained,
    "averaged": averaged,
    "shared": lambda: network().share_memory(),
    "from the GPU": lambda: network().cuda().cpu().to(memory_format=LAST),
    "synchronized": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(network()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_on_the_host_trains_on_the_gpu(name: str) -> None:
    with memest.virtual_gpu("h100-80gb"):
        model = CHANGES[name]()
        assert {p.device.type for p in model.parameters()} == {"cpu"}

        model.to(device=torch.device("cuda"))

        assert {p.device.type for p in model.parameters()} == {"cuda"}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(2, 3, 8, 8, device="cuda", dtype=next(model.parameters()).dtype)
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.to(dtype=torch.half, memory_format=LAST),
        lambda w: w.to(torch.float32, memory_format=LAST),
        lambda w: w.to(None, None, False, memory_format=LAST),
        lambda w: w.to(copy=True, dtype=torch.float32),
        lambda w: torch.zeros_like(w, memory_format=LAST),
        lambda w: w.clone(memory_format=LAST),
        lambda w: w.type_as(torch.ones(1, dtype=torch.half)),
        lambda w: w.to(torch.ones(1, dtype=torch.float64)),
    ],
)
def test_a_changed_weight_stays_on_the_host(change: Callable[[Tensor], Tensor]) -> None:
    with memest.virtual_gpu("h100-80gb"):
        changed = change(nn.Conv2d(3, 8, 3).weight)

        assert changed.device.type == "cpu"
        assert changed.cuda().is_cuda


def attention() -> Tensor:
    query = torch.randn(2, 4, 8, 16, requires_grad=True)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    return nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def recurrent() -> Tensor:
    return nn.LSTM(8, 16, 2, bidirectional=True, dropout=0.1, proj_size=4)(torch.randn(5, 2, 8))[0]


def packed() -> Tensor:
    sequences = nn.utils.rnn.pack_sequence([torch.randn(3, 8), torch.randn(2, 8)])
    return nn.GRU(8, 16)(sequences)[0].data


@pytest.mark.parametrize("run", [attention, recurrent, packed])
def test_layers_run_on_the_host(run: Callable[[], Tensor]) -> None:
    with memest.virtual_gpu("h100-80gb"):
        out = run()

        assert out.device.type == "cpu"
        out.sum().backward()


def test_a_number_of_the_host_fills_a_masked_weight_of_the_host() -> None:
    """`masked_fill` of the host takes a 0-d tensor: geoopt's curvature is a parameter."""
    with memest.virtual_gpu("h100-80gb"):
        curvature = -nn.Parameter(torch.ones(3))
        number = torch.zeros(())

        filled = torch.masked_fill(curvature, curvature.isclose(number), number)
        filled.masked_fill_(filled > 0, number)

        assert filled.device.type == "cpu"
        assert filled.shape == (3,)


def test_a_backward_on_the_host_stays_there() -> None:
    """`index_backward` (FunctionsManual.cpp) makes zeros on the device of the gradient."""
    with memest.virtual_gpu("h100-80gb"):
        layer = torch.nn.Linear(50, 50)
        rows = layer(torch.randn(8, 50))[torch.tensor([0, 1, 1])]
        (rows @ layer.weight).sum().backward()

        assert torch.cuda.max_memory_allocated() == 0
        assert layer.weight.grad is not None
        assert layer.weight.grad.device.type == "cpu"


def test_a_gradient_of_values_through_weights_of_the_host_is_refused() -> None:
    with memest.virtual_gpu("h100-80gb"):
        values = torch.randn(8, 50, requires_grad=True)
        loss = torch.nn.Linear(50, 50)(values).sum()

        text = (
            r"test_host_changes.py:\d+: a host tensor needs a gradient through weights on the host"
        )
        with pytest.raises(UnsupportedError, match=text):
            loss.backward()
