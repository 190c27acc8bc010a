"""torch.fft against what it requested on an H100 and an H200 (torch 2.11, CUDA 13.0)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fft

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.registry import op_of
from memest.estimator.virtual_gpu import VirtualGpu
from tests.requested import Requests

DATA = Path(__file__).parents[1] / "data" / "fft.json.gz"
ROWS: list[Any] = json.loads(gzip.decompress(DATA.read_bytes()))


def real(shape: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def points(shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=torch.complex64, device="cuda")


def half(shape: list[int]) -> Tensor:
    return points([*shape[:-1], shape[-1] // 2 + 1])


SPACE = (-3, -2, -1)

CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, list[int]], Any]]] = {
    "fft": (points, lambda x, shape: fft.fft(x)),
    "rfft": (real, lambda x, shape: fft.rfft(x)),
    "irfft": (half, lambda x, shape: fft.irfft(x, n=shape[-1])),
    "fft_dim0": (points, lambda x, shape: fft.fft(x, dim=0)),
    "rfft_f64": (lambda shape: real(shape, torch.float64), lambda x, shape: fft.rfft(x)),
    "rfft_dim0": (real, lambda x, shape: fft.rfft(x, dim=0)),
    "irfft_dim0": (
        lambda shape: points([shape[0] // 2 + 1, shape[1]]),
        lambda x, shape: fft.irfft(x, n=shape[0], dim=0),
    ),
    "fft2": (points, lambda x, shape: fft.fft2(x)),
    "ifft2": (points, lambda x, shape: fft.ifft2(x)),
    "rfft2": (real, lambda x, shape: fft.rfft2(x)),
    "irfft2": (half, lambda x, shape: fft.irfft2(x, s=shape[-2:])),
    "fft3": (points, lambda x, shape: fft.fftn(x, dim=SPACE)),
    "rfft3": (real, lambda x, shape: fft.rfftn(x, dim=SPACE)),
    "irfft3": (half, lambda x, shape: fft.irfftn(x, s=shape[-3:], dim=SPACE)),
}
"""By name what makes the input, and a function of it and of the real shape."""


@pytest.mark.parametrize(
    ("shape", "dims", "is_modelled"),
    [((65536, 48), [1], True), ((65537, 48), [1], False), ((4, 8, 8), [1, 2], True),
     ((4, 8, 2048), [1, 2], False), ((2, 8, 8, 8), [1, 2, 3], True),
     ((2, 8, 34, 8), [1, 2, 3], False)],
)  # fmt: skip
def test_what_was_not_measured_is_not_modelled(
    shape: tuple[int, ...], dims: list[int], is_modelled: bool
) -> None:
    x = torch.empty(shape, dtype=torch.complex64, device="meta")
    op = torch.ops.aten._fft_c2c.default

    assert op_of(op).is_modelled((x, dims, 0, True), {}, find_gpu("h100-80gb")) is is_modelled


@pytest.mark.parametrize("name", CALLS)
def test_a_transform_asks_for_what_it_asked_for(name: str) -> None:
    """Transforms have 2 to 1,048,576 points, alone and in batches, or two or three dimensions."""
    make, call = CALLS[name]
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        requests = Requests(virtual)
        for _, shape, measured in (row for row in ROWS if row[0] == name):
            x = make(shape)
            found = requests.in_order(lambda: call(x, shape))  # noqa: B023

            assert found == measured, shape


OVER: dict[str, tuple[Callable[[], Tensor], list[int]]] = {
    "rfft2 (1, 2)": (lambda: fft.rfft2(real(LAST), dim=(1, 2)), [1662976, 1605632]),
    "rfft2 (2, 3)": (lambda: fft.rfft2(real(LAST), dim=(2, 3)), [1655808]),
    "rfft2 (1, 3)": (lambda: fft.rfft2(real(LAST), dim=(1, 3)), [1655808, 1605632]),
    "fft 1": (lambda: fft.fft(points(LAST), dim=1), [3211264, 3211264]),
    "fft 3": (lambda: fft.fft(points(LAST), dim=3), [3211264]),
    "fft 0": (lambda: fft.fft(points(LAST), dim=0), [3211264]),
    "fft2 (0, 1)": (lambda: fft.fft2(points(LAST), dim=(0, 1)), [3211264]),
    "ifft2 of a view": (
        lambda: fft.ifft2(points(LAST).permute(0, 3, 1, 2), dim=(2, 3)), [3211264, 3211264],
    ),
    "irfft 1": (
        lambda: fft.irfft(points([4, 15, 56, 64]), n=28, dim=1),
        [1720320, 1605632, 1720320, 1720320],
    ),
    "rfft 1 of a view": (lambda: fft.rfft(real(LAST).permute(0, 3, 1, 2), dim=1), [1655808]),
    "rfftn (1, 2, 3)": (lambda: fft.rfftn(real(LAST), dim=(1, 2, 3)), [1655808]),
}  # fmt: skip
"""Transforms of 4 x 28 x 56 x 64 numbers, and the bytes that an H100 was asked for."""

LAST = [4, 28, 56, 64]


@pytest.mark.parametrize("name", OVER)
def test_transforms_are_gathered_unless_the_other_dimensions_are_one(name: str) -> None:
    call, recorded = OVER[name]
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        seen = Requests(gpu).of(call)

    made = [size for size in seen if size > 0]
    assert made[-len(recorded) :] == recorded
