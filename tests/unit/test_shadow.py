"""Values beside meta tensors: known where they follow from the batch, unknown elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.tensors.known_values import (
    MAX_BYTES,
    MAX_FLOAT_NUMEL,
    KnownValues,
    ValueUnknown,
)
from tests.sim import SimGpu


@pytest.fixture
def sim() -> Iterator[SimGpu]:
    made = SimGpu()
    with made:
        yield made


def known(sim: SimGpu, value: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """A meta tensor whose value the sim knows, as a batch's ids are."""
    real = torch.tensor(value, dtype=dtype)
    tensor = torch.empty(real.shape, dtype=dtype, device="meta")
    sim.values.adopt(tensor, real)
    return tensor


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An activation, made by an operator on the GPU whose values nothing follows."""
    with _disable_current_modes():
        return torch.empty(*shape, dtype=dtype, device="meta")


def value_of(sim: SimGpu, tensor: Tensor) -> Any:
    value = sim.values.value_of(tensor)
    return None if value is None else value.tolist()


def test_what_is_computed_from_known_integers_is_known(sim: SimGpu) -> None:
    ids = known(sim, [[3, 1, 0], [5, 0, 0]])

    mask = ids != 0
    positions = mask.long().cumsum(-1) - 1

    assert value_of(sim, mask) == [[True, True, False], [True, False, False]]
    assert value_of(sim, positions) == [[0, 1, 1], [0, 0, 0]]


def test_a_branch_on_a_mask_is_the_one_that_the_gpu_takes(sim: SimGpu) -> None:
    assert not known(sim, [1, 1, 0]).bool().all()
    assert known(sim, [1, 1, 1]).bool().all()
    assert known(sim, [4, 9, 2]).max().item() == 9


def test_factories_are_known(sim: SimGpu) -> None:
    assert value_of(sim, torch.arange(3, device="meta")) == [0, 1, 2]
    assert value_of(sim, torch.ones(2, dtype=torch.bool, device="meta")) == [True, True]
    assert value_of(sim, torch.full((2,), 7, device="meta")) == [7, 7]


def test_views_share_the_value_of_their_storage(sim: SimGpu) -> None:
    ids = known(sim, [[1, 2, 3], [4, 5, 6]])

    assert value_of(sim, ids[:, 1:]) == [[2, 3], [5, 6]]
    assert value_of(sim, ids.t()) == [[1, 4], [2, 5], [3, 6]]
    assert value_of(sim, ids[:, None].expand(2, 2, 3)[1]) == [[4, 5, 6], [4, 5, 6]]


def test_writing_into_a_view_is_seen_through_the_storage(sim: SimGpu) -> None:
    """How T5 shifts its labels."""
    labels = known(sim, [[5, 6, 7]])
    shifted = labels.new_zeros(labels.shape)

    shifted[:, 1:] = labels[:, :-1].clone()
    shifted[:, 0] = 9

    assert value_of(sim, shifted) == [[9, 5, 6]]


def test_masked_writes_are_followed(sim: SimGpu) -> None:
    labels = known(sim, [5, -100, 7])

    labels.masked_fill_(labels == -100, 0)

    assert value_of(sim, labels) == [5, 0, 7]


def test_numbers_in_place_of_tensors_are_known(sim: SimGpu) -> None:
    """`to_dense_batch` of PyG puts nodes that are too many at one position."""
    mask, positions = known(sim, [True, False], torch.bool), known(sim, [4, 5])

    assert torch.where(mask, positions, 27).tolist() == [4, 27]
    assert torch.where(mask, 27, positions).tolist() == [27, 5]
    assert torch.where(mask, 1, 2).tolist() == [1, 2]


def test_the_value_given_is_copied(sim: SimGpu) -> None:
    """Writes of the traced code do not reach the batch."""
    real = torch.tensor([1, 2])
    tensor = unknown(2, dtype=torch.int64)
    sim.values.adopt(tensor, real)

    tensor.add_(1)

    assert value_of(sim, tensor) == [2, 3]
    assert real.tolist() == [1, 2]


def test_activations_have_no_value(sim: SimGpu) -> None:
    x = unknown(2, 3)

    assert sim.values.value_of(x) is None
    assert not sim.values.decides(x > 0)
    assert sim.values.value_of(x.argmax()) is None


def test_large_floats_have_no_value_even_if_computed_from_ids(sim: SimGpu) -> None:
    """Scripts do not branch on the mask that is added to attention scores."""
    mask = known(sim, [[1, 0]]).expand(1, MAX_FLOAT_NUMEL + 1, 2)

    assert sim.values.value_of((1.0 - mask.float()) * -1e9) is None


def test_a_write_from_an_activation_forgets_the_value(sim: SimGpu) -> None:
    ids = known(sim, [1, 2])

    ids.copy_(unknown(2))

    assert sim.values.value_of(ids) is None


def test_an_activation_written_to_one_element_leaves_the_others_known(sim: SimGpu) -> None:
    settings = known(sim, [16384.0, 0.07, -1.0], torch.float32)

    settings[2:] = unknown(1)

    assert value_of(sim, settings[0]) == 16384.0
    assert value_of(sim, settings[:2]) is not None
    assert value_of(sim, settings[2]) is None
    assert value_of(sim, settings) is None
    assert value_of(sim, settings * 2) is None


def test_a_value_written_over_all_elements_is_known_again(sim: SimGpu) -> None:
    settings = known(sim, [1.0, 2.0], torch.float32)
    settings[1:] = unknown(1)

    sim.values.overwrite(settings, torch.tensor([5.0, 6.0]))

    assert value_of(sim, settings) == [5.0, 6.0]


def test_activations_are_taken_to_be_finite(sim: SimGpu) -> None:
    """Models clamp fp16 activations if one is infinite; in a run to predict, none is."""
    x = unknown(2, 3, dtype=torch.float16)

    assert not torch.isinf(x).any()
    assert not torch.isnan(x).any()
    assert not x.isinf().any().item()


def test_shapes_that_depend_on_known_values_are_found(sim: SimGpu) -> None:
    """`nonzero` has as many rows as the mask has ones."""
    assert known(sim, [0, 3, 0, 4]).nonzero().shape == (2, 1)
    assert known(sim, [7, 7, 9]).unique().shape == (2,)


def test_large_tensors_have_no_value(sim: SimGpu) -> None:
    limit = torch.zeros(MAX_BYTES, dtype=torch.bool, device="meta")
    above = torch.zeros(MAX_BYTES + 1, dtype=torch.bool, device="meta")

    assert sim.values.value_of(limit) is not None
    assert sim.values.value_of(above) is None


def test_a_value_dies_with_its_storage(sim: SimGpu) -> None:
    for _ in range(3):
        known(sim, [1, 2]) + 1

    assert not sim.values


def test_a_cpu_tensor_is_its_own_value() -> None:
    x = torch.tensor([1, 2])

    assert KnownValues().value_of(x) is x


def test_computing_on_a_tensor_without_value_is_refused() -> None:
    with pytest.raises(ValueUnknown, match=r"aten\.add"):
        KnownValues().compute(torch.ops.aten.add.Tensor, (unknown(2), 1), {})


def test_results_move_to_the_cpu_with_the_values() -> None:
    values = KnownValues()

    made = values.compute(torch.ops.aten.arange.default, (3,), {"device": torch.device("meta")})

    assert made.device.type == "cpu"
    assert made.tolist() == [0, 1, 2]


def test_room_without_values_is_the_same_in_every_run(sim: SimGpu) -> None:
    ids = known(sim, [[3, 1, 0], [5, 0, 0]])

    made = [torch.empty(999, dtype=torch.int32, device="meta"), torch.empty_like(ids)]
    made += [ids.new_empty(7), ids.new_empty_strided((3, 2), (1, 3))]

    assert all(not any(torch.tensor(value_of(sim, m)).flatten().tolist()) for m in made)


def test_a_known_tensor_moves_to_the_host_with_its_value(sim: SimGpu) -> None:
    """`.cpu()` of a meta tensor has nothing to copy; what comes back takes no GPU memory."""
    lengths = known(sim, [3, 4])
    num_storages = len(sim.storages.num_bytes)

    host = lengths.cpu()

    assert (host.device.type, host.tolist()) == ("cpu", [3, 4])
    assert len(sim.storages.num_bytes) == num_storages
