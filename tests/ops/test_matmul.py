"""Matrix products: workspaces and copies of cuBLAS, and the experts of a mixture by generation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.matmul import (
    LT_WORKSPACE_BYTES,
    CublasWorkspaces,
    cublas_workspace_bytes,
)
from memest.estimator.ops.registry import op_of
from memest.estimator.ops.temporaries import Scratch
from memest.estimator.versions import TorchRelease, find_release, simulating
from memest.estimator.virtual_gpu import VirtualGpu
from tests.op_calls import A100, H100, H200, meta, requested, result_of

aten = torch.ops.aten
TORCH_2_11, TORCH_2_12, TORCH_2_15 = map(find_release, ("2.11", "2.12", "2.15"))

GROUPS, ROWS, D, F = 3, 64, 16, 24


def bfloat16(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.bfloat16)


def operators(name: str) -> list[str]:
    """Of a product through transformers and its backward on the virtual GPU."""
    from transformers.integrations import moe

    with VirtualGpu(find_gpu(name)) as gpu:
        left = torch.empty(ROWS, D, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        right = torch.empty(GROUPS, D, F, dtype=torch.bfloat16, device="cuda")
        offsets = torch.zeros(GROUPS, dtype=torch.int32, device="cuda")
        out = moe._grouped_mm(left, right, offsets)
        torch.autograd.grad(out, left, torch.empty_like(out))
        return [site.op for site in gpu.mode.memory.storages.sites]


@pytest.mark.parametrize(
    ("name", "is_modelled"),
    [("a100-80gb", True), ("l4", True), ("rtx-5090", True), ("h100-80gb", True), ("b200", False)],
)
def test_a_kernel_that_was_not_recorded_is_reported(name: str, is_modelled: bool) -> None:
    args = (bfloat16(ROWS, D), bfloat16(GROUPS, D, F), meta(GROUPS, dtype=torch.int32))
    func = torch.ops.aten._grouped_mm.default

    assert op_of(func).is_modelled(args, {}, find_gpu(name)) is is_modelled


@pytest.mark.parametrize("name", ["v100-32gb", "t4"])
def test_before_ampere_transformers_multiplies_expert_by_expert(name: str) -> None:
    """Forward: the result. Backward: gradients of rows and of weights, wanted or not."""
    made = [op for op in operators(name) if "zeros" in op]

    _offsets, *of_products = made
    assert of_products == ["aten.zeros", "aten.zeros_like", "aten.zeros_like"]


def test_from_ampere_on_torch_is_asked() -> None:
    assert "aten._grouped_mm" in operators("a100-80gb")


def test_experts_multiply_at_once_on_hopper_and_one_by_one_elsewhere() -> None:
    """GroupMM.cu: pointers, int32 sizes and strides of 3 groups, and descriptors as recorded on
    132 multiprocessors; a loop of `mm` has none.
    """
    tokens, weights = meta(64, 16, dtype=torch.bfloat16), meta(3, 16, 24, dtype=torch.bfloat16)
    args = (tokens, weights, meta(3, dtype=torch.int32))
    out = meta(64, 24, dtype=torch.bfloat16)

    fused = requested(aten._grouped_mm.default, args, {}, out, H200)

    assert fused == Scratch(after=(3 * 8 * 4 + 3 * 12 + 3 * 8 * 3, 67_584))
    assert op_of(aten._grouped_mm.default).is_modelled(args, {}, H200)
    assert requested(aten._grouped_mm.default, args, {}, out, A100) == Scratch()
    assert op_of(aten._grouped_mm.default).is_modelled(args, {}, A100)


def test_the_result_of_experts_has_rows_of_whole_vectors() -> None:
    """16 bytes are 4 floats: rows of 25 are 28 apart; both factors of 2 dimensions stay grouped."""
    offsets = meta(3, dtype=torch.int32)

    rows = result_of(aten._grouped_mm.default, meta(64, 16), meta(3, 16, 25), offsets)
    weights = result_of(aten._grouped_mm.default, meta(16, 64), meta(64, 25), offsets)

    assert (rows.shape, rows.stride()) == ((64, 25), (28, 1))
    assert (weights.shape, weights.stride()) == ((3, 16, 25), (16 * 28, 28, 1))


# ------------------------------------------------------------------------ cuBLAS

HOPPER, AMPERE = (9, 0), (8, 0)
MAIN, SIDE, BACKWARD = ("main", 0), ("main", 3), ("backward", 0)
BIG, SMALL, LT = 32 * 2**20, 8519680, 2**20


def on_hopper(release: TorchRelease) -> CublasWorkspaces:
    with simulating(release.name):
        return CublasWorkspaces(HOPPER)


def after_first_use(release: TorchRelease = TORCH_2_11) -> CublasWorkspaces:
    """A process on a Hopper whose main thread has multiplied once."""
    workspaces = on_hopper(release)
    workspaces.bytes_for(aten.mm.default, (meta(4, 8), meta(8, 16)), {}, MAIN)
    return workspaces


@pytest.mark.parametrize(
    ("capability", "release", "num_bytes"),
    [
        ((9, 0), TORCH_2_11, 8 * 4096 * 1024),
        ((8, 0), TORCH_2_11, (2 * 4096 + 8 * 16) * 1024),
        ((7, 5), TORCH_2_11, SMALL),
        ((10, 0), TORCH_2_11, SMALL),
        ((12, 0), TORCH_2_11, SMALL),
        ((9, 0), TORCH_2_12, BIG),
        ((10, 0), TORCH_2_12, BIG),
        ((12, 0), TORCH_2_12, BIG),
        ((8, 9), TORCH_2_12, SMALL),
    ],
)
def test_the_workspace_depends_on_the_gpu_and_the_torch_version(
    capability, release, num_bytes
) -> None:
    assert cublas_workspace_bytes(capability, release) == num_bytes


def test_a_thread_gets_a_workspace_once_for_each_stream() -> None:
    workspaces = CublasWorkspaces(HOPPER)
    args = (meta(4, 8), meta(8, 16))
    callers = [MAIN, MAIN, BACKWARD, MAIN, SIDE, BACKWARD, SIDE]
    kept = [workspaces.bytes_for(aten.mm.default, args, {}, c)[0] for c in callers]
    assert kept == [(BIG,), (), (BIG,), (), (BIG,), (), ()]


def test_the_workspace_is_smaller_before_hopper() -> None:
    args = (meta(2, 4, 8), meta(2, 8, 16))
    got = CublasWorkspaces(AMPERE).bytes_for(aten.bmm.default, args, {}, MAIN)
    assert got == ((SMALL,), ())


def test_a_first_linear_with_bias_takes_both_workspaces() -> None:
    args = (meta(16), meta(4, 8), meta(16, 8).t())
    workspaces = CublasWorkspaces(HOPPER)
    assert workspaces.bytes_for(aten.addmm.default, args, {}, MAIN) == ((BIG, LT), ())
    assert workspaces.bytes_for(aten.addmm.default, args, {}, MAIN) == ((), ())
    assert workspaces.bytes_for(aten.addmm.default, args, {}, BACKWARD) == ((BIG, LT), ())
    assert LT_WORKSPACE_BYTES == LT


def test_torch_2_15_frees_the_workspace_of_each_call() -> None:
    """`getCurrentCUDABlasHandleWithWorkspace`; cuBLASLt has a workspace of its own."""
    workspaces = on_hopper(TORCH_2_15)
    product = (meta(4, 8), meta(8, 16))
    linear = (meta(16), meta(4, 8), meta(16, 8).t())
    for _ in range(2):
        assert workspaces.bytes_for(aten.mm.default, product, {}, MAIN) == ((), (BIG,))
        assert workspaces.bytes_for(aten.addmm.default, linear, {}, MAIN) == ((), (LT,))


@pytest.mark.parametrize(
    ("release", "environment", "product", "linear"),
    [
        (TORCH_2_11, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, [SMALL], [LT]),
        (TORCH_2_11, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, [], [LT]),
        (TORCH_2_11, {"CUBLAS_WORKSPACE_CONFIG": "none"}, [BIG], [LT]),
        (TORCH_2_11, {"CUBLASLT_WORKSPACE_SIZE": "2048"}, [BIG], [2 * LT]),
        (TORCH_2_11, {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, [BIG], []),
        (TORCH_2_11, {"TORCH_CUBLAS_WORKSPACE_CACHE": "0"}, [BIG], [LT]),
        (TORCH_2_11, {"DISABLE_ADDMM_CUDA_LT": "1"}, [BIG], []),
        (TORCH_2_12, {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, [BIG], [LT]),
        (TORCH_2_15, {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}, [BIG], []),
    ],
)
def test_environment_variables_change_the_kept_workspaces(
    release, environment, product, linear, monkeypatch
) -> None:
    workspaces = on_hopper(release)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # torch reads the variables at the first product
    args = (meta(4, 8), meta(8, 16))
    kept, _ = workspaces.bytes_for(aten.mm.default, args, {}, MAIN)
    assert list(kept) == product
    kept, _ = workspaces.bytes_for(aten.addmm.default, (meta(16), *args), {}, MAIN)
    assert list(kept) == linear


def test_the_workspace_of_cublaslt_comes_with_the_first_bias_not_the_first_product() -> None:
    args = (meta(16), meta(4, 8), meta(8, 16))
    assert after_first_use().bytes_for(aten.addmm.default, args, {}, MAIN) == ((LT,), ())


def test_a_product_of_one_row_calls_cublaslt() -> None:
    """The first layer of MUNIT, 1 x 8 by 8 x 256, did so on an H200."""
    args = (meta(256), meta(1, 8), meta(8, 256))
    assert after_first_use().bytes_for(aten.addmm.default, args, {}, MAIN) == ((LT,), ())


def test_newer_torch_shares_one_workspace() -> None:
    args = (meta(16), meta(4, 8), meta(8, 16))
    assert after_first_use(TORCH_2_12).bytes_for(aten.addmm.default, args, {}, MAIN) == ((), ())


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((meta(4, 16), meta(4, 8), meta(8, 16)), {}),  # a matrix is no bias
        ((meta(16), meta(4, 8), meta(8, 16)), {"beta": 2}),
        ((meta(1), meta(4, 8), meta(8, 16)), {}),  # broadcast along the row
        ((meta(16, 2)[:, 0], meta(4, 8), meta(8, 16)), {}),  # not contiguous
        ((meta(1), meta(4, 8), meta(8, 1)), {}),  # one column
        ((meta(16), meta(4, 1), meta(1, 16)), {}),  # nothing to sum
    ],
)
def test_addmm_without_a_fusable_bias_does_without_cublaslt(args, kwargs) -> None:
    assert after_first_use().bytes_for(aten.addmm.default, args, kwargs, MAIN) == ((), ())


def test_an_expanded_gradient_is_copied_for_the_length_of_the_op() -> None:
    grad = meta().expand(100, 50304)  # as the backward of `sum` gives it
    args = (grad, meta(50304, 8))
    got = after_first_use().bytes_for(aten.mm.default, args, {}, MAIN)
    assert got == ((), (100 * 50304 * 4,))


def test_both_factors_are_copied_the_second_one_first() -> None:
    args = (meta().expand(4, 8), meta().expand(8, 16))
    got = after_first_use().bytes_for(aten.mm.default, args, {}, MAIN)
    assert got == ((), (8 * 16 * 4, 4 * 8 * 4))


def test_a_half_precision_copy_takes_half() -> None:
    args = (meta(dtype=torch.bfloat16).expand(4, 8), meta(8, 16, dtype=torch.bfloat16))
    got = after_first_use().bytes_for(aten.mm.default, args, {}, MAIN)
    assert got == ((), (4 * 8 * 2,))


@pytest.mark.parametrize(
    "factor",
    [meta(4, 8), meta(8, 4).t(), meta(4, 24)[:, :8], meta(8, 12).t()[:4]],
    ids=["rows", "transposed", "slice of columns", "slice of rows, transposed"],
)
def test_a_factor_with_one_unit_stride_is_read_in_place(factor) -> None:
    args = (factor, meta(8, 16))
    assert after_first_use().bytes_for(aten.mm.default, args, {}, MAIN) == ((), ())


def test_a_factor_without_a_unit_stride_is_copied() -> None:
    args = (meta(4, 16)[:, ::2], meta(8, 16))
    got = after_first_use().bytes_for(aten.mm.default, args, {}, MAIN)
    assert got == ((), (4 * 8 * 4,))


def test_a_batch_of_heads_permuted_out_of_the_middle_is_read_in_place() -> None:
    heads = meta(10, 3, 64).permute(1, 0, 2)  # (heads, tokens, width)
    args = (heads, heads.transpose(1, 2))
    assert after_first_use().bytes_for(aten.bmm.default, args, {}, MAIN) == ((), ())


def test_a_batch_whose_matrices_have_no_unit_stride_is_copied() -> None:
    batch = meta(10, 64, 3).permute(2, 0, 1)  # the batch is the innermost dim
    got = after_first_use().bytes_for(aten.bmm.default, (batch, meta(3, 64, 5)), {}, MAIN)
    assert got == ((), (3 * 10 * 64 * 4,))


def test_baddbmm_prepares_its_factors_not_its_summand() -> None:
    args = (meta().expand(3, 4, 16), meta().expand(3, 4, 8), meta(3, 8, 16))
    got = after_first_use().bytes_for(aten.baddbmm.default, args, {}, MAIN)
    assert got == ((), (3 * 4 * 8 * 4,))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (meta(0, 8), meta(8, 16))),
        (aten.mm.default, (meta(4, 0), meta(0, 16))),
        (aten.bmm.default, (meta(0, 4, 8), meta(0, 8, 16))),
        (aten.addmm.default, (meta(16), meta(0, 8), meta(8, 16))),
    ],
)
def test_an_empty_product_never_reaches_cublas(func, args) -> None:
    workspaces = CublasWorkspaces(HOPPER)
    assert workspaces.bytes_for(func, args, {}, MAIN) == ((), ())
    args = (meta(4, 8), meta(8, 16))
    assert workspaces.bytes_for(aten.mm.default, args, {}, MAIN) == ((BIG,), ())


def test_other_ops_take_nothing() -> None:
    got = CublasWorkspaces(HOPPER).bytes_for(aten.add.Tensor, (meta(4), meta(4)), {}, MAIN)
    assert got == ((), ())


def test_products_that_were_measured_are_modelled() -> None:
    measured = [aten.mm.default, aten._scaled_mm.default]
    measured += [aten.addmm.dtype] if hasattr(aten.addmm, "dtype") else []

    assert all(op_of(func).is_modelled((), {}, H100) for func in measured)


@pytest.mark.parametrize(
    ("func", "scales", "kept"),
    [
        (aten._scaled_mm.default, (meta(), meta()), (BIG, LT)),
        (aten._scaled_mm.default, (meta(4, 1), meta(1, 16)), (BIG, LT)),
        (aten._int_mm.default, (), (BIG,)),
    ],
)
def test_products_of_float8_and_int8_have_workspaces(func, scales, kept) -> None:
    """An H100 with torch 2.11 recorded these requests for the first product of a process."""
    args = (meta(4, 8), meta(16, 8).t(), *scales)
    workspaces = CublasWorkspaces(HOPPER)
    assert workspaces.bytes_for(func, args, {}, MAIN) == (kept, ())
    assert workspaces.bytes_for(func, args, {}, MAIN) == ((), ())


def test_a_product_of_float8_is_written_into_a_given_tensor() -> None:
    """Compiled float8 layers call this overload, for which torch has no meta kernel."""
    with VirtualGpu(H100):
        left, right = (torch.zeros(64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in "ab")
        scale, out = torch.ones((), device="cuda"), torch.empty(0, device="cuda").bfloat16()
        made = torch._scaled_mm(
            left, right.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True, out=out
        )

        assert made is out
        assert out.shape == (64, 64)


def test_halves_are_multiplied_on_a_second_stream() -> None:
    """The time of a kernel counts its operations, whose counters take no dtype."""
    if not hasattr(aten.addmm, "dtype"):
        pytest.skip("torch has them from 2.8")
    with VirtualGpu(H100):
        total = torch.zeros(64, 64, device="cuda")
        half = total.bfloat16()
        with torch.cuda.stream(torch.cuda.Stream()):
            made = torch.addmm(total, half, half, out_dtype=torch.float32)

        assert made.dtype is torch.float32


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("has_out", [False, True])
def test_halves_are_multiplied_into_float32(is_batch: bool, has_out: bool) -> None:
    """TRL's losses multiply so; meta kernels of torch fail on some of these overloads."""
    if not hasattr(aten.addmm, "dtype"):
        pytest.skip("torch has them from 2.8")
    with VirtualGpu(H100):
        left, right, total = (
            torch.zeros(*shape, device="cuda", dtype=dtype)
            for shape, dtype in [
                ((2, 64, 32), torch.bfloat16),
                ((2, 32, 16), torch.bfloat16),
                ((2, 64, 16), torch.float32),
            ]
        )
        if not is_batch:
            left, right, total = left[0], right[0], total[0]
        to = {"out_dtype": torch.float32} | ({"out": torch.empty_like(total)} if has_out else {})
        product, added = (torch.bmm, torch.baddbmm) if is_batch else (torch.mm, torch.addmm)
        made = [product(left, right, **to), added(total, left, right, **to)]
        workspace = torch.cuda.memory_allocated() - sum(
            t.nbytes for t in {id(t): t for t in (left, right, total, *made)}.values()
        )

    assert [(t.dtype, t.shape) for t in made] == [(torch.float32, total.shape)] * 2
    assert workspace >= BIG
