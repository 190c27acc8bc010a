"""Layers of networks as calls of cuDNN: what the families of `common_convolutions.py` share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from memest.estimator.kernels.cudnn_convolution import ConvolutionShapes

SINGLE, HALVES = (torch.float32,), (torch.float16, torch.bfloat16)
ALL = SINGLE + HALVES
MOST_BYTES = 4 << 30
"""Of an operand: larger ones do not fit often beside each other."""

Sides = int | tuple[int, ...]
"""One for each dimension, or the same for all."""

Layer = tuple[int, int, int, Sides, Sides, Sides, Sides]
"""Samples, input and output channels, image, window, stride, padding."""

Family = Iterator[ConvolutionShapes | None]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ODD_BATCHES = (3, 6, 10, 12, 20, 24, 40, 48, 50, 80, 96, 100, 160, 192, 200)


def shapes_of(
    layer: Layer,
    dtype: torch.dtype,
    *,
    is_last: bool = False,
    groups: int = 1,
    dilation: int = 1,
    dims: int = 2,
) -> ConvolutionShapes | None:
    """The call of a layer; None where nothing would come out, or an operand is too large."""
    samples, inputs, outputs, *sides = layer
    dims = next((len(given) for given in sides if isinstance(given, tuple)), dims)
    image, window, stride, padding = (
        given if isinstance(given, tuple) else (given,) * dims for given in sides
    )
    plane = tuple(
        (side + 2 * pad - dilation * (width - 1) - 1) // step + 1
        for side, pad, width, step in zip(image, padding, window, stride, strict=True)
    )
    if min(plane) < 1:
        return None
    made = ConvolutionShapes(
        (samples, inputs, *image), (outputs, inputs // groups, *window),
        (samples, outputs, *plane), stride, padding, (dilation,) * dims,
        groups, dtype, is_last,
    )  # fmt: skip
    largest = max(np.prod(made.tensor), np.prod(made.output)) * dtype.itemsize
    return made if largest <= MOST_BYTES else None
