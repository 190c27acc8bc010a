"""Workspaces, copies and layouts of convolutions and batch norms, by hand and as measured."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.kernels import cudnn_convolution
from memest.estimator.kernels.batch_norm import takes_cudnn
from memest.estimator.kernels.convolution import (
    convolution_backward_events,
    convolution_outputs,
)
from memest.estimator.kernels.cudnn_search import by_trees, searches
from memest.estimator.kernels.scratch import TRIED, Scratch, scratch_of
from memest.estimator.kernels.staged import STAGED_EVENTS
from memest.estimator.kernels.tables import SCRATCH, is_partly_modelled
from memest.units import MIB

aten = torch.ops.aten
H100 = find_gpu("h100-80gb")
MEASURED = Path(__file__).parents[1] / "data" / "convolutions.json"
BLOCK_BYTES = 512
NUM_APART = 10
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
    events = STAGED_EVENTS[aten.convolution.default](args, {}, out, H100)
    return scratch_of(events), out


def backward(args: tuple[Any, ...], grad: Tensor, mask: tuple[bool, bool, bool]) -> list[int]:
    """Sizes that the backward asks for and gives back, in order."""
    tensor, weight, _, *rest = args
    call = (grad, tensor, weight, None, *rest, list(mask))
    events = STAGED_EVENTS[aten.convolution_backward.default](call, {}, None, H100)
    return [e.num_bytes for e in events]


def workspaces_of(call: dict[str, Any]) -> dict[str, int]:
    """Predicted workspaces of one measured call."""
    dtype = getattr(torch, call["dtype"])
    tensor, weight = (
        meta(*call[name], dtype=dtype, is_last=call["channels_last"])
        for name in ("tensor", "weight")
    )
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    args = (tensor, weight, None, *(call[name] for name in names))
    found, out = forward(args)
    for_input, for_weight = (
        sum(n for n in backward(args, out, mask)[1:] if n > 0)
        for mask in ((True, False, False), (False, True, False))
    )
    return {"forward": sum(found.after), "input": for_input, "weight_gradient": for_weight}


def in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def test_most_calls_of_another_measurement_are_exact_to_the_allocators_block() -> None:
    """Shares of 60 calls that were measured before the trees and their calls were."""
    calls = json.loads(MEASURED.read_text())["calls"]
    found = [(call, workspaces_of(call)) for call in calls]

    def share(name: str) -> float:
        return sum(in_blocks(p[name]) == in_blocks(c[name]) for c, p in found) / len(found)

    assert len(calls) == 60
    assert share("forward") >= 54 / 60
    assert share("input") >= 56 / 60
    assert share("weight_gradient") >= 36 / 60


@pytest.fixture(scope="module")
def kept_aside() -> tuple[list[Any], Any]:
    """What trees say of some measured calls of common networks that the fit did not see, and the
    workspaces that were measured.
    """
    data = cudnn_convolution.read()
    chosen = np.flatnonzero(data["kept_aside"] & data["is_common"])[::NUM_APART]
    calls = data["calls"][chosen].astype(np.int64)
    return [cudnn_convolution._by_trees(call[None]) for call in calls], data["workspaces"][chosen]


@pytest.mark.parametrize(
    ("direction", "share", "share_near"),
    [("forward", 0.84, 0.92), ("input", 0.86, 0.93), ("weight", 0.57, 0.76)],
)
def test_trees_are_right_where_the_fit_did_not_look(
    kept_aside: tuple[list[Any], Any], direction: str, share: float, share_near: float
) -> None:
    """Right to 512 B, within 1 MiB, and where it is sure: what `fit_convolutions.py` prints."""
    told, measured = kept_aside
    found = [each[direction] for each in told]
    sizes = measured[:, cudnn_convolution.DIRECTIONS.index(direction)].tolist()
    pairs = list(zip(found, sizes, strict=True))

    are_right = [in_blocks(f.num_bytes) == in_blocks(size) for f, size in pairs]
    are_near = [abs(f.num_bytes - size) <= MIB for f, size in pairs]
    are_sure = [right for right, (f, _) in zip(are_right, pairs, strict=True) if f.is_sure]

    assert len(told) > 1000
    assert sum(are_right) >= share * len(told)
    assert sum(are_near) >= share_near * len(told)
    assert len(are_sure) >= len(told) / 5
    assert sum(are_sure) >= 0.95 * len(are_sure)


def test_a_measured_call_is_given_as_it_was_measured() -> None:
    """ResNet-50's 3x3 in float32 at 32 images: operands in NCHW rearranged, and what it adds."""
    shapes = cudnn_convolution.ConvolutionShapes(
        (32, 64, 56, 56), (64, 64, 3, 3), (32, 64, 56, 56), (1, 1), (1, 1), (1, 1), 1,
        torch.float32, False,
    )  # fmt: skip
    found = cudnn_convolution.workspaces(shapes)

    plane, weight = 32 * 64 * 56 * 56 * 4, 64 * 64 * 9 * 4
    assert {d: w.num_bytes for d, w in found.items()} == {
        "forward": plane + weight + 16,
        "input": 2 * plane + weight + 16,
        "weight": 2 * plane + weight + 16 + 14 * weight + 663,
    }
    assert all(w.is_sure for w in found.values())


@pytest.mark.parametrize(
    ("deterministic", "tf32", "of_input", "of_weight"),
    [
        (False, True, 0, 0),
        (True, True, 8922128, 9035167),
        (False, False, 0, 0),
        (True, False, 0, 19786752),
    ],
)
def test_kernels_that_a_script_does_not_allow_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
    deterministic: bool,
    tf32: bool,
    of_input: int,
    of_weight: int,
) -> None:
    """The first convolution of a network for small images: what cuDNN said of each of the four."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    args = convolution(meta(32, 3, 32, 32), meta(64, 3, 3, 3), 1, 1)
    grad = aten.convolution.default(*args)

    for mask, num_bytes in (((True, False, False), of_input), ((False, True, False), of_weight)):
        sizes = backward(args, grad, mask)[1:]
        assert sizes == ([num_bytes, -num_bytes] if num_bytes else [])


def test_a_transposed_convolution_is_the_gradient_of_a_plain_one() -> None:
    """What it takes forward is what the gradient of the plain one's input takes."""
    plain = convolution(meta(16, 64, 32, 32), meta(128, 64, 4, 4), 2, 1)
    grad = aten.convolution.default(*plain)
    (of_input,) = backward(plain, grad, (True, False, False))[1:-1]
    (of_weight,) = backward(plain, grad, (False, True, False))[1:-1]

    transposed = (grad, plain[1], None, *plain[3:6], True, *plain[7:])
    found, out = forward(transposed)
    back = backward(transposed, out, (False, True, False))

    assert out.shape == plain[0].shape
    assert found.after == (of_input,)
    assert back[1] == of_weight


def test_forms_pad_channels_and_rearrange_what_they_name() -> None:
    """A batch of 2 images of 3 x 5 x 5 in float16, whose channels become 8."""
    shapes = cudnn_convolution.ConvolutionShapes(
        (2, 3, 5, 5), (4, 3, 3, 3), (2, 4, 5, 5), (1, 1), (1, 1), (1, 1), 1, HALF, False
    )
    call = np.array([shapes.row()])
    form = cudnn_convolution.Form(8, 1, True, True, False)
    assert form.num_bytes(call).tolist() == [(2 * 8 * 25 + 4 * 8 * 9) * 2]
    assert cudnn_convolution.FORMS[0].num_bytes(call).tolist() == [0]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


def resnet_3x3() -> cudnn_convolution.ConvolutionShapes:
    """ResNet-50's in float32 at 32 images."""
    image = (32, 64, 56, 56)
    return cudnn_convolution.ConvolutionShapes(
        image, (64, 64, 3, 3), image, (1, 1), (1, 1), (1, 1), 1, torch.float32, False
    )


@pytest.mark.usefixtures("benchmark")
def test_the_benchmark_tries_the_largest_workspace_that_any_kernel_asks_for() -> None:
    """Before each direction takes its own; what is tried is no temporary of every call."""
    args = convolution(meta(32, 64, 56, 56), meta(64, 64, 3, 3), 1, 1)
    out = aten.convolution.default(*args)
    call = (out, args[0], args[1], None, *args[3:], [True, True, False])
    forwards = STAGED_EVENTS[aten.convolution.default](args, {}, out, H100)
    backwards = STAGED_EVENTS[aten.convolution_backward.default](call, {}, None, H100)
    expected = searches(resnet_3x3())

    assert [e.output for e in forwards] == [0, TRIED, None]
    assert [e.output for e in backwards] == [0, TRIED, None, None, 1, TRIED, None, None]
    sizes = [e.num_bytes for e in (*forwards, *backwards) if e.output == TRIED]
    assert sizes == [expected[d].num_bytes[0] for d in cudnn_convolution.DIRECTIONS]
    assert scratch_of(forwards) == Scratch(after=(cudnn_workspace(resnet_3x3(), "forward"),))


def cudnn_workspace(shapes: cudnn_convolution.ConvolutionShapes, direction: str) -> int:
    return cudnn_convolution.workspaces(shapes)[direction].num_bytes


def test_what_is_tried_is_at_least_what_is_taken() -> None:
    found = searches(resnet_3x3())
    assert all(search.is_sure for search in found.values())
    assert all(
        search.num_bytes[0] >= cudnn_workspace(resnet_3x3(), d) for d, search in found.items()
    )


@pytest.mark.usefixtures("benchmark")
def test_a_call_about_which_cudnn_was_not_asked_is_reported() -> None:
    odd = convolution(meta(3, 17, 301, 203), meta(29, 17, 3, 3))
    measured = convolution(meta(32, 64, 56, 56), meta(64, 64, 3, 3), 1, 1)

    assert is_partly_modelled(aten.convolution.default, odd, {}, H100)
    assert not is_partly_modelled(aten.convolution.default, measured, {}, H100)


MORE_FAMILIES = (
    "2.4 % off: 215,600 calls of other families came after the bound, and the tree of what is "
    "tried has as many leaves as before"
)


@cache
def away_from_tried(direction: str) -> Any:
    """How far trees are off from what cuDNN says of calls that the fit did not see, by their size:
    what `fit_convolutions.py` prints.
    """
    data = cudnn_convolution.read()
    rows = data["kept_aside"] & data["is_common"] & (data["tried"].min((1, 2)) >= 0)
    calls = data["calls"][rows][::NUM_APART].astype(np.int64)
    largest = data["tried"][rows][::NUM_APART, cudnn_convolution.DIRECTIONS.index(direction), 0]
    found = np.array([by_trees(call[None], direction) for call in calls])
    assert len(calls) > 1000
    return np.abs(found - largest) / np.maximum(largest, MIB)


@pytest.mark.parametrize(
    ("direction", "median"),
    [
        ("forward", 0.04),
        pytest.param("input", 0.02, marks=pytest.mark.xfail(reason=MORE_FAMILIES, strict=True)),
        ("weight", 0.09),
    ],
)
def test_what_is_tried_is_near_in_the_median(direction: str, median: float) -> None:
    assert np.median(away_from_tried(direction)) <= median


@pytest.mark.parametrize(
    ("direction", "share"), [("forward", 0.70), ("input", 0.80), ("weight", 0.54)]
)
def test_what_is_tried_is_within_a_tenth(direction: str, share: float) -> None:
    assert (away_from_tried(direction) <= 0.1).mean() >= share


def test_channels_last_copies_the_weight_only() -> None:
    tensor, weight = meta(8, 64, 56, 56, dtype=HALF), meta(64, 64, 3, 3, dtype=HALF)
    last = torch.channels_last
    args = convolution(tensor.contiguous(memory_format=last), weight, 1, 1)

    found, out = forward(args)

    assert out.is_contiguous(memory_format=last)
    assert found == Scratch(after=(64 * 64 * 9 * 2,))


def test_a_native_depthwise_convolution_computes_the_gradient_of_the_weight_first() -> None:
    args = convolution(meta(8, 96, 56, 56), meta(96, 1, 7, 7), 1, 3)
    found = backward(args, meta(8, 96, 56, 56), (True, True, False))
    assert found == [96 * 49 * 4, 8 * 96 * 56 * 56 * 4]


def test_a_float16_depthwise_convolution_goes_to_cudnn_and_the_input_comes_first() -> None:
    args = convolution(meta(8, 576, 16, 16, dtype=HALF), meta(576, 1, 3, 3, dtype=HALF))
    found = backward(args, meta(8, 576, 14, 14, dtype=HALF), (True, True, False))
    assert found[0] == 8 * 576 * 16 * 16 * 2
    assert 576 * 9 * 2 in found[1:]


def test_calls_whose_like_were_not_right_are_reported() -> None:
    def reported(*args: Any, gpu: Gpu = H100) -> bool:
        return is_partly_modelled(aten.convolution.default, convolution(*args), {}, gpu)

    measured = meta(32, 64, 56, 56), meta(64, 64, 3, 3), 1, 1
    assert not reported(*measured)
    assert reported(*measured, gpu=find_gpu("a100-80gb")), "measured on another generation"
    assert not reported(meta(8, 96, 57, 51), meta(96, 1, 7, 7), 1, 3), "torch's own kernel"


@pytest.mark.parametrize(
    ("dtype", "shape", "of_forward", "of_backward"),
    [
        (HALF, (32, 64, 112, 112), 1295720, 2142244),
        (HALF, (32, 256, 56, 56), 1297280, 2143280),
        (HALF, (32, 24, 56, 56), 325124, 536612),
        (HALF, (32, 160, 7, 7), 16564, 27180),
        (torch.float32, (16, 64, 256, 256), 8455220, 5593636),
        (torch.float32, (16, 256, 128, 128), 8455232, 5594160),
        (torch.float32, (16, 2048, 16, 16), 1057968, 705696),
    ],
)
def test_batch_norm_of_channels_last_takes_what_was_measured(
    dtype: torch.dtype, shape: tuple[int, ...], of_forward: int, of_backward: int
) -> None:
    """ResNet-50 and MobileNetV2 in float16, ResNet-50 in float32, on an H100."""
    tensor, channel = meta(*shape, dtype=dtype, is_last=True), meta(shape[1])
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


def test_a_gradient_with_gaps_is_copied_for_each_direction() -> None:
    """Half of a gradient of joined channels, as recorded on an H100: a 1x1 convolution of 64 images
    of 64 x 64 pixels, from 256 channels to 128.
    """
    tensor, weight = meta(64, 256, 64, 64), meta(128, 256, 1, 1)
    grad = meta(64, 256, 64, 64).narrow(1, 0, 128)
    args = (grad, tensor, weight, [128], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
    out = aten.convolution_backward.default(*args)
    events = convolution_backward_events(args, {}, out, H100)
    of_grad, of_weight = 134217728, 131072

    assert [event.num_bytes for event in events] == [
        2 * of_grad, of_grad, 400, -400, -of_grad,
        of_grad, of_weight, 8389008, -8389008, -of_grad,
        512, 2560, 512, -512, -2560,
    ]  # fmt: skip


def test_a_gradient_in_another_order_is_copied_once() -> None:
    """`to(memory_format)` comes before both directions."""
    tensor, weight = meta(8, 64, 56, 56), meta(32, 64, 3, 3)
    grad = meta(8, 32, 56, 56, is_last=True)
    args = (grad, tensor, weight, [32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3)
    events = convolution_backward_events(args, {}, aten.convolution_backward.default(*args), H100)
    sizes = [event.num_bytes for event in events]

    assert sizes[0] == 4 * grad.numel()
    assert sizes.count(4 * grad.numel()) == 1


def test_a_gradient_of_one_pixel_is_copied_only_where_the_input_was() -> None:
    """A squeeze-and-excite block: its input lies in both orders, so no other is asked for."""
    weight = meta(1536, 40, 1, 1, is_last=True)
    grad, one_pixel = meta(8, 1536, 1, 1), meta(8, 40, 1, 1)
    rest = ([1536], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])

    found = STAGED_EVENTS[aten.convolution_backward.default](
        (grad, one_pixel, weight, *rest), {}, (one_pixel, weight, meta(1536)), H100
    )

    assert next(event for event in found).output == 0, "no copy before the input's gradient"
