"""The kernel tables: every expected number is derived by hand from the rule that it names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.cub import (
    radix_sort_bytes,
    scan_bytes,
    select_bytes,
    unique_by_key_bytes,
)
from memest.estimator.kernels.grouped_mm import grouped_mm_output
from memest.estimator.kernels.scratch import OLDEST, Scratch, scratch_of
from memest.estimator.kernels.staged import STAGED_EVENTS
from memest.estimator.kernels.tables import (
    NO_SCRATCH,
    OUTPUT_BYTES,
    SCRATCH,
    has_no_scratch,
    is_partly_modelled,
)
from memest.units import GIB

aten = torch.ops.aten


def gpu(capability: tuple[int, int] = (9, 0), num_sms: int = 132) -> Gpu:
    return Gpu(
        name="test",
        label="Test",
        memory_bytes=80 * GIB,
        capability=capability,
        num_sms=num_sms,
        memory_gb_s=4800,
        context_bytes=0,
        source="test",
    )


H200 = gpu()
A100 = gpu((8, 0), 108)
L40S = gpu((8, 9), 142)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scratch(func: torch._ops.OpOverload, *args: object, on: Gpu = H200) -> Scratch:
    events = STAGED_EVENTS.get(func)
    if events is not None:
        return scratch_of(events(args, {}, func(*args), on))
    return SCRATCH[func](args, {}, func(*args), on)


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
    found = SCRATCH[aten.sum.default]((half,), {"dtype": torch.float32}, meta(), H200)
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
    found = SCRATCH[aten.equal.default]((meta(100, 2560), meta(100, 2560)), {}, None, H200)

    assert found == Scratch(after=(256_000, 1, 32, 4))


def test_softmax_gradients_multiply_before_they_normalise() -> None:
    """SoftMax.cu: `grad * output`; log-softmax copies only what is not contiguous."""
    grad = meta(3, 5, 7)

    assert scratch(aten._softmax_backward_data.default, grad, grad, -1, torch.float32) == Scratch(
        after=(3 * 5 * 7 * 4,)
    )
    args = (meta(1).expand(5, 7), meta(5, 7), -1, torch.float32)
    assert scratch(aten._log_softmax_backward_data.default, *args).after == (5 * 7 * 4,)


def test_safe_softmax_marks_entries_and_rows() -> None:
    """One boolean per entry, one per row of 11, one zero."""
    found = scratch(aten._safe_softmax.default, meta(3, 5, 7, 11), -1)

    assert found == Scratch(after=(3 * 5 * 7 * 11, 3 * 5 * 7, 4))


def test_a_strided_input_of_a_norm_is_copied_before_the_outputs() -> None:
    strided = meta(4, 9, 24).transpose(0, 1)

    found = scratch(aten.native_layer_norm.default, strided, [24], None, None, 1e-5)

    assert found == Scratch(before=(4 * 9 * 24 * 4,))


def test_a_tall_narrow_norm_adds_its_weight_gradient_in_two_passes() -> None:
    """layer_norm_kernel.cu: 70000 > 64 Ki, 512 / 32 < 132 / 2: min(32768 / 16, 2188) = 2048.

    The second pass is sum(0) over 2048 x 512: 4 outputs per thread, block 32 x 4, 512 values,
    grid 4, min(2112 / 4, 512 / 16) = 32 blocks of 4 * 512 * 32 * 4 bytes.
    """
    rows, width = 70000, 512
    stats, weight = meta(rows, 1), meta(width)
    args = (meta(rows, width), meta(rows, width), [width], stats, stats, weight, weight, [True] * 3)

    events = STAGED_EVENTS[aten.native_layer_norm_backward.default](args, {}, None, H200)

    part, total, staged = 2048 * width * 4, width * 4, 4 * width * 32 * 32 * 4
    one = [total, staged, 16, -16, -staged, -total]
    assert [e.num_bytes for e in events] == [
        rows * width * 4, total, total, part, part, *one, *one, -part, -part
    ]  # fmt: skip
    assert [e.output for e in events if e.output is not None] == [0, 1, OLDEST, 2, OLDEST]


def test_a_norm_of_usual_shape_needs_nothing() -> None:
    rows, width = 4096, 2048
    args = (meta(rows, width), meta(rows, width), [width], meta(rows, 1), meta(width), [True] * 2)

    assert scratch(aten._fused_rms_norm_backward.default, *args) == Scratch()


def test_group_norm_keeps_float32_factors_per_channel() -> None:
    """group_norm_kernel.cu: N * C forward twice; backward three times, and N * G twice."""
    batch, channels, size, groups = 3, 8, 50, 2
    tensor = meta(batch, channels, size, dtype=torch.bfloat16)
    weight, stats = meta(channels, dtype=torch.bfloat16), meta(batch, groups, dtype=torch.bfloat16)

    forward = (tensor, weight, weight, batch, channels, size, groups, 1e-5)
    backward = (tensor, tensor, stats, stats, weight, batch, channels, size, groups, [True] * 3)

    per_channel, per_group = batch * channels * 4, batch * groups * 4
    assert scratch(aten.native_group_norm.default, *forward).after == (per_channel,) * 2
    found = scratch(aten.native_group_norm_backward.default, *backward)
    assert found.after == (per_channel, per_channel, per_group, per_group, per_channel)


def test_a_mean_squared_error_keeps_the_storage_of_its_elements() -> None:
    """Loss.cpp: the output is allocated at full size, then resized to the scalar."""
    args = (meta(64, 64), meta(64, 64), 1)
    out = aten.mse_loss.default(*args)

    assert OUTPUT_BYTES[aten.mse_loss.default](args, {}, out, H200) == [64 * 64 * 4]
    assert SCRATCH[aten.mse_loss.default](args, {}, out, H200) == Scratch(after=(64 * 64 * 4,))


def test_a_reduced_cross_entropy_of_probabilities_keeps_the_elementwise_loss() -> None:
    """Its mean is a scalar of its own, copied into the first element."""
    args = (meta(64, 64), meta(64, 64))
    out = aten.binary_cross_entropy.default(*args)

    assert OUTPUT_BYTES[aten.binary_cross_entropy.default](args, {}, out, H200) == [64 * 64 * 4]
    assert SCRATCH[aten.binary_cross_entropy.default](args, {}, out, H200) == Scratch(after=(4,))
    unreduced = (*args, None, 0)
    assert OUTPUT_BYTES[aten.binary_cross_entropy.default](unreduced, {}, out, H200) is None
    assert SCRATCH[aten.binary_cross_entropy.default](unreduced, {}, out, H200) == Scratch()


def test_indices_of_unlike_strides_are_copied_to_int64_tables() -> None:
    """`AdvancedIndex`: (5, 1) and (1, 7) broadcast to strides (1, 0) and (0, 1)."""
    rows, columns = meta(5, 1, dtype=torch.int64), meta(1, 7, dtype=torch.int64)

    found = scratch(aten.index.Tensor, meta(5, 7, dtype=torch.bool), [rows, columns])

    assert found == Scratch(before=(5 * 7 * 8, 5 * 7 * 8))
    assert scratch(aten.index.Tensor, meta(5, 7), [rows]) == Scratch()


def test_a_mask_whose_values_are_not_known_is_reported() -> None:
    args = (meta(4, 6, 3), [meta(4, 6, dtype=torch.bool)])

    assert is_partly_modelled(aten.index.Tensor, args, {}, H200)
    assert not is_partly_modelled(aten.index_put_.default, (*args, meta(1)), {}, H200)
    assert is_partly_modelled(aten.index_put_.default, (*args, meta(3)), {}, H200)


def test_masked_scatter_counts_the_mask() -> None:
    """int64 count per element, the expanded mask, and 25600 / 896 = 29 tiles: (29 + 32) * 16 B."""
    args = (meta(2, 50, 256), meta(2, 50, 1, dtype=torch.bool), meta(2, 32, 256))

    found = scratch(aten.masked_scatter.default, *args)

    assert found == Scratch(after=(25600 * 8, 25600, 1024 + 255 + 1 + 255))


def test_short_sorts_need_a_range_and_long_ones_a_radix_sort() -> None:
    """Sort.cpp: up to 4096 within a block; else range and CUB, thrice the data for several rows."""
    row = 400_000 * 8

    assert scratch(aten.sort.default, meta(4, 2048, dtype=torch.int64)).after == (2048 * 8,)
    one = scratch(aten.sort.default, meta(400_000, dtype=torch.int64)).after
    several = scratch(aten.sort.default, meta(4, 100_000, dtype=torch.int64)).after
    assert one == (row, 6_505_983)
    assert several == (row, row, row, 6_505_983)


def test_cub_storage_follows_from_tiles_and_sweeps() -> None:
    """CCCL 3.0: parts rounded to 256 B, plus 255 B.

    400000 pairs: 8 sweeps * 2048 B, ceil(400000 / 4608) = 87 KiB, two copies, counters 256 B.
    """
    assert radix_sort_bytes(400_000, H200) == 16_384 + 87 * 1024 + 2 * 3_200_000 + 256 + 255
    assert radix_sort_bytes(2048, H200) == 1
    assert radix_sort_bytes(8192, H200, num_bits=6) == 2048 + 2 * 1024 + 256 + 255
    assert scan_bytes(512_000) == 9728 + 256 + 255
    assert select_bytes(400_000, H200) == 1024 + 256 + 255
    assert unique_by_key_bytes(262_144, H200) == 1536 + 256 + 255


def test_only_a_scan_of_one_row_needs_storage() -> None:
    """ScanUtils.cuh: CUB's, or if it is deterministic 13 sums over blocks of 512 * 16 values."""
    assert scratch(aten.cumsum.default, meta(4, 100_000), -1) == Scratch()
    assert scratch(aten.cumsum.default, meta(262_144), 0) == Scratch(after=(2047,))  # an H100's
    assert scratch(aten.cumsum.default, meta(1_200_000), 0) == Scratch(after=(5887,))
    torch.use_deterministic_algorithms(True)
    try:
        assert scratch(aten.cumsum.default, meta(100_000), 0) == Scratch(after=(13 * 4,))
    finally:
        torch.use_deterministic_algorithms(False)
    assert scratch(aten.cumsum.default, meta(4, 9, dtype=torch.bool), -1).after == (36 * 8,)


def test_topk_over_a_vocabulary_shares_counts_among_blocks() -> None:
    """`mbtopk` of TensorTopK.cu; recorded on an H100, with as many multiprocessors."""
    args = (meta(4, 96000), 6)
    made = meta(4, 6), meta(4, 6, dtype=torch.int64)
    events = [e.num_bytes for e in STAGED_EVENTS[aten.topk.default](args, {}, made, H200)]

    kept = [16, 32, 32, 192512, 4096, 1504, 1504]
    assert events == [96, 192, *kept, *(1279, -1279) * 2, *(-n for n in reversed(kept))]
    few = STAGED_EVENTS[aten.topk.default]((meta(8192, 128), 8), {}, (), H200)
    assert few == ()
    assert not is_partly_modelled(aten.topk.default, args, {}, H200)
    assert is_partly_modelled(aten.topk.default, (meta(4, 96000), 2000), {}, H200)


def test_a_16_bit_convolution_rearranges_all_operands() -> None:
    """3 channels padded to 8 (16 B); output and weight likewise; 16 B more."""
    batch, out_channels, patch = 4, 1408, 14
    args = (
        meta(batch, 3, 224, 224, dtype=torch.bfloat16),
        meta(out_channels, 3, patch, patch, dtype=torch.bfloat16),
        None,
        [patch, patch], [0, 0], [1, 1], False, [0, 0], 1,
    )  # fmt: skip

    found = scratch(aten.convolution.default, *args)

    image, weight = batch * 8 * 224 * 224 * 2, out_channels * 8 * patch * patch * 2
    assert found.after == (image + weight + batch * out_channels * 16 * 16 * 2 + 16,)
    assert not is_partly_modelled(aten.convolution.default, args, {}, H200)
    assert is_partly_modelled(aten.convolution.default, args, {}, A100)


def test_a_convolution_over_time_takes_next_to_nothing() -> None:
    patches, weight = (meta(n, 3, 2, 14, 14, dtype=torch.bfloat16) for n in (40, 24))
    args = (patches, weight, None, [2, 14, 14], [0] * 3, [1] * 3, False, [0] * 3, 1)

    assert sum(scratch(aten.convolution.default, *args).after) < 512


def test_isinf_compares_the_absolute_values() -> None:
    assert scratch(aten.isinf.default, meta(3, 5, dtype=torch.float16)).before == (3 * 5 * 2,)


def test_where_casts_what_has_another_type_beside_its_result() -> None:
    """TensorCompare.cpp: 5 x 7 elements to 4 bytes each; a number of the host is copied."""
    mask, half, full = meta(5, 7, dtype=torch.bool), meta(5, 7, dtype=torch.half), meta(5, 7)

    assert scratch(aten.where.self, mask, half, full) == Scratch(before=(5 * 7 * 4,))
    assert scratch(aten.where.self, mask, full, torch.tensor(1.0)) == Scratch(before=(4,))
    assert scratch(aten.where.self, mask, full, full) == Scratch()


def test_a_number_to_the_power_of_a_tensor_is_a_tensor_first_unless_it_is_1() -> None:
    assert scratch(aten.pow.Scalar, 10000.0, meta(3)) == Scratch(after=(8,))
    assert scratch(aten.pow.Scalar, 1, meta(3)) == Scratch()


def test_norms_of_many_tensors_share_one_table_of_chunks() -> None:
    """ForeachReduceOp.cu: 2 tensors * ceil(524288 / 65536) chunks * 4 B."""
    tensors = [meta(524_288, dtype=torch.bfloat16), meta(3, dtype=torch.bfloat16)]

    assert scratch(aten._foreach_norm.Scalar, tensors) == Scratch(before=(2 * 8 * 4,))


@pytest.mark.parametrize(
    "func",
    [
        aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.add.Tensor,
        aten.gelu.default, aten.zeros_like.default, aten.cat.default,
        aten._foreach_sqrt.default, aten._foreach_addcdiv_.ScalarList, aten.copy_.default,
        aten.mm.default, aten.glu.default, aten._local_scalar_dense.default,
    ],
)  # fmt: skip
def test_views_elementwise_ops_and_copies_have_no_scratch(func: torch._ops.OpOverload) -> None:
    assert has_no_scratch(func)


def test_an_op_that_nobody_compared_is_not_called_scratch_free() -> None:
    for func in (aten.median.default, aten._unique2.default, aten._foreach_max.default):
        assert not has_no_scratch(func)
        assert func not in SCRATCH


def test_no_op_is_both_free_of_scratch_and_in_the_table() -> None:
    assert not any(has_no_scratch(func) for func in SCRATCH)
    assert all(hasattr(aten, name.partition(".")[0]) for name in NO_SCRATCH)


def test_a_histogram_between_given_bounds_counts_in_shared_memory() -> None:
    """SummaryOps.cu: equal bounds are first looked for, which is not modelled."""
    experts = meta(4096, dtype=torch.int32)

    assert SCRATCH[aten.histc.default]((experts, 128, 0, 127), {}, meta(128), H200) == Scratch()
    assert not is_partly_modelled(aten.histc.default, (experts, 128, 0, 127), {}, H200)
    assert is_partly_modelled(aten.histc.default, (experts, 128), {}, H200)


def test_experts_multiply_at_once_on_hopper_and_one_by_one_elsewhere() -> None:
    """GroupMM.cu: pointers, int32 sizes and strides of 3 groups, and descriptors as recorded on
    132 multiprocessors; a loop of `mm` has none.
    """
    tokens, weights = meta(64, 16, dtype=torch.bfloat16), meta(3, 16, 24, dtype=torch.bfloat16)
    args = (tokens, weights, meta(3, dtype=torch.int32))
    out = meta(64, 24, dtype=torch.bfloat16)

    fused = SCRATCH[aten._grouped_mm.default](args, {}, out, H200)

    assert fused == Scratch(after=(3 * 8 * 4 + 3 * 12 + 3 * 8 * 3, 67_584))
    assert not is_partly_modelled(aten._grouped_mm.default, args, {}, H200)
    assert SCRATCH[aten._grouped_mm.default](args, {}, out, A100) == Scratch()
    assert not is_partly_modelled(aten._grouped_mm.default, args, {}, A100)


def test_the_result_of_experts_has_rows_of_whole_vectors() -> None:
    """16 bytes are 4 floats: rows of 25 are 28 apart; both factors of 2 dimensions stay grouped."""
    offsets = meta(3, dtype=torch.int32)

    rows = grouped_mm_output((meta(64, 16), meta(3, 16, 25), offsets), {})
    weights = grouped_mm_output((meta(16, 64), meta(64, 25), offsets), {})

    assert (rows.shape, rows.stride()) == ((64, 25), (28, 1))
    assert (weights.shape, weights.stride()) == ((3, 16, 25), (16 * 28, 28, 1))


def test_a_running_product_of_a_row_is_scanned_by_cub() -> None:
    """As recorded on an H100 for the 1,000 betas of a diffusion; rows beside it need nothing."""
    assert scratch(aten.cumprod.default, meta(1000), 0) == Scratch(after=(1023,))
    assert scratch(aten.cumprod.default, meta(2, 1000), 1) == Scratch(after=())


def test_the_modulus_of_complex_numbers_is_complex_first() -> None:
    numbers = meta(24, 201, 601, dtype=torch.complex64)

    assert scratch(aten.abs.default, numbers) == Scratch(after=(8 * numbers.numel(),))
    assert scratch(aten.abs.default, meta(4, 4)) == Scratch()


@pytest.mark.parametrize(
    ("steps", "zero_infinity", "expected"),
    [
        # recorded on an H100: 24 samples, 32 classes, targets of up to 79 tokens
        (
            597,
            True,
            [
                *(192, 192, 192, 9112608, 1833984, 4584960, 57312, 57312, 14328, -14328, -57312),
                *(4584960, 57312, -4584960, -57312, -57312, -4584960, 4, 24, 1833984, -24, -4),
                *(-1833984, -9112608, -192, -192, -192),
            ],
        ),
        # 2 * 190 + 24 * 24 // 10 + 2 * 32 // 10 is 443, of at most 450
        (190, True, [192, 192, 192, 2900160, 583680, -2900160, -192, -192, -192]),
    ],
)
def test_a_long_ctc_loss_sums_over_blanks_apart(
    steps: int, zero_infinity: bool, expected: list[int]
) -> None:
    log_probs, alphas = meta(steps, 24, 32), meta(24, steps, 159)
    args = (None, log_probs, None, None, None, meta(24), alphas, 0, zero_infinity)
    events = STAGED_EVENTS[aten._ctc_loss_backward.default](args, {}, log_probs, H200)

    assert [event.num_bytes for event in events] == expected
