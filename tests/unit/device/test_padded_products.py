"""Products that Inductor pads: its timing is estimated, and its memory is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.integrations.inductor.compiler import is_faster_padded
from memest.estimator.virtual_gpu import VirtualGpu

PRODUCTS = Path(__file__).parents[2] / "data" / "padded-products-h100.json"


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def _estimated(product: list[Any]) -> bool:
    dtype = getattr(torch, product[0])
    shape1, stride1, shape2, stride2, is_free = product[1:6]
    mat1 = torch.empty_strided(shape1, stride1, dtype=dtype, device="meta")
    mat2 = torch.empty_strided(shape2, stride2, dtype=dtype, device="meta")
    return is_faster_padded(find_gpu("h100-80gb"), mat1, mat2, is_free)


def test_the_estimate_agrees_with_nineteen_of_twenty_timings_of_an_h100() -> None:
    """Inductor's own timing of 368 products. The others are within 1.0 to 1.9 times."""
    products = json.loads(PRODUCTS.read_text(encoding="utf-8"))["products"]
    agree = [_estimated(product) == bool(product[6]) for product in products]

    assert len(products) == 368
    assert sum(agree) >= 349
    assert all(ok for ok, product in zip(agree, products, strict=True) if product[0] == "float32")


def test_logits_of_an_odd_vocabulary_are_padded(gpu: VirtualGpu) -> None:
    """As on the H100: 50257 columns have rows of 50264 elements."""
    head = nn.Linear(768, 50257, bias=False).cuda().bfloat16()
    hidden = torch.zeros(4096, 768, dtype=torch.bfloat16, device="cuda")
    logits = torch.compile(lambda hidden: head(hidden))(hidden)

    assert logits.stride() == (50264, 1)
    assert gpu.mode.notes.warnings == []


@pytest.mark.usefixtures("gpu")
def test_the_timing_of_a_padded_product_reserves_memory() -> None:
    """Inputs, and the larger of two outputs, are random matrices of the timing."""
    head = nn.Linear(768, 50257, bias=False).cuda()
    hidden = torch.zeros(4096, 768, device="cuda")
    with torch.no_grad():
        torch.compile(lambda hidden: head(hidden).sum())(hidden)

    logits = 4 * 4096 * 50264
    assert torch.cuda.max_memory_reserved() >= 2 * logits


@pytest.mark.usefixtures("gpu")
def test_attention_written_by_hand_is_fused() -> None:
    """Inductor replaces products around a softmax by the kernel that saves no weights."""
    q, k, v = (
        torch.zeros(8, 16, 512, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(3)
    )
    before = torch.cuda.memory_allocated()
    attention = torch.compile(lambda q, k, v: ((q @ k.mT) / 8.0).softmax(-1) @ v)
    out = attention(q, k, v)

    weights = 2 * 8 * 16 * 512 * 512
    assert out.shape == q.shape
    assert torch.cuda.memory_allocated() - before < weights
