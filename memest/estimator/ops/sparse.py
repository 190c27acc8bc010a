"""Sparse tensors (COO) on CUDA, by operators on their two parts, indices and values.

CUDA's kernels are rebuilt by operators on those two; memory of Thrust and cuSPARSE is added.
Coalescing adds up equal entries; unknown indices are assumed to differ.

Source (torch 2.11): aten/src/ATen/native/sparse/SparseTensor.cpp, SparseTensorMath.cpp,
cuda/SparseCUDATensor.cu, cuda/SparseCUDATensorMath.cu, cuda/SparseCUDABlas.cpp. Evidence: 536 calls
recorded on an H100 (tests/data/sparse.json.gz).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.errors import UnsupportedError
from memest.estimator.ops import cub, sparse_rows
from memest.estimator.ops.autograd_ops import reenabled_decisions
from memest.estimator.ops.refusals import type_name
from memest.estimator.ops.registry import Args, Kwargs, on_sparse, op_of, overloads, register
from memest.estimator.ops.sim_mode import SimMode
from memest.estimator.ops.sparse_rows import CSC, CSR, forget, is_compressed, of_dense, torch_kernel
from memest.estimator.tensors import placement
from memest.estimator.tensors.lines import LARGEST
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import CPU, INSIDE, META, Place, is_meta, refused
from memest.units import ceil_div

aten = torch.ops.aten
SparseRule = Callable[..., Any]
FROM_PARTS = aten._sparse_coo_tensor_with_dims_and_tensors.default
_set_data: Callable[[Tensor, Tensor], None] = vars(torch._C.TensorBase)["data"].__set__
_ENTRIES_OF_A_BLOCK = 256  # per 4 bytes of `cusparseSpMM`'s workspace, as recorded


def is_sparse(value: Any) -> bool:
    """Return whether `value` is a tensor in coordinate format."""
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    with torch._C._DisableTorchDispatch():
        return tensor._indices(), tensor._values()


def _coo(indices: Tensor, values: Tensor, shape: Sequence[int], *, is_coalesced: bool) -> Tensor:
    with torch._C._DisableTorchDispatch():
        sparse_dim = indices.size(0)
        return FROM_PARTS(
            sparse_dim, len(shape) - sparse_dim, shape, indices, values,
            dtype=values.dtype, layout=torch.sparse_coo, device=META, is_coalesced=is_coalesced,
        )  # fmt: skip


def _like(tensor: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return _coo(indices, values, tensor.shape, is_coalesced=_is_coalesced(tensor))


def _is_coalesced(tensor: Tensor) -> bool:
    with torch._C._DisableTorchDispatch():
        return tensor.is_coalesced()


def _become(tensor: Tensor, other: Tensor) -> Tensor:
    """Make the sparse `tensor` share the indices and values of `other`; return `tensor`."""
    with torch._C._DisableTorchDispatch():
        _set_data(tensor, other)
    return tensor


def _on_host(
    indices: Tensor, values: Tensor, shape: Sequence[int], *, is_coalesced: bool
) -> Tensor:
    """Return a sparse tensor on the host. Unknown values are 1. Unknown indices are the first
    positions of the tensor in row-major order, such as (0, 0), (0, 1), (0, 2)."""
    with torch._C._DisableTorchDispatch():
        if is_meta(indices):
            order = torch.arange(indices.size(1), device=CPU)
            indices = torch.stack(torch.unravel_index(order, shape[: indices.size(0)]))
        if is_meta(values):
            values = torch.ones(values.shape, dtype=values.dtype, device=CPU)
        return torch.sparse_coo_tensor(
            indices, values, tuple(shape), is_coalesced=is_coalesced, check_invariants=False,
            device=CPU,
        )  # fmt: skip


@on_sparse(FROM_PARTS)
def _assembled(mode: SimMode, *args: Any, **kwargs: Any) -> Tensor:
    """Return a sparse tensor with given indices and values, which are not copied. `args` are those
    of `_sparse_coo_tensor_with_dims_and_tensors`."""
    _, _, shape, indices, values = args
    if Place.GPU not in (mode.host.place(indices), mode.host.place(values)):
        return _on_host(indices, values, shape, is_coalesced=bool(kwargs.get("is_coalesced")))
    with torch._C._DisableTorchDispatch():
        return FROM_PARTS(*args, **{**kwargs, "device": META})


def _coalesced_indices(mode: SimMode, indices: Tensor, shape: Sequence[int]) -> tuple[int, Any]:
    """Return (number of entries after coalescing, their indices). The indices are None if unknown;
    then all entries are assumed to differ."""
    num_entries = indices.size(1)
    value = mode.values.value_of(indices)
    if value is not None and not mode.values.is_guessed([indices]):
        with torch._C._DisableTorchDispatch():
            sizes = tuple(shape[: indices.size(0)])
            flat = value[0].clone()
            for row, size in zip(value[1:], sizes[1:], strict=True):
                flat.mul_(size).add_(row)
            unique = flat.unique()  # type: ignore[no-untyped-call]
            return len(unique), torch.stack(torch.unravel_index(unique, sizes))
    if mode.memory.id_of(indices) in mode.sparse.distinct:
        return num_entries, None
    mode.guesses.note(f"coalesce as {num_entries} of {num_entries} entries")
    mode.notes.add(LARGEST)
    return num_entries, None


@on_sparse("_coalesce")
def _coalesce(mode: SimMode, tensor: Tensor) -> Tensor:
    """Return the tensor with entries sorted by index, and entries of equal indices added up."""
    indices, values = _parts(tensor)
    num_entries, sparse_dim = indices.size(1), indices.size(0)
    num_left, unique_indices = _coalesced_indices(mode, indices, tensor.shape)
    flat, order, starts = (indices.new_empty(num_entries) for _ in range(3))
    mode.allocate_and_free(
        aten._coalesce.default,
        cub.merge_sort_bytes(num_entries),
        cub.thrust_unique_by_key_bytes(num_entries, mode.gpu),
    )
    mode.timeline.synchronize()
    sums = forget(mode, values.new_empty((num_left, *values.shape[1:])))
    if sums.numel():
        values = values.contiguous()
    new_indices = flat[:num_left].unsqueeze(0)
    if sparse_dim > 1:
        new_indices = indices.new_empty((sparse_dim, num_left))
    mode.sparse.distinct.add(mode.memory.id_of(new_indices))
    if unique_indices is None or not mode.values.overwrite(new_indices, unique_indices):
        forget(mode, new_indices)
    del starts, order, flat, values
    return _coo(new_indices, sums, tensor.shape, is_coalesced=True)


@on_sparse("clone")
def _clone(mode: SimMode, tensor: Tensor, **kwargs: Any) -> Tensor:
    """Return a copy of a sparse tensor; a gradient that autograd accumulates is not copied. On a
    GPU, `AccumulateGrad` (accumulate_grad.h) keeps a contiguous gradient without a copy. Under a
    Python dispatch mode it calls `clone`, which therefore shares the parts of the gradient."""
    indices, values = _parts(tensor)
    node = torch._C._current_autograd_node()
    is_gradient = node is not None and node.name() == "torch::autograd::AccumulateGrad"
    if is_gradient and indices.is_contiguous() and values.is_contiguous():
        return _like(tensor, indices, values)
    values = values.clone()
    return _like(tensor, _copied_indices(mode, indices), values)


def _copied_indices(mode: SimMode, indices: Tensor) -> Tensor:
    copy = indices.clone()
    if mode.memory.id_of(indices) in mode.sparse.distinct:
        mode.sparse.distinct.add(mode.memory.id_of(copy))
    return copy


def _elementwise(function: Callable[..., Tensor]) -> SparseRule:
    """Return a rule that copies the indices and computes the new values by `function`."""

    def rule(mode: SimMode, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_sparse(tensor) or any(map(is_sparse, args)):
            raise NotImplementedError
        indices, values = _parts(tensor)
        new_indices = _copied_indices(mode, indices)
        return _like(tensor, new_indices, function(values, *args, **kwargs))

    return rule


_multiplied = _elementwise(torch.mul)


@on_sparse("mul_.Tensor mul_.Scalar")
def _mul_(mode: SimMode, tensor: Tensor, other: Any) -> Tensor:
    """Multiply `tensor` by `other` in place. As in CUDA's kernel, the values have new memory."""
    return _become(tensor, _multiplied(mode, tensor, other))


@on_sparse("add_.Tensor")
def _add_(mode: SimMode, tensor: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """Add `alpha * other` to `tensor` in place, for a sparse `other`. Entries of `other` are
    appended to the entries of a sparse `tensor`, and added to the elements of a dense `tensor`."""
    if is_sparse(tensor):
        return _become(tensor, _concatenate(mode, tensor, other, alpha))
    return _add_to_dense(mode, tensor, other)


def _add_to_dense(mode: SimMode, dense: Tensor, sparse: Tensor) -> Tensor:
    indices, values = _parts(sparse)
    buffers: list[Any] = []
    if values.dtype != torch.result_type(dense, values):
        buffers.append(values.to(torch.result_type(dense, values)))
    if not _is_coalesced(sparse) and indices.size(0) > 1 and indices.size(1) > 1:
        buffers.append(indices.new_empty(indices.size(1)))
    elif not values.is_contiguous():
        buffers.append(values.contiguous())
    return forget(mode, dense)


@on_sparse("add.Tensor")
def _add(mode: SimMode, tensor: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    if is_sparse(tensor):
        return _concatenate(mode, tensor, other, alpha)
    return _add_to_dense(mode, torch.empty_like(tensor), other)


def _concatenate(mode: SimMode, tensor: Tensor, other: Tensor, alpha: float) -> Tensor:
    """Return `tensor + alpha * other` by joining entries; coalesce if these outnumber elements."""
    (indices, values), (other_indices, other_values) = _parts(tensor), _parts(other)
    if alpha != 1:
        other_values = other_values * alpha
    all_indices = torch.cat([indices, other_indices], 1)
    result = _coo(all_indices, torch.cat([values, other_values]), tensor.shape, is_coalesced=False)
    return _coalesce(mode, result) if all_indices.size(1) > tensor.numel() else result


@on_sparse("sparse_mask")
def _sparse_mask(mode: SimMode, dense: Tensor, mask: Tensor) -> Tensor:
    """Return a sparse tensor with the elements of `dense` at the indices of the sparse `mask`."""
    indices, values = _parts(mask)
    scalar = values.new_ones(())
    gathered = torch.empty_like(values)
    new_indices = _copied_indices(mode, indices)
    new_values = forget(mode, torch.empty_like(values))
    del scalar, gathered
    return _like(mask, new_indices, new_values)


@on_sparse("addmm _sparse_addmm")
def _addmm(
    mode: SimMode, tensor: Tensor, sparse: Tensor, dense: Tensor, **factors: float
) -> Tensor:
    """Compute `tensor + sparse @ dense` for a sparse matrix, which is first converted to CSR. The
    product is column-major, so the result is a copy. `factors` are not used."""
    if not is_sparse(sparse) or is_sparse(dense):
        raise NotImplementedError
    num_rows, num_columns = sparse.size(0), dense.size(1)
    if mode.host.place(dense) is not Place.GPU:
        with torch._C._DisableTorchDispatch():
            unknown = torch.empty(num_rows, num_columns, dtype=dense.dtype, device=META)
        mode.host.put(unknown)
        return unknown
    zeros = None
    if mode.host.place(tensor) is Place.META:  # C++ made them for `_sparse_mm`
        zeros = dense.new_zeros((num_rows, num_columns))
    result = forget(mode, dense.new_empty((num_rows, num_columns)))
    indices, _ = _parts(sparse)
    if indices.size(1) > 1 and not _is_coalesced(sparse):
        sparse = _coalesce(mode, sparse)
    indices, values = _parts(sparse)
    num_entries = indices.size(1)
    starts = indices.new_empty(num_rows + 1, dtype=torch.int32)
    rows = indices.new_empty(num_entries, dtype=torch.int32)
    del rows
    columns = indices.new_empty(num_entries, dtype=torch.int32)
    is_cast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if is_cast else values.dtype
    if dtype in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"\"addmm_sparse_cuda\" not implemented for '{type_name(dtype)}'")
    transposed = torch.empty_like(result, memory_format=torch.contiguous_format)
    if num_entries:
        is_by_columns = dense.stride(0) == 1 and dense.stride(1) == dense.size(0)
        is_by_rows = dense.stride(1) == 1 and dense.stride(0) == dense.size(1)
        operand = dense if is_by_columns or is_by_rows else dense.contiguous()
        size = 4 * ceil_div(num_entries, _ENTRIES_OF_A_BLOCK) + 7
        if num_columns == 1:
            size = sparse_rows.vector_workspace(num_rows, num_entries, starts.itemsize, dtype)
        mode.allocate_and_free(aten.addmm.default, size)
        del operand
    del transposed, columns, starts, zeros
    return result


@on_sparse("_to_copy")
def _to_copy(mode: SimMode, tensor: Tensor, **kwargs: Any) -> Any:
    """Copy to the `dtype` and `device` in `kwargs`; on the host, unknown values are 1."""
    (indices, values), is_coalesced = _parts(tensor), _is_coalesced(tensor)
    device, dtype = kwargs.get("device"), kwargs.get("dtype") or values.dtype
    if device is None:
        new_indices = _copied_indices(mode, indices)
        return _coo(
            new_indices, values.to(dtype, copy=True), tensor.shape, is_coalesced=is_coalesced
        )
    new_indices = indices.to(device, copy=True)
    new_values = values.to(device, dtype, copy=True)
    if device.type == "cuda":
        if is_coalesced:
            mode.sparse.distinct.add(mode.memory.id_of(new_indices))
        return _coo(new_indices, new_values, tensor.shape, is_coalesced=is_coalesced)
    return _on_host(new_indices, new_values, tensor.shape, is_coalesced=is_coalesced)


@on_sparse("select.int")
def _select(mode: SimMode, tensor: Tensor, dim: int, index: int) -> Tensor:
    """Select `index` of the sparse dimension `dim` by copying its entries: `select_sparse`."""
    (indices, values), dim = _parts(tensor), dim % tensor.dim()
    if not dim < indices.size(0) > 1:
        raise NotImplementedError
    entries = (indices[dim] == index % tensor.size(dim)).nonzero().view(-1)
    values = values.index_select(0, entries)
    other_dims = (torch.arange(indices.size(0), device="cuda") != dim).nonzero().view(-1)
    indices = indices.index_select(1, entries).index_select(0, other_dims)
    shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    return _coo(indices, values, shape, is_coalesced=False)


_in_rows = torch_kernel(aten._to_sparse_csr.default, torch._C.DispatchKey.SparseCPU)


@on_sparse("_to_sparse_csr")
def _to_sparse_csr(mode: SimMode, tensor: Tensor, dense_dim: int | None = None) -> Tensor:
    """Convert a dense or COO matrix to CSR; a COO matrix shares its values with the result."""
    if dense_dim is not None or tensor.dim() != 2:
        raise NotImplementedError
    matrix: Tensor = _in_rows(mode, tensor) if is_sparse(tensor) else of_dense(mode, tensor, CSR)
    return matrix


@on_sparse("_to_sparse_csc")
def _to_sparse_csc(mode: SimMode, tensor: Tensor, dense_dim: int | None = None) -> Tensor:
    if dense_dim is not None or is_sparse(tensor):
        raise NotImplementedError
    return of_dense(mode, tensor, CSC)


@on_sparse("_embedding_bag_backward")
def _embedding_bag_backward(mode: SimMode, *args: Any, **kwargs: Any) -> Any:
    """Run the backward of `EmbeddingBag(sparse=True)` by its sparse operator (EmbeddingBag.cpp)."""
    sparse_backward = aten._embedding_bag_sparse_backward.default
    call = op_of(aten._embedding_bag_backward.default).call(args, kwargs)
    return sparse_backward(*(call.get(name) for name in op_of(sparse_backward).names))


def _kernel_rule(func: OpOverload, key: Any) -> SparseRule:
    """Return a rule that runs torch's C++ kernel of `func` for dispatch key `key`. If no sparse
    argument has duplicate indices, the result is recorded as having none."""
    run = torch_kernel(func, key)

    def rule(mode: SimMode, *args: Any, **kwargs: Any) -> Tensor:
        operands = [t for t in placement.sample_tensors(args, kwargs) if is_sparse(t)]
        result: Tensor = run(mode, *args, **kwargs)
        is_distinct = all(mode.memory.id_of(_parts(t)[0]) in mode.sparse.distinct for t in operands)
        if is_distinct and is_sparse(result):
            mode.sparse.distinct.add(mode.memory.id_of(_parts(result)[0]))
        return result

    return rule


def _for_each(function: Callable[..., Any]) -> SparseRule:
    """Return a rule for a `_foreach` operator: `function` runs on each sparse tensor in turn."""

    def rule(mode: SimMode, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        lists = [arg if isinstance(arg, list | tuple) else [arg] * len(tensors) for arg in args]
        for tensor, *operands in zip(tensors, *lists, strict=True):
            function(tensor, *operands, **kwargs)

    return rule


for _names, _key in (
    # SparseTensor.cpp, TensorShape.cpp, TensorConversions.cpp, each the same for CUDA
    ("cat unsqueeze div_.Tensor _to_dense", torch._C.DispatchKey.SparseCPU),
    ("transpose.int t div_.Scalar", torch._C.DispatchKey.CompositeExplicitAutograd),
    ("_to_sparse _to_sparse.sparse_dim", torch._C.DispatchKey.CPU),
):
    for _func in overloads(_names):
        register(_func, on_sparse=_kernel_rule(_func, _key))
register("mm", on_sparse=lambda mode, a, b: _addmm(mode, b.new_zeros(len(a), b.size(1)), a, b))
register("mul.Tensor mul.Scalar", on_sparse=_multiplied)
register("div.Tensor div.Scalar", on_sparse=_elementwise(torch.div))
register("pow.Tensor_Scalar", on_sparse=_elementwise(torch.pow))
register("_foreach_mul_.Scalar", on_sparse=_for_each(torch.Tensor.mul_))
register("_foreach_add_.List", on_sparse=_for_each(torch.Tensor.add_))
register("_foreach_zero_", on_sparse=_for_each(torch.Tensor.zero_))
for _name in ("zero_", "is_coalesced", "_coalesced_", "_nnz", "sparse_dim", "dense_dim"):
    register(_name, on_sparse=sparse_rows.run_on_meta(getattr(torch.Tensor, _name)))

_MADE = "_sparse_coo_tensor_with_dims_and_tensors"
_FROM_DENSE = placement.operators(
    f"{_MADE} _to_sparse _to_sparse.sparse_dim _to_sparse_csr _to_sparse_csc "
    "_sparse_compressed_tensor_unsafe sparse_compressed_tensor.comp_plain_value "
    "sparse_compressed_tensor.comp_plain_value_size"
)
_ON_HOST_TOO = placement.operators(f"{_MADE} addmm _sparse_addmm")
_OF_EMBEDDINGS = placement.operators(f"{_MADE} _embedding_bag_backward")
_MAKERS = frozenset(map(id, (*_FROM_DENSE, *_OF_EMBEDDINGS, aten._to_copy.default)))
"""Operators that make sparse tensors on the GPU, by identity, as in `registry`."""


class SparseTensors:
    """Runs operators on sparse tensors of the simulated GPU."""

    def __init__(self, mode: SimMode) -> None:
        self.distinct: set[int | None] = set()  # storages of indices that are known to be distinct
        self._mode = mode
        self._has_sparse = False  # True once an operator made a sparse tensor

    def concerns(self, func: Any, args: Args, kwargs: Kwargs) -> bool:
        """Return whether the call uses or makes sparse tensors on the GPU, so that `run` has to run
        it. Raise `UnsupportedError` if there is no rule for such a call."""
        if not self._has_sparse and id(func) not in _MAKERS:
            return False
        tensors, mode = placement.sample_tensors(args, kwargs), self._mode
        if func is aten._embedding_bag_backward.default:
            concerns_sparse = bool(args[9])  # argument `sparse`
        elif func in _FROM_DENSE:
            concerns_sparse = True
        else:
            concerns_sparse = any(t.layout is not torch.strided for t in tensors)
        if not concerns_sparse:
            return False
        places = set(map(mode.host.place, tensors))
        goes_to_gpu = getattr(kwargs.get("device"), "type", "") == "cuda"
        if not goes_to_gpu and Place.GPU not in places:
            is_in_backward = torch._C._current_graph_task_id() != -1
            if Place.HOST in places and is_in_backward and func in _OF_EMBEDDINGS:
                line = mode.attribution.lines.current()
                raise UnsupportedError(
                    f"{line or 'the script'}: a sparse gradient of an embedding on the host cannot "
                    "be simulated",
                    hint="move the embedding to the GPU, or make it with `sparse=False`",
                )
            return func in _ON_HOST_TOO and Place.HOST in places
        if self._rule(func, tensors) is not None:
            return True
        is_torch_view = func in sparse_rows.VIEWS or not any(map(is_compressed, tensors))
        if op_of(func).is_view and is_torch_view:
            return False  # the rule of its parts runs it
        raise self._refused(func, tensors)

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run the rule of `func` for sparse tensors, and record what it allocates."""
        self._has_sparse = True
        depth, INSIDE.depth = INSIDE.depth, 0  # so that the mode records the operators inside
        try:
            with self._mode, torch.no_grad(), reenabled_decisions():
                rule = self._rule(func, placement.sample_tensors(args, kwargs))
                assert rule is not None
                return rule(self._mode, *args, **kwargs)
        except NotImplementedError as error:
            if error.args:
                raise
            raise self._refused(func, placement.sample_tensors(args, kwargs)) from None
        finally:
            INSIDE.depth = depth

    def _rule(self, func: Any, tensors: list[Tensor]) -> SparseRule | None:
        op, layouts = op_of(func), {t.layout for t in tensors} - {torch.strided}
        if not layouts:  # an operator that makes a sparse tensor from dense ones
            return op.on_sparse or op.on_compressed
        if layouts == {torch.sparse_coo}:
            return op.on_sparse
        return op.on_compressed if layouts <= {torch.sparse_csr, torch.sparse_csc} else None

    def _refused(self, func: Any, tensors: list[Tensor]) -> UnsupportedError:
        layouts = [str(t.layout) for t in tensors if t.layout is not torch.strided]
        kind = layouts[0].removeprefix("torch.") if layouts else "strided"
        return refused(func, kind, self._mode.attribution.lines.current())


def install(patches: Patches) -> None:
    """Make `grad.new(indices, values, shape)` create GPU tensors if `grad` is sparse and on the
    GPU. Optimizers call it."""
    original = torch.Tensor.new

    def new_on_gpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_sparse(tensor) and is_meta(tensor) and args and isinstance(args[0], Tensor):
            return torch.sparse_coo_tensor(*args, **kwargs, check_invariants=False)
        return original(tensor, *args, **kwargs)

    patches.set(torch.Tensor, "new", new_on_gpu)
