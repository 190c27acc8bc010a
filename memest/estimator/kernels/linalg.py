"""`torch.linalg`: what its decompositions ask for beside cuSOLVER's workspaces, in order.

Source (torch 2.11): aten/src/ATen/native/BatchLinearAlgebra.cpp, and cuda/linalg/ there with the
choice between loops over cuSOLVER and batched cuBLAS. Evidence: `cusolver`.

Shapes: b matrices of m rows and n columns, k the smaller of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.cusolver import (
    eigh_bytes,
    geqrf_bytes,
    getrf_bytes,
    orgqr_bytes,
    potrf_bytes,
    svd_bytes,
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

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

INFO = 4
"""Bytes of what a solver says of each matrix."""

POINTER = INDEX = 8


@dataclass(frozen=True, slots=True)
class _Matrices:
    m: int
    n: int
    batch: int
    item: int
    is_single: bool

    @property
    def square(self) -> int:
        return self.n * self.n * self.item * self.batch

    @property
    def pointers(self) -> list[KernelEvent]:
        """For batched cuBLAS, of two operands."""
        return passing(POINTER * self.batch, POINTER * self.batch)

    @property
    def triangular(self) -> list[KernelEvent]:
        """What `triangular_solve_kernel` (linalg/BatchLinearAlgebra.cpp) takes."""
        return [] if self.batch <= 8 and self.n >= 64 else self.pointers

    @property
    def checks(self) -> list[KernelEvent]:
        """`_linalg_check_errors`: whether all is well."""
        return _checks(is_single=self.is_single)

    def loop(self, num_bytes: int) -> list[KernelEvent]:
        """The same for one matrix after the other."""
        return passing(num_bytes) * self.batch


def _checks(*, is_single: bool) -> list[KernelEvent]:
    return passing(1, 1) if is_single else passing(1)


def _of(tensor: Tensor) -> _Matrices:
    m, n = tensor.shape[-2:]
    return _Matrices(m, n, prod(tensor.shape[:-2]), tensor.itemsize, tensor.dim() == 2)


def eigh_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_linalg_eigh`: vectors, values; a copy of the matrix where only these are asked for."""
    a = _of(args[0])
    values, vectors = map(bytes_of, out)
    is_wanted = args[2] if len(args) > 2 else kwargs.get("compute_v", True)
    calls = passing(eigh_bytes(a.n, a.item, a.batch)) * (1 if a.n <= 32 else a.batch)
    info = INFO * a.batch
    solved = temporaries(info) + calls + a.checks + temporaries(-info)
    if is_wanted:
        return tuple(outputs({1: vectors, 0: values}) + solved)
    return tuple(outputs({0: values}) + temporaries(a.square) + solved + temporaries(-a.square))


def svd_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_linalg_svd`: both sets of vectors, values, a copy of the matrix; without vectors they are
    made all the same, of one matrix at a time above 32 columns.
    """
    a = _of(args[0])
    k = min(a.m, a.n)
    is_full = bool(args[1]) if len(args) > 1 else bool(kwargs.get("full_matrices", False))
    is_wanted = args[2] if len(args) > 2 else kwargs.get("compute_uv", True)
    info, copy = INFO * a.batch, a.m * a.n * a.item * a.batch
    work = passing(svd_bytes(a.m, a.n, a.item, is_full and bool(is_wanted)))
    if is_wanted:
        left, values, right = map(bytes_of, out)
        made = outputs({0: left, 2: right, 1: values}) + temporaries(info, copy)
        return tuple(made + work + temporaries(-copy) + a.checks + temporaries(-info))
    count = a.batch if a.is_single or a.n <= 32 else 1
    u, v = a.m * k * a.item * count, k * a.n * a.item * count
    made = outputs({1: bytes_of(out[1])}) + temporaries(info, copy, u, v)
    return tuple(made + work + temporaries(-v, -u, -copy) + a.checks + temporaries(-info))


def qr_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`linalg_qr`: Q, R, the reflectors' factors; Q is written out unless only R is asked for."""
    q, r = out
    return tuple(outputs({0: bytes_of(q), 1: bytes_of(r)}) + _qr(args[0], q))


def qr_out_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """The same into tensors that are given: it is made beside them, and copied."""
    q, r = map(bytes_of, out)
    return tuple(temporaries(q, r) + _qr(args[0], out[0]) + temporaries(-r, -q))


def _qr(tensor: Tensor, q: Tensor) -> list[KernelEvent]:
    a = _of(tensor)
    k = min(a.m, a.n)
    taus = k * a.item * a.batch
    events = temporaries(taus)
    if a.batch == 1 or a.n > 64:
        factors = a.loop(geqrf_bytes(a.n, a.item))
        events += temporaries(INFO) + factors + temporaries(-INFO)
    else:
        events += a.pointers
    if q.numel():
        written = a.loop(orgqr_bytes(a.m, q.shape[-1], k, a.item))
        events += temporaries(INFO) + written + temporaries(-INFO)
    return events + temporaries(-taus)


def geqrf(args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    """The results of `geqrf`, of which torch's meta device knows none: a copy with its columns one
    after the other, and the reflectors' factors.
    """
    given: Tensor = args[0]
    factors = given.new_empty((*given.shape[:-2], min(given.shape[-2:])))
    return torch.empty_like(given.mT, memory_format=torch.contiguous_format).mT, factors


def geqrf_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`geqrf`: Q's reflectors below R, and their factors."""
    a, (written, factors) = _of(args[0]), map(bytes_of, out)
    work = a.loop(geqrf_bytes(a.n, a.item))
    made = outputs({0: written, 1: factors})
    return tuple(made + temporaries(INFO) + work + temporaries(-INFO))


def householder_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`linalg_householder_product`."""
    a, k = _of(args[0]), args[1].shape[-1]
    written = a.loop(orgqr_bytes(a.m, a.n, k, a.item))
    return tuple(outputs({0: bytes_of(out)}) + temporaries(INFO) + written + temporaries(-INFO))


def cholesky_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`linalg_cholesky_ex`: one by cuSOLVER, many by its batched kernel."""
    a = _of(args[0])
    work = potrf_bytes(a.n, bool(kwargs.get("upper"))) if a.is_single else POINTER * a.batch
    return tuple(outputs({0: bytes_of(out[0]), 1: bytes_of(out[1])}) + passing(work))


def check_errors_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_linalg_check_errors`: comparisons with zero, of several matrices whether any is not."""
    return tuple(_checks(is_single=args[0].dim() == 0))


def cholesky_solve_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`cholesky_solve`: the right-hand side and the factor are copied."""
    factor = _of(args[1])
    info = INFO if factor.is_single else 0
    solved = outputs({0: bytes_of(out)}) + passing(factor.square)
    return tuple(temporaries(info) + solved + temporaries(-info))


def cholesky_inverse_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`cholesky_inverse`."""
    return tuple(outputs({0: bytes_of(out)}) + passing(_of(args[0]).square, INFO))


def solve_triangular_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`linalg_solve_triangular`: batched cuBLAS, but for up to 8 of 64 columns or more, which are
    solved one by one.
    """
    a = _of(args[0])
    return tuple(outputs({0: bytes_of(out)}) + a.triangular)


def _lu(a: _Matrices) -> list[KernelEvent]:
    """One matrix by cuSOLVER; many by batched cuBLAS up to 128 columns, else without a workspace
    (MAGMA is not linked; 129 to 255 columns were not measured).
    """
    if a.is_single:
        return passing(getrf_bytes(a.n, a.item))
    return passing(POINTER * a.batch) if a.n <= 128 else []


def _lu_solve(a: _Matrices, num_right: int) -> list[KernelEvent]:
    """`lu_solve_kernel`: by batched cuBLAS, in a loop, or as two triangular systems, for which the
    pivots become a permutation.
    """
    if a.n == num_right:
        is_batched, is_looped = a.n <= 16, False
    else:
        is_looped = 8 < a.n <= 64 and a.batch <= 2
        is_batched = a.n <= 64 and not is_looped
    if is_batched:
        return a.pointers
    if is_looped:
        return passing(INFO)
    row = INDEX * a.n
    rows = row * a.batch
    right = a.n * num_right * a.item * a.batch
    inside = temporaries(right) + a.triangular * 2 + temporaries(-right)
    if a.is_single:
        return temporaries(row, row, row) + inside + temporaries(-row, -row, -row)
    made = temporaries(row, rows, -row, row, rows)
    return made + inside + temporaries(-rows, -row, -rows)


def lu_factor_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`linalg_lu_factor_ex`: factors, pivots, info."""
    return tuple(outputs({i: bytes_of(made) for i, made in enumerate(out)}) + _lu(_of(args[0])))


def inv_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`linalg_inv_ex`: a system with the identity."""
    a = _of(args[0])
    pivots = INFO * a.n * a.batch
    solved = _lu(a) + _lu_solve(a, a.n)
    made = outputs({0: bytes_of(out[0]), 1: bytes_of(out[1])})
    return tuple(made + temporaries(a.square, pivots) + solved + temporaries(-pivots, -a.square))


def solve_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_linalg_solve_ex`: result, factors, pivots, info."""
    a = _of(args[0])
    num_right = out[0].shape[-1] if out[0].dim() == args[0].dim() else 1
    made = outputs({i: bytes_of(part) for i, part in enumerate(out)})
    return tuple(made + _lu(a) + _lu_solve(a, num_right))


def lu_solve_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`linalg_lu_solve`."""
    return tuple(outputs({0: bytes_of(out)}) + _lu_solve(_of(args[0]), out.shape[-1]))


def _signs(a: _Matrices) -> list[KernelEvent]:
    """The sign of the permutation: which pivots moved, how many in each matrix."""
    count = a.n * a.batch
    taken = temporaries(4 * a.n, count, INDEX * a.batch)
    return taken + passing(INDEX * count) + temporaries(-count, -4 * a.n)


def slogdet_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_linalg_slogdet`: sign, logarithm, factors, pivots."""
    a = _of(args[0])
    info, each, diagonal = INFO * a.batch, a.item * a.batch, a.n * a.item * a.batch
    made = outputs({i: bytes_of(part) for i, part in enumerate(out)}) + temporaries(info)
    products = passing(diagonal, each) + temporaries(-INDEX * a.batch) + passing(diagonal)
    return tuple(made + _lu(a) + _signs(a) + products + temporaries(-info))


def det_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`_linalg_det`: determinant, factors, pivots."""
    a = _of(args[0])
    info, each = INFO * a.batch, a.item * a.batch
    made = outputs({i: bytes_of(part) for i, part in enumerate(out)}) + temporaries(info) + _lu(a)
    signs = temporaries(each) + _signs(a) + temporaries(-INDEX * a.batch, -each)
    return tuple(made + signs + temporaries(-info))


def linalg_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether its workspaces were measured: float32 and float64 on compute capability 9.0."""
    if func is aten._linalg_check_errors.default:
        return True
    return gpu.capability == (9, 0) and args[0].dtype in (torch.float32, torch.float64)


LINALG_MADE = {aten.geqrf.default: geqrf}
"""Operator -> its results as meta tensors, from `(args, kwargs)`."""

LINALG_EVENTS: dict[OpOverload, EventsFn] = {
    aten._linalg_eigh.default: eigh_events,
    aten._linalg_svd.default: svd_events,
    aten.linalg_qr.default: qr_events,
    aten.linalg_qr.out: qr_out_events,
    aten.geqrf.default: geqrf_events,
    aten.linalg_householder_product.default: householder_events,
    aten.linalg_cholesky_ex.default: cholesky_events,
    aten._linalg_check_errors.default: check_errors_events,
    aten.cholesky_solve.default: cholesky_solve_events,
    aten.cholesky_inverse.default: cholesky_inverse_events,
    aten.linalg_solve_triangular.default: solve_triangular_events,
    aten.linalg_lu_factor_ex.default: lu_factor_events,
    aten.linalg_inv_ex.default: inv_events,
    aten._linalg_solve_ex.default: solve_events,
    aten.linalg_lu_solve.default: lu_solve_events,
    aten._linalg_slogdet.default: slogdet_events,
    aten._linalg_det.default: det_events,
}
