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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn.attention import SDPBackend, sdpa_kernel

from memest.estimator.hardware.pace import FORMAT
from memest.estimator.hardware.work import Work
from memest.validate.host_pace import (
    HALF,
    SHAPES,
    Call,
    Observer,
    fitted_times,
    host_times,
    model_times,
    waited_us,
)

aten = torch.ops.aten
Calls = Callable[[Tensor], dict[str, Call]]  # calls on a tensor by name
Case = Callable[[], Call]  # makes the tensors of a call, and returns it

MAX_FLOPS = 4e12
MAX_BYTES = 6e9  # largest measured call: its operations, and the bytes of its tensors
MEASURED_US = 3000  # time for which one case repeats, after two calls that are not timed
HEATED_MS = 30  # for which the GPU trains before each case, for the clocks of a training
SLEEP_CYCLES_PER_US = 3_000  # for which the GPU sleeps while the host launches: 1.5 us
DIMS = (16, 128, 1024, 8192, 65536)
INNER = (64, 256, 1024, 4096, 16384)
FULL = torch.float32
DTYPES = HALF, FULL
OF_PRODUCTS: tuple[tuple[Any, ...], ...] = (
    (HALF, False), (FULL, True), (FULL, True, (True, False)), (FULL, True, (False, False)),
    (FULL, False),
)  # fmt: skip
"""Dtypes of products, whether TF32 is allowed, and layouts of the matrices."""


def measure(seconds: float, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure the GPU for at most `seconds`; `write` receives the result after each family."""
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "format": FORMAT,
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "host": {},
        "kernels": defaultdict(list),
    }
    started = time.perf_counter()
    found["models"] = model_times()
    found["host"] = host_times() | fitted_times(*found["models"].values())
    heat, first_us = heater(), defaultdict(list)
    failed: dict[str, None] = {}
    for family in FAMILIES:
        for make in family():
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


def measured(make: Case, heat: Callable[[], None]) -> tuple[Work, float, float]:
    """Return the work of a call, microseconds of its kernels, and the extra ones of its first.

    `make` makes the tensors and returns the call. `heat` keeps the GPU busy for a moment.
    """
    call = make()
    with torch.no_grad():
        first, second = waited_us(call), waited_us(call)
        with Observer() as observer:
            call()
        assert len(observer.found) == 1, [w.kind for w in observer.found]
        once = elapsed_us(call, 3, second)
        heat()
        count = max(3, min(60, int(MEASURED_US / once)))
        us = min(elapsed_us(call, count, second) for _ in range(3))  # pauses of the host only add
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
    for how in OF_PRODUCTS:
        for m, n, k in itertools.product(DIMS, INNER, INNER):
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
    for how in OF_PRODUCTS:
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
    x = _matrix(*batch, m, k, dtype=dtype, is_adjacent=is_adjacent[0])
    y = _matrix(*batch, n, k, dtype=dtype, is_adjacent=is_adjacent[1]).mT
    torch.backends.cuda.matmul.allow_tf32 = tf32
    operator = aten.bmm.default if batch else aten.mm.default
    return lambda: operator(x, y)


def _matrix(*shape: int, dtype: torch.dtype, is_adjacent: bool) -> Tensor:
    x = random(*shape, dtype=dtype)
    return x if is_adjacent else x.mT.contiguous().mT


LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 8192)


def attention() -> Iterator[Case]:
    """The fused attention kernels, forward and backward."""
    kinds = [
        (SDPBackend.FLASH_ATTENTION, HALF),
        (SDPBackend.CUDNN_ATTENTION, HALF),
        (SDPBackend.EFFICIENT_ATTENTION, HALF),
        (SDPBackend.EFFICIENT_ATTENTION, FULL),
    ]
    for backend, dtype in kinds:
        for length, d, causal in itertools.product(LENGTHS, (64, 128), (0, 1)):
            heads = {max(8, 65536 // length), max(8, 524288 // length)}
            sizes = heads, [length], [d], [bool(causal)]
            yield from cases(_attention, [backend], [dtype], *sizes, (False, True))


def _attention(
    backend: Any, dtype: Any, heads: int, length: int, d: int, causal: bool, backward: bool
) -> Call:
    q, k, v = (random(max(1, heads // 8), 8, length, d, dtype=dtype) for _ in range(3))

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    if not backward:
        return run
    with torch.enable_grad():
        for t in (q, k, v):
            t.requires_grad_()
        out = run()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


FIRST_CONVOLUTIONS = [
    sizes for i, sizes in enumerate(SHAPES["convolutions"]) if sizes[1] == 3 or i % 9 == 0
]
"""Convolutions that are also measured without the gradient of their input: of images, and some."""


def convolutions() -> Iterator[Case]:
    """Convolutions forward and backward, in two precisions and two layouts."""
    masks = (None, (True, True), (False, True))
    for dtype, last, mask in itertools.product((FULL, HALF), (False, True), masks):
        sizes = SHAPES["convolutions"] if mask != (False, True) else FIRST_CONVOLUTIONS
        yield from cases(_convolution, [dtype], [last], [mask], [2], sizes)
        if not last:
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


def named(calls: Calls, shapes: Iterable[Any]) -> Iterator[Case]:
    """Return `calls` on a tensor of each shape and precision."""

    def call_of(dtype: torch.dtype, shape: tuple[int, int], name: str) -> Call:
        return calls(random(*shape, dtype=dtype))[name]

    return cases(call_of, DTYPES, shapes, calls(torch.zeros(64, 64)))


def memory_kernels() -> Iterator[Case]:
    """Kernels that memory bounds."""
    yield from named(_memory_calls, SHAPES["rows"])
    yield from cases(_apart, DTYPES, SHAPES["classes"], ("_softmax", "_log_softmax"), (False, True))


def _apart(dtype: torch.dtype, shape: list[int], name: str, backward: bool) -> Call:
    """Return a softmax over the middle dimension."""
    x = random(*shape, dtype=dtype)
    if not backward:
        return lambda: getattr(aten, name).default(x, 1, False)
    return lambda: getattr(aten, f"{name}_backward_data").default(x, x, 1, dtype)


def _memory_calls(x: Tensor) -> dict[str, Call]:
    device, dtype = x.device, x.dtype
    rows, columns = x.shape
    other = torch.float32 if dtype is HALF else HALF
    wide = min(rows, 4096)
    weight = torch.ones(columns, device=device, dtype=dtype)
    y = x.clone()
    mean = torch.ones(rows, 1, device=device)
    ids = torch.arange(rows, device=device) % wide
    chosen, table = torch.zeros(rows, dtype=torch.long, device=device), x[:wide]
    one = torch.ones((), device=device, dtype=dtype)
    keep = torch.ones_like(x, dtype=torch.bool)
    return {
        "add": lambda: aten.add.Tensor(x, y),
        "add_": lambda: aten.add_.Tensor(x, y),
        "mul": lambda: aten.mul.Tensor(x, y),
        "gelu": lambda: aten.gelu.default(x),
        "gelu_backward": lambda: aten.gelu_backward.default(x, y),
        "silu": lambda: aten.silu.default(x),
        "relu": lambda: aten.relu.default(x),
        "pow": lambda: aten.pow.Tensor_Scalar(x, 2),
        "fill": lambda: aten.zero_.default(x),
        "cast": lambda: aten._to_copy.default(x, dtype=other),
        "clone": lambda: aten.clone.default(x.t(), memory_format=torch.contiguous_format),
        "copy": lambda: aten.copy_.default(y, x),
        "cat": lambda: aten.cat.default([x, y]),
        "cat_columns": lambda: aten.cat.default([x, y], 1),
        "sum_rows": lambda: aten.sum.dim_IntList(x, [0]),
        "sum": lambda: aten.sum.default(x),
        "sum_outer": lambda: aten.sum.dim_IntList(x.view(-1, 32, columns), [0, 2]),
        "mean": lambda: aten.mean.dim(x, [-1], True),
        "softmax": lambda: aten._softmax.default(x, -1, False),
        "softmax_backward": lambda: aten._softmax_backward_data.default(x, y, -1, dtype),
        "log_softmax": lambda: aten._log_softmax.default(x, -1, False),
        "log_softmax_backward": lambda: aten._log_softmax_backward_data.default(x, y, -1, dtype),
        "nll": lambda: aten.nll_loss_forward.default(x, chosen, None, 1, -100),
        "nll_backward": lambda: aten.nll_loss_backward.default(one, x, chosen, None, 1, -100, one),
        "layer_norm": lambda: aten.native_layer_norm.default(x, [columns], weight, weight, 1e-5),
        "layer_norm_backward": lambda: aten.native_layer_norm_backward.default(
            y, x, [columns], mean, mean, weight, weight, [True, True, True]
        ),
        "dropout": lambda: aten.native_dropout.default(x, 0.1, True),
        "dropout_backward": lambda: aten.native_dropout_backward.default(x, keep, 1.1),
        "embedding": lambda: aten.embedding.default(table, ids),
        "embedding_backward": lambda: aten.embedding_dense_backward.default(
            x, ids, wide, -1, False
        ),
        "where": lambda: aten.where.self(keep, x, y),
        "normal": lambda: aten.normal_.default(y),
    }


def image_kernels() -> Iterator[Case]:
    """Norms, pools and resizing of images, in two layouts."""
    names = (
        "batch_norm", "batch_norm_backward", "native", "native_backward", "group_norm",
        "group_norm_backward", "pool", "pool_backward", "mean_pool", "mean_pool_backward",
        "nearest", "nearest_backward", "bilinear", "bilinear_backward", "bilinear_8",
        "bilinear_8_backward",
    )  # fmt: skip
    yield from cases(_image_kernel, DTYPES, (False, True), SHAPES["images"], names)
    slow = "bilinear_64", "bilinear_64_backward"  # all pixels are added to few
    yield from cases(_image_kernel, DTYPES, (False, True), SHAPES["images"][5:6], slow)
    groups = "group_norm", "group_norm_backward"
    yield from cases(_image_kernel, DTYPES, (False,), SHAPES["groups"], groups)


def _image_kernel(dtype: Any, last: bool, sizes: list[int], name: str) -> Call:
    samples, channels, side, *more = sizes
    layout = torch.channels_last if last else torch.contiguous_format
    x = random(samples, channels, side, more[0] if more else side, dtype=dtype)
    x = x.to(memory_format=layout)
    weight, bias, mean, variance = (torch.ones(channels, device="cuda") for _ in range(4))
    if "batch" in name:
        x = x.half() if dtype is HALF else x  # cuDNN takes no bfloat16
        given = (x, weight, bias, mean, variance, True, 0.1, 1e-5)
        if name == "batch_norm":
            return lambda: aten.cudnn_batch_norm.default(*given)
        _, saved, inverse, reserve = aten.cudnn_batch_norm.default(*given)
        y = x.clone()
        return lambda: aten.cudnn_batch_norm_backward.default(
            x, y, weight, mean, variance, saved, inverse, 1e-5, reserve
        )
    if "native" in name:
        return _native_batch_norm(name, (x, weight, bias, mean, variance, True, 0.1, 1e-5))
    if "group" in name:
        w, b = weight.to(dtype), bias.to(dtype)
        groups = more[1] if len(more) > 1 else 32
        shape = (samples, channels, x[0, 0].numel(), groups)
        if name == "group_norm":
            return lambda: aten.native_group_norm.default(x, w, b, *shape, 1e-5)
        _, saved, inverse = aten.native_group_norm.default(x, w, b, *shape, 1e-5)
        y = x.clone()
        return lambda: aten.native_group_norm_backward.default(
            y, x, saved, inverse, w, *shape, [True, True, True]
        )
    if "mean" in name:
        options = ([2, 2], [2, 2], [0, 0], False, True, None)
        out = aten.avg_pool2d.default(x, *options)
        if name == "mean_pool":
            return lambda: aten.avg_pool2d.default(x, *options)
        return lambda: aten.avg_pool2d_backward.default(out, x, *options)
    if "pool" in name:
        out, indices = aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])
        if name == "pool":
            return lambda: aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])
        rest = ([2, 2], [2, 2], [0, 0], [1, 1], False, indices)
        return lambda: aten.max_pool2d_with_indices_backward.default(out, x, *rest)
    return _resizing(name, x)


def _resizing(name: str, x: Tensor) -> Call:
    """Return a call that enlarges the corner of `x`; `name` has the kind, and a scale if not 2."""
    kind, *rest = name.removesuffix("_backward").split("_")
    scale = int(rest[0]) if rest else 2
    side = max(1, x.shape[-1] * 2 // scale)
    x = x[:, :, :side, :side].contiguous(memory_format=suggest_memory_format(x))
    operator, backward = (
        getattr(aten, f"upsample_{kind}2d{end}").default for end in ("", "_backward")
    )
    large = [scale * n for n in x.shape[2:]]
    corners = [False] if kind == "bilinear" else []
    out = operator(x, large, *corners)
    if "backward" not in name:
        return lambda: operator(x, large, *corners)
    return lambda: backward(out, large, list(x.shape), *corners)


def _native_batch_norm(name: str, given: tuple[Any, ...]) -> Call:
    if name == "native":
        return lambda: aten.native_batch_norm.default(*given)
    x, weight, _, mean, variance, *_ = given
    _, saved, inverse = aten.native_batch_norm.default(*given)
    y = x.clone()
    rest = (weight, mean, variance, saved, inverse, True, 1e-5, [True, True, True])
    return lambda: aten.native_batch_norm_backward.default(y, x, *rest)


def row_kernels() -> Iterator[Case]:
    """Kernels over rows that `memory_kernels` has not: RMS norm, heads of attention, sorting."""
    return named(_row_calls, [shape for shape in SHAPES["rows"] if shape[1] % 64 == 0])


def _row_calls(x: Tensor) -> dict[str, Call]:
    rows, columns = x.shape
    y, weight = x.clone(), torch.ones(columns, device=x.device, dtype=x.dtype)
    inverse = torch.ones(rows, 1, device=x.device)
    heads = x.view(rows // 64, 64, columns // 64, 64).transpose(1, 2)
    short = x.view(rows // 64, 64, columns // 16, 16).transpose(1, 2)
    half = x[:, : columns // 2]
    turned, column = heads.contiguous(), inverse.to(x.dtype)
    return {
        "rms": lambda: aten._fused_rms_norm.default(x, [columns], weight, 1e-5),
        "rms_backward": lambda: aten._fused_rms_norm_backward.default(
            y, x, [columns], inverse, weight, [True, True]
        ),
        "heads": lambda: aten.clone.default(heads, memory_format=torch.contiguous_format),
        "heads_16": lambda: aten.clone.default(short, memory_format=torch.contiguous_format),
        "half": lambda: aten.clone.default(half, memory_format=torch.contiguous_format),
        "roll": lambda: aten.roll.default(x, [3], [0]),
        "slice": lambda: aten.slice_backward.default(x, [rows, 2 * columns], 1, 0, columns, 1),
        "norm": lambda: aten.linalg_vector_norm.default(x),
        "cumsum": lambda: aten.cumsum.default(x, -1),
        "argmax": lambda: aten.argmax.default(x, -1),
        "times_row": lambda: aten.mul.Tensor(x, weight),
        "times_column": lambda: aten.mul.Tensor(x, column),
        "stack_heads": lambda: aten.stack.default([turned, turned, turned], 2),
        "stack_turned": lambda: aten.stack.default([heads, heads, heads]),
        "add_heads": lambda: aten.add.Tensor(heads, turned),
        "sum_last": lambda: aten.sum.dim_IntList(x.view(-1, 64), [-1]),
        "sum_middle": lambda: aten.sum.dim_IntList(x.view(-1, 64, columns), [1]),
    }


def indexed() -> Iterator[Case]:
    """Kernels that read or write rows in the order of random numbers."""
    return named(_indexed_calls, ((2048, 64), (65536, 64), (1048576, 64), (65536, 1024)))


def _indexed_calls(x: Tensor) -> dict[str, Call]:
    y, ids = torch.zeros_like(x), torch.randint(len(x), (len(x),), device=x.device)
    each = ids[:, None].expand_as(x).contiguous()
    return {
        "index_select": lambda: aten.index_select.default(x, 0, ids),
        "index": lambda: aten.index.Tensor(x, [ids]),
        "gather": lambda: aten.gather.default(x, 0, each),
        "index_add": lambda: aten.index_add_.default(y, 0, ids, x),
        "index_put": lambda: aten._index_put_impl_.default(y, [ids], x, True, True),
        "scatter_add": lambda: aten.scatter_add_.default(y, 0, each, x),
    }


def many_tensors() -> Iterator[Case]:
    """Optimizers' kernels over lists of parameters."""
    sizes = ((2, 1 << 20), (20, 1 << 22), (148, 1 << 20), (148, 768), (20, 1 << 25))
    return cases(_many, sizes, ("add", "mul", "sqrt", "addcdiv", "lerp", "adamw", "norm"))


def _many(size: tuple[int, int], name: str) -> Call:
    count, numel = size
    p, g, m, v = ([torch.rand(numel, device="cuda") for _ in range(count)] for _ in range(4))
    steps = [torch.ones((), device="cuda") for _ in range(count)]
    options: dict[str, Any] = {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8,
        "amsgrad": False, "maximize": False,
    }  # fmt: skip
    return {
        "add": lambda: aten._foreach_add_.Scalar(p, 1.0),
        "mul": lambda: aten._foreach_mul_.Scalar(p, 1.0),
        "sqrt": lambda: aten._foreach_sqrt.default(v),
        "addcdiv": lambda: aten._foreach_addcdiv_.Scalar(p, m, v, 1e-3),
        "lerp": lambda: aten._foreach_lerp_.Scalar(m, g, 0.1),
        "norm": lambda: aten._foreach_norm.Scalar(g, 2),
        "adamw": lambda: aten._fused_adamw_.default(p, g, m, v, [], steps, **options),
    }[name]


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
    both = False, True
    lstms = itertools.product((nn.LSTM,), (1, 2), both)
    others = (nn.GRU, 1, False), (nn.GRU, 1, True), (nn.RNN, 1, False)
    return cases(_recurrent, (*lstms, *others), DTYPES, (8, 64, 256), (128, 512, 1024), both)


def _recurrent(
    network: tuple[Any, int, bool], dtype: torch.dtype, samples: int, hidden: int, backward: bool
) -> Call:
    kind, layers, both = network
    length = 32  # few enough kernels for the queue of launches
    mode = {nn.RNN: 1, nn.LSTM: 2, nn.GRU: 3}[kind]  # as cuDNN counts them
    x = random(length, samples, hidden, dtype=dtype)
    h = random(layers * (2 if both else 1), samples, hidden, dtype=dtype)
    c = torch.zeros_like(h) if kind is nn.LSTM else None
    made = kind(hidden, hidden, num_layers=layers, bidirectional=both).to("cuda", dtype)
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
    batched_products, factorizations, quantized, indexed, recurrent,
)  # fmt: skip


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a result to `path`, one kind of kernel a line."""
    head = {key: value for key, value in found.items() if key != "kernels"}
    kinds = ",\n".join(
        f"  {json.dumps(kind)}: {json.dumps(rows, separators=(',', ':'))}"
        for kind, rows in found["kernels"].items()
    )
    path.write_text(f'{json.dumps(head)[:-1]},\n "kernels": {{\n{kinds}\n }}}}\n', "utf-8")
