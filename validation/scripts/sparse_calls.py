"""What torch asks of the allocator for sparse tensors, call by call.

sparse_calls.py OUT.json

OUT holds for each call the sizes that it asks for, below 0 where they are freed, in order; or the
error that torch ends it with.
"""

import gc
import json
import sys
import warnings
from functools import partial
from pathlib import Path

import torch

ENTRIES = [1, 2, 3, 100, 1000, 4000, 20000, 100000]
SHAPES = [((100000,), (16,)), ((100000,), (64,)), ((300, 400, 500), ()), ((1000, 1000), (8,))]
MATRICES = [
    (1000, 16, 5000), (2708, 7, 13264), (2708, 1433, 13264), (20000, 64, 200000), (4096, 1, 100000),
    (50000, 3, 77),
]  # fmt: skip
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


def requests(call):
    """What `call` asks for and frees, in order, or how it fails."""
    gc.collect()
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, stacks="python", context=None)
    result = error = None
    try:
        result = call()
    except NotImplementedError as raised:
        error = str(raised)
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
