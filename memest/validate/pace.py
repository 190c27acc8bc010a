"""Measures on the installed GPU how long kernels and the host take: `memest validate --pace`.

Each row is a call of torch: its work (`estimator/hardware/work.py`) and the microseconds of its
kernels. The rows of one GPU are `estimator/hardware/pace/NAME.json`, which `pace.py` interpolates.
"""

import importlib
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn.attention import SDPBackend, sdpa_kernel

from memest.estimator.hardware.pace import FORMAT
from memest.estimator.hardware.work import Work
from memest.estimator.tensors.placement import tensors_in
from memest.validate import host_pace
from memest.validate.host_pace import HALF, SHAPES, Call, Observer, waited_us

aten = torch.ops.aten
Names = dict[str, Any]  # tensors and numbers of a call, by their names in `SHAPES`
Case = Callable[[], Call]  # makes the tensors of a call, and returns it

MAX_FLOPS = 4e12
MAX_BYTES = 6e9  # largest measured call: its operations, and the bytes of its tensors
MEASURED_US = 2000  # time for which one case repeats, after two calls that are not timed
MOST_CALLS = 30  # of one case that the GPU runs one after another
HEATED_MS = 10  # for which the GPU trains before each case, for the clocks of a training
SLEEP_CYCLES_PER_US = 3_000  # for which the GPU sleeps while the host launches: 1.5 us
NUM_PARTS = 3  # rounds over the families: time that runs out costs each of them some calls
FULL = torch.float32
DTYPES = HALF, FULL
PRECISIONS = {"half": HALF, "full": FULL}


def measure(seconds: float, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure the GPU for at most `seconds`; `write` gets the result after each kernel family."""
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "format": FORMAT, "device": properties.name, "memory_bytes": properties.total_memory,
        "torch": torch.__version__, "host": {}, "kernels": defaultdict(list),
    }  # fmt: skip
    started = time.perf_counter()
    models, hosts = host_pace.model_times(), list[dict[str, float]]()
    heat, first_us = heater(), defaultdict(list)
    failed: dict[str, None] = {}
    for part, family in itertools.product(range(NUM_PARTS), FAMILIES):
        if family is FAMILIES[0]:  # hosts change their speed
            found["models"] = next(models)
            hosts.append(host_pace.host_times())
            found["host"] = {k: statistics.median(h[k] for h in hosts) for k in hosts[0]}
            found["host"] |= host_pace.fitted_times(*found["models"].values())
        for make in rounds(family)[part]:
            if time.perf_counter() - started > seconds:
                break
            try:
                work, us, first = measured(make, heat)
            except (RuntimeError, AssertionError, TypeError) as error:
                failed[f"{family.__name__}: {error!r}"[:200]] = None
                torch.cuda.empty_cache()
                continue
            row = [*work.size, work.num_flops, work.num_bytes, round(us, 2)]
            found["kernels"][work.kind].append(row)
            first_us[work.kind].append(first)
            found["first_us"] = {k: round(statistics.median(v)) for k, v in first_us.items()}
        torch.cuda.empty_cache()
        found["seconds"], found["failed"] = time.perf_counter() - started, list(failed)
        write(found)
    return found


def rounds(family: Callable[[], Iterator[Case]]) -> list[list[Case]]:
    """Return the cases of a family in rounds, each with some of every kind."""
    mixed = list(family())
    Random(0).shuffle(mixed)
    return [mixed[part::NUM_PARTS] for part in range(NUM_PARTS)]


def measured(make: Case, heat: Callable[[], None]) -> tuple[Work, float, float]:
    """Return a call's work, its kernels' microseconds, and extra ones of the first call.

    `make` makes the tensors and returns the call. `heat` keeps the GPU busy for a moment.
    """
    call = make()
    with torch.no_grad():
        first, second = waited_us(call), waited_us(call)
        with Observer() as observer:
            call()
        assert len(observer.found) == 1, [w.kind for w in observer.found]
        host_us = min(second, MEASURED_US)
        once = elapsed_us(call, 3, host_us)
        heat()
        count = max(3, min(MOST_CALLS, int(MEASURED_US / once)))
        us = min(elapsed_us(call, count, host_us) for _ in range(3))  # pauses of the host only add
    return observer.found[0], us, max(0.0, first - second)


def heater() -> Callable[[], None]:
    """Return a function that trains a small transformer for `HEATED_MS`."""
    layers = nn.Sequential(
        *(nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True) for _ in "1234")
    ).to("cuda", HALF)
    x = random(16, 1024, 1024)

    def heat(ms: float = HEATED_MS) -> None:
        started = time.perf_counter()
        while time.perf_counter() - started < 1e-3 * ms:
            with torch.enable_grad():
                layers(x).sum().backward()
            torch.cuda.synchronize()

    heat(3000)
    return heat


def elapsed_us(call: Call, count: int, host_us: float) -> float:
    """Return microseconds of one of `count` calls that the GPU runs one after another.

    The GPU sleeps until the host, which takes at most `host_us` for each, has launched all.
    """
    cuda: Any = torch.cuda
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(int(SLEEP_CYCLES_PER_US * host_us * count))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(max(0.5, 1e3 * start.elapsed_time(end) / count))


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Return a tensor of random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=FULL if dtype is FULL else None).to(dtype)


def cases(make: Callable[..., Call], *axes: Iterable[Any]) -> Iterator[Case]:
    """Return `make` with each combination of its arguments."""
    return (partial(make, *each) for each in itertools.product(*axes))


def products() -> Iterator[Case]:
    """Matrix products, in three precisions, and some with odd sizes."""
    for name, *more in SHAPES["precisions"]:
        how = PRECISIONS[name], *more
        for m, n, k in itertools.product(*SHAPES["products"]):
            item = 2 if how[0] is HALF else 4
            is_large = item * (m * n + m * k + n * k) > MAX_BYTES
            if 2 * m * n * k > (MAX_FLOPS if how[0] is HALF else MAX_FLOPS / 8) or is_large:
                continue
            yield partial(_product, (m, n, k), *how)
        yield from (partial(_product, sizes, *how) for sizes in SHAPES["tall"])
    for m, n, k in itertools.product((1024, 8192), (50257, 1001, 4001), (256, 1024, 4096)):
        yield partial(_product, (m, n, k), HALF, False)
        yield partial(_product, (m, k, n), HALF, False)


def batched_products() -> Iterator[Case]:
    """Products of many small matrices, as attention makes them without a fused kernel."""
    for name, *more in SHAPES["precisions"]:
        how = PRECISIONS[name], *more
        for b, n, d in itertools.product((32, 256), (64, 256, 1024, 2048), (64, 128)):
            for sizes in ((n, n, d), (n, d, n)):
                if b * n * n * 4 <= MAX_BYTES / 3:
                    yield partial(_product, sizes, *how, batch=(b,))
        for b, *sizes in SHAPES["narrow"]:
            if how[0] is FULL or not any(n % 8 for n in sizes[1:]):  # half precision pads others
                yield partial(_product, sizes, *how, batch=(b,))


def _product(
    sizes: Sequence[int],
    dtype: torch.dtype,
    tf32: bool,
    is_adjacent: tuple[bool, bool] = (True, True),
    *,
    batch: tuple[int, ...] = (),
) -> Call:
    """Return a product of matrices with `sizes` (m, n, k): [m, k] by [k, n].

    `is_adjacent` has, for the left and the right one, whether it is adjacent along `k`.
    """
    m, n, k = sizes
    made = (random(*batch, rows, k, dtype=dtype) for rows in (m, n))
    x, y = (
        t if along else t.mT.contiguous().mT for t, along in zip(made, is_adjacent, strict=True)
    )
    torch.backends.cuda.matmul.allow_tf32 = tf32
    operator = aten.bmm.default if batch else aten.mm.default
    return lambda: operator(x, y.mT)


def attention() -> Iterator[Case]:
    """The fused attention kernels, forward and backward."""
    for name, precision in SHAPES["attention"]:
        backend, dtype = getattr(SDPBackend, name), PRECISIONS[precision]
        sizes: tuple[Any, ...]
        for heads, length, keys, d in SHAPES["crossed"]:
            sizes = [heads], [(length, keys)], [d], [{}], (False, True)
            yield from cases(_attention, [backend], [dtype], *sizes)
        for length, d, causal in itertools.product(SHAPES["lengths"], (64, 128), (0, 1)):
            heads = {max(8, 65536 // length), max(8, 524288 // length)}
            sizes = heads, [(length, length)], [d], [{"is_causal": bool(causal)}]
            yield from cases(_attention, [backend], [dtype], *sizes, (False, True))
            if length in (128, 512, 2048) and d == 64 and backend is not SDPBackend.CUDNN_ATTENTION:
                drops = [{"is_causal": bool(causal), "dropout_p": 0.1}]
                yield from cases(_attention, [backend], [dtype], *sizes[:3], drops, (False, True))
    biased = tuple(itertools.product((128, 512, 2048), (8, 64)))
    yield from named("biased", _bias_names, DTYPES, biased, names=("bias", "learned"))
    yield from named("biased", _bias_names, [HALF], biased, names=("cudnn", "cudnn_dropout"))


def _bias_names(dtype: torch.dtype, sizes: tuple[int, int]) -> Names:
    length, samples = sizes
    found = {name: random(samples, 8, length, 64, dtype=dtype) for name in "qkv"}
    bias = random(1, 8, length, length, dtype=dtype)
    return found | {"bias": bias.expand(samples, -1, -1, -1), "length": length}


def _attention(
    backend: Any, dtype: Any, heads: int, lengths: Any, d: int, how: dict[str, Any], backward: bool
) -> Call:
    sides = lengths[0], lengths[1], lengths[1]
    q, k, v = (random(max(1, heads // 8), 8, length, d, dtype=dtype) for length in sides)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return nn.functional.scaled_dot_product_attention(q, k, v, **how)

    if not backward:
        return run
    with torch.enable_grad():
        for t in (q, k, v):
            t.requires_grad_()
        out = run()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def convolutions() -> Iterator[Case]:
    """Convolutions forward and backward, in two precisions and two layouts."""
    masks = (None, (True, True), (False, True), (True, False))
    for dtype, last, mask in itertools.product((FULL, HALF), (False, True), masks):
        sizes = SHAPES["transposed" if mask == (True, False) else "convolutions"]
        if mask == (False, True):  # without the gradient of the input: of images, and some others
            sizes = [s for i, s in enumerate(sizes) if s[1] == 3 or i % 9 == 0]
        if last:  # cuDNN compiles a kernel for each depthwise one
            sizes = [s for i, s in enumerate(sizes) if i % 3 == 0 or s[6] < s[1]]
        yield from cases(_convolution, [dtype], [last], [mask], [2], sizes)
        if not last and mask != (True, False):
            yield from cases(_convolution, [dtype], [last], [mask], [1], SHAPES["sequences"])
            volumes = [v for v in SHAPES["volumes"] if mask != (False, True) or v[1] <= 3]
            yield from cases(_convolution, [dtype], [last], [mask], [3], volumes)


def _convolution(
    dtype: Any, last: bool, mask: tuple[bool, bool] | None, dims: int, sizes: Any
) -> Call:
    samples, channels, side, outputs, window, stride, groups = sizes
    layout = torch.channels_last if last else torch.contiguous_format
    sides, windows = (n if isinstance(n, list) else [n] * dims for n in (side, window))
    x = random(samples, channels, *sides, dtype=dtype).to(memory_format=layout)
    weight = random(outputs, channels // groups, *windows, dtype=dtype)
    weight = weight.to(memory_format=layout)
    padding = [0 if stride == n else n // 2 for n in windows]
    options = ([stride] * dims, padding, [1] * dims, False, [0] * dims, groups)
    if mask is None:
        return lambda: aten.convolution.default(x, weight, None, *options)
    gradient = aten.convolution.default(x, weight, None, *options)
    given = (gradient, x, weight, None, *options, [*mask, False])
    return lambda: aten.convolution_backward.default(*given)


def named(
    family: str, make: Callable[..., Names], *axes: Iterable[Any], names: Sequence[str] = ()
) -> Iterator[Case]:
    """Yield the calls of a kernel family, on tensors and numbers that `make` returns by name.

    A call has a name and a position: that of a forward or a backward.
    """
    calls: dict[str, list[Any]] = SHAPES["calls"][family]
    forms = [(name, n) for name in names or calls for n in range(len(calls[name]))]
    return cases(partial(_named, family, make), *axes, forms)


def _named(family: str, make: Callable[..., Names], *given: Any) -> Call:
    *sizes, (name, position) = given
    names = make(*sizes)
    steps = SHAPES["calls"][family][name][: position + 1]
    for step in steps:
        args = _resolved(step[1:], names)
        options = args.pop() if args and isinstance(args[-1], dict) else {}
        call = partial(attrgetter(step[0])(aten), *args, **options)
        if step is not steps[-1]:
            names |= {f"r{i}": each for i, each in enumerate(tensors_in([call()]))}
    return call


def _resolved(value: Any, names: Names) -> Any:
    """Return a value of a table, with each name in it replaced by its object."""
    if isinstance(value, dict):
        return {key: _resolved(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, names) for each in value]
    return names[value] if isinstance(value, str) else value


def memory_kernels() -> Iterator[Case]:
    """Kernels that memory bounds."""
    yield from named("memory", _memory_names, DTYPES, SHAPES["rows"])
    yield from named("apart", _batch_names, DTYPES, SHAPES["classes"])
    yield from named("turned", _batch_names, DTYPES, SHAPES["batches"])


def _batch_names(dtype: torch.dtype, shape: list[int]) -> Names:
    x, order = random(*shape, dtype=dtype), torch.contiguous_format
    return {"x": x, "dtype": dtype, "turned": x.mT, "y": x.view(x.mT.shape), "contiguous": order}


def _memory_names(dtype: torch.dtype, shape: list[int]) -> Names:
    rows, columns = shape
    x = random(rows, columns, dtype=dtype)
    wide = min(rows, 4096)
    return {
        "x": x, "y": x.clone(), "turned": x.t(), "blocks": x.view(-1, 32, columns),
        "columns": columns, "weight": x.new_ones(columns), "one": x.new_ones(()),
        "mean": torch.ones(rows, 1, device="cuda"), "keep": torch.ones_like(x, dtype=torch.bool),
        "chosen": torch.zeros(rows, dtype=torch.long, device="cuda"), "wide": wide,
        "ids": torch.arange(rows, device="cuda") % wide, "table": x[:wide], "dtype": dtype,
        "other": FULL if dtype is HALF else HALF, "contiguous": torch.contiguous_format,
    }  # fmt: skip


def row_kernels() -> Iterator[Case]:
    """Kernels over rows besides `memory_kernels`: RMS norm, attention heads, sorting."""
    shapes = [shape for shape in SHAPES["rows"] if shape[1] % 64 == 0]
    return named("rows", _row_names, DTYPES, shapes)


def _row_names(dtype: torch.dtype, shape: list[int]) -> Names:
    rows, columns = shape
    x = random(rows, columns, dtype=dtype)
    heads, short = (
        x.view(rows // 64, 64, columns // n, n).transpose(1, 2) for n in (64, 16)
    )  # fmt: skip
    return {
        "x": x, "y": x.clone(), "rows": rows, "columns": columns, "double": 2 * columns,
        "weight": x.new_ones(columns), "mean": torch.ones(rows, 1, device="cuda"),
        "column": x.new_ones(rows, 1), "heads": heads, "joined": heads.contiguous(),
        "short": short, "half": x[:, : columns // 2], "last": x.view(-1, 64),
        "middle": x.view(-1, 64, columns), "contiguous": torch.contiguous_format,
    }  # fmt: skip


def indexed() -> Iterator[Case]:
    """Kernels that read or write rows in the order of random numbers."""
    return named("indexed", _indexed_names, DTYPES, SHAPES["indexed"])


def _indexed_names(dtype: torch.dtype, shape: list[int]) -> Names:
    x = random(*shape, dtype=dtype)
    ids = torch.randint(len(x), (len(x),), device="cuda")
    rows = ids[:, None].expand_as(x)
    return {"x": x, "y": torch.zeros_like(x), "ids": ids, "rows": rows, "each": rows.contiguous()}


NUM_GROUPS = 32  # of group norms, as most models have them


def image_kernels() -> Iterator[Case]:
    """Norms, pools, resizing and losses of images, in two layouts."""
    images, both, one = SHAPES["images"], (False, True), (False,)
    groups = [sizes for sizes in images if sizes[1] % NUM_GROUPS == 0] + SHAPES["groups"]
    of_images: list[tuple[Any, ...]] = [
        (both, images, {}, "batch_norm", "native"),
        (both, images[::2], {}, "max", "mean", "nearest", "bilinear"),
        (both, images[::2], {"scale": 8}, "bilinear"),
        (both, images[5:6], {"scale": 64}, "bilinear"),  # all pixels are added to few
        (one, groups, {}, "group_norm"),
    ]
    for name, *sizes, window, stride in SHAPES["pools"]:
        of_images.append((both, [sizes], {"window": window, "stride": stride}, name))
    of_images += [(one, [sizes], {}, name) for name, *sizes in SHAPES["samplings"]]
    for layouts, shapes, options, *names in of_images:
        make = partial(_image_names, **options)
        yield from named("images", make, DTYPES, layouts, shapes, names=names)


def _image_names(
    dtype: Any, last: bool, sizes: list[int], *, window: int = 2, stride: int = 2, scale: int = 2
) -> Names:
    samples, channels, side, *more = sizes
    layout = torch.channels_last if last else torch.contiguous_format
    x = random(samples, channels, side, more[0] if more else side, dtype=dtype)
    x = x.to(memory_format=layout)
    corner = max(1, x.shape[-1] * 2 // scale)
    small = x[:, :, :corner, :corner].contiguous(memory_format=suggest_memory_format(x))
    where = samples, *x.shape[2:]
    ones = {n: torch.ones(channels, device="cuda") for n in ("one", "bias", "mean", "variance")}
    half = x.half() if dtype is HALF else x  # cuDNN takes no bfloat16
    return ones | {
        "x": x, "copy": x.clone(), "half": half, "half_copy": half.clone(),
        "samples": samples, "channels": channels, "pixels": x[0, 0].numel(),
        "groups": more[1] if len(more) > 1 else NUM_GROUPS, "weight": x.new_ones(channels),
        "shift": x.new_ones(channels), "scalar": x.new_ones(()),
        "window": [window] * 2, "stride": [stride] * 2, "margin": [(window - 1) // 2] * 2,
        "small": small, "shape": list(small.shape), "large": [scale * n for n in small.shape[2:]],
        "grid": torch.rand(*where, 2, device="cuda", dtype=dtype) * 2 - 1,
        "labels": torch.zeros(where, device="cuda", dtype=torch.long),
    }  # fmt: skip


def transforms() -> Iterator[Case]:
    """Fourier transforms of numbers in single precision, and losses of sequences."""
    yield from named("transforms", _transform_names, SHAPES["transforms"])
    yield from named("losses", _loss_names, ((128, 8, 32), (512, 16, 100), (1024, 32, 5000)))


def _transform_names(sizes: list[list[int]]) -> Names:
    x = random(*sizes[0], dtype=FULL)
    return {"x": x, "whole": torch.complex(x, x), "dims": sizes[1]}


def _loss_names(sizes: tuple[int, int, int]) -> Names:
    steps, samples, classes = sizes
    x = random(steps, samples, classes, dtype=FULL).log_softmax(-1)
    labels = torch.ones(samples, steps // 4, device="cuda", dtype=torch.long)
    lengths, targets = [steps] * samples, [steps // 4] * samples
    return {"x": x, "labels": labels, "lengths": lengths, "targets": targets}


def many_tensors() -> Iterator[Case]:
    """Optimizers' kernels over lists of parameters."""
    return named("lists", _list_names, SHAPES["lists"])


def _list_names(size: list[int]) -> Names:
    count, numel = size
    found: Names = {
        name: [torch.rand(numel, device="cuda") for _ in range(count)] for name in "pgmv"
    }
    return found | {"steps": [torch.ones((), device="cuda") for _ in range(count)]}


def factorizations() -> Iterator[Case]:
    """Factorizations of matrices, as optimizers make them."""
    return cases(_factorization, (32, 128, 512, 2048), ("qr", "eigh", "svd", "cholesky_ex"))


def _factorization(n: int, name: str) -> Call:
    x = random(n, n, dtype=FULL)
    x = x @ x.T + n * torch.eye(n, device="cuda")
    return lambda: getattr(torch.linalg, name)(x)


def quantized() -> Iterator[Case]:
    """Kernels of bitsandbytes, if it is installed: 4-bit weights, LLM.int8, 8-bit optimizers."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return iter(())
    shapes = ((256, 1024), (1024, 4096), (4096, 4096), (4096, 14336), (8192, 28672))
    return cases(_quantized, shapes, DTYPES, ("weights", "adam", "int8", "quantize"))


def _quantized(shape: tuple[int, int], dtype: torch.dtype, name: str) -> Call:
    rows, columns = shape
    functional: Any = importlib.import_module("bitsandbytes.functional")
    ops = torch.ops.bitsandbytes
    x = random(rows, columns, dtype=dtype)
    if name == "weights":
        made, state = functional.quantize_4bit(x, quant_type="nf4")
        out = torch.empty_like(x)
        given = (made, state.absmax, 64, "nf4", x.shape, dtype)
        return lambda: ops.dequantize_4bit.out(*given, out=out)
    if name == "quantize":
        half = x.half()
        return lambda: ops.int8_vectorwise_quant.default(half, 0.0)
    if name == "int8":
        left = torch.ones(rows, columns, device="cuda", dtype=torch.int8)
        right = torch.ones(4096, columns, device="cuda", dtype=torch.int8)
        return lambda: ops.int8_linear_matmul.default(left, right)
    states = [torch.zeros(rows, columns, device="cuda", dtype=torch.uint8) for _ in "12"]
    scales = [torch.ones(x.numel() // 256, device="cuda") for _ in "12"]
    codes = [functional.create_dynamic_map(signed).cuda() for signed in (True, False)]
    numbers = (0.9, 0.99, 0.0, 0.0, 1e-8, 1, 1e-3)
    given = ("adam", x, x.clone(), *states, *numbers, *codes, *scales, 0.0, 1.0)
    return lambda: ops.optimizer_update_8bit_blockwise.default(*given)


def recurrent() -> Iterator[Case]:
    """Recurrent networks of cuDNN, forward and backward: one step follows another."""
    sizes = (8, 64, 256), (128, 512, 1024), (False, True)
    return cases(_recurrent, SHAPES["recurrent"], DTYPES, *sizes)


def _recurrent(
    network: tuple[str, int, bool], dtype: torch.dtype, samples: int, hidden: int, backward: bool
) -> Call:
    name, layers, both = network
    length = 32  # few enough kernels for the queue of launches
    mode = {"RNN": 1, "LSTM": 2, "GRU": 3}[name]  # as cuDNN counts them
    x = random(length, samples, hidden, dtype=dtype)
    h = random(layers * (2 if both else 1), samples, hidden, dtype=dtype)
    c = torch.zeros_like(h) if name == "LSTM" else None
    made = getattr(nn, name)(hidden, hidden, num_layers=layers, bidirectional=both)
    made = made.to("cuda", dtype)
    weights = [p.detach() for p in made.parameters()]
    shape = mode, hidden, 0, layers
    flatten: Any = torch._cudnn_rnn_flatten_weight  # without it each call copies the weights
    buffer = flatten(weights, 4, hidden, *shape, False, both)
    options: Any = (*shape, False, 0.0, True, both, [], None)

    def forward() -> Any:
        return aten._cudnn_rnn.default(x, weights, 4, buffer, h, c, *options)

    if not backward:
        return forward
    out, _, _, reserve, _ = forward()
    given = (x, weights, 4, buffer, h, c, out, torch.randn_like(out), None, None)
    wanted = [True, False, False, True]
    return lambda: aten._cudnn_rnn_backward.default(*given, *options, reserve, wanted)


FAMILIES = (
    products, memory_kernels, row_kernels, image_kernels, attention, many_tensors, convolutions,
    batched_products, factorizations, quantized, indexed, transforms, recurrent,
)  # fmt: skip


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a result to `path`, one kind of kernel a line."""
    head = {key: value for key, value in found.items() if key != "kernels"}
    kinds = ",\n".join(
        f"  {json.dumps(kind)}: {json.dumps(rows, separators=(',', ':'))}"
        for kind, rows in found["kernels"].items()
    )
    path.write_text(f'{json.dumps(head)[:-1]},\n "kernels": {{\n{kinds}\n }}}}\n', "utf-8")
