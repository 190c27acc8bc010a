"""Reductions: their staging buffers, as a pure function of shape and strides.

A reduction with few outputs is split over thread blocks. Each block writes its partial result to a
staging buffer, and a counter per output block (a semaphore) lets the last block combine them. For
the bias gradient of a wide layer the buffer is tens of MiB.

Mirrors `setReduceConfig`, `ReduceConfig` and `gpu_reduce_kernel` of
`aten/src/ATen/native/cuda/Reduce.cuh` (read in torch 2.13) and the dimension ordering, coalescing
and 32-bit splitting of `aten/src/ATen/TensorIterator.cpp`. Evidence: exact on all 3,470 reductions
recorded on an H200 with torch 2.11; none needs 64-bit indices. `prod`'s gradient:
torch/csrc/autograd/FunctionsManual.cpp (`prod_backward`). Left out: complex dtypes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.copies import is_set_to
from memest.estimator.ops.in_place import in_nodes
from memest.estimator.ops.registry import KernelCall, op, register
from memest.estimator.ops.strides import contiguous_copy
from memest.estimator.ops.temporaries import Events, Scratch, around, passing
from memest.units import ceil_div, last_power_of_2

aten = torch.ops.aten
MAX_REDUCE_THREADS = 512  # `mnt_wrapper<T>::MAX_NUM_THREADS`, except for complex double
MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD = 16, 256
WARP_SIZE = 32
VECTOR_SIZE = 4  # `vt0` of `gpu_reduce_kernel`, and the widest output vector
VECTORIZE_FROM = 128  # inputs per output from which on a contiguous reduction loads vectors
INT32_MAX = 2**31 - 1
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Shape and strides (in bytes) of a reduction, with its dimensions in TensorIterator's order.
    Reduced dimensions, whose output stride is 0, come first, in ascending order of input strides.
    The other dimensions follow, in ascending order of output strides."""

    shape: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_strides: tuple[int, ...]
    input_bytes: int  # bytes of an element
    accumulator_bytes: int
    input_vector: int  # inputs that a thread loads at once
    offset: int  # first element of the input in its storage

    @property
    def num_reduced(self) -> int:
        """Number of reduced dimensions: `TensorIterator::num_reduce_dims`."""
        return sum(stride == 0 for stride in self.output_strides)

    @property
    def num_outputs(self) -> int:
        """Number of elements of the output: `TensorIterator::num_output_elements`."""
        return prod(n for n, stride in zip(self.shape, self.output_strides, strict=True) if stride)

    @property
    def fits_32_bits(self) -> bool:
        """True if 32-bit indices are enough: `TensorIterator::can_use_32bit_indexing`."""
        spans = (
            1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))
            for strides in (self.input_strides, self.output_strides)
        )
        return prod(self.shape) <= INT32_MAX and all(span <= INT32_MAX for span in spans)

    def pieces(self) -> "list[Reduction]":
        """Return parts that 32-bit indices can address, as `with_32bit_indexing` does. A part that
        is too large is halved along its longest dimension."""
        if self.fits_32_bits:
            return [self]
        extents = [
            (n - 1) * max(abs(i), abs(o))
            for n, i, o in zip(self.shape, self.input_strides, self.output_strides, strict=True)
        ]
        dim = max(range(len(extents)), key=lambda d: (extents[d], d))
        half = self.shape[dim] // 2
        shapes = (
            (*self.shape[:dim], n, *self.shape[dim + 1 :]) for n in (half, self.shape[dim] - half)
        )
        return [piece for shape in shapes for piece in replace(self, shape=shape).pieces()]


def _should_swap(first: tuple[int, int, int], second: tuple[int, int, int]) -> int:
    """Compare two dimensions (size, input stride, output stride) as `should_swap`: 1 to swap them,
    -1 to keep their order, 0 if undecided."""
    size_a, in_a, out_a = first
    size_b, in_b, out_b = second
    if (out_a == 0) != (out_b == 0):
        return 1 if out_b == 0 else -1
    for stride_a, stride_b in ((out_a, out_b), (in_a, in_b)):
        if stride_a and stride_b and stride_a != stride_b:
            return 1 if stride_a > stride_b else -1
        if stride_a and stride_b and size_a > size_b:
            return 1
    return 0


def _reorder_dimensions(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sort dimensions (size, input stride, output stride) as `TensorIterator::reorder_dimensions`.
    The insertion sort begins with the last dimension."""
    dims = dims[::-1]
    for start in range(1, len(dims)):
        moving = start
        for other in range(start - 1, -1, -1):
            order = _should_swap(dims[other], dims[moving])
            if order > 0:
                dims[other], dims[moving] = dims[moving], dims[other]
                moving = other
            elif order < 0:
                break
    return dims


def _coalesce_dimensions(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbouring dimensions (size, input stride, output stride) if one stride fits both."""
    merged = dims[:1]
    for size, in_stride, out_stride in dims[1:]:
        last_size, last_in, last_out = merged[-1]
        is_run = last_size * last_in == in_stride and last_size * last_out == out_stride
        if not (last_size == 1 or size == 1 or is_run):
            merged.append((size, in_stride, out_stride))
        elif last_size == 1:
            merged[-1] = (size, in_stride, out_stride)
        else:
            merged[-1] = (last_size * size, last_in, last_out)
    return merged


def _sorted_and_merged(
    tensor: Tensor, dims: Sequence[int], input_bytes: int, output_bytes: int
) -> list[tuple[int, ...]]:
    """Return [sizes, input strides, output strides] of a reduction over `dims` (all if empty), with
    dimensions sorted and merged. Strides are in bytes; an element has `input_bytes` in `tensor` and
    `output_bytes` in the contiguous output."""
    if not tensor.dim():
        return [(), (), ()]
    reduced = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    output_shape = [1 if dim in reduced else n for dim, n in enumerate(tensor.shape)]
    output_strides: Any = make_contiguous_strides_for(output_shape)
    rows = []
    for dim, size in enumerate(tensor.shape):
        output_stride = 0 if dim in reduced else output_strides[dim] * output_bytes
        rows.append((size, tensor.stride(dim) * input_bytes, output_stride))
    return [*zip(*_coalesce_dimensions(_reorder_dimensions(rows)), strict=True)]


def _block(dim0: int, dim1: int, vector: int) -> tuple[int, int]:
    """Return (width, height) of a block of threads, as `set_block_dimension`. The width is along
    the fastest dimension, which has `dim0` elements. The height is along the next dimension, which
    has `dim1` elements. A thread computes `vector` outputs."""
    limit = MAX_REDUCE_THREADS // vector
    pow0, pow1 = min(limit, last_power_of_2(dim0)), min(limit, last_power_of_2(dim1))
    height = min(pow1, limit // min(pow0, WARP_SIZE))
    return min(pow0, limit // height), height


def staging_bytes(r: Reduction, gpu: Gpu) -> tuple[int, ...]:
    """Return (bytes of the buffer of partial results, bytes of semaphores) of reduction `r`; () if
    one block of threads reduces each output.

    C thread blocks share an output, and G groups of C blocks compute all outputs. A block is W
    threads wide, and a thread computes V outputs. A partial result takes `accumulator_bytes`:

        staging = accumulator_bytes * num_outputs * C          if a reduced dimension is the fastest
        staging = accumulator_bytes * num_outputs * C * W * V  otherwise
        semaphores = 4 * G

    C > 1 only where threads would add 256 values or more and the outputs do not fill the GPU.
    """
    num_outputs = r.num_outputs
    num_inputs = prod(r.shape) // max(1, num_outputs)
    # dimension number `reduced`, if there is one, is the fastest that is not reduced
    reduced, ndim = r.num_reduced, len(r.shape)
    along_row = reduced == ndim or r.input_strides[0] < r.input_strides[reduced]
    dim0, dim1 = (num_inputs, num_outputs) if along_row else (num_outputs, num_inputs)
    stride = r.input_strides[0 if along_row else reduced] if ndim else r.input_bytes
    vector = 1
    if stride == r.input_bytes and along_row and dim0 >= VECTORIZE_FROM and reduced == 1:
        dim0 //= r.input_vector
    elif stride == r.input_bytes and not along_row:
        strides = (s // r.input_bytes for d, s in enumerate(r.input_strides) if d != reduced)
        # `get_output_vec_size`
        vector = gcd(VECTOR_SIZE, r.offset, r.shape[reduced], *strides)
        dim0 //= vector
    width, height = _block(dim0, dim1, vector)
    step_input, step_output = (width, 1) if along_row else (1, width)
    if ceil_div(num_inputs, step_input) < min(height * 16, MAX_VALUES_PER_THREAD):
        return ()
    values_per_thread = ceil_div(num_inputs, step_input * height)
    num_groups = ceil_div(num_outputs // vector, step_output)
    max_blocks = gpu.num_sms * (gpu.multiprocessor.threads // (width * height))
    if values_per_thread < MAX_VALUES_PER_THREAD or num_groups > max_blocks:
        return ()
    blocks_per_group = max(
        min(ceil_div(max_blocks, num_groups), ceil_div(values_per_thread, MIN_VALUES_PER_THREAD)),
        ceil_div(values_per_thread, MAX_VALUES_PER_THREAD),
    )
    if blocks_per_group <= 1:
        return ()
    partial_sums = num_outputs * blocks_per_group * (1 if along_row else width * vector)
    return r.accumulator_bytes * partial_sums, 4 * num_groups


def reduce_bytes(
    tensor: Tensor, dims: Sequence[int], gpu: Gpu, *, dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None, accumulator_bytes: int | None = None,
    input_vector: int = VECTOR_SIZE,
) -> tuple[int, ...]:  # fmt: skip
    """Return the bytes of each temporary of `gpu_reduce_kernel` over `dims` (all if empty).

    The kernel reads `tensor` as `dtype` and writes `out_dtype`. By default, `dtype` is that of
    `tensor`, `out_dtype` is `dtype`, and `accumulator_bytes` is the size of `dtype`. A thread loads
    `input_vector` values at once. Inputs that need 64-bit indices run in pieces, of which the
    largest counts. If there are several pieces, 16-bit outputs also have a buffer of running sums.
    """
    if tensor.numel() == 0:
        return ()
    dtype = dtype or tensor.dtype
    out_dtype = out_dtype or dtype
    accumulator_bytes = accumulator_bytes or dtype.itemsize
    shape, in_strides, out_strides = _sorted_and_merged(
        tensor, dims, dtype.itemsize, out_dtype.itemsize
    )
    reduction = Reduction(
        shape, in_strides, out_strides, dtype.itemsize, accumulator_bytes, input_vector,
        int(tensor.storage_offset()),
    )  # fmt: skip
    pieces = reduction.pieces()
    running: tuple[int, ...] = ()
    if len(pieces) > 1 and dtype in HALVES and out_dtype == dtype:
        spans = (n * s for n, s in zip(reduction.shape, reduction.output_strides, strict=True))
        running = (max(out_dtype.itemsize, *spans) // out_dtype.itemsize * accumulator_bytes,)
    stagings = (staging_bytes(piece, gpu) for piece in pieces)
    return running + max(stagings, key=sum, default=())


def accumulator_bytes_of(dtype: torch.dtype) -> int:
    """Return the item size in which CUDA adds `dtype`: 4 for the 16-bit floats, else its own."""
    return 4 if dtype in HALVES else dtype.itemsize


def _dims_of(c: KernelCall) -> tuple[int, ...]:
    dims = c.get("dim")
    if dims is None:
        return ()
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _dtype_of(c: KernelCall) -> torch.dtype:
    first: Tensor = c.out[0] if isinstance(c.out, list | tuple) else c.out
    return first.dtype


def sum_bytes(
    tensor: Tensor, dims: Sequence[int], out_dtype: torch.dtype, gpu: Gpu, *, half_vector: int = 8
) -> tuple[int, ...]:
    """Return the bytes of each temporary of `sum` or `mean` over `dims` (all if empty): cast,
    staging. Equal dtypes need no cast, nor do 16-bit floats with result float32 (ReduceOps.cpp). A
    thread loads `half_vector` 16-bit values at once: 8 in `sum_functor`, `mean_kernel_impl`."""
    is_widened_half = tensor.dtype in HALVES and out_dtype == torch.float32
    is_cast = tensor.dtype != out_dtype and not is_widened_half
    dtype = out_dtype if is_cast else tensor.dtype
    cast = (tensor.numel() * dtype.itemsize,) if is_cast else ()
    vector = half_vector if dtype.itemsize == 2 else VECTOR_SIZE
    return cast + reduce_bytes(
        tensor, dims, gpu, dtype=dtype, out_dtype=out_dtype,
        accumulator_bytes=accumulator_bytes_of(dtype), input_vector=vector,
    )  # fmt: skip


op(
    "sum mean sum.dim_IntList sum.IntList_out nansum mean.dim mean.out",
    "staging of `sum` or `mean` over every dimension, or over some (cuda/Reduce.cuh)",
    after=lambda c: sum_bytes(c.self, _dims_of(c), _dtype_of(c), c.gpu),
)
op(
    "prod prod.dim_int",
    "staging of `prod`, whose kernel loads 4 values of any dtype (`prod_functor`; cuda/Reduce.cuh)",
    after=lambda c: sum_bytes(c.self, _dims_of(c), _dtype_of(c), c.gpu, half_vector=VECTOR_SIZE),
)


def _reduced(c: KernelCall, accumulator: int, vector: int = VECTOR_SIZE) -> tuple[int, ...]:
    return reduce_bytes(
        c.self, _dims_of(c), c.gpu, out_dtype=_dtype_of(c), accumulator_bytes=accumulator,
        input_vector=vector,
    )  # fmt: skip


_STAGING = "staging of a reduction whose kernel loads the dtype of its input (cuda/Reduce.cuh)"
op(
    "amax amin max min any any.dim any.dims all all.dim all.dims _is_all_true _is_any_true",
    _STAGING,
    after=lambda c: _reduced(c, c.self.itemsize),
)
# a value and an int64 index
op("max.dim min.dim argmax argmin", _STAGING, after=lambda c: _reduced(c, 16))
op(  # ReduceNormKernel.cu adds in float32 or wider
    "linalg_vector_norm linalg_vector_norm.out norm.ScalarOpt_dim",
    _STAGING,
    after=lambda c: _reduced(c, accumulator_bytes_of(c.self.dtype)),
)
op(  # `WelfordData` of ReduceMomentKernel.cu, which loads 2 values at once
    "std.correction var.correction var_mean.correction std_mean.correction",
    _STAGING,
    after=lambda c: _reduced(c, 32 if c.self.dtype == torch.float64 else 16, 2),
)


@registry.requests(
    "renorm",
    when="the norms have the type of the result",
    modelled=lambda c: c.self.dtype in (torch.float32, torch.float64),
)
def renorm(c: KernelCall) -> Events:
    """Allocations of `renorm_out` (Normalization.cpp): the result, then the norms of its slices."""
    tensor, kept_dim = c.self, c.dim % c.self.dim()
    dims = [dim for dim in range(tensor.dim()) if dim != kept_dim]
    accumulator = accumulator_bytes_of(tensor.dtype)
    staging = reduce_bytes(tensor, dims, c.gpu, accumulator_bytes=accumulator)
    return c.outputs() + around((tensor.shape[kept_dim] * tensor.itemsize,), passing(*staging))


op(
    "_cdist_forward",
    "contiguous copies of points that have another batch (`cdist_impl` of Distance.cpp)",
    before=lambda c: _batched_copies((c.x1, c.x2)),
)


@registry.requests("_cdist_backward")
def cdist_backward(c: KernelCall) -> Events:
    """Allocations of `_cdist_backward` (Distance.cpp): copies, result, all differences. A pair of
    points has a row of differences (DistanceKernel.cu). They are summed over the points of `x2`."""
    x1, x2, copies = c.x1, c.x2, _batched_copies((c.x1, c.x2))
    if c.p == 0:
        return around(copies, c.outputs())
    batch = c.out.numel() // (x1.shape[-2] * x1.shape[-1])
    differences = x1.new_empty((batch, x2.shape[-2], x1.shape[-2], x1.shape[-1]))
    return around(copies, c.outputs() + _summed(differences, 1, c.gpu))


op(
    "_pdist_backward",
    "all differences, their sum (`pdist_backward_kernel_impl` of DistanceKernel.cu)",
    then=lambda c: (
        _summed(c.self.new_empty((max(0, len(c.self) - 1), *c.self.shape)), 0, c.gpu) if c.p else []
    ),
)


def _batched_copies(points: Sequence[Tensor]) -> tuple[int, ...]:
    batch: torch.Size = torch.broadcast_shapes(*(t.shape[:-2] for t in points))  # type: ignore[no-untyped-call]
    expanded = [tensor.expand(*batch, *tensor.shape[-2:]) for tensor in points]
    return contiguous_copy(*expanded)


def _summed(tensor: Tensor, dim: int, gpu: Gpu) -> Events:
    """Return events that allocate a temporary like `tensor`, and what its sum over `dim` needs."""
    return around((tensor.nbytes,), passing(*sum_bytes(tensor, (dim,), tensor.dtype, gpu)))


@registry.requests("logsumexp")
def logsumexp(c: KernelCall) -> Events:
    """Allocations of `logsumexp_out_impl` (ReduceOps.cpp): maxima, mask, exps, sum, result."""
    dtype, dims, maxima = c.out.dtype, _dims_of(c), c.out.nbytes
    largest = reduce_bytes(c.self, dims, c.gpu, out_dtype=dtype, accumulator_bytes=dtype.itemsize)
    exps = torch.empty(c.self.shape, dtype=dtype, device="meta")
    sum_events = c.outputs() + passing(*sum_bytes(exps, dims, dtype, c.gpu))
    max_events = passing(*largest) + passing(maxima, c.out.numel())
    return around((maxima,), max_events + around((exps.nbytes,), sum_events))


@registry.decomposition("trace")
def trace(matrix: Tensor) -> Tensor:
    """Run `trace_cuda` (cuda/TriangularOps.cu): the sum of the diagonal."""
    return matrix.diagonal().sum()


@registry.requests("equal")
def equal(c: KernelCall) -> Scratch:
    """Allocations of `cuda_equal`: the elementwise comparison, its `all`, staging of `all`. There
    are none for different shapes, or for two views of the same elements (cuda/Equal.cpp)."""
    first, second = c.self, c.other
    if first.shape != second.shape or not first.numel() or is_set_to(first, second):
        return Scratch()
    comparison = torch.empty(first.shape, dtype=torch.bool, device="meta")
    return Scratch(after=(comparison.numel(), 1, *reduce_bytes(comparison, (), c.gpu)))


register(
    "logical_and",
    in_backward=in_nodes("MaxBackward1 MinBackward1 MedianBackward0 NanmedianBackward0"),
)


class _Product(torch.autograd.Function):
    """Autograd node of `prod`. Its forward calls the function `run`, which returns the product. Its
    backward assumes that no element is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], Tensor], dim: int | None) -> Tensor:
        out = run()
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out = ctx.saved_tensors
        x = x.to(grad.dtype)
        # `prod_backward` searches for zeros on the GPU; here the results are not used
        if ctx.dim is None:
            torch.eq(x, 0)  # `nonzero` of it, a few KiB, is left out
        elif x.dim():
            if grad.dim() < x.dim():
                grad, out = grad.unsqueeze(ctx.dim), out.unsqueeze(ctx.dim)
            is_zero = torch.eq(x, 0)
            counts = is_zero.sum(ctx.dim, keepdim=True)
            counts.sum()
        return grad * (out / x).conj(), None, None


def has_gradient(tensor: Tensor) -> bool:
    """Return whether autograd records operations on `tensor`."""
    return tensor.requires_grad and torch.is_grad_enabled()


@registry.above_autograd("prod prod.dim_int")
def product(next_kernel: Next, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run `prod`. If there is a gradient, `_Product` computes it and assumes that no element is 0
    (FunctionsManual.cpp). Without a gradient or under `torch.func`, run torch's `next_kernel`."""
    if not has_gradient(x) or torch._C._are_functorch_transforms_active():
        return next_kernel(x, *args, **kwargs)

    def run() -> Tensor:
        return next_kernel.below_autograd(x, *args, **kwargs)

    dim = args[0] if args else None
    return _Product.apply(x, run, dim)  # type: ignore[no-untyped-call]
