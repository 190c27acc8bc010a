"""Workspaces of convolutions by their shapes, for GPUs without cuDNN's own answer.

`product_bytes` is for 1x1 convolutions that cuBLASLt computes, which needs a GPU to answer.
`workspace_bytes` is for all calls without cuDNN.

Shapes: N samples, C input channels, O output channels, P pixels of the output.
"""

from dataclasses import dataclass, replace
from math import prod

import torch

from memest.units import ceil_div, round_up

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TILE = 128  # rows and columns of the product that one block of threads computes
BLOCKS_PER_SM_BY_ITEMSIZE = {4: 2, 2: 1, 8: 1}  # of a product split along its inner dimension
MIN_DEPTH_BY_ITEMSIZE = {4: 64, 2: 2048, 8: 64}  # elements of a split

H100_SMS = 132
FEW_CHANNELS = 14  # most channels of a convolution in NCHW without rearranged operands
HEADER_BYTES = 16  # pointers in front of rearranged operands
MAX_GROUPS = 8  # most groups that are transformed at a time
MAX_SIDE = 256  # most pixels of a padded image's side that is transformed as a whole


@dataclass(frozen=True, slots=True)
class ConvolutionShapes:
    """Shapes and options of one convolution, as cuDNN gets them.

    N samples, C input and O output channels. `tensor` (N, C, ...) is the input, `weight` (O, C /
    groups, ...), `output` (N, O, ...). A transposed convolution is described by the ordinary one
    whose input gradient it computes.
    """

    tensor: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    is_channels_last: bool

    @property
    def channels(self) -> tuple[int, int, int]:
        """Numbers of samples, input channels and output channels."""
        return self.tensor[0], self.tensor[1], self.output[1]

    @property
    def image(self) -> tuple[int, ...]:
        """Size of the input in pixels, (..., height, width); the height of a 1-d input is 1."""
        return planar(self.tensor[2:])

    @property
    def result(self) -> tuple[int, ...]:
        """Size of the output in pixels, like `image`."""
        return planar(self.output[2:])

    @property
    def window(self) -> tuple[int, ...]:
        """Size of the kernel window in pixels, like `image`."""
        return planar(self.weight[2:])

    @property
    def is_depthwise(self) -> bool:
        """True if there are several groups, of one input channel each."""
        return self.groups > 1 and self.weight[1] == 1

    @property
    def is_plane(self) -> bool:
        """True for a 1-d or 2-d convolution with stride and dilation 1."""
        return len(self.tensor) <= 4 and {*self.stride, *self.dilation} == {1}


def planar(extents: tuple[int, ...], fill: int = 1) -> tuple[int, ...]:
    """Return `extents`, one number per dimension of an image. A single number gets `fill` before
    it, since torch runs 1-d convolutions as 2-d."""
    return extents if len(extents) > 1 else (fill, *extents)


def is_product(c: ConvolutionShapes) -> bool:
    """Return whether convolution `c` is a matrix product. It is one if it has a 1 x 1 window,
    stride 1, one group and no padding."""
    return c.groups == 1 and {*c.window, *c.stride} == {1} and not any(c.padding)


def product_bytes(c: ConvolutionShapes, direction: str, num_sms: int = H100_SMS) -> int:
    """Return the workspace bytes of cuBLASLt (13.1) for a convolution that is a matrix product.

    Only `direction` "weight" (the weight's gradient) has a workspace. This gradient is a sum over
    samples and pixels, which is split into partial sums. A partial sum needs an accumulator of 4
    bytes (8 in float64) for each pair of an input channel and an output channel. The number of
    partial sums is:

        channels first  one for each sample
        channels last   (thread blocks that the GPU runs at once) // (tiles of 128 x 128 channels)

    The GPU has `num_sms` multiprocessors. In channels last, a partial sum has at least 64 terms
    (2048 in 16 bits), and a single partial sum needs no workspace.

    Evidence (H100): some kernels for "forward" and "input" take 272 or 400 bytes instead of 0. So
    the number of blocks of 512 bytes is right for 68 % ("forward") and 67 % ("input"). The error is
    at most 512 bytes for 97 % ("forward") and 98 % ("input"). "weight" is right for 83 % in NCHW,
    35 % in channels-last.
    """
    if direction != "weight":
        return 0
    item_bytes, (samples, inputs, outputs) = c.dtype.itemsize, c.channels
    num_sums = samples
    if c.is_channels_last:
        tiles = ceil_div(inputs, TILE) * ceil_div(outputs, TILE)
        num_sums = num_sms * BLOCKS_PER_SM_BY_ITEMSIZE[item_bytes] // tiles
        num_sums = min(num_sums, samples * prod(c.result) // MIN_DEPTH_BY_ITEMSIZE[item_bytes])
        if num_sums == 1:  # the single sum is the result
            return 0
    return num_sums * inputs * outputs * max(4, item_bytes)


def compiled_bytes(c: ConvolutionShapes, direction: str) -> int:
    """Return the workspace bytes of a depthwise convolution in an engine compiled at run time.

    Only `direction` "weight" (the weight's gradient) in channels-last has one. It holds 8 partial
    sums of float32 for each of N samples, with the C channels padded to 32:

        8 * 4 * N * up(C, 32) * window

    Exact for all such calls on an H100.
    """
    if direction != "weight" or not c.is_channels_last:
        return 0
    samples, inputs, _ = c.channels
    return 8 * 4 * samples * round_up(inputs, 32) * prod(c.window)


def is_winograd(c: ConvolutionShapes, direction: str) -> bool:
    """Return whether cuDNN's Winograd engines accept a convolution in `direction`.

    The window is 3x3, with stride and dilation 1, and not float64. In channels-last only the engine
    of `direction` "weight" (the weight's gradient) accepts it.
    """
    has_engine = direction == "weight" or not c.is_channels_last
    return has_engine and c.is_plane and c.window == (3, 3) and c.dtype != torch.float64


def winograd_bytes(c: ConvolutionShapes, direction: str) -> int:
    """Return the workspace bytes of a convolution with a 3x3 window by Winograd's method.

    The output, or in `direction` "input" (the input's gradient) the image, is cut into tiles of 4 x
    4 pixels. `tiles` is the number of tiles of one sample. A tile and a window become 6 x 6
    float32. At most 8 groups are computed at a time. C and O are input and output channels of a
    group. N is the number of samples, rounded up to a multiple of 16 except in `direction`
    "weight":

        36 * 4 * (tiles * N * (C + O) + C * O) * min(groups, 8)

    In channels-last, channels-first copies of input, output and weight are added.
    """
    samples, inputs, outputs = c.channels
    inputs, outputs = inputs // c.groups, outputs // c.groups
    height, width = c.image if direction == "input" else c.result
    tiles = ceil_div(height, 4) * ceil_div(width, 4)
    if direction != "weight":
        samples = round_up(samples, 16)
    tiled = 36 * 4 * (tiles * samples * (inputs + outputs) + inputs * outputs) * min(c.groups, 8)
    return tiled + (_rearranged_bytes(c) if c.is_channels_last else 0)


def is_fourier(c: ConvolutionShapes, direction: str) -> bool:
    """Return whether cuDNN's Fourier engines accept a convolution in `direction`.

    The engines accept float32 or float16 in one or two dimensions without dilation. `direction` is
    "forward", or for a gradient "input" or "weight". Further conditions for each direction are:

        input, stride 1     the window has at least 2 x 2 elements
        input, with stride  each side of the window is larger than the stride, or the padding of
                            that side is no multiple of the stride
        forward, weight     stride 1, and a padded image of at most 256 pixels a side
                            (`CUDNN_CONVOLUTION_FWD_ALGO_FFT` and `BWD_FILTER_ALGO_FFT` of cuDNN's
                            API reference)
    """
    is_flat = len(c.tensor) <= 4 and {*c.dilation} == {1}
    if c.dtype not in (torch.float32, torch.float16) or not is_flat:
        return False
    if max(c.stride) > 1:
        dims = zip(c.window, planar(c.stride), planar(c.padding, 0), strict=True)
        return direction == "input" and all(k > s or p % s for k, s, p in dims)
    return min(c.window) > 1 if direction == "input" else _padded_side(c) <= MAX_SIDE


def _padded_side(c: ConvolutionShapes) -> int:
    return max(size + 2 * pad for size, pad in zip(c.tensor[2:], c.padding, strict=True))


def fourier_bytes(c: ConvolutionShapes, direction: str) -> int:
    """Return the workspace bytes of a convolution by Fourier transforms, for N samples.

    A plane is the transform of one channel: `s * (s / 2 + 1)` complex float32. Its side s is that
    of the padded image as a power of two, at least 16. C and O are input and output channels. For
    `direction` "forward" and "weight", planes are stored twice. The workspace also has one tensor
    in float32. The sum in bytes is:

        forward  4 * weight.numel() + 2 * plane_bytes * max(C * O + N * C, N * O)
        weight   4 * output.numel() + 2 * plane_bytes * max(C * O, N * (C + O))

    The gradient of the input is cut into tiles of s = 32. `tiles` is the number of tiles of one
    channel, of which up to two are stored at a time:

        input    plane_bytes * (min(tiles, 2) * N * (C + O) + C * O)

    In channels-last, channels-first copies of input, output and weight are added. For several
    groups, C and O are the channels of one group. Copies of the group's input and output are added,
    and in channels-last with a window above one element also of its weight. All of this counts
    min(groups, 8) times, since up to eight groups are computed at a time. With a stride, the sum is
    `_strided_fourier_bytes`, without copies.

    Evidence: 761 convolutions with groups or strides under `cudnn.benchmark` on an H100. Groups
    with other numbers of input than output channels may take more.
    """
    if c.groups == 1:
        is_rearranged = c.is_channels_last and max(c.stride) == 1
        return _one_group_bytes(c, direction) + (_rearranged_bytes(c) if is_rearranged else 0)
    samples, inputs, outputs = c.channels
    group = replace(
        c, groups=1, is_channels_last=False,
        tensor=(samples, inputs // c.groups, *c.tensor[2:]),
        weight=(outputs // c.groups, *c.weight[1:]),
        output=(samples, outputs // c.groups, *c.output[2:]),
    )  # fmt: skip
    num_bytes = _one_group_bytes(group, direction)
    if max(c.stride) == 1:
        num_bytes += _rearranged_bytes(group)
        if not c.is_channels_last or max(c.window) == 1:  # the weight is not copied
            num_bytes -= prod(group.weight) * c.dtype.itemsize
    return min(c.groups, MAX_GROUPS) * num_bytes


def _one_group_bytes(c: ConvolutionShapes, direction: str) -> int:
    if max(c.stride) > 1:
        return _strided_fourier_bytes(c)
    samples, inputs, outputs = c.channels
    side, padded_side = 16, _padded_side(c)
    while side < padded_side:
        side *= 2
    input_planes, output_planes = samples * inputs, samples * outputs
    weight_planes = inputs * outputs
    if direction == "input":
        has_one_tile = all(
            image <= 32 - window + 1 for image, window in zip(c.image, c.window, strict=True)
        )
        num_tiles = 1 if has_one_tile else 2
        return (num_tiles * (input_planes + output_planes) + weight_planes) * _plane_bytes(32)
    if direction == "forward":
        elements = weight_planes * prod(c.window)
        planes = max(weight_planes + input_planes, output_planes)
    else:
        elements = output_planes * prod(c.result)
        planes = max(weight_planes, input_planes + output_planes)
    return 4 * elements + 2 * planes * _plane_bytes(side)


def _strided_fourier_bytes(c: ConvolutionShapes) -> int:
    """Return the workspace bytes of the input's gradient by Fourier transforms, with a stride. Each
    of the `stride**2` phases is a convolution of its own, on every `stride`-th element of window
    and input. With a stride of 2, input channels are padded to an even number. Of 218 calls on an
    H100, 175 are right to 512 B; the worst is 1.1 % off."""
    samples, inputs, outputs = c.channels
    if max(c.stride) == 2:
        inputs += inputs % 2
    phases, num_tiles = prod(c.stride), 1
    image = gradient = window = 1  # elements
    dims = zip(c.image, c.result, c.window, planar(c.stride), planar(c.padding, 0), strict=True)
    for size, result, width, step, pad in dims:
        phase_size, phase_width = ceil_div(size, step), ceil_div(width + -pad % step, step)
        if phase_size + phase_width - 1 > 32:
            num_tiles = 2
        image *= phase_size * step
        has_margin = pad % step > 0 and phase_width == ceil_div(width, step)
        gradient *= result + 1 if has_margin else result
        window *= phase_width
    plane, item = _plane_bytes(32), c.dtype.itemsize
    weight_bytes = phases * inputs * outputs * (plane + window * item) + HEADER_BYTES
    planes = num_tiles * (phases * inputs + outputs)
    return weight_bytes + samples * (planes * plane + item * (inputs * image + outputs * gradient))


def _plane_bytes(side: int) -> int:
    return side * (side // 2 + 1) * 8  # complex64


def workspace_bytes(c: ConvolutionShapes, direction: str) -> int:
    """Estimate the workspace bytes of a convolution without cuDNN.

    `direction` is "forward", or for a gradient "input" or "weight". Tensor-core kernels read
    channels-last, so in NCHW input, weight and output are copied. Kernels for products, depthwise
    convolutions and few channels need no copies.
    """
    if is_product(c):
        return product_bytes(c, direction)
    if c.is_depthwise and c.dtype.itemsize == 2:
        return compiled_bytes(c, direction)
    _, inputs, outputs = c.channels
    has_few_channels = min(inputs, outputs) <= FEW_CHANNELS
    if c.is_channels_last or c.is_depthwise or has_few_channels or c.dtype == torch.float64:
        return 0
    return _rearranged_bytes(c)


def _rearranged_bytes(c: ConvolutionShapes) -> int:
    """Return the bytes of copies of input, output and weight together, with 16 bytes of pointers.
    The copies are channels-last if the tensors are channels-first, and the reverse."""
    elements = prod(c.tensor) + prod(c.output) + prod(c.weight)
    return elements * c.dtype.itemsize + HEADER_BYTES
