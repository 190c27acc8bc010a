"""Cards on which the script did not run."""

from __future__ import annotations

import pytest
import torch

import memest
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops import convolution
from memest.estimator.ops.cudnn_rules import ConvolutionShapes, fourier_bytes
from memest.report import Outcome


def test_what_the_largest_gpu_refuses_the_smaller_ones_refuse_too() -> None:
    gpu = memest.virtual_gpu("h200")

    with pytest.raises(torch.OutOfMemoryError), gpu:
        torch.empty(200 << 30, device="cuda")

    verdicts = gpu.report().verdicts
    assert {v.verdict for v in verdicts.values()} == {Outcome.OOM}
    assert len({v.limit_bytes - v.margin_bytes for v in verdicts.values()}) == 1
    assert verdicts["a100-40gb"].margin_bytes < verdicts["h200"].margin_bytes


def test_what_a_small_gpu_refuses_is_not_known_of_larger_ones() -> None:
    gpu = memest.virtual_gpu("a100-40gb")

    with pytest.raises(torch.OutOfMemoryError), gpu:
        torch.empty(60 << 30, dtype=torch.uint8, device="cuda")

    assert set(gpu.report().verdicts) == {"a100-40gb"}


def pile_up(sizes: list[int]) -> None:
    """Requests of so many MiB, each freed before the next."""
    for num_mib in sizes:
        torch.empty(num_mib << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(
    ("text", "reserved_mib"),
    [("", 6000), ("expandable_segments:True", 3000), ("max_split_size_mb:64", 6000)],
)
def test_other_gpus_are_judged_with_the_settings(
    text: str, reserved_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    gpu = memest.virtual_gpu("a100-80gb")
    with gpu:
        pile_up([1000, 2000, 3000])

    report = gpu.report()
    assert report.allocator == text
    found = {v.reserved_bytes >> 20 for v in report.verdicts.values()}
    assert found == {report.peak_reserved_bytes >> 20} == {reserved_mib}


@pytest.mark.parametrize("setting", ["max_split_size_mb:64", "garbage_collection_threshold:0.4"])
def test_a_share_of_each_gpu_is_kept_by_giving_back(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the smallest card, 4045 MiB, has no room for all three segments."""
    text = f"{setting},per_process_memory_fraction:0.1"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    gpu = memest.virtual_gpu("h200")
    with gpu:
        pile_up([1000, 2000, 3000])

    verdicts = gpu.report().verdicts
    assert {v.verdict for v in verdicts.values()} == {Outcome.FITS}
    assert verdicts["h200"].reserved_bytes >> 20 in (6000, 5000)
    assert verdicts["a100-40gb"].reserved_bytes >> 20 in (3000, 4000)
    assert verdicts["a100-40gb"].limit_bytes == int(0.1 * 42412802048)


IMAGES = (128, 64, 56, 56)
IMAGE_BYTES = 128 * 64 * 56 * 56 * 4


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> int:
    """The largest workspace for the gradient of the weight of the convolution of `train`."""
    shapes = ConvolutionShapes(
        IMAGES, (64, 64, 3, 3), IMAGES, (1, 1), (1, 1), (1, 1), 1, torch.float32, False
    )
    sizes = {d: fourier_bytes(shapes, d) for d in ("forward", "input", "weight")}
    monkeypatch.setattr(convolution, "tried_bytes", lambda shapes, d, gpu: (sizes[d],))
    return sizes["weight"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


def train(held_bytes: int = 0) -> list[int]:
    """Gradients of a convolution's weight beside other tensors; the peaks of two steps."""
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
    images = torch.empty(IMAGES, device="cuda")
    held = torch.empty(held_bytes, dtype=torch.uint8, device="cuda")
    peaks = []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        layer(images).sum().backward()
        layer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - held.numel())
    return peaks


@pytest.mark.usefixtures("benchmark")
def test_the_benchmark_tries_once_and_has_the_cache_emptied(tried: int) -> None:
    gpu = memest.virtual_gpu("h100-80gb")
    with gpu:
        first, second = train()
        reserved = torch.cuda.memory_reserved()

    assert first > tried + 2 * IMAGE_BYTES  # and the images, and a gradient
    assert second < first - tried / 2
    assert gpu.report().peak_allocated_bytes == first
    assert reserved < first - tried / 2


@pytest.mark.usefixtures("benchmark")
def test_where_there_is_no_room_the_benchmark_does_with_less(tried: int) -> None:
    """On the card and on those on which the script did not run."""
    card = find_gpu("a100-40gb").limit_bytes
    gpu = memest.virtual_gpu("h100-80gb")
    with gpu:
        train(card - 4 * IMAGE_BYTES - tried)
    small = memest.virtual_gpu("a100-40gb")
    with small:
        first, _ = train(card - 4 * IMAGE_BYTES - tried)

    assert first < 4 * IMAGE_BYTES + tried
    assert small.report().verdicts["a100-40gb"].verdict is Outcome.FITS
    assert gpu.report().peak_reserved_bytes > card
    assert gpu.report().verdicts["a100-40gb"].verdict is Outcome.FITS
