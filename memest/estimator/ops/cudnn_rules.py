"""Workspaces of convolutions by their shapes, for GPUs without cuDNN's own answer.

A call is a row of numbers (`ConvolutionShapes.row`). `product_bytes` is for 1x1 convolutions that
cuBLASLt computes, which needs a GPU to answer. `workspace_bytes` is for all calls without cuDNN.

Shapes: N samples, C input channels, O output channels, P pixels of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from memest.units import ceil_div, round_up

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

ITEM_BYTES = tuple(dtype.itemsize for dtype in DTYPES)

TILE = 128
"""Rows and columns of the product that one block of threads computes."""

BLOCKS_PER_SM, LEAST_DEPTH = {4: 2, 2: 1, 8: 1}, {4: 64, 2: 2048, 8: 64}
"""Blocks that a cut product fills an SM with, and least elements of a cut, by bytes per element."""

H100_SMS = 132

FEW_CHANNELS = 14
"""Most channels of a convolution in NCHW that is computed without rearranged operands."""

HEADER_BYTES = 16
"""Pointers in front of rearranged operands."""

MOST_SIDE = 256
"""Most pixels of a padded image's side that is transformed as a whole."""


def is_product(row: Sequence[int]) -> bool:
    """Return whether the convolution is a matrix product: 1 x 1, no stride, padding, groups."""
    return row[3] == 1 and set(row[13:19]) == {1} and not any(row[19:22])


def product_bytes(row: Sequence[int], direction: str, num_sms: int = H100_SMS) -> int:
    """Workspace of a product by cuBLASLt (13.1).

    The gradient of the weight sums over samples and pixels, and partial sums are accumulators of
    C * O elements:

        channels first: one partial sum for each sample
        channels last:  as many as fill the GPU with tiles of 128 x 128, if each sums enough

    Some kernels add 272 or 400 bytes. Of products on an H100, 68 and 67 % are right to 512 B
    forward and for the input, 97 and 98 % within 512 B. For the weight 83 % are right in NCHW,
    35 % channels-last.
    """
    if direction != "weight":
        return 0
    item_bytes, is_last = ITEM_BYTES[row[0]], row[1]
    samples, inputs, outputs, pixels = row[4], row[5], row[6], prod(row[10:13])
    num_sums = samples
    if is_last:
        tiles = ceil_div(inputs, TILE) * ceil_div(outputs, TILE)
        num_sums = num_sms * BLOCKS_PER_SM[item_bytes] // tiles
        num_sums = min(num_sums, samples * pixels // LEAST_DEPTH[item_bytes])
        num_sums = 0 if num_sums == 1 else num_sums
    return num_sums * inputs * outputs * max(4, item_bytes)


def compiled_bytes(row: Sequence[int], direction: str) -> int:
    """Workspace of a depthwise convolution whose engine sums the weight's gradient in parts.

    In channels-last there are 8 partial sums of float32 for each sample, with channels padded to
    32:

        8 * 4 * N * up(C, 32) * window

    All others take nothing. Exact for all such calls on an H100.
    """
    is_last, samples, inputs = row[1], row[4], row[5]
    if direction != "weight" or not is_last:
        return 0
    return 8 * 4 * samples * round_up(inputs, 32) * prod(row[13:16])


def is_winograd(row: Sequence[int], direction: str) -> bool:
    """Return whether a GPU accepts Winograd's engines: windows of 3x3, without stride.

    In channels-last only the one for the weight is accepted.
    """
    is_plain = row[2] == 2 and list(row[14:16]) == [3, 3] and {*row[16:19], *row[22:25]} == {1}
    return is_plain and ITEM_BYTES[row[0]] < 8 and (direction == "weight" or not row[1])


def winograd_bytes(row: Sequence[int], direction: str) -> int:
    """Workspace of a convolution with a 3x3 window by Winograd.

    The result of a direction, for the weight the output, is cut into tiles of 4 x 4 pixels. A tile
    and a window become 6 x 6 float32. At most 8 groups are computed at a time; channels are those
    of one group. N is padded to 16, except for the weight:

        36 * 4 * (tiles * N * (C + O) + C * O) * min(groups, 8)

    In channels-last the operands are rearranged before.
    """
    groups, samples, inputs, outputs = row[3:7]
    inputs, outputs = inputs // groups, outputs // groups
    height, width = row[8:10] if direction == "input" else row[11:13]
    tiles = ceil_div(height, 4) * ceil_div(width, 4)
    if direction != "weight":
        samples = round_up(samples, 16)
    made = 36 * 4 * (tiles * samples * (inputs + outputs) + inputs * outputs) * min(groups, 8)
    return made + (_rearranged_bytes(row) if row[1] else 0)


def is_fourier(row: Sequence[int], direction: str) -> bool:
    """Return whether a GPU accepts Fourier transforms.

    They have no stride, dilation or groups and up to two dimensions. In tiles, both sides of the
    window exceed 1. A whole image has at most 256 pixels a side with its padding
    (`CUDNN_CONVOLUTION_FWD_ALGO_FFT` and `BWD_FILTER_ALGO_FFT` of cuDNN's API reference).
    """
    is_plain = row[2] <= 2 and {row[3], *row[16:19], *row[22:25]} == {1}
    if not is_plain or DTYPES[row[0]] not in (torch.float32, torch.float16):
        return False
    return min(row[14:16]) > 1 if direction == "input" else _padded_side(row) <= MOST_SIDE


def _padded_side(row: Sequence[int]) -> int:
    return max(size + 2 * pad for size, pad in zip(row[7:10], row[19:22], strict=True))


def fourier_bytes(row: Sequence[int], direction: str) -> int:
    """Workspace of a convolution by Fourier transforms.

    A plane becomes `s * (s / 2 + 1)` complex float32, where s is the padded image's side as a power
    of two, at least 16. The transforms are stored twice, in addition to the kernel's own result:

        forward  weight + 2 * max(C * O + N * C, N * O) planes
        weight   output + 2 * max(C * O, N * (C + O)) planes

    The gradient of the input is cut into tiles of s = 32, of which up to two are stored at a time:

        input    min(tiles, 2) * N * (C + O) + C * O planes

    In channels-last the operands are rearranged before.
    """
    samples, inputs, outputs = row[4:7]
    side, padded = 16, _padded_side(row)
    while side < padded:
        side *= 2
    of_input, of_output, of_weight = samples * inputs, samples * outputs, inputs * outputs
    rearranged = _rearranged_bytes(row) if row[1] else 0
    if direction == "input":
        has_one_tile = all(
            image <= 32 - window + 1 for image, window in zip(row[8:10], row[14:16], strict=True)
        )
        planes = (1 if has_one_tile else 2) * (of_input + of_output) + of_weight
        return rearranged + planes * _plane_bytes(32)
    if direction == "forward":
        own, planes = of_weight * prod(row[13:16]), max(of_weight + of_input, of_output)
    else:
        own, planes = of_output * prod(row[10:13]), max(of_weight, of_input + of_output)
    return rearranged + 4 * own + 2 * planes * _plane_bytes(side)


def is_strided_fourier(row: Sequence[int]) -> bool:
    """Return whether the input's gradient may take Fourier transforms in spite of a stride.

    Its windows are wider than the stride, in float32. Other calls with a stride seldom take them.
    """
    strides = row[17:19]
    is_wide = all(window > stride for window, stride in zip(row[14:16], strides, strict=True))
    without_stride = (*row[:16], 1, 1, 1, *row[19:])
    return max(strides) > 1 and is_wide and row[0] == 0 and is_fourier(without_stride, "input")


def strided_fourier_bytes(row: Sequence[int]) -> int:
    """Estimate Fourier transforms of the gradient of the input of a convolution with stride.

    Each phase of the stride is a convolution of its own, in tiles of s = 32 with windows of 3 x 3:

        stride**2 * C * O * (plane + 3 * 3 * 4) + N * (2 * (C + O) planes + input + output)

    Of 2,543 calls on an H100 85 % are within a quarter.
    """
    samples, inputs, outputs = row[4:7]
    plane, images = _plane_bytes(32), inputs * prod(row[7:10]) + outputs * prod(row[10:13])
    of_weight = prod(row[16:19]) * inputs * outputs * (plane + 3 * 3 * 4)
    return of_weight + samples * (2 * (inputs + outputs) * plane + 4 * images)


def _plane_bytes(side: int) -> int:
    return side * (side // 2 + 1) * 8


def workspace_bytes(row: Sequence[int], direction: str) -> int:
    """Estimate a workspace without cuDNN.

    Kernels for tensor cores read channels last: in NCHW input, weight and output are rearranged.
    Products, depthwise convolutions and few channels take kernels that do without.
    """
    if is_product(row):
        return product_bytes(row, direction)
    dtype, is_last, _, groups, _, inputs, outputs = row[:7]
    is_depthwise = groups > 1 and groups == inputs
    if is_depthwise and ITEM_BYTES[dtype] == 2:
        return compiled_bytes(row, direction)
    if is_last or is_depthwise or min(inputs, outputs) <= FEW_CHANNELS or ITEM_BYTES[dtype] == 8:
        return 0
    return _rearranged_bytes(row)


def _rearranged_bytes(row: Sequence[int]) -> int:
    """Bytes of input, output and weight in another order."""
    groups, samples, inputs, outputs = row[3:7]
    elements = samples * (inputs * prod(row[7:10]) + outputs * prod(row[10:13]))
    elements += outputs * inputs // groups * prod(row[13:16])
    return elements * ITEM_BYTES[row[0]] + HEADER_BYTES
