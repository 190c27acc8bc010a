"""What torch asks of the allocator for sparse tensors, call by call.

sparse_calls.py OUT.json

OUT holds for each call the sizes that it asks for, below 0 where they are freed, in order; or the
error that torch ends it with.
"""

import gc
import json
import random
import sys
import warnings
from functools import cache, partial
from pathlib import Path

import torch

ENTRIES = [1, 2, 3, 100, 1000, 4000, 20000, 100000]
SHAPES = [((100000,), (16,)), ((100000,), (64,)), ((300, 400, 500), ()), ((1000, 1000), (8,))]
MATRICES = [
    (1000, 16, 5000), (2708, 7, 13264), (2708, 1433, 13264), (20000, 64, 200000), (4096, 1, 100000),
    (50000, 3, 77),
]  # fmt: skip
COMPRESSED = [
    (100, 4, 30), (1000, 16, 5000), (2708, 7, 13264), (4000, 1, 100000), (20000, 64, 200000),
    (50000, 3, 77),
]  # fmt: skip
MASKED = [(100, 4, 30), (1000, 16, 5000), (2708, 7, 13264), (4096, 128, 200000)]
TABLES = [(1000, 16, 8, 4), (100000, 64, 256, 20), (50000, 300, 512, 1)]
OPTIMIZERS = {
    "SparseAdam": torch.optim.SparseAdam,
    "SGD": lambda params: torch.optim.SGD(params, 0.1),
    "SGDm": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
}


def entries(shape, count, dense=(), dtype=torch.float32):
    """A sparse tensor of `count` entries at places that are drawn, some of them twice."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, n, (count,), generator=generator) for n in shape]
    values = torch.ones(count, *dense, dtype=dtype, device="cuda")
    places = torch.stack(rows).cuda()
    return torch.sparse_coo_tensor(places, values, (*shape, *dense), check_invariants=False)


def elementwise():
    """Names and calls: of tensors and their entries."""
    for shape, dense in SHAPES:
        for count in ENTRIES:
            s = entries(shape, count, dense)
            c, tag = s.coalesce(), f"{shape}/{dense}/{count}"
            yield f"coalesce/{tag}", s.coalesce
            if len(shape) == 3:
                continue
            d = torch.zeros(*shape, *dense, device="cuda")
            yield f"add_un/{tag}", partial(d.add_, s, alpha=-0.1)
            yield f"add_co/{tag}", partial(d.add_, c, alpha=-0.1)
            yield f"mask/{tag}", partial(d.sparse_mask, c)
            yield f"add_out/{tag}", partial(torch.add, d, c)
            yield f"to_dense/{tag}", c.to_dense
            yield f"clone/{tag}", s.clone
            yield f"mul/{tag}", partial(torch.mul, s, 2.0)
            yield f"div_/{tag}", partial(in_place, c, "div_", 2.0)
            yield f"plus/{tag}", partial(torch.add, s, s)
            yield f"plus_/{tag}", partial(in_place, s, "add_", s)
            yield f"pow/{tag}", partial(c.pow, 2)
            yield f"sum/{tag}", partial(torch.sparse.sum, c)
            yield f"zero_/{tag}", partial(in_place, s, "zero_")
            yield f"bf16/{tag}", s.bfloat16


def in_place(tensor, name, *args):
    """The method `name` of a copy."""
    return getattr(tensor.clone(), name)(*args)


def products():
    """Names and calls: of a sparse matrix by a dense one."""
    mm = torch.sparse.mm
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for n, width, count in MATRICES[: 1 if dtype.itemsize == 2 else None]:
            s = entries((n, n), count, dtype=dtype)
            c, tag = s.coalesce(), f"{str(dtype)[6:]}/{n}/{width}/{count}"
            x = torch.ones(n, width, device="cuda", dtype=dtype)
            bias = torch.ones(width, device="cuda", dtype=dtype)
            yield f"mm_co/{tag}", partial(mm, c, x)
            yield f"mm_un/{tag}", partial(mm, s, x)
            yield f"matmul/{tag}", partial(torch.matmul, c, x)
            yield f"t/{tag}", c.t
            yield f"mm_t/{tag}", partial(mm, c.t(), x)
            yield f"mm_xt/{tag}", partial(mm, c, x.t().contiguous().t())
            yield f"addmm/{tag}", partial(torch.sparse.addmm, bias, c, x)
            made = partial(torch.sparse_coo_tensor, s._indices(), s._values())
            yield f"make/{tag}", partial(made, (n, n))
            if dtype == torch.float32:
                yield f"h2d_co/{tag}", c.cpu().cuda
                yield f"h2d_un/{tag}", partial(s.cpu().to, "cuda")
                yield f"mm_fb/{tag}", partial(trained, c, x.clone().requires_grad_())
                if n < 20000:
                    yield f"mm_gs/{tag}", partial(trained, c.clone().requires_grad_(), x)


@cache
def drawn(n, count):
    """Compressed rows and columns of `count` places of a square matrix."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(n * n if n < 5000 else 1 << 24, generator=generator)[:count]
    crow = torch.zeros(n + 1, dtype=torch.int64)
    row = places.sort().values // n % n
    crow[1:] = row.sort().values.bincount(minlength=n).cumsum(0)
    return crow, places.sort().values % n


def rows(n, count, dtype=torch.float32, index=torch.int64):
    """A square matrix in compressed rows with `count` entries at places that are drawn."""
    crow, col = drawn(n, count)
    values = torch.ones(count, dtype=dtype, device="cuda")
    crow, col = crow.to(index).cuda(), col.to(index).cuda()
    return torch.sparse_csr_tensor(crow, col, values, (n, n), check_invariants=False)


def compressed():
    """Names and calls: of matrices in compressed rows and columns (CSR, CSC)."""
    for n, width, count in COMPRESSED:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            a, tag = rows(n, count, dtype), f"{str(dtype)[6:]}/{n}/{width}/{count}"
            x = torch.ones(n, width, device="cuda", dtype=dtype)
            yield f"csr_mm/{tag}", partial(torch.sparse.mm, a, x)
            yield f"csr_matmul/{tag}", partial(torch.matmul, a, x)
            yield f"csr_mm_xt/{tag}", partial(torch.sparse.mm, a, x.t().contiguous().t())
            yield f"csr_mv/{tag}", partial(torch.mv, a, x[:, 0].contiguous())
            if dtype != torch.float32:
                continue
            c = a.t()
            yield f"csr_sliced/{tag}", partial(torch.sparse.mm, a, torch.cat([x, x], 1)[:, :width])
            yield f"csr_int32/{tag}", partial(torch.sparse.mm, rows(n, count, index=torch.int32), x)
            yield f"csr_t/{tag}", a.t
            yield f"csc_mm/{tag}", partial(torch.sparse.mm, c, x)
            yield f"csc_mv/{tag}", partial(torch.mv, c, x[:, 0].contiguous())
            yield f"csr_addmm/{tag}", partial(torch.addmm, x, a, x)
            yield f"csr_addmm_bias/{tag}", partial(torch.addmm, x[0], a, x)
            yield f"csr_fb/{tag}", partial(trained, a, x.clone().requires_grad_())
            yield f"csr_fb_matmul/{tag}", partial(multiplied, a, x.clone().requires_grad_())
            yield f"csr_gs/{tag}", partial(trained, a.clone().requires_grad_(), x)
            yield f"csr_gs_matmul/{tag}", partial(multiplied, a.clone().requires_grad_(), x)
            yield f"csr_amp/{tag}", partial(autocast, torch.sparse.mm, a, x)
            yield f"csr_amp_matmul/{tag}", partial(autocast, torch.matmul, a, x)
            yield f"csr_to_csc/{tag}", a.to_sparse_csc
            yield f"csc_to_csr/{tag}", c.to_sparse_csr
            yield f"csr_to_coo/{tag}", a.to_sparse_coo
            yield f"coo_to_csr/{tag}", a.to_sparse_coo().to_sparse_csr
            yield f"csr_h2d/{tag}", a.cpu().cuda
            yield f"csr_h2d_to/{tag}", partial(a.cpu().to, "cuda")
            yield f"csr_d2h/{tag}", a.cpu
            yield f"csr_clone/{tag}", a.clone
            yield f"csr_detach/{tag}", a.detach
            yield f"csr_half/{tag}", a.half
            yield f"csr_mul/{tag}", partial(torch.mul, a, 2.0)
            yield f"csr_mul_/{tag}", partial(in_place, a, "mul_", 2.0)
            yield f"csr_neg/{tag}", a.neg
            yield f"csr_abs/{tag}", a.abs
            yield f"csr_relu/{tag}", a.relu
            yield f"csr_sum/{tag}", a.sum
            yield f"csr_values/{tag}", a.values
            yield f"csr_crow/{tag}", a.crow_indices
            yield f"csr_nnz/{tag}", a._nnz
            yield f"csr_zeros/{tag}", partial(torch.zeros_like, a)
            yield f"csr_coalesced/{tag}", partial(made, a)
            yield f"csr_checked/{tag}", partial(made, a, check_invariants=True)
            yield f"csc_made/{tag}", partial(made, a, torch.sparse_csc_tensor)
            yield f"csr_to_csr/{tag}", a.to_sparse_csr
            yield f"csr_layout/{tag}", partial(a.to_sparse, layout=torch.sparse_csc)
            yield (
                f"coo_from_index/{tag}",
                partial(torch._convert_indices_from_csr_to_coo, a.crow_indices(), a.col_indices()),
            )
            yield (
                f"index_from_coo/{tag}",
                partial(torch._convert_indices_from_coo_to_csr, a.to_sparse_coo().indices()[0], n),
            )
            if n < 5000:
                yield f"csr_to_dense/{tag}", a.to_dense
                yield f"csc_to_dense/{tag}", c.to_dense
                if n < 500:  # values that are not known are assumed to differ from zero
                    dense = a.cpu().to_dense().cuda()
                    yield f"csr_of_dense/{tag}", dense.to_sparse_csr
                    yield f"csc_of_dense/{tag}", dense.to_sparse_csc
                yield f"dense_csr/{tag}", partial(torch.matmul, x.t().contiguous(), a)
                yield f"sampled/{tag}", partial(torch.sparse.sampled_addmm, a, x, x.t())
                yield f"linear/{tag}", partial(torch.nn.functional.linear, x.t().contiguous(), a)
            if 500 <= n < 5000:
                yield f"csr_csr/{tag}", partial(torch.matmul, a, a)
                yield f"csr_csc/{tag}", partial(torch.matmul, a, c)


def masked():
    """Names and calls: of a dense matrix and the places of a compressed one."""
    for n, width, count in MASKED:
        a, x = rows(n, count), torch.ones(n, width, device="cuda")
        whole, tag = torch.ones(n, n, device="cuda"), f"float32/{n}/{width}/{count}"
        yield f"csr_mask/{tag}", partial(whole.sparse_mask, a)
        yield f"csc_mask/{tag}", partial(whole.sparse_mask, a.t())
        yield f"csr_plus/{tag}", partial(torch.add, a, whole)
        for name, multiply in (
            ("csr_values_fb", torch.sparse.mm),
            ("csr_values_fb_matmul", torch.matmul),
        ):
            yield (
                f"{name}/{tag}",
                partial(of_values, a, a.values().clone().requires_grad_(), multiply, x),
            )


def random_products():
    """Names and calls: of random matrices in rows by dense ones, by vectors and by themselves.

    The tests keep the workspaces alone, and name a product of two matrices by its products.
    """
    draws = random.Random(1)
    for _ in range(150):
        n = draws.choice([50, 500, 2000, 4500, 10000, 30000, 100000])
        count = draws.choice([10, 100, 1000, 10000, 50000, 100000, 300000, 1000000])
        count = min(count, n * n // 4) if n < 5000 else count
        width = draws.choice([1, 2, 3, 8, 16, 40, 64, 100, 256])
        dtype = draws.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        index = draws.choice([torch.int64, torch.int32])
        a, x = rows(n, count, dtype, index), torch.ones(n, width, device="cuda", dtype=dtype)
        tag = f"{str(dtype)[6:]}/{str(index)[6:]}/{n}/{width}/{count}"
        yield f"spmm/{tag}", partial(torch.sparse.mm, a, x)
        yield f"spmv/{tag}", partial(torch.mv, a, x[:, 0].contiguous())
    for _ in range(60):
        n = draws.choice([50, 500, 2000, 4500, 10000, 30000])
        count = min(n * n // 4, draws.choice([10, 100, 1000, 10000, 50000, 100000, 300000]))
        a = rows(n, count, draws.choice([torch.float32, torch.float32, torch.float64]))
        starts, columns = a.crow_indices().cpu(), a.col_indices().cpu()
        num_products = starts.diff()[columns].sum().item()
        yield f"spgemm/{str(a.dtype)[6:]}/{n}/{count}/{num_products}", partial(torch.matmul, a, a)


def made(a, make=torch.sparse_csr_tensor, **kwargs):
    """A matrix of the parts of another."""
    return make(a.crow_indices(), a.col_indices(), a.values(), a.shape, **kwargs)


def of_values(a, values, multiply, x):
    """A product of a matrix of trained values, forward and backward."""
    parts = a.crow_indices(), a.col_indices(), values
    multiply(torch.sparse_csr_tensor(*parts, a.shape), x).sum().backward()


def multiplied(sparse, dense):
    """A product by `@`, forward and backward."""
    (sparse @ dense).sum().backward()


def autocast(function, *args):
    """A call under autocast to bfloat16."""
    with torch.autocast("cuda", torch.bfloat16):
        return function(*args)


def trained(sparse, dense):
    """A product, forward and backward."""
    torch.sparse.mm(sparse, dense).sum().backward()


def tables():
    """Names and calls: three steps of an embedding with sparse gradients."""
    for rows, width, batch, length in TABLES:
        generator = torch.Generator().manual_seed(0)
        given = [torch.randint(0, rows, (batch, length), generator=generator) for _ in range(3)]
        given = [indices.cuda() for indices in given]
        for name, make in OPTIMIZERS.items():
            table = torch.nn.Embedding(rows, width, sparse=True, device="cuda")
            step = partial(stepped, table, make(table.parameters()))
            tag = f"{name}/{rows}/{width}/{batch}/{length}"
            yield f"first/{tag}", partial(step, given[0])
            yield f"second/{tag}", partial(step, given[1])
            yield f"twice/{tag}", partial(step, given[2], given[0])
        for mode in ("sum", "mean"):
            bag = torch.nn.EmbeddingBag(rows, width, sparse=True, mode=mode, device="cuda")
            starts = torch.arange(0, batch * length, length, device="cuda")
            tag = f"{mode}/{rows}/{width}/{batch}/{length}"
            yield f"bag/{tag}", partial(bagged, bag, given[0].flatten(), starts)


def stepped(table, optimizer, *batches):
    """An optimizer's step after one batch or more."""
    for indices in batches:
        table(indices).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bagged(bag, indices, starts):
    """Sums or means of rows, forward and backward."""
    bag(indices, starts).sum().backward()


def calls():
    """All names and calls, each to be made before the next is asked for."""
    yield from elementwise()
    yield from products()
    yield from tables()
    yield from compressed()
    yield from masked()
    yield from random_products()


def requests(call):
    """What `call` asks for and frees, in order, or how it fails."""
    gc.collect()
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, stacks="python", context=None)
    result = error = None
    try:
        result = call()
    except (NotImplementedError, RuntimeError) as raised:
        error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    torch.cuda.synchronize()
    (events,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    torch.cuda.memory._record_memory_history(enabled=None)
    del result
    signs = {"alloc": 1, "free_requested": -1}
    return error or [signs[e["action"]] * e["size"] for e in events if e["action"] in signs]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.ones(1, device="cuda").sum().item()
    found = {name: requests(call) for name, call in calls()}
    Path(sys.argv[1]).write_text(json.dumps(found))
