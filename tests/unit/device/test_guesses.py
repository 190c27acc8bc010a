"""What a script is told of values that nobody knows."""

from __future__ import annotations

import re

import pytest
import torch

import memest
from memest.errors import UnsupportedError
from memest.estimator.gpu.guesses import Guesses, guessed_comparison

aten = torch.ops.aten


def test_numbers_fall_so_that_progress_is_seen() -> None:
    guesses = Guesses(line=lambda: "train.py:3")

    read = [guesses.scalar(torch.float32, "item") for _ in range(4)]

    assert read == sorted(read, reverse=True)
    assert len(set(read)) == 4
    assert read[0] == 1.0
    assert guesses.counts["train.py:3", "item of float32"] == 4


def test_booleans_are_false_and_integers_one() -> None:
    guesses = Guesses()

    assert guesses.scalar(torch.bool, "item") is False
    assert guesses.scalar(torch.int64, "item") == 1


@pytest.mark.parametrize(
    ("func", "threshold", "is_true"),
    [
        (aten.gt.Scalar, 1e-10, True),  # is there curvature? LBFGS
        (aten.le.Scalar, 1e-7, False),  # has it converged?
        (aten.gt.Scalar, -1e-9, False),  # is the slope no longer downwards?
        (aten.lt.Scalar, -1e-9, True),
        (aten.gt.Scalar, 0.5, False),  # is the score high?
        (aten.lt.Scalar, 0.15, False),
        (aten.gt.Scalar, 0, False),
        (aten.le.Scalar, 1e18, True),  # is it within its range? RF-DETR
        (aten.gt.Scalar, -65504, True),
        (aten.ge.Scalar, 65504, False),  # has it overflowed?
    ],
)
def test_no_tolerance_is_met_and_no_threshold_passed(
    func: object, threshold: float, is_true: bool
) -> None:
    out = torch.empty(3, dtype=torch.bool, device="meta")

    assert guessed_comparison(func, (out, threshold)) is is_true


@pytest.mark.parametrize("func", [aten.any.default, aten.all.default])
def test_unknown_numbers_differ_from_zero_and_masks_are_false(func: object) -> None:
    for dtype, is_true in ((torch.float32, True), (torch.bfloat16, True), (torch.bool, False)):
        given = torch.empty(3, dtype=dtype, device="meta")
        assert guessed_comparison(func, (given,)) is is_true


def test_strict_refuses_by_the_line() -> None:
    guesses = Guesses(is_strict=True, line=lambda: "train.py:9")

    with pytest.raises(UnsupportedError, match=re.escape("train.py:9 reads a value that is not")):
        guesses.scalar(torch.float32, "item")


def test_what_the_gpu_draws_is_not_drawn_from_the_host() -> None:
    with memest.virtual_gpu("a100-40gb"):
        torch.manual_seed(0)
        alone = torch.rand(3).tolist()

        torch.manual_seed(0)
        torch.randn(10, device="cuda")
        torch.randint(0, 5, (4,), device="cuda")

        assert torch.rand(3).tolist() == alone


def test_what_is_taken_by_numbers_has_a_shape_whatever_its_values() -> None:
    """Rewards of sampled tokens are guessed; which of them an update takes is not."""
    with memest.virtual_gpu("h100-80gb"):
        sampled = torch.randn(8, 100_000, device="cuda").argmax(1)
        rewards = (sampled == 3).float()

        assert rewards[torch.randperm(8, device="cuda")[:2], None].shape == (2, 1)
        assert rewards[rewards > 0].shape == (0,)


CHECKS = """
assert (values == padded).all() and (padded == values).all(), "padded wrongly"
assert (values == padded).all().item()
if not (values == padded).all():
    raise ValueError(f"{values.sum()} differs")
if (values == padded).any():
    raise ValueError
"""  # pytest rewrites the asserts of its own files


def test_checks_of_a_script_pass() -> None:
    with memest.virtual_gpu("h100-80gb"):
        values = torch.randn(1000, 1000, device="cuda")
        padded = torch.nn.functional.pad(values, (1, 1), mode="reflect")[:, 1:-1]
        exec(CHECKS, {"values": values, "padded": padded})


def test_a_condition_that_raises_nothing_is_guessed_as_before() -> None:
    with memest.virtual_gpu("h100-80gb"):
        values = torch.randn(1000, 1000, device="cuda")
        same = "same" if (values == values + 1).all() else "other"

    assert same == "other"


def test_factors_of_an_optimizer_are_finite() -> None:
    class Checked(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            weight = self.param_groups[0]["params"][0]
            self.is_finite = bool(torch.isfinite(weight.grad @ weight.grad.T).all())

    with memest.virtual_gpu("h100-80gb"):
        layer = torch.nn.Linear(2000, 2000, device="cuda")
        optimizer = Checked(layer.parameters())
        layer(torch.randn(8, 2000, device="cuda")).sum().backward()
        optimizer.step()

    assert optimizer.is_finite


def test_unknown_tokens_are_no_timestamps() -> None:
    """Whisper's `generate` goes back before the start of the audio if all tokens are timestamps."""
    with memest.virtual_gpu("h100-80gb"):
        tokens = torch.randn(4, 51865, device="cuda").argmax(-1)

        assert not (tokens >= 50364).any()
        assert (tokens >= 1).any()
