"""Sorting, selection by rank, scans, counting and searches.

Sources (torch 2.11, `aten/src/ATen/native`): cuda/Sort.cpp, cuda/Sort.cu, cuda/TensorTopK.cu,
cuda/ScanKernels.cpp, cuda/SummaryOps.cu, TensorCompare.cpp.

Shapes: n elements, in slices along the sorted dimension.
"""

import math

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import cub, registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.reductions import reduce_bytes
from memest.estimator.ops.registry import INDEX_BYTES, KernelCall, op, register
from memest.estimator.ops.strides import contiguous, contiguous_copy
from memest.estimator.ops.temporaries import Events, Scratch, around, outputs, passing
from memest.units import ceil_div

aten = torch.ops.aten
MAX_BLOCK_SIZE = 1024
SMALL_SORT = 4096  # longest slice that one block sorts (`should_use_small_sort`)
FEW_SEGMENTS = 128  # number of slices below which `segmented_sort_pairs_by_full_sort` runs
TOPK_THREADS = 256
TOPK_BLOCKS_PER_SM = 6  # `get_items_per_thread`: 65,536 registers, 256 threads with 40
TOPK_SCAN_BYTES = 1279  # storage of the scan by key over the counts of all blocks


def _slices(tensor: Tensor, dim: int) -> tuple[int, int]:
    """Return (number of slices of `tensor`, elements of a slice). A slice runs along `dim` at fixed
    indices of all other dimensions."""
    if tensor.dim() == 0:
        return 1, 1
    length = tensor.shape[dim]
    return tensor.numel() // max(1, length), length


op(
    "sort sort.stable",
    "up to 4096 elements an int64 range, else a radix sort (Sort.cpp)",
    after=lambda c: sort_bytes(c.self, c.dim, c.gpu),
    when="slices have up to 4096 elements, or elements of 2, 4 or 8 bytes",
    modelled=lambda c: _slices(c.self, c.dim)[1] <= SMALL_SORT or c.self.itemsize > 1,
)


def sort_bytes(tensor: Tensor, dim: int, gpu: Gpu) -> tuple[int, ...]:
    """Return the bytes of each temporary of `sort`.

    Slices of up to 4096 elements along `dim` need an int64 range of positions. Longer slices need:

        1 slice      a range of positions, storage of a radix sort
        2 to 127     two int64 arrays, sorted keys, storage of a radix sort
        128 or more  a range of positions, storage of a segmented sort

    A copy is sorted if slices have gaps. If the results have gaps, both have copies, too.
    From 2 to 127 slices are sorted by key, then by slice. Only the larger first sort counts.
    """
    count, length = _slices(tensor, dim)
    if length <= 1:
        return ()
    if length <= SMALL_SORT:
        return (length * INDEX_BYTES,)
    item, positions = tensor.itemsize, tensor.numel() * INDEX_BYTES
    keys = tensor.numel() * item
    is_dense = aten.is_non_overlapping_and_dense.default(tensor)
    result_strides = tensor.stride() if is_dense else compute_elementwise_output_strides(tensor)
    copies: tuple[int, ...] = () if is_dense else (keys,)
    if result_strides[dim] != 1:
        copies = (keys, keys, positions)
    if count >= FEW_SEGMENTS:
        return (*copies, positions, cub.segmented_sort_bytes(tensor.numel(), item))
    storage = cub.radix_sort_bytes(tensor.numel(), gpu, num_bits=8 * item, key_bytes=item)
    if count == 1:
        return (*copies, positions, storage)
    return (*copies, positions, positions, keys, storage)


@registry.requests(
    "topk",
    when="the results are sorted in place: k of up to 4096 (TensorTopK.cpp)",
    modelled=lambda c: c.k <= SMALL_SORT,
)
def topk(c: KernelCall) -> Events:
    """Allocations of `topk` (TensorTopK.cu): a contiguous input, and counters (`mbtopk`).

    Many blocks search a large slice and share the counters, which are allocated in this order::

        per slice  the k-th value; its bits found so far, and the number still sought (8 B each)
        per block  256 counts of 2 B
        per slice  256 counts of 4 B
        per block  two counts of 4 B, each summed by a scan

    Evidence: exact on an H100 for 1 to 64 slices of 32,000 to a million elements.
    """
    buffers = [*contiguous_copy(c.self)]
    count, length = _slices(c.self, c.dim)
    scans: Events = []
    # many blocks search a slice: `should_use_multiblock`
    limits = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    if length >= next((shortest for max_count, shortest in limits if count <= max_count), 400):
        threads = c.gpu.num_sms * TOPK_BLOCKS_PER_SM * TOPK_THREADS
        items_per_block = min(64, max(4, ceil_div(count * length, threads))) * TOPK_THREADS
        blocks = count * ceil_div(length, items_per_block)
        buffers += [count * c.self.itemsize, count * 8, count * 8]
        buffers += [blocks * 512, count * 1024, blocks * 4, blocks * 4]
        scans = passing(TOPK_SCAN_BYTES) * 2
    return c.outputs() + around(buffers, scans)


def _scan_copies(c: KernelCall) -> tuple[int, ...]:
    """Return the bytes of copies. A result that is not contiguous is copied (`contiguous_out_arg`),
    and an input that is not contiguous or has another dtype."""
    x, dtype = c.self, c.out.dtype
    cast = () if x.dtype == dtype and x.is_contiguous() else (x.numel() * dtype.itemsize,)
    return cast if c.out.is_contiguous() else (c.out.nbytes, *cast)


def _is_single_row(c: KernelCall) -> bool:
    """Return whether a scan along `dim` takes all elements."""
    x: Tensor = c.self
    return x.dim() > 0 and x.numel() == x.shape[c.dim] > 0


@registry.requests("cumprod cumprod_ cumprod.out")
def cumprod(c: KernelCall) -> Scratch:
    """Allocations of `scan_dim` (ScanUtils.cuh): a cast input; for a single row, a scan."""
    copies = _scan_copies(c)
    scan = cub.scan_bytes(c.self.numel(), value_bytes=c.out.itemsize)
    return Scratch(after=(*copies, scan) if _is_single_row(c) else copies)


@registry.requests("cumsum cumsum_ cumsum.out")
def cumsum(c: KernelCall) -> Scratch:
    """Allocations of `cumsum` (ScanKernels.cpp): a cast input; for a single row, a scan.

    Deterministic algorithms run `inclusive_deterministic_scan` of ATen/cuda/cub.cuh for floats: one
    sum for each of up to `num_sms` blocks. A block has 512 threads (256 for elements of 8 bytes,
    128 for 16), and a thread adds 16 values.
    """
    dtype = c.out.dtype
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if not (is_deterministic and dtype.is_floating_point and _is_single_row(c)):
        return cumprod(c)
    threads = {8: 256, 16: 128}.get(dtype.itemsize, 512)
    blocks = min(c.gpu.num_sms, ceil_div(c.self.numel(), threads * 16))
    return Scratch(after=(*_scan_copies(c), blocks * dtype.itemsize))


op(
    "logcumsumexp",
    "a contiguous copy of the input (`scan_dim` of ScanUtils.cuh)",
    after=_scan_copies,
    when="the tensor has several rows: CUB scans a single row",
    modelled=lambda c: not _is_single_row(c),
    layout=contiguous,  # ScanKernels.cpp
)

op(
    "isin.Tensor_Tensor",
    "compared pairs, then `any` (`isin_default_kernel_gpu` of TensorCompare.cpp)",
    after=lambda c: (c.elements.numel() * c.test_elements.numel(), c.elements.numel()),
    when="so few elements are searched that each is compared (`isin` of TensorCompare.cpp)",
    modelled=lambda c: c.test_elements.numel() < int(10 * c.elements.numel() ** 0.145),
)


def _searched_copies(values: Tensor, boundaries: Tensor) -> tuple[int, ...]:
    dtype = torch.result_type(values, boundaries)
    copies = [t for t in (values, boundaries) if t.dtype != dtype or not t.is_contiguous()]
    return tuple(t.numel() * dtype.itemsize for t in copies)


def _is_plain_search(c: KernelCall) -> bool:
    """Return whether no tensor is both copied and cast, and there is no `sorter` to check."""
    first, second = c.args[:2]
    are_plain = first.dtype == second.dtype or (first.is_contiguous() and second.is_contiguous())
    return are_plain and c.get("sorter") is None


_COPIES = "contiguous copies or casts of the values, then of the boundaries (BucketizationUtils.h)"
op("bucketize.Tensor", _COPIES, after=lambda c: _searched_copies(c.self, c.boundaries),
   modelled=_is_plain_search)  # fmt: skip
op("searchsorted.Tensor", _COPIES, after=lambda c: _searched_copies(c.self, c.sorted_sequence),
   modelled=_is_plain_search)  # fmt: skip

UNALIGNED = 255  # bytes with which CUB aligns algorithms without storage


@registry.requests("bincount")
def bincount(c: KernelCall) -> Events:
    """Allocations of `bincount` (cuda/SummaryOps.cu): minimum and maximum, then the bins."""
    extreme = passing(c.self.itemsize, *reduce_bytes(c.self, (), c.gpu))
    return (extreme + extreme if c.self.numel() else []) + c.outputs()


op(
    "histc",
    "none if the bounds are given (SummaryOps.cu)",
    when="the bounds differ, so that none are searched",
    modelled=lambda c: c.min != c.max,
)


@registry.decomposition("median")
def median(values: Tensor) -> Tensor:
    """Run `median_impl` of cuda/Sorting.cpp: the middle of the sorted values; NaN if one is NaN."""
    if not values.numel():
        return values.new_full((), math.nan)
    ordered = values.flatten().sort().values
    return torch.where(ordered[-1].isnan(), ordered[-1], ordered[(len(ordered) - 1) // 2])


@registry.decomposition("nanmedian")
def nanmedian(values: Tensor) -> Tensor:
    """Run `median_impl` of cuda/Sorting.cpp for `nanmedian`: the middle of the sorted values. The
    code in torch counts NaN on the GPU to compute the index of the middle, which the host then
    reads. Here no value is assumed to be NaN, so the number of values gives the index."""
    if not values.numel():
        return values.new_full((), math.nan)
    ordered = values.flatten().sort().values
    _ = (len(ordered) - 1 - ordered.isnan().sum()) / 2
    return ordered[(len(ordered) - 1) // 2]


@registry.decomposition("count_nonzero.dim_IntList")
def count_nonzero(values: Tensor, dims: list[int]) -> Tensor:
    """Count nonzero elements over `dims`, as `count_nonzero_cuda` (TensorAdvancedIndexing.cpp)."""
    return (values if values.dtype is torch.bool else values != 0).sum(dims)


register(
    "_unique2 unique_consecutive unique_dim unique_dim_consecutive bincount",
    shaped_by=lambda args: args,
)


def _is_unique_known(c: KernelCall) -> bool:
    """Return whether allocations were measured for the dtype, on compute capability 9.0. The
    measured dtypes are:

        any operator with a `dim`           all dtypes
        `unique_consecutive` without `dim`  bool, and elements of 1, 2, 4 or 8 bytes
        `_unique2`                          bool, and elements of 4 or 8 bytes

    Without `dim`, a tensor without elements counts on any GPU. Evidence (CUDA 13.0), every request
    exact: 196 calls of up to a million elements on an H100, 504 of up to 100,000 rows on an H200.
    """
    if c.get("dim") is not None:
        return c.gpu.capability == (9, 0)
    sizes = (1, 2, 4, 8) if "dim" in c else (4, 8)
    is_measured = c.self.itemsize in sizes or c.self.dtype is torch.bool
    return is_measured and (c.gpu.capability == (9, 0) or not c.self.numel())


@registry.requests("_unique2", modelled=_is_unique_known)
def unique(c: KernelCall) -> Events:
    """Allocations of `_unique2` (cuda/UniqueCub.cu): sorted values, positions for the inverse. The
    inverse is the index of each value among the unique ones."""
    values: Tensor = c.self
    count, item, row = values.numel(), values.itemsize, values.numel() * INDEX_BYTES
    if not count:
        return []
    if values.dtype is torch.bool:
        results = c.outputs(0) + outputs({2: 2 * INDEX_BYTES})
        total = passing(cub.sum_storage_bytes(count, c.gpu.multiprocessor.threads * c.gpu.num_sms))
        return around((4,), total + results + outputs({1: row if c.return_inverse else 0}))
    buffers: tuple[int, ...] = (values.nbytes,)
    if not c.return_inverse:
        ordering = passing(cub.keys_sort_bytes(count, values.dtype))
    else:
        storage = cub.radix_sort_bytes(count, c.gpu, num_bits=8 * item, key_bytes=item)
        buffers, ordering = (values.nbytes, row), passing(row, storage)
    return around(buffers, ordering + _unique(c, row))


@registry.requests("unique_consecutive", modelled=_is_unique_known)
def unique_consecutive(c: KernelCall) -> Events:
    """Allocations of `unique_consecutive` (cuda/UniqueCub.cu), which does not sort."""
    if c.dim is not None:
        return _unique_rows(c, [])
    return _unique(c, c.self.numel() * 4) if c.self.numel() else []


def _unique(c: KernelCall, positions_bytes: int) -> Events:
    """Return the allocations of `compute_unique`; results have room for all values, as if none were
    equal. For the inverse, a temporary of `positions_bytes` has the positions of all values."""
    count = c.self.numel()
    row = count * INDEX_BYTES
    has_counts = c.out[2].numel() > 0
    events: Events = []
    if c.return_inverse:
        scan = passing(cub.sum_scan_bytes(count, c.gpu))
        events = outputs({1: row}) + around((positions_bytes,), scan)
    storage = (
        cub.run_lengths_bytes(count)
        if has_counts
        else cub.unique_bytes(count, c.gpu, c.self.itemsize)
    )
    counts = outputs({2: row if has_counts else 0})
    values = outputs({0: c.self.nbytes})
    return events + values + around((INDEX_BYTES,), counts + passing(storage))


def _unique_rows(c: KernelCall, sorting: Events) -> Events:
    """Return the allocations of `unique_dim_cuda_template` (cuda/Unique.cu). `sorting` has those of
    its sort of the rows; [] if they are not sorted."""
    num_rows = c.self.size(c.dim)
    row = num_rows * INDEX_BYTES
    events = sorting
    if c.return_inverse:
        scan = passing(UNALIGNED) + passing(cub.long_sum_scan_bytes(num_rows))
        events = events + around((row,), outputs({1: row}) + scan)
    if c.return_counts:
        counts = c.outputs(2) + passing(UNALIGNED)
        storage = passing(cub.thrust_unique_by_key_bytes(num_rows, c.gpu))
        events += around((row + INDEX_BYTES,), storage + counts)
    else:
        events += passing(cub.thrust_unique_bytes(num_rows))
    buffers = (*contiguous_copy(c.self.movedim(c.dim, 0)), row)
    return around(buffers, events + c.outputs(0))


register(
    "unique_dim",
    about="positions of rows, sorted (cuda/Unique.cu)",
    requests=lambda c: _unique_rows(c, passing(cub.keys_merge_sort_bytes(c.self.size(c.dim)))),
    modelled=_is_unique_known,
)
register(
    "unique_dim_consecutive",
    about="positions of rows (cuda/Unique.cu)",
    requests=lambda c: _unique_rows(c, []),
    modelled=_is_unique_known,
)


@registry.above_autograd("cumprod_backward")
def cumprod_backward(
    next_kernel: Next, grad: Tensor, x: Tensor, dim: int, output: Tensor
) -> Tensor:
    """Return the gradient of `cumprod` of `x` with result `output`, as in ReduceOps.cpp for `x`
    without zeros. For complex `x` or a length of 1 in `dim`, `next_kernel` runs."""
    if x.is_complex() or x.dim() == 0 or x.shape[dim] == 1:
        return next_kernel(grad, x, dim, output)
    products, is_zero = output * grad, x == 0
    is_zero.any()  # the host reads it; False is assumed
    return products.flip(dim).cumsum(dim).flip(dim).div(x)
