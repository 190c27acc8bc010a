"""Workspaces by the shapes of a convolution, against what an H100 took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memest.estimator.ops.cudnn_rules import (
    ConvolutionShapes,
    compiled_bytes,
    fourier_bytes,
    is_fourier,
    is_product,
    is_winograd,
    product_bytes,
    winograd_bytes,
    workspace_bytes,
)
from tests.convolutions import of_row

DIRECTIONS = ("forward", "input", "weight")
MEASURED = Path(__file__).parents[1] / "data" / "cudnn_workspaces.json"


def row(
    dtype: int,
    last: int,
    groups: int,
    sizes: tuple[int, int, int],
    side: int,
    out: int,
    window: int,
    padding: int,
) -> ConvolutionShapes:
    """A 2-D call without stride: samples, inputs and outputs are `sizes`."""
    return of_row((
        dtype, last, 2, groups, *sizes, 1, side, side, 1, out, out, 1, window, window,
        1, 1, 1, 0, padding, padding, 1, 1, 1,
    ))  # fmt: skip


def test_a_product_has_no_stride_padding_or_groups() -> None:
    assert is_product(row(0, 0, 1, (2, 3, 5), 7, 7, 1, 0))
    assert not is_product(row(0, 0, 1, (2, 3, 5), 7, 7, 3, 1))
    assert not is_product(row(0, 0, 1, (2, 3, 5), 7, 9, 1, 1))
    assert not is_product(row(0, 0, 3, (2, 3, 6), 7, 7, 1, 0))


def test_the_weight_of_a_product_in_nchw_has_a_partial_sum_for_each_sample() -> None:
    """ResNet-50's first 1x1 of 256 outputs: 32 samples of 64 x 256 float32."""
    call = row(0, 0, 1, (32, 64, 256), 56, 56, 1, 0)
    assert product_bytes(call, "weight") == 2097152
    assert product_bytes(call, "forward") == product_bytes(call, "input") == 0


@pytest.mark.parametrize(
    ("direction", "last", "groups", "sizes", "dtype", "side", "num_bytes"),
    [
        ("weight", 0, 1, (6, 64, 64), 0, 14, 2359296),
        ("weight", 0, 1, (2, 48, 96), 1, 8, 829440),
        ("weight", 0, 4, (16, 256, 256), 0, 10, 12976128),
        ("weight", 0, 100, (1, 6400, 12800), 0, 14, 12976128),
        ("weight", 1, 1, (4, 128, 128), 0, 112, 169934864),
        ("forward", 0, 1, (40, 20, 40), 2, 7, 1774080),
        ("forward", 0, 1, (32, 20, 20), 1, 8, 794880),
        ("input", 0, 1, (100, 12, 12), 2, 32, 24793344),
        ("input", 0, 1, (1, 128, 32), 2, 4, 958464),
    ],
)
def test_winograd_takes_what_was_measured(
    direction: str,
    last: int,
    groups: int,
    sizes: tuple[int, int, int],
    dtype: int,
    side: int,
    num_bytes: int,
) -> None:
    call = row(dtype, last, groups, sizes, side, side, 3, 1)
    assert is_winograd(call, direction)
    assert winograd_bytes(call, direction) == num_bytes
    assert not is_winograd(replace(call, dtype=torch.float64), direction), "float64"


def test_a_gpu_rejects_winograd_in_channels_last_except_for_the_weight() -> None:
    """Measured: 0 bytes forward, by the engine that comes next."""
    call = row(2, 1, 1, (32, 24, 24), 14, 14, 3, 1)
    assert [is_winograd(call, d) for d in DIRECTIONS] == [False, False, True]


@pytest.mark.parametrize(
    ("direction", "last", "sizes", "side", "out", "window", "padding", "num_bytes"),
    [
        ("forward", 0, (4, 64, 256), 40, 40, 1, 0, 562364416),
        ("forward", 0, (32, 3, 64), 256, 250, 7, 0, 1082168064),
        ("weight", 0, (4, 64, 256), 40, 40, 1, 0, 560201728),
        ("weight", 0, (64, 128, 64), 32, 32, 3, 1, 432013312),
        ("input", 0, (40, 20, 40), 160, 160, 3, 1, 24371200),
        ("input", 0, (1, 64, 3), 134, 128, 7, 0, 1418752),
        ("input", 0, (32, 64, 32), 24, 24, 5, 2, 22282240),
        ("input", 0, (128, 64, 64), 28, 28, 5, 2, 89128960),
        ("input", 1, (64, 32, 32), 72, 72, 5, 2, 125145104),
        ("input", 1, (64, 3, 64), 128, 128, 7, 3, 319214352),
    ],
)
def test_fourier_transforms_take_what_was_measured(
    direction: str,
    last: int,
    sizes: tuple[int, int, int],
    side: int,
    out: int,
    window: int,
    padding: int,
    num_bytes: int,
) -> None:
    call = row(0, last, 1, sizes, side, out, window, padding)
    assert is_fourier(call, direction)
    assert fourier_bytes(call, direction) == num_bytes
    assert not is_fourier(replace(call, dtype=torch.bfloat16), direction), "bfloat16"


def test_a_gpu_rejects_transforms_of_large_images_and_of_windows_of_one_row() -> None:
    """Measured: the engine that comes next runs, with 13 MB in place of 17 GB for the weight."""
    for length, is_accepted in ((250, True), (320, False)):
        call = of_row((
            0, 0, 1, 1, 64, 64, 64, 1, 1, length, 1, 1, length, 1, 1, 7,
            1, 1, 1, 0, 0, 3, 1, 1, 1,
        ))  # fmt: skip
        assert [is_fourier(call, d) for d in DIRECTIONS] == [is_accepted, False, is_accepted]


@pytest.mark.parametrize(
    ("sizes", "groups", "side", "window", "stride", "padding", "dtype", "num_bytes"),
    [
        ((96, 192, 384), 1, 32, 4, 2, 1, 0, 1888616464),
        ((96, 3, 96), 1, 128, 4, 2, 1, 0, 276486160),
        ((16, 64, 64), 1, 56, 3, 2, 1, 0, 110137360),
        ((2, 256, 128), 1, 112, 3, 2, 1, 0, 621593616),
        ((2, 3, 64), 1, 62, 3, 2, 1, 0, 5816464),
        ((32, 128, 64), 1, 31, 5, 4, 1, 0, 884088848),
        ((8, 128, 16), 1, 33, 5, 3, 2, 0, 125710352),
        ((8, 256, 16), 1, 14, 4, 2, 0, 0, 109398032),
        ((128, 512, 512), 2, 8, 3, 2, 1, 0, 3739484192),
        ((128, 256, 256), 32, 16, 3, 2, 1, 1, 192708736),
    ],
)
def test_strided_fourier_transforms_take_what_was_measured(
    sizes: tuple[int, int, int],
    groups: int,
    side: int,
    window: int,
    stride: int,
    padding: int,
    dtype: int,
    num_bytes: int,
) -> None:
    out = (side + 2 * padding - window) // stride + 1
    call = row(dtype, 0, groups, sizes, side, out, window, padding)
    call = replace(call, stride=(stride, stride))
    assert is_fourier(call, "input")
    assert not is_fourier(call, "forward")
    assert abs(fourier_bytes(call, "input") - num_bytes) <= 0.001 * num_bytes


def test_windows_without_overlap_take_no_transforms() -> None:
    call = replace(row(0, 0, 1, (2, 128, 128), 33, 8, 4, 0), stride=(4, 4))
    assert not is_fourier(call, "input")


@pytest.mark.parametrize(
    ("direction", "last", "dtype", "sizes", "groups", "side", "window", "num_bytes"),
    [
        ("forward", 0, 0, (16, 128, 128), 2, 32, 3, 363102240),
        ("input", 0, 0, (16, 128, 128), 2, 32, 3, 88080416),
        ("weight", 0, 0, (16, 128, 128), 2, 32, 3, 301989920),
        ("forward", 0, 0, (128, 256, 256), 32, 16, 3, 92555392),
        ("forward", 0, 1, (128, 256, 256), 32, 16, 3, 84166784),
        ("forward", 1, 1, (128, 256, 256), 32, 16, 3, 84176000),
        ("input", 1, 1, (128, 128, 128), 2, 32, 3, 388120608),
        ("forward", 0, 0, (128, 512, 512), 2, 8, 1, 487063584),
    ],
)
def test_transforms_of_groups_take_what_was_measured(
    direction: str,
    last: int,
    dtype: int,
    sizes: tuple[int, int, int],
    groups: int,
    side: int,
    window: int,
    num_bytes: int,
) -> None:
    call = row(dtype, last, groups, sizes, side, side, window, window // 2)
    assert fourier_bytes(call, direction) == num_bytes


@pytest.mark.parametrize(
    ("sizes", "side", "out", "window", "padding", "num_bytes"),
    [((5, 112, 112), 18, 18, 3, 1, 184320), ((80, 384, 384), 8, 8, 5, 2, 24576000)],
)
def test_a_depthwise_weight_has_eight_partial_sums_for_each_sample(
    sizes: tuple[int, int, int], side: int, out: int, window: int, padding: int, num_bytes: int
) -> None:
    call = row(1, 1, sizes[1], sizes, side, out, window, padding)
    assert compiled_bytes(call, "weight") == num_bytes
    assert compiled_bytes(call, "forward") == 0


@pytest.mark.parametrize(
    ("direction", "share"), [("forward", 0.68), ("input", 0.68), ("weight", 0.33)]
)
def test_the_estimate_without_cudnn_is_as_often_right_as_the_report_says(
    direction: str, share: float
) -> None:
    """Within 512 B of what was measured."""
    calls = json.loads(MEASURED.read_text())["calls"]
    place = DIRECTIONS.index(direction)
    right = [
        abs(workspace_bytes(of_row(c), direction) - sizes[place]) <= 512 for c, sizes, *_ in calls
    ]
    assert sum(right) >= share * len(calls)
