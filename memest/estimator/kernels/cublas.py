"""What cuBLAS takes from the caching allocator in each matrix product.

Three things, all counted as allocated memory:

1. A workspace for each cuBLAS handle and stream, allocated at the handle's first use and kept until
   the process ends. torch keeps one handle per host thread, so the thread that runs the forward
   pass and the thread that runs the backward pass each own one.
2. A second workspace of 1 MiB for cuBLASLt, which only `addmm` with a fusable bias calls; again one
   per handle and stream, kept.
3. A contiguous copy of each operand whose strides cuBLAS cannot express (a gradient that `expand`
   made, a sliced column), freed when the op ends.

Sources (torch v2.11): `aten/src/ATen/cuda/CublasHandlePool.cpp` (sizes, life time),
`aten/src/ATen/native/cuda/Blas.cpp` (who calls cuBLASLt) and
`aten/src/ATen/native/cuda/cuBlasCommonArgs.h` (which operands are copied). torch 2.12 and newer
share one workspace between cuBLAS and cuBLASLt (pytorch/pytorch#175879) and give Blackwell 32 MiB
(pytorch/pytorch#175344).

Evidence: exact on all 7,586 `mm`, `addmm`, `bmm` and `baddbmm` calls recorded on an H200 with torch
2.11 (real models in fp32, fp16, bf16 and mixed precision, forward and backward).

Left out: the environment variables `CUBLAS_WORKSPACE_CONFIG`, `CUBLASLT_WORKSPACE_SIZE`,
`TORCH_CUBLASLT_UNIFIED_WORKSPACE` and `DISABLE_ADDMM_CUDA_LT`, TunableOp, a preferred BLAS library
other than the default, side streams, complex and integer operands, and the products in
`UNMODELLED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from memest.units import KIB, MIB

aten = torch.ops.aten

LT_WORKSPACE_BYTES = MIB
"""`parseCUDABlasLtWorkspaceSize`: 1024 KiB, https://github.com/pytorch/pytorch/issues/73328."""

_FIRST_UNIFIED_TORCH = (2, 12)

_MATRIX = {  # op -> position of its first factor
    aten.mm.default: 0, aten.mm.out: 0,
    aten.addmm.default: 1, aten.addmm.out: 1, aten.addmm_.default: 1,
    aten._addmm_activation.default: 1, aten._addmm_activation.out: 1,
}  # fmt: skip
_BATCHED = {
    aten.bmm.default: 0, aten.bmm.out: 0,
    aten.baddbmm.default: 1, aten.baddbmm.out: 1, aten.baddbmm_.default: 1,
}  # fmt: skip
_VECTOR = {
    aten.mv.default: 0, aten.mv.out: 0,
    aten.addmv.default: 1, aten.addmv.out: 1, aten.addmv_.default: 1,
}  # fmt: skip
_DOT = (aten.dot.default, aten.dot.out, aten.vdot.default, aten.vdot.out)
_LT_BIAS = (aten.addmm.default, aten.addmm.out)
_LT_ACTIVATION = (aten._addmm_activation.default, aten._addmm_activation.out)
_LT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

MATMULS: frozenset[OpOverload] = frozenset((*_MATRIX, *_BATCHED, *_VECTOR, *_DOT))
"""The ops that `CublasWorkspaces.bytes_for` models."""

UNMODELLED: frozenset[OpOverload] = frozenset((
    aten._int_mm.default, aten._int_mm.out, aten._scaled_mm.default, aten._scaled_mm.out,
    aten._grouped_mm.default, aten.mm.dtype, aten.bmm.dtype, aten.addmm.dtype, aten.baddbmm.dtype,
))  # fmt: skip
"""Products that also call cuBLAS or cuBLASLt but were not measured: report them, guess nothing."""


def cublas_workspace_bytes(
    capability: tuple[int, int], torch_version: tuple[int, int] = (2, 11)
) -> int:
    """Bytes of the workspace that torch gives each cuBLAS handle.

    `parseChosenWorkspaceSize` (torch v2.11): Hopper 8 pools of 4096 KiB = 32 MiB, all others
    `:4096:2:16:8` = 2 * 4096 KiB + 8 * 16 KiB = 8.125 MiB. From torch 2.12, Blackwell (compute
    capability 10.x and 12.x) has 32 MiB too.

    >>> cublas_workspace_bytes((9, 0)), cublas_workspace_bytes((8, 0))
    (33554432, 8519680)
    """
    large = capability == (9, 0)
    if torch_version >= _FIRST_UNIFIED_TORCH:
        large = capability[0] in (9, 10, 12)
    return 8 * 4096 * KIB if large else 2 * 4096 * KIB + 8 * 16 * KIB


Caller = tuple[str, int]
"""The thread, `"main"` for the forward pass and the optimizer, `"backward"` for autograd's, where a
checkpoint recomputes, too; and the number of its stream, 0 for the default one. A thread has one
handle, a handle a workspace for each stream (`cublas_handle_stream_to_workspace`).
"""


class CublasWorkspaces:
    """Which workspaces exist so far in one process on one GPU, by thread and stream.

    Args:
        capability: compute capability of the GPU.
        torch_version: `(major, minor)` of the torch that runs on the GPU.
    """

    def __init__(
        self, capability: tuple[int, int], torch_version: tuple[int, int] = (2, 11)
    ) -> None:
        self._handle_bytes = cublas_workspace_bytes(capability, torch_version)
        self._unified = torch_version >= _FIRST_UNIFIED_TORCH
        self._with_handle: set[Caller] = set()
        self._with_lt: set[Caller] = set()

    def bytes_for(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], caller: Caller
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A workspace at a caller's first product, another for a fused bias, copies of operands
        that cuBLAS cannot read: `(persistent, temporary)` bytes of one dispatched op.

        CUDA's order is: the result, the temporaries, then the persistent ones; the temporaries are
        freed at the end of the op. The call counts: a workspace is returned once per `caller`. An
        op that is not in `MATMULS` takes nothing.
        """
        if func not in MATMULS or not _reaches_cublas(func, args):
            return (), ()
        temporary = _operand_copies(func, args)
        persistent = []
        if caller not in self._with_handle:
            self._with_handle.add(caller)
            persistent.append(self._handle_bytes)
        needs_lt = not self._unified and caller not in self._with_lt
        if needs_lt and _calls_lt(func, args, kwargs):
            self._with_lt.add(caller)
            persistent.append(LT_WORKSPACE_BYTES)
        return tuple(persistent), temporary


def _factors(func: OpOverload, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of the product; `addmm`, `baddbmm` and `addmv` have the summand first."""
    first = _MATRIX.get(func, _BATCHED.get(func, _VECTOR.get(func, 0)))
    return args[first], args[first + 1]


def _reaches_cublas(func: OpOverload, args: Sequence[Any]) -> bool:
    """False when the result or the summed dimension is empty: torch then returns early.

    `dot` of two empty vectors still asks for a handle.
    """
    left, right = _factors(func, args)
    return func in _DOT or (left.numel() > 0 and right.numel() > 0)


def _calls_lt(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `addmm` goes to cuBLASLt, which adds the bias in its epilogue.

    `isInputCompliesAddmmCudaLt` (torch v2.11, CUDA 12.1 or newer): beta is 1, the result is a
    contiguous matrix, every dimension of both factors is above 1, and the summand is a contiguous
    vector as long as the result's row. With a fused activation a matrix as summand will do too.
    """
    if func not in _LT_BIAS and func not in _LT_ACTIVATION:
        return False
    bias, (left, right) = args[0], _factors(func, args)
    out = kwargs.get("out")
    if kwargs.get("beta", 1) != 1 or left.dtype not in _LT_DTYPES:
        return False
    if out is not None and not (out.dim() == 2 and out.is_contiguous()):
        return False
    if min(*left.shape, *right.shape) <= 1:
        return False
    is_vector = bias.dim() == 1 or bias.squeeze().dim() == 1
    if is_vector and bias.is_contiguous() and bias.shape[-1] == right.shape[1]:
        return True
    return func in _LT_ACTIVATION and bias.dim() == 2


def _operand_copies(func: OpOverload, args: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of the contiguous copies of operands, in the order in which CUDA makes them.

    cuBLAS is column-major, so a row-major result is computed as the product of the transposed
    factors: the second factor is prepared first.
    """
    if func in _DOT:
        return ()
    left, right = _factors(func, args)
    if func in _VECTOR:
        fits = [(right, _vector_fits(right)), (left, _matrix_has_unit_stride(left))]
    elif func in _MATRIX:
        fits = [(right, _is_dense(right) or _matrix_has_unit_stride(right))]
        fits += [(left, _is_dense(left) or _matrix_has_unit_stride(left))]
    elif right.shape[2] == 1:  # a batch of columns is column-major already: nothing is swapped
        fits = [(left, _batch_fits(left, fast=1)), (right, _batch_fits(right, fast=1))]
    else:
        fits = [(right, _batch_fits(right, fast=2)), (left, _batch_fits(left, fast=2))]
    return tuple(t.numel() * t.element_size() for t, fit in fits if not fit)


def _matrix_has_unit_stride(tensor: torch.Tensor) -> bool:
    """Whether rows or columns are unit-stride and do not overlap: `prepare_matrix_for_cublas`."""
    (rows, cols), (row_stride, col_stride) = tensor.shape, tensor.stride()
    return (row_stride == 1 and col_stride >= max(1, rows)) or (
        col_stride == 1 and row_stride >= max(1, cols)
    )


def _batch_fits(tensor: torch.Tensor, *, fast: int) -> bool:
    """Whether cuBLAS reads this batch of matrices in place: `prepare_batch_matrix_for_cublas`.

    `fast` is the dim that is contiguous when the factor needs no transposition.
    """
    sizes, strides, leading = tensor.shape, tensor.stride(), 3 - fast
    if strides[fast] == 1 and strides[leading] >= max(1, sizes[fast]):
        return True
    if strides[leading] == 1 and strides[fast] >= max(1, sizes[leading]):
        return True
    return tensor.is_contiguous() and strides[1] != 0 and strides[2] != 0


def _vector_fits(tensor: torch.Tensor) -> bool:
    """Whether `addmv` reads this vector in place: any stride but 0 will do."""
    return tensor.stride(0) != 0 or tensor.is_contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their storage without gap or overlap, in some order of dims."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
