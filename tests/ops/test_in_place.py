"""Gradients are summed in place where a real run sums them in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu
from memest.units import GIB
from tests.sim import SimGpu

H200 = Gpu(
    name="test",
    label="Test",
    memory_bytes=140 * GIB,
    capability=(9, 0),
    num_sms=132,
    memory_gb_s=4800,
    context_bytes=0,
    source="test",
)


def sums_of_gradients(loss_of: Callable[[Tensor], Tensor]) -> int:
    """Births by `aten.add.Tensor` in the backward of `loss_of` over 3 x 5 numbers."""
    sim = SimGpu(H200)
    leaf = torch.empty(3, 5, device="meta", requires_grad=True)
    sim.adopt(leaf)
    with sim:
        loss = loss_of(leaf * 2)
        sim.take_events()
        loss.backward()  # type: ignore[no-untyped-call]
        born = [event for event in sim.take_events() if event >= 0]
    return sum(sim.storages.sites[event].op == "aten.add.Tensor" for event in born)


def test_two_gradients_of_one_tensor_are_summed_in_place() -> None:
    """`can_accumulate_inplace`: the first gradient belongs to the input buffer alone."""
    assert sums_of_gradients(lambda x: (x * 3).sum() + (x * 5).sum()) == 0


def test_an_expanded_gradient_is_not_written_into() -> None:
    """The gradient of `sum` has strides 0: its elements share memory."""
    assert sums_of_gradients(lambda x: (x * 5).sum() + x.sum()) == 1


def test_a_gradient_that_another_node_still_holds_is_not_written_into() -> None:
    """A residual whose two branches start from the very gradient that is summed into."""
    assert sums_of_gradients(lambda x: (x + x.tanh()).mul(3).sum()) == 0
    assert sums_of_gradients(lambda x: (x + x.view(15).view(3, 5)).mul(3).sum()) == 1


def born_of_size(loss_of: Callable[[Tensor], Tensor], num_bytes: int) -> int:
    """How many storages of that size the backward of `loss_of` over 7 x 5 numbers makes."""
    sim = SimGpu(H200)
    table = torch.empty(7, 5, device="meta", requires_grad=True)
    with sim:
        loss = loss_of(table)
        sim.take_events()
        loss.backward()  # type: ignore[no-untyped-call]
        born = [event for event in sim.take_events() if event >= 0]
    return [sim.storages.num_bytes[event] for event in born].count(num_bytes)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x: x[torch.empty(3, dtype=torch.int64, device="meta")].sum(),
        lambda x: x.index_select(0, torch.empty(3, dtype=torch.int64, device="meta")).sum(),
        lambda x: x.gather(1, torch.empty(7, 2, dtype=torch.int64, device="meta")).sum(),
        lambda x: x.topk(2, dim=-1).values.sum(),
    ],
    ids=["index", "index_select", "gather", "topk"],
)
def test_what_was_selected_goes_back_into_zeros_without_a_copy(
    loss_of: Callable[[Tensor], Tensor],
) -> None:
    """The formulas write into zeros of the table's size: one tensor of it, not two."""
    assert born_of_size(loss_of, 7 * 5 * 4) == 1
