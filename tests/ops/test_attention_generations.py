"""The attention kernel of every GPU of the catalogue, held to a table that was read off the source.

`check_*` of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.11 with cuDNN 9.19.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from memest.estimator.hardware.gpus import find_gpu, list_gpus
from memest.estimator.ops.attention import choose_backend

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
HALF = (fp16, bf16)
BACKENDS = {
    "m": SDPBackend.MATH, "f": SDPBackend.FLASH_ATTENTION,
    "e": SDPBackend.EFFICIENT_ATTENTION, "c": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip

VOLTA_TURING = ("v100-16gb", "v100-32gb", "t4")
A100 = ("a100-40gb", "a100-80gb")
SMALL_SHARED_MEMORY = (
    "a10g", "a6000", "rtx-3090", "l4", "l40s", "rtx-4090", "rtx-6000-ada", "rtx-5090",
)  # fmt: skip
HOPPER = ("h100-80gb", "h100-pcie-80gb", "h200", "gh200-96gb")
B200 = ("b200",)
EVERY = (*VOLTA_TURING, *A100, *SMALL_SHARED_MEMORY, *HOPPER, *B200)

WIDTHS = (32, 40, 64, 72, 80, 88, 96, 104, 128, 160, 192, 256, 512)
MASKS = ("none", "causal", "boolean", "float", "trained")
UNMASKED, MASKED = ("none", "causal"), ("boolean", "float")
ALWAYS = tuple(product((True, False), (0.0, 0.1)))  # needs gradients, dropout
UNLESS_TRAINED_WITH_DROPOUT = ((True, 0.0), (False, 0.0), (False, 0.1))


class Row(NamedTuple):
    gpus: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    masks: tuple[str, ...]
    when: tuple[tuple[bool, float], ...]
    letters: str
    """One for each of `WIDTHS`."""


TRUTH = [
    # float32 has no flash and no cuDNN; the efficient kernel takes any multiple of 4
    Row(EVERY, (fp32,), MASKS, ALWAYS, "eeeeeeeeeeeee"),
    # flash and cuDNN start at 8.0, bfloat16 as well
    Row(VOLTA_TURING, (fp16,), MASKS, ALWAYS, "eeeeeeeeeeeee"),
    Row(VOLTA_TURING, (bf16,), MASKS, ALWAYS, "mmmmmmmmmmmmm"),
    # flash takes no mask and at most 256
    Row(A100, HALF, UNMASKED, ALWAYS, "ffffffffffffe"),
    Row((*A100, *SMALL_SHARED_MEMORY), HALF, (*MASKED, "trained"), ALWAYS, "eeeeeeeeeeeee"),
    # flash's backward with dropout stops at 192 there
    Row(SMALL_SHARED_MEMORY, HALF, UNMASKED, UNLESS_TRAINED_WITH_DROPOUT, "ffffffffffffe"),
    Row(SMALL_SHARED_MEMORY, HALF, UNMASKED, ((True, 0.1),), "fffffffffffee"),
    # cuDNN comes first, up to 256 on Hopper and 128 on Blackwell, but has no gradient for a mask
    Row(HOPPER, HALF, (*UNMASKED, *MASKED), ALWAYS, "cccccccccccce"),
    Row(B200, HALF, UNMASKED, ALWAYS, "cccccccccfffe"),
    Row(B200, HALF, MASKED, ALWAYS, "ccccccccceeee"),
    Row((*HOPPER, *B200), HALF, ("trained",), ALWAYS, "eeeeeeeeeeeee"),
]

CASES = {
    (name, dtype, mask, needs_grad, dropout_p): row.letters
    for row in TRUTH
    for name, dtype, mask, (needs_grad, dropout_p) in product(
        row.gpus, row.dtypes, row.masks, row.when
    )
}


def heads(
    width: int, dtype: torch.dtype, needs_grad: bool = False, *, B: int = 2, H: int = 4, T: int = 96
) -> Tensor:
    return torch.empty(B, H, T, width, dtype=dtype, device="meta", requires_grad=needs_grad)


def mask_of(kind: str, dtype: torch.dtype) -> Tensor | None:
    if kind in UNMASKED:
        return None
    kept = torch.bool if kind == "boolean" else dtype
    return torch.empty(2, 1, 96, 96, dtype=kept, device="meta", requires_grad=kind == "trained")


def test_the_table_covers_every_gpu_dtype_mask_and_dropout() -> None:
    names = [gpu.name for gpu in list_gpus()]

    assert set(CASES) == set(product(names, (fp32, *HALF), MASKS, (True, False), (0.0, 0.1)))
    assert sum(len(r.gpus) * len(r.dtypes) * len(r.masks) * len(r.when) for r in TRUTH) == len(
        CASES
    )


@pytest.mark.parametrize("name", EVERY)
def test_every_head_width_takes_the_kernel_of_the_table(name: str) -> None:
    gpu = find_gpu(name)
    wrong = []
    for (other, dtype, mask, needs_grad, dropout_p), letters in CASES.items():
        if other != name:
            continue
        for width, letter in zip(WIDTHS, letters, strict=True):
            query, key, value = (heads(width, dtype, needs_grad) for _ in range(3))
            found = choose_backend(
                query, key, value, mask_of(mask, dtype), dropout_p, mask == "causal", gpu=gpu
            )
            if found != BACKENDS[letter]:
                wrong.append((dtype, mask, needs_grad, dropout_p, width, found))

    assert wrong == []


@pytest.mark.parametrize(
    ("name", "dtype", "width", "letter"),
    [
        ("t4", fp32, 33, "e"),  # 7.x: no alignment without tensor cores
        ("v100-32gb", fp16, 36, "m"),  # with them 8 halves
        ("a100-80gb", fp32, 34, "m"),  # 8.x: 4 floats
        ("a100-80gb", fp32, 36, "e"),
        ("a100-80gb", bf16, 36, "f"),  # flash pads to a multiple of 8
        ("b200", bf16, 36, "f"),  # cuDNN does not
        ("rtx-5090", bf16, 200, "e"),  # 192 to 224 cannot be trained
        ("l4", fp16, 224, "e"),
        ("l4", fp16, 232, "f"),
        ("b200", bf16, 136, "f"),
    ],
)
def test_widths_between_the_usual_ones_follow_the_alignment_and_the_limits(
    name: str, dtype: torch.dtype, width: int, letter: str
) -> None:
    query, key, value = (heads(width, dtype, True) for _ in range(3))

    assert choose_backend(query, key, value, gpu=find_gpu(name)) == BACKENDS[letter]


@pytest.mark.parametrize(
    ("name", "grouped"),
    [("t4", "m"), ("a100-40gb", "f"), ("rtx-4090", "f"), ("h100-80gb", "c"), ("b200", "c")],
)
def test_grouped_heads_never_reach_the_efficient_kernel(name: str, grouped: str) -> None:
    query, key = heads(64, fp16, True, H=8), heads(64, fp16, True, H=2)

    found = choose_backend(query, key, key, enable_gqa=True, gpu=find_gpu(name))

    assert found == BACKENDS[grouped]


def test_deepseeks_heads_of_192_and_128_have_cudnn_on_hopper_and_blackwell() -> None:
    """Values narrower than keys: flash refuses, the efficient kernel takes them."""
    query, key, value = heads(192, bf16, True), heads(192, bf16, True), heads(128, bf16, True)
    chosen = {
        name: choose_backend(query, key, value, gpu=find_gpu(name))
        for name in ("a100-80gb", "h200", "b200", "rtx-5090")
    }

    assert chosen == {
        "a100-80gb": SDPBackend.EFFICIENT_ATTENTION, "h200": SDPBackend.CUDNN_ATTENTION,
        "b200": SDPBackend.CUDNN_ATTENTION, "rtx-5090": SDPBackend.EFFICIENT_ATTENTION,
    }  # fmt: skip
