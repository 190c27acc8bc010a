"""A script that mixes types ends here as on a card: each call was made on an H100 (torch 2.11), and
`tests/data/mistakes.json` holds what it said, for `OPERATION of TYPE and TYPE`.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.refusals import overflow
from memest.estimator.virtual_gpu import VirtualGpu

RECORDED: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[1] / "data" / "mistakes.json").read_text()
)
TYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64,
    "i64": torch.int64, "i32": torch.int32,
}  # fmt: skip


def ones(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=dtype)


def position() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cuda")


def layer(kind: Any, *args: Any, **kwargs: Any) -> Callable[[tuple[int, ...]], Callable[..., Any]]:
    """A layer of the second type, given ones of the first."""

    def of_shape(shape: tuple[int, ...]) -> Callable[..., Any]:
        return lambda x, w: kind(*args, **kwargs, device="cuda", dtype=w)(ones(*shape, dtype=x))

    return of_shape


MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "linear": layer(nn.Linear, 8, 8)((2, 8)),
    "linear3": layer(nn.Linear, 8, 8)((2, 3, 8)),
    "linear_nobias": layer(nn.Linear, 8, 8, bias=False)((2, 8)),
    "mm": lambda x, w: ones(2, 8, dtype=x) @ ones(8, 4, dtype=w),
    "mv": lambda x, w: ones(3, 8, dtype=x) @ ones(8, dtype=w),
    "addmm": lambda x, w: torch.addmm(ones(4, dtype=x), ones(2, 8, dtype=x), ones(8, 4, dtype=w)),
    "addmm_bias": lambda x, w: torch.addmm(
        ones(4, dtype=w), ones(2, 8, dtype=x), ones(8, 4, dtype=x)
    ),
    "addmm_": lambda x, w: ones(2, 4, dtype=w).addmm_(ones(2, 8, dtype=x), ones(8, 4, dtype=w)),
    "bmm": lambda x, w: torch.bmm(ones(2, 3, 8, dtype=x), ones(2, 8, 4, dtype=w)),
    "baddbmm": lambda x, w: torch.baddbmm(
        ones(2, 3, 4, dtype=x), ones(2, 3, 8, dtype=x), ones(2, 8, 4, dtype=w)
    ),
    "layer_norm": layer(nn.LayerNorm, 8)((2, 8)),
    "group_norm": layer(nn.GroupNorm, 2, 8)((2, 8, 4, 4)),
    "batch_norm1d": layer(nn.BatchNorm1d, 8)((4, 8)),
    "conv2d": layer(nn.Conv2d, 8, 8, 3)((2, 8, 6, 6)),
    "conv2d_nobias": layer(nn.Conv2d, 8, 8, 3, bias=False)((2, 8, 6, 6)),
    "lstm": layer(nn.LSTM, 8, 8)((2, 3, 8)),
    "sdpa_q": lambda x, w: F.scaled_dot_product_attention(
        ones(1, 2, 4, 8, dtype=x), ones(1, 2, 4, 8, dtype=w), ones(1, 2, 4, 8, dtype=w)
    ),
    "sdpa_mask": lambda x, w: F.scaled_dot_product_attention(
        *(ones(1, 2, 4, 8, dtype=x) for _ in range(3)), attn_mask=ones(1, 1, 4, 4, dtype=w)
    ),
    "bce": lambda x, w: F.binary_cross_entropy(ones(2, 8, dtype=x), ones(2, 8, dtype=w)),
    "index_put": lambda x, w: ones(4, 8, dtype=x).index_put(
        (torch.tensor([0, 1], device="cuda"),), ones(2, 8, dtype=w)
    ),
    "index_add": lambda x, w: ones(4, 8, dtype=x).index_add(0, position(), ones(1, 8, dtype=w)),
    "index_copy": lambda x, w: ones(4, 8, dtype=x).index_copy(0, position(), ones(1, 8, dtype=w)),
    "grid": lambda x, w: F.grid_sample(
        ones(1, 1, 4, 4, dtype=x), ones(1, 4, 4, 2, dtype=w), align_corners=False
    ),
    "where": lambda x, w: torch.where(
        ones(2, 8) > 0, ones(2, 8, dtype=x), ones(2, 8, dtype=w)
    ),
}  # fmt: skip


def half() -> torch.Tensor:
    return ones(2, 8, dtype=torch.float16)


def no() -> torch.Tensor:
    return torch.zeros(2, 8, dtype=torch.bool, device="cuda")


ALONE: dict[str, Callable[[], Any]] = {
    "ce int32": lambda: F.cross_entropy(ones(2, 8), torch.zeros(2, dtype=torch.int32).cuda()),
    "ce uint8": lambda: F.cross_entropy(ones(2, 8), torch.zeros(2, dtype=torch.uint8).cuda()),
    "ce2d int32": lambda: F.cross_entropy(
        ones(2, 8, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int32).cuda()
    ),
    "masked_fill -1e9 f16": lambda: half().masked_fill(no(), -1e9),
    "masked_fill -inf f16": lambda: half().masked_fill(no(), float("-inf")),
    "masked_fill u8 mask": lambda: half().masked_fill(no().byte(), 0.0),
    "fill_ over bf16": lambda: half().bfloat16().fill_(torch.finfo(torch.float32).min),
    "fill_ 300 u8": lambda: ones(2, dtype=torch.uint8).fill_(300),
    "full 1e5 f16": lambda: torch.full((2,), 1e5, dtype=torch.float16, device="cuda"),
    "pad 1e5 f16": lambda: F.pad(ones(2, dtype=torch.float16), (1, 1), value=1e5),
    "add -1e9 f16": lambda: half() + (-1e9),
    "mul 1e6 f16": lambda: half() * 1e6,
    "index host by gpu": lambda: torch.arange(10.0)[position()],
    "clamp host number": lambda: ones(2).clamp(max=torch.tensor(0.5)),
    "logaddexp host number": lambda: torch.logaddexp(ones(2), torch.tensor(0.5)),
    "gcd host number": lambda: torch.gcd(position(), torch.tensor(2)),
    "take host number": lambda: torch.take(ones(2), torch.tensor(1)),
    "maximum host number": lambda: torch.maximum(ones(2), torch.tensor(0.5)),
    "lerp host number": lambda: torch.lerp(ones(2), ones(2), torch.tensor(0.5)),
    "where host number": lambda: torch.where(no(), half(), torch.tensor(0.5)),
    "outer host vector": lambda: torch.outer(ones(2), torch.ones(1)),
    "generator cpu": lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
    "randperm gen": lambda: torch.randperm(4, generator=torch.Generator("cuda")),
}


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of each."""
    for name, operation in MIXED.items():
        for key in RECORDED:
            kind, _, types = key.partition(" ")
            if kind == name and "-" in types and set(types.split("-")) <= set(TYPES):
                first, second = (TYPES[part] for part in types.split("-"))
                yield key, lambda op=operation, x=first, w=second: op(x, w)
    yield from ALONE.items()


def test_a_gpu_and_this_one_refuse_the_same_calls_in_the_same_words() -> None:
    others = []
    with VirtualGpu(find_gpu("h100-80gb")):
        for name, call in calls():
            kind, message = RECORDED[name]
            try:
                call()
                found = ["ok", ""]
            except Exception as error:
                found = [type(error).__name__, str(error).partition("\n")[0]]
            if found != [kind, message]:
                others.append((name, RECORDED[name], found))

    assert others == []


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (1e9, torch.float16, False), (-65504, torch.float16, True), (65505, torch.float16, False),
        (float("inf"), torch.float16, True), (float("nan"), torch.bfloat16, True),
        (256, torch.uint8, False), (-1, torch.uint8, True), (2**31, torch.int32, False),
        (True, torch.float16, True), (1e300, torch.complex64, True),
    ],
)  # fmt: skip
def test_a_number_fits_a_type_or_not(value: Any, dtype: torch.dtype, fits: bool) -> None:
    assert (not overflow(value, dtype)) is fits


def test_indices_of_an_embedding_are_integers() -> None:
    """torch's words on a CPU, with the type of a GPU tensor (`checkScalarTypes`)."""
    message = "Long, Int; but got torch.cuda.FloatTensor instead"
    with VirtualGpu(find_gpu("h200")), pytest.raises(RuntimeError, match=re.escape(message)):
        F.embedding(ones(2), ones(3, 3))


@pytest.mark.parametrize("call", [torch.add, torch.Tensor.mul_])
def test_shapes_that_do_not_broadcast_are_named_as_on_a_gpu(call: Any) -> None:
    """`infer_size` (ExpandUtils.cpp), with values that are unknown."""
    linear = layer(nn.Linear, 4, 16)((8, 2, 4))
    message = (
        "The size of tensor a (16) must match the size of tensor b (3) at non-singleton dimension 2"
    )
    with VirtualGpu(find_gpu("h200")), torch.no_grad():
        unknown = linear(torch.float32, torch.float32)
        with pytest.raises(RuntimeError, match=re.escape(message)):
            call(unknown, ones(2, 3))
