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

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.random import randperm_bits
from memest.estimator.virtual_gpu import VirtualGpu
from tests.op_calls import meta, requests, sizes

aten = torch.ops.aten

ROOT = Path(__file__).parents[2]
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


def test_each_draw_moves_the_generator_and_gives_the_numbers_as_on_the_gpu(
    virtual: VirtualGpu,
) -> None:
    script = runpy.run_path(str(ROOT / "validation" / "scripts" / "random_draws.py"))
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


def test_a_mask_that_is_drawn_on_the_gpu_decides_a_shape(virtual: VirtualGpu) -> None:
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


@pytest.mark.parametrize(
    ("count", "asked"),
    [
        (1000, [8000, 8, 8000, 4000, 4000, 1]),
        (20000, [160000, 8, 160000, 80000, 80000, 252927]),
        (100000, [800000, 8, 800000, 800000, 800000, 1633279]),
    ],
)
def test_a_permutation_sorts_keys_of_as_many_bits_as_it_needs(count: int, asked: list[int]) -> None:
    out = meta(count, dtype=torch.int64)

    assert sizes(aten.randperm.default, (count,), out) == asked
    assert sizes(aten.randperm.generator, (count,), out, generator=None) == asked
    assert (randperm_bits(count) <= 32) == (count < 100000)


def test_several_samples_without_replacement_are_found_by_topk() -> None:
    out = meta(4, 5, dtype=torch.int64)
    asked = sizes(aten.multinomial.default, (meta(4, 3200), 5), out)

    assert asked == [160, 4, 1, 4, 1, 1, 16, 4, 1, 1, 51200, 80]


def test_many_samples_of_one_row_take_a_scan_over_blocks() -> None:
    """Recorded on an H100, of 1.2 million odds."""
    odds, out = meta(1_200_000), meta(368_640, dtype=torch.int64)

    assert sizes(aten.multinomial.default, (odds, 368_640, True), out) == [
        2_949_120, 4_800_000, 4_800_000, 4_800_000, 5887,
    ]  # fmt: skip


def test_dropout_makes_its_mask_before_its_result() -> None:
    """Dropout.cu: `mask` is allocated first; where all is kept it is the other way round."""
    tensor = meta(5, 7, dtype=torch.bfloat16)

    assert requests(aten.native_dropout.default, tensor, 0.1, True) == [35, 70]
    assert requests(aten.native_dropout.default, tensor, 0.1, False) == [70, 35]


def test_a_draw_of_many_probabilities_stages_its_extremes() -> None:
    found = requests(aten.multinomial.default, meta(24, 50257), 1)

    extreme = [592, 4, -4, -592]
    assert found == [
        192, 4, *extreme, 1, 4, *extreme, 1, 1, -1, -4, -1, -4, 96, 24, 1, -24, -96, 1, -1,
        4824672, -4824672, -1, -1,
    ]  # fmt: skip


def test_deviations_are_checked_before_they_are_drawn_with_and_after() -> None:
    x = meta(16, 6)

    assert requests(aten.normal.Tensor_Tensor, x, x) == [4, 1, -1, -4, 384, 4, 1, -1, -4]


def test_distributions_without_meta_kernels_are_drawn_and_differentiated() -> None:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        alpha = torch.full((64, 8), 2.0, device="cuda", requires_grad=True)
        rows = torch.distributions.Dirichlet(alpha).rsample()
        draws = torch.distributions.Gamma(alpha, torch.ones_like(alpha)).rsample()
        (rows.sum() + draws.sum()).backward()
        counts = torch.binomial(
            torch.full((64,), 9.0, device="cuda"), torch.rand(64, device="cuda")
        )
        coverage = gpu.mode.kernels.coverage

    assert rows.shape == draws.shape == alpha.grad.shape == (64, 8)
    assert counts.shape == (64,)
    assert not [name for name in coverage.unmodelled if "gamma" in name or "dirichlet" in name]
