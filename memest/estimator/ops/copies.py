"""Copies, factories and transfers between the GPU and the host.

Sources (torch 2.11, `aten/src/ATen/native`): cuda/Copy.cu (`copy_requires_temporaries`,
`copy_kernel_cuda`), cuda/TensorShape.cu (`pack_vecs`), TensorTransformations.h, Repeat.cpp.
Evidence of `pack_vecs`: 76 tables of GPT-2 under FSDP2 on four H200 (tests/replay/ranks), exact.
"""

from math import ceil, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from memest.estimator.ops import cub, registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.refusals import fits, overflow
from memest.estimator.ops.registry import INDEX_BYTES, Args, KernelCall, Kwargs, op_of, register
from memest.estimator.ops.sim_mode import SimMode
from memest.estimator.ops.strides import contiguous_copy, is_dense
from memest.estimator.ops.temporaries import Events, Scratch, around, passing, temporaries
from memest.estimator.tensors.known_values import MAX_SHOWN_NUMEL
from memest.estimator.tensors.patches import setting
from memest.estimator.tensors.placement import CPU, INSIDE, META, is_meta, storage_key
from memest.units import ceil_div

aten = torch.ops.aten
WITH_A_NUMBER = {
    aten.masked_fill.Tensor: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill_.Scalar,
}
"""Overloads with a number, for operators that read it from a 0-d host tensor (Indexing.cu)."""


def with_number(func: Any, args: Args) -> tuple[Any, tuple[Any, ...]]:
    """Return the call (`func`, `args`) with a number in place of a 0-d host tensor. That holds for
    `masked_fill` and `masked_fill_`, which read a number from the host tensor. The returned
    operator is their overload for numbers, such as `masked_fill.Scalar`. Any other call is returned
    unchanged."""
    if func not in WITH_A_NUMBER:
        return func, args
    tensor, mask, value = args
    return (func, args) if is_meta(value) else (WITH_A_NUMBER[func], (tensor, mask, value.item()))


def as_dtype_layout(args: Args, kwargs: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """Return a call of `aten::to.device` as one of `to.dtype_layout`: (operator, args, kwargs)."""
    arguments = registry.arguments_by_name(aten.to.device, args, kwargs)
    return aten.to.dtype_layout, (arguments.pop("self"),), arguments


def awaited_device() -> torch.device | None:
    """Return the device to which autograd's running copy moves a gradient; None if none runs."""
    node = torch._C._current_autograd_node()
    if node is None or node.name() not in ("ToCopyBackward0", "_FromHostBackward"):
        return None
    (next_node, input_number), *_ = node.next_functions
    return None if next_node is None else next_node._input_metadata[input_number].device


def copy_to_host(mode: SimMode, func: Any, args: Args, kwargs: Any) -> Tensor:
    """Run `copy_` or `_to_copy` from GPU to host. The result has the source's values if they are
    known or guessed. Else `copy_` leaves its target unchanged, and `_to_copy` returns a tensor
    without data, or zeros for a gradient that autograd moves to the host."""
    target: Tensor | None = None
    if func is aten.copy_.default:
        target, source, *_ = args
    else:
        source, *_ = args
    gradient_device = awaited_device()
    guess = value = None
    # a parameter has no data on the host, as none of a model built there has
    if not isinstance(source, torch.nn.Parameter) and gradient_device != META:
        guess = mode.guessed.value_of(source)
        value = mode.values.value_of(source) if guess is None else guess
    dtype = kwargs.get("dtype") or source.dtype
    if value is None:
        if target is not None:
            return target
        if gradient_device == CPU:
            return torch.zeros(source.size(), dtype=dtype, device=CPU)
        result = torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=META)
        mode.host.put(result)
        return result
    is_guessed = guess is not None or storage_key(source) in mode.values.guessed
    if is_guessed and source.numel() <= MAX_SHOWN_NUMEL:
        mode.guesses.note(f"a copy of {str(source.dtype).removeprefix('torch.')} to the host")
    return value.to(dtype).clone() if target is None else target.copy_(value)


@registry.requests("roll")
def roll(c: KernelCall) -> Events:
    """Allocations of `roll_common` (TensorTransformations.h): one result per dim, only the last
    stays."""
    copies, size, num_dims = contiguous_copy(c.self), c.out.nbytes, len(c.dims)
    if num_dims < 2:
        return around(copies, c.outputs())
    first_result = around(copies, temporaries(size))
    return first_result + around((size,) * (num_dims - 2), c.outputs()) + temporaries(-size)


@registry.requests("repeat_interleave.Tensor", shaped_by=lambda args: args)
def repeat_interleave(c: KernelCall) -> Events:
    """Allocations of `repeat_interleave` (Repeat.cpp): cumulative sum in int64, positions.

    The sum copies repeats with gaps again. Without an `output_size`, signs are checked.
    """
    count, copy = c.repeats.numel(), contiguous_copy(c.repeats)
    scan = around(copy, passing(cub.scan_bytes(count)) if count > 1 else [])
    signs = around((count,), passing(1)) if c.output_size is None else []
    return around((*copy, count * INDEX_BYTES), scan + signs + c.outputs())


register(
    "_efficientzerotensor",
    about="no memory: `ZeroTensorAllocator` (TensorFactories.cpp)",
    requests=lambda c: [],
)
# cuda/FillKernel.cu
register("full", refuse=lambda c: "" if c.dtype is None else overflow(c.fill_value, c.dtype))
register("fill_.Scalar constant_pad_nd", refuse=fits)

register(
    "copy_ _to_copy _copy_from set_.source_Tensor set_.source_Storage_storage_offset "
    "lift_fresh repeat_interleave.Tensor",
    may_mix_devices=True,
)
register(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty "
    "new_empty_strided new_zeros new_ones new_full",
    makes_alike=True,
)


@registry.above_autograd("_pad_packed_sequence combinations pad_sequence vander")
def make_alike(next_kernel: Next, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the composite operator `next_kernel`; put tensors made in C++ on the device of
    `source`."""
    with setting(INSIDE, "composite", True):
        return next_kernel(source, *args, **kwargs)


@registry.decomposition("is_set_to")
def is_set_to(x: Tensor, other: Tensor) -> bool:
    """Return whether two tensors view the same elements of one storage (TensorShape.cpp).

    torch's meta device has no kernel for it.
    """
    is_alike = (x.shape, x.stride()) == (other.shape, other.stride())
    is_first = x.storage_offset() == other.storage_offset()
    return is_alike and is_first and storage_key(x) == storage_key(other)


BLOCK_THREADS = 128  # `BLOCK_SIZE`
BLOCK_BYTES = 16 * BLOCK_THREADS  # copied by a block at once: `BYTES_PER_THREAD` per thread
WAVES = 2  # waves of blocks per launch at most, when each thread copies several chunks


@registry.requests("split_with_sizes_copy.out")
def split_with_sizes_copy(c: KernelCall) -> Scratch:
    """Allocations of `split_with_sizes_copy.out`: 8 * (4 * splits + 1 + blocks) bytes of indices.

    The indices are these numbers of 8 bytes:

    - four for each split: address in the output, address in the input, bytes in one row, number of
      the first thread block;
    - one for the number of all blocks;
    - one for each block: the number of the split that the block copies.

    `blocks` is the number of thread blocks that copy one row of all splits. A row is one index of
    the dimensions before the split dimension. A block copies 2048 bytes of a split.

    The blocks of all rows can exceed two waves of the GPU by a factor f. Then a block copies about
    sqrt(f) rows, and about sqrt(f) times the bytes of each row.
    """
    source, targets = c.self, c.get("out") or ()
    is_fast = source.is_contiguous() and all(
        t.is_contiguous() and t.dtype is source.dtype for t in targets
    )
    if not is_fast:
        return Scratch()
    dim = c.dim % source.dim()
    num_chunks = prod(source.shape[:dim])
    row_bytes = prod(source.shape[dim + 1 :]) * source.itemsize
    chunks = [size * row_bytes for size in c.split_sizes]
    num_blocks = sum(ceil_div(chunk, BLOCK_BYTES) for chunk in chunks)
    max_blocks = c.gpu.multiprocessor.threads * c.gpu.num_sms // BLOCK_THREADS * WAVES
    factor = ceil_div(num_blocks * num_chunks, max_blocks)
    chunks_per_block = min(ceil(sqrt(factor)), num_chunks)
    rounds = ceil_div(factor, chunks_per_block)
    num_blocks = sum(ceil_div(chunk, BLOCK_BYTES * rounds) for chunk in chunks)
    return Scratch(before=(INDEX_BYTES * (4 * len(chunks) + 1 + num_blocks),))


@registry.requests("_chunk_cat.out")
def chunk_cat(c: KernelCall) -> Scratch:
    """Allocations of `_chunk_cat.out`: 8 * (6 * tensors + 2 + blocks) bytes of indices.

    They are 6 numbers for each tensor (address, sizes, blocks), 2 more, and the tensor of each
    block.
    """
    num_blocks = 0
    for tensor in c.tensors:
        rows = ceil_div(tensor.shape[c.dim], c.num_chunks)
        num_bytes = rows * prod(tensor.shape[c.dim + 1 :]) * c["out"].itemsize
        num_blocks += ceil_div(num_bytes, BLOCK_BYTES)
    return Scratch(before=(INDEX_BYTES * (6 * len(c.tensors) + 2 + num_blocks),))


def chunk_cat_mixed(c: KernelCall) -> Scratch:
    """Allocations of `fsdp::chunk_cat_mixed_dtype`; with one dtype, those of `_chunk_cat.out`.

    With contiguous bfloat16 and float32 tensors and a float32 output, the index tensor has two
    int64 fewer. In all other cases, tensors whose dtype is not the output's are cast first.
    """
    target = c["out"]
    (table_bytes,) = chunk_cat(c).before
    casts = [tensor for tensor in c.tensors if tensor.dtype != target.dtype]
    if len({tensor.dtype for tensor in c.tensors}) == 1:
        return Scratch(before=(table_bytes,))
    are_dense = all(t.numel() and t.is_contiguous() for t in (target, *c.tensors))
    are_narrow = target.dtype is torch.float32 and {t.dtype for t in casts} == {torch.bfloat16}
    if are_dense and are_narrow and not c.dim:
        return Scratch(before=(table_bytes - 2 * INDEX_BYTES,))
    return Scratch(before=(*(t.numel() * target.itemsize for t in casts), table_bytes))


if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):  # since torch 2.15, in distributed/fsdp/
    register(torch.ops.fsdp.chunk_cat_mixed_dtype.default, requests=chunk_cat_mixed)


def to_host_bytes(func: Any, args: Args, kwargs: Kwargs) -> tuple[int, ...]:
    """Return the bytes of each temporary of `copy_` or `_to_copy` to the host, in order.

    A non-blocking copy first casts on the GPU. A source that is not contiguous is then made
    contiguous, unless it is dense and keeps its dtype and strides.
    """
    call = op_of(func).call(args, kwargs)
    if func is aten.copy_.default:
        source, dtype = call.src, call.self.dtype
        has_same_strides = call.self.stride() == source.stride()
    else:
        source, dtype = call.self, call.dtype or call.self.dtype
        has_same_strides = True
    if dtype == source.dtype and has_same_strides and is_dense(source):
        return ()
    is_cast_on_gpu = dtype != source.dtype and call.non_blocking
    cast = (source.numel() * dtype.itemsize,) if is_cast_on_gpu else ()
    if source.is_contiguous():
        return cast
    return (*cast, source.numel() * (dtype if is_cast_on_gpu else source.dtype).itemsize)


def to_gpu_bytes(target: Tensor, source: Tensor, *, is_blocking: bool) -> int:
    """Return the bytes of the GPU temporary of a copy of `source` to `target`; 0 without one.

    `is_blocking` is False for a `non_blocking` copy. The first case that holds counts:

        no cast, equal dense strides      no temporary
        cast, not `is_blocking`           elements of the dtype of `source`; the GPU casts them
        `target` is contiguous            no temporary
        `target` has any other strides    contiguous elements; the GPU copies them to `target`

    A copy that `is_blocking` casts on the host, and needs no temporary for the cast.
    """
    has_same_layout = target.stride() == source.stride() and is_dense(target)
    if target.dtype == source.dtype:
        if has_same_layout:
            return 0
    elif not is_blocking:
        return target.numel() * source.itemsize
    return 0 if target.is_contiguous() else target.nbytes
