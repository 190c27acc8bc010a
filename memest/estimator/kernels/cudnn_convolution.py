"""Workspaces of cuDNN's convolutions, as far as they follow from the shapes.

cuDNN chooses its kernels by heuristics that are not public. The rules are deduced from 232
convolutions measured one by one on an H100 (torch 2.11, cuDNN 9.19, `cudnn.benchmark` off, TF32
allowed) in float32, float16 and bfloat16, NCHW and channels-last. The rules were looked for in one
half of them; of the other half the shares below were seen on the way, and two limits of the float32
forward come from it, so it is not wholly blind. The structure is explained, the thresholds are
measured. What was seen:

- The kernels read channels-last. An NCHW call rearranges its operands in the workspace, and asks
  for `HEADER_BYTES` and what the kernel itself asks for. A 1x1 weight is the same in both orders.
- A convolution of 1x1 pixels without stride is a matrix product per sample in NCHW: nothing is
  rearranged, but in deep layers on small planes. Its weight gradient is one float32 partial sum
  per sample.
- Few input channels (an image) are padded to one vector.
- Other weight gradients are cut along samples and pixels until each multiprocessor has a tile, and
  keep one float32 partial sum per cut.
- A depthwise convolution needs none, but for partial sums of its weight gradient.

Calls whose workspace is right to the allocator's 512 B, in the half that was used and in the half
that was kept aside: forward 93 and 90 %, gradient of the input 93 and 92 %, of the weight 66 and
60 % (76 and 68 % in NCHW). Where they are not, a gradient of a weight is 1 to 3 MB off at the
median, the others 4 to 9 MB: cuDNN splits sums, or rearranges, where the rule does not, and the
other way round. Which calls are reported says `convolution.convolution_is_modelled`.

Symbols: N samples, C and O channels of input and output, P pixels of an output plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

HEADER_BYTES = 16
"""Asked for by an NCHW call beside its rearranged operands."""

COUNTER_BYTES = 131
"""What a strided input gradient asks for by itself: 4 bytes, aligned to 128."""

FEW_CHANNELS = 4
"""Inputs of up to so many channels are images: their kernels pad the channels to one vector."""

MANY_WEIGHTS, MANY_HALF_WEIGHTS = 2**19, 2**18
"""C * O of a 1x1 convolution from which cuDNN rearranges its operands; the second in 16 bits."""

SMALL_KERNEL, MAX_WINDOW = 4, 9
"""Largest extent of a kernel with code of its own for images, and of one that is no patch."""

VECTOR_BYTES = 16

ACCUMULATOR_BYTES = 4

FLOAT_PRODUCT_BYTES = 400
"""What a float32 product of many samples asks for, where channels do not grow."""


@dataclass(frozen=True, slots=True)
class ConvolutionShapes:
    """One convolution, as cuDNN is called: a transposed one is the gradient of a plain one.

    `tensor` (N, C, ...), `weight` (O, C / groups, ...) and `output` (N, O, ...) are those of the
    plain convolution.
    """

    tensor: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    is_channels_last: bool

    @property
    def is_half(self) -> bool:
        """Whether of 16 bits."""
        return self.dtype.itemsize == 2

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one input channel."""
        return self.groups > 1 and self.weight[1] == 1

    @property
    def has_1x1_weight(self) -> bool:
        """Whether the kernel is one pixel."""
        return prod(self.weight[2:]) == 1

    @property
    def is_matrix_product(self) -> bool:
        """1x1, neither strided nor padded."""
        return self.has_1x1_weight and prod(self.stride) == 1 and not any(self.padding)

    @property
    def num_pixels(self) -> int:
        """N * P: what a weight gradient sums over."""
        return self.output[0] * prod(self.output[2:])

    @property
    def has_whole_vectors(self) -> bool:
        """Whether an output plane is a whole number of 16-byte vectors."""
        return prod(self.output[2:]) * self.dtype.itemsize % VECTOR_BYTES == 0

    @property
    def is_image(self) -> bool:
        """Whether the input has as few channels as an image."""
        return self.tensor[1] <= FEW_CHANNELS

    @property
    def is_plain_image(self) -> bool:
        """Whether one float32 channel in NCHW, which has a kernel of its own."""
        return self.tensor[1] == 1 and not self.is_half and not self.is_channels_last

    @property
    def is_patch(self) -> bool:
        """Whether the kernel covers a patch of an image."""
        return max(self.weight[2:]) > MAX_WINDOW

    def bytes_of(self, shape: tuple[int, ...], vector: int = 1, dim: int = 1) -> int:
        """Bytes of an operand whose dimension `dim` is padded to whole vectors."""
        padded = -(-shape[dim] // vector) * vector
        return prod(shape) // shape[dim] * padded * self.dtype.itemsize


def _rearranged(c: ConvolutionShapes, vector: int = 1) -> int:
    """Input, weight and output in channels-last order, the input's channels padded."""
    weight = 0 if c.has_1x1_weight else c.bytes_of(c.weight, vector)
    return c.bytes_of(c.tensor, vector) + weight + c.bytes_of(c.output) + HEADER_BYTES


def _vector_of_images(c: ConvolutionShapes) -> int:
    """Channels to which those of an image are padded: 16 bytes, in float16 8 but for patches."""
    if not c.is_half:
        return 1
    return 4 if c.dtype == torch.float16 and not c.is_patch else 8


def _is_rearranged_product(c: ConvolutionShapes, many_weights: int) -> bool:
    """Whether an NCHW 1x1 convolution rearranges its operands.

    It does in deep layers whose planes are odd, so that a matrix product over the plane cannot load
    two pixels at once.
    """
    return prod(c.output[2:]) % 2 == 1 and c.tensor[1] * c.output[1] >= many_weights


def _product_workspace(c: ConvolutionShapes, many_weights: int) -> int:
    if _is_rearranged_product(c, many_weights):
        return _rearranged(c)
    has_block = not c.is_half and c.tensor[0] >= 32 and c.tensor[1] >= c.output[1]
    return FLOAT_PRODUCT_BYTES if has_block else 0


def forward_workspace(c: ConvolutionShapes) -> int:
    """Bytes that cuDNN takes for the output."""
    if c.is_depthwise or c.is_plain_image:
        return 0
    if c.is_image:
        return _forward_of_image(c)
    if c.is_channels_last:
        return 0
    if c.is_matrix_product:
        many = MANY_HALF_WEIGHTS // 2 if c.is_half and c.tensor[0] > 8 else MANY_WEIGHTS
        return _product_workspace(c, many)
    if c.is_half and c.has_1x1_weight and c.tensor[1] <= 64:
        return 0
    workspace = _rearranged(c)
    is_large = min(c.stride) > 1 and len(c.stride) == 2 and prod(c.output) >= 2**22
    if c.dtype == torch.float32 and (c.tensor[1] <= 64 or is_large) and c.has_whole_vectors:
        workspace -= c.bytes_of(c.output)  # the kernel writes NCHW itself
    return workspace


def _forward_of_image(c: ConvolutionShapes) -> int:
    """Small kernels read the image as it is; others pad its channels."""
    is_small = max(c.weight[2:]) <= SMALL_KERNEL
    if is_small and (c.is_half or not c.is_channels_last):
        return 0
    workspace = _rearranged(c, _vector_of_images(c))
    return workspace - c.bytes_of(c.output) if c.is_channels_last else workspace


def input_workspace(c: ConvolutionShapes) -> int:
    """Bytes that cuDNN takes for the gradient of the input."""
    counter = COUNTER_BYTES if prod(c.stride) > 1 else 0
    if c.is_depthwise or c.is_plain_image:
        return 0
    if c.is_image:
        return _input_of_image(c) + counter
    if c.is_channels_last:
        return counter
    if c.is_matrix_product:
        return _product_workspace(c, MANY_HALF_WEIGHTS if c.is_half else MANY_WEIGHTS)
    return _rearranged(c) + counter


def _input_of_image(c: ConvolutionShapes) -> int:
    if c.is_half:
        workspace = _rearranged(c, 8)
        return workspace - c.bytes_of(c.output) if c.is_channels_last else workspace
    return _rearranged(c) if c.is_channels_last else 0


def weight_workspace(c: ConvolutionShapes, num_sms: int) -> int:
    """Bytes that cuDNN takes for the gradient of the weight."""
    if c.is_depthwise:
        return _depthwise_weight(c, num_sms)
    if c.is_image:
        return _weight_of_image(c, num_sms)
    if c.is_matrix_product:
        return _weight_of_matrix_product(c, num_sms)
    partials = _partial_sums(c, num_sms)
    return partials if c.is_channels_last else _rearranged(c) + partials


def _accumulators(c: ConvolutionShapes) -> int:
    return prod(c.weight) * ACCUMULATOR_BYTES


def _tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    return -(-rows // tile[0]) * -(-columns // tile[1])


def _partial_sums(c: ConvolutionShapes, num_sms: int) -> int:
    """Float32 partial sums of a weight gradient, and a counter for each tile and cut."""
    return _half_sums(c, num_sms) if c.is_half else _float_sums(c, num_sms)


def _counters(num_sums: int) -> int:
    return 127 + 4 * (num_sums + 8)


def _half_sums(c: ConvolutionShapes, num_sms: int) -> int:
    """The last cut adds to the others' sums instead of keeping its own."""
    rows, columns, pixels = c.weight[0], prod(c.weight[1:]), c.num_pixels
    is_odd = prod(c.weight[2:]) % 2 == 1 and not c.has_1x1_weight
    tiles = _tiles(rows, columns, (128, 64) if is_odd else (64, 64))
    splits = min(num_sms // tiles, pixels // 1344) if pixels >= 2**14 else 0
    return (splits - 1) * _accumulators(c) + _counters(tiles * splits) if splits > 2 else 0


def _float_sums(c: ConvolutionShapes, num_sms: int) -> int:
    """Tiles that do not fill the multiprocessors are cut until they do, and stored whole."""
    rows, columns, pixels = c.weight[0], prod(c.weight[1:]), c.num_pixels
    is_strided = prod(c.stride) > 1
    has_few_rows = rows <= 64 or (is_strided and rows * columns < 2**19) or rows * columns < 2**17
    tile = (64 if has_few_rows else 128, 64 if rows <= 64 else 128)
    rest = _tiles(rows, columns, tile) % num_sms
    splits = min(num_sms // rest, pixels // 224) if rest else 0
    if splits < 3 or (is_strided and pixels < 3000):
        return 0
    return splits * rest * tile[0] * tile[1] * ACCUMULATOR_BYTES + _counters(splits * rest)


def _has_rearranged_weight(c: ConvolutionShapes) -> bool:
    """Whether the gradient of an NCHW 1x1 weight may be summed over rearranged operands."""
    is_odd_plane = prod(c.output[2:]) % 2 == 1
    if c.has_whole_vectors or (not c.is_half and prod(c.weight) <= MANY_HALF_WEIGHTS):
        return False
    return not (c.is_half and is_odd_plane) or c.tensor[1] > min(c.output[1], 511)


def _weight_of_matrix_product(c: ConvolutionShapes, num_sms: int) -> int:
    """In NCHW a partial sum per sample; in channels-last a tile per multiprocessor."""
    weight, pixels = _accumulators(c), c.num_pixels
    if not c.is_channels_last:
        if _has_rearranged_weight(c) and c.tensor[0] * weight > _rearranged(c):
            return _rearranged(c)
        if not c.is_half and c.tensor[1] < 32 <= c.output[1]:
            return _rearranged(c) + num_sms // _tiles(c.weight[0], c.weight[1], (128, 64)) * weight
        return c.tensor[0] * weight
    large, small = max(c.weight[:2]), min(c.weight[:2])
    if c.is_half:
        most = num_sms // _tiles(large, small, (128, 128))
        splits = min(most, pixels // 1365)
        return splits * weight + 272 if splits > 3 and most > 7 else 0
    if prod(c.weight) < 128 * 64 and pixels >= 2**15:
        return num_sms * 128 * 64 * ACCUMULATOR_BYTES + 976
    splits = min(num_sms // _tiles(large, small, (256, 128)), pixels // 64)
    return splits * weight + 256 if pixels >= 1024 and splits else 0


def _weight_of_image(c: ConvolutionShapes, num_sms: int) -> int:
    """The image padded to 16 bytes a pixel in 16 bits, and partial sums."""
    if c.is_plain_image or (not c.is_half and max(c.weight[2:]) <= SMALL_KERNEL):
        return 0
    if c.is_patch:
        workspace = _rearranged(c, 8 if c.is_half else 4)
        return workspace - c.bytes_of(c.output) if c.is_channels_last else workspace
    if c.dtype == torch.float16 and 1 < max(c.stride) < max(c.weight[2:]):
        sums = 4 * prod(c.weight) // c.weight[1] * FEW_CHANNELS * ACCUMULATOR_BYTES
        workspace = _rearranged(c, _vector_of_images(c)) + sums
        return workspace - c.bytes_of(c.output) if c.is_channels_last else workspace
    channels = FEW_CHANNELS if c.is_half else c.weight[1]
    columns = prod(c.weight[2:]) * channels
    splits = num_sms // _tiles(c.weight[0], columns, (128, 128))
    operands = c.bytes_of(c.tensor, 8 if c.is_half else 1)
    if not (c.is_half and c.is_channels_last):
        operands += c.bytes_of(c.output)
    return operands + splits * c.weight[0] * columns * ACCUMULATOR_BYTES + 144


def is_native(c: ConvolutionShapes) -> bool:
    """Whether torch runs its own kernel: `use_cudnn_depthwise` of Convolution.cpp is not true.

    cuDNN takes channels-last and, in float16, 32 channels or more with square kernels of 1, 3 or 5
    pixels, without stride or with many channels.
    """
    if not c.is_depthwise or c.is_channels_last:
        return False
    if c.dtype != torch.float16 or len(c.tensor) != 4 or c.tensor[1] < 32:
        return True
    kernel, width, channels = c.weight[3], c.tensor[3], c.tensor[1]
    if c.weight[2] != kernel or kernel not in (1, 3, 5) or width < 7:
        return True
    if c.stride[0] != c.stride[1] or c.stride[1] not in (1, 2):
        return True
    if c.stride[1] == 1:
        return False
    if kernel == 1:
        return not (c.tensor[0] <= 16 and channels >= 128 and width <= 7)
    return not (channels >= 512 or (channels >= 256 and width >= 28))


def _depthwise_weight(c: ConvolutionShapes, num_sms: int) -> int:
    """Eight partial sums per sample, on large planes one per multiprocessor.

    In float32 a large kernel pads the one channel of each group to a vector.
    """
    if is_native(c):
        return 0
    weight, plane = _accumulators(c), prod(c.output[2:])
    if not c.is_channels_last:
        if prod(c.output) < 2**22:
            return 0
        return _rearranged(c) + c.bytes_of(c.weight) + num_sms * weight
    is_large = max(c.weight[2:]) > SMALL_KERNEL
    if c.is_half:
        few = is_large or c.num_pixels <= 2**13
        return (8 * c.tensor[0] if few else num_sms) * weight
    if not is_large:
        return num_sms * weight
    if plane < 28 * 28:
        return 0
    operands = 4 * (c.bytes_of(c.tensor) + c.bytes_of(c.output))
    return operands + -(-num_sms * 24 // c.groups) * 16 * weight
