"""Measures on the installed GPU how long kernels and the host take: `memest validate --pace`.

A row is a call of torch: size, FLOPs and bytes of its work, and the microseconds of its kernels.
Time estimates interpolate the rows of a GPU, `estimator/hardware/pace/NAME.json`. `shapes.json`
lists the calls to measure.
"""

import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memest.estimator.hardware.pace import FORMAT
from memest.estimator.hardware.work import HOST_KINDS, VIEW, Work, host_kind, work_of
from memest.estimator.tensors.patches import constant
from memest.estimator.tensors.placement import tensors_in
from memest.plan.reading import read_table

Call = Callable[[], Any]
HALF = torch.bfloat16
NUM_WARM, NUM_HOST_STEPS = 2, 6  # steps of a model in a round: warm-up steps, and counted steps
MEASURED_US = 2000  # microseconds for which one case repeats, after two calls that are not timed
MOST_CALLS = 30  # most calls of one case that are queued at once
HEATED_MS = 10  # milliseconds of training before each case, for realistic clocks
SLEEP_CYCLES_PER_US = 3_000  # for which the GPU sleeps while the host launches: 1.5 us
NUM_PARTS = 3  # rounds over the families: time that runs out costs each of them some calls
SHAPES: dict[str, Any] = read_table(__file__, "shapes.json")
"""Shapes of usual networks, and the calls that are measured on them.

`models` are architectures of transformers whose launches take the host's usual time, with sizes.
`layer` is a transformer's, about as large as BERT's. `adamw` has its ways: nine calls on lists of
tensors, one call, or many on one tensor each. A family has `axes`, each with values or the name of
a list, and `names` of tensors. A name and a step of `calls` have a function and its arguments.
"""


class Observer(TorchDispatchMode):
    """Dispatch mode that records torch's calls: `found` has the `Work` (FLOPs, bytes) of each
    kernel, and `counts` the number of calls for each of `HOST_KINDS`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Work] = []
        self.counts = dict.fromkeys(HOST_KINDS, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        work = VIEW if func.is_view else work_of(func, args, kwargs or {}, out)
        if work.kind and next(tensors_in((args, out)), None) is not None:
            self.counts[host_kind(work)] += 1
            self.found += [] if func.is_view else [work]
        return out


def host_times() -> dict[str, float]:
    """Return the host's microseconds by part of a training step, without kernel launches.

    Optimizer: `step` and `zero_grad` are per parameter. `list` is per tensor of a multi-tensor
    call. `loop` is per operator call in an optimizer that updates one parameter after another.
    Checkpointing: `region` is per checkpointed region, `hook` per call of a hook of saved tensors,
    and `choice` per operator of selective checkpointing. `read` is a number read from the GPU. Keys
    such as `to_gpu_pinned_gb_s` are no times but rates of copies, in GB/s.
    """
    x = torch.randn(8, 64, device="cuda")
    times = _optimizer_times() | checkpoint_times()
    times["read"] = host_us(lambda: x[0, 0].item(), 50)
    gpu = torch.empty(64 << 20, device="cuda")
    for name in ("pinned", "pageable"):
        host = torch.empty(64 << 20, pin_memory=name == "pinned")
        for target, call in (("gpu", partial(gpu.copy_, host)), ("host", partial(host.copy_, gpu))):
            times[f"to_{target}_{name}_gb_s"] = host.nbytes / host_us(call, 3) * 1e-3
    return {name: round(value, 2) for name, value in times.items()}


def _optimizer_times() -> dict[str, float]:
    """Return the host's times of AdamW: `list`, `step`, `zero_grad`, `loop` of `host_times`."""
    parameters = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in SHAPES["layer"] * 16]
    us, calls, zeros = dict[str, float](), dict[str, int](), list[float]()
    for name, options in SHAPES["adamw"].items():
        optimizer, steps = torch.optim.AdamW(parameters, **options), list[float]()
        for _ in range(9):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            # the second step is counted, since the first one allocates the states
            with Observer() if len(steps) == 1 else nullcontext() as observer:
                steps.append(host_us(optimizer.step))
            zeros.append(host_us(optimizer.zero_grad))
            if observer is not None:
                calls[name] = len(observer.found)
        us[name] = statistics.median(steps[2:])
    list_us = (us["lists"] - us["fused"]) / (calls["lists"] - 1)
    step_us = us["fused"] - list_us
    totals = {"list": list_us, "step": step_us, "zero_grad": statistics.median(zeros)}
    loop_us = (us["loop"] - step_us) / calls["loop"]
    return {name: total / len(parameters) for name, total in totals.items()} | {"loop": loop_us}


def checkpoint_times() -> dict[str, float]:
    """Return the host's times of checkpointing: `region`, `hook`, `choice` of `host_times`."""
    layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128) for _ in range(8)).cuda()
    x = torch.randn(16, 2, 64, device="cuda", requires_grad=True)
    policy = constant(CheckpointPolicy.PREFER_RECOMPUTE)
    selective = partial(create_selective_checkpoint_contexts, policy)

    def forward(**options: Any) -> Tensor:
        out = x
        for layer in layers:
            out = checkpoint(layer, out, **options) if options else layer(out)
        return out.sum()

    def step(**options: Any) -> None:
        torch.autograd.backward(forward(**options))

    saved: list[None] = []
    with Observer() as observer, saved_tensors_hooks(lambda _: saved.append(None), lambda _: x):
        forward()
    calls: dict[str, Call] = {
        "forward": forward, "step": step, "region": partial(step, use_reentrant=True),
        "hook": partial(step, use_reentrant=False),
        "choice": partial(step, use_reentrant=False, context_fn=selective),
    }  # fmt: skip
    rows = [[host_us(call, waits=True) for call in calls.values()] for _ in range(12)]  # in turn
    us = dict(zip(calls, map(statistics.median, zip(*rows[3:], strict=True)), strict=True))
    two_passes = us["forward"] + us["step"]  # a region runs its forward twice
    times = {
        "region": (us["region"] - two_passes) / len(layers),
        "hook": (us["hook"] - us["region"]) / (3 * len(saved)),  # to save, save again, and read
        "choice": (us["choice"] - us["hook"]) / (2 * sum(observer.counts.values())),
    }
    return {name: max(0.0, us) for name, us in times.items()}


def model_times() -> Iterator[dict[str, list[list[float]]]]:
    """Measure some small models in rounds; yield {"forward": rows, "backward": rows} per round.

    A row is of one model: [kernel launches, cuDNN calls, views, the host's microseconds]. The first
    three are numbers of calls, as in `HOST_KINDS`. The microseconds are the median of all rounds so
    far, since a host's speed varies.
    """
    library: Any = import_module("transformers")
    models = []
    for (name, sizes), is_autocast in itertools.product(SHAPES["models"].items(), (False, True)):
        config = getattr(library, f"{name}Config")(**sizes)
        model = getattr(library, f"{name}Model")(config).cuda().train()
        inputs = {
            "pixel_values": torch.randn(2, 3, 32, 32, device="cuda"),
            "input_values": torch.randn(2, 4000, device="cuda"),
            "input_ids": torch.zeros(2, 16, dtype=torch.long, device="cuda"),
        }[model.main_input_name]
        models.append((*counts_and_step(model, inputs, is_autocast), list[tuple[float, ...]]()))
    while True:
        rows: dict[str, list[list[float]]] = {"forward": [], "backward": []}
        for counts, step, times in models:
            times += [step() for _ in range(NUM_HOST_STEPS + NUM_WARM)][NUM_WARM:]
            for phase, count, seconds in zip(rows, counts, zip(*times, strict=True), strict=True):
                rows[phase].append([*count, round(1e6 * statistics.median(seconds), 1)])
        yield rows


def fitted_times(forward: list[list[float]], backward: list[list[float]]) -> dict[str, float]:
    """Return the host's microseconds per call of each kind, such as `forward_view`. They are fitted
    to `forward` and `backward`, rows of `model_times`, by least squares of relative errors. Then
    they are scaled so that half of the models take longer than predicted."""
    result = {}
    for phase, rows in (("forward", forward), ("backward", backward)):
        counts, times = np.array(rows)[:, :-1], np.array(rows)[:, -1:]
        factors = _not_negative(counts / times)
        factors /= np.median(counts / times @ factors)
        for name, us in zip(HOST_KINDS, factors, strict=True):
            result[f"{phase}_{name}"] = round(float(us), 2)
    return result


def _not_negative(a: Any) -> Any:
    """Return the array f >= 0 for which all items of `a @ f` are nearest to 1, by least squares.
    Here, f is the times per kind of call. A row of `a` has a model's numbers of calls by kind,
    divided by its measured time. So `a @ f` is predicted over measured times, 1 if the fit is
    exact."""
    solutions = []
    for columns in itertools.product((False, True), repeat=a.shape[1]):
        factors = np.zeros(a.shape[1])
        factors[[*columns]] = np.linalg.lstsq(a[:, columns], np.ones(len(a)), rcond=None)[0]
        solutions.append(factors)
    feasible = [factors for factors in solutions if factors.min() >= 0]
    return min(feasible, key=lambda factors: ((a @ factors - 1) ** 2).sum())


def counts_and_step(
    model: nn.Module, x: Tensor, is_autocast: bool
) -> tuple[list[list[int]], Callable[[], tuple[float, ...]]]:
    """Return (numbers of calls in forward and in backward, step). Each of the two lists has numbers
    by kind, as `HOST_KINDS`. `step()` trains `model` on `x` once, in bfloat16 if `is_autocast`. It
    returns the host's seconds of the forward and of the backward."""
    optimizer, observers = torch.optim.AdamW(model.parameters()), (Observer(), Observer())

    def run(forward_mode: Any, backward_mode: Any) -> tuple[float, ...]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        with forward_mode, torch.autocast("cuda", HALF, enabled=is_autocast):
            loss: Any = model(x).last_hidden_state.float().sum()
        middle = time.perf_counter()
        with backward_mode:
            loss.backward()
        ended = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return middle - started, ended - middle

    run(*observers)
    return [[*o.counts.values()] for o in observers], partial(run, nullcontext(), nullcontext())


def host_us(call: Call, count: int = 1, *, waits: bool = False) -> float:
    """Return the host's microseconds per call of `call`, the mean of `count` calls. With `waits`,
    the time includes a wait for the GPU's work at the end."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    if waits:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - started
    torch.cuda.synchronize()
    return 1e6 * elapsed / count


Case = Callable[[], Call]  # makes the tensors of a call, and returns it


def measure(seconds: float, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure kernels and the host for at most `seconds`, and return the times as JSON values.
    `write` is called with the times so far after each family of kernels."""
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "format": FORMAT, "device": properties.name, "memory_bytes": properties.total_memory,
        "torch": torch.__version__, "host": {}, "kernels": defaultdict(list),
    }  # fmt: skip
    started = time.perf_counter()
    models, hosts = model_times(), list[dict[str, float]]()
    heat, first_us = heater(), defaultdict(list)
    failed: dict[str, None] = {}
    if find_spec("bitsandbytes") is not None:
        import_module("bitsandbytes")  # which adds its operators
    for part in range(NUM_PARTS):
        result["models"] = next(models)  # host speed varies, so measure repeatedly
        hosts.append(host_times())
        result["host"] = {k: statistics.median(h[k] for h in hosts) for k in hosts[0]}
        result["host"] |= fitted_times(*result["models"].values())
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
                result["kernels"][work.kind].append(row)
                first_us[work.kind].append(first)
                result["first_us"] = {k: round(statistics.median(v)) for k, v in first_us.items()}
            torch.cuda.empty_cache()
            result["seconds"], result["failed"] = time.perf_counter() - started, list(failed)
            write(result)
    return result


def rounds(family: str) -> list[list[Case]]:
    """Return `NUM_PARTS` lists of the cases in the kernel family `family`, in random order. A case
    makes a call that is to be timed. Each round of measurements times one list."""
    mixed = list(cases(SHAPES["families"][family]))
    Random(0).shuffle(mixed)
    return [mixed[part::NUM_PARTS] for part in range(NUM_PARTS)]


def measured(make: Case, heat: Callable[[], None]) -> tuple[Work, float, float]:
    """Time a call; return (its work, microseconds of its kernels, additional time of the first
    call). The additional time is in the host's microseconds, such as for loading a kernel. `make`
    makes the tensors and returns the call. `heat` makes the GPU busy before the timing."""
    with torch.no_grad():
        call = make()
        first, second = (host_us(call, waits=True) for _ in range(2))
        with Observer() as observer:
            call()
        assert len(observer.found) == 1, [w.kind for w in observer.found]
        launch_us = min(second, MEASURED_US)
        single_us = elapsed_us(call, 3, launch_us)
        heat()
        count = max(3, min(MOST_CALLS, int(MEASURED_US / single_us)))
        # pauses of the host only add
        us = min(elapsed_us(call, count, launch_us) for _ in range(3))
    (work,) = observer.found
    return work, us, max(0.0, first - second)


def heater() -> Callable[[], None]:
    """Return a function that trains for `HEATED_MS` ms, so that the GPU's clocks are realistic."""
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

    heat(3000)  # 3 s at first, for a cold GPU
    return heat


def elapsed_us(call: Call, count: int, host_us: float) -> float:
    """Return the GPU's microseconds per call, the mean of `count` calls without pauses.

    The GPU first sleeps while the host launches all calls. `host_us` is the most time that the host
    takes for a call; the length of the sleep follows from it.
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
    """Return random numbers on the GPU: a tensor of `dtype`, `shape` and memory format `layout`."""
    drawn_dtype = torch.float32 if dtype is torch.float32 else None
    return torch.randn(shape, device="cuda", dtype=drawn_dtype).to(dtype).to(memory_format=layout)


def weights_of(
    name: str, dtype: torch.dtype, hidden: int, num_layers: int, bidirectional: bool
) -> list[Tensor]:
    """Return the weights of `nn.NAME`, such as `LSTM`, on the GPU, as ordered by `parameters()`.
    Inputs and states have `hidden` features."""
    network = getattr(nn, name)(hidden, hidden, num_layers, bidirectional=bidirectional)
    return [parameter.detach().to("cuda", dtype) for parameter in network.parameters()]


WORDS: dict[str, Any] = {
    "half": HALF, "full": torch.float32, "plain": torch.contiguous_format,
    **{name: getattr(torch, name) for name in (
        "float16", "int8", "uint8", "bool", "long", "channels_last",
    )},
    "random": random, "weights_of": weights_of,
    "matrix": lambda dtype, shape, is_adjacent: (
        random(dtype, shape) if is_adjacent else random(dtype, shape).mT.contiguous().mT
    ),
    "many": lambda count, shape: [torch.rand(shape) for _ in range(count)],
    "state_of": lambda name, h: torch.zeros_like(h) if name == "LSTM" else None,
    "allow_tf32": partial(setattr, torch.backends.cuda.matmul, "allow_tf32"),
}  # fmt: skip
"""Meaning of words in `shapes.json`; other words are functions of torch, or operators."""


def cases(family: dict[str, Any]) -> Iterator[Case]:
    """Yield the calls to time of `family`, an entry of `shapes.json`, as cases. `family["axes"]`
    has lists of values, such as of dtypes and shapes; every combination is used. `family["calls"]`
    has sequences of calls, such as a forward and its backward. Each call is a case of its own: the
    calls before it in its sequence run first, untimed."""
    axes = family["axes"]
    lists = [SHAPES[values] if isinstance(values, str) else values for values in axes.values()]
    for values in itertools.product(*lists):
        scope = dict(WORDS)
        for names, value in zip(axes, values, strict=True):
            items = value if " " in names else [value]
            scope |= zip(names.split(), named(items, WORDS), strict=True)
        for steps in family["calls"]:
            for count in range(1, len(steps) + 1):
                yield partial(make_call, family["names"], steps[:count], scope)


def make_call(names: dict[str, Any], steps: list[Any], scope: dict[str, Any]) -> Call:
    """Make tensors, run all but the last of `steps`, and return the last as a call to be timed. A
    step is a list such as `["aten.add", "x", "y"]`: a function and its arguments. `names` has, by
    the name of a tensor, the step that makes it. `scope` has the objects for words in steps. In a
    step, `r0` is the first result of the step before it."""
    scope = dict(scope)
    with torch.device("cuda"):
        for name, step in names.items():
            scope[name] = bound_call(step, scope)()
    for step in steps[:-1]:
        result = bound_call(step, scope)()
        results = result if isinstance(result, tuple) else (result,)
        scope |= {f"r{i}": output for i, output in enumerate(results)}
    return bound_call(steps[-1], scope)


def bound_call(step: list[Any], scope: dict[str, Any]) -> Call:
    """Return `step` as a call without arguments. `step` lists a function, its arguments, and maybe
    a dict of keyword arguments; `scope` has the objects for which its words stand."""
    function, *args = named(step, scope)
    options = args.pop() if args and isinstance(args[-1], dict) else {}
    if isinstance(function, str):
        namespace = torch.ops if function.startswith(("aten.", "bitsandbytes.")) else torch
        function = attrgetter(function)(namespace)
    return partial(function, *args, **options)


def named(value: Any, scope: dict[str, Any]) -> Any:
    """Return `value`, an item of `shapes.json`, with words replaced by their objects in `scope`."""
    if isinstance(value, dict):
        return {key: named(item, scope) for key, item in value.items()}
    if isinstance(value, list):
        return [named(item, scope) for item in value]
    return scope.get(value, value) if isinstance(value, str) else value


def write(path: Path, result: dict[str, Any]) -> None:
    """Write `result`, as returned by `measure`, to `path` as JSON, a line per kind of kernel."""
    head = {key: value for key, value in result.items() if key != "kernels"}
    kinds = ",\n".join(
        f"  {json.dumps(kind)}: {json.dumps(rows, separators=(',', ':'))}"
        for kind, rows in result["kernels"].items()
    )
    path.write_text(f'{json.dumps(head)[:-1]},\n "kernels": {{\n{kinds}\n }}}}\n', "utf-8")
