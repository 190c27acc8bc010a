"""Reductions: staging buffers, derived by hand from Reduce.cuh."""

from __future__ import annotations

import torch

from memest.estimator.ops.temporaries import Scratch
from memest.estimator.virtual_gpu import VirtualGpu
from tests.op_calls import A100, H200, L40S, meta, requested, requests, scratch, workspaces
from tests.requested import Requests

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_a_bias_gradient_stages_one_partial_row_per_block() -> None:
    """Reduce.cuh: 2 outputs per thread (30522 % 4 = 2), block 32 x 8, grid ceil(15261 / 32) = 477.

    4096 / 8 = 512 values per thread; 132 * 2048 / 256 = 1056 blocks wanted, ceil(1056 / 477) = 3.
    """
    found = scratch(aten.sum.dim_IntList, meta(4096, 30522, dtype=torch.bfloat16), [0], True)

    assert found == Scratch(after=(4 * 30522 * 3 * 32 * 2, 4 * 477))


def test_a_full_sum_stages_one_number_per_block() -> None:
    """Block of 512, so 132 * 2048 / 512 = 528 blocks; each thread then adds more than 16 values."""
    assert scratch(aten.sum.default, meta(4112, 1408)).after == (4 * 528, 4)
    assert scratch(aten.sum.default, meta(4112, 1408), on=A100).after == (4 * 108 * 4, 4)


def test_a_gpu_with_fewer_threads_per_multiprocessor_uses_fewer_blocks() -> None:
    """Compute capability 8.9 holds 1536 threads: 142 * 1536 / 512 = 426 blocks."""
    assert scratch(aten.sum.default, meta(4112, 1408), on=L40S).after == (4 * 426, 4)


def test_a_reduction_that_fits_its_blocks_needs_no_staging() -> None:
    """1024 rows over 8 warps leave 128 values per thread, under 256."""
    tensor = meta(1024, 30522, dtype=torch.bfloat16)

    assert scratch(aten.sum.dim_IntList, tensor, [0], True) == Scratch()
    assert scratch(aten.mean.dim, meta(3, 5, 4096), [-1], True) == Scratch()


def test_a_gradient_that_expand_made_is_summed_along_the_row() -> None:
    """All strides are 0, so no thread loads vectors and a block is 32 outputs by 16 rows.

    Each thread adds 4096 / 16 = 256 values; grid 4096 / 32 = 128; 528 blocks wanted:
    ceil(528 / 128) = 5; staging 4 * 4096 * 5 * 32.
    """
    tensor = meta(1).expand(4096, 4096)

    found = scratch(aten.sum.dim_IntList, tensor, [0], True)

    assert found == Scratch(after=(4 * 4096 * 5 * 32, 4 * 128))


def test_dimensions_are_reduced_in_the_order_of_their_strides() -> None:
    """A transposed query: (2, 16, 512) merge to 16384 rows of 128 outputs, 4 per thread.

    Block 32 x 4; 16384 / 4 = 4096 values; grid 1; min(2112, 4096 / 16 = 256) blocks.
    """
    heads = meta(2, 16, 512, 128, dtype=torch.bfloat16).transpose(1, 2)

    found = scratch(aten.sum.dim_IntList, heads, [0, 1, 2], True)

    assert found == Scratch(after=(4 * 128 * 256 * 32 * 4, 4))


def test_a_sum_of_booleans_casts_them_first() -> None:
    """ReduceOps.cpp casts unless dtypes agree or a 16-bit float is added in float32."""
    assert scratch(aten.sum.default, meta(4, 50, dtype=torch.bool)).after == (200 * 8,)
    half = meta(6, 7, dtype=torch.float16)
    found = requested(aten.sum.default, (half,), {"dtype": torch.float32}, meta(), H200)
    assert found == Scratch()


def test_reductions_accumulate_in_types_of_different_sizes() -> None:
    """256000 values over 512 threads: 500 each, ceil(500 / 16) = 32 accumulators."""
    flat = (100, 2560)

    assert scratch(aten.any.default, meta(*flat, dtype=torch.bool)).after == (1 * 32, 4)
    assert scratch(aten.max.default, meta(*flat, dtype=torch.bfloat16)).after == (2 * 32, 4)
    assert scratch(aten.linalg_vector_norm.default, meta(*flat)).after == (4 * 32, 4)
    assert scratch(aten.var.correction, meta(*flat)).after == (16 * 32, 4)
    assert scratch(aten.argmax.default, meta(*flat)).after == (16 * 32, 4)


def test_an_input_beyond_32_bit_offsets_is_reduced_in_pieces() -> None:
    """2.9 GB of bfloat16 run as two halves of 35000 rows, with running sums in float32.

    Half: 4 outputs per thread, block 32 x 4, grid 160, 8750 values per thread;
    max(ceil(2112 / 160), ceil(8750 / 256)) = 35 blocks per output.
    """
    tensor = meta(70000, 20480, dtype=torch.bfloat16)

    found = scratch(aten.sum.dim_IntList, tensor, [0])

    assert found == Scratch(after=(20480 * 4, 4 * 20480 * 35 * 32 * 4, 4 * 160))


def test_equal_compares_into_a_boolean_tensor_and_reduces_it() -> None:
    """`cuda_equal`: comparison, its `all`, 32 one-byte partials and a semaphore."""
    found = requested(aten.equal.default, (meta(100, 2560), meta(100, 2560)), {}, None, H200)

    assert found == Scratch(after=(256_000, 1, 32, 4))


def test_equal_requests_its_temporaries_unless_it_needs_no_kernel() -> None:
    """Recorded on an H100 in `torch.istft` (vocos): one element and its `all`, 1 byte each."""
    with VirtualGpu(H200) as virtual:
        one, other = torch.ones(2, 4, device="cuda"), torch.ones(1, device="cuda")
        requests = Requests(virtual)

        assert requests.in_order(lambda: torch.equal(one[0, :1], other)) == [1, 1, -1, -1]
        assert requests.in_order(lambda: torch.equal(one, other)) == []
        assert requests.in_order(lambda: torch.equal(one[0], one[0])) == []


def test_logsumexp_looks_for_infinite_maxima_first() -> None:
    found = requests(aten.logsumexp.default, meta(4096, 16), [1])

    assert found == [
        16384, 16384, 4096, -4096, -16384, 262144, 16384, -262144, -16384,
    ]  # fmt: skip


def test_the_norm_of_each_column_is_staged() -> None:
    """The weight norm of a positional convolution of wav2vec 2.0."""
    assert workspaces(aten.norm.ScalarOpt_dim, meta(1024, 64, 128), 2, [0, 1], True) == (
        67108864,
        4,
    )
