"""Estimate of the time of a training step from the work that the host launches.

Two clocks advance over the events of a `WorkLog`: the host launches one kernel after another, and
the GPU executes them in order. A kernel takes the time of the roofline, divided by an efficiency:

    time = max(operations / peak rate, bytes / memory bandwidth) / efficiency

The efficiency is the height of a plane through the measured calls of the same kind with the nearest
sizes (`pace/NAME.json`, by `memest validate --pace`). A GPU that was not measured has its own rates
and the efficiencies of the measured one. No figure depends on a model or a script.
"""

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from memest.errors import PlanError
from memest.estimator.hardware import work as launches
from memest.estimator.hardware.gpus import Gpu, find_gpu, match_device
from memest.estimator.hardware.work import LINK, NUM_HOSTS, VIEW, Work, WorkLog, host_kind
from memest.report import StepTime

FORMAT = 7  # of a file of measured times; it grows when kinds of work or their sizes change
PACE = "MEMEST_PACE"  # environment variable that names a file of `memest validate --pace`
_MEASURED = Path(__file__).with_name("pace") / "h100-80gb.json"  # its name is that of the GPU
NUM_NEAREST = 8  # measured calls to which the plane is fitted, weighted by inverse squared distance
RIDGE = 0.01  # added to the squares of the slopes
LEAST_SQUARE = 0.01  # added to squared distances: calls of the same sizes differ too
"""On held-out calls, `NUM_NEAREST` is about best of 6 to 24, and `RIDGE` of 0.003 to 1."""

LAUNCH_QUEUE = 1022
"""Launches that a stream queues before the GPU has run the first of them; the next launch blocks
the host. `scripts/measure_pace.py` on an H100, driver 580."""

PAUSE_S = 1.3e-6
"""Pause between two kernels of a busy GPU: seven trainings on an H100 took 1.2 to 1.8 microseconds
a kernel longer than the sum of their kernels (`torch.profiler`)."""

LEAST_S = 1.2e-6  # shortest kernels of eleven trainings on an H200 (`torch.profiler`)
BANDWIDTH_SHARE = 0.88  # share of the data sheet's bandwidth that kernels reach
KNEE = 3  # exponent of the norm that combines the time for bytes and all other time
"""With this exponent, H100 times predict 450 calls on an H200 with a median error of 3 %."""

ELSEWHERE = "pointwise 4"  # kind whose efficiency is used for kernels that were not measured
MIN_STEPS = 3  # number of steps after which further steps take the same time

SPREAD = (0.8, 1.5)  # bounds of a step's time relative to the estimate, measured: docs/time.md
SPREAD_ELSEWHERE = (0.65, 1.8)  # the same on a GPU that was not measured; assumed


def estimate(log: WorkLog, gpu: Gpu, *, num_micro_batches: int = 0) -> StepTime | None:
    """Return the median time of the logged steps after the first; None without steps or peak rates.

    The low estimate overlaps collectives with everything else, the high one with nothing. A step
    with fewer micro-batches is extended to `num_micro_batches` (0: no step is).
    """
    if not log.steps or not gpu.tflops:
        return None
    steps = [_repeated(events, num_micro_batches) for events in log.steps]
    num_more = max(0, MIN_STEPS - len(steps))
    steps += num_more * steps[-1:]
    num_known = [*log.num_known, *num_more * [len(log.works)]]
    clocks = Clocks(log.works, gpu)
    _, *runs = zip(clocks.run(steps, num_known), steps, strict=True)  # the first is left out
    runs.sort(key=lambda run: run[0])
    (seconds, first_s), events = runs[len(runs) // 2]
    counts = np.bincount([e // NUM_HOSTS for e in events if e >= 0], minlength=len(log.works))
    table, link_s = clocks.table, float(counts @ clocks.links)
    operations_s, _ = clocks.bounds.T
    is_new = [not table.is_measured(work.kind) for work in log.works]
    low, high = SPREAD_ELSEWHERE if table.origin else SPREAD
    figures = (seconds, low * seconds, high * seconds + link_s, first_s)
    shown_s, low_s, high_s, shown_first_s = (float(f"{s:.4g}") for s in figures)  # CPUs differ
    return StepTime(
        seconds=shown_s,
        low_seconds=low_s,
        high_seconds=high_s,
        peak_share=round(float(counts @ operations_s) / seconds, 3),
        bound_by=clocks.bound_by(events, link_s),
        origin=table.origin,
        unmeasured_share=round(float(counts * is_new @ clocks.kernels) / seconds, 3),
        first_seconds=shown_first_s,
        measured_in=table.file,
    )


def _repeated(events: Sequence[int], num_micro_batches: int) -> Sequence[int]:
    """Return a step's `WorkLog` events, its last micro-batch repeated up to `num_micro_batches`. A
    `CUT` ends a micro-batch; with fewer than two of them, `events` are returned unchanged."""
    cuts = [i for i, event in enumerate(events) if event == launches.CUT]
    if len(cuts) < 2 or num_micro_batches <= len(cuts):
        return events
    repeats = (num_micro_batches - len(cuts)) * [*events[cuts[-2] : cuts[-1]]]
    return [*events[: cuts[-2]], *repeats, *events[cuts[-2] :]]


class Clocks:
    """Simulated clocks of the host and of `gpu`, which give the time of steps made of `works`.

    Its arrays have seconds by index of the work: `kernels` on the GPU, `links` for transfers
    between GPUs, and `bounds` (operations, bytes) at the peak rates.
    """

    def __init__(self, works: list[Work], gpu: Gpu) -> None:
        self.table = table = table_of(gpu)
        self._works = works
        self.kernels = np.array([table.kernel_s(work) for work in works])
        self.bounds = np.array([table.bounds_s(work) for work in works])
        link_bytes = [work.num_bytes if work.kind == LINK else 0 for work in works]
        self.links = 1e-9 / gpu.link_gb_s * np.array(link_bytes, dtype=float)
        self._hosts = [table.host_s(work, host) for work in works for host in range(NUM_HOSTS)]

    def run(
        self,
        steps: Sequence[Iterable[int]],
        num_known: Sequence[int],
        kernel_share: Any = 1.0,
        host_share: float = 1.0,
    ) -> list[tuple[float, float]]:
        """Return (seconds, extra seconds) of each step. The extra seconds are time of the host for
        first calls with new sizes; the seconds include them. `steps` has the `WorkLog` events of
        each step, `num_known` the number of works that occurred before it. Kernels take
        `kernel_share` times their time (a number, or an array by work), and the host `host_share`
        times its own. The host waits for the GPU at the end of a step."""
        hosts = [host_share * s for s in self._hosts]
        busy = kernel_share * self.kernels
        on_gpu = np.where(busy, busy + PAUSE_S, 0.0).repeat(NUM_HOSTS).tolist()
        wait_s = host_share * self.table.wait_s
        host = gpu_done = last_end = 0.0
        queue = deque([0.0] * LAUNCH_QUEUE, maxlen=LAUNCH_QUEUE)  # ends of the last kernels
        times = []
        for events, num_before in zip(steps, num_known, strict=True):
            first_s = 0.0
            unseen = set(range(num_before, len(self._works)))  # works that have not occurred yet
            for event in events:
                if event < 0:
                    if event == launches.WAITS:
                        host = max(host + wait_s, gpu_done + wait_s / 2)
                    elif event <= launches.HOST:
                        host += host_share * 1e-6 * (launches.HOST - event)
                    continue
                if unseen and (index := event // NUM_HOSTS) in unseen:
                    unseen.remove(index)
                    extra_s = self.table.first_s(self._works[index].kind)
                    first_s += extra_s
                    host += extra_s
                host += hosts[event]
                if queue[0] > host:  # full: the host waits for the end of the oldest launch
                    host = queue[0]
                gpu_done = (gpu_done if gpu_done > host else host) + on_gpu[event]
                queue.append(gpu_done)
            end = host = max(host, gpu_done)
            times.append((end - last_end, first_s))
            last_end = end
        return times

    def bound_by(self, events: Sequence[int], link_s: float) -> str:
        """Return the resource whose removal shortens the step with these `events` most: `host`,
        `compute`, `memory` or `LINK`. `link_s` is the time of its collectives in seconds."""
        # without the operations a kernel takes the time of its bytes, and the reverse
        shares = self.bounds / self.bounds.max(axis=1, keepdims=True).clip(1e-12)
        operations_share, bytes_share = shares.T
        scalings = {"host": (1.0, 0.0), "compute": (bytes_share,), "memory": (operations_share,)}
        step = [events], [len(self._works)]
        times = {name: self.run(*step, *shares)[0][0] for name, shares in scalings.items()}
        times[LINK] = self.run(*step)[0][0] - link_s  # seconds of the only step
        return min(times, key=lambda name: times[name])


class Table:
    """Estimates of the times of kernels and of the host with `gpu`, from measured times.

    `times` is the content of a file in `pace/`. `kinds` has its calls by kind of work, measured on
    the GPU `origin`. `file` names the user's file for reports, empty if only the package's is used.
    """

    def __init__(
        self, gpu: Gpu, times: dict[str, Any], kinds: "dict[str, Calls]", origin: Gpu, file: str
    ) -> None:
        host, first_us = times["host"], times["first_us"]
        self.file, self._kinds = file, kinds
        self._gpu, self._measured = gpu, origin
        library_us = {kind: n * host["forward_launch"] for kind, n in launches.IN_LAUNCHES.items()}
        self._us = library_us | host  # host times by name, microseconds
        self.measured_kind = cache(lambda kind: nearest_kind(kind, kinds))
        self.first_s = cache(lambda kind: 1e-6 * first_us.get(nearest_kind(kind, first_us), 0.0))
        """Extra seconds of the first call with new sizes, by its kind."""

        self.wait_s, self.launch_us = 1e-6 * host["read"], host["forward_launch"]
        self.origin = "" if (origin.chip or origin.name) == (gpu.chip or gpu.name) else origin.name
        """Measured GPU whose efficiencies are used; empty if it is this one."""

    def host_s(self, work: Work, host: int) -> float:
        """Return the host's seconds for a call; `host` is `FORWARD`, `BACKWARD` or `OPTIMIZER`."""
        if work.kind in launches.IN_PYTHON:
            return 1e-6 * self._us[work.kind] * work.num_tensors
        name = f"{'backward' if host == launches.BACKWARD else 'forward'}_{host_kind(work)}"
        if host == launches.OPTIMIZER and name == "forward_launch":
            name = "loop"  # views and calls of cuDNN take as long as in a forward
        return 1e-6 * max(self._us[name], self._us["list"] * work.num_tensors)

    def kernel_s(self, work: Work) -> float:
        """Return the seconds that the kernels of a call take; 0 if it has none."""
        if (rate := self._us.get(f"{work.kind}_gb_s")) is not None:  # a copy
            return float(1e-9 * work.num_bytes / rate)
        if work.kind in (LINK, launches.PRODUCTS, *launches.IN_PYTHON) or work == VIEW:
            return sum(map(self.kernel_s, work.more))
        kind = self.measured_kind(work.kind)
        size = work.size if kind else (work.num_bytes,)
        efficiency = self._kinds[kind or ELSEWHERE].efficiency(size)
        return max(LEAST_S, self._seconds(work, efficiency)) + sum(map(self.kernel_s, work.more))

    def _seconds(self, work: Work, efficiency: float) -> float:
        """Return the seconds of a kernel with this `work` on this GPU. `efficiency` is the share of
        the peak rates that the kernel reached on the measured GPU. The kernel is assumed to reach
        the same share here. If both GPUs have the same peak rates of operations, only the part of
        the measured time that bytes take is scaled. It is scaled by the ratio of the memory
        bandwidths."""
        if self._gpu.tflops != self._measured.tflops:
            return max(self.bounds_s(work)) / efficiency
        bounds_s = roofline_s(work.rate, work.num_flops, work.num_bytes, self._measured)
        measured_s = max(bounds_s) / efficiency
        bytes_s = min(measured_s, bounds_s[1] / BANDWIDTH_SHARE)
        bandwidth_ratio = self._measured.memory_gb_s / self._gpu.memory_gb_s
        other = measured_s**KNEE - bytes_s**KNEE
        return float((other + (bandwidth_ratio * bytes_s) ** KNEE) ** (1 / KNEE))

    def bounds_s(self, work: Work) -> tuple[float, float]:
        """Return (seconds of its operations, seconds of its bytes) of a call at the peak rates."""
        return roofline_s(work.rate, work.num_flops, work.num_bytes, self._gpu)

    def is_measured(self, kind: str) -> bool:
        """Return whether calls of a work's `kind` were measured, at least in another precision."""
        return f"{kind}_gb_s" in self._us or kind == LINK or self.measured_kind(kind) != ""


def nearest_kind(kind: str, kinds: Iterable[str]) -> str:
    """Return the one of `kinds` with the operator of `kind` and the fewest differing words, else
    "". A kind is an operator and words of its variant, as in `matmul-odd float16`."""
    operator, *words = re.split("[ -]", kind)
    differences = {}
    for other in kinds:
        other_operator, *other_words = re.split("[ -]", other)
        if other_operator in (operator, operator.removesuffix("_backward")):
            num_different = len({*words} ^ {*other_words})
            differences[other] = other_operator != operator, num_different, other
    return min(differences, key=lambda other: differences[other], default="")


def roofline_s(rate: str, num_flops: float, num_bytes: float, gpu: Gpu) -> tuple[float, float]:
    """Return (seconds of operations, seconds of bytes) at the peak rates; the longer one counts.
    `rate` is a precision such as `bfloat16`, empty if operations do not count."""
    operations_s = num_flops / (1e12 * gpu.tflops_of(rate)) if rate else 0.0
    return operations_s, num_bytes / (1e9 * gpu.memory_gb_s)


class Calls:
    """Measured calls of one `kind`, from which the efficiency at other sizes is interpolated. A row
    of `rows` has the sizes, operations, bytes and microseconds of one call on `gpu`."""

    def __init__(self, kind: str, rows: list[list[float]], gpu: Gpu) -> None:
        last = kind.rpartition(" ")[2]
        rate = "" if last.isdigit() else last
        sizes, ratios = [], []
        for *size, num_flops, num_bytes, us in rows:
            sizes.append(size)
            ratios.append(1e6 * max(roofline_s(rate, num_flops, num_bytes, gpu)) / us)
        self._sizes = np.log(np.array(sizes, dtype=float))
        if not rate:  # cap the efficiency at that of the largest call: small tensors stay in L2
            others = [tuple(size[1:]) for size in sizes]  # without the bytes
            largest = {other: r for _, other, r in sorted(zip(rows, others, ratios, strict=True))}
            ratios = [min(r, largest[other]) for r, other in zip(ratios, others, strict=True)]
        self._efficiencies = np.log(ratios)
        self.efficiency = cache(self._efficiency)

    def _efficiency(self, size: tuple[int, ...]) -> float:
        """Return the efficiency (roofline time / real time) of a call of `size`, interpolated from
        the nearest measured calls. Sizes beyond these have the efficiency at their edge."""
        offsets = self._sizes - np.log(np.maximum(1, size))
        squares = (offsets**2).sum(axis=1)
        indices = np.argsort(squares, kind="stable")[:NUM_NEAREST]
        points, heights = offsets[indices], self._efficiencies[indices]
        points = points - points.min(axis=0).clip(0) - points.max(axis=0).clip(None, 0)
        weights = 1 / (squares[indices] + LEAST_SQUARE)
        plane = np.column_stack((np.ones(len(points)), points))
        weighted_plane = plane.T * (weights / weights.sum())
        ridge = np.diag([0.0, *[RIDGE] * points.shape[1]])
        height = np.linalg.solve(weighted_plane @ plane + ridge, weighted_plane @ heights)[0]
        return float(np.exp(height.clip(heights.min(), heights.max())))


def table_of(gpu: Gpu, *, has_own: bool = True) -> Table:
    """Return the table of kernel times and host times on `gpu`.

    The environment variable `MEMEST_PACE` can name a file that the user has measured. If the file
    is of a GPU with the same chip as `gpu`, all times are from the file. If it is of another chip,
    host times are from the file and kernel times are the package's.

    Without a file, all times are the package's. `has_own` False ignores the file, so that the
    memory of a training does not depend on it.

    Raises:
        PlanError: the file cannot be read.
    """
    return _table_of(gpu, os.environ.get(PACE, "") if has_own else "")


@cache
def _table_of(gpu: Gpu, path: str) -> Table:
    file, origin, label = _MEASURED, find_gpu(_MEASURED.stem), ""
    times = _read(file)
    if path:
        user_times = _read(Path(path))
        times, label = times | {"host": user_times["host"]}, f"{Path(path).name} (host only)"
        user_gpu = match_device(user_times["device"], user_times["memory_bytes"])
        if user_gpu is not None and (user_gpu.chip or user_gpu.name) == (gpu.chip or gpu.name):
            file, times, origin, label = Path(path), user_times, user_gpu, Path(path).name
    return Table(gpu, times, _kinds_of(file, origin), origin, label)


@cache
def _kinds_of(file: Path, origin: Gpu) -> dict[str, Calls]:
    """Return {kind of work: measured calls} of `file`, which was measured on `origin`."""
    return {kind: Calls(kind, rows, origin) for kind, rows in _read(file)["kernels"].items()}


@cache
def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = content["kernels"][ELSEWHERE], content["host"]["hook"], content["memory_bytes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        raise PlanError(
            f"`{path}` has no measured times of a GPU: {reason}",
            hint="`memest validate --pace FILE` writes such a file",
        ) from error
    if content.get("format") != FORMAT:
        raise PlanError(
            f"`{path}` is of another version of memest",
            hint="measure again: `memest validate --pace FILE`",
        )
    return content
