"""CUDA kernels of torchvision, by its package or, where it is missing, by its schemas."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.integrations import torchvision as integration
from memest.estimator.tensors.patches import Patches
from memest.estimator.virtual_gpu import VirtualGpu
from tests.requested import Requests

_OPERANDS = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias"
_SIZES = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, "
    "SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask"
)
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width) -> (Tensor, Tensor)",
    f"deform_conv2d({_OPERANDS}, {_SIZES}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_OPERANDS}, {_SIZES}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    "_roi_align_backward(Tensor grad, Tensor rois) -> Tensor",
    "_roi_pool_backward(Tensor grad, Tensor rois) -> Tensor",
)
_libraries: list[Any] = []


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        try:
            import torchvision  # noqa: F401
        except ImportError:
            _define()
            integration._after(ModuleType("torchvision.extension"))
        yield virtual


def _define() -> None:
    if _libraries:
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)

    def pooled(image: Any, rois: Any, scale: float, height: int, width: int, *args: Any) -> Any:
        return image.new_empty((rois.shape[0], image.shape[1], height, width))

    library.impl("roi_align", pooled, "Meta")
    _libraries.append(library)


def test_nms_has_a_mask_of_all_pairs_of_boxes(gpu: VirtualGpu) -> None:
    """nms_kernel.cu: sorted boxes, a word for each 64 boxes, the kept ones: assumed, all."""
    boxes, scores = torch.rand(3000, 4, device="cuda"), torch.rand(3000, device="cuda")
    requests = Requests(gpu)
    kept: list[int] = []

    seen = requests.of(lambda: kept.append(len(torch.ops.torchvision.nms(boxes, scores, 0.5))))

    assert kept == [3000]
    made = [size for size in seen if size > 0]
    at = made.index(3000 * 47 * 8)
    assert made[at - 1 : at + 2] == [3000 * 16, 3000 * 47 * 8, 3000]
    assert [what for _, what in gpu.mode.guesses.counts] == ["nms as 3000 of 3000 boxes"]


def test_regions_are_pooled_in_float32_under_autocast(gpu: VirtualGpu) -> None:
    """The last argument is cast first, as recorded of deformable convolutions on an H200."""
    image = torch.rand(1, 8, 16, 16, device="cuda", dtype=torch.float16)
    rois = torch.zeros(4, 5, device="cuda", dtype=torch.float16)
    requests = Requests(gpu)

    def pool() -> None:
        pooled = torch.ops.torchvision.roi_align(image, rois, 1.0, 7, 7, 2, False)
        assert pooled.dtype is torch.float16

    with torch.autocast("cuda", torch.float16):
        seen = requests.of(pool)

    assert [size for size in seen if size > 0] == [80, 8192, 4 * 4 * 8 * 49, 2 * 4 * 8 * 49]


def test_deformable_convolutions_multiply_block_by_block(gpu: VirtualGpu) -> None:
    """Recorded on an H100, torchvision 0.26: 32 images of 3 x 128 x 128, 64 channels."""
    image = torch.rand(32, 3, 128, 128, device="cuda")
    weight, bias = torch.rand(64, 3, 3, 3, device="cuda"), torch.rand(64, device="cuda")
    offset, mask = torch.rand(32, 18, 128, 128, device="cuda"), torch.zeros(32, 1, device="cuda")
    made, columns = 32 * 64 * 128 * 128 * 4, 27 * 32 * 128 * 128 * 4
    operands, sizes = (image, weight, offset, mask, bias), (1, 1, 1, 1, 1, 1, 1, 1, False)
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    grad = torch.rand(32, 64, 128, 128, device="cuda")
    requests = Requests(gpu)

    seen = requests.of(lambda: torch.ops.torchvision.deform_conv2d(*operands, *sizes))
    assert (seen[:4], sorted(seen[4:])) == ([made, made, columns, made], [-made, -made, -columns])
    seen = requests.of(
        lambda: torch.ops.torchvision._deform_conv2d_backward(grad, *operands, *sizes)
    )
    assert seen[:3] == [image.nbytes, offset.nbytes, 128]
    assert seen[3:10] == [columns, made, -made, -columns, weight.nbytes, made, columns]
    assert sorted(seen[10:12]) == [-made, -columns]
    of_bias = seen[12:]
    assert (sum(of_bias), of_bias[-4:]) == (256, [256, 256, -256, -256])


def test_deformable_convolutions_run_in_float32_under_autocast(gpu: VirtualGpu) -> None:
    image = torch.rand(6, 4, 8, 8, device="cuda", dtype=torch.float16)
    weight, offset = torch.rand(2, 2, 3, 3, device="cuda"), torch.rand(6, 18, 8, 8, device="cuda")
    bias, mask = torch.rand(2, device="cuda"), torch.rand(6, 9, 8, 8, device="cuda")

    with torch.autocast("cuda", torch.float16):
        out = torch.ops.torchvision.deform_conv2d(
            image, weight, offset, mask, bias, 1, 1, 1, 1, 1, 1, 2, 1, True
        )

    assert (out.dtype, out.shape) == (torch.float16, (6, 2, 8, 8))


def test_a_detector_samples_as_many_positives_as_its_sampler_takes(gpu: VirtualGpu) -> None:
    """Labels depend on values: a quarter of 512 samples is positive, and is found by a mask."""

    class Sampler:
        batch_size_per_image, positive_fraction = 512, 0.25

        def __call__(self, matched: list[torch.Tensor]) -> list[int]:
            return [len(torch.where(labels >= 1)[0]) for labels in matched]

    module = ModuleType("torchvision.models.detection._utils")
    vars(module)["BalancedPositiveNegativeSampler"] = Sampler
    scores = torch.randn(2006, 1024, device="cuda") @ torch.randn(1024, 91, device="cuda")

    integration._guess_samples(Patches(), gpu.mode, module)

    assert Sampler()([scores.argmax(1)]) == [128]
    assert Sampler()([torch.arange(2006, device="cuda") // 2000]) == [6], "known labels"
