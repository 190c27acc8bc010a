"""Sparse matrices in compressed rows or columns (CSR, CSC) on CUDA, by operators on their parts.

A matrix has offsets (`crow_indices`, `ccol_indices`), indices of its entries in the other
dimension, and values. cuSPARSE's workspaces are deduced from recorded calls.

Source (torch 2.11): aten/src/ATen/native/TensorConversions.cpp, sparse/SparseCsrTensorMath.cpp,
sparse/cuda/SparseBlas.cpp, sparse/cuda/SparseBlasImpl.cpp. Evidence: 1,060 calls recorded on an
H100, of which tests/data/sparse.json.gz has 712.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.ops.registry import on_compressed, overloads, register
from memest.estimator.ops.sim_mode import SimMode
from memest.estimator.tensors import placement
from memest.estimator.tensors.known_values import MAX_BYTES
from memest.estimator.tensors.lines import LARGEST
from memest.estimator.tensors.patches import setting
from memest.estimator.tensors.placement import CPU, INSIDE, META, Place, is_meta, storage_key
from memest.units import ceil_div, round_up

aten = torch.ops.aten
CSR, CSC = torch.sparse_csr, torch.sparse_csc
Parts = tuple[Tensor, Tensor, Tensor]

_MADE = aten._sparse_compressed_tensor_unsafe.default
VIEWS = placement.operators(
    "t transpose.int detach alias values crow_indices col_indices ccol_indices row_indices"
)
"""Views of a compressed matrix, or of its parts, that torch's meta device returns."""

_MATRIX_TILE = 24  # entries of a tile of `cusparseSpMM`, with one index each in the workspace
_VECTOR_TILES = {
    (4, torch.float32): 4096, (8, torch.float32): 3072,
    (4, torch.float64): 3584, (8, torch.float64): 3072,
    (4, torch.float16): 1024, (8, torch.float16): 896,
    (4, torch.bfloat16): 1024, (8, torch.bfloat16): 896,
}  # fmt: skip
"""Entries of a tile of `cusparseSpMV`, by the bytes of an index and the values' dtype."""

_TWO_DTYPES = "CUDA error: operation not supported when calling `cusparseSpMM_bufferSize(...)`"
_TWO_DEVICES = "Expected all tensors to be on the same device, but a factor is on the CPU"
_ALIGNED = 256  # bytes to which cuSPARSE rounds the parts of a workspace
_SORTED_AT_ONCE = 512  # rows that a product sorts without a workspace: 500 need none, 1,000 do
MAX_COUNTED = 1 << 24  # products of entries whose places are computed, to count the distinct ones


def is_compressed(value: Any) -> bool:
    """Return whether `value` is a CSR or CSC matrix."""
    return isinstance(value, Tensor) and value.layout in (CSR, CSC)


def parts_of(matrix: Tensor) -> Parts:
    """Return (row or column offsets, indices, values) of a compressed matrix."""
    with torch._C._DisableTorchDispatch():
        if matrix.layout is CSR:
            return matrix.crow_indices(), matrix.col_indices(), matrix.values()
        return matrix.ccol_indices(), matrix.row_indices(), matrix.values()


def _matrix(parts: Parts, shape: Sequence[int], layout: torch.layout = CSR) -> Tensor:
    _, _, values = parts
    device = META if is_meta(values) else CPU
    # the check of entries fails on meta tensors
    check_invariants: Any = torch.sparse.check_sparse_tensor_invariants
    with check_invariants(False), torch._C._DisableTorchDispatch():
        return _MADE(*parts, shape, dtype=values.dtype, layout=layout, device=device)


def matrix_of_parts(parts: Parts, like: Tensor) -> Tensor:
    """Return a matrix of `parts` (offsets, indices, values) with the shape and layout of `like`."""
    return _matrix(parts, like.shape, like.layout)


def forget(mode: SimMode, tensor: Tensor) -> Tensor:
    """Mark the values of `tensor` as unknown, because a kernel overwrote them; return `tensor`."""
    mode.values.forget(storage_key(tensor))
    return tensor


@on_compressed(
    "sparse_compressed_tensor.comp_plain_value_size sparse_compressed_tensor.comp_plain_value",
    "_sparse_compressed_tensor_unsafe",
)
def _assembled(
    mode: SimMode, offsets: Tensor, indices: Tensor, values: Tensor,
    shape: Sequence[int] | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return a matrix with `offsets` (`crow_indices` or `ccol_indices`), indices and values,
    without copies. If `shape` is None, the size follows from them. `kwargs` has the `layout`."""
    if kwargs.get("layout") not in (CSR, CSC) or offsets.dim() != 1:
        raise NotImplementedError
    parts = offsets, indices, values
    if shape is None:
        length = len(offsets) - 1
        width = _width(mode, indices, default=length)
        shape = (length, width) if kwargs["layout"] is CSR else (width, length)
    if Place.GPU not in map(mode.host.place, parts):
        return _on_host(parts, shape, kwargs["layout"])
    if torch._C._check_sparse_tensor_invariants():
        checks = [offsets.new_empty(1, dtype=torch.int64) for _ in range(2)]
        del checks
    return _matrix(parts, shape, kwargs["layout"])


def _width(mode: SimMode, indices: Tensor, default: int) -> int:
    """Return the largest of `indices` plus 1. If `indices` are unknown, return `default`, the other
    size of the matrix, as if it were square."""
    index_values = mode.values.value_of(indices)
    if index_values is None:
        mode.guesses.note("the size of a sparse matrix, as square")
        return default
    with torch._C._DisableTorchDispatch():
        return int(index_values.max()) + 1 if len(index_values) else 0


def _on_host(parts: Parts, shape: Sequence[int], layout: torch.layout) -> Tensor:
    """Return a matrix on the host; unknown values are 1, unknown entries are spread evenly."""
    offsets, indices, values = parts
    num_rows, num_columns = shape
    num_entries, width = len(indices), num_columns if layout is CSR else num_rows
    with torch._C._DisableTorchDispatch():
        if is_meta(offsets):
            order = torch.arange(len(offsets), device=CPU, dtype=offsets.dtype)
            offsets = order * num_entries // max(1, len(offsets) - 1)
        if is_meta(indices):
            indices = torch.arange(num_entries, device=CPU, dtype=indices.dtype) % width
        if is_meta(values):
            values = torch.ones(values.shape, dtype=values.dtype, device=CPU)
        return _matrix((offsets, indices, values), shape, layout)


@on_compressed("_to_copy")
def _to_copy(mode: SimMode, matrix: Tensor, **kwargs: Any) -> Tensor:
    """Copy a matrix to the `dtype` or `device` (GPU or host) in `kwargs`."""
    offsets, indices, values = parts_of(matrix)
    device, dtype = kwargs.get("device"), kwargs.get("dtype") or values.dtype
    if kwargs.get("layout") not in (None, matrix.layout):
        raise NotImplementedError
    target = {} if device is None else {"device": device}
    values = values.to(dtype=dtype, copy=True, **target)
    offsets, indices = (t.to(copy=True, **target) for t in (offsets, indices))
    if device is not None and device.type == "cpu":
        return _on_host((offsets, indices, values), matrix.shape, matrix.layout)
    return matrix_of_parts((offsets, indices, values), matrix)


def run_on_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that runs `function` on the meta tensor and allocates nothing."""

    def rule(mode: SimMode, tensor: Tensor, *args: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(tensor, *args)

    return rule


def torch_kernel(func: OpOverload, key: Any) -> Callable[..., Any]:
    """Return a rule that runs torch's C++ kernel of `func` for dispatch key `key`."""

    def rule(mode: SimMode, *args: Any, **kwargs: Any) -> Any:
        with setting(INSIDE, "composite", True):
            return func._op_dk(key, *args, **kwargs)

    return rule


@on_compressed("mul.Tensor mul.Scalar")
def _mul(mode: SimMode, matrix: Tensor, factor: Any) -> Tensor:
    if isinstance(factor, Tensor) and factor.dim():
        raise NotImplementedError
    offsets, indices, values = parts_of(matrix)
    new_values = values * factor
    new_indices = indices.clone()
    return matrix_of_parts((offsets.clone(), new_indices, new_values), matrix)


@on_compressed("mul_.Tensor mul_.Scalar")
def _mul_(mode: SimMode, matrix: Tensor, factor: Any) -> Tensor:
    _, _, values = parts_of(matrix)
    values.mul_(factor)
    return matrix


def _swap_layout(mode: SimMode, matrix: Tensor) -> Tensor:
    """Convert CSR to CSC, or CSC to CSR, by sorting entries by a flat index."""
    offsets, indices, values = parts_of(matrix)
    num_entries = len(indices)
    is_by_row = matrix.layout is CSR
    num_new, num_old = (matrix.size(1), matrix.size(0)) if is_by_row else matrix.shape
    count = offsets.new_full((1,), num_entries)
    start = count.cumsum(-1).sub_(count)
    del count
    starts = offsets[:-1].add(start)
    all_starts = torch.empty_like(offsets)
    del starts
    places = indices.new_empty(2, num_entries)
    batch = indices.new_empty(num_entries)
    shift = indices.new_empty(num_entries)
    del batch, shift
    coordinates = _coordinates(mode, offsets, indices)
    flat = ordered = None
    if coordinates is not None:
        with torch._C._DisableTorchDispatch():
            flat = coordinates[1] * num_old + coordinates[0]
            ordered = torch.stack(coordinates[::-1])[:, flat.argsort()]
    keys = indices.new_empty(num_entries, dtype=torch.int64)
    _set_known(mode, keys, flat)
    order = keys.sort().indices
    sorted_places = places.index_select(1, order)
    _set_known(mode, sorted_places, ordered)
    new_values = values.index_select(0, order)
    new_offsets = torch._convert_indices_from_coo_to_csr(
        sorted_places[0], num_new, out_int32=offsets.dtype is torch.int32
    )
    batch_offsets = torch.empty_like(new_offsets)
    offsets_copy = new_offsets[:-1].clone()
    del offsets_copy, batch_offsets, order, keys, places, all_starts, start
    layout = CSC if is_by_row else CSR
    return _matrix((new_offsets, sorted_places[1], new_values), matrix.shape, layout)


def _set_known(mode: SimMode, tensor: Tensor, value: Tensor | None) -> None:
    """Record `value` as the values of `tensor`, or mark these as unknown if `value` is None."""
    if value is None or not mode.values.overwrite(tensor, value):
        forget(mode, tensor)


def _coordinates(
    mode: SimMode, offsets: Tensor, indices: Tensor, *, may_guess: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Return (rows, columns) of CSR entries; None if unknown. `may_guess` allows guessed ones."""
    guesses = [mode.guessed.value_of(t) if may_guess else None for t in (offsets, indices)]
    starts, columns = (
        mode.values.value_of(t) if guess is None else guess
        for t, guess in zip((offsets, indices), guesses, strict=True)
    )
    if starts is None or columns is None:
        return None
    if not may_guess and mode.values.is_guessed([offsets, indices]):
        return None
    with torch._C._DisableTorchDispatch():
        counts = starts.diff()
        return torch.arange(len(counts), device=CPU).repeat_interleave(counts), columns


def _as_csr(mode: SimMode, matrix: Tensor) -> Tensor:
    return matrix if matrix.layout is CSR else _swap_layout(mode, matrix)


@on_compressed("_to_sparse_csr _to_sparse_csc")
def _to_rows_or_columns(mode: SimMode, matrix: Tensor, *args: Any) -> Tensor:
    if args and args[0] is not None:
        raise NotImplementedError
    return _swap_layout(mode, matrix)


_in_coordinates = torch_kernel(aten._to_sparse.default, torch._C.DispatchKey.SparseCsrCPU)


@on_compressed("_to_sparse")
def _to_coordinates(mode: SimMode, matrix: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Convert `matrix` to COO, or to CSR or CSC if `kwargs` has such a `layout`. A COO result
    shares the values of `matrix`; a CSR or CSC result has new values. `args` are further arguments
    of `_to_sparse`."""
    if kwargs.get("layout") in (CSR, CSC):
        return _swap_layout(mode, matrix)
    result: Tensor = _in_coordinates(mode, matrix, *args, **kwargs)
    with torch._C._DisableTorchDispatch():
        mode.sparse.distinct.add(mode.memory.id_of(result._indices()))
    return result


@on_compressed("_to_dense")
def _to_dense(mode: SimMode, matrix: Tensor, dtype: Any = None, masked_grad: Any = None) -> Tensor:
    """Return the dense matrix, of `dtype` if given; CUDA writes the entries by flat indices."""
    offsets, indices, values = parts_of(matrix)
    dense = values.new_zeros(matrix.shape, dtype=dtype)
    _flatten(offsets, indices)
    return forget(mode, dense)


def _flatten(offsets: Tensor, indices: Tensor) -> None:
    """Allocate and free the flat indices that `sparse_compressed_to_dense` computes."""
    num_entries = len(indices)
    scalar = offsets.new_empty(1)
    batch = indices.new_empty(num_entries)
    del scalar
    shift = offsets.new_empty(1)
    starts = [offsets.new_empty(len(offsets) - 1) for _ in range(3)]
    scalars = [offsets.new_empty(1) for _ in range(2)]
    all_starts = torch.empty_like(offsets)
    del scalars, starts, shift
    places = indices.new_empty(2, num_entries)
    flat = indices.new_empty(num_entries)
    del flat
    buffers = [indices.new_empty(num_entries) for _ in range(5)]
    del buffers, places, all_starts, batch


@on_compressed("sparse_mask")
def _sparse_mask(mode: SimMode, dense: Tensor, matrix: Tensor) -> Tensor:
    """Return a compressed matrix with the elements of `dense` at the entries of `matrix`. As in
    torch, a dense boolean mask is made first; one of more than `MAX_BYTES` elements is refused."""
    offsets, indices, _ = parts_of(matrix)
    if dense.numel() > MAX_BYTES:
        raise NotImplementedError
    scalar = dense.new_ones(1, dtype=torch.bool)
    mask = dense.new_zeros(dense.shape, dtype=torch.bool)
    _flatten(offsets, indices)
    del scalar
    places = _coordinates(mode, offsets, indices)
    with torch._C._DisableTorchDispatch():
        mask_values = torch.zeros(dense.shape, dtype=torch.bool, device=CPU)
        if places is None:
            mask_values.view(-1)[: len(indices)] = True  # only the number of entries is known
        else:
            mask_values[places if matrix.layout is CSR else places[::-1]] = True
    if places is None:
        forget(mode, mask)
        mode.guessed.adopt(mask, mask_values)
    else:
        mode.values.overwrite(mask, mask_values)
    return _select_masked(mode, dense, mask, matrix.layout)


@on_compressed("add.Tensor")
def _add(mode: SimMode, first: Tensor, second: Tensor, *, alpha: float = 1) -> Tensor:
    if not isinstance(second, Tensor) or (is_compressed(first) and is_compressed(second)):
        raise NotImplementedError
    return forget(mode, torch.empty_like(second if is_compressed(first) else first))


def of_dense(mode: SimMode, dense: Tensor, layout: torch.layout) -> Tensor:
    """Return a matrix in the compressed `layout` with the elements of `dense` that are not zero."""
    if dense.dim() != 2:
        raise NotImplementedError
    return _select_masked(mode, dense, dense != 0, layout)


def _select_masked(mode: SimMode, dense: Tensor, mask: Tensor, layout: torch.layout) -> Tensor:
    """Return a matrix in `layout` of `dense` where `mask` is True: `dense_to_sparse_with_mask`."""
    by_columns = layout is CSC

    def in_order(matrix: Tensor) -> Tensor:
        return matrix.t().contiguous() if by_columns else matrix

    places = in_order(mask).nonzero().t().contiguous()
    offsets = torch._convert_indices_from_coo_to_csr(places[0], dense.size(1 if by_columns else 0))
    positions = in_order(mask).flatten().nonzero()
    values = in_order(dense).flatten().new_empty(len(positions))
    return _matrix((offsets, places[1], forget(mode, values)), dense.shape, layout)


def vector_workspace(num_rows: int, num_entries: int, index_bytes: int, dtype: torch.dtype) -> int:
    """Return the workspace bytes of `cusparseSpMV` (matrix by vector): an index for each tile of
    the matrix's entries. For a `dtype` of 16 bits it also has a float32 sum per row."""
    tiles = ceil_div(num_entries, _VECTOR_TILES[index_bytes, dtype]) + 1
    sums = 4 * num_rows + 127 if dtype.itemsize == 2 else 0
    return index_bytes * tiles + index_bytes - 1 + sums


def matrix_workspace(num_entries: int, index_bytes: int) -> int:
    """Return the workspace bytes of `cusparseSpMM` (sparse matrix by dense matrix, several
    columns). It has an index for each tile of 24 entries of the sparse matrix, and one more."""
    return index_bytes * (ceil_div(num_entries, _MATRIX_TILE) + 1) - 1


def _multiply(mode: SimMode, matrix: Tensor, dense: Tensor, result: Tensor) -> None:
    """Allocate and free what `matrix @ dense` needs: a contiguous copy of `dense` if it has gaps,
    and a workspace. The values of `result` become unknown."""
    _, indices, values = parts_of(matrix)
    if values.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise NotImplementedError
    if {mode.host.place(matrix), mode.host.place(dense)} != {Place.GPU}:
        raise RuntimeError(_TWO_DEVICES)
    if values.dtype is not dense.dtype:  # `torch.sparse.mm` under autocast, its backward outside
        raise RuntimeError(_TWO_DTYPES)
    is_by_columns = dense.stride(0) == 1 and (dense.dim() < 2 or dense.stride(-1) >= len(dense))
    is_by_rows = dense.stride(-1) == 1 and dense.stride(0) >= dense.size(-1)
    operand = dense if is_by_columns or is_by_rows else dense.contiguous()
    if len(indices) and result.numel():
        if dense.dim() == 1 or (result.size(-1) == 1 and operand.stride(0) == 1):
            size = vector_workspace(matrix.size(0), len(indices), indices.itemsize, values.dtype)
        else:
            size = matrix_workspace(len(indices), indices.itemsize)
        mode.allocate_and_free(aten.addmm.default, size)
    del operand
    forget(mode, result)


@on_compressed("_sparse_addmm")
def _sparse_addmm(
    mode: SimMode, tensor: Tensor, first: Tensor, second: Tensor, **factors: float
) -> Tensor:
    """Compute `tensor + first @ second` like `_addmm`, with a compressed `first` and with autocast.
    Autocast casts all three tensors if `second` is float32. `factors` (alpha, beta) are not used.
    """
    if mode.host.place(tensor) is Place.META:  # C++ made them for `_sparse_mm`
        tensor = second.new_zeros((first.size(0), second.size(1)))
    if not torch.is_autocast_enabled("cuda") or second.dtype is not torch.float32:
        return _addmm(mode, tensor, first, second, **factors)
    dtype = torch.get_autocast_dtype("cuda")
    addend, matrix = tensor.to(dtype), _to_copy(mode, first, dtype=dtype)
    return _addmm(mode, addend, matrix, second.to(dtype), **factors)


@on_compressed("addmm")
def _addmm(mode: SimMode, tensor: Tensor, first: Tensor, second: Tensor, **factors: float) -> Any:
    """Compute `tensor + first @ second`, with one factor dense. `factors` are not used."""
    shape = first.size(0), second.size(1)
    if is_compressed(first) and is_compressed(second):
        raise NotImplementedError
    dense = second if is_compressed(first) else first
    result = dense.new_empty(shape)
    if is_compressed(first):
        _multiply(mode, _as_csr(mode, first), second, result)
    else:
        layout = CSC if second.layout is CSR else CSR
        transposed = _matrix(parts_of(second), tuple(reversed(second.shape)), layout)
        _multiply(mode, _as_csr(mode, transposed), first.t(), result.t())
    return result


@on_compressed("mm")
def _mm(mode: SimMode, first: Tensor, second: Tensor) -> Tensor:
    if is_compressed(first) and is_compressed(second):
        return _product(mode, _as_csr(mode, first), _as_csr(mode, second))
    if is_compressed(first):
        first = _as_csr(mode, first)
    dense = second if is_compressed(first) else first
    zeros = dense.new_zeros((first.size(0), second.size(1)))
    return _addmm(mode, zeros, first, second)


@on_compressed("mv")
def _mv(mode: SimMode, matrix: Tensor, vector: Tensor) -> Tensor:
    result = vector.new_empty(matrix.size(0))
    _multiply(mode, _as_csr(mode, matrix), vector, result)
    return result


@on_compressed("sparse_sampled_addmm")
def _sampled_addmm(
    mode: SimMode, matrix: Tensor, first: Tensor, second: Tensor, **factors: float
) -> Tensor:
    """Compute `matrix + first @ second` at the entries of the CSR `matrix`, for dense `first` and
    `second`. `factors` (alpha, beta) are not used."""
    offsets, indices, values = parts_of(matrix)
    if matrix.layout is not CSR:
        raise NotImplementedError
    empty = offsets.new_empty(1)
    new_offsets = torch.empty_like(offsets)
    del empty
    new_indices = indices.clone()
    new_values = torch.empty_like(values)
    copies = [t if 1 in t.stride() else t.contiguous() for t in (first, second)]
    mode.allocate_and_free(aten.sparse_sampled_addmm.default, 1)
    del copies
    new_offsets.copy_(offsets)
    return matrix_of_parts((new_offsets, new_indices, forget(mode, new_values)), matrix)


def _product(mode: SimMode, first: Tensor, second: Tensor) -> Tensor:
    """Multiply two CSR matrices by `cusparseSpGEMM`, which needs 32-bit indices."""
    (offsets, indices, values), (offsets2, indices2, _) = parts_of(first), parts_of(second)
    num_pairs, places, is_guess = _product_size(mode, first, second)
    zeros = offsets.new_zeros(first.size(0) + 1)
    empty = offsets.new_empty(1)
    unset = torch.empty_like(zeros)
    del empty
    int32_parts = [t.int() for t in (indices, offsets, indices2, offsets2)]
    starts = unset.int()
    del unset
    workspaces = product_workspaces(first.size(0), len(indices), num_pairs, values.itemsize)
    site = mode.attribution.site(aten.addmm.default)
    blocks = [mode.memory.allocate_workspace(size, site) for size in workspaces if size]
    num_entries = places if isinstance(places, int) else places.size(1)
    columns = starts.new_empty(num_entries)
    product = forget(mode, values.new_empty(num_entries))
    if isinstance(places, Tensor):
        with torch._C._DisableTorchDispatch():
            counts = places[0].bincount(minlength=first.size(0))
            parts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(), places[1].int()
    record = mode.guessed.adopt if is_guess else mode.values.overwrite
    for i, tensor in enumerate((starts, columns)):
        forget(mode, tensor)
        if isinstance(places, Tensor):
            record(tensor, parts[i])
    for block in reversed(blocks):
        mode.memory.free(block)
    while int32_parts:
        del int32_parts[0]
    del zeros
    return _matrix((starts, columns, product), (first.size(0), second.size(1)))


def _product_size(mode: SimMode, first: Tensor, second: Tensor) -> tuple[int, int | Tensor, bool]:
    """Return (number of multiplied pairs of entries, entries of the product, True if guessed). The
    entries are a tensor of (row, column) indices, or an estimated number if these are unknown."""
    (offsets, indices, _), (offsets2, indices2, _) = parts_of(first), parts_of(second)
    places1 = _coordinates(mode, offsets, indices, may_guess=True)
    places2 = _coordinates(mode, offsets2, indices2, may_guess=True)
    index_parts = offsets, indices, offsets2, indices2
    is_guess = any(mode.guessed.value_of(part) is not None for part in index_parts)
    if places1 is not None and places2 is not None:
        with torch._C._DisableTorchDispatch():
            (_, columns1), (rows2, _) = places1, places2
            row_lengths2 = rows2.bincount(minlength=second.size(0))
            num_pairs = int(row_lengths2[columns1].sum())
            if num_pairs <= MAX_COUNTED:
                ones = (
                    torch.sparse_coo_tensor(
                        torch.stack(place).long(), torch.ones(len(place[1]), device=CPU),
                        tuple(matrix.shape), check_invariants=False, device=CPU,
                    )
                    for place, matrix in ((places1, first), (places2, second))
                )  # fmt: skip
                places = torch.sparse.mm(*ones).coalesce().indices()
                if is_guess:
                    mode.guesses.note(
                        f"a product of sparse matrices with {places.size(1):,} entries"
                    )
                return num_pairs, places, is_guess
    else:
        num_pairs = len(indices) * len(indices2) // max(1, second.size(0))
    # the expected number of distinct places of pairs that are spread at random
    num_places = first.size(0) * second.size(1)
    num_entries = round(-num_places * math.expm1(-num_pairs / max(1, num_places)))
    mode.guesses.note(f"a product of sparse matrices with {num_entries:,} entries")
    mode.notes.add(LARGEST)
    return num_pairs, num_entries, True


def product_workspaces(
    num_rows: int, num_entries: int, num_products: int, value_bytes: int
) -> tuple[int, int]:
    """Return the bytes of both workspaces of `cusparseSpGEMM`, deduced from 43 recorded products.
    The first matrix has `num_rows` and `num_entries`. The product multiplies `num_products` pairs
    of values, of `value_bytes` each. Below 500 rows the real second one is up to 0.8 KB larger."""

    def scan(number: int, tile: int) -> int:
        return round_up(16 * (ceil_div(number, tile) + 32), _ALIGNED)

    estimate = 12 * num_entries + 311 + scan(num_entries, 896)
    if not num_products:
        return estimate, 0
    sort = 5911 if num_rows > _SORTED_AT_ONCE else 1071
    by_product = (16 + 2 * value_bytes) * num_products + scan(num_products, 768) + 4391
    by_row = (
        (12 + 2 * value_bytes) * num_products + max(8 * num_rows, 4 * num_products - 8)
        + 2 * round_up(4 * num_rows, _ALIGNED) + sort
    )  # fmt: skip
    return estimate, max(by_product, by_row)


for _name in ("_nnz", "sparse_dim", "dense_dim", "is_coalesced"):
    register(_name, on_compressed=run_on_meta(getattr(torch.Tensor, _name)))
for _names, _key in (
    # sparse/SparseCsrTensor.cpp, sparse/SparseCsrTensorMath.cpp, each the same for CUDA
    ("clone sum neg abs relu sqrt tanh sin", torch._C.DispatchKey.SparseCsrCPU),
    ("zeros_like", torch._C.DispatchKey.CompositeExplicitAutograd),
):
    for _func in overloads(_names):
        register(_func, on_compressed=torch_kernel(_func, _key))
