"""Pooling, resizing and sliding windows."""

from __future__ import annotations

from functools import partial

import torch

from memest.estimator.ops.temporaries import Scratch
from memest.estimator.virtual_gpu import VirtualGpu
from tests.op_calls import H100, laid_out, meta, requested, scratch, sizes
from tests.requested import WORKSPACE, Requests

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_the_gradient_of_a_resized_image_is_copied_where_it_is_expanded() -> None:
    grad = meta(1).expand(4, 16, 64, 64)
    rule = partial(requested, aten.upsample_bilinear2d_backward.default)

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


def test_an_affine_grid_is_a_product_of_a_base_grid() -> None:
    """Recorded on an H100: 40 images of 96 x 96 (field/simclr.py); the product allocates cuBLAS's
    workspace.
    """
    with VirtualGpu(H100) as virtual:
        theta = torch.empty(40, 2, 3, device="cuda")
        requests = Requests(virtual).in_order(
            lambda: torch.nn.functional.affine_grid(theta, [40, 3, 96, 96], align_corners=False)
        )
    side = [384, 384, 384, -384, -384, -384]
    assert requests == [4423680, *side, *side, 2949120, WORKSPACE, -4423680]


def test_the_gradient_of_overlapping_windows_has_the_positions_of_one_dimension() -> None:
    """UnfoldBackward.h; windows that do not overlap are copied."""
    func = aten.unfold_backward.default

    assert scratch(func, meta(2, 31, 64, 4), [2, 64, 64], 1, 4, 2) == Scratch(after=(64 * 8,))
    assert scratch(func, meta(2, 3, 64, 4), [2, 64, 64], 1, 4, 2) == Scratch(after=(8 * 8,))
    assert scratch(func, meta(2, 16, 64, 4), [2, 64, 64], -2, 4, 4) == Scratch()


def test_unpooling_copies_what_is_not_contiguous_before_its_output() -> None:
    """MaxUnpooling.cu: the output grows from an empty tensor after the copies."""
    func, shape = aten.max_unpool2d.default, (2, 8, 16, 16)
    image, indices = meta(*shape), meta(*shape, dtype=INT)
    last = image.to(memory_format=torch.channels_last)

    assert scratch(func, image, indices, [32, 32]) == Scratch()
    assert scratch(func, last, indices, [32, 32]) == Scratch(before=(4 * 4096,))
    made = func(last, indices, [32, 32])
    assert laid_out(func, (last,), made).is_contiguous()


def test_volumes_are_pooled_in_their_own_memory_format() -> None:
    """Recorded on an H100: no copy of a channels-last volume, forward or backward."""
    volume, args = meta(4, 16, 8, 8, 8), ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False)
    last = volume.to(memory_format=torch.channels_last_3d)
    rule = partial(requested, aten.max_pool3d_with_indices.default)
    assert rule((last, *args), {}, None, H100) == rule((volume, *args), {}, None, H100) == Scratch()
    assert rule((volume[:, :, ::2], *args), {}, None, H100) == Scratch(after=(65536,))

    rule = partial(requested, aten.max_pool3d_with_indices_backward.default)
    grad, positions = last[:, :, ::2, ::2, ::2], meta(4, 16, 4, 4, 4, dtype=INT)
    found = rule((grad, last, *args, positions), {}, None, H100)
    assert found == Scratch(after=(grad.nbytes, positions.nbytes))
    made = (t.contiguous(memory_format=torch.channels_last_3d) for t in (grad, positions))
    assert rule((next(made), last, *args, next(made)), {}, None, H100) == Scratch()


def test_images_are_pooled_in_a_dense_memory_format() -> None:
    """Recorded on an H200: queries of sam2 are a part of `qkv`, with channels last."""
    args, rule = ([2, 2], [2, 2]), partial(requested, aten.max_pool2d_with_indices.default)
    last = meta(4, 8, 16, 16).to(memory_format=torch.channels_last)
    part = meta(4, 16, 16, 3, 8)[..., 0, :].permute(0, 3, 1, 2)

    assert rule((last, *args), {}, None, H100) == Scratch()
    assert rule((part, *args), {}, None, H100) == Scratch(after=(32768,))


def test_a_grid_whose_corners_are_aligned_is_sampled_by_cudnn() -> None:
    """GridSampler.cpp of cudnn: copies the grid, and computes its gradient always. Recorded on an
    H200 in RAFT-Stereo, whose grids are slices.
    """
    with VirtualGpu(H100) as virtual:
        image = torch.empty(2, 3, 4, 4, device="cuda", requires_grad=True)
        grid = torch.empty(2, 5, 5, 7, 2, device="cuda").unbind(3)[0]
        requests, made = Requests(virtual), []

        def sample(is_aligned: bool) -> None:
            made.append(torch.nn.functional.grid_sample(image, grid, align_corners=is_aligned))

        aligned = requests.in_order(lambda: sample(is_aligned=True))
        grad = torch.ones(2, 3, 5, 5, device="cuda")
        of_aligned = requests.in_order(lambda: made[0].backward(grad))
        plain = requests.in_order(lambda: sample(is_aligned=False))

    assert aligned == [400, 600, -400]
    assert of_aligned[:3] == [400, 384, 400]
    assert sorted(of_aligned[3:5]) == [-400, -400]
    assert plain == [600]
