"""Measures the host: launches, optimizers, checkpointing, copies."""

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
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

from memest.estimator.hardware.work import HOST_KINDS, VIEW, Work, host_kind, work_of
from memest.estimator.tensors.patches import constant
from memest.estimator.tensors.placement import tensors_in
from memest.plan.reading import read_table

Call = Callable[[], Any]

HALF = torch.bfloat16
NUM_WARM, NUM_HOST_STEPS = 2, 6  # steps of a model in a round: warm-up steps, and counted steps
MIB = 1 << 20


class Observer(TorchDispatchMode):
    """Records the work of each call with a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Work] = []
        self.counts = [0] * len(HOST_KINDS)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        work = VIEW if func.is_view else work_of(func, args, kwargs or {}, out)
        if work.kind and next(tensors_in((args, out)), None) is not None:
            self.counts[host_kind(work)] += 1
            self.found += [] if func.is_view else [work]
        return out


def waited_us(call: Call) -> float:
    """Return microseconds of one call until the GPU is done."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started)


def host_times() -> dict[str, float]:
    """Return host microseconds of the parts of a training step besides launches.

    `list` is per tensor of a multi-tensor call, `step` and `zero_grad` per parameter of the
    optimizer. `loop` is a call of an optimizer that works on one parameter after another.
    `region` is a checkpointed region without its hooks, `hook` a call of a hook of saved tensors.
    `choice` is an operator of selective checkpointing, `read` a number that the host reads. Rates
    of copies are in GB/s.
    """
    x = torch.randn(8, 64, device="cuda")
    found = _optimizer_times() | checkpoint_times()
    found["read"] = _host_us(lambda: x[0, 0].item(), 50)
    gpu = torch.empty(64 * MIB, device="cuda")
    for name in ("pinned", "pageable"):
        host = torch.empty(64 * MIB, pin_memory=name == "pinned")
        for way, call in (("gpu", partial(gpu.copy_, host)), ("host", partial(host.copy_, gpu))):
            found[f"to_{way}_{name}_gb_s"] = host.nbytes / _host_us(call, 3) * 1e-3
    return {name: round(value, 2) for name, value in found.items()}


def _optimizer_times() -> dict[str, float]:
    """Return the times of AdamW's step: `list`, `step`, `zero_grad` and `loop` of `host_times`."""
    many = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in SHAPES["layer"] * 16]
    us, calls, zeros = dict[str, float](), dict[str, int](), list[float]()
    for name, options in SHAPES["adamw"].items():
        optimizer, steps = torch.optim.AdamW(many, **options), list[float]()
        for _ in range(9):
            for parameter in many:
                parameter.grad = torch.zeros_like(parameter)
            with Observer() if len(steps) == 1 else nullcontext() as observer:
                steps.append(_host_us(optimizer.step, 1))
            zeros.append(_host_us(optimizer.zero_grad, 1))
            if observer is not None:
                calls[name] = len(observer.found)
        us[name] = statistics.median(steps[2:])  # the first step allocates the states
    each = (us["lists"] - us["fused"]) / (calls["lists"] - 1)
    step = us["fused"] - each
    of_all = {"list": each, "step": step, "zero_grad": statistics.median(zeros)}
    loop = (us["loop"] - step) / calls["loop"]
    return {name: taken / len(many) for name, taken in of_all.items()} | {"loop": loop}


def checkpoint_times() -> dict[str, float]:
    """Return the times of checkpointing: `region`, `hook` and `choice` of `host_times`."""
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
    rows = [[waited_us(call) for call in calls.values()] for _ in range(12)][3:]  # calls take turns
    us = dict(zip(calls, map(statistics.median, zip(*rows, strict=True)), strict=True))
    again = us["forward"] + us["step"]  # a region runs its forward twice
    found = {
        "region": (us["region"] - again) / len(layers),
        "hook": (us["hook"] - us["region"]) / (3 * len(saved)),  # to save, save again, and read
        "choice": (us["choice"] - us["hook"]) / (2 * sum(observer.counts)),
    }
    return {name: max(0.0, us) for name, us in found.items()}


SHAPES: dict[str, Any] = read_table(__file__, "shapes.json")
"""Shapes of usual networks, and the calls that are measured on them.

`models` are architectures of transformers whose launches take the host's usual time, with sizes.
`layer` is a transformer's, about as large as BERT's. `adamw` has its ways: nine calls on lists of
tensors, one call, or many on one tensor each. A family has `axes`, each with values or the name of
a list, and `names` of tensors. A name and a step of `calls` have a function and its arguments.
"""


def model_times() -> Iterator[dict[str, list[list[float]]]]:
    """Yield rows of the launches and microseconds of forward and backward of small models.

    A row has a number for each of `HOST_KINDS`, then the time: the median of all rounds so far.
    Each yield is a round, since the speed of a shared host changes within seconds.
    """
    library: Any = importlib.import_module("transformers")
    models = []
    for (name, sizes), is_autocast in itertools.product(SHAPES["models"].items(), (False, True)):
        config = getattr(library, f"{name}Config")(**sizes)
        model = getattr(library, f"{name}Model")(config).cuda().train()
        given = {
            "pixel_values": torch.randn(2, 3, 32, 32, device="cuda"),
            "input_values": torch.randn(2, 4000, device="cuda"),
            "input_ids": torch.zeros(2, 16, dtype=torch.long, device="cuda"),
        }[model.main_input_name]
        models.append((*phases(model, given, is_autocast), list[tuple[float, ...]]()))
    while True:
        found: dict[str, list[list[float]]] = {"forward": [], "backward": []}
        for counts, step, taken in models:
            taken += [step() for _ in range(NUM_HOST_STEPS + NUM_WARM)][NUM_WARM:]
            for phase, count, seconds in zip(found, counts, zip(*taken, strict=True), strict=True):
                found[phase].append([*count, round(1e6 * statistics.median(seconds), 1)])
        yield found


def fitted_times(forward: list[list[float]], backward: list[list[float]]) -> dict[str, float]:
    """Fit host microseconds for each of `HOST_KINDS` to the measured times of the models.

    The fit is a median: half of the models take longer than it predicts.
    """
    found = {}
    for phase, rows in (("forward", forward), ("backward", backward)):
        counts, times = np.array(rows)[:, :-1], np.array(rows)[:, -1:]
        factors = _not_negative(counts / times)
        factors /= np.median(counts / times @ factors)
        for name, us in zip(HOST_KINDS, factors, strict=True):
            found[f"{phase}_{name}"] = round(float(us), 2)
    return found


def _not_negative(a: Any) -> Any:
    """Return the factors >= 0 with the least squares of `a @ factors - 1`."""
    tried = []
    for chosen in itertools.product((False, True), repeat=a.shape[1]):
        factors = np.zeros(a.shape[1])
        factors[[*chosen]] = np.linalg.lstsq(a[:, chosen], np.ones(len(a)), rcond=None)[0]
        tried.append(factors)
    possible = [factors for factors in tried if factors.min() >= 0]
    return min(possible, key=lambda factors: ((a @ factors - 1) ** 2).sum())


def phases(
    model: nn.Module, x: Tensor, is_autocast: bool
) -> tuple[list[list[int]], Callable[[], tuple[float, ...]]]:
    """Return the calls of a model's forward and backward, and a step that returns their seconds."""
    optimizer, observers = torch.optim.AdamW(model.parameters()), (Observer(), Observer())

    def run(*modes: Any) -> tuple[float, ...]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        with modes[0], torch.autocast("cuda", HALF, enabled=is_autocast):
            loss: Any = model(x).last_hidden_state.float().sum()
        middle = time.perf_counter()
        with modes[1]:
            loss.backward()
        ended = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return middle - started, ended - middle

    run(*observers)
    return [o.counts for o in observers], partial(run, nullcontext(), nullcontext())


def _host_us(call: Call, count: int) -> float:
    """Return microseconds of the host for one of `count` calls."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    taken = time.perf_counter() - started
    torch.cuda.synchronize()
    return 1e6 * taken / count
