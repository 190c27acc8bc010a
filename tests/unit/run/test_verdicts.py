"""Cards on which the script did not run."""

from __future__ import annotations

import pytest
import torch

import memest
from memest.report import Outcome


def test_what_the_largest_card_refuses_the_smaller_ones_refuse_too() -> None:
    gpu = memest.virtual_gpu("h200")

    with pytest.raises(torch.OutOfMemoryError), gpu:
        torch.empty(200 << 30, device="cuda")

    verdicts = gpu.report().verdicts
    assert {v.verdict for v in verdicts.values()} == {Outcome.OOM}
    assert len({v.limit_bytes - v.margin_bytes for v in verdicts.values()}) == 1
    assert verdicts["a100-40gb"].margin_bytes < verdicts["h200"].margin_bytes


def test_what_a_small_card_refuses_is_not_known_of_larger_ones() -> None:
    gpu = memest.virtual_gpu("a100-40gb")

    with pytest.raises(torch.OutOfMemoryError), gpu:
        torch.empty(60 << 30, dtype=torch.uint8, device="cuda")

    assert set(gpu.report().verdicts) == {"a100-40gb"}
