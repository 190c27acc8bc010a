"""FSDP2's packing kernels: the tables that were recorded of GPT-2 on four H200."""

from __future__ import annotations

import pytest
import torch

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.kernels.packing import chunk_cat_scratch, split_with_sizes_copy_scratch

H200 = find_gpu("h200")
RANKS, D = 4, 768

LAYER = [(D,), (D,), (D, 3 * D), (3 * D,), (D, D), (D,), (D,), (D,), (D, 4 * D), (4 * D,),
         (4 * D, D), (D,)]  # fmt: skip
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

    scratch = split_with_sizes_copy_scratch((gathered, sizes), {"dim": 1, "out": out}, None, H200)

    assert scratch.before == (num_bytes,)


def test_packing_the_gradients_of_a_unit_takes_its_table() -> None:
    grads = [torch.empty(shape, device="meta") for shape in LAYER]
    out = torch.empty(RANKS, sum(map(shard_numel, LAYER)), device="meta")

    assert chunk_cat_scratch((grads, 0, RANKS), {"out": out}, None, H200).before == (28320,)


def test_strided_splits_take_another_way() -> None:
    gathered = torch.empty(6, RANKS, device="meta").t()

    assert not split_with_sizes_copy_scratch((gathered, [2, 4], 1), {}, None, H200).before
