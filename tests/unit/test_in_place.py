"""Gradients are summed in place where a real run sums them in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memest.estimator.gpus import Gpu
from memest.estimator.trace import MemKind, Recorder, StorageTable
from memest.units import GIB

H200 = Gpu(
    name="test",
    label="Test",
    memory_bytes=140 * GIB,
    capability=(9, 0),
    num_sms=132,
    context_bytes=0,
    source="test",
)


def sums_of_gradients(loss_of: Callable[[Tensor], Tensor]) -> int:
    """Births by `aten.add.Tensor` in the backward of `loss_of` over 3 x 5 numbers."""
    recorder = Recorder(H200, StorageTable())
    leaf = torch.empty(3, 5, device="meta", requires_grad=True)
    recorder.adopt(leaf, MemKind.PARAMS)
    with recorder:
        loss = loss_of(leaf * 2)
        recorder.take_events()
        loss.backward()  # type: ignore[no-untyped-call]
        born = [event for event in recorder.take_events() if event >= 0]
    return sum(recorder.storages.sites[event].op == "aten.add.Tensor" for event in born)


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


def test_rows_are_gathered_back_into_zeros_without_a_copy() -> None:
    """`index_backward` writes into its zeros: one tensor of the table's size, not two."""
    recorder = Recorder(H200, StorageTable())
    table = torch.empty(7, 5, device="meta", requires_grad=True)
    rows = torch.empty(3, dtype=torch.int64, device="meta")
    with recorder:
        loss = table[rows].sum()
        recorder.take_events()
        loss.backward()  # type: ignore[no-untyped-call]
        born = [event for event in recorder.take_events() if event >= 0]

    assert [recorder.storages.num_bytes[event] for event in born].count(7 * 5 * 4) == 1
