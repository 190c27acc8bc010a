"""Gathering, scattering and writing by index, embeddings and their gradients.

Sources (torch 2.11, `aten/src/ATen/native`): cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu,
cuda/EmbeddingBag.cu, cuda/Indexing.cu, cuda/IndexKernel.cpp, cuda/IndexKernel.cu, cuda/Nonzero.cu,
TensorAdvancedIndexing.cpp, Onehot.cpp; torch/csrc/autograd/FunctionsManual.cpp for what runs in
place. Evidence: event by event on an H200. Shapes: n indices, V rows of the table, D row width.
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import cub, registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.in_place import in_nodes
from memest.estimator.ops.reductions import accumulator_bytes_of
from memest.estimator.ops.refusals import accepts, fits, same_type
from memest.estimator.ops.registry import INDEX_BYTES, Args, KernelCall, ValueOf, op, register
from memest.estimator.ops.sim_mode import SimMode
from memest.estimator.ops.sorting import MAX_BLOCK_SIZE, SMALL_SORT, sort_bytes
from memest.estimator.ops.strides import contiguous_copy
from memest.estimator.ops.temporaries import Events, Scratch, around, outputs, passing, temporaries
from memest.estimator.tensors.placement import META, is_meta, on_gpu
from memest.units import ceil_div, round_up

aten = torch.ops.aten
FEW_INDICES = 3072  # most for which `embedding_dense_backward_cuda` adds without sorting
ROWS_PER_THREAD = 10  # `NROWS_PER_THREAD`: rows of one partial sum
ATOMIC_BLOCKS_PER_SM = 4  # `MAX_ATOMIC_ACCUM_BLOCKS_PER_SM`; below it sums are atomic
MASK_DTYPES = (torch.bool, torch.uint8)
_PUTS = "index_put index_put_ _index_put_impl_ _unsafe_index_put"
INDEX_PUT = tuple(getattr(aten, name).default for name in _PUTS.split())


op(
    "embedding", "a copy of the indices if they have gaps (Embedding.cpp)",
    before=lambda c: () if flattens_to_view(c.indices) else c.indices.nbytes,
)  # fmt: skip


def flattens_to_view(tensor: Tensor) -> bool:
    """Return whether `tensor.reshape(-1)` is a view and not a copy."""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    dims = [(size, stride) for size, stride in sizes_and_strides if size != 1]
    return tensor.numel() == 0 or all(
        outer_stride == size * stride for (_, outer_stride), (size, stride) in pairwise(dims)
    )


def adds_atomically(num_indices: int, num_rows: int, width: int, gpu: Gpu) -> bool:
    """Return whether the gradient of `embedding` is summed by atomics (`use_fused_kernel`). It is
    for many indices into few rows. The weight has `num_rows` rows of `width` elements."""
    padded_width = round_up(width, 32)  # to a warp
    segments = min(num_indices, num_rows)
    grid = ceil_div(segments * padded_width, min(padded_width, MAX_BLOCK_SIZE))
    partials = num_indices // ROWS_PER_THREAD + segments
    return grid < gpu.num_sms * ATOMIC_BLOCKS_PER_SM and partials > 4 * grid


def broadcast(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors expanded to their common shape."""
    return list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


def _copies_of_unlike_strides(indices: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the bytes of each copy of `indices`. int32 ones are cast to int64 (`make_info` of
    TensorAdvancedIndexingUtils.h). If strides differ, all are made contiguous (`AdvancedIndex`)."""
    as_int64: list[Tensor] = []
    casts: list[int] = []
    for index in broadcast(indices):
        if index.dtype == torch.int32:
            index = torch.empty_like(index, dtype=torch.int64)
            casts.append(index.nbytes)
        as_int64.append(index)
    if len({index.stride() for index in as_int64}) == 1:
        return tuple(casts)
    return *casts, *contiguous_copy(*as_int64)


def index_tensors(args: Args) -> list[Tensor]:
    """Return the index tensors among the `args` of `index` or `index_put`, without the `None`s."""
    return [index for index in args[1] if index is not None]


def _has_no_mask(c: KernelCall) -> bool:
    """Return whether there is no mask among the indices, or a single number fills the mask."""
    return _is_fill(c.args) or not any(i.dtype in MASK_DTYPES for i in index_tensors(c.args))


# Two or more indices are broadcast. One index is used in place.
op(
    "index.Tensor",
    "int64 copies of int32 indices, and of all if strides differ (TensorAdvancedIndexing.cpp)",
    before=lambda c: _copies_of_unlike_strides(index_tensors(c.args)),
    modelled=_has_no_mask,
    shaped_by=lambda args: [i for i in index_tensors(args) if i.dtype in MASK_DTYPES],
)


@registry.requests("masked_scatter masked_scatter_")
def masked_scatter(c: KernelCall) -> Scratch:
    """Allocations of `masked_scatter` (IndexKernel.cu): cumulative count, copies, scan storage."""
    _, mask = broadcast((c.self, c.mask))
    count = mask.numel()
    copies = contiguous_copy(mask, c.source)
    return Scratch(after=(count * INDEX_BYTES, *copies, cub.scan_bytes(count)))


@registry.requests(
    "embedding_renorm_",
    when="one block finds the indices that differ, as was measured",
    modelled=lambda c: c.indices.numel() <= SMALL_SORT,
)
def embedding_renorm(c: KernelCall) -> Events:
    """Allocations of `embedding_renorm_cuda_` (Embedding.cu): sorted indices, then unique ones."""
    indices_bytes = c.indices.numel() * INDEX_BYTES
    sorting = passing(*contiguous_copy(c.indices), *sort_bytes(c.indices, -1, c.gpu))
    unique = passing(indices_bytes, INDEX_BYTES, cub.select_bytes(c.indices.numel(), c.gpu))
    return around((indices_bytes,), around((indices_bytes,), sorting) + unique)


_MAXIMUM = 2  # `EmbeddingBagMode::MAX`


@registry.requests(
    "embedding_dense_backward",
    when="the gradient is not scaled by the count of an index; up to 4864 indices are int32",
    modelled=lambda c: (
        not c.scale_grad_by_freq
        and not (c.indices.numel() > cub.SINGLE_TILE and c.indices.dtype == torch.int32)
    ),
)
def embedding_backward(c: KernelCall) -> Events:
    """Allocations of `embedding_dense_backward` (Embedding.cu): more than 3072 indices are sorted.

    The sort is in EmbeddingBackwardKernel.cu. Left out: `scale_grad_by_freq` (counts of 8 bytes per
    index, and scans) and deterministic algorithms.
    """
    grad, num_indices = c.grad_output, c.indices.numel()
    copies = contiguous_copy(c.indices, grad)
    if num_indices <= FEW_INDICES:
        return around(copies, outputs({0: c.num_weights * grad.shape[-1] * grad.itemsize}))
    return _sorted_gradient(copies, c.indices, c.num_weights, grad, c.gpu)


def _sorted_gradient(
    copies: tuple[int, ...], indices: Tensor, num_rows: int, grad: Tensor, gpu: Gpu
) -> Events:
    """Return the allocations of an embedding's gradient: sorted indices, runs of equal ones, sums.
    A row of `grad` for each of the int64 or int32 `indices` is added in partial sums to the
    `num_rows` rows of the weight. The number of runs of equal indices is unknown. Its upper bound
    is taken: the smaller of the number of indices and `num_rows`. `copies` has the bytes of
    contiguous copies of arguments, such as `grad`; () if no argument is copied."""
    width, num_indices, index_bytes = grad.shape[-1], indices.numel(), indices.itemsize
    gradient = outputs({0: num_rows * width * grad.itemsize})
    num_segments = min(num_indices, num_rows)
    num_partials = num_indices // ROWS_PER_THREAD + num_segments
    indices_bytes = num_indices * index_bytes
    segments_bytes, partials_bytes = num_segments * index_bytes, num_partials * index_bytes
    accumulator = accumulator_bytes_of(grad.dtype)
    if not adds_atomically(num_indices, num_rows, width, gpu):
        sums = [num_partials * width * accumulator]
    else:
        sums = [partials_bytes]  # the segment of each partial sum
        if accumulator != grad.itemsize:  # a float32 copy of the 16-bit gradient
            sums.append(num_rows * width * accumulator)
    storage = cub.radix_sort_bytes(num_indices, gpu, key_bytes=index_bytes, value_bytes=index_bytes)
    sorting = passing(indices_bytes, storage)
    unique = passing(indices_bytes, cub.unique_by_key_bytes(num_indices, gpu))
    scan = passing(cub.scan_bytes(num_segments, value_bytes=index_bytes))
    adding = around((INDEX_BYTES,), passing(partials_bytes, *sums))
    # the number of partial sums of each segment, and their offsets
    segment_events = around((segments_bytes, segments_bytes), scan + adding)
    # starts of the segments, and their number
    events = sorting + gradient + around((indices_bytes, INDEX_BYTES), unique + segment_events)
    return around((*copies, indices_bytes, indices_bytes), events)  # sorted, original positions


@registry.requests("index_reduce index_reduce_")
def index_reduce(c: KernelCall) -> Events:
    """Allocations of `index_reduce` (cuda/Indexing.cu): for a mean, how often each element is hit.
    With `include_self=False`, indices that are not int64 are cast first."""
    is_cast = not c.include_self and c.index.dtype != torch.int64
    events = passing(c.index.numel() * INDEX_BYTES) if is_cast else []
    if c.reduce == "mean":
        counts = passing(c.source.nbytes) + passing(c.self.numel())
        events += around((c.self.numel() * c.self.itemsize,), counts)
    return events if c.out is c.self else c.outputs() + events


register(
    "_embedding_bag",
    about="sizes of bags, bag of each index, result, rows of maxima (EmbeddingBag.cu)",
    requests=lambda c: c.outputs(2, 1, 0, 3),
)


@registry.requests(
    "_embedding_bag_backward",
    when="the gradient is dense and not scaled by the count of an index",
    modelled=lambda c: not c.scale_grad_by_freq and not c.sparse and c.indices.numel() > 0,
)
def embedding_bag_backward(c: KernelCall) -> Events:
    """Allocations of `_embedding_bag_backward` (EmbeddingBag.cu): those of `_sorted_gradient`.

    The gradient of a maximum sorts no indices: it takes a contiguous copy and the result.
    """
    grad, copies = c.grad, contiguous_copy(c.grad)
    if c.mode == _MAXIMUM:
        return around(copies, outputs({0: c.num_weights * grad.shape[-1] * grad.itemsize}))
    return _sorted_gradient(copies, c.indices, c.num_weights, grad, c.gpu)


register(
    "nonzero",
    shaped_by=lambda args: args,
    about="the count and its sum, positions, a selection (Nonzero.cu)",
    requests=lambda c: _selection(c.self, c.outputs(), c.gpu),
)


def _selection(mask: Tensor, positions: Events, gpu: Gpu) -> Events:
    num_elements = mask.numel()
    counting = cub.sum_storage_bytes(num_elements, gpu.multiprocessor.threads * gpu.num_sms)
    selecting = passing(cub.select_bytes(num_elements, gpu))
    # 4 bytes have the number of nonzero elements
    return around((*contiguous_copy(mask), 4), passing(counting) + positions + selecting)


def _num_masked(value_of: ValueOf, args: Args) -> tuple[int, ...]:
    mask_value = value_of(args[1])
    return () if mask_value is None else (int(mask_value.sum()),)


@registry.requests("masked_scatter_backward", from_values=_num_masked, shaped_by=lambda args: ())
def masked_scatter_backward(c: KernelCall) -> Events:
    """Allocations of `masked_scatter_backward`: the selected gradient, and zeros that follow it.

    The result is the gradient of the source. Zeros are appended if the mask has fewer true entries
    than the source has elements. In TensorAdvancedIndexing.cpp `masked_select` expands the mask,
    finds the positions of its true entries (one int64 for each of its dimensions) and gathers. If
    the mask is unknown, the whole source is assumed to be used.
    """
    grad, source_numel = c.grad_output, c.out.numel()
    mask = c.mask.expand(grad.shape)
    num_selected = source_numel
    if c.numbers_read:
        (num_masked,) = c.numbers_read
        num_selected = min(source_numel, num_masked * (grad.numel() // max(1, c.mask.numel())))
    positions = num_selected * mask.dim() * INDEX_BYTES
    finding = _selection(mask, temporaries(positions), c.gpu)
    if num_selected >= source_numel:
        return finding + c.outputs() + temporaries(-positions)
    padding = (source_numel - num_selected) * grad.itemsize
    gathered = temporaries(-positions) + around((padding,), c.outputs())
    return finding + around((num_selected * grad.itemsize,), gathered)


@registry.requests(*INDEX_PUT, modelled=_has_no_mask)
def index_put(c: KernelCall) -> Scratch | Events:
    """Allocations of `index_put` (cuda/Indexing.cu): a sort if values accumulate, else copies. A
    number on the host and indices with different strides are copied. A mask needs no copy."""
    indices, value = index_tensors(c.args), c["values"]
    if not indices or any(i.dtype in MASK_DTYPES for i in indices):
        return Scratch()
    if c.accumulate and broadcast(indices)[0].numel() > 0:
        return _sorted_events(c, indices)
    is_host_number = value.device.type == "cpu" and not value.dim()
    number = (value.itemsize,) if is_host_number else ()
    return Scratch(after=(*number, *_copies_of_unlike_strides(indices)))


def _sorted_events(c: KernelCall, indices: list[Tensor]) -> Events:
    """Return the allocations of `index_put` with `accumulate`, at the tensors `indices`.

    `index_put_with_sort_kernel` (Indexing.cu) allocates in this order:

    1. Checks of each index on the GPU against both bounds, unless `unsafe` (backward of
       `index`).
    2. Linear indices (`computeLinearIndex`). Each index on the GPU takes a remainder and a
       product with its stride. For an index on the host, the product is computed there and copied.
    3. Contiguous values, sorted indices, original positions, a range of positions, and a sort.
       The sort uses as many bits as the largest row number needs.
    """
    target, values = c.self, c["values"]
    count = broadcast(indices)[0].numel()
    slice_size = prod(n for n, index in zip_longest(target.shape, c.indices) if index is None)
    if values.numel() == 1:
        values = values.reshape(()).expand(count * slice_size)
    steps = zip(target.shape, target.stride(), strict=True)
    largest_row = sum((size - 1) * step for size, step in steps) // max(1, slice_size)
    indices_bytes = count * INDEX_BYTES
    sort = cub.radix_sort_bytes(count, c.gpu, num_bits=max(1, largest_row.bit_length()))
    num_on_gpu = sum(map(is_meta, indices))
    checks = [] if c.get("unsafe") else passing(INDEX_BYTES, 1) * (2 * num_on_gpu)  # both bounds
    linear: Events = []
    for i, index in enumerate(indices):
        remainder = indices_bytes if is_meta(index) else 0
        product = indices_bytes if i > 0 else 0  # that of the first index stays allocated
        linear += passing(remainder, product)
    sorting = passing(*contiguous_copy(values), *(indices_bytes,) * 3, sort)
    return outputs({0: target.nbytes}) + checks + around((indices_bytes,), linear + sorting)


op(
    "scatter_reduce.two scatter_reduce_.two",
    "a mean counts its terms in ones like the source and like the result, and tests for zeros "
    "(TensorAdvancedIndexing.cpp)",
    after=lambda c: (c.src.nbytes, c.out.nbytes, c.out.numel()) if c.reduce == "mean" else (),
)


def normalize_indices(mode: SimMode, func: Any, args: Args) -> tuple[Any, tuple[Any, ...]]:
    """Return (func, args) of an indexing as CUDA runs it: indices on the GPU, masks as positions.

    `mode` runs the conversions. `expandTensors` of native/IndexingUtils.h calls `nonzero` for each
    mask. `masked_select` becomes `index` by the mask (cuda/IndexKernel.cpp). If values accumulate,
    an index on the host is not copied here. CUDA multiplies it by its stride on the host and copies
    the product (`_sorted_events`). A call is unchanged if it needs no conversion or writes one
    number through a mask (`canDispatchToMaskedFill`).
    """
    is_select = func is aten.masked_select.default
    source, indices, *rest = args
    if is_select:
        mask, source = broadcast([t.unsqueeze(0) if t.dim() == 0 else t for t in (indices, source)])
        indices = [mask]
    tensors = [index for index in indices if index is not None]
    has_mask = any(index.dtype in MASK_DTYPES for index in tensors)
    _check_masks(source, indices)
    if (has_mask and _is_fill(args)) or (not has_mask and all(map(on_gpu, tensors))):
        return func, args
    if func in _COPIED_FIRST:
        source = mode.call(aten.clone.default, (source,), {})
        func = aten.index_put_.default
    is_sorted = _accumulates(args)
    new_indices: list[Tensor | None] = []
    for index in indices:
        if index is None:
            new_indices.append(None)
            continue
        positions, is_mask = index, index.dtype in MASK_DTYPES
        if is_mask and on_gpu(index):
            positions = mode.call(aten.nonzero.default, (index,), {})
        elif is_mask:
            positions = mode.host.nonzero(index)
        stays_on_host = is_sorted and not is_meta(positions)
        if not on_gpu(positions) and not stays_on_host:
            positions = mode.call(aten._to_copy.default, (positions,), {"device": META})
        new_indices += positions.unbind(1) if is_mask else [positions]
    return aten.index.Tensor if is_select else func, (source, new_indices, *rest)


def _check_masks(source: Tensor, indices: Sequence[Any]) -> None:
    """Raise torch's `IndexError` if a mask differs in shape from the dimensions that it indexes."""
    source_dim = 0
    for index in indices:
        if index is None or index.dtype not in MASK_DTYPES:
            source_dim += 1
            continue
        for mask_dim, size in enumerate(index.shape):
            if size != source.size(source_dim):
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {mask_dim} does not match "
                    f"the shape of the indexed tensor {list(source.shape)} at index {source_dim}"
                )
            source_dim += 1


def _is_fill(args: Args) -> bool:
    """Return whether `index_put` with `args` writes a single number without accumulation."""
    return len(args) > 2 and args[2].numel() == 1 and not _accumulates(args)


def _accumulates(args: Args) -> bool:
    return len(args) > 3 and bool(args[3])


_COPIED_FIRST = (aten.index_put.default, aten._unsafe_index_put.default)

# TensorAdvancedIndexing.cpp; `masked_fill__cuda` of cuda/IndexKernel.cpp; Embedding.cpp
_INDICES = torch.int32, torch.int64
_refuse_index = accepts(
    2, _INDICES, "index_add_(): Expected dtype int32/int64 for index but got: {}"
)
_ADDED = "index_add_(): self ({}) and source ({}) must have the same scalar type"
_refuse_added = same_type(0, 3, _ADDED)
_MASKS = "masked_fill only supports boolean masks, but got dtype {}"
_refuse_mask = accepts(1, (torch.bool,), _MASKS)
_EMBEDDED = (
    "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, "
    "Int; but got torch.cuda.{}Tensor instead (while checking arguments for embedding)"
)
register("embedding", refuse=accepts(1, _INDICES, _EMBEDDED))
register("index_add index_add_", refuse=lambda c: _refuse_index(c) or _refuse_added(c))
register("masked_fill.Scalar masked_fill_.Scalar", refuse=lambda c: _refuse_mask(c) or fits(c))
register(
    "index_put index_put_",
    refuse=same_type(0, 2, "Index put requires the source and destination dtypes match, got {} for "
                     "the destination and {} for the source."),
)  # fmt: skip
register(
    "index_copy index_copy_",
    refuse=same_type(0, 3, "index_copy_(): self and source expected to have the same dtype, but got"
                     " (self) {} and (source) {}"),
)  # fmt: skip

register(
    "index_put",
    in_backward=in_nodes("IndexBackward0", instead=aten._index_put_impl_.default, more=(True,)),
)
for _name, _nodes in (
    ("scatter_add", "GatherBackward0 CummaxBackward0 CumminBackward0"),
    ("put", "TakeBackward0"),
    ("index_fill.int_Tensor", "TraceBackward0"),
    ("index_add", "IndexSelectBackward0"),
    ("masked_scatter", "MaskedSelectBackward0"),
    (
        "scatter.src",
        "TopkBackward0 SortBackward0 SortBackward1 MaxBackward0 MinBackward0 "
        "KthvalueBackward0 ModeBackward0 MedianBackward1 NanmedianBackward1",
    ),
):
    register(_name, in_backward=in_nodes(_nodes))

register(aten.index.Tensor, aten.masked_select.default, *INDEX_PUT, take_indices=normalize_indices)

register(
    aten.index.Tensor, aten._unsafe_index.Tensor, *INDEX_PUT[:3], aten.masked_scatter_.default,
    may_mix_devices=True,
)  # fmt: skip
register("masked_select", shaped_by=lambda args: args[1:])


@registry.above_autograd("one_hot")
def one_hot(next_kernel: Next, classes: Tensor, num_classes: int = -1) -> Tensor:
    """Scatter ones into zeros, as CUDA does; on meta torch would compare instead (Onehot.cpp). A
    `num_classes` of -1 is the largest class + 1. If `classes` is empty, `next_kernel` runs."""
    if not classes.numel():
        return next_kernel(classes, num_classes)
    if num_classes == -1:
        num_classes = int(classes.max()) + 1
    zeros = torch.zeros((*classes.shape, num_classes), dtype=torch.int64, device=classes.device)
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)
