"""FSDP2's kernels that pack and unpack many tensors in one launch: their tables of pointers.

Source: aten/src/ATen/native/cuda/TensorShape.cu (torch 2.11), `pack_vecs`: what the blocks of a
launch look up is put into one tensor of 64-bit integers on the host and copied to the GPU.
Evidence: 76 such tables of GPT-2 under FSDP2 on four H200 (tests/replay/ranks), to the byte.
"""

from __future__ import annotations

from math import ceil, prod, sqrt
from typing import Any

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.reductions import threads_per_sm
from memest.estimator.kernels.scratch import Scratch

INTEGER_BYTES = 8

BLOCK_THREADS = 128
"""`BLOCK_SIZE`."""

BLOCK_BYTES = 16 * BLOCK_THREADS
"""That a block copies at once: `BYTES_PER_THREAD` each."""

WAVES = 2
"""Of blocks per launch at most, when each thread goes over several chunks."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def split_with_sizes_copy_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`split_with_sizes_copy.out`: a table of addresses, and which split each block copies.

    Two addresses and a size for each split, the first block of each and of what would come after
    the last, a split for each block::

        8 * (4 * splits + 1 + blocks)

    A thread goes over so many bytes that the blocks are at most two waves; of that number the root
    is of chunks, the rest of bytes in a chunk.
    """
    source, sizes = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    outputs = kwargs.get("out") or ()
    is_fast = source.is_contiguous() and all(
        t.is_contiguous() and t.dtype is source.dtype for t in outputs
    )
    if not is_fast:
        return Scratch()
    dim %= source.dim()
    num_chunks = prod(source.shape[:dim])
    row_bytes = prod(source.shape[dim + 1 :]) * source.itemsize
    chunks = [size * row_bytes for size in sizes]
    num_blocks = sum(-(-chunk // BLOCK_BYTES) for chunk in chunks)
    most = threads_per_sm(gpu) * gpu.num_sms // BLOCK_THREADS * WAVES
    factor = -(-num_blocks * num_chunks // most)
    chunks_per_block = min(ceil(sqrt(factor)), num_chunks)
    rounds = -(-factor // chunks_per_block)
    num_blocks = sum(-(-chunk // (BLOCK_BYTES * rounds)) for chunk in chunks)
    return Scratch(before=(INTEGER_BYTES * (4 * len(chunks) + 1 + num_blocks),))


def chunk_cat_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`_chunk_cat.out`: a table of addresses, and which tensor each block copies.

    An address, two sizes and a number of blocks for each tensor, where each begins in bytes and in
    blocks, a tensor for each block::

        8 * (6 * tensors + 2 + blocks)
    """
    tensors, dim, num_chunks = args[:3]
    target = kwargs.get("out")
    itemsize = tensors[0].itemsize if target is None else target.itemsize
    num_blocks = 0
    for tensor in tensors:
        rows = -(-tensor.shape[dim] // num_chunks)
        num_bytes = rows * prod(tensor.shape[dim + 1 :]) * itemsize
        num_blocks += -(-num_bytes // BLOCK_BYTES)
    return Scratch(before=(INTEGER_BYTES * (6 * len(tensors) + 2 + num_blocks),))
