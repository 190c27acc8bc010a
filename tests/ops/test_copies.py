"""FSDP2's packing kernels: the tables that were recorded of GPT-2 on four H200."""

from __future__ import annotations

import pytest
import torch

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.copies import (
    chunk_cat_mixed,
    to_host_bytes,
)
from memest.estimator.ops.registry import op_of
from tests.op_calls import meta, requested

aten = torch.ops.aten

H200 = find_gpu("h200")
RANKS, D = 4, 768

LAYER = [(D,), (D,), (D, 3 * D), (3 * D,), (D, D), (D,), (D,), (D,), (D, 4 * D), (4 * D,),
         (4 * D, D), (D,)]  # fmt: skip
SPLIT = aten.split_with_sizes_copy.out
ROOT = [(50257, D), (1024, D), (D,), (D,)]
Shapes = list[tuple[int, ...]]


def shard_numel(shape: tuple[int, ...]) -> int:
    """Elements of a rank's rows, padded."""
    return -(-shape[0] // RANKS) * torch.Size(shape[1:]).numel()


@pytest.mark.parametrize(("shapes", "num_bytes"), [(LAYER, 14280), (ROOT, 30928)])
def test_unpacking_a_gathered_unit_takes_its_table(shapes: Shapes, num_bytes: int) -> None:
    sizes = [shard_numel(shape) for shape in shapes]
    gathered = torch.empty(RANKS, sum(sizes), device="meta")
    out = [torch.empty(RANKS, size, device="meta") for size in sizes]

    scratch = requested(SPLIT, (gathered, sizes), {"dim": 1, "out": out}, None, H200)

    assert scratch.before == (num_bytes,)


def test_packing_the_gradients_of_a_unit_takes_its_table() -> None:
    grads = [torch.empty(shape, device="meta") for shape in LAYER]
    out = torch.empty(RANKS, sum(map(shard_numel, LAYER)), device="meta")

    scratch = requested(aten._chunk_cat.out, (grads, 0, RANKS), {"out": out}, None, H200)

    assert scratch.before == (28320,)


def test_strided_splits_take_another_way() -> None:
    gathered = torch.empty(6, RANKS, device="meta").t()

    assert not requested(SPLIT, (gathered, [2, 4], 1), {}, None, H200).before


def test_a_roll_over_two_dimensions_keeps_what_it_rolled_first() -> None:
    """Swin's shift on an H100: the first roll lives until the second is made."""
    tensor = meta(4, 56, 56, 96)
    num_bytes = tensor.numel() * 4

    def sizes(*args: object) -> list[int]:
        events = requested(aten.roll.default, (tensor, *args), {}, tensor, H200)
        return [e.num_bytes for e in events]

    assert sizes([-3, -3], [1, 2]) == [num_bytes, num_bytes, -num_bytes]
    assert sizes([-3], [1]) == [num_bytes]


@pytest.mark.parametrize(
    ("is_source_transposed", "dtype", "is_waited_for", "expected"),
    [
        (False, torch.float32, True, ()),
        (True, torch.float32, True, (8192,)),
        (False, torch.float16, True, ()),
        (False, torch.float16, False, (4096,)),
        (True, torch.float16, False, (4096, 4096)),
    ],
)
def test_what_a_copy_to_the_host_makes_contiguous_or_casts(
    is_source_transposed: bool, dtype: torch.dtype, is_waited_for: bool, expected: tuple[int, ...]
) -> None:
    source = meta(64, 32).t() if is_source_transposed else meta(32, 64)
    target = torch.empty(32, 64, dtype=dtype)

    found = to_host_bytes(aten.copy_.default, (target, source, not is_waited_for), {})
    assert found == expected


@pytest.mark.parametrize(
    ("dtypes", "target", "sizes"),
    [
        ((torch.bfloat16, torch.bfloat16), torch.float32, [8 * (6 * 2 + 2 + 3)]),
        ((torch.bfloat16, torch.float32), torch.float32, [8 * (6 * 2 + 3)]),
        ((torch.float16, torch.float32), torch.float32, [4096 * 4, 8 * (6 * 2 + 2 + 3)]),
        ((torch.bfloat16, torch.float32), torch.bfloat16, [512 * 2, 8 * (6 * 2 + 2 + 2)]),
    ],
)
def test_gradients_of_two_dtypes_share_a_table(
    dtypes: tuple[torch.dtype, ...], target: torch.dtype, sizes: list[int]
) -> None:
    """The sums are those of torch/csrc/distributed/fsdp/ChunkCat.cu of torch 2.15."""
    tensors = [meta(64, 64, dtype=dtypes[0]), meta(512, dtype=dtypes[1])]
    out = meta(4, 1024 + 128, dtype=target)
    call = op_of(aten._chunk_cat.out).call((tensors, 0, 4), {"out": out})
    scratch = chunk_cat_mixed(call)

    assert list(scratch.before) == sizes
