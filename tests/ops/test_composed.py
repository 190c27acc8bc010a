"""Operators that CUDA composes of others, and rare ones that models still call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu
from tests.requested import Requests


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as session:
        yield session


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", requires_grad=True)


def per_sample_weights() -> torch.Tensor:
    bags = torch.tensor([[1, 2], [3, 0]], device="cuda")
    return F.embedding_bag(bags, randn(5, 4), per_sample_weights=randn(2, 2), mode="sum")


CENTRES = {"align_corners": False}

CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "addr": lambda: torch.addr(randn(4, 6), randn(4), randn(6)),
    "bilinear": lambda: F.bilinear(randn(4, 6), randn(4, 5), randn(3, 6, 5)),
    "block_diag": lambda: torch.block_diag(randn(4, 6), randn(2, 3)),
    "cdist": lambda: torch.cdist(randn(2, 4, 6), randn(5, 6), p=1),
    "count_nonzero": lambda: torch.count_nonzero(randn(4, 6)),
    "dist": lambda: torch.dist(randn(4, 6), randn(4, 6)),
    "grid_sample": lambda: F.grid_sample(randn(2, 3, 4, 4, 4), randn(2, 5, 5, 5, 3), **CENTRES),
    "hann_window": lambda: torch.hann_window(400, device="cuda"),
    "median": lambda: randn(4, 6).median(),
    "nanmedian": lambda: randn(4, 6).nanmedian(),
    "pdist": lambda: F.pdist(randn(4, 6), p=1),
    "logspace": lambda: torch.logspace(0, 3, 8, device="cuda"),
    "per_sample_weights": per_sample_weights,
    "pinv": lambda: torch.linalg.pinv(randn(4, 6)),
    "renorm": lambda: randn(4, 6).renorm(2, 0, 1.0),
    "rsub": lambda: torch.rsub(randn(4, 6), randn(6)),
    "select_scatter": lambda: randn(4, 6).select_scatter(randn(6), 0, 1),
    "slice_scatter": lambda: randn(4, 6).slice_scatter(randn(2, 6), 0, 0, 2),
    "trace": lambda: randn(4, 4).trace(),
}


@pytest.mark.parametrize("per_row", [False, True])
def test_fake_quantization_makes_values_and_their_mask(per_row: bool, gpu: VirtualGpu) -> None:
    """`fused_moving_avg_obs_fake_quant_cuda`: two extremes, the result, a mask of bytes."""
    weight, on = torch.randn(64, 32, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda")
    state = [torch.ones(64 if per_row else 1, device="cuda") for _ in range(3)]
    zero = torch.zeros_like(state[0], dtype=torch.int32)

    requests = Requests(gpu).made(
        lambda: torch.fused_moving_avg_obs_fake_quant(
            weight, on, on, *state, zero, 0.01, 0, 127, 0, per_row, False
        )
    )

    extreme = 64 * 4 if per_row else 4
    assert [n for n in requests if n in (extreme, 64 * 32 * 4, 64 * 32)] == [
        extreme, extreme, 64 * 32 * 4, 64 * 32,
    ]  # fmt: skip
    assert not gpu.mode.kernels.coverage.unmodelled


def test_a_view_in_place_keeps_known_values(gpu: VirtualGpu) -> None:
    rows = torch.arange(4, device="cuda").view(4, 1).squeeze_(1)

    assert rows.unsqueeze_(0).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("name", CALLS)
def test_rare_operators_are_modelled(name: str, gpu: VirtualGpu) -> None:
    result = CALLS[name]()
    if result.requires_grad:
        result.sum().backward()

    assert result.is_cuda
    assert not gpu.mode.kernels.coverage.unmodelled


def test_the_gradient_of_distances_holds_all_differences(gpu: VirtualGpu) -> None:
    """`cdist_backward_kernel_impl`: a buffer of (batch, r2, r1, m) for either operand."""
    x, y = randn(2, 300, 64), randn(2, 500, 64)
    loss = torch.cdist(x, y, p=1).sum()

    requests = Requests(gpu).made(loss.backward)

    assert requests.count(2 * 500 * 300 * 64 * 4) == 2


def test_a_median_sorts_all_values(gpu: VirtualGpu) -> None:
    """`median_impl` of cuda/Sorting.cpp sorts, of which the values and positions remain."""
    values = torch.randn(1 << 20, device="cuda")

    requests = Requests(gpu).made(values.median)

    assert {values.nbytes, 2 * values.nbytes} <= set(requests)


def test_tensors_are_set_to_each_other_if_they_are_one_part_of_a_storage(gpu: VirtualGpu) -> None:
    """TensorDict compares parameters so."""
    x = torch.ones(4, 6, device="cuda")

    assert x.is_set_to(x.view(4, 6))
    assert x[1:].is_set_to(x.narrow(0, 1, 3))
    for other in (torch.ones_like(x), x[1:], x.view(6, 4), x.t()):
        assert not x.is_set_to(other)


def test_positions_that_are_repeated_have_no_negative_count(gpu: VirtualGpu) -> None:
    """The requests of an H200 for Keras's `segment_sum` of 32 predictions, whose counts are one
    expanded number: copies, their sum with CUB's 1279 bytes, signs, positions."""
    rows, count = torch.ones(32, device="cuda"), torch.tensor(1, device="cuda")

    seen = Requests(gpu).of(lambda: rows.repeat_interleave(count))

    assert [size for size in seen if size > 0][:7] == [256, 256, 256, 1279, 32, 1, 256]
