"""Kernels whose temporaries come and go: what they allocate and free, in order.

A table of temporaries that all live until the op ends (`kernels.SCRATCH`) places them right for
most kernels. These work in stages, or make their results in another order than they return them,
and the caching allocator packs what it is asked for in the order of asking.

Sources (torch 2.11, `aten/src/ATen/native`): cuda/Dropout.cu, cuda/Embedding.cu and
EmbeddingBackwardKernel.cu, cuda/Indexing.cu, cuda/Nonzero.cu, TensorAdvancedIndexing.cpp,
Convolution.cpp and cudnn/ConvShared.cpp. Evidence: event by event on an H200, but for the
workspaces that `kernels.is_partly_modelled` names.

Shapes: n indices, V rows of the table, D row width.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.batch_norm import native_batch_norm_backward_events
from memest.estimator.kernels.convolution import CONVOLUTION_EVENTS
from memest.estimator.kernels.cub import (
    radix_sort_bytes,
    scan_bytes,
    select_bytes,
    sum_storage_bytes,
    unique_by_key_bytes,
)
from memest.estimator.kernels.draws import DRAW_EVENTS
from memest.estimator.kernels.fft import FFT_EVENTS, fft_is_modelled
from memest.estimator.kernels.indexing import (
    FEW_INDICES,
    INDEX_BYTES,
    MASK_DTYPES,
    ROWS_PER_THREAD,
    adds_atomically,
    broadcast,
    contiguous_copy,
    index_tensors,
    renorm_events,
    topk_events,
)
from memest.estimator.kernels.layer_norm import LAYER_NORM_EVENTS
from memest.estimator.kernels.linalg import LINALG_EVENTS, linalg_is_modelled
from memest.estimator.kernels.losses import LOSS_EVENTS
from memest.estimator.kernels.reductions import (
    accumulator_bytes_of,
    extreme_scratch,
    logsumexp_events,
    threads_per_sm,
)
from memest.estimator.kernels.scratch import (
    Events,
    EventsFn,
    KernelEvent,
    bytes_of,
    outputs,
    passing,
    temporaries,
)
from memest.estimator.kernels.windows import WINDOW_EVENTS

aten = torch.ops.aten

_MAXIMUM = 2
"""`EmbeddingBagMode::MAX`."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def dropout_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`native_dropout` of Dropout.cu: the mask comes before the result, unless all or nothing is
    dropped.
    """
    result, mask = out
    sizes = {0: bytes_of(result), 1: bytes_of(mask)}
    is_drawn = args[2] is not False and 0 < args[1] < 1
    return tuple(outputs({i: sizes[i] for i in ((1, 0) if is_drawn else (0, 1))}))


def embedding_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`embedding_dense_backward` (Embedding.cu, EmbeddingBackwardKernel.cu), which sorts the
    indices when there are more than 3072.

    With S = min(n, V) segments and P = n // 10 + S partial sums, both bounds that do not depend on
    the values of the indices:

        sort      sorted and original positions, kept        2 * 8 * n
                  a range and the sort's storage             8 * n + storage
        gradient  V * D
        segments  their starts, kept, and number             8 * n + 8
                  unused keys and the storage of `unique`    8 * n + storage
        partials  per segment, and their offsets             2 * 8 * S, and the storage of a scan
                  their number, their starts                 8 + 8 * P
                  the sums in the accumulator's dtype        acc * P * D

    Where few rows are hit often, in place of the sums the segment of each partial (8 * P) and, for
    16-bit gradients, a float32 gradient (4 * V * D). Left out: `scale_grad_by_freq` (counts of 8 *
    n, and scans) and deterministic algorithms.
    """
    grad, indices, num_rows = args[0], args[1], args[2]
    num_indices, width = indices.numel(), grad.shape[-1]
    copies = contiguous_copy(indices, grad)
    gradient = outputs({0: num_rows * width * grad.itemsize})
    if num_indices <= FEW_INDICES:
        return tuple(temporaries(*copies) + gradient + temporaries(*(-n for n in reversed(copies))))
    return tuple(_sorted_gradient(copies, num_indices, num_rows, grad, gpu))


def _sorted_gradient(
    copies: tuple[int, ...], num_indices: int, num_rows: int, grad: Tensor, gpu: Gpu
) -> list[KernelEvent]:
    """`embedding_backward_cuda_kernel` and the sort before it, see `embedding_backward_events`."""
    width = grad.shape[-1]
    gradient = outputs({0: num_rows * width * grad.itemsize})
    row = num_indices * INDEX_BYTES
    segments = min(num_indices, num_rows)
    partials = num_indices // ROWS_PER_THREAD + segments
    per_segment, per_partial = segments * INDEX_BYTES, partials * INDEX_BYTES
    accumulator = accumulator_bytes_of(grad.dtype)
    if not adds_atomically(num_indices, num_rows, width, gpu):
        adding: tuple[int, ...] = (partials * width * accumulator,)
    elif accumulator != grad.itemsize:
        adding = (per_partial, num_rows * width * accumulator)
    else:
        adding = (per_partial,)
    kept = (*copies, row, row)
    return (
        temporaries(*kept)
        + passing(row, radix_sort_bytes(num_indices, gpu))
        + gradient
        + temporaries(row, INDEX_BYTES)
        + passing(row, unique_by_key_bytes(num_indices, gpu))
        + temporaries(per_segment, per_segment)
        + passing(scan_bytes(segments))
        + temporaries(INDEX_BYTES)
        + passing(per_partial, *adding)
        + temporaries(-INDEX_BYTES, -per_segment, -per_segment, -INDEX_BYTES, -row)
        + temporaries(*(-n for n in reversed(kept)))
    )


def embedding_backward_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the gradient is not scaled by how often an index is met, which is counted, and the
    indices are not int32, which are sorted as such: here more is said than they take.
    """
    is_sorted = args[1].numel() > FEW_INDICES
    return not args[4] and not (is_sorted and args[1].dtype == torch.int32)


def embedding_bag_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_embedding_bag` (EmbeddingBag.cu): the sizes of the bags, the bag of each index, the result,
    and of a maximum the rows that gave it.
    """
    sizes = {2: bytes_of(out[2]), 1: bytes_of(out[1]), 0: bytes_of(out[0]), 3: bytes_of(out[3])}
    return tuple(outputs(sizes))


def embedding_bag_backward_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_embedding_bag_backward` (EmbeddingBag.cu): sums and means as the gradient of `embedding`,
    sorted however few they are; a maximum is added into the gradient at once.
    """
    grad, indices, num_rows, mode = args[0], args[1], args[6], args[8]
    copies = contiguous_copy(grad)
    if mode == _MAXIMUM:
        gradient = outputs({0: num_rows * grad.shape[-1] * grad.itemsize})
        return tuple(temporaries(*copies) + gradient + temporaries(*(-n for n in copies)))
    return tuple(_sorted_gradient(copies, indices.numel(), num_rows, grad, gpu))


def embedding_bag_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the gradient is dense and not scaled by how often an index is met."""
    return not args[7] and not args[9] and args[1].numel() > 0


def nonzero_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`nonzero` of Nonzero.cu: the count and its sum's storage, the positions, the selection's
    storage.
    """
    return tuple(_selection(args[0], outputs({0: bytes_of(out)}), gpu))


def _selection(mask: Tensor, positions: list[KernelEvent], gpu: Gpu) -> list[KernelEvent]:
    copies, count = contiguous_copy(mask), mask.numel()
    counting = sum_storage_bytes(count, threads_per_sm(gpu) * gpu.num_sms)
    return (
        temporaries(*copies, 4)
        + passing(counting)
        + positions
        + passing(select_bytes(count, gpu))
        + temporaries(-4, *(-n for n in reversed(copies)))
    )


def masked_scatter_backward_events(
    args: Args, kwargs: Kwargs, out: Any, gpu: Gpu, num_selected: int | None = None
) -> Events:
    """`masked_scatter_backward` of TensorAdvancedIndexing.cpp: the gradient where the mask is true,
    then zeros up to the size of the source.

    `masked_select` expands the mask, finds the positions of its true entries (one int64 for each of
    its dimensions) and gathers; what is short of the source is made of zeros and concatenated.

    Args:
        args: gradient, mask and the sizes of the source. kwargs: of the op. out: the gradient of
        the source. gpu: the GPU. num_selected: true entries of the mask broadcast to the gradient.
        None assumes that the whole source was used,
            the most that can be: all positions, no padding.
    """
    grad, mask = args[0], args[1].expand(args[0].shape)
    size = out.numel()
    selected = size if num_selected is None else min(size, num_selected)
    positions = selected * mask.dim() * INDEX_BYTES
    finding = _selection(mask, temporaries(positions), gpu)
    if selected >= size:
        return tuple(finding + outputs({0: bytes_of(out)}) + temporaries(-positions))
    chosen, padding = selected * grad.itemsize, (size - selected) * grad.itemsize
    return tuple(
        finding
        + temporaries(chosen, -positions, padding)
        + outputs({0: bytes_of(out)})
        + temporaries(-padding, -chosen)
    )


def index_put_is_sorted(args: Args, kwargs: Kwargs) -> bool:
    """Whether `index_put` goes through a sort of the indices: it accumulates, and no index is a
    mask.
    """
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = index_tensors(args)
    if not accumulate or not indices or any(i.dtype in MASK_DTYPES for i in indices):
        return False
    return broadcast(indices)[0].numel() > 0


def index_put_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`index_put` with `accumulate`: `index_put_with_sort_kernel` of Indexing.cu.

    Each index is checked against both bounds (an int64 and a comparison, one after the other), but
    not in the backward of `index`, which calls `_index_put_impl_` as `unsafe`. Then the linear
    indices (`computeLinearIndex`): of the first index its remainder and the product with the
    stride, which stays, of each other the same, added to it; the values where they are not
    contiguous; sorted indices, original positions and their initial range; and the sort's storage
    over the bits that the number of rows needs.
    """
    target, values = args[0], args[2]
    indices = index_tensors(args)
    count = broadcast(indices)[0].numel()
    slice_size = prod(n for d, n in enumerate(target.shape) if d >= len(args[1]))
    slice_size *= prod(
        n for d, n in enumerate(target.shape) if d < len(args[1]) and args[1][d] is None
    )
    expanded = values.expand(count * slice_size) if values.numel() == 1 else values
    largest = target.numel() // max(1, slice_size)
    row = count * INDEX_BYTES
    sort = radix_sort_bytes(count, gpu, num_bits=max(1, largest.bit_length()))
    is_unsafe = len(args) > 4 and args[4]
    num_checks = 0 if is_unsafe else 2 * len(indices)
    checks = [event for _ in range(num_checks) for event in passing(INDEX_BYTES, 1)]
    return tuple(
        outputs({0: bytes_of(target)})
        + checks
        + temporaries(row)
        + passing(row)
        + temporaries(*(row, row, -row, -row) * (len(indices) - 1))
        + passing(*contiguous_copy(expanded), row, row, row, sort)
        + temporaries(-row)
    )


SHARED_BYTES_PER_BLOCK = 48 << 10
"""Of every GPU; CUDA Programming Guide 13, table 30."""


def bincount_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`bincount` (cuda/SummaryOps.cu): the smallest and the largest number are read, then bins."""
    numbers, item = args[0], args[0].itemsize
    extreme = passing(item, *extreme_scratch(args[:1], {}, numbers, gpu).after)
    return tuple((extreme + extreme if numbers.numel() else []) + outputs({0: bytes_of(out)}))


def bincount_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the bins that were asked for are few enough to be counted in shared memory."""
    minlength: int = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    return minlength * INDEX_BYTES + 8 < SHARED_BYTES_PER_BLOCK


def roll_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`roll` over several dimensions (`roll_common` of TensorTransformations.h): it rolls the first
    one, and what comes out over the rest; all of them live until the last is done.
    """
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    copies = contiguous_copy(args[0])
    if len(dims) < 2:
        return tuple(
            temporaries(*copies) + outputs({0: bytes_of(out)}) + temporaries(*(-n for n in copies))
        )
    rolled = (bytes_of(out),) * (len(dims) - 1)
    return tuple(
        temporaries(*copies, rolled[0], *(-n for n in copies), *rolled[1:])
        + outputs({0: bytes_of(out)})
        + temporaries(*(-n for n in rolled))
    )


def repeat_interleave_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`repeat_interleave` of counts (Repeat.cpp): their running int64 sum, then the positions."""
    count = args[0].numel()
    row = count * INDEX_BYTES
    scan = scan_bytes(count) if count > 1 else 0
    copies = contiguous_copy(args[0])
    return tuple(
        temporaries(*copies, row)
        + passing(scan)
        + outputs({0: bytes_of(out)})
        + temporaries(-row, *(-n for n in copies))
    )


STAGED_EVENTS: dict[OpOverload, EventsFn] = {
    aten.native_dropout.default: dropout_events,
    aten.embedding_dense_backward.default: embedding_backward_events,
    aten._embedding_bag.default: embedding_bag_events,
    aten._embedding_bag_backward.default: embedding_bag_backward_events,
    aten.nonzero.default: nonzero_events,
    aten.bincount.default: bincount_events,
    aten.topk.default: topk_events,
    aten.embedding_renorm_.default: renorm_events,
    aten.logsumexp.default: logsumexp_events,
    aten.native_batch_norm_backward.default: native_batch_norm_backward_events,
    aten.repeat_interleave.Tensor: repeat_interleave_events,
    aten.roll.default: roll_events,
    aten.masked_scatter_backward.default: masked_scatter_backward_events,
    aten.index_put.default: index_put_events,
    aten.index_put_.default: index_put_events,
    aten._index_put_impl_.default: index_put_events,
    aten._unsafe_index_put.default: index_put_events,
    **CONVOLUTION_EVENTS,
    **FFT_EVENTS,
    **LAYER_NORM_EVENTS,
    **LINALG_EVENTS,
    **LOSS_EVENTS,
    **DRAW_EVENTS,
    **WINDOW_EVENTS,
}
"""What each operation asks of the allocator, in order; `index_put` where `index_put_is_sorted`."""

STAGED_MODELLED_WHERE = {
    aten.embedding_dense_backward.default: embedding_backward_is_modelled,
    aten._embedding_bag_backward.default: embedding_bag_is_modelled,
    aten.bincount.default: bincount_is_modelled,
    **dict.fromkeys(FFT_EVENTS, fft_is_modelled),
    **dict.fromkeys(LINALG_EVENTS, linalg_is_modelled),
}

SORTED_WRITES = frozenset(op for op, events in STAGED_EVENTS.items() if events is index_put_events)
"""The variants of `index_put`."""
