"""What torch's generator draws on the card: numbers, and by how much it moves on.

random_draws.py OUT.json

OUT holds for each draw the offset before it, the step, and some of the numbers with their places.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

SEED = 1234
COUNTS = [1, 5, 1000, 4097, 270337, 1100000]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTEGERS = [torch.int64, torch.int32, torch.uint8]
SHOWN = 40


def of_floats(n, dtype):
    """Names and draws of n floating-point numbers."""
    empty, full = partial(torch.empty, device="cuda"), partial(torch.full, device="cuda")
    yield "rand", lambda: torch.rand(n, device="cuda", dtype=dtype)
    yield "randn", lambda: torch.randn(n, device="cuda", dtype=dtype)
    yield "uniform_", lambda: empty(n, dtype=dtype).uniform_(-2, 3)
    yield "normal_", lambda: empty(n, dtype=dtype).normal_(1, 2)
    yield "exponential_", lambda: empty(n, dtype=dtype).exponential_()
    yield "bernoulli_p", lambda: empty(n, dtype=dtype).bernoulli_(0.3)
    yield "bernoulli_t", lambda: torch.bernoulli(full((n,), 0.3, dtype=dtype))
    yield "rand_like2d", lambda: torch.rand_like(empty(n, 2, dtype=dtype))
    yield "rand_t", lambda: torch.rand_like(empty(2, n, dtype=dtype).t())
    yield "dropout", lambda: functional.dropout(full((n,), 1.0, dtype=dtype), 0.3)
    yield "geometric", lambda: empty(n, dtype=dtype).geometric_(0.3)
    yield "cauchy", lambda: empty(n, dtype=dtype).cauchy_()
    yield "log_normal", lambda: empty(n, dtype=dtype).log_normal_()


def of_integers(n, dtype):
    """Names and draws of n integers of this type."""
    yield "randint", lambda: torch.randint(0, 100, (n,), device="cuda", dtype=dtype)
    yield "random_", lambda: torch.empty(n, device="cuda", dtype=dtype).random_()


def of_others(n):
    """Names and draws of n numbers."""
    cuda = {"device": "cuda"}
    yield "randint_big", lambda: torch.randint(0, 1 << 40, (n,), **cuda)
    yield "randint_32", lambda: torch.randint(-(1 << 31), 1 << 31, (n,), **cuda)
    yield "randint_lo", lambda: torch.randint(-7, 50257, (n,), **cuda)
    yield "bern_bool", lambda: torch.empty(n, **cuda, dtype=torch.bool).bernoulli_(0.15)
    yield "randperm", lambda: torch.randperm(n, **cuda)
    odds = torch.ones(min(max(n, 2), 4097), **cuda)
    yield "multinomial1", lambda: torch.multinomial(odds, 1)
    yield "poisson", lambda: torch.poisson(torch.full((n,), 3.0, **cuda))
    yield "gamma", lambda: torch._standard_gamma(torch.full((n,), 3.0, **cuda))
    yield "rrelu", lambda: functional.rrelu(-torch.ones(n, **cuda), training=True)
    yield "normal_ts", lambda: torch.normal(torch.zeros(n, **cuda), torch.ones(n, **cuda))
    yield "normal_sz", lambda: torch.normal(0.0, 1.0, (n,), **cuda)
    yield "dropout_chan", lambda: functional.dropout1d(torch.ones(1, n, 4, **cuda), 0.3)
    yield "alpha_dropout", lambda: functional.alpha_dropout(torch.ones(n, **cuda), 0.3, True)


def of_attention(batch, heads, length, width, name):
    """Names and draws of dropout within attention."""
    given = [
        torch.zeros(batch, heads, length, width, device="cuda", dtype=getattr(torch, name))
    ] * 3
    attention = partial(functional.scaled_dot_product_attention, *given, dropout_p=0.1)

    def by(backend):
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            attention()

    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        if name != "float32" or backend in ("EFFICIENT_ATTENTION", "MATH"):
            yield f"sdpa/{backend}", partial(by, backend)


def draws():
    """All names and draws."""
    for n in COUNTS:
        for dtype in FLOATS:
            for name, draw in of_floats(n, dtype):
                yield f"{name}/{str(dtype)[6:]}/{n}", draw
        for dtype in INTEGERS:
            for name, draw in of_integers(n, dtype):
                yield f"{name}/{str(dtype)[6:]}/{n}", draw
        for name, draw in of_others(n):
            yield f"{name}/{n}", draw
    odds = torch.arange(1, 1001, device="cuda", dtype=torch.float32)
    for n in (1, 10, 1000, 100000):
        yield f"multinomial_w/{n}", partial(torch.multinomial, odds, n, replacement=True)
    for shape in (
        (2, 4, 128, 64, "bfloat16"),
        (3, 8, 257, 64, "float16"),
        (2, 4, 128, 64, "float32"),
    ):
        for name, draw in of_attention(*shape):
            yield "/".join(map(str, (name, *shape))), draw


def offset():
    """Of the default generator of the card."""
    return int.from_bytes(bytes(torch.cuda.get_rng_state()[8:].tolist()), "little")


def begun():
    """Let the generator begin anew, a draw ahead."""
    torch.manual_seed(SEED)
    torch.rand(5, device="cuda")
    return offset()


def places(count):
    """Of the numbers that are kept."""
    spread = torch.linspace(0, count - 1, min(count, SHOWN)).long()
    return torch.cat([torch.arange(min(count, SHOWN)), spread]).unique()


def record(draw):
    """The offset before, the step, and numbers with their places."""
    before, made = begun(), draw()
    found = {"before": before, "delta": offset() - before}
    if isinstance(made, torch.Tensor):
        numbers = made.double().flatten().cpu()
        chosen = places(numbers.numel())
        found["values"] = [chosen.tolist(), [repr(float(x)) for x in numbers[chosen]]]
    return found


if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    Path(sys.argv[1]).write_text(json.dumps({name: record(draw) for name, draw in draws()}))
