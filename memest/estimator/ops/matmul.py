"""Matrix products: requests of cuBLAS, `linear`, and the grouped product of experts.

cuBLAS takes three things from the caching allocator:

1. A workspace for each cuBLAS handle and stream, from its first use to the end of the process. Each
   host thread has one handle: the forward and the backward pass have their own.
2. A second workspace of 1 MiB for cuBLASLt, called by `addmm` with a fusable bias and `_scaled_mm`.
3. A contiguous copy of each operand whose strides cuBLAS cannot express (a gradient that `expand`
   made, a sliced column), freed when the op ends.

In torch 2.15 a workspace lives for one call, and a call of cuBLASLt has the second one alone.
`cublas_settings` reads the environment variables that change this.

transformers 5.17 multiplies tokens, sorted by expert, in one `_grouped_mm` (integrations/moe.py).
The GPU decides between CUTLASS's fused kernel, torch's loop of `mm`, and before compute capability
8.0 a loop in transformers.

Sources (torch 2.11, `aten/src/ATen`): cuda/CublasHandlePool.cpp (sizes, life time),
native/cuda/Blas.cpp (calls of cuBLASLt), native/cuda/cuBlasCommonArgs.h (copies),
native/cuda/GroupedBlas.cpp, native/cuda/GroupMM.cu, native/GroupedMMUtils.h. `TorchRelease` has
what later releases changed. Evidence: exact on all 7,586 `mm`, `addmm`, `bmm` and `baddbmm` calls
recorded on an H200 with torch 2.11; the fused kernel's workspace was recorded on an H100.

Left out: TunableOp, a preferred BLAS library, side streams, complex and integer operands, and
products that were not measured. Shapes: G groups, M rows of the left, N columns of the right.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.refusals import cpp_type, expects, same_type, type_name
from memest.estimator.ops.registry import KernelCall, op_of, register
from memest.estimator.ops.strides import is_dense
from memest.estimator.ops.temporaries import Scratch
from memest.estimator.versions import TorchRelease, simulated
from memest.units import KIB, MIB, round_up

aten = torch.ops.aten
_PROBLEM_BYTES = 3 * 4  # M, N and K of a group as int32
_STRIDE_BYTES = 3 * 8  # one int64 stride of each of both operands and the result
_RECORDED_CAPABILITY = (9, 0)  # of the GPU on which the workspace was recorded
_DESCRIPTOR_BYTES = 128  # a `CUtensorMap`
_DESCRIPTORS_PER_SM = 4
"""Descriptors of both operands, the result and the addend (CUTLASS's array mainloop and epilogue).

They take 67,584 bytes for 132 multiprocessors, in each of 528 recorded calls.
"""


@registry.result("_grouped_mm")
def grouped_mm_output(c: KernelCall) -> Tensor:
    """Return the result of `_grouped_mm` on meta, also for dtypes that torch's meta kernel refuses.
    Rows are padded to 16 bytes, as `create_grouped_gemm_output_tensor` does."""
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return aten._grouped_mm.default(**c)
    left, right = c.self, c.mat2
    if left.dim() == 2 and right.dim() == 2:
        size = [c.offs.size(0), left.size(0), right.size(1)]
    elif left.dim() == 2:
        size = [left.size(0), right.size(-1)]
    elif right.dim() == 2:
        size = [left.size(1), right.size(1)]
    else:
        size = [left.size(0), left.size(1), right.size(-1)]
    row = round_up(size[-1], 16 // left.itemsize)
    strides = [row, 1] if len(size) == 2 else [size[1] * row, row, 1]
    return torch.empty_strided(size, strides, dtype=left.dtype, device=left.device)


def _is_fused(c: KernelCall) -> bool:
    """Return whether one kernel multiplies all groups: bfloat16 on capability 9.0 or 10.x."""
    is_bfloat16 = c.self.dtype == c.mat2.dtype == torch.bfloat16
    return is_bfloat16 and (c.gpu.capability == (9, 0) or c.gpu.capability[0] == 10)


@registry.requests(
    "_grouped_mm",
    when="the product is a loop without memory of its own, or was recorded",
    modelled=lambda c: not _is_fused(c) or c.gpu.capability == _RECORDED_CAPABILITY,
)
def grouped_mm(c: KernelCall) -> Scratch:
    """Allocations of a grouped product: two tables of the fused kernel; none for a loop of `mm`.

    One table has pointers, strides and sizes of each of G groups, the other has descriptors::

        3 * 8 * round_up(G, 2) + 12 * G + 3 * 8 * G
        4 * 128 * multiprocessors
    """
    if not _is_fused(c):
        return Scratch()
    groups = c.self.size(0) if c.offs is None else c.offs.size(0)
    pointers = 3 * 8 * round_up(groups, 2)  # to both operands and the result, 8 bytes each
    descriptors = c.gpu.num_sms * _DESCRIPTORS_PER_SM * _DESCRIPTOR_BYTES
    return Scratch(after=(pointers + groups * (_PROBLEM_BYTES + _STRIDE_BYTES), descriptors))


@registry.refuse("addmm addmm_")
def refuse_addmm(c: KernelCall) -> str:
    """Return torch's error text for dtypes that `addmm` refuses (cuda/Blas.cpp), else ""."""
    mat2_dtype = c.mat2.dtype
    for name, dtype in (("self", c.self.dtype), ("mat1", c.mat1.dtype)):
        if dtype != mat2_dtype:
            types = f"{type_name(dtype)} and {type_name(mat2_dtype)}"
            return f"{name} and mat2 must have the same dtype, but got {types}"
    if not (mat2_dtype.is_floating_point or mat2_dtype.is_complex):
        return f"\"addmm_cuda\" not implemented for '{type_name(mat2_dtype)}'"
    return ""


_DTYPES_DIFFER = "expected mat1 and mat2 to have the same dtype, but got: {} != {}"
register("mm", refuse=same_type(0, 1, _DTYPES_DIFFER, cpp_type))  # cuda/Blas.cpp
register("addmv", refuse=expects(1, 2, "addmv_impl_cuda"))
register("mv", refuse=expects(0, 1, "addmv_impl_cuda"))
register("bmm", refuse=expects(0, 1, "baddbmm_cuda"))
register("baddbmm", refuse=expects(1, 2, "baddbmm_cuda"))


@registry.above_autograd("linear", vmap_key=registry.UNDER_VMAP)
def linear(next_kernel: Next, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run `linear`; add the bias in place if `x` is a batch that is not contiguous.

    torch's `next_kernel` runs otherwise. For such a batch it would add the bias out of place, as
    torch does under a dispatch mode (`isTensorSubclassLike`, native/Linear.cpp).
    """
    if bias is not None and x.dim() > 2 and not x.is_contiguous():
        return torch.matmul(x, weight.t()).add_(bias)
    return next_kernel(x, weight, bias)


LT_WORKSPACE_BYTES = MIB  # `parseCUDABlasLtWorkspaceSize`: 1024 KiB, pytorch issue 73328
_LT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Product:
    """cuBLAS call of an operator."""

    kind: str  # `matrix`, `batch`, `vector` or `dot`
    first: int = 0  # position of the first factor; a summand comes before it
    fused: str = ""  # call of cuBLASLt: with a `bias`, an `activation`, or `scaled`; else empty


for _names, _product in (
    ("mm mm.out", Product("matrix")),
    ("addmm addmm.out", Product("matrix", 1, "bias")),
    ("addmm_", Product("matrix", 1)),
    ("_scaled_mm _scaled_mm.out _scaled_mm_v2", Product("matrix", fused="scaled")),
    ("_int_mm _int_mm.out", Product("matrix")),
    ("_addmm_activation _addmm_activation.out", Product("matrix", 1, "activation")),
    ("bmm bmm.out", Product("batch")),
    ("baddbmm baddbmm.out baddbmm_", Product("batch", 1)),
    ("mv mv.out", Product("vector")),
    ("addmv addmv.out addmv_", Product("vector", 1)),
    ("dot dot.out vdot vdot.out", Product("dot")),
):
    register(_names, product=_product)


@registry.result("_scaled_mm.out")
def scaled_product(c: KernelCall) -> Tensor:
    """Return argument `out`, resized to the product's shape; the overload has no meta kernel."""
    out: Tensor = c["out"]
    arguments = {name: value for name, value in c.items() if name != "out"}
    return out.resize_(aten._scaled_mm.default(**arguments).shape)


def _product_of_dtype(product: Product, c: KernelCall) -> Tensor:
    """Return the meta result of a product with argument `out_dtype`. If the call has an argument
    `out`, the result is `out`, resized. Otherwise it is a new tensor."""
    left, right = _factors(product, c.args)
    shape = (*left.shape[:-1], right.shape[-1])
    if "out" in c:
        return c["out"].resize_(shape)
    return left.new_empty(shape, dtype=c.out_dtype)


for _packet, _product in (
    (aten.mm, Product("matrix")),
    (aten.addmm, Product("matrix", 1, "bias")),
    (aten.bmm, Product("batch")),
    (aten.baddbmm, Product("batch", 1)),
):
    # since torch 2.8; meta kernels of single overloads are absent or fail in each release
    for _overload in ("dtype", "dtype_out"):
        if hasattr(_packet, _overload):
            _func = getattr(_packet, _overload)
            register(_func, product=_product, result=partial(_product_of_dtype, _product))


def cublas_workspace_bytes(capability: tuple[int, int], release: TorchRelease) -> int:
    """Return the bytes of the workspace that torch gives each cuBLAS handle.

    `capability` is the GPU's. `parseChosenWorkspaceSize` (torch v2.11): Hopper 8 pools of 4096 KiB
    = 32 MiB, all others `:4096:2:16:8` = 2 * 4096 KiB + 8 * 16 KiB = 8.125 MiB. Later releases give
    Blackwell (compute capability 10.x and 12.x) 32 MiB too.

    >>> from memest.estimator.versions import find_release
    >>> release = find_release("2.11")
    >>> cublas_workspace_bytes((9, 0), release), cublas_workspace_bytes((8, 0), release)
    (33554432, 8519680)
    """
    is_large = capability == (9, 0)
    if release.large_blackwell_workspace:
        is_large = capability[0] in (9, 10, 12)
    return 8 * 4096 * KIB if is_large else 2 * 4096 * KIB + 8 * 16 * KIB


@dataclass(frozen=True, slots=True)
class CublasSettings:
    """Sizes and lifetimes of the workspaces of a cuBLAS handle and of cuBLASLt (`lt`)."""

    handle_bytes: int  # workspace of a handle
    lt_bytes: int  # workspace of cuBLASLt
    is_shared: bool  # cuBLASLt uses the workspace of the handle
    is_per_call: bool  # each call allocates its workspace and frees it
    calls_lt: bool  # `addmm` with a fusable bias calls cuBLASLt


def cublas_settings(
    capability: tuple[int, int], release: TorchRelease, environment: Mapping[str, str]
) -> CublasSettings:
    """Return the cuBLAS settings of a process with environment variables `environment`.

    `capability` is the GPU's. These variables are read, as in CublasHandlePool.cpp and Blas.cpp:

        CUBLAS_WORKSPACE_CONFIG           handle's workspace, such as `:4096:2` for 2 * 4096 KiB
        CUBLASLT_WORKSPACE_SIZE           KiB of cuBLASLt's workspace
        TORCH_CUBLASLT_UNIFIED_WORKSPACE  0 or 1: cuBLASLt uses the handle's (1 from torch 2.12)
        TORCH_CUBLAS_WORKSPACE_CACHE      1: workspaces stay allocated (read from torch 2.15 on)
        DISABLE_ADDMM_CUDA_LT             1: `addmm` does not call cuBLASLt

    >>> from memest.estimator.versions import find_release
    >>> release = find_release("2.11")
    >>> cublas_settings((9, 0), release, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}).handle_bytes >> 10
    128
    """
    handle_bytes = cublas_workspace_bytes(capability, release)
    if pools := re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", "")):
        handle_bytes = sum(int(size) * KIB * int(count) for size, count in pools)
    lt_size = re.match(r"\s*\+?(\d+)", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
    is_cached = environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    is_per_call = release.frees_cublas_workspace and not is_cached
    unified = environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    is_shared = unified != "0" if release.shares_cublas_workspace else unified == "1"
    return CublasSettings(
        handle_bytes,
        int(lt_size[1]) * KIB if lt_size else LT_WORKSPACE_BYTES,
        is_shared and not is_per_call,
        is_per_call,
        environment.get("DISABLE_ADDMM_CUDA_LT") != "1",
    )


Caller = tuple[str, int]
"""The thread and the number of its stream, 0 for the default one.

The thread is `"main"` for the forward pass and the optimizer, and `"backward"` for autograd's.
A thread's handle has one workspace per stream (`cublas_handle_stream_to_workspace`).
"""


class CublasWorkspaces:
    """Record of the threads and streams of a process that have a cuBLAS workspace on one GPU. The
    environment is read at the first call, as torch does. `capability` is the GPU's."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._release = simulated()
        self._settings: CublasSettings | None = None
        self._with_handle: set[Caller] = set()
        self._with_lt: set[Caller] = set()

    def bytes_for(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], caller: Caller
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (bytes of new persistent workspaces, bytes of temporaries) of a call.

        CUDA's order is: the result, the temporaries, the persistent ones. `caller` is a thread and
        a stream, which gets a workspace at its first call. In torch 2.15 workspaces are temporary.
        """
        op = op_of(func)
        product: Product | None = op.product
        copies: tuple[int, ...] = ()
        if product is not None:
            # torch returns early if the result or the summed dimension is empty, except in `dot`
            is_empty = not all(factor.numel() for factor in _factors(product, args))
            if is_empty and product.kind != "dot":
                return (), ()
            copies = _operand_copies(product, args)
        elif op.calls_cublas is None or not op.calls_cublas(op.call(tuple(args), dict(kwargs))):
            return (), ()
        if self._settings is None:
            self._settings = cublas_settings(self._capability, self._release, os.environ)
        settings = self._settings
        needs_lt = False
        has_lt = settings.is_shared or caller in self._with_lt
        if product is not None and not has_lt:
            may_call_lt = settings.calls_lt or product.fused == "scaled"
            needs_lt = may_call_lt and _calls_lt(product, args, kwargs)
        if settings.is_per_call:
            workspace = settings.lt_bytes if needs_lt else settings.handle_bytes
            return (), (*copies, workspace) if workspace else copies
        persistent = []
        if caller not in self._with_handle:
            self._with_handle.add(caller)
            persistent.append(settings.handle_bytes)
        if needs_lt:
            self._with_lt.add(caller)
            persistent.append(settings.lt_bytes)
        return tuple(num_bytes for num_bytes in persistent if num_bytes), copies


def _factors(product: Product, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return both factors among `args`, without the summand of `addmm`, `baddbmm`, `addmv`."""
    return args[product.first], args[product.first + 1]


def _calls_lt(product: Product, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the call runs in cuBLASLt, which adds the bias in its epilogue. Conditions are
    those of `isInputCompliesAddmmCudaLt` (torch v2.11, CUDA 12.1 or newer). `beta` is 1, the result
    is a contiguous matrix, the second factor has several rows and columns, and the summand is a
    contiguous row. With a fused activation the summand may be a matrix. Evidence: a first factor of
    one row called cuBLASLt on an H200 (torch 2.11.0)."""
    if product.fused == "scaled":
        return True
    if not product.fused:
        return False
    bias, out = args[0], kwargs.get("out")
    left, right = _factors(product, args)
    if kwargs.get("beta", 1) != 1 or left.dtype not in _LT_DTYPES:
        return False
    if out is not None and not (out.dim() == 2 and out.is_contiguous()):
        return False
    if min(right.shape) <= 1:
        return False
    is_vector = bias.dim() == 1 or bias.squeeze().dim() == 1
    if is_vector and bias.is_contiguous() and bias.shape[-1] == right.shape[1]:
        return True
    return product.fused == "activation" and bias.dim() == 2


def _operand_copies(product: Product, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the bytes of each contiguous copy of a factor, in CUDA's order. The second factor of a
    row-major product is prepared first, since cuBLAS is column-major."""
    if product.kind == "dot":
        return ()
    left, right = _factors(product, args)
    if product.kind == "vector":
        is_right_read_in_place = right.stride(0) != 0 or right.is_contiguous()
        operands = [(right, is_right_read_in_place), (left, _matrix_has_unit_stride(left))]
    elif product.kind == "matrix":
        operands = [(t, is_dense(t) or _matrix_has_unit_stride(t)) for t in (right, left)]
    elif right.shape[2] == 1:  # a batch of columns is column-major already: nothing is swapped
        operands = [(t, _batch_fits(t, fast=1)) for t in (left, right)]
    else:
        operands = [(t, _batch_fits(t, fast=2)) for t in (right, left)]
    return tuple(tensor.nbytes for tensor, is_read_in_place in operands if not is_read_in_place)


def _matrix_has_unit_stride(tensor: Tensor) -> bool:
    """Return whether cuBLAS reads matrix `tensor` without a copy: `prepare_matrix_for_cublas`."""
    (rows, cols), (row_stride, col_stride) = tensor.shape, tensor.stride()
    return (row_stride == 1 and col_stride >= max(1, rows)) or (
        col_stride == 1 and row_stride >= max(1, cols)
    )


def _batch_fits(tensor: Tensor, *, fast: int) -> bool:
    """Return whether cuBLAS reads `tensor`, a batch of matrices, without a copy. The rule is that
    of `prepare_batch_matrix_for_cublas`. `fast` is the dimension that is contiguous if cuBLAS reads
    the matrices untransposed. It is 2 in most products, for which torch swaps the two factors. It
    is 1 if the factors are not swapped."""
    sizes, strides, leading = tensor.shape, tensor.stride(), 3 - fast
    if strides[fast] == 1 and strides[leading] >= max(1, sizes[fast]):
        return True
    if strides[leading] == 1 and strides[fast] >= max(1, sizes[leading]):
        return True
    return tensor.is_contiguous() and strides[1] != 0 and strides[2] != 0
