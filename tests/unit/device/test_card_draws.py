"""What is drawn on the card, against what an H100 drew (torch 2.11, CUDA 13.0)."""

from __future__ import annotations

import gzip
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memest.estimator.device.virtual_gpu import VirtualGpu
from memest.estimator.hardware.gpus import find_gpu

ROOT = Path(__file__).parents[3]
MEASURED: dict[str, Any] = json.loads(
    gzip.decompress((ROOT / "tests" / "data" / "draws.json.gz").read_bytes())
)
KNOWN = {
    "rand", "randn", "uniform_", "normal_", "exponential_", "bernoulli_p", "rand_t", "rand_like2d",
    "randint", "random_", "randint_big", "randint_32", "randint_lo", "bern_bool", "multinomial1",
    "multinomial_w",
}  # fmt: skip
OF_NORMALS = {"randn", "normal_"}


@pytest.fixture
def virtual() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        yield gpu


def has_numbers(name: str, made: Any) -> bool:
    """Whether the numbers of a draw are known here: those of few, not all distributions."""
    kind = name.partition("/")[0]
    if kind not in KNOWN or made.numel() > 1 << 18 or made.untyped_storage().nbytes() > 1 << 20:
        return False
    return kind not in OF_NORMALS or (made.dtype != torch.float64 and made.numel() <= 1 << 14)


def test_each_draw_moves_the_generator_and_gives_the_numbers_as_on_the_card(
    virtual: VirtualGpu,
) -> None:
    script = runpy.run_path(str(ROOT / "results" / "scripts" / "random_draws.py"))
    num_compared = 0
    for name, draw in script["draws"]():
        measured = MEASURED[name]
        before, made = script["begun"](), draw()

        assert before == measured["before"]
        assert script["offset"]() - before == measured["delta"], name
        if isinstance(made, torch.Tensor) and has_numbers(name, made):
            chosen, numbers = measured["values"]
            found = torch.tensor(made.double().flatten().tolist(), dtype=torch.float64)[chosen]
            expected = torch.tensor([float(x) for x in numbers], dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=3e-6, atol=3e-6, msg=name)
            num_compared += 1

    assert num_compared > 150


def test_a_mask_that_is_drawn_on_the_card_decides_a_shape(virtual: VirtualGpu) -> None:
    """Counted on an H100: `manual_seed(1234)`, five numbers, then this mask."""
    torch.manual_seed(1234)
    numbers, places = MEASURED["rand/float32/1000"]["values"][::-1]
    torch.rand(5, device="cuda")

    chosen = torch.rand(1000, device="cuda") < 0.15

    assert chosen.nonzero().size(0) == chosen.sum().item()
    for place, number in zip(places, numbers, strict=True):
        assert chosen[place].item() == (float(number) < 0.15)


def test_a_generator_of_the_script_draws_apart_from_the_default_one(virtual: VirtualGpu) -> None:
    """Its first number with seed 7, on an H100."""
    torch.manual_seed(1)
    own = torch.Generator(device="cuda").manual_seed(7)

    first = torch.rand(1000, device="cuda", generator=own)[0].item()

    assert first == pytest.approx(0.9545971155166626, abs=1e-7)
    assert torch.cuda.get_rng_state()[8:].sum() == 0
    assert own.initial_seed() == 7
    own.set_state(torch.Generator(device="cuda").manual_seed(7).get_state())
    assert torch.rand(1000, device="cuda", generator=own)[0].item() == first


def test_a_recomputed_forward_draws_again_what_it_drew(virtual: VirtualGpu) -> None:
    drawn = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(3, device="cuda").tolist())
        return x * x

    x = torch.ones(3, device="cuda", requires_grad=True)
    made = checkpoint(forward, x, use_reentrant=False)
    torch.rand(3, device="cuda")
    made.sum().backward()

    assert len(drawn) == 2
    assert drawn[0] == drawn[1]
