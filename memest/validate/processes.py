"""Child processes: one for each experiment, forked after the imports and before CUDA is opened."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from memest.errors import MemestError
from memest.loops.job import RunOptions
from memest.plan import TrainingPlan
from memest.report import Measurement
from memest.validate import ranks
from memest.validate.experiment import run_experiment

T = TypeVar("T")
Experiment = Callable[[TrainingPlan, RunOptions, Callable[[Measurement], Any]], None]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Child(Protocol):
    """An experiment under way."""

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        ...

    def kill(self) -> None:
        """End it and all that it started, and wait for the end."""
        ...


class _Forked:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            _kill(self._pid)
            _, status = os.waitpid(self._pid, 0)
            self._status = os.waitstatus_to_exitcode(status)


class _Spawned:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        if self.poll() is None:
            _kill(self._process.pid)
            self._process.wait()


def _kill(pid: int) -> None:
    """The child leads a process group of its own; before it does, it is killed alone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fork_experiment(
    plan: TrainingPlan,
    options: RunOptions,
    *,
    report: Path,
    log: Path,
    experiment: Experiment = run_experiment,
) -> Child:
    """Run the experiment in a fork of this process, which must not have opened CUDA."""
    pid = fork_child()
    if pid:
        return _Forked(pid)
    try:
        os.setsid()
        _die_with_parent()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        run_and_exit(plan, options, report, experiment)
    finally:
        os._exit(70)  # nothing of the parent's may run in the child


def spawn_experiment(plan: TrainingPlan, options: RunOptions, *, report: Path, log: Path) -> Child:
    """Run the experiment in a fresh interpreter, where a fork is not possible."""
    values = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    request = json.dumps({"plan": plan.to_dict(), "options": values, "report": str(report)})
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "memest.validate.processes", request],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    return _Spawned(process)


def run_and_exit(
    plan: TrainingPlan, options: RunOptions, report: Path, experiment: Experiment
) -> NoReturn:
    """Run, write the report, and leave without any teardown.

    A plan that Lightning runs through a strategy gets one process per GPU, and their reports are
    merged.
    """

    def deliver(measurement: Measurement) -> NoReturn:
        _write(report, measurement)
        _leave(0)

    if plan.is_distributed:
        measured = ranks.run_ranks(
            plan.world_size,
            fork_child,
            lambda path: _run_rank(plan, options, path, experiment),
            read_report,
            report.parent,
        )
        if measured:
            deliver(ranks.merge(measured))
        _leave(1)
    _run(plan, options, experiment, deliver)


def read_report(path: Path) -> Measurement | None:
    """The report, or None where there is none."""
    try:
        return Measurement.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _run_rank(
    plan: TrainingPlan, options: RunOptions, report: Path, experiment: Experiment
) -> NoReturn:
    def deliver(measurement: Measurement) -> NoReturn:
        _write(report, measurement)
        ranks.wait_for_the_end()

    _die_with_parent()
    _run(plan, options, experiment, deliver)


def _write(report: Path, measurement: Measurement) -> None:
    """Whole or not at all."""
    beside = report.with_suffix(".part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(measurement.to_json())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(report)


def _run(
    plan: TrainingPlan,
    options: RunOptions,
    experiment: Experiment,
    deliver: Callable[[Measurement], NoReturn],
) -> NoReturn:
    try:
        experiment(plan, options, deliver)
        sys.stderr.write("the training ended without a report\n")
    except MemestError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        sys.stderr.write(f"Error: {error}{hint}\n")
    except BaseException:
        traceback.print_exc()
    _leave(1)


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def call_in_child(function: Callable[[], T]) -> T:
    """`function()` in a fork, so that what it opens (a GPU, threads) is gone afterwards.

    Raises:
        MemestError: it raised one, or any other error, whose text is then the message.
    """
    reading, writing = os.pipe()
    pid = fork_child()
    if not pid:
        try:
            os.close(reading)
            _die_with_parent()
            with os.fdopen(writing, "wb") as pipe:
                try:
                    answer: tuple[bool, Any] = (True, function())
                except MemestError as error:
                    answer = (False, error)
                except Exception as error:
                    answer = (False, MemestError(f"{type(error).__name__}: {error}"))
                pipe.write(pickle.dumps(answer))
            os._exit(0)
        finally:
            os._exit(70)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    if not content:
        raise MemestError("a child process died without an answer", hint="see the system's log")
    succeeded, value = pickle.loads(content)
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]


def fork_child() -> int:
    """`os.fork`, with nothing left in the buffers of the output."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns when there are threads; those of the libraries' pools are idle here.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _die_with_parent() -> None:
    """Linux ends this process when its parent is killed; elsewhere it runs to its own end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main() -> None:
    request = json.loads(sys.argv[1])
    values = request["options"]
    paths = {k: Path(values[k]) for k in ("data", "snapshots") if values[k]}
    options = RunOptions(**{**values, **paths})
    plan = TrainingPlan.from_dict(request["plan"])
    _die_with_parent()
    run_and_exit(plan, options, Path(request["report"]), run_experiment)


if __name__ == "__main__":
    _main()
