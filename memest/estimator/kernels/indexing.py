"""Temporaries of the CUDA kernels that gather, scatter, sort and select by index.

Shapes: n indices, V rows of the table, D row width.

Where a size depends on the values of the indices, the exact number is read off the output's shape
(selection by mask). Gradients of lookups are in `staged`.

Sources (torch 2.11, `aten/src/ATen/native/cuda`): Embedding.cu, EmbeddingBackwardKernel.cu,
Indexing.cu, IndexKernel.cpp and IndexKernel.cu, Nonzero.cu, Sort.cpp and Sort.cu, ScanKernels.cpp;
and `aten/src/ATen/native/TensorAdvancedIndexing.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.cub import (
    radix_sort_bytes,
    scan_bytes,
    segmented_sort_bytes,
    select_bytes,
)
from memest.estimator.kernels.scratch import Events, Scratch, outputs, passing, temporaries

FEW_INDICES = 3072
"""Up to so many indices `embedding_dense_backward_cuda` adds rows without sorting."""

ROWS_PER_THREAD = 10
"""`NROWS_PER_THREAD`: rows of one partial sum."""

ATOMIC_BLOCKS_PER_SM = 4
"""`MAX_ATOMIC_ACCUM_BLOCKS_PER_SM`: below it the partial sums go straight into the gradient."""

MAX_BLOCK_SIZE = 1024
INDEX_BYTES = 8
MASK_DTYPES = (torch.bool, torch.uint8)
SMALL_SORT = 4096
"""`should_use_small_sort`: slices up to it are sorted within one block."""

FEW_SEGMENTS = 128
"""`segmented_sort_pairs_by_full_sort` is taken for fewer slices."""

TOPK_THREADS = 256
TOPK_BLOCKS_PER_SM = 6
"""`get_items_per_thread`: 65,536 registers for blocks of 256 threads with 40 each."""

TOPK_SCAN_BYTES = 1279
"""Storage of the scan by key over the counts of all blocks."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def contiguous_copy(*tensors: Tensor | None) -> tuple[int, ...]:
    """Bytes of `tensor.contiguous()` for each tensor that is not contiguous."""
    return tuple(t.numel() * t.itemsize for t in tensors if t is not None and not t.is_contiguous())


def embedding_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`embedding` (native/Embedding.cpp): the indices as one row, copied where no view is one;
    `index_select` takes every stride of a vector.
    """
    indices: Tensor = args[1]
    return Scratch(before=() if is_a_row(indices) else (indices.numel() * indices.itemsize,))


def is_a_row(tensor: Tensor) -> bool:
    """Whether `reshape(-1)` is a view: each dimension steps over all of the next."""
    sides = [pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[0] != 1]
    return tensor.numel() == 0 or all(
        outer == size * inner for (_, outer), (size, inner) in pairwise(sides)
    )


def adds_atomically(num_indices: int, num_rows: int, width: int, gpu: Gpu) -> bool:
    """`use_fused_kernel` of the gradient of `embedding`: few rows that are each hit often."""
    warped = -(-width // 32) * 32
    block = min(warped, MAX_BLOCK_SIZE)
    segments = min(num_indices, num_rows)
    grid = -(-segments * warped // block)
    partials = num_indices // ROWS_PER_THREAD + segments
    return grid < gpu.num_sms * ATOMIC_BLOCKS_PER_SM and partials > 4 * grid


def broadcast(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors expanded to their common shape."""
    expanded: list[Tensor] = list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
    return expanded


def _copies_of_unlike_strides(indices: Sequence[Tensor]) -> tuple[int, ...]:
    """Contiguous copies that `AdvancedIndex` makes of two or more indices, unless strides agree."""
    expanded = broadcast(indices)
    if len({i.stride() for i in expanded}) == 1:
        return ()
    return contiguous_copy(*expanded)


def index_tensors(args: Args) -> list[Tensor]:
    """The indices of `index` and `index_put`, without the dimensions that are taken whole."""
    return [index for index in args[1] if index is not None]


def index_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`index.Tensor`: int64 copies of indices of unlike strides.

    Two or more index tensors are broadcast, and copied where their strides then differ
    (`AdvancedIndex` of TensorAdvancedIndexing.cpp). One index is used in place. A mask is a call of
    `nonzero` before.
    """
    return Scratch(before=_copies_of_unlike_strides(index_tensors(args)))


def index_put_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`index_put` that overwrites (TensorAdvancedIndexing.cpp): a number from the host is copied to
    the GPU, then unlike indices; a mask is a `masked_fill`.
    """
    indices = index_tensors(args)
    if not indices or any(i.dtype in MASK_DTYPES for i in indices):
        return Scratch()
    value = args[2]
    number = (value.itemsize,) if value.device.type == "cpu" and not value.dim() else ()
    return Scratch(after=(*number, *_copies_of_unlike_strides(indices)))


def indexing_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether no mask is among the indices, or one through which one number is written.

    That is a `masked_fill`. The true entries of others are not known here, or they would have been
    found before.
    """
    indices = index_tensors(args)
    if not any(i.dtype in MASK_DTYPES for i in indices):
        return True
    return bool(len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3]))


def masked_scatter_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`masked_scatter` of IndexKernel.cu: int64 running count, contiguous mask and source, scan
    storage.
    """
    target, mask, source = args[0], args[1].expand(args[0].shape), args[2]
    count = target.numel()
    copies = contiguous_copy(mask, source)
    return Scratch(after=(count * INDEX_BYTES, *copies, scan_bytes(count)))


def _slices(args: Args, kwargs: Kwargs, position: int) -> tuple[int, int]:
    """Number of slices of the first argument along the op's dimension, and their length."""
    tensor = args[0]
    if tensor.dim() == 0:
        return 1, 1
    dim = args[position] if len(args) > position else kwargs.get("dim", -1)
    length = tensor.shape[dim]
    return tensor.numel() // max(1, length), length


def sort_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`sort` (Sort.cpp): within a block up to 4096 elements, else radix sort of keys and int64
    positions.

    Short slices need an int64 range that fills the indices. One long slice: range and the sort's
    storage. Several, fewer than 128: all are sorted at once by key with (segment, position) as
    value, then by segment; the first sort peaks with two arrays of 8 * n and the sorted keys
    besides its storage. More: a range and the storage of a sort of segments.
    Exact where `sort_is_modelled`.
    """
    tensor = args[0]
    count, length = _slices(args, kwargs, 1)
    if length <= 1:
        return Scratch()
    if length <= SMALL_SORT:
        return Scratch(after=(length * INDEX_BYTES,))
    item, row = tensor.itemsize, tensor.numel() * INDEX_BYTES
    if count >= FEW_SEGMENTS:
        return Scratch(after=(row, segmented_sort_bytes(tensor.numel(), item)))
    storage = radix_sort_bytes(tensor.numel(), gpu, num_bits=8 * item, key_bytes=item)
    sorted_keys = tensor.numel() * item
    return Scratch(after=(row, storage) if count == 1 else (row, row, sorted_keys, storage))


def sort_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether `sort_scratch` is exact: slices of up to 4096, or rows one after the other of which
    elements have 2, 4 or 8 bytes.
    """
    tensor = args[0]
    _, length = _slices(args, kwargs, 1)
    is_last = tensor.dim() == 0 or tensor.shape[-1] == length
    return length <= SMALL_SORT or (tensor.itemsize > 1 and is_last and tensor.is_contiguous())


def topk_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`topk` of TensorTopK.cu: a contiguous input, and where many blocks search a slice (`mbtopk`)
    what they share.

    ::

        per slice  the k-th value, its pattern and how many are sought (8 B each), 256 counts of 4 B
        per block  256 counts of 2 B, then two counts of 4 B, each summed by a scan

    Evidence: exact on an H100 for 1 to 64 slices of 32,000 to a million elements.
    """
    kept = [*contiguous_copy(args[0])]
    count, length = _slices(args, kwargs, 2)
    scans: tuple[int, ...] = ()
    if _topk_takes_many_blocks(count, length):
        threads = gpu.num_sms * TOPK_BLOCKS_PER_SM * TOPK_THREADS
        items = min(64, max(4, -(-count * length // threads))) * TOPK_THREADS
        blocks = count * -(-length // items)
        kept += [count * args[0].itemsize, count * 8, count * 8]
        kept += [blocks * 512, count * 1024, blocks * 4, blocks * 4]
        scans = (TOPK_SCAN_BYTES, -TOPK_SCAN_BYTES) * 2
    return tuple(
        outputs({i: t.numel() * t.itemsize for i, t in enumerate(out)})
        + temporaries(*kept, *scans, *(-n for n in reversed(kept)))
    )


def _topk_takes_many_blocks(count: int, length: int) -> bool:
    """`should_use_multiblock`."""
    limits = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    return length >= next((shortest for most, shortest in limits if count <= most), 400)


def topk_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the results are sorted within a block: k of up to 1024."""
    k: int = args[1] if len(args) > 1 else kwargs["k"]
    return k <= MAX_BLOCK_SIZE


def cumsum_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`cumsum`: a cast of the input, and for a single row the scan over blocks.

    `scan_dim` of ScanUtils.cuh hands only tensors of one row to CUB; floats go through
    `inclusive_deterministic_scan` of ATen/cuda/cub.cuh, where deterministic algorithms are asked
    for, with one sum for each of up to `num_sms` blocks of 512, 256 or 128 threads by 16 values.
    """
    dtype = out.dtype
    if not (dtype.is_floating_point and torch.are_deterministic_algorithms_enabled()):
        return cumprod_scratch(args, kwargs, out, gpu)
    cast, is_row = _scanned(args, kwargs, dtype)
    if not is_row:
        return Scratch(after=cast)
    threads = 128 if dtype.itemsize >= 16 else 256 if dtype.itemsize >= 8 else 512
    blocks = min(gpu.num_sms, -(-args[0].numel() // (threads * 16)))
    return Scratch(after=(*cast, blocks * dtype.itemsize))


def cumprod_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`cumprod`: as `cumsum` where nothing is asked of it (ScanKernels.cpp)."""
    cast, is_row = _scanned(args, kwargs, out.dtype)
    num_bytes = scan_bytes(args[0].numel(), value_bytes=out.itemsize) if is_row else 0
    return Scratch(after=(*cast, num_bytes) if is_row else cast)


def _scanned(args: Args, kwargs: Kwargs, dtype: torch.dtype) -> tuple[tuple[int, ...], bool]:
    """The bytes of what is scanned where it is cast, or copied because it has gaps (`scan_dim`),
    and whether it is a single row.
    """
    tensor = args[0]
    is_as_given = tensor.dtype == dtype and tensor.is_contiguous()
    cast = () if is_as_given else (tensor.numel() * dtype.itemsize,)
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return cast, tensor.dim() > 0 and tensor.numel() == tensor.shape[dim] > 0


def where_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`where_self_out` (native/TensorCompare.cpp): what is of another type than the result is cast,
    and a number of the host is copied.
    """
    condition, *values = args[:3]
    on_card = [tensor for tensor in values if tensor.device.type != "cpu"]
    casts = [t.numel() * out.itemsize for t in on_card if t.dtype != out.dtype]
    copies = [1] * (condition.device.type == "cpu") + [out.itemsize] * (len(values) - len(on_card))
    return Scratch(before=tuple(casts + copies))


def isin_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`isin_default_kernel_gpu` of TensorCompare.cpp: every element beside each that is sought, and
    whether any of them is equal.
    """
    return Scratch(after=(args[0].numel() * args[1].numel(), args[0].numel()))


def isin_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether so few are sought that they are compared one by one; else they are sorted.

    `isin` of TensorCompare.cpp, the number by its own formula.
    """
    return bool(args[1].numel() < int(10 * args[0].numel() ** 0.145))


def renorm_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`embedding_renorm_cuda_` of Embedding.cu: the sorted indices and their positions, those that
    differ, and how many.
    """
    indices = args[1]
    row = indices.numel() * INDEX_BYTES
    copies = contiguous_copy(indices)
    sorting = sort_scratch((indices,), {}, None, gpu).after
    return tuple(
        temporaries(row, row)
        + passing(*copies, *sorting)
        + temporaries(-row)
        + passing(row, INDEX_BYTES, select_bytes(indices.numel(), gpu))
        + temporaries(-row)
    )


def renorm_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether one block finds the indices that differ, as was measured."""
    return bool(args[1].numel() <= SMALL_SORT)
