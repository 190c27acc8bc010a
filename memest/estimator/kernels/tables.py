"""What each CUDA kernel allocates beside, or unlike, the outputs of its meta kernel.

`SCRATCH` gives the temporaries of an op, `has_no_scratch` names the ops that have none, and
`OUTPUT_BYTES` the outputs whose sizes on CUDA differ from those on meta. An op in none of these is
reported as not modelled; so is a call for which `is_partly_modelled` is true. Attention, matrix
products and kernels that work in stages have tables of their own.

Evidence: 95,900 ops recorded on an H200 (torch 2.11+cu130, cuDNN 9.19), in fp32, fp16, bf16 and
mixed precision. Outputs and temporaries at the peak agree exactly, but for the calls that
`is_partly_modelled` names and ops without a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.batch_norm import (
    batch_norm_backward_scratch,
    batch_norm_is_modelled,
    batch_norm_scratch,
    native_batch_norm_scratch,
    statistics_gradient_scratch,
    statistics_scratch,
)
from memest.estimator.kernels.convolution import (
    convolution_is_modelled,
    copies_in,
)
from memest.estimator.kernels.cublas import MATMULS
from memest.estimator.kernels.draws import DRAWS_MODELLED_WHERE
from memest.estimator.kernels.grouped_mm import grouped_mm_is_modelled, grouped_mm_scratch
from memest.estimator.kernels.indexing import (
    contiguous_copy,
    cumprod_scratch,
    cumsum_scratch,
    embedding_scratch,
    index_put_scratch,
    index_scratch,
    indexing_is_modelled,
    isin_is_modelled,
    isin_scratch,
    masked_scatter_scratch,
    renorm_is_modelled,
    sort_is_modelled,
    sort_scratch,
    topk_is_modelled,
    where_scratch,
)
from memest.estimator.kernels.losses import (
    LOSS_OUTPUTS,
    LOSS_SCRATCH,
    LOSSES_WITHOUT_SCRATCH,
)
from memest.estimator.kernels.packing import chunk_cat_scratch, split_with_sizes_copy_scratch
from memest.estimator.kernels.recurrent import recurrent_is_modelled
from memest.estimator.kernels.reductions import (
    accumulator_bytes_of,
    equal_scratch,
    extreme_scratch,
    indexed_extreme_scratch,
    norm_scratch,
    product_scratch,
    sum_all_scratch,
    sum_dims_scratch,
    variance_scratch,
)
from memest.estimator.kernels.scratch import Scratch, bytes_of
from memest.estimator.kernels.staged import STAGED_MODELLED_WHERE
from memest.estimator.kernels.windows import (
    WINDOW_MODELLED_WHERE,
    WINDOW_SCRATCH,
    WINDOWS_WITHOUT_SCRATCH,
)

TARGET_TORCH = (2, 11)
"""The torch release whose CUDA behaviour the kernel tables mirror, and with which runs were
measured.
"""

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
ScratchRule = Callable[[Args, Kwargs, Any, Gpu], Scratch]
OutputRule = Callable[[Args, Kwargs, Any, Gpu], list[int] | None]

MAX_SHARED_BINS = 48 * 1024 // 8 - 1
"""Bins of up to 8 bytes in the 48 KiB of shared memory that any block has."""

FOREACH_CHUNK = 65536
"""`kChunkSize` of MultiTensorApply.cuh."""


def input_copy_before(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """A contiguous copy of the first argument, made before the outputs (layer_norm_kernel.cu)."""
    return Scratch(before=contiguous_copy(args[0]))


def as_complex_first(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Of complex numbers the result is complex first (`unary_op_impl_with_complex_to_float_out` of
    UnaryOps.cpp), and its real part is copied.
    """
    tensor = args[0]
    return Scratch(after=(bytes_of(tensor),) if tensor.is_complex() else ())


def input_copy_after(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """A contiguous copy of the first argument, made after the outputs.

    SoftMax.cu, UpSampleBicubic2d.cu.
    """
    return Scratch(after=contiguous_copy(args[0]))


def two_inputs_copy_after(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """Contiguous copies of the first two arguments, made after the outputs (SoftMax.cu)."""
    return Scratch(after=contiguous_copy(args[0], args[1]))


def pooling_copy_after(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """A copy of an input that is dense neither in NCHW nor in channels-last (AveragePool2d.cu)."""
    return Scratch(after=copies_in(suggest_memory_format(args[0]), args[0]))


def pooling_gradient_copies(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """The gradient that comes in and the input, in the input's memory format, after the outputs.

    AveragePool2d.cu, AdaptiveAveragePooling.cu, DilatedMaxPool2d.cu.
    """
    return Scratch(after=copies_in(suggest_memory_format(args[1]), args[0], args[1]))


def power_of_scalar_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`pow_Scalar_out` of Pow.cpp: the base as a tensor, of fp64 or int64, unless it is 1."""
    return Scratch() if args[0] == 1 else Scratch(after=(8,))


def softmax_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`softmax_backward_cuda_out` of SoftMax.cu: the product `grad * output`, and of it and the
    output what is not contiguous.
    """
    product = args[0] * args[1]
    return Scratch(after=(bytes_of(product), *contiguous_copy(product, args[1])))


def safe_softmax_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`_safe_softmax` of transformers/attention.cpp: which entries and rows are -inf, a zero."""
    tensor, dim = args[0], args[1]
    rows = tensor.numel() // max(1, tensor.shape[dim])
    return Scratch(after=(tensor.numel(), rows, out.itemsize))


def group_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`native_group_norm`: scale and shift of each channel of each sample, N * C accumulators each.

    group_norm_kernel.cu; none without weight and bias or with one element per channel.
    """
    tensor, weight, bias, batch, channels, size = args[:6]
    copies = contiguous_copy(tensor)
    if size == 1 or (weight is None and bias is None):
        return Scratch(before=copies)
    per_channel = batch * channels * accumulator_bytes_of(tensor.dtype)
    return Scratch(before=copies, after=(per_channel, per_channel))


def group_norm_backward_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`native_group_norm_backward`: two sums per channel, and three factors for the input gradient.

    group_norm_kernel.cu: `ds`, `db` and, with a weight, `c1` of N * C; `c2` and `c3` of N * G.
    """
    tensor, weight = args[1], args[4]
    batch, channels, size, groups = args[5:9]
    acc = accumulator_bytes_of(tensor.dtype)
    per_channel, per_group = batch * channels * acc, batch * groups * acc
    if size == 1:
        return Scratch(after=(per_group, per_group) if args[9][0] else ())
    after = (per_channel, per_channel)
    if args[9][0]:
        after += (per_group, per_group) + ((per_channel,) if weight is not None else ())
    return Scratch(after=after)


def log_sigmoid_outputs(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> list[int]:
    """`log_sigmoid_forward_cuda` (native/cuda/Activation.cpp): the buffer is the CPU kernel's."""
    return [out[0].numel() * out[0].itemsize, 0]


def scatter_reduce_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`scatter_reduce` (TensorAdvancedIndexing.cpp): a mean counts what it adds, in ones like the
    source and like the result, and looks for zeros.
    """
    if args[4] != "mean":
        return Scratch()
    source = args[3]
    return Scratch(
        after=(source.numel() * source.itemsize, out.numel() * out.itemsize, out.numel())
    )


def histogram_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`histc` of SummaryOps.cu between given bounds: counts that fit the shared memory."""
    return Scratch()


def histogram_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the bounds differ, else torch looks for the extremes, and the bins are not many."""
    bins, low, high = (
        args[i] if len(args) > i else kwargs.get(name, default)
        for i, name, default in ((1, "bins", 100), (2, "min", 0), (3, "max", 0))
    )
    return bool(low != high and bins <= MAX_SHARED_BINS)


def foreach_norm_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`_foreach_norm` of ForeachReduceOp.cu: one accumulator per tensor and chunk of the largest.

    ::

        len(tensors) * max(ceil(numel / 65536)) * accumulator bytes
    """
    tensors = args[0]
    if not tensors:
        return Scratch()
    chunks = max(-(-t.numel() // FOREACH_CHUNK) for t in tensors)
    accumulator = accumulator_bytes_of(tensors[0].dtype)
    return Scratch(before=(len(tensors) * chunks * accumulator,))


def isinf_scratch(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Scratch:
    """`isinf` of TensorCompare.cpp: `abs() == inf`, with the absolute values as a tensor."""
    tensor = args[0]
    if not tensor.dtype.is_floating_point:
        return Scratch()
    return Scratch(before=(tensor.numel() * tensor.itemsize,))


SCRATCH: dict[OpOverload, ScratchRule] = {
    aten.sum.default: sum_all_scratch,
    aten.sum.dim_IntList: sum_dims_scratch,
    aten.nansum.default: sum_dims_scratch,
    aten.mean.default: sum_all_scratch,
    aten.mean.dim: sum_dims_scratch,
    aten.prod.default: product_scratch,
    aten.prod.dim_int: product_scratch,
    aten.linalg_vector_norm.default: norm_scratch,
    aten.norm.ScalarOpt_dim: norm_scratch,
    aten.amax.default: extreme_scratch,
    aten.amin.default: extreme_scratch,
    aten.max.default: extreme_scratch,
    aten.min.default: extreme_scratch,
    aten.any.default: extreme_scratch,
    aten.any.dim: extreme_scratch,
    aten.any.dims: extreme_scratch,
    aten.all.default: extreme_scratch,
    aten.all.dim: extreme_scratch,
    aten.all.dims: extreme_scratch,
    aten._is_all_true.default: extreme_scratch,
    aten._is_any_true.default: extreme_scratch,
    aten.max.dim: indexed_extreme_scratch,
    aten.min.dim: indexed_extreme_scratch,
    aten.argmax.default: indexed_extreme_scratch,
    aten.argmin.default: indexed_extreme_scratch,
    aten.std.correction: variance_scratch,
    aten.var.correction: variance_scratch,
    aten.var_mean.correction: variance_scratch,
    aten.std_mean.correction: variance_scratch,
    aten.equal.default: equal_scratch,
    aten.isinf.default: isinf_scratch,
    aten.split_with_sizes_copy.out: split_with_sizes_copy_scratch,
    aten._chunk_cat.out: chunk_cat_scratch,
    aten.pow.Scalar: power_of_scalar_scratch,
    aten._softmax.default: input_copy_after,
    aten._log_softmax.default: input_copy_after,
    aten._safe_softmax.default: safe_softmax_scratch,
    aten._softmax_backward_data.default: softmax_backward_scratch,
    aten._log_softmax_backward_data.default: two_inputs_copy_after,
    aten.native_layer_norm.default: input_copy_before,
    aten._fused_rms_norm.default: input_copy_before,
    aten.native_group_norm.default: group_norm_scratch,
    aten.native_group_norm_backward.default: group_norm_backward_scratch,
    aten.embedding.default: embedding_scratch,
    aten.index.Tensor: index_scratch,
    aten.index_put.default: index_put_scratch,
    aten.index_put_.default: index_put_scratch,
    aten._index_put_impl_.default: index_put_scratch,
    aten._unsafe_index_put.default: index_put_scratch,
    aten.masked_scatter.default: masked_scatter_scratch,
    aten.masked_scatter_.default: masked_scatter_scratch,
    aten.sort.default: sort_scratch,
    aten.sort.stable: sort_scratch,
    aten.isin.Tensor_Tensor: isin_scratch,
    aten.cumsum.default: cumsum_scratch,
    aten.cumprod.default: cumprod_scratch,
    aten.where.self: where_scratch,
    aten.abs.default: as_complex_first,
    aten.angle.default: as_complex_first,
    aten.native_batch_norm.default: native_batch_norm_scratch,
    aten.batch_norm_stats.default: statistics_scratch,
    aten.batch_norm_backward_reduce.default: statistics_gradient_scratch,
    aten.cudnn_batch_norm.default: batch_norm_scratch,
    aten.cudnn_batch_norm_backward.default: batch_norm_backward_scratch,
    aten.upsample_bicubic2d_backward.default: input_copy_after,
    aten.scatter_reduce.two: scatter_reduce_scratch,
    aten.avg_pool2d.default: pooling_copy_after,
    aten.avg_pool2d_backward.default: pooling_gradient_copies,
    aten._adaptive_avg_pool2d_backward.default: pooling_gradient_copies,
    aten.max_pool2d_with_indices_backward.default: pooling_gradient_copies,
    aten._foreach_norm.Scalar: foreach_norm_scratch,
    aten.histc.default: histogram_scratch,
    aten._grouped_mm.default: grouped_mm_scratch,
    **LOSS_SCRATCH,
    **WINDOW_SCRATCH,
}
"""Temporaries of each op: `(args, kwargs, out, gpu) -> Scratch`."""


OUTPUT_BYTES: dict[OpOverload, OutputRule] = {
    **LOSS_OUTPUTS,
    aten.log_sigmoid_forward.default: log_sigmoid_outputs,
}
"""Requested bytes of each output on CUDA, in the order of the outputs; None where meta is right."""

ModelledRule = Callable[[OpOverload, Args, Kwargs, Gpu], bool]

MODELLED_WHERE: dict[OpOverload, ModelledRule] = {
    aten.convolution.default: convolution_is_modelled,
    aten.convolution_backward.default: convolution_is_modelled,
    aten.cudnn_batch_norm.default: batch_norm_is_modelled,
    aten.cudnn_batch_norm_backward.default: batch_norm_is_modelled,
    aten.native_batch_norm.default: batch_norm_is_modelled,
    aten.native_batch_norm_backward.default: batch_norm_is_modelled,
    aten.index.Tensor: indexing_is_modelled,
    aten.index_put.default: indexing_is_modelled,
    aten.index_put_.default: indexing_is_modelled,
    aten._index_put_impl_.default: indexing_is_modelled,
    aten._unsafe_index_put.default: indexing_is_modelled,
    aten.sort.default: sort_is_modelled,
    aten.sort.stable: sort_is_modelled,
    aten.topk.default: topk_is_modelled,
    aten.isin.Tensor_Tensor: isin_is_modelled,
    aten.embedding_renorm_.default: renorm_is_modelled,
    aten.histc.default: histogram_is_modelled,
    aten._grouped_mm.default: grouped_mm_is_modelled,
    aten._cudnn_rnn.default: recurrent_is_modelled,
    **DRAWS_MODELLED_WHERE,
    **STAGED_MODELLED_WHERE,
    **WINDOW_MODELLED_WHERE,
}
"""Ops of which some calls only are modelled, with the rule that tells which."""


def is_partly_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether `func` may allocate more than `SCRATCH` says for these arguments: report the call."""
    rule = MODELLED_WHERE.get(func)
    return rule is not None and not rule(func, args, kwargs, gpu)


_FACTORIES = (
    "arange empty empty_like empty_strided eye full full_like linspace new_empty new_empty_strided "
    "new_full new_ones new_zeros ones ones_like rand rand_like randint randint_like randn "
    "randn_like scalar_tensor zeros zeros_like"
)
_COPIES = (
    "_to_copy _unsafe_view as_strided_ bernoulli_ cat clone constant_pad_nd copy copy_ "
    "exponential_ fill fill_ flip floor_divide lift_fresh normal_ random_ repeat "
    "select_backward set_ slice_backward stack tril tril_ triu triu_ uniform_ zero_"
)
_LOOKUPS = (
    "gather index_add index_add_ index_select masked_fill masked_fill_ scatter scatter_ "
    "scatter_add scatter_add_"
)
_NEURAL = (
    "native_dropout_backward "
    "mse_loss_backward binary_cross_entropy_backward glu glu_backward upsample_bicubic2d "
    "_adaptive_avg_pool2d max_pool2d_with_indices hardtanh_backward leaky_relu_backward "
    "batch_norm_elemt batch_norm_gather_stats_with_counts batch_norm_backward_elemt "
    "isin.Tensor_Scalar"
)
_ACTIVATIONS = (
    "softplus_backward hardswish hardswish_backward elu_backward leaky_relu_backward "
    "rrelu_with_noise rrelu_with_noise_backward softshrink_backward hardshrink_backward "
    "hardtanh_backward hardsigmoid_backward _prelu_kernel _prelu_kernel_backward "
    "log_sigmoid_forward log_sigmoid_backward grid_sampler_2d grid_sampler_2d_backward "
    "pixel_shuffle pixel_unshuffle channel_shuffle replication_pad2d replication_pad2d_backward "
    "nll_loss2d_forward nll_loss2d_backward _weight_norm_interface _weight_norm_interface_backward"
)
_SELECTIONS = (
    "kthvalue mode nanmedian index_fill index_fill_ index_copy index_copy_ unsafe_split "
    "unsafe_split_with_sizes tril_indices triu_indices linalg_cross addbmm "
    "unsqueeze_ squeeze_ transpose_ t_ median.dim bernoulli.p cummax cummin take put put_ aminmax "
    "mish_backward _fused_adagrad_ diag_embed diagonal_copy diagonal_backward rot90"
)
_STEPS = (
    "_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _fused_adam_ _fused_adamw_ "
    "_fused_sgd_ _local_scalar_dense is_nonzero"
)

NO_SCRATCH: frozenset[str] = frozenset(
    " ".join(
        (
            _FACTORIES,
            _COPIES,
            _LOOKUPS,
            _NEURAL,
            _ACTIVATIONS,
            _SELECTIONS,
            _STEPS,
            LOSSES_WITHOUT_SCRATCH,
            WINDOWS_WITHOUT_SCRATCH,
        )
    ).split()
)
"""Names of aten ops, all overloads unless one is named, whose CUDA kernels allocate their outputs
only.

Recorded without a temporary on an H200, or a sibling (in-place form, other distribution, other
optimizer) of a recorded op that runs the same kind of kernel.
"""

_COMPOSED = frozenset(("frexp", "ldexp", "ldexp_", "mvlgamma", "mvlgamma_"))
"""Elementwise by tag, but made of several kernels: not compared."""

_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
_FOREACH_MAXIMUM = "_foreach_maximum"


@cache
def has_no_scratch(func: OpOverload) -> bool:
    """Whether CUDA is known to allocate the outputs of `func` and nothing else.

    The profiler's marks; collectives and what stands for transfers, whose buffers are its own;
    views; elementwise ops by torch's own tag (TensorIterator casts inside the kernel);
    `_foreach_*`, except reductions; the matrix products, whose workspaces `cublas` models; and
    `NO_SCRATCH`.
    """
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten" or func in SCRATCH or name in _COMPOSED:
        return namespace in ("profiler", "_c10d_functional")
    if func.is_view or torch.Tag.pointwise in func.tags or func in MATMULS:
        return True
    if name.startswith("_foreach_"):
        is_reduction = name.startswith(_FOREACH_REDUCTIONS)
        return not is_reduction or name.startswith(_FOREACH_MAXIMUM)
    return name in NO_SCRATCH or f"{name}.{func._schema.overload_name}" in NO_SCRATCH
