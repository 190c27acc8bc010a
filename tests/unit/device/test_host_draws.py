"""The host's generator after weights without data, against that after real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memest
from memest.estimator.gpu import host
from memest.estimator.gpu.host import HostRng, num_draws
from memest.estimator.ops.random import skip_mt19937

aten = torch.ops.aten
COUNTED = {
    "uniform_": {torch.float32: (16, 17, 33, 1000, 4096), torch.float64: (32, 34, 66, 2000, 8192)},
    "normal_": {torch.float32: (16, 33, 49, 1016, 4096), torch.float64: (32, 66, 98, 2032, 8192)},
}
"""Draws of torch 2.11.0 on the host, for the sizes below; of 16 bits they are as of float32."""

SIZES = (16, 17, 33, 1000, 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", COUNTED)
def test_draws_are_those_counted(name: str, dtype: torch.dtype) -> None:
    func = getattr(aten, name).default
    like = torch.float64 if dtype is torch.float64 else torch.float32

    found = tuple(num_draws(func, torch.empty(size, dtype=dtype)) for size in SIZES)
    assert found == COUNTED[name][like]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [5, *SIZES])
@pytest.mark.parametrize("name", COUNTED)
def test_a_generator_moves_on_as_far_as_the_real_one(
    name: str, count: int, dtype: torch.dtype
) -> None:
    real, skipped = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    tensor = torch.empty(count, dtype=dtype)

    getattr(tensor, name)(generator=real)
    HostRng().skip(getattr(aten, name).default, tensor, skipped)

    assert torch.equal(real.get_state(), skipped.get_state())


def model() -> nn.Module:
    made = nn.Sequential(nn.Embedding(3001, 401), nn.Linear(401, 999), nn.LSTM(999, 77, 2))
    for each in made.parameters():
        if each.dim() > 1:
            nn.init.trunc_normal_(each, std=0.02)
    return made


def shuffled() -> list[int]:
    return torch.randperm(50).tolist()


def state() -> list[int]:
    return torch.get_rng_state().tolist()


@pytest.mark.parametrize("read", [shuffled, state])
def test_data_are_shuffled_as_after_real_weights(read: Callable[[], list[int]]) -> None:
    torch.manual_seed(3)
    model()
    expected = read()

    with memest.virtual_gpu("h100-80gb"):
        torch.manual_seed(3)
        model()
        assert read() == expected
        model()
        torch.manual_seed(3)
        model()
        assert read() == expected


def test_noise_too_large_to_be_real_is_counted() -> None:
    torch.manual_seed(3)
    torch.randn(3000, 3001)
    expected = shuffled()

    with memest.virtual_gpu("h100-80gb"):
        torch.manual_seed(3)
        torch.randn(3000, 3001)
        assert shuffled() == expected


@pytest.mark.parametrize(
    ("before", "count"),
    [(0, 624), (0, 625), (5, 1000), (623, 1248), (100, 1249), (624, 3_000_001), (1, 1872)],
)
def test_a_jump_is_as_many_draws(before: int, count: int) -> None:
    drawn, jumped = (torch.Generator().manual_seed(count) for _ in range(2))
    for generator in (drawn, jumped):
        torch.rand(before, generator=generator)

    torch.empty(count, dtype=torch.uint8).random_(generator=drawn)
    skip_mt19937(jumped, count)

    assert torch.equal(jumped.get_state(), drawn.get_state())


def test_a_model_of_billions_takes_no_longer_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is shuffled after it is as after a real one."""
    monkeypatch.setattr(host, "MANY_DRAWS", 1 << 20)
    torch.manual_seed(3)
    torch.randn(3000, 3001)
    expected = shuffled()

    with memest.virtual_gpu("h100-80gb"):
        torch.manual_seed(3)
        torch.randn(3000, 3001)
        assert shuffled() == expected
        nn.Linear(100_000, 100_000)  # 10^10 numbers
        shuffled()


def test_other_distributions_are_left_out() -> None:
    assert num_draws(aten.exponential_.default, torch.empty(64)) == 0
