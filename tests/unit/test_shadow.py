"""Values beside meta tensors: known where they follow from the batch, unknown elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from memest.errors import TraceError
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import StorageTable
from memest.estimator.device.values import (
    MAX_BYTES,
    ShadowValues,
    ValueUnknown,
)
from memest.estimator.hardware.gpus import find_gpu


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder(find_gpu("h200"), StorageTable())
    with made:
        yield made


def known(recorder: Recorder, value: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """A meta tensor whose value the recorder knows, as a batch's ids are."""
    real = torch.tensor(value, dtype=dtype)
    tensor = torch.empty(real.shape, dtype=dtype, device="meta")
    recorder.values.adopt(tensor, real)
    return tensor


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An activation."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def value_of(recorder: Recorder, tensor: Tensor) -> Any:
    value = recorder.values.value_of(tensor)
    return None if value is None else value.tolist()


def test_what_is_computed_from_known_integers_is_known(recorder: Recorder) -> None:
    ids = known(recorder, [[3, 1, 0], [5, 0, 0]])

    mask = ids != 0
    positions = mask.long().cumsum(-1) - 1

    assert value_of(recorder, mask) == [[True, True, False], [True, False, False]]
    assert value_of(recorder, positions) == [[0, 1, 1], [0, 0, 0]]


def test_a_branch_on_a_mask_is_the_one_that_the_gpu_takes(recorder: Recorder) -> None:
    assert not known(recorder, [1, 1, 0]).bool().all()
    assert known(recorder, [1, 1, 1]).bool().all()
    assert known(recorder, [4, 9, 2]).max().item() == 9


def test_factories_are_known(recorder: Recorder) -> None:
    assert value_of(recorder, torch.arange(3, device="meta")) == [0, 1, 2]
    assert value_of(recorder, torch.ones(2, dtype=torch.bool, device="meta")) == [True, True]
    assert value_of(recorder, torch.full((2,), 7, device="meta")) == [7, 7]


def test_views_share_the_value_of_their_storage(recorder: Recorder) -> None:
    ids = known(recorder, [[1, 2, 3], [4, 5, 6]])

    assert value_of(recorder, ids[:, 1:]) == [[2, 3], [5, 6]]
    assert value_of(recorder, ids.t()) == [[1, 4], [2, 5], [3, 6]]
    assert value_of(recorder, ids[:, None].expand(2, 2, 3)[1]) == [[4, 5, 6], [4, 5, 6]]


def test_writing_into_a_view_is_seen_through_the_storage(recorder: Recorder) -> None:
    """How T5 shifts its labels."""
    labels = known(recorder, [[5, 6, 7]])
    shifted = labels.new_zeros(labels.shape)

    shifted[:, 1:] = labels[:, :-1].clone()
    shifted[:, 0] = 9

    assert value_of(recorder, shifted) == [[9, 5, 6]]


def test_masked_writes_are_followed(recorder: Recorder) -> None:
    labels = known(recorder, [5, -100, 7])

    labels.masked_fill_(labels == -100, 0)

    assert value_of(recorder, labels) == [5, 0, 7]


def test_the_value_given_is_copied(recorder: Recorder) -> None:
    """Writes of the traced code do not reach the batch."""
    real = torch.tensor([1, 2])
    tensor = unknown(2, dtype=torch.int64)
    recorder.values.adopt(tensor, real)

    tensor.add_(1)

    assert value_of(recorder, tensor) == [2, 3]
    assert real.tolist() == [1, 2]


def test_activations_have_no_value(recorder: Recorder) -> None:
    x = unknown(2, 3)

    assert recorder.values.value_of(x) is None
    assert recorder.values.value_of(x > 0) is None
    assert recorder.values.value_of(x.argmax()) is None


def test_floats_have_no_value_even_if_computed_from_ids(recorder: Recorder) -> None:
    """What is added to attention scores is as large as they are, and nobody branches on it."""
    mask = known(recorder, [1, 0])

    assert recorder.values.value_of((1.0 - mask.float()) * -1e9) is None


def test_a_write_from_an_activation_forgets_the_value(recorder: Recorder) -> None:
    ids = known(recorder, [1, 2])

    ids.copy_(unknown(2))

    assert recorder.values.value_of(ids) is None


def test_reading_an_activation_is_an_error_that_names_the_operator(recorder: Recorder) -> None:
    with pytest.raises(TraceError) as caught:
        unknown(3).sum().item()

    assert str(caught.value) == (
        "the model cannot be traced without a GPU: `aten._local_scalar_dense` reads a value that "
        "is computed from weights or activations"
    )
    assert "cannot predict this model yet" in caught.value.hint


def test_a_branch_on_an_activation_is_an_error(recorder: Recorder) -> None:
    with pytest.raises(TraceError, match="reads a value that is computed from"):
        bool((unknown(3) > 0).any())


def test_activations_are_taken_to_be_finite(recorder: Recorder) -> None:
    """Models clamp fp16 activations if one is infinite; in a run to predict, none is."""
    x = unknown(2, 3, dtype=torch.float16)

    assert not torch.isinf(x).any()
    assert not torch.isnan(x).any()
    assert not x.isinf().any().item()


def test_shapes_that_depend_on_known_values_are_found(recorder: Recorder) -> None:
    """`nonzero` has as many rows as the mask has ones."""
    assert known(recorder, [0, 3, 0, 4]).nonzero().shape == (2, 1)
    assert known(recorder, [7, 7, 9]).unique().shape == (2,)


def test_a_shape_that_depends_on_an_activation_is_an_error(recorder: Recorder) -> None:
    with pytest.raises(TraceError, match=r"`aten\.nonzero`"):
        (unknown(3) > 0).nonzero()


def test_large_tensors_have_no_value(recorder: Recorder) -> None:
    limit = torch.zeros(MAX_BYTES, dtype=torch.bool, device="meta")
    above = torch.zeros(MAX_BYTES + 1, dtype=torch.bool, device="meta")

    assert recorder.values.value_of(limit) is not None
    assert recorder.values.value_of(above) is None


def test_a_value_dies_with_its_storage(recorder: Recorder) -> None:
    for _ in range(3):
        known(recorder, [1, 2]) + 1

    assert recorder.values._twins == {}


def test_a_cpu_tensor_is_its_own_value() -> None:
    x = torch.tensor([1, 2])

    assert ShadowValues().value_of(x) is x


def test_computing_on_a_tensor_without_value_is_refused() -> None:
    with pytest.raises(ValueUnknown, match=r"aten\.add"):
        ShadowValues().compute(torch.ops.aten.add.Tensor, (unknown(2), 1), {})


def test_results_move_to_the_cpu_with_the_values() -> None:
    values = ShadowValues()

    made = values.compute(torch.ops.aten.arange.default, (3,), {"device": torch.device("meta")})

    assert made.device.type == "cpu"
    assert made.tolist() == [0, 1, 2]


def test_room_without_values_is_the_same_in_every_run(recorder: Recorder) -> None:
    ids = known(recorder, [[3, 1, 0], [5, 0, 0]])

    made = [torch.empty(999, dtype=torch.int32, device="meta"), torch.empty_like(ids)]
    made += [ids.new_empty(7), ids.new_empty_strided((3, 2), (1, 3))]

    assert all(not any(torch.tensor(value_of(recorder, m)).flatten().tolist()) for m in made)


def test_a_known_tensor_moves_to_the_host_with_its_value(recorder: Recorder) -> None:
    """`.cpu()` of a meta tensor has nothing to copy; what comes back takes no GPU memory."""
    lengths = known(recorder, [3, 4])
    num_storages = len(recorder.storages.num_bytes)

    host = lengths.cpu()

    assert (host.device.type, host.tolist()) == ("cpu", [3, 4])
    assert len(recorder.storages.num_bytes) == num_storages
