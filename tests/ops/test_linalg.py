"""torch.linalg against what it asked for on an H100 (torch 2.11, CUDA 13.0)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, linalg

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu
from tests.requested import WORKSPACE, Requests, peak

DATA = Path(__file__).parents[1] / "data" / "linalg.json.gz"
ROWS: list[Any] = json.loads(gzip.decompress(DATA.read_bytes()))
DTYPES = {"f32": torch.float32, "f64": torch.float64}
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "eigh": lambda a, b: linalg.eigh(a),
    "eigvalsh": lambda a, b: linalg.eigvalsh(a),
    "qr": lambda a, b: linalg.qr(a),
    "qr_T": lambda a, b: linalg.qr(a.mT),
    "qr_r": lambda a, b: linalg.qr(a, mode="r"),
    "cholesky": lambda a, b: linalg.cholesky(a),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, a),
    "cholesky_inverse": lambda a, b: torch.cholesky_inverse(a),
    "inv": lambda a, b: linalg.inv(a),
    "lu_factor": lambda a, b: linalg.lu_factor(a),
    "solve": lambda a, b: linalg.solve(a, b),
    "solve_triangular": lambda a, b: linalg.solve_triangular(a, b, upper=False),
    "slogdet": lambda a, b: linalg.slogdet(a),
    "svd": lambda a, b: linalg.svd(a, full_matrices=False),
    "svd_full": lambda a, b: linalg.svd(a),
    "svdvals": lambda a, b: linalg.svdvals(a),
    "lstsq": linalg.lstsq,
    "lu": lambda a, b: linalg.lu(a),
    "lu_nopivot": lambda a, b: linalg.lu(a, pivot=False),
    "eig": lambda a, b: linalg.eig(a),
    "eigvals": lambda a, b: linalg.eigvals(a),
}
"""By name a function of a matrix and of three columns."""

UNITS = {"eig": 512, "eigvals": 512}
"""Bytes by which a workspace may differ."""


@pytest.mark.parametrize("name", CALLS)
def test_a_decomposition_asks_for_what_it_asked_for(name: str) -> None:
    """Alone and in batches, from 2 to 4096 rows, square and not."""
    rows = [row for row in ROWS if row[0] == name]
    assert len(rows) > 10
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        torch.mm(*[torch.empty(2, 2, device="cuda")] * 2)  # the workspace of cuBLAS, once
        requests = Requests(virtual)
        for _, dtype, shape, measured in rows:
            a = torch.empty(shape, dtype=DTYPES[dtype], device="cuda")
            b = torch.empty([*shape[:-1], 3], dtype=DTYPES[dtype], device="cuda")

            found = requests.in_order(lambda: CALLS[name](a, b))  # noqa: B023

            assert found == pytest.approx(measured, rel=0, abs=UNITS.get(name, 0)), shape
        assert not virtual.mode.kernels.coverage.unmodelled


@pytest.mark.parametrize(
    ("name", "shape", "is_by_cublas"),
    [
        ("slogdet", (12, 12), False),
        ("slogdet", (3, 12, 12), True),
        ("solve", (12, 12), False),
        ("solve", (8, 8), True),
        ("solve", (65, 65), True),
        ("inv", (12, 12), True),
        ("qr", (4, 40, 40), True),
        ("qr", (40, 40), False),
        ("lu_factor", (3, 129, 129), False),
        ("solve_triangular", (65, 65), True),
        ("cholesky", (3, 12, 12), False),
    ],
)
def test_a_solver_of_cublas_allocates_the_workspace_of_its_handle(
    name: str, shape: tuple[int, ...], is_by_cublas: bool
) -> None:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        a = torch.empty(shape, device="cuda")
        b = torch.empty([*shape[:-1], 3], device="cuda")
        requests = Requests(virtual)
        assert requests.in_order(lambda: CALLS[name](a, b)).count(WORKSPACE) == is_by_cublas
        assert WORKSPACE not in requests.in_order(lambda: CALLS[name](a, b))


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize(("shape", "pointers"), [((12, 12), [8, 8, -8, -8]), ((65, 65), [])])
def test_the_older_triangular_solve_copies_the_matrix(
    shape: tuple[int, int], pointers: list[int]
) -> None:
    """`triangular_solve_out` (BatchLinearAlgebra.cpp) has the kernel of `solve_triangular`."""
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        a, b = torch.empty(shape, device="cuda"), torch.empty(shape[0], 3, device="cuda")
        requests = Requests(virtual)
        linalg.solve_triangular(a, b, upper=True)

        found = requests.in_order(lambda: torch.triangular_solve(b, a))

        assert found == [b.nbytes, a.nbytes, *pointers]


def test_the_gradient_of_a_determinant_allocates_the_workspace_of_cublas() -> None:
    """Measured on an H100 (field/n04_glow.py), where all products are convolutions."""
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        a = torch.eye(12, device="cuda").requires_grad_()
        value = linalg.slogdet(a)[1]
        assert WORKSPACE in Requests(virtual).in_order(value.backward)


def test_a_decomposition_into_given_tensors_is_made_beside_them() -> None:
    """Recorded on the same H100, of 512 x 40; a reflector's factors are 160 bytes."""
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        a = torch.empty(512, 40, device="cuda")
        q, r = torch.empty(512, 40, device="cuda"), torch.empty(40, 40, device="cuda")

        assert Requests(virtual).in_order(lambda: linalg.qr(a, out=(q, r))) == [
            81920, 6400, 160, 4, 3145856, -3145856, -4, 4, 214016, -214016, -4, -160, -6400, -81920,
        ]  # fmt: skip


def test_the_factors_of_a_qr_decomposition_are_made_as_on_a_gpu() -> None:
    """Recorded on the same H100, of 1024 x 1024."""
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        a = torch.empty(1024, 1024, device="cuda")

        assert Requests(virtual).in_order(lambda: torch.geqrf(a)) == [
            4194304, 4096, 4, 6291584, -6291584, -4,
        ]  # fmt: skip
        assert torch.geqrf(a)[0].stride() == (1, 1024)


def test_the_gradient_of_a_cholesky_decomposition_sums_out_of_place() -> None:
    """Recorded on the same H100, of 4000 x 4000 in float64, down to the solvers: beside the product
    both triangles, their sum and its half.
    """
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        a = torch.eye(64, device="cuda", dtype=torch.float64).requires_grad_()
        factor = linalg.cholesky(a)
        given = torch.ones(64, 64, device="cuda", dtype=torch.float64)
        size = 64 * 64 * 8

        asked = Requests(virtual).in_order(lambda: factor.backward(given))

        product = asked.index(size)
        assert asked[product : product + 9] == [
            size, WORKSPACE, size, -size, size, size, size, -size, -size,
        ]  # fmt: skip


def test_least_squares_have_the_solution_in_rows_of_the_larger_side() -> None:
    """Shapes and strides are those of an H100."""
    with VirtualGpu(find_gpu("h100-80gb")):
        many = torch.empty(2, 4, 1000, 8, device="cuda")
        found = torch.linalg.lstsq(many, torch.empty(2, 4, 1000, 3, device="cuda"))
        vector = torch.linalg.lstsq(many[0, 0], torch.empty(1000, device="cuda"))

    assert [part.shape for part in found] == [(2, 4, 8, 3), (2, 4, 3), (0,), (0,)]
    assert found.solution.stride() == (12000, 3000, 1, 1000)
    assert found.solution.untyped_storage().nbytes() == 2 * 4 * 1000 * 3 * 4
    assert vector.solution.shape == (8,)


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        ((50, 100), [10000, 10000, 20000, 400, -400]),
        ((20, 3, 3), [720, 720, 720, 24, 480, -24, -480]),
    ],
)
def test_factors_are_unpacked_with_the_rows_of_the_permutation(
    shape: tuple[int, ...], measured: list[int]
) -> None:
    """Recorded on an H200."""
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        factors = torch.empty(shape, device="cuda")
        pivots = torch.empty([*shape[:-2], min(shape[-2:])], dtype=torch.int32, device="cuda")
        requests = Requests(virtual)

        assert requests.in_order(lambda: torch.lu_unpack(factors, pivots)) == measured
        both = requests.in_order(lambda: torch.lu_unpack(factors, pivots, unpack_pivots=False))
        assert both == measured[1:3]
        assert not virtual.mode.kernels.coverage.unmodelled


def test_eigenvalues_of_general_matrices_without_a_gradient_have_no_vectors() -> None:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        requests = Requests(virtual)
        a = torch.empty(100, 100, device="cuda")
        without = requests.in_order(lambda: linalg.eigvals(a))
        a.requires_grad_()

        assert len(requests.in_order(lambda: linalg.eigvals(a))) > len(without)


@pytest.mark.parametrize(
    ("shape", "measured"),
    [((100, 100), 520124), ((3, 100, 100), 1320136), ((3, 64, 64), 540808), ((1, 1), 4)],
)
def test_the_exponential_of_a_matrix_has_powers_and_their_sums(
    shape: tuple[int, ...], measured: int
) -> None:
    """Peaks of an H200 for large norms, without counts of matrices by their squarings."""
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        a = torch.empty(shape, device="cuda")
        torch.mm(a.view(-1, shape[-1])[:1], torch.empty(shape[-1], 1, device="cuda"))
        found = peak(Requests(virtual).in_order(lambda: linalg.matrix_exp(a)))

        assert measured - 16 <= found <= measured
        assert not virtual.mode.kernels.coverage.unmodelled
