"""Workspaces that cuDNN tries at the first call, where `torch.backends.cudnn.benchmark` is on.

`get_plans_from_find` of Conv_v8.cpp (torch 2.11): every kernel that could run a convolution is
asked for its workspace; the largest that the card has room for is allocated, kernels are timed in
it, it is freed, and the cache is emptied. Then, and at every later call, the fastest runs.

The largest workspaces of the measured convolutions (`cudnn_convolution`) are what cuDNN
9.19 on an H100 says; of 530 of them torch 2.11 was seen to allocate just these.
`scripts/measure_convolutions.py --plans` asks again. Any other call is asked of a tree, which says
how many times as large as the operands they are. Which kernel is the fastest depends on the moment;
it is taken to be the one that runs without the benchmark: of those 530 in 74, 82 and 64 % the
fastest had the same workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memest.estimator.kernels.cudnn_convolution import (
    DIRECTIONS,
    Calls,
    Columns,
    ConvolutionShapes,
    as_measured,
    features,
    trees,
)

RATIO_ONE = 1 << 20
"""What a leaf says of a workspace that is as large as the operands."""

LEAST_BYTES = 1024
"""Added to workspaces before they are compared, as some are 0."""

TRANSFORMS = (16, 32, 64, 128, 256)
"""Sides of the Fourier transforms in which kernels convolve, whose operands are the largest."""

TILE, TILE_BYTES = 32, 32 * 17 * 8
"""Of the transforms in tiles: complex float32, half of them."""


@dataclass(frozen=True, slots=True)
class Search:
    """What is tried for one direction of a convolution."""

    num_bytes: tuple[int, ...]
    """Of the largest workspace, and of the next smaller one if it is known."""

    is_sure: bool
    """Whether cuDNN was asked about this call."""


def operand_bytes(calls: Columns) -> Columns:
    """Bytes of input, weight and output of each call (n,)."""
    c = Calls(calls)
    images = c.samples * (c.inputs * c.input_plane + c.outputs * c.output_plane)
    found: Columns = (images + c.outputs * c.depth) * c.itemsize
    return found


@lru_cache(maxsize=4096)
def searches(shapes: ConvolutionShapes) -> dict[str, Search]:
    """What cuDNN tries for each of `DIRECTIONS`, on an H100."""
    call = np.array([shapes.row()], dtype=np.int64)
    asked = as_measured(call, "tried")
    if asked is not None and asked.min() >= 0:
        sizes = (tuple(int(n) for n in of_direction if n) for of_direction in asked)
        return {d: Search(found, is_sure=True) for d, found in zip(DIRECTIONS, sizes, strict=True)}
    likely = ((d, by_trees(call, d)) for d in DIRECTIONS)
    return {d: Search((size,) if size else (), is_sure=False) for d, size in likely}


def search_features(calls: Columns) -> Columns:
    """What these trees ask of each call (n,): what the others ask, and how large its transforms
    are beside the operands.
    """
    c, operands = Calls(calls), operand_bytes(calls)
    side = np.maximum((c.input + 2 * c.padding).max(1), c.window.max(1))
    places = np.searchsorted(TRANSFORMS, side).clip(max=len(TRANSFORMS) - 1)
    transform = np.array(TRANSFORMS)[places]
    of_input, of_output = c.samples * c.inputs, c.samples * c.outputs
    of_weight = c.outputs * c.per_group
    tiles = np.where(c.input > 1, -(-c.input // np.maximum(TILE + 1 - c.window, 1)), 1).prod(1)
    planes = of_input + of_output + of_weight
    in_tiles = TILE_BYTES * ((of_input + of_output) * tiles + of_weight)
    more = (
        of_input / of_weight, of_output / of_weight, of_input / of_output, side, transform,
        transform * (transform // 2 + 1) * 16 * planes / operands, in_tiles / operands,
    )  # fmt: skip
    found = [np.asarray(v) for v in features(calls).values()]
    return np.stack([*found, *more], 1).astype(np.float32)


def by_trees(call: Columns, direction: str) -> int:
    """The largest workspace of a call (1, 25), by a tree."""
    (ratio,) = trees()[f"{direction}_tried"].leaf(search_features(call)[0].tolist())
    return max(0, ratio * int(operand_bytes(call)[0]) // RATIO_ONE - LEAST_BYTES)
