"""`torch.linalg`: requests of its decompositions, and workspaces of cuSOLVER.

Source (torch 2.11): aten/src/ATen/native/BatchLinearAlgebra.cpp, and cuda/linalg/ there with the
choice between loops over cuSOLVER and batched cuBLAS.
Evidence: 2,735 calls on an H100 or H200 (CUDA 13.0) with 1 to 4096 rows, in float32 and float64,
alone and in batches. Every workspace is exact (`tests/data/linalg.json.gz`), except three of `eig`,
which differ by 512 bytes. Other GPUs were not measured.
Shapes: b matrices of m rows and n columns, k the smaller of both, `item` bytes of an element.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from memest.estimator.ops import registry
from memest.estimator.ops.reductions import has_gradient
from memest.estimator.ops.registry import KernelCall, Rule, op
from memest.estimator.ops.temporaries import Events, around, outputs, passing, temporaries
from memest.units import ceil_div, round_up

aten = torch.ops.aten
INFO = 4  # bytes of a solver's status for each matrix
POINTER, INDEX = 8, 8  # bytes


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A `batch` of m x n matrices, `item` bytes an element. `is_single`: no batch dimensions."""

    m: int
    n: int
    batch: int
    item: int
    is_single: bool

    @property
    def square(self) -> int:
        return self.n * self.n * self.item * self.batch

    @property
    def all_bytes(self) -> int:
        return self.m * self.n * self.item * self.batch

    @property
    def pointers(self) -> Events:
        """Allocations and frees of pointers to both operands of batched cuBLAS."""
        return passing(POINTER * self.batch, POINTER * self.batch)

    @property
    def triangular(self) -> Events:
        """Allocations of `triangular_solve_kernel` (linalg/BatchLinearAlgebra.cpp)."""
        return [] if self.batch <= 8 and self.n >= 64 else self.pointers

    @property
    def checks(self) -> Events:
        """Allocations of `_linalg_check_errors` for these matrices."""
        return passing(1, 1) if self.is_single else passing(1)

    @property
    def is_factored_by_cublas(self) -> bool:
        """True if cuBLAS (`getrfBatched`) factors the matrices. It factors any number of matrices
        with n <= 16, and up to 8 matrices with n <= 128. Without batch dimensions, it is False."""
        return not self.is_single and (self.n <= 16 or (self.n <= 128 and self.batch <= 8))

    def is_solved_in_a_loop(self, num_right: int) -> bool:
        """Return whether LU systems are solved one by one, for `num_right` right-hand sides."""
        return self.n != num_right and 8 < self.n <= 64 and self.batch <= 2

    def loop(self, num_bytes: int) -> Events:
        """Return events that allocate and free `num_bytes` for each matrix in turn."""
        return passing(num_bytes) * self.batch


def _shape(tensor: Tensor) -> _Matrices:
    m, n = tensor.shape[-2:]
    return _Matrices(m, n, prod(tensor.shape[:-2]), tensor.itemsize, tensor.dim() == 2)


def _is_measured(c: KernelCall) -> bool:
    """Return whether workspaces were measured: real dtypes on compute capability 9.0."""
    return c.gpu.capability == (9, 0) and c.args[0].dtype in (torch.float32, torch.float64)


def _measured(names: str, **parts: Any) -> Callable[[Rule], Rule]:
    return registry.requests(names, modelled=_is_measured, **parts)


def _register(
    names: str, about: str, rule: Callable[[KernelCall, _Matrices], Events], **parts: Any
) -> None:
    """Register what operators `names` (separated by blanks) allocate. `rule(call, matrices)`
    returns the allocator events after the outputs. `matrices` has the sizes of the first argument.
    `about` is text that describes the allocator events. `parts` are further arguments of `op`."""
    op(names, about, then=lambda c: rule(c, _shape(c.args[0])), modelled=_is_measured, **parts)


@_measured("_linalg_eigh")
def eigh(c: KernelCall) -> Events:
    """Allocations of `_linalg_eigh`: vectors and values, or values and a copy of the matrix. The
    copy is for a call without vectors."""
    a = _shape(c.A)
    num_calls = 1 if a.n <= 32 else a.batch
    calls = passing(eigh_bytes(a.n, a.item, a.batch)) * num_calls
    events = around((INFO * a.batch,), calls + a.checks)
    if c.compute_v:
        return c.outputs(1, 0) + events
    return c.outputs(0) + around((a.square,), events)


@_measured("_linalg_svd")
def svd(c: KernelCall) -> Events:
    """Allocations of `_linalg_svd`: both sets of vectors, values, a copy of the matrix. The vectors
    are always computed. Matrices above 32 columns are decomposed one at a time."""
    a = _shape(c.A)
    k = min(a.m, a.n)
    info, copy = INFO * a.batch, a.all_bytes
    work = passing(svd_bytes(a.m, a.n, a.item, bool(c.full_matrices and c.compute_uv)))
    if c.compute_uv:
        return c.outputs(0, 2, 1) + around((info,), around((copy,), work) + a.checks)
    num_at_once = a.batch if a.is_single or a.n <= 32 else 1
    u, v = a.m * k * a.item * num_at_once, k * a.n * a.item * num_at_once
    return c.outputs(1) + around((info,), around((copy, u, v), work) + a.checks)


def _qr(a: _Matrices, q: Tensor) -> Events:
    k = min(a.m, a.n)
    taus = k * a.item * a.batch
    factors = _geqrf(a) if a.batch == 1 or a.n > 64 else a.pointers
    q_events = _orgqr(replace(a, n=q.shape[-1]), k) if q.numel() else []
    return around((taus,), factors + q_events)


def _qr_calls_cublas(c: KernelCall) -> bool:
    a = _shape(c.A)
    return a.batch > 1 and a.n <= 64


_register(
    "linalg_qr", "the reflectors' factors; Q is left out in mode `r`",
    lambda c, a: _qr(a, c.out[0]), calls_cublas=_qr_calls_cublas,
)  # fmt: skip


@_measured("linalg_qr.out", calls_cublas=_qr_calls_cublas)
def qr_out(c: KernelCall) -> Events:
    """Allocations of `linalg_qr` with `out=`: new results, which are then copied into it."""
    return around([t.nbytes for t in c.out], _qr(_shape(c.A), c.out[0]))


def _geqrf(a: _Matrices) -> Events:
    return around((INFO,), a.loop(geqrf_bytes(a.n, a.item)))


def _orgqr(a: _Matrices, k: int) -> Events:
    """Allocations of `orgqr`, which makes the first n columns of Q from `k` reflectors."""
    work = 128 * a.m + 256 * a.n
    if k < 128:
        work = max(16384, up(2 * a.n * k)) + up(a.m * k)
    return around((INFO,), a.loop(a.item * (256 + 16384 + work)))


_register("geqrf", "the workspace of cuSOLVER, after reflectors and their factors",
     lambda c, a: _geqrf(a))  # fmt: skip
_register("linalg_householder_product", "the workspace of cuSOLVER",
     lambda c, a: _orgqr(a, c.tau.shape[-1]))  # fmt: skip


@registry.result("geqrf")
def geqrf(c: KernelCall) -> tuple[Tensor, Tensor]:
    """Return meta results of `geqrf`: a column-major matrix, and scalar factors of the reflectors.
    torch's meta device has no kernel for it."""
    matrices: Tensor = c.self
    factors = matrices.new_empty((*matrices.shape[:-2], min(matrices.shape[-2:])))
    return torch.empty_like(matrices.mT, memory_format=torch.contiguous_format).mT, factors


@registry.result("linalg_lstsq")
def lstsq(c: KernelCall) -> tuple[Tensor, ...]:
    """Return meta results of `linalg_lstsq`: solution, residuals, and empty rank and values.

    CUDA's only driver `gels` computes no rank and no singular values. The solution is a view of a
    tensor with max(m, n) rows. torch's meta device has no kernel for the operator.
    """
    a, b = c.self, c.b
    m, n = a.shape[-2:]
    is_vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    batch: Any = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        a.shape[:-2], b.shape[:-1] if is_vector else b.shape[:-2]
    )
    num_right = 1 if is_vector else b.shape[-1]
    solution = a.new_empty((*batch, num_right, max(m, n))).mT.narrow(-2, 0, n)
    residuals = a.new_empty((*batch, num_right) if m > n else (0,))
    rank = a.new_empty((0,), dtype=torch.int64)
    singular_values = a.new_empty((0,), dtype=a.real.dtype if a.is_complex() else a.dtype)
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, singular_values


@_measured("linalg_lstsq")
def lstsq_requests(c: KernelCall) -> Events:
    """Allocations of `linalg_lstsq`: QR by cuBLAS for many small matrices, else by cuSOLVER. The
    residuals come last. A wide matrix is decomposed as its conjugate transpose."""
    a, solution = _shape(c.self), c.out[0]
    is_vector = solution.dim() < c.self.dim()
    num_right = 1 if is_vector else solution.shape[-1]
    a = replace(a, batch=prod(solution.shape[: -1 if is_vector else -2]))
    tall, k = max(a.m, a.n), min(a.m, a.n)
    copy, factors = a.all_bytes, k * a.item * a.batch
    is_batched = tall <= 256 and a.batch >= max(2, tall // 16)
    reflectors = _geqrf(replace(a, n=k))
    # the product of the right-hand side with Q of k reflectors
    product = 512 * num_right + 256 * (tall + 257) + up(tall * k + k * k)
    if tall > BLOCK:
        product += up(num_right)
    rotation = around((INFO,), a.loop(a.item * product))
    triangular = replace(a, n=k).triangular
    if a.m < a.n:
        reflectors = a.pointers if is_batched else reflectors
        events = around((factors, copy), reflectors + triangular + rotation)
    elif is_batched:
        events = around((copy,), a.pointers)
    else:
        events = around((factors,), reflectors + rotation + triangular)
    result = outputs({0: tall * num_right * a.item * a.batch})
    events = around((copy,), events + c.outputs(1))
    return around((INFO * a.batch,), result + events + a.checks)


_register(
    "linalg_cholesky_ex", "the workspace of cuSOLVER for one matrix, pointers for several",
    lambda c, a: passing(potrf_bytes(a.n, c.upper) if a.is_single else POINTER * a.batch),
)  # fmt: skip
_register("cholesky_inverse", "a copy of the factor, and a status",
     lambda c, a: passing(a.square, INFO))  # fmt: skip
_register(
    "linalg_solve_triangular",
    "pointers of batched cuBLAS; up to 8 matrices of 64 columns or more are solved one by one",
    lambda c, a: a.triangular, calls_cublas=lambda c: True,
)  # fmt: skip
_register(
    "triangular_solve", "as `linalg_solve_triangular`, after the solution and a copied matrix",
    lambda c, a: _shape(c.out[1]).triangular, calls_cublas=lambda c: True,
)  # fmt: skip


op(
    "_linalg_check_errors",
    "comparisons with zero, and `any` of several matrices (BatchLinearAlgebra.cpp)",
    then=lambda c: passing(1, 1) if c.info.dim() == 0 else passing(1),
)


op(
    "cholesky_solve", "copies of right-hand side and factor", modelled=_is_measured,
    before=lambda c: INFO if c.input2.dim() == 2 else 0, after=lambda c: _shape(c.input2).square,
)  # fmt: skip


def _lu(a: _Matrices) -> Events:
    """Return the allocations of LU decompositions: one square matrix by cuSOLVER, or several small
    ones by batched cuBLAS. Matrices that are not square, and batches of larger ones, have none."""
    if a.m != a.n:
        return []
    if not a.is_single:
        return passing(POINTER * a.batch) if a.is_factored_by_cublas else []
    blocks = ceil_div(a.n, BLOCK)  # their size depends on the number of columns
    panel = max(256 * min(1 << (blocks - 1).bit_length(), 16), up(4 * blocks * blocks))
    if a.n > 1536:
        panel = max(panel, 8192 * a.item + 256 * (a.item + 8) * ceil_div(a.n, 2048))
    return passing(256 * (blocks + 1) + panel)


def _lu_solve(a: _Matrices, num_right: int) -> Events:
    """Allocations of `lu_solve_kernel` for `num_right` right-hand sides. By size it loops over the
    matrices, calls cuBLAS on pointers to them, or solves two triangular systems."""
    if a.is_solved_in_a_loop(num_right):
        return passing(INFO)
    max_batched_n = 16 if a.n == num_right else 64
    if a.n <= max_batched_n:
        return a.pointers
    order = INDEX * a.n  # row numbers of one matrix
    all_orders = order * a.batch
    right_bytes = a.n * num_right * a.item * a.batch
    systems = around((right_bytes,), a.triangular * 2)
    if a.is_single:
        return around((order, order, order), systems)
    permutation = temporaries(order, all_orders, -order, order, all_orders)
    return permutation + systems + temporaries(-all_orders, -order, -all_orders)


def _factors_by_cublas(c: KernelCall) -> bool:
    """Return whether LU calls cuBLAS, which needs a handle (BatchLinearAlgebraLibBlas.cpp)."""
    return _shape(c.A).is_factored_by_cublas


@_measured("linalg_lu")
def lu(c: KernelCall) -> Events:
    """Allocations of `linalg_lu`: permutation, triangles, and the factors of `lu_factor_ex`."""
    a = _shape(c.A)
    factors = (a.all_bytes,) if a.m * a.n > 1 else ()
    pivots, info = INFO * min(a.m, a.n) * a.batch, INFO * a.batch
    permutation, *_ = c.out
    without_pivots = [] if permutation.numel() else passing(INFO * min(a.m, a.n))
    events = around(factors, temporaries(pivots, info) + _lu(a) + without_pivots)
    rows = _permutation_rows(a, permutation)
    return c.outputs() + events + rows + temporaries(-info, -pivots)


def _permutation_rows(a: _Matrices, permutation: Tensor) -> Events:
    """Return the allocations that turn LU's pivots into a row `permutation`, unless it is empty. A
    single matrix needs one tensor: an int64 number for each row. A batch also needs a copy of this
    tensor for each matrix."""
    if not permutation.numel():
        return []
    row, rows = INDEX * a.m, INDEX * a.m * a.batch
    return passing(row) if a.is_single else temporaries(row, rows, -row, -rows)


_register("linalg_lu_factor_ex", "LU, after factors, pivots, info", lambda c, a: _lu(a),
     calls_cublas=_factors_by_cublas)  # fmt: skip
_register("lu_unpack", "rows of the permutation", lambda c, a: _permutation_rows(a, c.out[0]))


@_measured("linalg_eig")
def eig(c: KernelCall) -> Events:
    """Allocations of `linalg_eig`: a check for finite numbers, temporary results, the results.
    cuSOLVER writes eigenvalues and vectors into temporaries. They are copied into the results,
    which are allocated after cuSOLVER's workspace is freed."""
    a, (values, vectors) = _shape(c.self), (part.nbytes for part in c.out)
    marks = c.self.numel()
    finite_check = temporaries(a.square, marks, marks, marks, -marks, -marks, -a.square)
    finite_check += passing(1) + temporaries(-marks)
    solver_events = around((values, a.square), _geev(a) + _are_real(a))
    copies = c.outputs() + temporaries(-vectors, -values)
    events = temporaries(vectors, values) + solver_events + copies
    return finite_check + around((INFO * a.batch,), events + a.checks)


@_measured("_linalg_eigvals")
def eigvals_requests(c: KernelCall) -> Events:
    """Allocations of `_linalg_eigvals`. They are those of `eig` without its check and vectors."""
    a, values = _shape(c.self), c.out.nbytes
    solver_events = around((values,), _geev(a) + _are_real(a))
    copies = c.outputs() + temporaries(-values)
    return around((INFO * a.batch,), temporaries(values) + solver_events + copies + a.checks)


def _geev(a: _Matrices) -> Events:
    """Return the events of cuSOLVER's `geev`: a column-major copy if n > 1, then a workspace. The
    computed size of the workspace differs from the measured one by at most 512 bytes."""
    n = a.n
    work = max(388 * n + 16256 + BLOCK, n * n + 4 * n + BLOCK)
    if n <= 128:
        blocked = 16384 + 3 * n * n - up(n) - 2 * n + 447
        work = max(32768 + up(n * n - n) + 3 * n + 286, blocked)
    return around((a.square,) if n > 1 else (), passing(round_up(a.item * work, 512)))


def _are_real(a: _Matrices) -> Events:
    """Return the allocations of the test whether eigenvalues have imaginary parts."""
    count = a.n * a.batch
    return around((count,), passing(1)) if count > 1 else passing(1, 1)


def _num_columns(right: Tensor, matrices: Tensor) -> int:
    return right.shape[-1] if right.dim() == matrices.dim() else 1


def _solves_by_cublas(c: KernelCall) -> bool:
    a = _shape(c.A)
    return a.is_factored_by_cublas or not a.is_solved_in_a_loop(_num_columns(c.B, c.A))


_register(
    "linalg_inv_ex", "a system with the identity",
    lambda c, a: around((a.square, INFO * a.n * a.batch), _lu(a) + _lu_solve(a, a.n)),
    calls_cublas=lambda c: True,
)  # fmt: skip
_register(
    "_linalg_solve_ex", "LU and its solution, after result, factors, pivots, info",
    lambda c, a: _lu(a) + _lu_solve(a, _num_columns(c.out[0], c.A)),
    calls_cublas=_solves_by_cublas,
)  # fmt: skip
_register(
    "linalg_lu_solve", "batched cuBLAS, a loop, or two triangular systems",
    lambda c, a: _lu_solve(a, c.out.shape[-1]),
    calls_cublas=lambda c: not _shape(c.LU).is_solved_in_a_loop(c.B.shape[-1]),
)  # fmt: skip


def _signs(a: _Matrices) -> Events:
    """Return events of the permutation's sign: mask of moved pivots, and their count per matrix."""
    count = a.n * a.batch
    buffers = temporaries(4 * a.n, count, INDEX * a.batch)
    return buffers + passing(INDEX * count) + temporaries(-count, -4 * a.n)


def _products(a: _Matrices) -> Events:
    products, diagonal = a.item * a.batch, a.n * a.item * a.batch
    return passing(diagonal, products) + temporaries(-INDEX * a.batch) + passing(diagonal)


_register(
    "_linalg_slogdet", "LU and products of its diagonal, after sign, logarithm, factors, pivots",
    lambda c, a: around((INFO * a.batch,), _lu(a) + _signs(a) + _products(a)),
    calls_cublas=_factors_by_cublas,
)  # fmt: skip
_register(
    "_linalg_det", "LU and the permutation's sign, after determinant, factors, pivots",
    lambda c, a: around(
        (INFO * a.batch,),
        _lu(a) + around((a.item * a.batch,), _signs(a) + temporaries(-INDEX * a.batch)),
    ),
    calls_cublas=_factors_by_cublas,
)  # fmt: skip


# Vectors are computed only if there is a gradient. Under any dispatch mode torch would compute them
# always (`isTensorSubclassLike`).
registry.register(
    "linalg_svdvals",
    above_autograd=lambda _, a, *, driver=None: aten._linalg_svd.default(
        a, False, has_gradient(a), driver=driver
    )[1],
)
registry.register(
    "linalg_eigvals",
    above_autograd=lambda _, a: (
        aten.linalg_eig.default(a)[0] if has_gradient(a) else aten._linalg_eigvals.default(a)
    ),
)
registry.register(
    "linalg_eigvalsh",
    above_autograd=lambda _, a, uplo="L": aten._linalg_eigh.default(a, uplo, has_gradient(a))[0],
)


@registry.decomposition("linalg_matrix_exp")
def matrix_exp(a: Tensor) -> Tensor:
    """Run `linalg_matrix_exp` as `mexp` of LinearAlgebra.cpp, with the polynomial of degree 18.

    On a GPU the host reads norms and groups the matrices by the degree that each needs. Here all
    matrices have the highest degree, and one squaring is assumed. More squarings would not raise
    the peak. The peak comes earlier, from the powers that the polynomial needs.
    """
    n = a.shape[-1]
    if n <= 1:
        return a.exp() if n else a.clone()
    matrices = a.reshape(-1, n, n)
    norms = matrices.abs().sum(-2).max(-1).values
    if len(matrices) > 1:
        return _scaled_exp(matrices, norms).view(a.shape)
    result = torch.full_like(matrices, math.nan, memory_format=torch.contiguous_format)
    index = torch.zeros_like(norms, dtype=torch.int64)
    result.index_put_((index,), _scaled_exp(matrices.index_select(0, index), norms))
    return result.view(a.shape)


def _scaled_exp(a: Tensor, norms: Tensor) -> Tensor:
    """Run `compute_T18_scale_square`: the exponential of matrices `a` with the 1-norms `norms`."""
    scales = (norms / 3.01).log2().ceil().clamp(min=0)
    terms = _taylor(a * torch.pow(2, -scales).view(-1, 1, 1))
    order = scales.sort(0).indices
    ordered = terms.index_select(0, order)
    squared = torch.bmm(ordered, ordered, out=torch.empty_like(ordered))
    return torch.cat([squared]).index_select(0, order.argsort())


def _taylor(a: Tensor) -> Tensor:
    """Run `compute_T18` (Taylor's series): powers of matrices `a`, and five sums of powers."""
    num_sums = 5
    _coefficients = torch.empty(num_sums, num_sums, dtype=a.real.dtype, device=a.device)
    powers = a.new_empty(num_sums, *a.shape)
    powers[0].copy_(torch.diag_embed(a.new_ones(1).expand(a.shape[:-1])))
    powers[1].copy_(a)
    for first, second, target in ((1, 1, 2), (1, 2, 3), (3, 3, 4)):  # powers 2, 3 and 6
        torch.bmm(powers[first], powers[second], out=powers[target])
    sums = a.new_zeros(num_sums, *a.shape)
    sums[3].add_(torch.bmm(sums[0], sums[4], out=powers[0]))
    last = torch.bmm(sums[2].add_(sums[3]), sums[3], out=powers[0])
    return sums[1].add_(last)


BLOCK = 32


def up(count: int) -> int:
    """Return `count` rounded up to a multiple of `BLOCK`, to which cuSOLVER aligns."""
    return round_up(count, BLOCK)


def geqrf_bytes(n: int, item: int) -> int:
    """Return the workspace bytes of `geqrf` (QR): `n` columns, any rows, `item` bytes a number."""
    return item * (1024 * max(n, 256) + 524288) + 128


def eigh_bytes(n: int, item: int, batch: int) -> int:
    """Return the workspace bytes of one call of the eigenvalue solver that torch selects.

    The `batch` matrices are n x n, with numbers of `item` bytes. Jacobi's method solves float32
    matrices of 33 to 512 columns, and a single float32 matrix of 32 columns. Divide and conquer
    solves all others. One call of it takes the whole batch if n is at most 32, and one matrix
    otherwise.
    """
    if item == 4 and 32 <= n <= 512 and (batch == 1 or n > 32):
        blocks = ceil_div(n, BLOCK)
        return 4 * (n * n + n + 4 * blocks * blocks + blocks + 1024 * (blocks + 1))
    last = n * n + 2 * n + 3
    reduced = 2 * n * n + 765 * n
    if n <= 32:
        return 128 + item * (batch * (65536 + last) + up(batch * reduced + 1) + up(batch))
    larger = max(65536 + up(reduced + 1), 32768 + 128 + up(3 * n * n + 124 * n + 1))
    return 128 + item * (32 + up(n) + larger + last)


def svd_bytes(m: int, n: int, item: int, is_full: bool) -> int:
    """Return cuSOLVER's workspace bytes: by Jacobi's method for square matrices, else QR iteration.
    Matrices are m x n with numbers of `item` bytes; `is_full` is torch's `full_matrices`."""
    if m == n:
        blocks = ceil_div(n, BLOCK)
        if n <= 32:
            return 992 * item
        return item * (1024 * (2 * blocks + 1) + up(2 * n * n) + up(4 * blocks**2 + blocks + n))
    tall, k = max(m, n), min(m, n)
    vectors = tall if is_full else k
    work = 256 * tall + 256 * 257 + up(tall * k + vectors) + up(512 * vectors) + up(k * k)
    elements = max(up(geqrf_bytes(k, item) // item), work) + up(k)
    return item * (elements + (up(m * n) if m < n else 0))


def potrf_bytes(n: int, is_upper: bool) -> int:
    """Return cuSOLVER's workspace bytes of a Cholesky decomposition of an n x n matrix. The bytes
    are the same in float32 and float64, and differ for an upper and a lower factor."""
    blocks = ceil_div(n, BLOCK)
    return 256 if is_upper else 128 + up(4 * blocks * blocks)
