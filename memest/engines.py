"""One function over many tasks: in processes of this machine, on a Ray cluster, or under Slurm.

Results are in the order of the tasks. A task whose worker is killed is tried once more; if that one
is killed too, its result is an error.
"""

import gc
import itertools
import logging
import os
import shutil
import signal
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memest.child import DiedError, die_with_parent, leave
from memest.errors import UnsupportedError
from memest.packages import require

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
R = TypeVar("R")
ATTEMPTS = 2  # number of times that a task begins if its worker is killed
MINUTES = 240  # time limit of a task under Slurm
POLL_S = 0.2  # seconds between two looks at the jobs
_PACKAGES = {"ray": "ray", "slurm": "submitit"}
MADE_BETWEEN_COLLECTIONS = 1_000_000
"""Threshold of `gc.set_threshold`, in new objects. Importing torch and transformers makes a million
permanent objects, which Python would scan a thousand times. A virtual run sets its own threshold
(`without_gc`).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Message to watchers, such as a progress bar: a task begins, or has ended with a result."""

    label: str  # name of the task, for people
    is_done: bool  # False if the task begins
    weight: int  # number of plans in the task
    total: int  # number of plans in all tasks; 0 if unknown, as in a search
    task: Any  # argument of the function that runs over the tasks
    result: Any = None  # None if the task begins


Watcher = Callable[[Event], None]
WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("WATCHERS", default=())


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` in the block with each `Event` of the tasks that begin or end there."""
    token = WATCHERS.set((*WATCHERS.get(), watcher))
    try:
        yield
    finally:
        WATCHERS.reset(token)


def notify(event: Event) -> None:
    """Call all watchers with `event`."""
    for watcher in WATCHERS.get():
        watcher(event)


class Engine(ABC):
    """Way to run a function over many tasks: on this machine, on a Ray cluster or under Slurm. At
    most `workers` tasks run at a time (None: no limit), each with `gpus` GPUs."""

    def __init__(self, workers: int | None = None, *, gpus: int = 0) -> None:
        self.workers = workers
        self.gpus = gpus

    def map(
        self, run: Callable[[T], R], tasks: Sequence[T], *, died: Callable[[T, DiedError], Any],
        label: Callable[[T], str] = str, weight: Callable[[T], int] = lambda task: 1,
    ) -> list[R]:  # fmt: skip
        """Return `run(task)` of each task, in order; raise the first error that `run` raises. If
        the worker of a task was killed `ATTEMPTS` times, `died(task, error)` returns the task's
        result. `label` and `weight` return the task's name and number of plans, for its `Event`."""
        total = sum(map(weight, tasks))
        results: dict[int, R] = {}

        def report(index: int, *, is_done: bool) -> None:
            task = tasks[index]
            notify(
                Event(
                    label=label(task), is_done=is_done, weight=weight(task), total=total, task=task,
                    result=results.get(index),
                )
            )  # fmt: skip

        pending = list(range(len(tasks)))
        attempt = 0

        def begins(position: int) -> None:
            if attempt == 0:
                report(pending[position], is_done=False)

        for attempt in range(ATTEMPTS):
            killed: list[int] = []
            answers = self._outcomes(run, [tasks[i] for i in pending], begins, attempt > 0)
            with closing(answers):
                for position, answer in answers:
                    index = pending[position]
                    if isinstance(answer, _Failure):
                        raise answer.error
                    if not isinstance(answer, _Death):
                        results[index] = answer
                    elif attempt + 1 < ATTEMPTS:
                        killed.append(index)
                        continue
                    else:
                        results[index] = died(tasks[index], answer.error(label(tasks[index])))
                    report(index, is_done=True)
            pending = sorted(killed)
            if not pending:
                break
        return [results[index] for index in range(len(tasks))]

    def map_groups(
        self, run: Callable[[Sequence[T]], list[R]], items: Sequence[T], *,
        alike: Callable[[T], Any], label: Callable[[Sequence[T]], str],
        work: Callable[[T], Any] = lambda item: 0, weight: Callable[[Sequence[T]], int] = len,
    ) -> "list[R | DiedError]":  # fmt: skip
        """Return a result for each item, in order; `run(group)` returns those of a group of items.
        Items with an equal `alike(item)` form a group. Groups whose first item has most `work`
        begin first, so that no worker runs alone for long at the end. `label` and `weight` are as
        in `map`. If a group's worker was killed `ATTEMPTS` times, its items get a `DiedError`."""
        groups: dict[Any, list[int]] = {}
        for position, item in enumerate(items):
            groups.setdefault(alike(item), []).append(position)
        order = sorted(groups.values(), key=lambda group: work(items[group[0]]), reverse=True)
        tasks = [[items[position] for position in group] for group in order]
        group_results = self.map(
            run, tasks, died=lambda group, error: [error] * len(group), label=label, weight=weight
        )
        results = dict(zip(itertools.chain(*order), itertools.chain(*group_results), strict=True))
        return [results[position] for position in range(len(items))]

    @abstractmethod
    def _outcomes(
        self, run: Callable[[T], R], tasks: Sequence[T], begins: Callable[[int], None], retry: bool
    ) -> "Generator[tuple[int, R | _Failure | _Death], None, None]":
        """Yield (index of a task, its outcome) in the order in which tasks end. The outcome is the
        result of `run`, a `_Failure` or a `_Death`. `begins` is called with the index of each task
        that starts. `retry` is True if the worker of each of `tasks` was killed at the first
        attempt. Then run tasks in other processes only, so that a kill does not end this
        process."""


class _Failure:
    """Outcome of a task that raised `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Death:
    """Outcome of a task whose worker ended without a result; `how` is text on that end."""

    def __init__(self, how: str) -> None:
        self.how = how

    def error(self, label: str) -> DiedError:
        """Return the error of the task named `label`, whose workers all ended without a result."""
        return DiedError(
            f"`{label}` has no result: its worker died {ATTEMPTS} times, {self.how}",
            hint="give each worker more memory, or use fewer with `--workers`",
        )


def _call_in_worker(run: Callable[[T], R], task: T) -> R | _Failure:
    """Return `run(task)`, called in a worker, or a `_Failure` with its error and traceback."""
    collect_seldom()
    try:
        return run(task)
    except Exception as error:
        error.add_note(f"in a worker:\n{traceback.format_exc()}")
        return _Failure(error)


class Local(Engine):
    """Engine of `workers` processes on this machine, None for one per core. With one worker, tasks
    run in this process. `visible` lists the machine's GPUs. A worker gets all of `visible` in
    `CUDA_VISIBLE_DEVICES`, with its own GPU first: worker 1 of GPUs 0, 1 and 2 gets `1,0,2`. If
    `visible` is (), the variable is not changed."""

    def __init__(
        self, workers: int | None = None, *, gpus: int = 0, visible: Sequence[str] = ()
    ) -> None:
        super().__init__(workers, gpus=gpus)
        self.visible = visible

    def _outcomes(
        self, run: Callable[[T], R], tasks: Sequence[T], begins: Callable[[int], None], retry: bool
    ) -> Generator[tuple[int, R | _Failure | _Death], None, None]:
        count = min(self.workers or os.cpu_count() or 1, len(tasks))
        if count <= 1 and not retry:
            for index, task in enumerate(tasks):
                begins(index)
                yield index, run(task)
            return
        from multiprocessing.connection import wait

        slots = [_Worker(self._environment(slot)) for slot in range(count)]
        waiting = iter(range(len(tasks)))
        running: dict[_Worker, int] = {}
        try:
            while True:
                idle = [worker for worker in slots if worker not in running]
                for worker, index in zip(idle, waiting, strict=False):
                    begins(index)
                    worker.give(run, tasks[index])
                    running[worker] = index
                if not running:
                    return
                ready = wait([end for worker in running for end in worker.ends])
                for worker in [w for w in running if not set(w.ends).isdisjoint(ready)]:
                    yield running.pop(worker), worker.answer()
        finally:
            for worker in slots:
                worker.end(is_idle=worker not in running)

    def _environment(self, slot: int) -> dict[str, str]:
        if not self.visible:
            return {}
        gpu = self.visible[slot % len(self.visible)]
        return {"CUDA_VISIBLE_DEVICES": ",".join([gpu, *(v for v in self.visible if v != gpu)])}


class _Worker:
    """Child process with `environment` that runs tasks in turn; a new one replaces a dead one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._start()

    def _start(self) -> None:
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, self._environment))
        self._process.start()
        child_end.close()

    @property
    def ends(self) -> "tuple[Connection, int]":
        """Pair (connection, process handle) to wait on: ready after an answer or at the end."""
        return self._connection, self._process.sentinel

    def give(self, run: Callable[[T], Any], task: T) -> None:
        """Start `run(task)` in the process, or in a new one if it has ended; see `answer`."""
        if not self._process.is_alive():
            self._start()
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send((run, task))

    def answer(self) -> Any:
        """Return the outcome of the task; a `_Death` if the process ended without a result."""
        with suppress(EOFError, ConnectionResetError):
            if self._connection.poll():
                return self._connection.recv()
        self._process.join()
        code = self._process.exitcode or 0
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        return _Death(killed or f"with exit code {code}")

    def end(self, *, is_idle: bool) -> None:
        """Close the connection and wait for the process; unless `is_idle`, terminate it first."""
        self._connection.close()
        if not is_idle:
            self._process.terminate()
        self._process.join()


def _serve(connection: "Connection", environment: Mapping[str, str]) -> NoReturn:
    """Run the tasks that arrive at `connection`, until it is closed; first set `environment`."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with_parent()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            run, task = connection.recv()
            connection.send(_call_in_worker(run, task))
    leave(0)


class Ray(Engine):
    """Engine on a Ray cluster: that of `RAY_ADDRESS`, or a new one on this machine."""

    def _outcomes(
        self, run: Callable[[T], R], tasks: Sequence[T], begins: Callable[[int], None], retry: bool
    ) -> Generator[tuple[int, R | _Failure | _Death], None, None]:
        import ray

        self._connect(ray)
        remote = ray.remote(_call_in_worker).options(num_cpus=1, num_gpus=self.gpus, max_retries=0)
        limit = self.workers or len(tasks)
        waiting = iter(range(len(tasks)))
        running: dict[Any, int] = {}
        try:
            while True:
                for index in itertools.islice(waiting, limit - len(running)):
                    begins(index)
                    running[remote.remote(run, tasks[index])] = index
                if not running:
                    return
                ready, _ = ray.wait(list(running))
                for reference in ready:
                    index = running.pop(reference)
                    try:
                        yield index, ray.get(reference)
                    except ray.exceptions.RayTaskError as error:  # the result could not be pickled
                        yield index, _Failure(error)
                    except ray.exceptions.RayError as error:
                        first_line, *_ = [*str(error).strip().splitlines(), ""]
                        yield index, _Death(f"as Ray reports: {first_line.strip()[:200]}")
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _connect(self, ray: Any) -> None:
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**options)
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        workers = self.workers
        if not self.gpus:
            options["num_gpus"] = 0
            if workers:  # a worker without a core gains nothing, and imports for 5 s
                workers = min(workers, os.cpu_count() or 1)
        ray.init("local", num_cpus=workers, include_dashboard=False, **options)


class Slurm(Engine):
    """Engine that submits an array of Slurm jobs, from a working folder that the nodes share.
    `sbatch` reads `SBATCH_PARTITION`, `SBATCH_ACCOUNT` and `SBATCH_TIMELIMIT`. `workers` None runs
    all jobs at once. `cluster` is submitit's name of the scheduler; tests use `local`."""

    def __init__(
        self, workers: int | None = None, *, gpus: int = 0, cluster: str = "slurm"
    ) -> None:
        super().__init__(workers, gpus=gpus)
        self.cluster = cluster

    def _outcomes(
        self, run: Callable[[T], R], tasks: Sequence[T], begins: Callable[[int], None], retry: bool
    ) -> Generator[tuple[int, R | _Failure | _Death], None, None]:
        import submitit

        folder = Path(tempfile.mkdtemp(prefix=".memest-slurm-", dir=Path.cwd()))
        executor = submitit.AutoExecutor(folder, cluster=self.cluster)
        executor.update_parameters(
            name="memest", timeout_min=MINUTES, cpus_per_task=1, gpus_per_node=self.gpus,
            slurm_array_parallelism=self.workers or max(1, len(tasks)),
        )  # fmt: skip
        jobs = executor.map_array(partial(_call_in_worker, run), tasks)
        indices = {job: index for index, job in enumerate(jobs)}
        for index in indices.values():
            begins(index)
        deaths = 0
        try:
            for job in submitit.helpers.as_completed(jobs, poll_frequency=POLL_S):
                try:
                    yield indices[job], job.result()
                except submitit.core.utils.FailedJobError as error:
                    yield indices[job], _Failure(error)
                except submitit.core.utils.UncompletedJobError:
                    deaths += 1
                    yield indices[job], _Death(f"state {job.state} (log: {job.paths.stderr})")
        finally:
            for job in jobs:
                if not job.done():
                    job.cancel()
            if not deaths:
                shutil.rmtree(folder, ignore_errors=True)


ENGINES: dict[str, type[Engine]] = {"local": Local, "ray": Ray, "slurm": Slurm}  # engines by name


def find_engine(name: str, workers: int | None = None, *, gpus: int = 0) -> Engine:
    """Return the engine `name`: `local`, `ray` or `slurm`. `workers` and `gpus` are as in `Engine`.
    `UnsupportedError` if the engine's package is not installed, or this machine has no Slurm."""
    if name in _PACKAGES:
        require(_PACKAGES[name])
    if name == "slurm" and shutil.which("sbatch") is None:
        raise UnsupportedError(
            "there is no `sbatch` on this machine",
            hint="run it on a machine that submits to Slurm, or use `--engine local`",
        )
    return ENGINES[name](workers=workers, gpus=gpus)


def collect_seldom() -> Callable[[], None]:
    """Run Python's cyclic garbage collector less often; return a function that undoes it."""
    first, *others = gc.get_threshold()
    gc.set_threshold(MADE_BETWEEN_COLLECTIONS, *others)
    return partial(gc.set_threshold, first, *others)
