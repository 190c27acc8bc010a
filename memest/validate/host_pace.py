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
NUM_WARM, NUM_HOST_STEPS = 2, 6  # steps of a model in a round: those that do not count, and others
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
    """Return microseconds of the host for what a training step does apart from launches.

    `list` is per tensor of a multi-tensor call, `step` and `zero_grad` per parameter of the
    optimizer. `loop` is a call of an optimizer that works on one parameter after another.
    `region` is a checkpointed region without its hooks, `hook` a call of a hook of saved tensors.
    `choice` is an operator of selective checkpointing, `read` a number that the host reads. Rates
    of copies are in GB/s.
    """
    x = torch.randn(8, 64, device="cuda")
    found = _optimizer_times() | checkpoint_times()
    found["read"] = _host_us(lambda: x[0, 0].item(), 50)
    pinned, pageable = (torch.empty(64 * MIB, pin_memory=p) for p in (True, False))
    gpu = torch.empty_like(pageable, device="cuda")
    for name, host in (("pinned", pinned), ("pageable", pageable)):
        us = _host_us(partial(gpu.copy_, host), 3)
        found[f"to_gpu_{name}_gb_s"] = host.nbytes / us * 1e-3
        us = _host_us(partial(host.copy_, gpu), 3)
        found[f"to_host_{name}_gb_s"] = host.nbytes / us * 1e-3
    return {name: round(value, 2) for name, value in found.items()}


def _optimizer_times() -> dict[str, float]:
    """Return the times of AdamW's step: `list`, `step`, `zero_grad` and `loop` of `host_times`."""
    many = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in SHAPES["layer"] * 16]
    us, calls = dict[str, float](), dict[str, int]()
    for name, options in SHAPES["adamw"].items():
        optimizer = torch.optim.AdamW(many, **options)
        for _ in range(2):  # the first step makes the states
            _give_gradients(many)
            with Observer() as observer:
                optimizer.step()
        calls[name] = len(observer.found)
        steps, zeros = [], []
        for _ in range(7):
            _give_gradients(many)
            steps.append(_host_us(optimizer.step, 1))
            zeros.append(_host_us(optimizer.zero_grad, 1))
        us[name], us["zero"] = statistics.median(steps), statistics.median(zeros)
    each = (us["lists"] - us["fused"]) / (calls["lists"] - 1)
    step = us["fused"] - each
    loop = (us["loop"] - step) / calls["loop"]
    of_all = {"list": each, "step": step, "zero_grad": us["zero"]}
    return {name: taken / len(many) for name, taken in of_all.items()} | {"loop": loop}


def checkpoint_times() -> dict[str, float]:
    """Return the times of checkpointing: `region`, `hook` and `choice` of `host_times`."""
    layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128) for _ in range(8)).cuda()
    x = torch.randn(16, 2, 64, device="cuda", requires_grad=True)
    selective = partial(
        create_selective_checkpoint_contexts, constant(CheckpointPolicy.PREFER_RECOMPUTE)
    )
    ways: dict[str, dict[str, Any]] = {
        "region": {"use_reentrant": True},
        "hook": {"use_reentrant": False},
        "choice": {"use_reentrant": False, "context_fn": selective},
    }

    def forward(options: dict[str, Any] | None = None) -> Tensor:
        out = x
        for layer in layers:
            out = checkpoint(layer, out, **options) if options else layer(out)
        return out.sum()

    def step(options: dict[str, Any] | None = None) -> None:
        torch.autograd.backward(forward(options))

    num_saved = 0

    def save(tensor: Tensor) -> Tensor:
        nonlocal num_saved
        num_saved += 1
        return tensor

    with Observer() as observer, saved_tensors_hooks(save, lambda tensor: tensor):
        forward()
    calls = {name: partial(step, options) for name, options in ways.items()}
    us = _median_us({"forward": forward, "step": step, **calls})
    again = us["forward"] + us["step"]  # a region runs its forward twice
    found = {
        "region": (us["region"] - again) / len(layers),
        "hook": (us["hook"] - us["region"]) / (3 * num_saved),  # to save, to save again, to read
        "choice": (us["choice"] - us["hook"]) / (2 * sum(observer.counts)),
    }
    return {name: max(0.0, us) for name, us in found.items()}


def _median_us(calls: dict[str, Call]) -> dict[str, float]:
    """Return the median microseconds of nine calls after three, each until the GPU is done.

    The calls take turns, as hosts change their speed.
    """
    rows = [[waited_us(call) for call in calls.values()] for _ in range(12)][3:]
    return dict(zip(calls, map(statistics.median, zip(*rows, strict=True)), strict=True))


def _give_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


SHAPES: dict[str, Any] = read_table(__file__, "shapes.json")
"""Shapes of usual networks by what reads them.

`models` are architectures of transformers whose launches take the host's usual time, with sizes.
`convolutions`, `volumes` (of scans and videos) and `sequences` (of audio and text) have samples,
channels, side or sides, output channels, window, stride and groups. `images` have samples, channels
and side, `rows` rows and columns. `pools` have a window and a stride too. `narrow` are batched
products with a short side: vectors, and the small matrices of solvers. `batches` are transposed.
`precisions` are of products, with whether TF32 is allowed and the layouts of the matrices.
`crossed` have heads, queries, keys and their length. `layer` is a transformer's, about as large as
BERT's. `adamw` has variants: nine multi-tensor calls, one fused call, or one call per tensor.
`calls` are operators and their arguments, where words name tensors and numbers, and `r0` is the
first result of a forward.
"""


def model_times() -> Iterator[dict[str, list[list[float]]]]:
    """Yield what forward and backward of small models launch, and their microseconds.

    A row has a number for each of `HOST_KINDS`, then the time: the median of all rounds so far.
    Each yield is a round, as hosts change their speed within seconds where others use their cores.
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

    Half of the models take longer, half of them less.
    """
    found = {}
    for phase, rows in (("forward", forward), ("backward", backward)):
        counts, times = [row[:-1] for row in rows], [row[-1] for row in rows]
        factors = np.array(_not_negative(counts, times))
        factors /= np.median(np.array(counts) @ factors / times)
        for name, us in zip(HOST_KINDS, factors, strict=True):
            found[f"{phase}_{name}"] = round(float(us), 2)
    return found


def _not_negative(rows: list[Any], times: list[float]) -> list[float]:
    """Return factors >= 0 of the columns, fitted to the times by relative least squares."""
    a = np.array(rows, dtype=float) / np.array(times)[:, None]
    best = min(
        (
            (columns, np.linalg.lstsq(a[:, columns], np.ones(len(a)), rcond=None))
            for count in range(1, a.shape[1] + 1)
            for columns in map(list, itertools.combinations(range(a.shape[1]), count))
            if a[:, columns].any(axis=0).all()
        ),
        key=lambda c: (min(c[1][0]) < 0, float(((a[:, c[0]] @ c[1][0] - 1) ** 2).sum())),
    )
    factors = [0.0] * a.shape[1]
    for column, value in zip(best[0], best[1][0], strict=True):
        factors[column] = float(value)
    return factors


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
