"""Memory of a convolution of torch: contiguous copies, outputs and cuDNN's workspace.

Sources: `aten/src/ATen/native/Convolution.cpp`, `cudnn/ConvShared.cpp` and `ConvUtils.h` (torch
2.11) for memory formats, copies and which calls go to cuDNN.

cuDNN chooses its kernels by heuristics that are not public, and the kernel decides the workspace.
The installed library runs the heuristics without a GPU (`cudnn_library`); its answers are stored in
the user's cache folder (`Answers`). Without it, `cudnn_rules` estimates the workspace.
"""

import atexit
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import cudnn_library, registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.cudnn_library import CudnnError, Kernels, Library, library
from memest.estimator.ops.cudnn_rules import DTYPES, ConvolutionShapes, workspace_bytes
from memest.estimator.ops.reductions import sum_bytes
from memest.estimator.ops.refusals import same_type, tensor_type
from memest.estimator.ops.registry import KernelCall
from memest.estimator.ops.strides import copies_in
from memest.estimator.ops.temporaries import Events, around, outputs, passing, temporaries, tried
from memest.estimator.tensors.known_values import map_tensors
from memest.estimator.tensors.patches import setting
from memest.estimator.tensors.placement import INSIDE
from memest.estimator.versions import allows_tf32, simulated
from memest.writing import cache_folder, write_whole

MEASURED_CAPABILITY = (9, 0)  # GPU with which the library's answers were compared
ANY_KERNELS = Kernels()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Size of cuDNN's workspace for a convolution's output, input gradient or weight gradient."""

    num_bytes: int
    is_by_library: bool  # the installed cuDNN returned the size; otherwise it is an estimate


def describe_source(gpu: Gpu) -> str:
    """Return a text for reports: how workspaces of convolutions on `gpu` were determined."""
    installed = library()
    if installed is None or not installed.supports(gpu):
        is_known = cudnn_library.device_properties(gpu.chip) is not None
        advice = (
            "cuDNN 9.19 answers for itself after: pip install 'memest-gpu[cudnn]'"
            if is_known
            else f"The properties of {gpu.name} by which cuDNN chooses are not known"
        )
        return (
            "workspaces of convolutions estimated from their shapes: on an H100 69, 73 and 38 % are"
            f" right to 512 B (output, gradients of input and weight). {advice}"
        )
    own_version, release = _version(installed.version), simulated()
    torch_version = _version(release.cudnn_version)
    is_same_minor = own_version.rpartition(".")[0] == torch_version.rpartition(".")[0]
    caveat = "" if is_same_minor else f"; torch {release.name} has {torch_version}"
    if not installed.is_measured(gpu):
        caveat += (
            "; estimates, since answers about Hopper were measured of cuDNN 9.19 only, which"
            f" {cudnn_library.FOLDER} can name"
        )
    return (
        f"workspaces of convolutions by the heuristics of cuDNN {own_version}, which run without a"
        f" GPU; those of 1x1 products by cuBLASLt are estimated{caveat}"
    )


def _version(number: int) -> str:
    """Return `cudnnGetVersion` as text, such as 9.19.0 for 91900."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


@lru_cache(maxsize=4096)
def workspace(
    shapes: ConvolutionShapes, direction: str, gpu: Gpu, kernels: Kernels = ANY_KERNELS
) -> Workspace:
    """Return the workspace of a convolution's output (`direction` "forward") or of the gradient of
    its "input" or "weight". `kernels` restricts the kernels that cuDNN may choose."""
    if (installed := installed_for(gpu)) is not None:

        def first_plan() -> Answer:
            plan = installed.first_plan(shapes, direction, gpu.chip, kernels)
            return () if plan is None else (plan.workspace_bytes, int(plan.is_estimated))

        call = shapes, direction, kernels.are_deterministic, kernels.are_without_tf32
        if answer := answers_of(installed, gpu.chip).find(call, first_plan):
            num_bytes, is_estimated = answer
            return Workspace(num_bytes, not is_estimated and installed.is_measured(gpu))
    return Workspace(workspace_bytes(shapes, direction), is_by_library=False)


def installed_for(gpu: Gpu) -> Library | None:
    """Return the installed cuDNN if it has the device properties of `gpu`, else None."""
    installed = library()
    return installed if installed is not None and installed.supports(gpu) else None


@lru_cache(maxsize=8)
def answers_of(installed: Library, chip: str) -> "Answers":
    """Return the cache of workspace sizes that `installed` has computed for the GPU `chip`."""
    return Answers(installed.fingerprint(chip))


@lru_cache(maxsize=4096)
def tried_bytes(shapes: ConvolutionShapes, direction: str, gpu: Gpu) -> tuple[int, ...]:
    """Return workspace sizes that `cudnn.benchmark` tries at a first call, the largest first.

    `direction` is `forward`, `input` or `weight`. `get_plans_from_find` of Conv_v8.cpp (torch 2.11)
    allocates the largest workspace of all plans that fits the GPU, and times the plans in it. Then
    it frees the workspace and empties the cache. Later calls run the fastest plan, which is assumed
    to be the first one.

    At most two sizes are returned. The second one is tried if the first one does not fit. Without
    an installed cuDNN, only one estimated size is returned.
    """
    installed = installed_for(gpu)
    if installed is None:
        estimate = workspace_bytes(shapes, direction)
        return (estimate,) if estimate else ()

    def largest_two() -> Answer:
        sizes = {p.workspace_bytes for p in installed.all_plans(shapes, direction, gpu.chip)}
        return tuple(sorted(sizes - {0}, reverse=True)[:2])

    return answers_of(installed, gpu.chip).find((shapes, direction, "tried"), largest_two)


MAX_ANSWERS = 20_000  # about 0.7 MB
WRITE_EVERY = 256  # new answers after which the file is written; also when the process ends
Answer = tuple[int, ...]


class Answers:
    """Cache of results of the installed cuDNN, stored in a file of the user's cache folder.

    There is one file for each `fingerprint`: cuDNN, GPU and version of this code. A file holds at
    most `MAX_ANSWERS` results; the oldest are dropped. A file that cannot be read is ignored and
    replaced. Each write replaces the whole file. Not safe for several threads.
    """

    def __init__(self, fingerprint: str) -> None:
        self.path = cache_folder() / f"cudnn-{fingerprint}.json"
        self.stored = self._read()
        self._num_new = 0
        atexit.register(self.write)

    @staticmethod
    def key(shapes: ConvolutionShapes, *settings: object) -> str:
        """Return the cache key of a call with `shapes` and `settings`: a hash of 16 hex digits."""
        return hashlib.blake2b(repr((shapes, settings)).encode(), digest_size=8).hexdigest()

    def find(self, call: tuple[Any, ...], compute: Callable[[], Answer]) -> Answer:
        """Return the result for `call`, the arguments of `key`: the cached one, or that of
        `compute()`. () stands for a convolution for which cuDNN has no plan."""
        key = self.key(*call)
        if key not in self.stored:
            answer: Answer = ()
            with suppress(CudnnError):
                answer = compute()
            self.put(key, answer)
        return self.stored[key]

    def put(self, key: str, answer: Answer) -> None:
        """Cache the result `answer` under `key`; () records that cuDNN has no plan for the call."""
        self.stored[key] = answer
        self._num_new += 1
        if self._num_new >= WRITE_EVERY:
            self.write()

    def write(self) -> None:
        """Add the new results to the file; ignore a folder that cannot be written."""
        if not self._num_new:
            return
        self._num_new = 0
        merged = self._read() | self.stored
        newest = dict(list(merged.items())[-MAX_ANSWERS:])
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(newest))

    def _read(self) -> dict[str, Answer]:
        try:
            answers = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(key): tuple(map(int, answer)) for key, answer in answers.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


aten = torch.ops.aten
OLDEST_WITH_BFLOAT16 = (8, 0)  # cuDNN also has tensor cores for float32 there
NO_ENGINE = "GET was unable to find an engine to execute this computation"
"""`get_plans_from_heuristics` and `run_single_conv` of Conv_v8.cpp: cuDNN has no plan."""


def convolution_format(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    """Return cuDNN's memory format: channels-last if `tensor` or `weight` has it, not for float64.
    `cudnn_conv_suggest_memory_format` of ATen/native/ConvUtils.h."""
    formats = (suggest_memory_format(tensor), suggest_memory_format(weight))
    if tensor.dtype == torch.float64:
        return torch.contiguous_format
    for last in (torch.channels_last, torch.channels_last_3d):
        if last in formats:
            return last
    return torch.contiguous_format


def _shapes_of(c: KernelCall, output: Tensor) -> ConvolutionShapes:
    """Return the shapes of `c` as cuDNN gets them; `output` is the result or its gradient."""
    tensor, weight = c.input, c.weight
    if c.transposed:
        tensor, output = output, tensor
    dims = tensor.dim() - 2

    def per_dimension(values: list[int]) -> tuple[int, ...]:
        return tuple(values) * (dims if len(values) == 1 else 1)

    return ConvolutionShapes(
        tensor=tuple(tensor.shape),
        weight=tuple(weight.shape),
        output=tuple(output.shape),
        stride=per_dimension(c.stride),
        padding=per_dimension(c.padding),
        dilation=per_dimension(c.dilation),
        groups=c.groups,
        dtype=tensor.dtype,
        is_channels_last=convolution_format(c.input, weight) != torch.contiguous_format,
    )


def runs_depthwise_kernel(shapes: ConvolutionShapes) -> bool:
    """Return whether torch, not cuDNN, runs a depthwise kernel for `shapes`: `use_cudnn_depthwise`.

    cuDNN runs depthwise convolutions in channels-last. It also runs those in float16 with 32
    channels or more, square kernels of 1, 3 or 5 pixels, and stride 1, or stride 2 with many
    channels.
    """
    if not shapes.is_depthwise or shapes.is_channels_last:
        return False
    if shapes.dtype != torch.float16 or len(shapes.tensor) != 4:
        return True
    (samples, channels, _, width), (kernel_height, kernel) = shapes.tensor, shapes.window
    if channels < 32 or kernel_height != kernel or kernel not in (1, 3, 5) or width < 7:
        return True
    if shapes.stride not in ((1, 1), (2, 2)):
        return True
    if shapes.stride == (1, 1):
        return False
    if kernel == 1:
        return not (samples <= 16 and channels >= 128 and width <= 7)
    return not (channels >= 512 or (channels >= 256 and width >= 28))


def _copies_weight_first(shapes: ConvolutionShapes, transposed: bool) -> bool:
    """Return whether the weight is copied before the result is allocated, as by torch's own kernel
    for 1-d and 2-d depthwise convolutions (DepthwiseConv2d.cu)."""
    return runs_depthwise_kernel(shapes) and not transposed and len(shapes.tensor) < 5


def _is_without_cudnn(shapes: ConvolutionShapes) -> bool:
    is_empty = 0 in shapes.output or 0 in shapes.tensor
    return runs_depthwise_kernel(shapes) or is_empty


def _is_by_cudnn(shapes: ConvolutionShapes, gpu: Gpu) -> bool:
    """Return whether cuDNN runs a convolution of `shapes` on `gpu`, with a known workspace size.

    Raises:
        RuntimeError: the dtype is bfloat16, and cuDNN has no kernel for it on `gpu`.
    """
    if _is_without_cudnn(shapes):
        return False
    is_recent = gpu.capability >= OLDEST_WITH_BFLOAT16
    if shapes.dtype == torch.bfloat16 and not is_recent:
        raise RuntimeError(NO_ENGINE)
    is_known = shapes.dtype in DTYPES and 1 <= len(shapes.stride) <= 3
    return is_known and (is_recent or installed_for(gpu) is not None)


def _workspace(shapes: ConvolutionShapes, direction: str, gpu: Gpu) -> Workspace:
    """Return cuDNN's workspace of `direction` (forward, input, weight). It has 0 bytes if cuDNN
    does not run `shapes`, or if its size is unknown."""
    if not _is_by_cudnn(shapes, gpu):
        return Workspace(0, is_by_library=_is_without_cudnn(shapes))
    cudnn = torch.backends.cudnn
    kernels = Kernels(
        are_deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        are_without_tf32=shapes.dtype == torch.float32 and not allows_tf32("conv"),
    )
    for calls in _open_records:
        calls.add((shapes, direction, kernels))
    return workspace(shapes, direction, gpu, kernels)


Calls = set[tuple[ConvolutionShapes, str, Kernels | None]]  # with direction and allowed kernels
_open_records: list[Calls] = []  # one for each `recorded_calls` block that runs


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """Yield a set of the block's convolutions by cuDNN, as (shapes, direction, kernels). `kernels`
    is None where `cudnn.benchmark` tries all of them."""
    calls: Calls = set()
    _open_records.append(calls)
    try:
        yield calls
    finally:
        _open_records.remove(calls)


def has_same_workspaces(calls: Calls, gpu: Gpu, other: Gpu) -> bool:
    """Return whether the workspaces of `calls`, from `recorded_calls`, are equal on two GPUs."""

    def workspaces_on(gpu: Gpu) -> list[Workspace | tuple[int, ...]]:
        return [
            tried_bytes(shapes, direction, gpu)
            if kernels is None
            else workspace(shapes, direction, gpu, kernels)
            for shapes, direction, kernels in calls
        ]

    return gpu.chip == other.chip or workspaces_on(gpu) == workspaces_on(other)


def _benchmark_events(shapes: ConvolutionShapes, direction: str, gpu: Gpu) -> Events:
    """Allocations by which `cudnn.benchmark` times plans at a first call; [] if it is off."""
    if not torch.backends.cudnn.benchmark or not _is_by_cudnn(shapes, gpu):
        return []
    for calls in _open_records:
        calls.add((shapes, direction, None))
    return tried(tried_bytes(shapes, direction, gpu))


def _directions(c: KernelCall) -> tuple[str, str]:
    """Return cuDNN's directions of the call's output and input gradient: ("forward", "input"),
    swapped for a transposed convolution."""
    return ("input", "forward") if c.transposed else ("forward", "input")


def _are_known(c: KernelCall, shapes: ConvolutionShapes, *directions: str) -> bool:
    if runs_depthwise_kernel(shapes):
        return True
    if c.gpu.capability != MEASURED_CAPABILITY or torch.backends.cudnn.benchmark:
        return False
    return all(_workspace(shapes, d, c.gpu).is_by_library for d in directions)


def _is_forward_known(c: KernelCall) -> bool:
    out = aten.convolution.default(*map_tensors(lambda t: t.to("meta"), c.args))
    direction, _ = _directions(c)
    return _are_known(c, _shapes_of(c, out), direction)


def _is_backward_known(c: KernelCall) -> bool:
    _, input_direction = _directions(c)
    directions = compress((input_direction, "weight"), c.output_mask)
    return _are_known(c, _shapes_of(c, c.grad_output), *directions)


def convolution_outputs(c: KernelCall) -> Any:
    """Return empty outputs in cuDNN's memory format, which meta kernels of some releases lack."""
    memory_format = convolution_format(c.input, c.weight)
    if isinstance(c.out, Tensor):
        return torch.empty_like(c.out, memory_format=memory_format)
    *outs, bias_gradient = c.out
    outs = [t if t is None else torch.empty_like(t, memory_format=memory_format) for t in outs]
    return *outs, bias_gradient


_KNOWN = (
    "the workspaces are known: of torch's own kernels, and of cuDNN on Hopper, where they were "
    "compared with measured calls without `torch.backends.cudnn.benchmark`"
)


@registry.requests(
    "convolution",
    when=_KNOWN,
    modelled=_is_forward_known,
    layout=convolution_outputs,
    is_convolution=True,
    refuse=same_type(  # native/Convolution.cpp
        0, 1, "Input type ({}) and weight type ({}) should be the same", tensor_type
    ),
)
def convolution(c: KernelCall) -> Events:
    """Allocations of `convolution`: copied input, output, copied weight, workspace.

    Input and weight are copied if their memory format differs from the output's.
    """
    memory_format = convolution_format(c.input, c.weight)
    shapes, result = _shapes_of(c, c.out), c.outputs()
    direction, _ = _directions(c)
    weight_copy = temporaries(*copies_in(memory_format, c.weight))
    is_copy_first = _copies_weight_first(shapes, c.transposed)
    return (
        temporaries(*copies_in(memory_format, c.input))
        + (weight_copy + result if is_copy_first else result + weight_copy)
        + _benchmark_events(shapes, direction, c.gpu)
        + temporaries(_workspace(shapes, direction, c.gpu).num_bytes)
    )


@registry.requests(
    "convolution_backward",
    when=_KNOWN,
    modelled=_is_backward_known,
    layout=convolution_outputs,
    is_convolution=True,
)
def convolution_backward(c: KernelCall) -> Events:
    """Allocations of `convolution_backward`: gradients of input, weight and bias, and workspaces.

    Input and incoming gradient are copied if they have another memory format (Convolution.cpp). The
    copies are freed after both gradients are computed. A copied 1-d input stays until the function
    returns.

    An incoming gradient of the right memory format can still be non-contiguous, such as a slice.
    `cudnn_convolution_backward` of ConvShared.cpp then copies it twice, once for the gradient of
    the input and once for that of the weight. For the input's gradient, it also copies a weight
    that is not contiguous in the memory format.
    """
    grad, tensor, weight = c.grad_output, c.input, c.weight
    needs_input, needs_weight, needs_bias = c.output_mask
    shapes = _shapes_of(c, grad)
    is_1d = grad.dim() == 3
    grad_2d = grad.unsqueeze(2) if is_1d else grad  # torch makes two dimensions of one
    memory_format = convolution_format(tensor, weight)
    input_copy = copies_in(memory_format, tensor) if is_1d or needs_weight else ()
    input_format = memory_format if input_copy and needs_weight else suggest_memory_format(tensor)
    own_copies: tuple[int, ...] = ()  # of `grad`, for each gradient that is computed
    shared_copy: tuple[int, ...] = ()
    if c.transposed or runs_depthwise_kernel(shapes):
        shared_copy = copies_in(input_format, grad)
    elif suggest_memory_format(grad_2d) != input_format:  # `to(memory_format)` keeps other strides
        shared_copy = (grad.nbytes,)
    else:
        own_copies = copies_in(memory_format, grad)

    def kernel_events(direction: str) -> Events:
        buffer = _workspace(shapes, direction, c.gpu)
        return _benchmark_events(shapes, direction, c.gpu) + passing(buffer.num_bytes)

    input_events: Events = []
    weight_events: Events = []
    if needs_input:
        result = outputs({0: tensor.nbytes})
        copies = copies_in(memory_format, weight) + own_copies
        _, direction = _directions(c)
        if _copies_weight_first(shapes, c.transposed):
            input_events = around(copies, result)
        else:
            input_events = result + around(copies, kernel_events(direction))
    if needs_weight:
        weight_events = around(own_copies, outputs({1: weight.nbytes}) + kernel_events("weight"))
    bias_events = _bias_events(grad, c.out[2].nbytes, c.gpu) if needs_bias else []
    outer_copy, inner_copy = (input_copy, ()) if is_1d else ((), input_copy)
    if runs_depthwise_kernel(shapes):  # `conv_depthwise2d_backward_cuda_out` of DepthwiseConv2d.cu
        events = around(shared_copy, around(inner_copy, weight_events) + input_events)
    else:
        events = around(inner_copy + shared_copy, input_events + weight_events)
    return around(outer_copy, events + bias_events)


def _bias_events(grad: Tensor, num_bytes: int, gpu: Gpu) -> Events:
    """Allocations of the bias's gradient, of `num_bytes`: a sum of the output's gradient `grad`. If
    the backward runs under autocast, the sum is float32 and the engine casts the result
    (`validate_outputs` of engine.cpp)."""
    dims = [0, *range(2, grad.dim())]
    is_cast = INSIDE.autocast_block and grad.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if is_cast else grad.dtype
    partial_sums = passing(*sum_bytes(grad, dims, dtype, gpu))
    if not is_cast:
        return outputs({2: num_bytes}) + partial_sums
    float32_bytes = num_bytes // grad.itemsize * 4
    return around((float32_bytes,), partial_sums + outputs({2: num_bytes}))


@registry.above_autograd("_convolution_double_backward", vmap_key=registry.UNDER_VMAP)
def run_double_backward(next_kernel: Next, *args: Any) -> Any:
    """Run a convolution's double backward `next_kernel`, in which weights are made contiguous.

    The double backward consists of several convolutions (`_convolution_double_backward` of
    native/Convolution.cpp). For a GPU tensor (`is_cuda()`), C++ calls `contiguous()` for the weight
    of such a convolution. `run_convolution` does the same. C++ also calls `contiguous()` for the
    input of some of the convolutions. This call is left out. Instead the convolution itself copies
    the input, which is later than in C++.
    """
    with setting(INSIDE, "double_backward", True):
        return next_kernel(*args)


@registry.above_autograd("convolution")
def run_convolution(next_kernel: Next, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """Run the convolution `next_kernel`; make the weight contiguous first in a double backward."""
    return next_kernel(x, weight.contiguous() if INSIDE.double_backward else weight, *options)
