"""Temporaries of the CUDA kernels that gather, scatter, sort and select by index.

Shapes: n indices, V rows of the table, D row width.

Where a size depends on the values of the indices, the bound that CUDA itself allocates is given
(embedding), or the exact number read off the output's shape (selection by mask); `masked_scatter`'s
gradient is the one case that takes the worst case, see `masked_scatter_backward_scratch`.

Sources (torch 2.11, `aten/src/ATen/native/cuda`): Embedding.cu, EmbeddingBackwardKernel.cu,
Indexing.cu, IndexKernel.cpp and IndexKernel.cu, Nonzero.cu, Sort.cpp and Sort.cu, ScanKernels.cpp;
and `aten/src/ATen/native/TensorAdvancedIndexing.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.cub import (
    radix_sort_bytes,
    scan_bytes,
    select_bytes,
    unique_by_key_bytes,
)
from memest.estimator.gpus import Gpu
from memest.estimator.reductions import accumulator_bytes_of
from memest.estimator.scratch import Scratch

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

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def contiguous_copy(*tensors: Tensor | None) -> tuple[int, ...]:
    """Bytes of `tensor.contiguous()` for each tensor that is not contiguous."""
    return tuple(t.numel() * t.itemsize for t in tensors if t is not None and not t.is_contiguous())


def embedding_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`embedding`: the indices as one contiguous row, where they are not."""
    return Scratch(before=contiguous_copy(args[1]))


def _adds_atomically(num_indices: int, num_rows: int, width: int, gpu: Gpu) -> bool:
    """`use_fused_kernel`: few rows that are each hit often."""
    warped = -(-width // 32) * 32
    block = min(warped, MAX_BLOCK_SIZE)
    segments = min(num_indices, num_rows)
    grid = -(-segments * warped // block)
    partials = num_indices // ROWS_PER_THREAD + segments
    return grid < gpu.num_sms * ATOMIC_BLOCKS_PER_SM and partials > 4 * grid


def embedding_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`embedding_dense_backward`, which sorts the indices when there are more than 3072.

    With S = min(n, V) segments and P = n // 10 + S partial sums, both bounds that do not depend on
    the values of the indices, the temporaries at the peak are

        before   contiguous copies, sorted and original positions       2 * 8 * n
        after    segment starts, partials per segment and offsets       8 * n + 8 + 2 * 8 * S + 8
                 partial starts and sums                                8 * P + acc * P * D

    or, where few rows are hit often, in place of the sums the segment of each partial (8 * P) and,
    for 16-bit gradients, a float32 gradient (4 * V * D). At other times of the op, which is where
    it peaks if rows are narrow: the sort's storage before the gradient exists.
    Left out: `scale_grad_by_freq` (counts of 8 * n, and scans) and deterministic algorithms.
    """
    grad, indices, num_rows = args[0], args[1], args[2]
    num_indices, width = indices.numel(), grad.shape[-1]
    copies = contiguous_copy(indices, grad)
    if num_indices <= FEW_INDICES:
        return Scratch(before=copies)
    row = num_indices * INDEX_BYTES
    segments = min(num_indices, num_rows)
    partials = num_indices // ROWS_PER_THREAD + segments
    per_segment = segments * INDEX_BYTES
    after: tuple[int, ...] = (
        row,
        INDEX_BYTES,
        per_segment,
        per_segment,
        INDEX_BYTES,
        partials * INDEX_BYTES,
    )
    accumulator = accumulator_bytes_of(grad.dtype)
    if not _adds_atomically(num_indices, num_rows, width, gpu):
        after += (partials * width * accumulator,)
    elif accumulator != grad.itemsize:
        after += (partials * INDEX_BYTES, num_rows * width * accumulator)
    else:
        after += (partials * INDEX_BYTES,)
    sorting: tuple[int, ...] = (row, radix_sort_bytes(num_indices, gpu))
    finding = (row, INDEX_BYTES, row, unique_by_key_bytes(num_indices, gpu))
    gradient = num_rows * width * grad.itemsize
    if sum(sorting) - gradient > max(sum(after), sum(finding)):
        after = (sum(sorting) - gradient,)
    elif sum(finding) > sum(after):
        after = finding
    return Scratch(before=(*copies, row, row), after=after)


def nonzero_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`nonzero`: the count, then the storage of the selection; contiguous input where it is not."""
    return Scratch(
        before=(*contiguous_copy(args[0]), 4), after=(select_bytes(args[0].numel(), gpu),)
    )


def _broadcast(tensors: Sequence[Tensor]) -> list[Tensor]:
    expanded: list[Tensor] = list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
    return expanded


def _copies_of_unlike_strides(indices: Sequence[Tensor]) -> tuple[int, ...]:
    """Contiguous copies that `AdvancedIndex` makes of two or more indices, unless strides agree."""
    expanded = _broadcast(indices)
    if len({i.stride() for i in expanded}) == 1:
        return ()
    return contiguous_copy(*expanded)


def _index_tensors(args: Args) -> list[Tensor]:
    return [index for index in args[1] if index is not None]


def index_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`index.Tensor`: positions of mask entries, and int64 copies of indices of unlike strides.

    A boolean mask becomes one int64 position per dimension and selected element; their number is
    the size of the output. Two or more index tensors are broadcast, and copied where their strides
    then differ (`AdvancedIndex` of TensorAdvancedIndexing.cpp). One index is used in place.
    """
    indices = _index_tensors(args)
    if any(i.dtype in MASK_DTYPES for i in indices):
        if len(indices) > 1 or out is None:
            return Scratch()
        mask = indices[0]
        width = max(1, prod(args[0].shape) // max(1, mask.numel()))
        selected = out.numel() // width
        return Scratch(before=(selected * mask.dim() * INDEX_BYTES,))
    return Scratch(before=_copies_of_unlike_strides(indices))


def index_put_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`index_put` and its variants; with `accumulate` it sorts the linear indices.

    Peak: linear indices, the values where they are not contiguous, sorted indices, original
    positions, their initial range, and the sort's storage over the bits that the number of rows
    needs (`index_put_with_sort_kernel` of Indexing.cu).
    """
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    target, values = args[0], args[2]
    indices = _index_tensors(args)
    if not indices or any(i.dtype in MASK_DTYPES for i in indices):
        return Scratch()
    if not accumulate:
        return Scratch(after=_copies_of_unlike_strides(indices))
    count = _broadcast(indices)[0].numel()
    if count == 0:
        return Scratch()
    slice_size = prod(n for d, n in enumerate(target.shape) if d >= len(args[1]))
    slice_size *= prod(
        n for d, n in enumerate(target.shape) if d < len(args[1]) and args[1][d] is None
    )
    expanded = values.expand(count * slice_size) if values.numel() == 1 else values
    largest = target.numel() // max(1, slice_size)
    row = count * INDEX_BYTES
    sort = radix_sort_bytes(count, gpu, num_bits=max(1, largest.bit_length()))
    return Scratch(after=(row, *contiguous_copy(expanded), row, row, row, sort))


def indexing_is_modelled(func: OpOverload, args: Args) -> bool:
    """Whether no mask is among the indices, or one alone whose count the op's shapes tell.

    `index` by one mask has the count in its output; writing one value through a mask is a
    `masked_fill`. Other masks need the number of their true entries.
    """
    indices = _index_tensors(args)
    if not any(i.dtype in MASK_DTYPES for i in indices):
        return True
    if func is torch.ops.aten.index.Tensor:
        return len(indices) == 1
    return bool(args[2].numel() == 1 and not (len(args) > 3 and args[3]))


def masked_scatter_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`masked_scatter`: int64 running count, contiguous mask and source, scan storage."""
    target, mask, source = args[0], args[1].expand(args[0].shape), args[2]
    count = target.numel()
    copies = contiguous_copy(mask, source)
    return Scratch(after=(count * INDEX_BYTES, *copies, scan_bytes(count)))


def masked_scatter_backward_scratch(
    args: Args, kwargs: Kwargs, out: Any, gpu: Gpu, num_selected: int | None = None
) -> Scratch:
    """`masked_scatter_backward`: positions of the mask's true entries, and padding with zeros.

    Args:
        args: gradient, mask and the sizes of the source.
        kwargs: of the op.
        out: the gradient of the source.
        gpu: the GPU.
        num_selected: true entries of the mask broadcast to the gradient. None assumes that the
            whole source was used, the most that can be: all positions, no padding. For a mask
            without a true entry the positions are gone and the zeros are as large as the output.
    """
    grad, mask = args[0], args[1].expand(args[0].shape)
    size = out.numel()
    selected = size if num_selected is None else num_selected
    positions = selected * mask.dim() * INDEX_BYTES
    if selected >= size:
        searching = (*contiguous_copy(mask), 4, select_bytes(mask.numel(), gpu))
        late = max(0, sum(searching) - size * grad.itemsize)
        return Scratch(before=(max(positions, late),))
    padding = (size - selected) * grad.itemsize
    chosen = (selected * grad.itemsize,) if selected else ()
    return Scratch(before=(*chosen, padding))


def _slices(args: Args, kwargs: Kwargs, position: int) -> tuple[int, int]:
    """Number of slices of the first argument along the op's dimension, and their length."""
    tensor = args[0]
    if tensor.dim() == 0:
        return 1, 1
    dim = args[position] if len(args) > position else kwargs.get("dim", -1)
    length = tensor.shape[dim]
    return tensor.numel() // max(1, length), length


def sort_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`sort`: within a block up to 4096 elements, else radix sort of int64 keys and positions.

    Short slices need an int64 range that fills the indices. One long slice: range and the sort's
    storage. Several, fewer than 128: all are sorted at once by key with (segment, position) as
    value, then by segment; the first sort peaks with three arrays of 8 * n besides its storage.
    Exact where `sort_is_modelled`.
    """
    tensor = args[0]
    count, length = _slices(args, kwargs, 1)
    if length <= 1:
        return Scratch()
    if length <= SMALL_SORT:
        return Scratch(after=(length * INDEX_BYTES,))
    row = tensor.numel() * INDEX_BYTES
    storage = radix_sort_bytes(tensor.numel(), gpu)
    return Scratch(after=(row, storage) if count == 1 else (row, row, row, storage))


def sort_is_modelled(args: Args, kwargs: Kwargs) -> bool:
    """Whether `sort_scratch` is exact: slices of up to 4096, or fewer than 128 slices of int64."""
    count, length = _slices(args, kwargs, 1)
    return length <= SMALL_SORT or (args[0].dtype == torch.int64 and count < FEW_SEGMENTS)


def topk_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`topk` within one block per slice (`sbtopk` of TensorTopK.cu): a contiguous input."""
    return Scratch(after=contiguous_copy(args[0]))


def topk_is_modelled(args: Args, kwargs: Kwargs) -> bool:
    """Whether every slice is searched by one block: the negation of `should_use_multiblock`."""
    count, length = _slices(args, kwargs, 2)
    limits = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    return length < next((shortest for most, shortest in limits if count <= most), 400)


def cumsum_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`cumsum`: a cast of the input, and for a single row the scan over blocks.

    `scan_dim` of ScanUtils.cuh hands only tensors of one row to CUB; floats go through
    `inclusive_deterministic_scan` of ATen/cuda/cub.cuh with one sum for each of up to `num_sms`
    blocks of 512, 256 or 128 threads by 16 values.
    """
    tensor, dtype = args[0], out.dtype
    cast = () if tensor.dtype == dtype else (tensor.numel() * dtype.itemsize,)
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    if tensor.dim() == 0 or tensor.numel() == 0 or tensor.numel() != tensor.shape[dim]:
        return Scratch(after=cast)
    if not dtype.is_floating_point:
        return Scratch(after=(*cast, scan_bytes(tensor.numel())))
    threads = 128 if dtype.itemsize >= 16 else 256 if dtype.itemsize >= 8 else 512
    blocks = min(gpu.num_sms, -(-tensor.numel() // (threads * 16)))
    return Scratch(after=(*cast, blocks * dtype.itemsize))
