"""Workspaces, copies and layouts of convolutions and batch norms, by hand and as measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.ops import convolution as convolution_module
from memest.estimator.ops.convolution import (
    Workspace,
    tried_bytes,
    workspace,
)
from memest.estimator.ops.cudnn_rules import ConvolutionShapes
from memest.estimator.ops.normalization import takes_cudnn
from memest.estimator.ops.registry import op_of
from memest.estimator.ops.temporaries import TRIED, Scratch
from memest.estimator.virtual_gpu import VirtualGpu
from tests.op_calls import A100, laid_out, requested, scratch
from tests.requested import Requests
from tests.requests_at_peak import scratch_of

aten = torch.ops.aten
H100 = find_gpu("h100-80gb")
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
    out = laid_out(aten.convolution.default, args, aten.convolution.default(*args))
    events = requested(aten.convolution.default, args, {}, out, H100)
    return scratch_of(events), out


def backward(args: tuple[Any, ...], grad: Tensor, mask: tuple[bool, bool, bool]) -> list[int]:
    """Sizes that the backward asks for and gives back, in order."""
    tensor, weight, _, *rest = args
    call = (grad, tensor, weight, None, *rest, list(mask))
    events = requested(aten.convolution_backward.default, call, {}, None, H100)
    return [e.num_bytes for e in events]


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


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


def resnet_3x3() -> ConvolutionShapes:
    """ResNet-50's in float32 at 32 images."""
    image = (32, 64, 56, 56)
    return ConvolutionShapes(
        image, (64, 64, 3, 3), image, (1, 1), (1, 1), (1, 1), 1, torch.float32, False
    )


@pytest.mark.usefixtures("benchmark")
def test_the_benchmark_tries_the_largest_workspace_that_any_kernel_requests() -> None:
    """Before each direction requests its own workspace; later calls try nothing."""
    args = convolution(meta(32, 64, 56, 56), meta(64, 64, 3, 3), 1, 1)
    out = aten.convolution.default(*args)
    call = (out, args[0], args[1], None, *args[3:], [True, True, False])
    forwards = requested(aten.convolution.default, args, {}, out, H100)
    backwards = requested(aten.convolution_backward.default, call, {}, None, H100)
    tried = [tried_bytes(resnet_3x3(), d, H100) for d in ("forward", "input", "weight")]

    sizes = [e.num_bytes for e in (*forwards, *backwards) if e.output == TRIED]
    assert sizes == [num_bytes for of_direction in tried for num_bytes in of_direction]
    own = workspace(resnet_3x3(), "forward", H100).num_bytes
    assert scratch_of(forwards) == Scratch(after=(own,))
    assert max(tried[0]) >= own


@pytest.mark.usefixtures("benchmark")
def test_the_benchmark_is_reported() -> None:
    args = convolution(meta(32, 64, 56, 56), meta(64, 64, 3, 3), 1, 1)
    assert not op_of(aten.convolution.default).is_modelled(args, {}, H100)


def test_an_estimated_workspace_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    args = convolution(meta(32, 64, 56, 56), meta(64, 64, 3, 3), 1, 1)
    for is_by_library in (False, True):
        found = Workspace(512, is_by_library=is_by_library)
        monkeypatch.setattr(convolution_module, "workspace", lambda *args, f=found: f)
        assert op_of(aten.convolution.default).is_modelled(args, {}, H100) is is_by_library


def test_bfloat16_on_turing_ends_with_the_error_of_torch() -> None:
    """cuDNN has no engine for it, so torch finds none (Conv_v8.cpp)."""
    turing = find_gpu("t4")
    for dtype in (torch.bfloat16, HALF):
        args = convolution(meta(2, 8, 9, 9, dtype=dtype), meta(8, 8, 3, 3, dtype=dtype))
        out = aten.convolution.default(*args)
        if dtype is HALF:
            assert requested(aten.convolution.default, args, {}, out, turing)
        else:
            with pytest.raises(RuntimeError, match=r"^GET was unable to find an engine to execute"):
                requested(aten.convolution.default, args, {}, out, turing)


def test_channels_last_copies_the_weight_only() -> None:
    tensor, weight = meta(8, 64, 56, 56, dtype=HALF), meta(64, 64, 3, 3, dtype=HALF)
    last = torch.channels_last
    args = convolution(tensor.contiguous(memory_format=last), weight, 1, 1)

    found, out = forward(args)

    assert out.is_contiguous(memory_format=last)
    assert found == Scratch(after=(64 * 64 * 9 * 2,))


@pytest.mark.parametrize("is_last", [False, True])
def test_gradients_have_the_format_of_input_and_weight_whatever_the_meta_kernel_gives(
    is_last: bool,
) -> None:
    """The meta kernel of torch 2.11 follows the incoming gradient."""
    expected = torch.channels_last if is_last else torch.contiguous_format
    other = torch.contiguous_format if is_last else torch.channels_last
    x = torch.empty(2, 64, 8, 8, device="meta").contiguous(memory_format=expected)
    weight = torch.empty(64, 64, 3, 3, device="meta")
    of_meta = tuple(t.contiguous(memory_format=other) for t in (x, weight))

    made = laid_out(aten.convolution_backward.default, (x, x, weight), (*of_meta, torch.empty(64)))

    assert all(t.is_contiguous(memory_format=expected) for t in made[:2])


def test_a_native_depthwise_convolution_copies_an_expanded_weight_before_the_output() -> None:
    """DepthwiseConv2d.cu; recorded on an H200 in BigVGAN, whose filters are expanded."""
    weight = torch.empty(1, 1, 12, 1, device="meta").expand(96, 1, 12, 1)

    taken = forward(convolution(meta(8, 96, 56, 12), weight))[0]
    of_cudnn = forward(convolution(meta(8, 1, 56, 12), weight))[0]

    assert (taken.before, taken.after) == ((96 * 12 * 4,), ())
    args, grad = convolution(meta(8, 96, 56, 12), weight), meta(8, 96, 45, 12)
    of_input = [4608, 8 * 96 * 56 * 12 * 4, -4608]
    assert backward(args, grad, (True, False, False)) == of_input
    assert of_cudnn.before == ()
    assert of_cudnn.after[0] == 96 * 12 * 4


def test_a_native_depthwise_convolution_computes_the_gradient_of_the_weight_first() -> None:
    args = convolution(meta(8, 96, 56, 56), meta(96, 1, 7, 7), 1, 3)
    found = backward(args, meta(8, 96, 56, 56), (True, True, False))
    assert found == [96 * 49 * 4, 8 * 96 * 56 * 56 * 4]


def test_the_input_of_one_dimension_is_copied_until_the_bias_is_done() -> None:
    """Recorded on an H100 in a ConvNeXt block of vocos: 4 x 256 x 65, 7 wide, depthwise."""
    turned = torch.empty(4, 65, 256, device="meta").transpose(1, 2)
    args = (
        turned, turned, meta(256, 1, 7), [256], [1], [3], [1], False, [0], 256, [True] * 3,
    )  # fmt: skip
    out = (meta(4, 256, 65), args[2], meta(256))
    copy = 266240

    events = requested(aten.convolution_backward.default, args, {}, out, H100)

    assert [event.num_bytes for event in events] == [
        copy, copy, 7168, copy, -copy, 1024, -copy,
    ]  # fmt: skip


def test_a_float16_depthwise_convolution_goes_to_cudnn_and_the_input_comes_first() -> None:
    args = convolution(meta(8, 576, 16, 16, dtype=HALF), meta(576, 1, 3, 3, dtype=HALF))
    found = backward(args, meta(8, 576, 14, 14, dtype=HALF), (True, True, False))
    assert found[0] == 8 * 576 * 16 * 16 * 2
    assert 576 * 9 * 2 in found[1:]


def test_other_generations_are_reported_and_kernels_of_torch_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reported(*args: Any, gpu: Gpu = H100) -> bool:
        return not op_of(aten.convolution.default).is_modelled(convolution(*args), {}, gpu)

    found = Workspace(512, is_by_library=True)
    monkeypatch.setattr(convolution_module, "workspace", lambda *args: found)
    plain = meta(32, 64, 56, 56), meta(64, 64, 3, 3), 1, 1
    assert not reported(*plain)
    assert reported(*plain, gpu=find_gpu("a100-80gb")), "compared with no measured call"
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

    found = requested(aten.cudnn_batch_norm.default, call, {}, None, H100)
    found_back = requested(aten.cudnn_batch_norm_backward.default, back, {}, None, H100)

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


def test_a_gradient_with_gaps_is_copied_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a gradient of joined channels, as recorded on an H100: a 1x1 convolution of 64 images
    of 64 x 64 pixels, from 256 channels to 128.
    """
    sizes = {"input": 400, "weight": 8389008}
    monkeypatch.setattr(convolution_module, "workspace", lambda c, d, *_: Workspace(sizes[d], True))
    tensor, weight = meta(64, 256, 64, 64), meta(128, 256, 1, 1)
    grad = meta(64, 256, 64, 64).narrow(1, 0, 128)
    args = (grad, tensor, weight, [128], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
    out = aten.convolution_backward.default(*args)
    events = requested(aten.convolution_backward.default, args, {}, out, H100)
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
    events = requested(
        aten.convolution_backward.default, args, {}, aten.convolution_backward.default(*args), H100
    )
    sizes = [event.num_bytes for event in events]

    assert sizes[0] == 4 * grad.numel()
    assert sizes.count(4 * grad.numel()) == 1


def test_a_gradient_of_one_pixel_is_copied_only_where_the_input_was() -> None:
    """A squeeze-and-excite block: its input lies in both orders, so no other is asked for."""
    weight = meta(1536, 40, 1, 1, is_last=True)
    grad, one_pixel = meta(8, 1536, 1, 1), meta(8, 40, 1, 1)
    rest = ([1536], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])

    found = requested(
        aten.convolution_backward.default,
        (grad, one_pixel, weight, *rest),
        {},
        (one_pixel, weight, meta(1536)),
        H100,
    )

    assert next(event for event in found).output == 0, "no copy before the input's gradient"


def test_a_16_bit_convolution_rearranges_all_operands() -> None:
    """3 channels padded to 8 (16 B); output and weight likewise; 16 B more."""
    batch, out_channels, patch = 4, 1408, 14
    args = (
        meta(batch, 3, 224, 224, dtype=torch.bfloat16),
        meta(out_channels, 3, patch, patch, dtype=torch.bfloat16),
        None,
        [patch, patch], [0, 0], [1, 1], False, [0, 0], 1,
    )  # fmt: skip

    found = scratch(aten.convolution.default, *args, on=H100)

    image, weight = batch * 8 * 224 * 224 * 2, out_channels * 8 * patch * patch * 2
    assert found.after == (image + weight + batch * out_channels * 16 * 16 * 2 + 16,)
    assert op_of(aten.convolution.default).is_modelled(args, {}, H100)
    assert not op_of(aten.convolution.default).is_modelled(args, {}, A100)


def test_a_convolution_over_time_takes_next_to_nothing() -> None:
    patches, weight = (meta(n, 3, 2, 14, 14, dtype=torch.bfloat16) for n in (40, 24))
    args = (patches, weight, None, [2, 14, 14], [0] * 3, [1] * 3, False, [0] * 3, 1)

    assert sum(scratch(aten.convolution.default, *args, on=H100).after) < 512


def test_a_convolution_copies_its_gradient_until_the_weight_is_done() -> None:
    """Conv of 3 channels padded to 8 (16 B): input, weight and gradient rearranged, with what the
    kernel asks for by itself; bias last.
    """
    batch, width, patch = 1, 1408, 14
    grad = meta(batch, 16, 16, width, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    args = (
        grad,
        meta(batch, 3, 224, 224, dtype=torch.bfloat16),
        meta(width, 3, patch, patch, dtype=torch.bfloat16),
        [width], [patch, patch], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True],
    )  # fmt: skip
    out = (None, args[2], meta(width, dtype=torch.bfloat16))

    found = [e.num_bytes for e in requested(aten.convolution_backward.default, args, {}, out, H100)]

    copy, weight = 256 * width * 2, width * 3 * patch * patch * 2
    rearranged = 8 * 224 * 224 * 2 + width * 8 * patch * patch * 2 + copy
    workspace = found[2]
    assert rearranged <= workspace <= rearranged + 512
    assert found[:6] == [copy, weight, workspace, -workspace, -copy, width * 2]


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_gradient_of_a_bias_is_summed_in_float32_if_autocast_is_on(is_inside: bool) -> None:
    """Recorded on an H100 (field/lit_gan.py): a manual backward of Lightning is in autocast."""
    with VirtualGpu(H100) as virtual:
        layer = torch.nn.Conv2d(3, 64, 4, 2, 1).cuda()
        image = torch.empty(4, 3, 128, 128, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(image)
        grad = torch.empty_like(out)
        with torch.autocast("cuda", torch.bfloat16, enabled=is_inside):
            found = Requests(virtual).in_order(lambda: out.backward(grad))
    total, of_bias = found.index(256), found.index(128)
    if is_inside:
        assert found[total : total + 3] == [256, 128, -256]
    else:
        assert of_bias < total, "summed in bfloat16, then cast for the float32 parameter"
