"""Estimate of the time of a training step from the work that the host launches.

Two clocks advance over the events of a `WorkLog`: the host launches one kernel after another, and
the GPU executes them in order. A kernel takes the time of the roofline, divided by an efficiency:

    time = max(operations / peak rate, bytes / memory bandwidth) / efficiency

The efficiency follows from the measured calls of the same kind with the nearest sizes
(`pace/NAME.json`, by `memest validate --pace`). It is their mean where bytes bound the kind, else a
plane fitted to them. A GPU that was not measured has its own rates and the efficiencies of the
measured one. No figure depends on a model or a script.
"""

import json
import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from memest.errors import PlanError
from memest.estimator.hardware.gpus import Gpu, find_gpu, match_device
from memest.estimator.hardware.speed import LAUNCH_QUEUE, speed_of
from memest.estimator.hardware.work import (
    CUT,
    HOST,
    HOST_KINDS,
    IN_PYTHON,
    LAYOUTS,
    LINK,
    NUM_HOSTS,
    VIEW,
    WAITS,
    Work,
    WorkLog,
    host_kind,
)  # fmt: skip
from memest.report import StepTime

FORMAT = 4  # of a file of measured times; it grows when kinds of work or their sizes change
PACE = "MEMEST_PACE"  # environment variable that names a file of `memest validate --pace`
_MEASURED = Path(__file__).with_name("pace")
_PHASES = ("forward", "backward")
NUM_NEAREST = 4  # measured calls that are averaged, by the inverse square of their distance
NUM_FITTED = 8  # measured calls to which the plane is fitted, with the same weights
RIDGE = 0.01  # added to the squares of the slopes
LEAST_SQUARE = 0.01  # added to squared distances: calls of the same sizes differ too
"""Eight neighbours and this ridge are about best on held-out calls, of 6 to 24 neighbours
and ridges of 0.003 to 1.
"""

PAUSE_S = 1.3e-6
"""Pause between two kernels of a busy GPU: seven trainings on an H100 took 1.2 to 1.8 microseconds
a kernel longer than the sum of their kernels (`torch.profiler`).
"""

LEAST_S = 1.2e-6  # shortest kernels of eleven trainings on an H200 (`torch.profiler`)
BANDWIDTH_SHARE = 0.88  # of the data sheet's bandwidth that kernels reach
KNEE = 3  # exponent of the sum of the time for bytes and that for all else
"""With this exponent, H100 times predict 450 calls on an H200 with a median error of 3 %."""

ELSEWHERE = "pointwise 4"  # kind whose efficiency kernels have that were not measured

SPREAD = (0.8, 1.5)  # bounds of a step's time relative to the estimate, measured: docs/time.md
SPREAD_ELSEWHERE = (0.65, 1.8)  # the same on a GPU that was not measured; assumed


@dataclass(frozen=True, slots=True)
class Step:
    """Estimated time of one optimizer step, and its parts."""

    seconds: float
    first_seconds: float  # time in which libraries choose or compile kernels for new sizes
    idle_seconds: float  # time in which the GPU waits for the host
    seconds_by_kind: dict[str, float]  # of kernels; `link`, of collectives, is not in `seconds`
    compute_seconds: float  # time of the kernels that the peak rate bounds
    ideal_seconds: float  # time of all operations at the peak rates


def estimate(log: WorkLog, gpu: Gpu, *, num_micro_batches: int = 0) -> StepTime | None:
    """Return the median time of a run's steps, without the first of several; None without steps.

    The low estimate overlaps collectives with everything else, the high one with nothing.
    `num_micro_batches` is the number per step of the whole run; 0 is the log's own.
    """
    if not log.steps or not gpu.tflops:
        return None
    parts = [_repeated(events, num_micro_batches) for events in log.steps]
    known = log.num_known
    if len(parts) < MIN_STEPS:
        parts += [parts[-1]] * MIN_STEPS
        known += [len(log.works)] * MIN_STEPS
    steps = sorted(step_times(log, gpu, parts, known)[1:], key=lambda step: step.seconds)
    step = steps[len(steps) // 2]
    table = table_of(gpu)
    low, high = SPREAD_ELSEWHERE if table.origin else SPREAD
    link = step.seconds_by_kind.get("link", 0.0)
    unmeasured = sum(s for kind, s in step.seconds_by_kind.items() if not table.is_measured(kind))
    return StepTime(
        seconds=_rounded(step.seconds),
        low_seconds=_rounded(low * step.seconds),
        high_seconds=_rounded(high * step.seconds + link),
        peak_share=round(step.ideal_seconds / step.seconds, 3),
        bound_by=_bound_by(step, link),
        origin=table.origin,
        unmeasured_share=round(unmeasured / step.seconds, 3),
        first_seconds=_rounded(step.first_seconds),
        measured_in=table.file,
    )


def _rounded(seconds: float) -> float:
    """Return a time rounded to four digits, since further digits differ by CPU."""
    return float(f"{seconds:.4g}")


MIN_STEPS = 3  # steps after which one step follows another as in a long run


def _repeated(events: Sequence[int], num_micro_batches: int) -> Sequence[int]:
    """Return a step with the given number of micro-batches: those in the middle are alike."""
    cuts = [i for i, event in enumerate(events) if event == CUT]
    if len(cuts) < 2 or num_micro_batches <= len(cuts):
        return events
    middle = list(events[cuts[-2] : cuts[-1]])
    more = num_micro_batches - len(cuts)
    return [*events[: cuts[-2]], *(more * middle), *events[cuts[-2] :]]


def _bound_by(step: Step, link: float) -> str:
    busy = step.seconds - step.idle_seconds
    found = {
        "host": step.idle_seconds,
        "compute": step.compute_seconds,
        "memory": busy - step.compute_seconds,
        "link": link,
    }
    return max(found, key=lambda name: found[name])


def step_times(
    log: WorkLog, gpu: Gpu, steps: Sequence[Iterable[int]] = (), num_known: Sequence[int] = ()
) -> list[Step]:
    """Return the estimated time of each step of a log.

    `steps` are the events of the steps, by default those of the log. `num_known` has, for each
    step, the number of the log's works before it. The host waits for the GPU at the end of a step.
    """
    table = table_of(gpu)
    kernels = [table.kernel_s(work) for work in log.works]
    hosts = [table.host_s(work, host) for work in log.works for host in range(NUM_HOSTS)]
    on_gpu = [s + PAUSE_S if s else 0.0 for s in kernels for _ in range(NUM_HOSTS)]
    host = gpu_done = last_end = 0.0
    queue = deque([0.0] * LAUNCH_QUEUE, maxlen=LAUNCH_QUEUE)  # ends of the last kernels
    found = []
    for events, known in zip(steps or log.steps, num_known or log.num_known, strict=True):
        first_s = 0.0
        new = set(range(known, len(kernels)))  # works that have not occurred yet
        for event in events:
            if event < 0:
                if event == WAITS:
                    host = max(host + table.wait_s, gpu_done + table.wait_s / 2)
                elif event <= HOST:
                    host += 1e-6 * (HOST - event)
                continue
            if new and event // NUM_HOSTS in new:
                new.remove(event // NUM_HOSTS)
                more = table.first_s(log.works[event // NUM_HOSTS])
                first_s, host = first_s + more, host + more
            host += hosts[event]
            if queue[0] > host:
                host = queue[0]
            gpu_done = (gpu_done if gpu_done > host else host) + on_gpu[event]
            queue.append(gpu_done)
        end = host = max(host, gpu_done)
        times = end - last_end, first_s
        counts = Counter([event // NUM_HOSTS for event in events if event >= 0])
        found.append(_summed(table, log.works, kernels, counts, times))
        last_end = end
    return found


def _summed(
    table: "Table",
    works: list[Work],
    kernels: list[float],
    counts: Counter[int],
    times: tuple[float, float],
) -> Step:
    by_kind: dict[str, float] = defaultdict(float)
    computing = ideal = busy = 0.0
    for index, count in counts.items():
        work, taken = works[index], kernels[index] * count
        busy += taken
        by_kind[work.kind] += table.link_s(work) * count if work.kind == LINK else taken
        computing += taken * table.is_compute_bound(work)
        ideal += count * table.operations_s(work)
    idle = max(0.0, times[0] - busy)
    return Step(*times, idle, dict(by_kind), computing, ideal)


class Table:
    """Times of kernels and of the host on one GPU.

    `host` and `first_us` are from a file in `pace/`. `kinds` has the file's kernels, measured on
    `origin`. `file` names a user's file in place of the package's.
    """

    def __init__(
        self,
        gpu: Gpu,
        host: dict[str, float],
        first_us: dict[str, float],
        kinds: "dict[str, Calls]",
        origin: Gpu,
        file: str = "",
    ) -> None:
        self.file = file
        self._gpu, self._measured = gpu, origin
        self._kinds = kinds
        self._alike = cache(self._nearest_to)
        times = {name: 1e-6 * us for name, us in host.items()}
        self.wait_s = times["read"]
        self._tensor_s = times["list"]
        self._python_s = {kind: times[kind] for kind in IN_PYTHON}
        each = [[times[f"{phase}_{kind}"] for kind in HOST_KINDS] for phase in _PHASES]
        self._host_s = [*each, [times["loop"], *each[0][1:]]]
        self._first_s = {kind: 1e-6 * us for kind, us in first_us.items()}
        self._copy_bytes_s = {
            k.removesuffix("_gb_s"): 1e9 * v for k, v in host.items() if k.endswith("_gb_s")
        }
        self._link_bytes_s = 1e9 * speed_of(gpu).link_gb_s
        self.origin = "" if (origin.chip or origin.name) == (gpu.chip or gpu.name) else origin.name
        """Measured GPU whose efficiencies are used; empty if it is this one."""

    def host_s(self, work: Work, host: int) -> float:
        """Return the seconds that the host needs to launch a call."""
        if work.kind in IN_PYTHON:
            return self._python_s[work.kind] * work.num_tensors
        return float(max(self._host_s[host][host_kind(work)], self._tensor_s * work.num_tensors))

    def first_s(self, work: Work) -> float:
        """Return extra seconds of the first call with new sizes."""
        return self._first_s.get(self._alike(work.kind) or "", 0.0)

    def kernel_s(self, work: Work) -> float:
        """Return seconds of the kernels of a call."""
        if work.kind in self._copy_bytes_s:
            return float(work.num_bytes / self._copy_bytes_s[work.kind])
        if work.kind in (LINK, *IN_PYTHON) or work == VIEW:
            return 0.0
        kind, size = self._known(work)
        efficiency = self._kinds[kind].efficiency(size)
        seconds = max(LEAST_S, self._seconds(work, efficiency))
        return seconds + sum(map(self.kernel_s, work.more))

    def _seconds(self, work: Work, efficiency: float) -> float:
        """Return seconds of a kernel with this efficiency on the measured GPU.

        On a GPU with the same peak rates, only the time for bytes differs.
        """
        rate, num_bytes = work.rate, work.num_bytes
        if self._gpu.tflops != self._measured.tflops:
            return ideal_s(rate, work.num_flops, num_bytes, self._gpu) / efficiency
        measured = ideal_s(rate, work.num_flops, num_bytes, self._measured) / efficiency
        moved = min(measured, num_bytes / (BANDWIDTH_SHARE * 1e9 * self._measured.memory_gb_s))
        faster = self._measured.memory_gb_s / self._gpu.memory_gb_s
        other = measured**KNEE - moved**KNEE
        return float((other + (faster * moved) ** KNEE) ** (1 / KNEE))

    def link_s(self, work: Work) -> float:
        """Return seconds of a collective on the link to another GPU of the node."""
        return work.num_bytes / self._link_bytes_s

    def operations_s(self, work: Work) -> float:
        """Return seconds of the operations of a call at the peak rate."""
        return work.num_flops / (1e12 * self._gpu.tflops_of(work.rate)) if work.rate else 0.0

    def is_compute_bound(self, work: Work) -> bool:
        """Return whether operations bound a call, not bytes."""
        return self.operations_s(work) > work.num_bytes / (1e9 * self._gpu.memory_gb_s)

    def is_measured(self, kind: str) -> bool:
        """Return whether calls of a kind were measured, at least in another precision."""
        return kind in self._copy_bytes_s or kind == LINK or self._alike(kind) is not None

    def _nearest_to(self, kind: str) -> str | None:
        """Return the measured kind nearest to `kind`: another precision, another layout."""
        name, _, rest = kind.partition(" ")
        layout = rest.rpartition(" ")[0]
        for mark in LAYOUTS[1:]:
            name = name.removesuffix(mark)
        names = {
            given + mark
            for given in (
                name,
                name.replace("bmm", "matmul"),
                name.replace("-data", ""),
                name.removesuffix("_backward"),
                re.sub("-(bias|grad|dropout|rows)", "", name),
            )
            for mark in LAYOUTS
        }
        found = (k for k in self._kinds if k.partition(" ")[0] in names)
        ends = {k: k.rpartition(" ") for k in (kind, *self._kinds)}
        best = sorted(
            (k != kind, layout not in k, ends[k][0] != layout, ends[k][2] != ends[kind][2], k)
            for k in found
        )
        return best[0][-1] if best else None

    def _known(self, work: Work) -> tuple[str, tuple[int, ...]]:
        """Return the measured kind that represents a call, and the call's sizes in it."""
        if work.kind in self._kinds:
            return work.kind, work.size
        kind = self._alike(work.kind)
        if kind is None:
            return ELSEWHERE, (work.num_bytes,)
        size = work.size
        if len(size) == 4 and self._kinds[kind].num_sizes == 3:
            size = (size[0] * size[1], *size[2:])
        return kind, size


def ideal_s(rate: str, num_flops: int, num_bytes: int, gpu: Gpu) -> float:
    """Return the seconds of the roofline."""
    moved = num_bytes / (1e9 * gpu.memory_gb_s)
    return max(moved, num_flops / (1e12 * gpu.tflops_of(rate))) if rate else moved


class Calls:
    """Measured calls of one kind: `rows` of sizes, operations, bytes and microseconds on `gpu`."""

    def __init__(self, kind: str, rows: list[list[float]], gpu: Gpu) -> None:
        last = kind.rpartition(" ")[2]
        self._rate = "" if last.isdigit() else last
        self._sizes = np.log(np.array([row[:-3] for row in rows], dtype=float))
        ideal = [ideal_s(self._rate, int(row[-3]), int(row[-2]), gpu) for row in rows]
        self._efficiencies = np.log(ideal) - np.log([1e-6 * row[-1] for row in rows])
        self.num_sizes = self._sizes.shape[1]
        if not self._rate:
            self._limit()
        self._known: dict[tuple[int, ...], float] = {}

    def _limit(self) -> None:
        """Limit the efficiency of each call to that of the largest call.

        A measurement repeats one call, so small tensors stay in the L2 cache. In a training step
        they come from memory.
        """
        for alike in {tuple(row[1:]) for row in self._sizes}:
            group = np.flatnonzero((self._sizes[:, 1:] == alike).all(axis=1))
            largest = group[self._sizes[group, 0].argmax()]
            most = self._efficiencies[largest]
            self._efficiencies[group] = np.minimum(self._efficiencies[group], most)

    @cached_property
    def _estimate(self) -> Callable[[Any, Any], Any]:
        """Return `_mean` or `_fitted`: for memory-bound kinds, the better one on held-out calls."""
        if self._rate:
            return self._fitted
        if len(self._sizes) <= NUM_FITTED:
            return self._mean
        apart = self._sizes - self._sizes[:, None]
        squares = (apart**2).sum(axis=2)
        np.fill_diagonal(squares, np.inf)
        errors = {
            estimate: float(np.abs(np.expm1(estimate(squares, apart) - self._efficiencies)).mean())
            for estimate in (self._mean, self._fitted)
        }
        return min(errors, key=lambda estimate: errors[estimate])

    def efficiency(self, size: tuple[int, ...]) -> float:
        """Return the efficiency of a call, interpolated between the nearest measured calls."""
        if size not in self._known:
            apart = (self._sizes - np.log(np.maximum(1, size)))[None]
            self._known[size] = float(np.exp(self._estimate((apart**2).sum(axis=2), apart)[0]))
        return self._known[size]

    def _mean(self, squares: Any, _: Any) -> Any:
        """Return the weighted mean of the nearest calls, for each row of squared distances."""
        nearest = np.argsort(squares, axis=1, kind="stable")[:, :NUM_NEAREST]
        weights = 1 / (np.take_along_axis(squares, nearest, axis=1) + 1e-6)
        return (weights * self._efficiencies[nearest]).sum(axis=1) / weights.sum(axis=1)

    def _fitted(self, squares: Any, apart: Any) -> Any:
        """Return the value at distance 0 of planes fitted to the nearest calls."""
        nearest = np.argsort(squares, axis=1, kind="stable")[:, :NUM_FITTED]
        weights = 1 / (np.take_along_axis(squares, nearest, axis=1) + LEAST_SQUARE)
        weights /= weights.sum(axis=1, keepdims=True)
        near = np.take_along_axis(apart, nearest[..., None], axis=1)
        plane = np.concatenate((np.ones_like(near[..., :1]), near), axis=2)
        weighted = (plane * weights[..., None]).transpose(0, 2, 1)
        ridge = np.diag([0.0, *[RIDGE] * self.num_sizes])
        known = self._efficiencies[nearest]
        values = weighted @ known[..., None]
        height = np.linalg.solve(weighted @ plane + ridge, values)[:, 0, 0]
        return height.clip(known.min(axis=1), known.max(axis=1))


def table_of(gpu: Gpu) -> Table:
    """Return times on `gpu`, from the file in `MEMEST_PACE` or from the nearest measured GPU.

    Host times are the file's for every GPU.

    Raises:
        PlanError: the file cannot be read.
    """
    return _table_of(gpu, os.environ.get(PACE, ""))


@cache
def _table_of(gpu: Gpu, path: str) -> Table:
    measured = [find_gpu(path.stem) for path in sorted(_MEASURED.glob("*.json"))]
    chip = gpu.chip or gpu.name
    origin = min(measured, key=lambda g: (g.name != chip, abs(g.capability[0] - gpu.capability[0])))
    file = _MEASURED / f"{origin.name}.json"
    host, first_us, label = _read(file)["host"], _read(file)["first_us"], ""
    if path:
        own = _read(Path(path))
        host, label = own["host"], f"{Path(path).name} (host only)"
        found = match_device(own["device"], own["memory_bytes"])
        if found is not None and (found.chip or found.name) == chip:
            file, first_us, origin, label = Path(path), own["first_us"], found, Path(path).name
    return Table(gpu, host, first_us, _kinds_of(file, origin), origin, label)


@cache
def _kinds_of(file: Path, origin: Gpu) -> dict[str, Calls]:
    """Return the measured calls of a file by kind; GPUs of other chips share them."""
    return {kind: Calls(kind, rows, origin) for kind, rows in _read(file)["kernels"].items()}


@cache
def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = found["kernels"][ELSEWHERE], found["host"]["hook"], found["memory_bytes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else repr(error)
        raise PlanError(
            f"`{path}` has no measured times of a GPU: {why}",
            hint="`memest validate --pace FILE` writes such a file",
        ) from error
    if found.get("format") != FORMAT:
        raise PlanError(
            f"`{path}` is of another version of memest",
            hint="measure again: `memest validate --pace FILE`",
        )
    return found
