"""Losses, windows and draws: which tensors a kernel asks for, as recorded on an H100."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.kernels.draws import randperm_bits
from memest.estimator.kernels.indexing import sort_scratch
from memest.estimator.kernels.scratch import Scratch
from memest.estimator.kernels.staged import STAGED_EVENTS
from memest.estimator.kernels.tables import OUTPUT_BYTES, SCRATCH, is_partly_modelled

aten = torch.ops.aten
H100 = find_gpu("h100-80gb")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sizes(func: Any, args: tuple[Any, ...], out: Any, **kwargs: Any) -> list[int]:
    """Bytes asked for, outputs among them, in order."""
    return [e.num_bytes for e in STAGED_EVENTS[func](args, kwargs, out, H100) if e.num_bytes > 0]


def test_the_gradient_of_a_resized_image_is_copied_where_it_is_expanded() -> None:
    grad = meta(1).expand(4, 16, 64, 64)
    rule = SCRATCH[aten.upsample_bilinear2d_backward.default]

    assert rule((grad,), {}, meta(4, 16, 32, 32), H100) == Scratch(after=(1048576,))
    assert rule((grad.contiguous(),), {}, meta(4, 16, 32, 32), H100) == Scratch()
    assert rule((grad,), {}, meta(4, 16, 64, 64), H100) == Scratch(), "copied as it is"


def test_sliding_windows_outgrow_a_tensor_of_the_input_size() -> None:
    func, image, columns = aten.im2col.default, meta(4, 16, 32, 32), meta(4, 144, 900)

    assert sizes(func, (image,), columns) == [262144, 2073600]


def test_what_is_put_together_of_windows_keeps_the_storage_of_their_size() -> None:
    func, image, columns = aten.col2im.default, meta(4, 16, 32, 32), meta(4, 144, 900)

    assert sizes(func, (columns,), image) == [2073600]
    assert sizes(func, (meta(1).expand(4, 144, 900),), image) == [2073600, 2073600]


def test_a_loss_of_logits_holds_the_log_sigmoid_and_itself() -> None:
    func, x = aten.binary_cross_entropy_with_logits.default, meta(64, 1000)

    assert sizes(func, (x, x), meta()) == [256000, 256000, 4]
    assert sizes(func, (x, x, None, None, 0), x) == [256000, 256000]
    assert sizes(func, (x, x, None, meta(1000)), meta()) == [256000, 4000, 256000, 256000, 4]


def test_a_smooth_loss_keeps_its_elements_and_a_huber_loss_does_not() -> None:
    args = meta(64, 1000), meta(64, 1000)
    smooth, huber = aten.smooth_l1_loss.default, aten.huber_loss.default

    assert OUTPUT_BYTES[smooth](args, {}, meta(), H100) == [256000]
    assert SCRATCH[smooth](args, {}, meta(), H100) == Scratch(after=(256000,))
    assert SCRATCH[huber](args, {}, meta(), H100) == Scratch(before=(256000,))


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
    assert (randperm_bits(count) <= 32) == (count < 100000)


@pytest.mark.parametrize(
    ("shape", "dtype", "asked"),
    [
        ((1, 50257), torch.float32, (402056, 622335)),
        ((1, 50257), torch.bfloat16, (402056, 516607)),
        ((4, 32000), torch.float32, (1024000, 1024000, 512000, 1569279)),
        ((4, 32000), torch.bfloat16, (1024000, 1024000, 256000, 1308159)),
        ((128, 5000), torch.float32, (5120000, 7680255)),
    ],
)
def test_long_rows_are_sorted_by_keys_of_their_own_size(
    shape: tuple[int, int], dtype: torch.dtype, asked: tuple[int, ...]
) -> None:
    x = meta(*shape, dtype=dtype)

    assert sort_scratch((x, -1), {}, None, H100) == Scratch(after=asked)
    assert not is_partly_modelled(aten.sort.default, (x, -1), {}, H100)
    assert is_partly_modelled(aten.sort.default, (x.t(), 0), {}, H100)


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


def test_the_gradient_of_a_bag_sorts_however_few_indices() -> None:
    indices, bags = meta(640, dtype=torch.int64), meta(64, dtype=torch.int64)
    args = (meta(64, 64), indices, bags, indices, bags, bags, 1000, False, 0, False, None)
    asked = sizes(aten._embedding_bag_backward.default, args, meta(1000, 64))

    assert asked == [
        5120, 5120, 5120, 1, 256000, 5120, 8, 5120, 1279, 5120, 5120, 1279, 8, 5632, 180224,
    ]  # fmt: skip
    assert not is_partly_modelled(aten._embedding_bag_backward.default, args, {}, H100)
