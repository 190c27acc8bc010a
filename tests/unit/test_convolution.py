"""Workspaces, copies and layouts of convolutions and batch norms, by hand and as measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.kernels.batch_norm import takes_cudnn
from memest.estimator.kernels.convolution import backward_workspaces, convolution_outputs
from memest.estimator.kernels.scratch import Scratch
from memest.estimator.kernels.staged import STAGED_EVENTS
from memest.estimator.kernels.tables import SCRATCH, is_partly_modelled

aten = torch.ops.aten
H100 = find_gpu("h100-80gb")
MEASURED = Path(__file__).parents[1] / "data" / "convolutions.json"
BLOCK_BYTES = 512
HALF = torch.float16


def meta(*shape: int, dtype: torch.dtype = torch.float32, is_last: bool = False) -> Tensor:
    """A tensor without data, channels-last if asked for."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return tensor.contiguous(memory_format=torch.channels_last) if is_last else tensor


def convolution(
    tensor: Tensor, weight: Tensor, stride: int = 1, padding: int = 0
) -> tuple[Any, ...]:
    """Arguments of `convolution` in two dimensions; the groups follow from the shapes."""
    groups = tensor.shape[1] // weight.shape[1]
    return (
        tensor, weight, None, [stride] * 2, [padding] * 2, [1] * 2, False, [0] * 2, groups
    )  # fmt: skip


def forward(args: tuple[Any, ...]) -> tuple[Scratch, Tensor]:
    """What the forward allocates beside its output, and the output as CUDA lays it out."""
    out = convolution_outputs(aten.convolution.default, args, aten.convolution.default(*args))
    return SCRATCH[aten.convolution.default](args, {}, out, H100), out


def backward(args: tuple[Any, ...], grad: Tensor, mask: tuple[bool, bool, bool]) -> list[int]:
    """Sizes that the backward asks for and gives back, in order."""
    tensor, weight, _, *rest = args
    call = (grad, tensor, weight, None, *rest, list(mask))
    events = STAGED_EVENTS[aten.convolution_backward.default](call, {}, None, H100)
    return [e.num_bytes for e in events]


def workspaces(call: dict[str, Any]) -> dict[str, int]:
    """Predicted workspaces of one measured call."""
    dtype = getattr(torch, call["dtype"])
    tensor, weight = (
        meta(*call[name], dtype=dtype, is_last=call["channels_last"])
        for name in ("tensor", "weight")
    )
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    args = (tensor, weight, None, *(call[name] for name in names))
    found, out = forward(args)
    for_input, for_weight = backward_workspaces((out, tensor, weight, None, *args[3:]), H100)
    return {"forward": sum(found.after), "input": for_input, "weight_gradient": for_weight}


def in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def test_most_measured_workspaces_are_exact_to_the_allocators_block() -> None:
    """Shares of 60 measured calls, in blocks of 512 B, in which nothing and 400 B differ by one.

    Over all 1377 calls of the half that was kept aside: 90 %, 92 % and 60 %.
    """
    calls = json.loads(MEASURED.read_text())["calls"]
    found = [(call, workspaces(call)) for call in calls]

    def share(name: str) -> float:
        near = [abs(in_blocks(p[name]) - in_blocks(c[name])) <= 1 for c, p in found]
        return sum(near) / len(near)

    assert len(calls) == 60
    assert share("forward") >= 55 / 60
    assert share("input") >= 50 / 60
    assert share("weight_gradient") >= 37 / 60


def test_an_nchw_convolution_of_half_precision_rearranges_all_operands() -> None:
    """ResNet's 128 channels of 28x28: input, weight and output, and 16 B."""
    args = convolution(meta(8, 128, 28, 28, dtype=HALF), meta(128, 128, 3, 3, dtype=HALF), 1, 1)
    plane = 8 * 128 * 28 * 28 * 2
    assert forward(args)[0].after == (2 * plane + 128 * 128 * 9 * 2 + 16,)


def test_a_float32_convolution_of_few_channels_writes_nchw_itself() -> None:
    args = convolution(meta(8, 64, 56, 56), meta(64, 64, 3, 3), 1, 1)
    assert forward(args)[0].after == (8 * 64 * 56 * 56 * 4 + 64 * 64 * 9 * 4 + 16,)


def test_a_1x1_convolution_is_a_product_per_sample_and_so_is_its_weight_gradient() -> None:
    args = convolution(meta(8, 256, 56, 56), meta(64, 256, 1, 1))
    grad = meta(8, 64, 56, 56)

    assert forward(args)[0] == Scratch()
    weight = 64 * 256 * 4
    assert backward(args, grad, (False, True, False)) == [weight, 8 * weight, -8 * weight]


def test_channels_last_needs_no_workspace_and_stays() -> None:
    tensor, weight = meta(8, 64, 56, 56, dtype=HALF), meta(64, 64, 3, 3, dtype=HALF)
    last = torch.channels_last
    args = convolution(tensor.contiguous(memory_format=last), weight, 1, 1)

    found, out = forward(args)

    assert out.is_contiguous(memory_format=last)
    assert found == Scratch(after=(64 * 64 * 9 * 2,)), "only the weight is copied"


def test_a_native_depthwise_convolution_computes_the_gradient_of_the_weight_first() -> None:
    args = convolution(meta(8, 96, 56, 56), meta(96, 1, 7, 7), 1, 3)
    found = backward(args, meta(8, 96, 56, 56), (True, True, False))
    assert found == [96 * 49 * 4, 8 * 96 * 56 * 56 * 4]


def test_a_float16_depthwise_convolution_goes_to_cudnn_and_the_input_comes_first() -> None:
    args = convolution(meta(8, 576, 16, 16, dtype=HALF), meta(576, 1, 3, 3, dtype=HALF))
    found = backward(args, meta(8, 576, 14, 14, dtype=HALF), (True, True, False))
    assert found == [8 * 576 * 16 * 16 * 2, 576 * 9 * 2]


def test_a_weight_gradient_keeps_a_partial_sum_per_cut() -> None:
    """64 x 576 in 9 tiles of 64 x 64: 132 multiprocessors hold 14 of each, and their counters."""
    args = convolution(meta(8, 64, 56, 56, is_last=True), meta(64, 64, 3, 3, is_last=True), 1, 1)
    grad = meta(8, 64, 56, 56, is_last=True)

    weight, sums = 64 * 64 * 9 * 4, 14 * 64 * 576 * 4 + 127 + 4 * (9 * 14 + 8)
    assert sums == 2065047, "as measured"
    assert backward(args, grad, (False, True, False)) == [weight, sums, -sums]


def test_calls_whose_kernel_cudnn_chooses_by_itself_are_reported() -> None:
    def reported(*args: Any) -> bool:
        return is_partly_modelled(aten.convolution.default, convolution(*args), {}, H100)

    plain = meta(8, 64, 56, 56, dtype=HALF)
    assert not reported(plain, meta(64, 64, 3, 3, dtype=HALF), 1, 1)
    assert reported(plain, meta(64, 64, 1, 1, dtype=HALF))
    assert reported(meta(8, 64, 56, 56), meta(64, 64, 3, 3), 1, 1)


@pytest.mark.parametrize(
    ("shape", "of_forward", "of_backward"),
    [
        ((32, 64, 112, 112), 1295720, 2142244),
        ((32, 256, 56, 56), 1297280, 2143280),
        ((32, 24, 56, 56), 325124, 536612),
        ((32, 160, 7, 7), 16564, 27180),
    ],
)
def test_batch_norm_of_channels_last_takes_what_was_measured(
    shape: tuple[int, ...], of_forward: int, of_backward: int
) -> None:
    """ResNet-50 and MobileNetV2 in float16 on an H100."""
    tensor, channel = meta(*shape, dtype=HALF, is_last=True), meta(shape[1])
    call = (tensor, channel, channel, channel, channel, True, 0.1, 1e-5)
    back = (tensor, tensor, channel, channel, channel, channel, channel, 1e-5, meta(0))

    found = SCRATCH[aten.cudnn_batch_norm.default](call, {}, None, H100)
    found_back = SCRATCH[aten.cudnn_batch_norm_backward.default](back, {}, None, H100)

    assert found == Scratch(after=(of_forward,))
    assert found_back == Scratch(after=(of_backward,))


def test_cudnn_normalises_what_it_can() -> None:
    """`_select_batch_norm_backend`: no bfloat16, at least three dimensions, weight and bias."""
    channel = meta(4)
    stats = channel, channel

    def chosen(tensor: Tensor, weight: Tensor | None = channel, is_training: bool = True) -> bool:
        return takes_cudnn(tensor, weight, weight, *stats, is_training=is_training, is_enabled=True)

    assert chosen(meta(2, 4, 8, 8))
    assert chosen(meta(2, 4, 8, 8, dtype=HALF))
    assert not chosen(meta(2, 4, 8, 8, dtype=torch.bfloat16))
    assert not chosen(meta(2, 4))
    assert not chosen(meta(2, 4, 8, 8), None)
    assert not chosen(meta(65536, 4, 1), is_training=False)
