"""Sparse tensors against what they asked for on an H100 (torch 2.11, CUDA 13.0)."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.sparse_rows import (
    matrix_workspace,
    product_workspaces,
    vector_workspace,
)
from memest.estimator.virtual_gpu import VirtualGpu
from tests.requested import Requests

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 512
MEASURED: dict[str, Any] = json.loads(
    gzip.decompress((ROOT / "tests" / "data" / "sparse.json.gz").read_bytes())
)


@pytest.fixture
def virtual() -> Iterator[VirtualGpu]:
    with warnings.catch_warnings(), VirtualGpu(find_gpu("h100-80gb")) as gpu:
        warnings.simplefilter("ignore")
        yield gpu


def in_blocks(sizes: list[int]) -> list[float]:
    """In blocks of the allocator; what is freed between two requests has no order."""
    blocks = [math.copysign(math.ceil(abs(size) / BLOCK_BYTES), size) for size in sizes]
    runs = itertools.groupby(blocks, lambda n: n < 0)
    return [n for is_freed, run in runs for n in (sorted(run) if is_freed else run)]


@pytest.mark.parametrize("part", ["elementwise", "products", "tables", "compressed", "masked"])
def test_every_call_asks_for_what_it_asked_for(part: str, virtual: VirtualGpu) -> None:
    calls = runpy.run_path(str(ROOT / "validation" / "scripts" / "sparse_calls.py"))[part]
    requests = Requests(virtual)
    num_calls = 0
    for name, call in calls():
        measured = MEASURED[name]
        if isinstance(measured, str):
            with pytest.raises(NotImplementedError, match=measured[:20]):
                call()
        else:
            assert in_blocks(requests.in_order(call)) == in_blocks(measured), name
        num_calls += 1

    assert num_calls > 15


def test_a_factor_whose_rows_have_gaps_is_copied(virtual: VirtualGpu) -> None:
    """SparseCUDABlas.cpp; recorded on an H200 in LightGCN, whose gradients are rows of a stack."""
    matrix = torch.eye(1000).to_sparse().cuda().coalesce()
    wide = torch.empty(1000, 4, 64, device="cuda")
    requests = Requests(virtual)

    dense = requests.in_order(lambda: torch.sparse.mm(matrix, wide[:, 0].contiguous()))
    given = requests.in_order(lambda: torch.sparse.mm(matrix, wide[:, 0]))

    assert dense.count(256000) == given.count(256000)
    workspace = given.index(4 * 4 + 7)
    assert given[workspace - 2 : workspace] == [256000, 256000]


def test_a_sparse_tensor_says_where_it_lies(virtual: VirtualGpu) -> None:
    sparse = torch.eye(3).to_sparse().cuda()

    assert sparse.is_cuda
    assert sparse.device == torch.device("cuda", 0)
    assert sparse.coalesce()._nnz() == 3
    assert "layout=torch.sparse_coo, device='cuda:0'" in repr(sparse)
    assert sparse.cpu().to_dense().shape == (3, 3)


def test_a_dense_tensor_of_the_gpu_becomes_sparse(virtual: VirtualGpu) -> None:
    known, unknown = torch.eye(3, device="cuda"), torch.rand(3, 4, device="cuda")

    assert [known.to_sparse()._nnz(), known.to_sparse(1)._nnz()] == [3, 3]
    assert [unknown.to_sparse()._nnz(), unknown.to_sparse(1)._nnz()] == [12, 3]
    assert unknown.to_sparse().cpu().shape == (3, 4)


def test_what_is_known_of_a_result_is_what_the_gpu_would_hold(virtual: VirtualGpu) -> None:
    places = torch.tensor([[0, 1, 1, 2, 1], [2, 0, 0, 1, 2]])
    sparse = torch.sparse_coo_tensor(places, torch.ones(5), (3, 3), check_invariants=False).cuda()
    value_of = virtual.mode.values.value_of

    coalesced = sparse.coalesce()

    assert coalesced.indices().tolist() == [[0, 1, 1, 2], [2, 0, 2, 1]]
    assert coalesced.t().coalesce().indices().tolist() == [[0, 1, 2, 2], [1, 2, 0, 1]]
    dense = torch.zeros(3, 3, device="cuda").add_(sparse)
    product = torch.sparse.mm(coalesced, torch.ones(3, 2, device="cuda"))
    for filled in (coalesced.values(), sparse.to_dense(), dense, product):
        assert value_of(filled) is None


def test_entries_whose_places_nobody_knows_are_taken_to_differ(virtual: VirtualGpu) -> None:
    places = (torch.ones(2, 2000, device="cuda") @ torch.ones(2000, 1000, device="cuda")).long()

    sparse = torch.sparse_coo_tensor(places, torch.ones(1000, device="cuda"), (500, 500))

    assert sparse.coalesce()._nnz() == 1000
    assert any("coalesce" in what for _, what in virtual.guesses.counts)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "_sparse_softmax": lambda s: torch.sparse.softmax(s, 1),
    "_sparse_sum.dim": lambda s: torch.sparse.sum(s, dim=0),
    "sin": torch.sin,
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_known_of_sparse_tensors_is_refused_by_name(
    name: str, virtual: VirtualGpu
) -> None:
    sparse = torch.eye(3).to_sparse().cuda()

    with pytest.raises(UnsupportedError, match=f"aten.{name}` with a tensor of layout sparse"):
        CALLS[name](sparse)


def test_a_compressed_matrix_has_the_values_of_its_parts(virtual: VirtualGpu) -> None:
    starts, columns = torch.tensor([0, 2, 3, 3]), torch.tensor([0, 2, 1])
    made = torch.sparse_csr_tensor(starts, columns, torch.ones(3), (3, 3), device="cuda")
    moved = torch.eye(3).to_sparse_csr().cuda()

    assert made.is_cuda
    assert made.layout is torch.sparse_csr
    assert made.crow_indices().tolist() == [0, 2, 3, 3]
    by_columns = made.to_sparse_csc()
    assert by_columns.ccol_indices().tolist() == [0, 1, 2, 3]
    assert by_columns.row_indices().tolist() == [0, 1, 0]
    product = made @ moved
    assert (product._nnz(), product.col_indices().tolist()) == (3, [0, 2, 1])
    assert made.cpu().layout is torch.sparse_csr
    assert "layout=torch.sparse_csr, device='cuda:0'" in repr(made)


def test_a_product_of_unknown_matrices_is_assumed_and_counted(virtual: VirtualGpu) -> None:
    columns = (torch.ones(2, 2000, device="cuda") @ torch.ones(2000, 1000, device="cuda"))[0].long()
    starts = torch.arange(0, 1001, 2, device="cuda")

    matrix = torch.sparse_csr_tensor(starts, columns, torch.ones(1000, device="cuda"), (500, 500))

    assert 1900 < (matrix @ matrix)._nnz() < 2000
    assert any("product of sparse matrices" in what for _, what in virtual.guesses.counts)


def test_cusparse_refuses_two_dtypes(virtual: VirtualGpu) -> None:
    """Measured: the backward of `torch.sparse.mm` under autocast fails outside of autocast."""
    matrix = torch.eye(3).to_sparse_csr().cuda()
    dense = torch.ones(3, 2, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = torch.sparse.mm(matrix, dense).float().sum()

    with pytest.raises(RuntimeError, match="operation not supported"):
        loss.backward()


@pytest.mark.parametrize("name", [name for name in MEASURED if name.startswith("sp")])
def test_cusparse_takes_the_workspaces_of_random_matrices(name: str) -> None:
    """`random_products` of validation/scripts/sparse_calls.py on an H100."""
    kind, type_name, *given = name.split("/")
    dtype = getattr(torch, type_name)
    if kind == "spgemm":
        rows, entries, products = map(int, given)
        found = [n for n in product_workspaces(rows, entries, products, dtype.itemsize) if n]
        most = 1024 if rows < 500 else 8
        assert found == pytest.approx(MEASURED[name], abs=most, rel=0)
        return
    index, rows, width, entries = getattr(torch, given[0]).itemsize, *map(int, given[1:])
    if kind == "spmv" or width == 1:
        assert vector_workspace(rows, entries, index, dtype) == MEASURED[name]
    else:
        assert matrix_workspace(entries, index) == MEASURED[name]


def test_the_size_of_a_compressed_matrix_follows_from_its_indices(virtual: VirtualGpu) -> None:
    parts = torch.tensor([0, 2, 3]).cuda(), torch.tensor([0, 4, 1]).cuda(), torch.ones(3).cuda()

    assert torch.sparse_csr_tensor(*parts).shape == (2, 5)
    assert torch.sparse_csc_tensor(*parts).shape == (5, 2)


def test_a_masked_matrix_has_the_places_of_its_mask(virtual: VirtualGpu) -> None:
    matrix = torch.tensor([[0.0, 1, 0], [0, 0, 2], [3, 0, 0]]).to_sparse_csr().cuda()

    masked = torch.ones(3, 3, device="cuda").sparse_mask(matrix)

    assert masked.col_indices().tolist() == [1, 2, 0]


def test_a_factor_on_the_host_is_refused_as_by_the_gpu(virtual: VirtualGpu) -> None:
    matrix = torch.eye(3).to_sparse_csr()

    with pytest.raises(RuntimeError, match="on the same device"):
        torch.sparse.mm(matrix.cuda(), torch.ones(3, 2))


COMPRESSED_CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add.Tensor": lambda s: s + s,
    "add.Scalar": lambda s: torch.ops.aten.add.Scalar(s, 1),
    "select.int": lambda s: s[0],
    "_sparse_softmax": lambda s: torch.sparse.softmax(s, 1),
}


@pytest.mark.parametrize("name", COMPRESSED_CALLS)
def test_calls_on_a_compressed_matrix_are_refused_by_name(name: str, virtual: VirtualGpu) -> None:
    matrix = torch.eye(3).to_sparse_csr().cuda()

    with pytest.raises(UnsupportedError, match=f"aten.{name}` with a tensor of layout sparse_csr"):
        COMPRESSED_CALLS[name](matrix)


def test_a_large_sparse_tensor_of_the_host_is_added_to_a_dense_one(virtual: VirtualGpu) -> None:
    """The sum of pytorch/examples' gcn: too large to be a small tensor of the host."""
    places = torch.arange(3000).expand(2, -1)
    sparse = torch.sparse_coo_tensor(places, torch.ones(3000), (3000, 3000))

    total = torch.eye(3000) + sparse

    assert total[7, 7].item() == 2


@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag"])
def test_a_sparse_gradient_on_the_host_is_refused_by_name(name: str, virtual: VirtualGpu) -> None:
    embedding = getattr(torch.nn, name)(10, 4, sparse=True)
    loss = embedding(torch.tensor([[1, 2]])).sum()
    with pytest.raises(UnsupportedError, match="sparse gradient of an embedding on the host"):
        loss.backward()


def test_a_batch_of_one_sparse_matrix_copies_its_indices(virtual: VirtualGpu) -> None:
    """DiffusionNet adds and selects a batch dimension; 100 entries of 40 by 50."""
    places = torch.stack([torch.arange(100) % 40, torch.arange(100) // 2])
    matrix = torch.sparse_coo_tensor(places, torch.ones(100), (40, 50)).to("cuda")
    requests = Requests(virtual)
    batch = matrix.unsqueeze(0)
    chosen = batch[0]

    assert batch.shape == (1, 40, 50)
    assert chosen.shape == (40, 50)
    assert chosen._nnz() == 100
    assert requests.of(lambda: matrix.unsqueeze(0))[:2] == [100 * 8, 3 * 100 * 8]
    with pytest.raises(UnsupportedError, match=r"`aten\.select\.int` with"):
        torch.sparse_coo_tensor(places[:1], torch.ones(100, 3), (40, 3)).to("cuda")[0]


def test_a_product_with_a_selected_matrix_has_a_gradient(virtual: VirtualGpu) -> None:
    places = torch.stack([torch.arange(40), torch.arange(40)])
    batch = torch.sparse_coo_tensor(places, torch.ones(40), (40, 50)).to("cuda").unsqueeze(0)
    dense = torch.ones(50, 3, device="cuda", requires_grad=True)
    torch.mm(batch[0], dense).sum().backward()

    assert dense.grad is not None
    assert dense.grad.shape == (50, 3)


def test_a_quotient_copies_indices_and_one_in_place_nothing(virtual: VirtualGpu) -> None:
    matrix = torch.eye(300).to_sparse().cuda()
    requests = Requests(virtual)

    assert requests.in_order(lambda: matrix / 2) == [300 * 2 * 8, 300 * 4]
    assert requests.in_order(lambda: matrix.div_(2)) == []


@pytest.mark.parametrize("name", ["clone", "neg", "abs", "relu", "sqrt", "tanh", "sin"])
def test_a_function_of_a_compressed_matrix_copies_all_three_parts(
    name: str, virtual: VirtualGpu
) -> None:
    matrix = torch.eye(300).to_sparse_csr().cuda()

    made = Requests(virtual).in_order(getattr(matrix, name))

    assert sorted(made) == [300 * 4, 300 * 8, 301 * 8]
