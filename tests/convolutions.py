"""Convolutions of the measured file: a row of numbers each."""

from __future__ import annotations

from collections.abc import Sequence

from memest.estimator.ops.cudnn_rules import DTYPES, ConvolutionShapes


def of_row(row: Sequence[int]) -> ConvolutionShapes:
    """A row has dtype, layout, dimensions, groups, samples, channels in and out, then three each
    of image, result, window, stride, padding and dilation; missing dimensions are in front.
    """
    dtype, is_last, dims, groups, samples, inputs, outputs = row[:7]
    image, result, window, *rest = (tuple(row[i + 3 - dims : i + 3]) for i in range(7, 25, 3))
    return ConvolutionShapes(
        (samples, inputs, *image), (outputs, inputs // groups, *window),
        (samples, outputs, *result),
        *rest, groups, DTYPES[dtype], bool(is_last),
    )  # fmt: skip
