"""Sorting, selection by rank, scans, counting and searches.

Sources (torch 2.11, `aten/src/ATen/native`): cuda/Sort.cpp, cuda/Sort.cu, cuda/TensorTopK.cu,
cuda/ScanKernels.cpp, cuda/SummaryOps.cu, TensorCompare.cpp.

Shapes: n elements, in slices along the sorted dimension.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.cub import (
    keys_merge_sort_bytes,
    keys_sort_bytes,
    long_sum_scan_bytes,
    radix_sort_bytes,
    run_lengths_bytes,
    scan_bytes,
    segmented_sort_bytes,
    sum_scan_bytes,
    sum_storage_bytes,
    thrust_unique_by_key_bytes,
    thrust_unique_bytes,
    unique_bytes,
)
from memest.estimator.ops.reductions import reduce_bytes
from memest.estimator.ops.registry import Args, Kwargs, argument, register
from memest.estimator.ops.strides import contiguous
from memest.estimator.ops.temporaries import (
    INDEX_BYTES,
    Events,
    KernelEvent,
    Scratch,
    around,
    contiguous_copy,
    outputs,
    passing,
)
from memest.units import ceil_div

aten = torch.ops.aten

MAX_BLOCK_SIZE = 1024

SMALL_SORT = 4096  # longest slice that one block sorts (`should_use_small_sort`)
FEW_SEGMENTS = 128  # number of slices below which `segmented_sort_pairs_by_full_sort` runs
TOPK_THREADS = 256

TOPK_BLOCKS_PER_SM = 6  # `get_items_per_thread`: 65,536 registers, 256 threads with 40
TOPK_SCAN_BYTES = 1279  # storage of the scan by key over the counts of all blocks


def _slices(args: Args, kwargs: Kwargs, position: int) -> tuple[int, int]:
    """Number of slices of the first argument along the op's dimension, and their length."""
    tensor = args[0]
    if tensor.dim() == 0:
        return 1, 1
    dim = argument(args, kwargs, position, "dim", -1)
    length = tensor.shape[dim]
    return tensor.numel() // max(1, length), length


@registry.requests("sort sort.stable")
def sort_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `sort` (Sort.cpp): up to 4096 elements an int64 range, else a radix sort.

    Short slices need an int64 range that fills the indices. One long slice: range and the sort's
    storage. Several, fewer than 128: all are sorted by key with (segment, position) as value, then
    by segment. The first sort peaks with two arrays of 8 * n, sorted keys and storage. More: a
    range and the storage of a sort of segments. A column or another view with gaps is copied first.
    Exact where `sort_is_modelled`.
    """
    tensor = args[0]
    count, length = _slices(args, kwargs, 1)
    if length <= 1:
        return Scratch()
    if length <= SMALL_SORT:
        return Scratch(after=(length * INDEX_BYTES,))
    item, row = tensor.itemsize, tensor.numel() * INDEX_BYTES
    copied = (tensor.numel() * item,) if _has_gaps(tensor) else ()
    if count >= FEW_SEGMENTS:
        return Scratch(after=(*copied, row, segmented_sort_bytes(tensor.numel(), item)))
    storage = radix_sort_bytes(tensor.numel(), gpu, num_bits=8 * item, key_bytes=item)
    sorted_keys = tensor.numel() * item
    kept = (row, storage) if count == 1 else (row, row, sorted_keys, storage)
    return Scratch(after=(*copied, *kept))


def _has_gaps(tensor: Tensor) -> bool:
    """Return whether rows of `tensor` are in order, with gaps between elements or rows."""
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        return False
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return all(step > 0 for step in steps) and steps == sorted(steps, reverse=True)


@registry.modelled("sort sort.stable")
def sort_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether `sort_scratch` is exact: slices of up to 4096, or rows in order.

    Elements of rows have 2, 4 or 8 bytes.
    """
    tensor = args[0]
    _, length = _slices(args, kwargs, 1)
    is_last = tensor.dim() == 0 or tensor.shape[-1] == length
    is_in_order = tensor.is_contiguous() or _has_gaps(tensor)
    return length <= SMALL_SORT or (tensor.itemsize > 1 and is_last and is_in_order)


@registry.requests("topk")
def topk_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `topk` (TensorTopK.cu): a contiguous input, and shared counters if many blocks
    search a slice (`mbtopk`).

    ::

        per slice  the k-th value, its pattern and how many are sought (8 B each), 256 counts of 4 B
        per block  256 counts of 2 B, then two counts of 4 B, each summed by a scan

    Evidence: exact on an H100 for 1 to 64 slices of 32,000 to a million elements.
    """
    kept = [*contiguous_copy(args[0])]
    count, length = _slices(args, kwargs, 2)
    scans: Events = []
    # many blocks search a slice: `should_use_multiblock`
    limits = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    if length >= next((shortest for most, shortest in limits if count <= most), 400):
        threads = gpu.num_sms * TOPK_BLOCKS_PER_SM * TOPK_THREADS
        items = min(64, max(4, ceil_div(count * length, threads))) * TOPK_THREADS
        blocks = count * ceil_div(length, items)
        kept += [count * args[0].itemsize, count * 8, count * 8]
        kept += [blocks * 512, count * 1024, blocks * 4, blocks * 4]
        scans = passing(TOPK_SCAN_BYTES) * 2
    return outputs({i: t.nbytes for i, t in enumerate(out)}) + around(kept, scans)


@registry.modelled("topk")
def topk_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether the results are sorted in place: k of up to 4096 (TensorTopK.cpp)."""
    k: int = argument(args, kwargs, 1, "k")
    return k <= SMALL_SORT


@registry.requests("cumsum")
def cumsum_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `cumsum`: a cast of the input, and for a single row the scan over blocks.

    `scan_dim` of ScanUtils.cuh passes tensors of one row to CUB. Deterministic algorithms take
    `inclusive_deterministic_scan` of ATen/cuda/cub.cuh for floats: one sum for each of up to
    `num_sms` blocks of 512, 256 or 128 threads by 16 values.
    """
    dtype = out.dtype
    if not (dtype.is_floating_point and torch.are_deterministic_algorithms_enabled()):
        return cumprod_scratch(args, kwargs, out, gpu)
    cast, is_row = _scanned(args, kwargs, dtype)
    if not is_row:
        return Scratch(after=cast)
    threads = 128 if dtype.itemsize >= 16 else 256 if dtype.itemsize >= 8 else 512
    blocks = min(gpu.num_sms, ceil_div(args[0].numel(), threads * 16))
    return Scratch(after=(*cast, blocks * dtype.itemsize))


@registry.requests("cumprod")
def cumprod_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `cumprod`: like `cumsum` without deterministic algorithms (ScanKernels.cpp)."""
    cast, is_row = _scanned(args, kwargs, out.dtype)
    num_bytes = scan_bytes(args[0].numel(), value_bytes=out.itemsize) if is_row else 0
    return Scratch(after=(*cast, num_bytes) if is_row else cast)


@registry.requests("logcumsumexp")
def logcumsumexp_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `scan_dim` of ScanUtils.cuh: a contiguous copy of the input."""
    return Scratch(after=_scanned(args, kwargs, out.dtype)[0])


@registry.modelled("logcumsumexp")
def logcumsumexp_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether the tensor has several rows: CUB scans a single row."""
    return not _scanned(args, kwargs, args[0].dtype)[1]


register("logcumsumexp", layout=contiguous)  # ScanKernels.cpp


def _scanned(args: Args, kwargs: Kwargs, dtype: torch.dtype) -> tuple[tuple[int, ...], bool]:
    """Return the bytes of a cast or contiguous copy (`scan_dim`), and whether it is one row."""
    tensor = args[0]
    is_as_given = tensor.dtype == dtype and tensor.is_contiguous()
    cast = () if is_as_given else (tensor.numel() * dtype.itemsize,)
    dim = argument(args, kwargs, 1, "dim", -1)
    return cast, tensor.dim() > 0 and tensor.numel() == tensor.shape[dim] > 0


@registry.requests("isin.Tensor_Tensor")
def isin_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `isin_default_kernel_gpu` (TensorCompare.cpp): compared pairs, `any`."""
    return Scratch(after=(args[0].numel() * args[1].numel(), args[0].numel()))


@registry.modelled("isin.Tensor_Tensor")
def isin_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether so few elements are searched that the kernel compares them one by one.

    The number is that of `isin` in TensorCompare.cpp.
    """
    return bool(args[1].numel() < int(10 * args[0].numel() ** 0.145))


@registry.requests("bucketize.Tensor")
def bucketize_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Contiguous copies or casts of the values, then of the boundaries (BucketizationUtils.h)."""
    dtype = torch.result_type(args[0], args[1])
    copied = [t for t in args[:2] if t.dtype != dtype or not t.is_contiguous()]
    return Scratch(after=tuple(t.numel() * dtype.itemsize for t in copied))


@registry.requests("searchsorted.Tensor")
def searchsorted_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `bucketize` with its arguments in the other order (Bucketization.cu)."""
    return bucketize_scratch((args[1], args[0]), {}, out, gpu)


@registry.modelled("bucketize.Tensor searchsorted.Tensor")
def search_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether no tensor is both copied and cast, and no `sorter` is tested."""
    is_plain = args[0].dtype == args[1].dtype or all(t.is_contiguous() for t in args[:2])
    return is_plain and kwargs.get("sorter") is None


UNALIGNED = 255  # storage of CUB's algorithms that need none, for its alignment
SHARED_BYTES_PER_BLOCK = 48 << 10  # on every GPU; CUDA Programming Guide 13, table 30


@registry.requests("bincount")
def bincount_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `bincount` (cuda/SummaryOps.cu): smallest and largest number, then the bins."""
    numbers, item = args[0], args[0].itemsize
    extreme = passing(item, *reduce_bytes(numbers, (), gpu))
    return (extreme + extreme if numbers.numel() else []) + outputs({0: out.nbytes})


@registry.modelled("bincount")
def bincount_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether the requested bins are few enough to be counted in shared memory."""
    minlength: int = argument(args, kwargs, 2, "minlength", 0)
    return minlength * INDEX_BYTES + 8 < SHARED_BYTES_PER_BLOCK


@registry.requests("histc")
def histogram_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Requests of `histc` (SummaryOps.cu): none if the bounds are given and bins few."""
    return Scratch()


@registry.modelled("histc")
def histogram_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether the bounds differ, so that none are searched, and bins are few."""
    bins, low, high = (
        argument(args, kwargs, i, name, default)
        for i, name, default in ((1, "bins", 100), (2, "min", 0), (3, "max", 0))
    )
    return bool(low != high and bins * INDEX_BYTES < SHARED_BYTES_PER_BLOCK)


@registry.composed("median")
def median(values: Tensor) -> Tensor:
    """Run `median_impl` of cuda/Sorting.cpp: the middle one of the sorted values, or a NaN."""
    if not values.numel():
        return values.new_full((), math.nan)
    ordered = values.flatten().sort().values
    return torch.where(ordered[-1].isnan(), ordered[-1], ordered[(len(ordered) - 1) // 2])


@registry.composed("nanmedian")
def nanmedian(values: Tensor) -> Tensor:
    """Run `median_impl` of cuda/Sorting.cpp: a view of the sorted values, none of which is a NaN.

    On a GPU the host reads the position.
    """
    if not values.numel():
        return values.new_full((), math.nan)
    ordered = values.flatten().sort().values
    _ = (len(ordered) - 1 - ordered.isnan().sum()) / 2
    return ordered[(len(ordered) - 1) // 2]


@registry.composed("count_nonzero.dim_IntList")
def count_nonzero(values: Tensor, dims: list[int]) -> Tensor:
    """Run `count_nonzero_cuda` (TensorAdvancedIndexing.cpp)."""
    return (values if values.dtype is torch.bool else values != 0).sum(dims)


register(
    "_unique2 unique_consecutive unique_dim unique_dim_consecutive bincount",
    shaped_by=lambda args: args,
)


@registry.requests("_unique2")
def unique_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `_unique2` (cuda/UniqueCub.cu): sorted values, and positions for the inverse."""
    values: Tensor = args[0]
    count, num_bytes = values.numel(), values.nbytes
    row = count * INDEX_BYTES
    has_inverse = argument(args, kwargs, 2, "return_inverse", False)
    if values.dtype is torch.bool and count:
        made = [*outputs({0: out[0].nbytes}), KernelEvent(2 * INDEX_BYTES, 2)]
        total = passing(sum_storage_bytes(count, gpu.multiprocessor.threads * gpu.num_sms))
        inverse = outputs({1: row if has_inverse else 0})
        return around((4,), total + made + inverse)
    kept: tuple[int, ...] = (num_bytes,)
    if not has_inverse:
        ordering = passing(keys_sort_bytes(count, values.dtype))
    else:
        item = values.itemsize
        storage = radix_sort_bytes(count, gpu, num_bits=8 * item, key_bytes=item)
        kept, ordering = (num_bytes, row), passing(row, storage)
    return around(kept, ordering + _unique(args, out, gpu, has_inverse, row)) if count else []


@registry.requests("unique_consecutive")
def unique_consecutive_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `unique_consecutive` (cuda/UniqueCub.cu), which sorts nothing."""
    dim = argument(args, kwargs, 3, "dim", None)
    if dim is not None:
        return _unique_rows(args[0], dim, _requested(args, kwargs, 1), out, gpu)
    has_inverse = argument(args, kwargs, 1, "return_inverse", False)
    num_locations = args[0].numel() * 4
    return _unique(args, out, gpu, has_inverse, num_locations) if num_locations else []


def _unique(args: Args, out: Any, gpu: Gpu, has_inverse: bool, location_bytes: int) -> Events:
    """Requests of `compute_unique`, whose results have room for as many values as are given."""
    values: Tensor = args[0]
    count = values.numel()
    row = count * INDEX_BYTES
    has_counts = out[2].numel() > 0
    found = unique_bytes(count, gpu, values.itemsize)
    events = outputs({1: row if has_inverse else 0})
    if has_inverse:
        events += around((location_bytes,), passing(sum_scan_bytes(count, gpu)))
    storage = passing(run_lengths_bytes(count) if has_counts else found)
    counts = outputs({2: row if has_counts else 0})
    return events + outputs({0: values.nbytes}) + around((INDEX_BYTES,), counts + storage)


@registry.requests("unique_dim")
def unique_rows_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `unique_dim`: positions of rows, sorted."""
    sorting = passing(keys_merge_sort_bytes(args[0].size(args[1])))
    return _unique_rows(args[0], args[1], _requested(args, kwargs, 3), out, gpu, sorting)


@registry.requests("unique_dim_consecutive")
def unique_rows_in_order_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """Requests of `unique_dim_consecutive`, which sorts nothing."""
    return _unique_rows(args[0], args[1], _requested(args, kwargs, 2), out, gpu)


def _requested(args: Args, kwargs: Kwargs, at: int) -> tuple[bool, bool]:
    """Return whether the inverse and the counts are requested, by arguments from `at` on."""
    names = ("return_inverse", "return_counts")
    inverse, counts = (argument(args, kwargs, at + i, n, False) for i, n in enumerate(names))
    return inverse, counts


def _unique_rows(
    values: Tensor,
    dim: int,
    requested: tuple[bool, bool],
    out: Any,
    gpu: Gpu,
    sorting: Sequence[KernelEvent] = (),
) -> Events:
    """Requests of `unique_dim_cuda_template` (cuda/Unique.cu)."""
    num_rows = values.size(dim)
    row = num_rows * INDEX_BYTES
    events = [*sorting]
    if requested[0]:
        found = passing(UNALIGNED) + passing(long_sum_scan_bytes(num_rows))
        events += around((row,), outputs({1: row}) + found)
    if requested[1]:
        counts = outputs({2: out[2].nbytes}) + passing(UNALIGNED)
        storage = passing(thrust_unique_by_key_bytes(num_rows, gpu))
        events += around((row + INDEX_BYTES,), storage + counts)
    else:
        events += passing(thrust_unique_bytes(num_rows))
    kept = (*contiguous_copy(values.movedim(dim, 0)), row)
    return around(kept, events + outputs({0: out[0].nbytes}))


@registry.modelled("unique_dim unique_dim_consecutive")
def unique_rows_are_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether the GPU is of compute capability 9.0, as the measured H200.

    Evidence: 504 calls of up to 100,000 rows; every request is exact.
    """
    return gpu.capability == (9, 0)


@registry.modelled("_unique2 unique_consecutive")
def unique_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Return whether the sizes were measured: 4 and 8 bytes or bool, compute capability 9.0.

    Evidence: 196 calls on an H100 (CUDA 13.0), up to a million elements; every request is exact.
    """
    is_consecutive = func is aten.unique_consecutive.default
    if is_consecutive and argument(args, kwargs, 3, "dim", None) is not None:
        return unique_rows_are_modelled(func, args, kwargs, gpu)
    sizes = (1, 2, 4, 8) if is_consecutive else (4, 8)
    is_measured = args[0].itemsize in sizes or args[0].dtype is torch.bool
    return is_measured and (gpu.capability == (9, 0) or not args[0].numel())


@registry.above_autograd("cumprod_backward")
def cumprod_backward(then: Next, grad: Tensor, x: Tensor, dim: int, output: Tensor) -> Tensor:
    """Compute the gradient as `cumprod_backward` of ReduceOps.cpp, where no input is zero."""
    if x.is_complex() or x.dim() == 0 or x.shape[dim] == 1:
        return then(grad, x, dim, output)
    products, is_zero = output * grad, x == 0
    is_zero.any()  # the host reads it; False is assumed
    return products.flip(dim).cumsum(dim).flip(dim).div(x)
