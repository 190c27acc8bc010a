"""What a convolution of torch allocates: contiguous copies, outputs and cuDNN's workspace.

Sources: `aten/src/ATen/native/Convolution.cpp`, `cudnn/ConvShared.cpp` and `ConvUtils.h` (torch
2.11) for memory formats, copies and which calls go to cuDNN. The workspaces are those of
`cudnn_convolution`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.cudnn_convolution import (
    DTYPES,
    MEASURED_CAPABILITY,
    SPATIAL,
    ConvolutionShapes,
    Kernels,
    Workspace,
    workspaces,
)
from memest.estimator.kernels.cudnn_search import searches
from memest.estimator.kernels.reductions import sum_bytes
from memest.estimator.kernels.scratch import (
    TRIED,
    Events,
    EventsFn,
    KernelEvent,
    bytes_of,
    outputs,
    passing,
    temporaries,
)

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

TENSOR_CORES_FOR_FLOAT32 = (8, 0)
"""First capability that multiplies float32 in tensor cores, as the measured GPU does."""


def convolution_format(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    """`cudnn_conv_suggest_memory_format`: channels-last where input or weight are."""
    formats = (suggest_memory_format(tensor), suggest_memory_format(weight))
    if tensor.dtype == torch.float64:
        return torch.contiguous_format
    for last in (torch.channels_last, torch.channels_last_3d):
        if last in formats:
            return last
    return torch.contiguous_format


def copies_in(memory_format: torch.memory_format, *tensors: Tensor) -> tuple[int, ...]:
    """Bytes of `tensor.contiguous(memory_format)` for each tensor that has another format."""
    return tuple(
        t.numel() * t.itemsize for t in tensors if not t.is_contiguous(memory_format=memory_format)
    )


def _shapes_of(args: Args, output: Tensor, first: int) -> ConvolutionShapes:
    """What cuDNN is asked for; `first` is the place of the input among the arguments."""
    tensor, weight = args[first], args[first + 1]
    stride, padding, dilation, transposed, groups = (args[first + i] for i in (3, 4, 5, 6, 8))
    if transposed:
        tensor, output = output, tensor
    dims = tensor.dim() - 2
    return ConvolutionShapes(
        tensor=tuple(tensor.shape),
        weight=tuple(weight.shape),
        output=tuple(output.shape),
        stride=tuple(stride) * (dims if len(stride) == 1 else 1),
        padding=tuple(padding) * (dims if len(padding) == 1 else 1),
        dilation=tuple(dilation) * (dims if len(dilation) == 1 else 1),
        groups=groups,
        dtype=tensor.dtype,
        is_channels_last=convolution_format(args[first], weight) != torch.contiguous_format,
    )


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


def _is_without_cudnn(c: ConvolutionShapes) -> bool:
    return is_native(c) or not prod(c.output) * prod(c.tensor)


def _is_by_cudnn(c: ConvolutionShapes, gpu: Gpu) -> bool:
    """Whether cuDNN runs it in a way that was measured."""
    is_measured = c.dtype in DTYPES and 1 <= len(c.stride) <= SPATIAL
    is_recent = gpu.capability >= TENSOR_CORES_FOR_FLOAT32
    return is_measured and is_recent and not _is_without_cudnn(c)


def _workspace(c: ConvolutionShapes, direction: str, gpu: Gpu) -> Workspace:
    """What one direction takes; nothing where torch runs a kernel of its own, or older ones."""
    if not _is_by_cudnn(c, gpu):
        return Workspace(0, is_sure=_is_without_cudnn(c))
    return workspaces(c, _kernels_for(c), gpu)[direction]


def _kernels_for(c: ConvolutionShapes) -> Kernels:
    """What the script allows."""
    cudnn = torch.backends.cudnn
    return Kernels(
        are_deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        are_without_tf32=c.dtype == torch.float32 and not cudnn.allow_tf32,
    )


def _tried(c: ConvolutionShapes, direction: str, gpu: Gpu) -> list[KernelEvent]:
    """What `torch.backends.cudnn.benchmark` has one direction try at its first call."""
    if not torch.backends.cudnn.benchmark or not _is_by_cudnn(c, gpu):
        return []
    return [KernelEvent(num_bytes, TRIED) for num_bytes in searches(c)[direction].num_bytes]


def _is_tried_surely(c: ConvolutionShapes, direction: str, gpu: Gpu) -> bool:
    if not torch.backends.cudnn.benchmark or not _is_by_cudnn(c, gpu):
        return True
    return searches(c)[direction].is_sure and _kernels_for(c) == Kernels()


def _of_forward(args: Args) -> str:
    return "input" if args[6] else "forward"


def _of_input(args: Args) -> str:
    """What of a plain convolution the gradient of the input is."""
    return "forward" if args[7] else "input"


def convolution_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the workspaces are known: a kernel of torch's own, or a call on Hopper whose like are
    right (`Workspace.is_sure`, `Search.is_sure`). Otherwise what is said is the likeliest.
    """
    if func is aten.convolution.default:
        out = torch.ops.aten.convolution.default(*(_on_meta(a) for a in args))
        shapes, directions = _shapes_of(args, out, 0), [_of_forward(args)]
    else:
        shapes, both = _shapes_of(args, args[0], 1), (_of_input(args), "weight")
        directions = [d for d, is_wanted in zip(both, args[10][:2], strict=True) if is_wanted]
    is_sure = all(
        _workspace(shapes, d, gpu).is_sure and _is_tried_surely(shapes, d, gpu) for d in directions
    )
    return is_native(shapes) or (gpu.capability == MEASURED_CAPABILITY and is_sure)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def convolution_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`convolution`: the input in the format of the output before it, then the weight and cuDNN's
    workspace (`cudnn_convolution`, `cudnn_search`).
    """
    memory_format = convolution_format(args[0], args[1])
    shapes, direction = _shapes_of(args, out, 0), _of_forward(args)
    return tuple(
        temporaries(*copies_in(memory_format, args[0]))
        + outputs({0: bytes_of(out)})
        + temporaries(*copies_in(memory_format, args[1]))
        + _tried(shapes, direction, gpu)
        + temporaries(_workspace(shapes, direction, gpu).num_bytes)
    )


def convolution_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`convolution_backward` of Convolution.cpp: the gradients of input and weight, each with a
    workspace, then of the bias, which is a sum.

    Input and incoming gradient are copied where they have another memory format, until both are
    done; a gradient with gaps for each of the two, and the weight for the input's
    (`cudnn_convolution_backward` of ConvShared.cpp).
    """
    grad, tensor, weight, wanted = args[0], args[1], args[2], args[10]
    shapes, direction = _shapes_of(args, grad, 1), _of_input(args)
    plane = grad.unsqueeze(2) if grad.dim() == 3 else grad  # torch makes two dimensions of one
    memory_format = convolution_format(tensor, weight)
    copies = copies_in(memory_format, tensor) if wanted[1] else ()
    is_copied = wanted[1] and not tensor.is_contiguous(memory_format=memory_format)
    given = memory_format if is_copied else suggest_memory_format(tensor)
    each: tuple[int, ...] = ()
    if args[7] or is_native(shapes):
        copies += copies_in(given, grad)
    elif suggest_memory_format(plane) != given:  # `to(memory_format)`, which leaves what is strided
        copies += (bytes_of(grad),)
    else:
        each = copies_in(memory_format, grad)
    of_input: list[KernelEvent] = []
    of_weight: list[KernelEvent] = []
    if wanted[0]:
        copy = copies_in(memory_format, weight) + each
        num_bytes = _workspace(shapes, direction, gpu).num_bytes
        of_input = outputs({0: bytes_of(tensor)}) + temporaries(*copy)
        of_input += _tried(shapes, direction, gpu) + passing(num_bytes)
        of_input += temporaries(*(-n for n in reversed(copy)))
    if wanted[1]:
        num_bytes = _workspace(shapes, "weight", gpu).num_bytes
        of_weight = temporaries(*each) + outputs({1: bytes_of(weight)})
        of_weight += _tried(shapes, "weight", gpu) + passing(num_bytes)
        of_weight += temporaries(*(-n for n in each))
    # torch's own depthwise kernels begin with the weight: `conv_depthwise2d_backward_cuda_out` of
    # DepthwiseConv2d.cu
    both = of_weight + of_input if is_native(shapes) else of_input + of_weight
    events = temporaries(*copies) + both
    events += temporaries(*(-n for n in reversed(copies)))
    if wanted[2]:
        dims = [0, *range(2, grad.dim())]
        events += outputs({2: bytes_of(out[2])}) + passing(*sum_bytes(grad, dims, grad.dtype, gpu))
    return tuple(events)


CONVOLUTION_EVENTS: dict[OpOverload, EventsFn] = {
    aten.convolution.default: convolution_events,
    aten.convolution_backward.default: convolution_backward_events,
}


def convolution_outputs(func: OpOverload, args: Args, out: Any) -> Any:
    """Outputs of `func` in the memory format that cuDNN gives them; meta gives NCHW."""
    is_forward = func is aten.convolution.default
    tensor, weight = (args[0], args[1]) if is_forward else (args[1], args[2])
    memory_format = convolution_format(tensor, weight)
    if memory_format == torch.contiguous_format:
        return out
    if is_forward:
        return torch.empty_like(out, memory_format=memory_format)
    return (
        *(None if t is None else torch.empty_like(t, memory_format=memory_format) for t in out[:2]),
        out[2],
    )
