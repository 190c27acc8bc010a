"""Measures on the installed GPU how long kernels and the host take: `memest validate --pace`.

Each row is a call of torch: its work (`estimator/hardware/work.py`) and the microseconds of its
kernels. The rows of one GPU are `estimator/hardware/pace/NAME.json`, which `pace.py` interpolates.
`shapes.json` has the calls.
"""

import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from memest.estimator.hardware.pace import FORMAT
from memest.estimator.hardware.work import Work
from memest.validate import host_pace
from memest.validate.host_pace import HALF, SHAPES, Call, Observer, waited_us

Case = Callable[[], Call]  # makes the tensors of a call, and returns it

MEASURED_US = 2000  # microseconds for which one case repeats, after two calls that are not timed
MOST_CALLS = 30  # most calls of one case that are queued at once
HEATED_MS = 10  # milliseconds of training before each case, for realistic clocks
SLEEP_CYCLES_PER_US = 3_000  # for which the GPU sleeps while the host launches: 1.5 us
NUM_PARTS = 3  # rounds over the families: time that runs out costs each of them some calls


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
    if find_spec("bitsandbytes") is not None:
        import_module("bitsandbytes")  # which adds its operators
    for part in range(NUM_PARTS):
        found["models"] = next(models)  # host speed varies, so measure repeatedly
        hosts.append(host_pace.host_times())
        found["host"] = {k: statistics.median(h[k] for h in hosts) for k in hosts[0]}
        found["host"] |= host_pace.fitted_times(*found["models"].values())
        for name in SHAPES["families"]:
            for make in rounds(name)[part]:
                if time.perf_counter() - started > seconds:
                    break
                try:
                    work, us, first = measured(make, heat)
                except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
                    failed[f"{name}: {error!r}"[:200]] = None
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


def rounds(family: str) -> list[list[Case]]:
    """Return the cases of a family in rounds, each with some of every kind."""
    mixed = list(cases(SHAPES["families"][family]))
    Random(0).shuffle(mixed)
    return [mixed[part::NUM_PARTS] for part in range(NUM_PARTS)]


def measured(make: Case, heat: Callable[[], None]) -> tuple[Work, float, float]:
    """Return a call's work, microseconds of its kernels, and extra microseconds of the first call.

    `make` makes the tensors and returns the call. `heat` keeps the GPU busy for a moment.
    """
    with torch.no_grad():
        call = make()
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
    x = random(HALF, (16, 1024, 1024))

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


def random(
    dtype: torch.dtype, shape: Sequence[int], layout: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Return a tensor of random numbers on the GPU."""
    made = torch.float32 if dtype is torch.float32 else None
    return torch.randn(shape, device="cuda", dtype=made).to(dtype).to(memory_format=layout)


def matrix(dtype: torch.dtype, shape: Sequence[int], is_adjacent: bool) -> Tensor:
    """Return random matrices, contiguous along the last dimension if `is_adjacent`."""
    made = random(dtype, shape)
    return made if is_adjacent else made.mT.contiguous().mT


def weights_of(name: str, dtype: torch.dtype, hidden: int, *options: Any) -> list[Tensor]:
    """Return the weights of a recurrent network; `options` are its layers and directions."""
    network: nn.Module = getattr(nn, name)(hidden, hidden, options[0], bidirectional=options[1])
    return [parameter.detach().to("cuda", dtype) for parameter in network.parameters()]


WORDS: dict[str, Any] = {
    "half": HALF, "full": torch.float32, "plain": torch.contiguous_format,
    **{name: getattr(torch, name) for name in (
        "float16", "int8", "uint8", "bool", "long", "channels_last",
    )},
    "random": random, "matrix": matrix, "weights_of": weights_of,
    "many": lambda count, shape: [torch.rand(shape) for _ in range(count)],
    "state_of": lambda name, h: torch.zeros_like(h) if name == "LSTM" else None,
    "allow_tf32": partial(setattr, torch.backends.cuda.matmul, "allow_tf32"),
}  # fmt: skip
"""Meaning of words in `shapes.json`; other words are functions of torch, or operators."""


def cases(family: dict[str, Any]) -> Iterator[Case]:
    """Yield the calls of a family for each combination of its axes; a backward has its forward."""
    axes = family["axes"]
    lists = [SHAPES[values] if isinstance(values, str) else values for values in axes.values()]
    for values in itertools.product(*lists):
        scope = dict(WORDS)
        for names, value in zip(axes, values, strict=True):
            each = value if " " in names else [value]
            scope |= zip(names.split(), named(each, WORDS), strict=True)
        for steps in family["calls"]:
            for count in range(1, len(steps) + 1):
                yield partial(made, family["names"], steps[:count], scope)


def made(names: dict[str, Any], steps: list[Any], scope: dict[str, Any]) -> Call:
    """Return the last of `steps`, a call; `r0` is the first result of the step before.

    `names` are calls that make tensors of numbers of `scope` and of tensors before them.
    """
    scope = dict(scope)
    with torch.device("cuda"):
        for name, step in names.items():
            scope[name] = called(step, scope)()
    for step in steps[:-1]:
        result = called(step, scope)()
        results = result if isinstance(result, tuple) else (result,)
        scope |= {f"r{i}": each for i, each in enumerate(results)}
    return called(steps[-1], scope)


def called(step: list[Any], scope: dict[str, Any]) -> Call:
    """Return a call: a function, its arguments, and keyword arguments from a last dictionary."""
    function, *args = named(step, scope)
    options = args.pop() if args and isinstance(args[-1], dict) else {}
    if isinstance(function, str):
        place = torch.ops if function.startswith(("aten.", "bitsandbytes.")) else torch
        function = attrgetter(function)(place)
    return partial(function, *args, **options)


def named(value: Any, scope: dict[str, Any]) -> Any:
    """Return a value of a table, with each word replaced by the object that it names."""
    if isinstance(value, dict):
        return {key: named(each, scope) for key, each in value.items()}
    if isinstance(value, list):
        return [named(each, scope) for each in value]
    return scope.get(value, value) if isinstance(value, str) else value


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a result to `path`, one kind of kernel a line."""
    head = {key: value for key, value in found.items() if key != "kernels"}
    kinds = ",\n".join(
        f"  {json.dumps(kind)}: {json.dumps(rows, separators=(',', ':'))}"
        for kind, rows in found["kernels"].items()
    )
    path.write_text(f'{json.dumps(head)[:-1]},\n "kernels": {{\n{kinds}\n }}}}\n', "utf-8")
