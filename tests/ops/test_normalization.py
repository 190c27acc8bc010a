"""Layer, group and batch norms."""

from __future__ import annotations

import torch

from memest.estimator.ops.temporaries import OLDEST, Scratch
from memest.estimator.virtual_gpu import VirtualGpu
from tests.op_calls import H100, H200, meta, requested, requests, result_of, scratch, workspaces

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_a_strided_input_of_a_norm_is_copied_before_the_outputs() -> None:
    strided = meta(4, 9, 24).transpose(0, 1)

    found = scratch(aten.native_layer_norm.default, strided, [24], None, None, 1e-5)

    assert found == Scratch(before=(4 * 9 * 24 * 4,))


def test_a_tall_narrow_norm_adds_its_weight_gradient_in_two_passes() -> None:
    """layer_norm_kernel.cu: 70000 > 64 Ki, 512 / 32 < 132 / 2: min(32768 / 16, 2188) = 2048.

    The second pass is sum(0) over 2048 x 512: 4 outputs per thread, block 32 x 4, 512 values,
    grid 4, min(2112 / 4, 512 / 16) = 32 blocks of 4 * 512 * 32 * 4 bytes.
    """
    rows, width = 70000, 512
    stats, weight = meta(rows, 1), meta(width)
    args = (meta(rows, width), meta(rows, width), [width], stats, stats, weight, weight, [True] * 3)

    events = requested(aten.native_layer_norm_backward.default, args, {}, None, H200)

    part, total, staged = 2048 * width * 4, width * 4, 4 * width * 32 * 32 * 4
    one = [total, staged, 16, -16, -staged, -total]
    assert [e.num_bytes for e in events] == [
        rows * width * 4, total, total, part, part, *one, *one, -part, -part
    ]  # fmt: skip
    assert [e.output for e in events if e.output is not None] == [0, 1, OLDEST, 2, OLDEST]


def test_a_norm_of_usual_shape_needs_nothing() -> None:
    rows, width = 4096, 2048
    args = (meta(rows, width), meta(rows, width), [width], meta(rows, 1), meta(width), [True] * 2)

    assert scratch(aten._fused_rms_norm_backward.default, *args) == Scratch()


def test_group_norm_keeps_float32_factors_per_channel() -> None:
    """group_norm_kernel.cu: N * C forward twice; backward three times, and N * G twice."""
    batch, channels, size, groups = 3, 8, 50, 2
    tensor = meta(batch, channels, size, dtype=torch.bfloat16)
    weight, stats = meta(channels, dtype=torch.bfloat16), meta(batch, groups, dtype=torch.bfloat16)

    forward = (tensor, weight, weight, batch, channels, size, groups, 1e-5)
    backward = (tensor, tensor, stats, stats, weight, batch, channels, size, groups, [True] * 3)

    per_channel, per_group = batch * channels * 4, batch * groups * 4
    assert scratch(aten.native_group_norm.default, *forward).after == (per_channel,) * 2
    found = scratch(aten.native_group_norm_backward.default, *backward)
    assert found.after == (per_channel, per_channel, per_group, per_group, per_channel)


def test_a_batch_norm_of_rows_without_a_gradient_of_its_input_sums_first() -> None:
    x, each = meta(512, 96), meta(96)
    out = (meta(512, 96), meta(96), meta(96))

    args = (x, x, each, each, each, each, each, True, 1e-5, [False, True, True])
    assert requests(aten.native_batch_norm_backward.default, *args, out=out) == [
        384, 384, 384, 384, -384, -384,
    ]  # fmt: skip
    pictures, more = meta(48, 96, 20, 20), (each, each, each, each, each, True, 1e-5)
    args = (pictures, pictures, *more, [True, True, True])
    out = (pictures, each, each)
    found = requests(aten.native_batch_norm_backward.default, *args, out=out)
    assert found == [48 * 96 * 400 * 4, 384, 384]


def test_pictures_of_one_pixel_are_rows_of_a_batch_norm() -> None:
    """Recorded on an H200: a pooled image, dense in both orders, in BiRefNet's ASPP."""
    pixels, each = meta(2, 256, 1, 1), meta(256)
    args = (pixels, pixels, each, each, each, each, each, True, 1e-5, [True, True, True])

    found = requests(aten.native_batch_norm_backward.default, *args, out=(pixels, each, each))

    assert found == [1024, 1024, 1024, 1024, 2048, -1024, -1024]


def test_many_rows_of_a_batch_norm_stage_sums() -> None:
    """`flexible_launch_configs`: 32 by 16 threads, 16 rows each; below 8 blocks there are none."""
    each, more = meta(128), (True, 0.1, 1e-5)

    few, many = ((meta(rows, 128), each, each, each, each, *more) for rows in (1792, 2048))
    assert workspaces(aten.native_batch_norm.default, *few) == ()
    assert workspaces(aten.native_batch_norm.default, *many) == (4 * 128 * 8 * 4, 4 * 4)


def test_synchronised_batch_norms_make_statistics_of_float32() -> None:
    x, each = meta(48, 64, 80, 80, dtype=torch.bfloat16), meta(64)

    mean, inverse = result_of(aten.batch_norm_stats.default, x, 1e-5)
    assert mean.shape == inverse.shape == (64,)
    assert mean.dtype == inverse.dtype == torch.float32
    made = result_of(aten.batch_norm_elemt.default, x, each, each, mean, mean, 1)
    assert made.shape == x.shape
    args = x, x, mean, inverse, each, True, True, False
    made = result_of(aten.batch_norm_backward_reduce.default, *args)
    assert [None if t is None else tuple(t.shape) for t in made] == [(64,), (64,), (64,), None]


def test_rows_with_gaps_are_normalised_by_numbers_where_there_are_no_weights() -> None:
    rows, mean = meta(256, 197, 768)[:, 0], meta(768)

    found = requested(
        aten.native_batch_norm.default,
        (rows, None, None, mean, mean, True, 0.1, 1e-6),
        {},
        None,
        H100,
    )

    assert found.after == (4, 4)


def test_a_second_gradient_of_an_rms_norm_needs_as_much_as_on_a_gpu() -> None:
    """Peaks measured on an H200, torch 2.11, at the second call."""
    found = []
    with VirtualGpu(H200):
        x = torch.randn(512, 64, device="cuda", requires_grad=True)
        weight = torch.ones(64, device="cuda", requires_grad=True)
        for scale, inputs in ((weight, [x]), (weight, [x, weight]), (None, [x])):
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                out = torch.nn.functional.rms_norm(x, (64,), scale)
                grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
                sum(grad.square().sum() for grad in grads).backward()  # type: ignore[union-attr]
                x.grad = weight.grad = None
                name = type(out.grad_fn).__name__
                del out, grads
            found.append(torch.cuda.max_memory_allocated() - before)

    assert name == "FusedRmsNormBackward0"
    assert found == [1_320_448, 1_454_080, 1_188_864]


def test_an_rms_norm_has_the_transforms_of_torch() -> None:
    with VirtualGpu(H200):
        norm = torch.nn.RMSNorm(64).cuda()
        x = torch.randn(128, 64, device="cuda")

        grads = torch.func.vmap(torch.func.grad(lambda row: norm(row).sum()))(x)

        assert grads.is_cuda
        assert grads.shape == x.shape
