"""Child processes: programs, and work in a copy of this process or in a fresh one."""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from memest.errors import MemestError

CAN_FORK = sys.platform == "linux" and hasattr(os, "fork")  # macOS libraries forbid it
_POLL_S = 0.005
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BOOT = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    work, output = pickle.load(file)
from memest.child import die_with_parent, do_work
die_with_parent()
do_work(work, sys.argv[1], output)
"""
SILENT = (os.devnull, os.devnull)
T = TypeVar("T")


class DiedError(MemestError):
    """Error of a child process that ended without a result; the message describes its end."""


class Terminated(SystemExit):
    """Exception of `signals_once` for SIGTERM, with which a stopped script still gets a report."""


@contextmanager
def signals_once(*numbers: int) -> Iterator[None]:
    """Raise an exception when one of the signals `numbers` first arrives in the block; ignore it
    from then on. SIGINT raises `KeyboardInterrupt`, another signal `Terminated`. A signal arrives
    twice if both a terminal and the parent send it. Do nothing outside the main thread."""
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that the script has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


class Child:
    """Child process with number `pid`. `process` is its `Popen` if it is a new program, None if it
    is a fork. It writes its result to the file `answer_file`; "" if it writes none."""

    def __init__(
        self, pid: int, *, process: subprocess.Popen[bytes] | None = None, answer_file: str = ""
    ) -> None:
        self.pid = pid
        self._process = process
        self._answer_file = answer_file
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or -N if signal N ended the process; None while it runs."""
        if self._process is not None:
            return self._process.poll()
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, seconds: float = float("inf")) -> int | None:
        """Wait up to `seconds` for the end; return the exit status, or None if the process runs."""
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return status

    def send(self, number: int) -> None:
        """Send signal `number` to the process if the process runs. Do nothing on Windows, where the
        console itself sends Ctrl-C to the process."""
        if self.poll() is None and sys.platform != "win32":
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, with its process group if it leads one, and wait for its end."""
        is_running = self.poll() is None
        if sys.platform == "win32":
            if is_running:
                subprocess.run(["taskkill", "/T", "/F", "/PID", str(self.pid)], capture_output=True)
        elif hasattr(os, "killpg"):
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except OSError:  # it leads no process group, or nothing of the group is left
                if is_running:
                    os.kill(self.pid, signal.SIGKILL)
        elif self._process is not None:
            self._process.kill()
        self.wait()
        self._delete_answer()

    def answer(self) -> Any:
        """Wait for the process to end; return the result of its function, or raise its
        `MemestError`. Raise `DiedError` if the process ended without a result."""
        status = self.wait() or 0
        try:
            if status:
                raise DiedError(f"signal {-status}" if status < 0 else "no answer")
            succeeded, value = pickle.loads(Path(self._answer_file).read_bytes())
        finally:
            self._delete_answer()
        if not succeeded:
            raise value
        return value

    def _delete_answer(self) -> None:
        if self._answer_file:
            Path(self._answer_file).unlink(missing_ok=True)


def wait_any(children: Collection[Child], seconds: float) -> list[Child]:
    """Wait until one of `children` ends, at most `seconds`; return the ended ones, [] if none."""
    deadline = time.monotonic() + seconds
    while True:
        ended = [child for child in children if child.poll() is not None]
        if ended or time.monotonic() >= deadline:
            return ended
        time.sleep(_POLL_S)


def fork(run: Callable[[], object]) -> Child:
    """Call `run()` in a fork of this process, and return the fork. Its exit code is 0, or 70 if
    `run` raises an error. Linux kills the fork when this process ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns if threads exist; the libraries' pool threads are idle here
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return Child(pid)
    try:
        die_with_parent()
        run()
        leave(0)
    finally:
        os._exit(70)  # EX_SOFTWARE; nothing of the parent's may run in the child


def submit(work: Callable[[], object], *, output: tuple[str, str] | None = None) -> Child:
    """Start `work()` in another process; `Child.answer` returns its result. The process is a fork
    of this one if `CAN_FORK`, else a new Python. `output` has the paths of two files, for stdout
    and stderr of `work`; None leaves those of this process."""
    descriptor, file = tempfile.mkstemp(prefix="memest-answer-")
    os.close(descriptor)
    if CAN_FORK:
        child = fork(partial(do_work, work, file, output))
        child._answer_file = file
        return child
    sys.stdout.flush()
    sys.stderr.flush()
    process = subprocess.Popen(command_of(work, file, output))
    return Child(process.pid, process=process, answer_file=file)


def command_of(
    work: Callable[[], object], file: str, output: tuple[str, str] | None = None
) -> list[str]:
    """Return the command that starts a new Python, which calls `do_work(work, file, output)`. First
    write `work` and `output` to `file` as pickle; the new process reads them there. At its end, the
    new process overwrites `file` with the result of `work`."""
    with open(file, "wb") as content:
        pickle.dump(sys.path, content)
        pickle.dump((work, output), content)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", _BOOT, file]


def do_work(work: Callable[[], object], file: str, output: tuple[str, str] | None) -> NoReturn:
    """Call `work()`, pickle (True, its result) or (False, its `MemestError`) to `file`, and end
    this process. Print any other error, and exit with code 1. `output` is as in `submit`."""
    if output is not None:
        for number, path in enumerate(output, start=1):
            _redirect(path, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    try:
        answer: tuple[bool, object] = (True, work())
    except MemestError as error:
        answer = (False, error)
    except BaseException:
        traceback.print_exc()
        leave(1)
    with open(file, "wb") as content:
        pickle.dump(answer, content)
    leave(0)


def spawn(command: Sequence[str], output: Path, **options: Any) -> Child:
    """Start the program `command` in a new session. Its stdin is empty; its stdout and stderr go to
    the file `output`. `options` are further arguments of `Popen`."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            **options,
        )  # fmt: skip
    return Child(process.pid, process=process)


def begin(work: Callable[[], object], output: Path, *, is_copy: bool) -> Child:
    """Start `work()` in a new session: in a fork of this process if `is_copy`, else in a new
    Python. The process has an empty stdin; its stdout and stderr go to the file `output`. Unless
    `is_copy`, `Child.answer` returns the result of `work`. A fork has only an exit status."""
    if not is_copy:
        descriptor, file = tempfile.mkstemp(prefix="memest-answer-")
        os.close(descriptor)
        child = spawn(command_of(work, file), output)
        child._answer_file = file
        return child

    def run() -> None:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        write_to(output)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        work()

    return fork(run)


def write_to(path: str | Path) -> None:
    """Redirect stdout and stderr of this process to the file `path`."""
    _redirect(path, 1)
    os.dup2(1, 2)


def _redirect(path: str | Path, number: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, number)
    os.close(descriptor)


def leave(code: int) -> NoReturn:
    """Flush stdout and stderr, and end this process with exit code `code` without teardown."""
    with suppress(OSError, ValueError, AttributeError):  # `pythonw` has no streams
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends; do nothing on other systems."""
    with suppress(OSError, AttributeError, TypeError):  # Windows
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def forked(work: Callable[[], T]) -> Iterator[Callable[[], T | None]]:
    """Start `work()` in a fork of this process; yield a function that waits for its result and
    returns it. That function returns None if `work` failed, or was not started as this system is
    not Linux: the caller then calls `work` itself. `work` cannot use autograd if this process has
    used it. The fork is killed at the end of the block."""
    if not CAN_FORK:
        yield lambda: None
        return
    child = submit(partial(_call_in_fork, work), output=SILENT)

    def result() -> T | None:
        with suppress(MemestError):
            answer: T = child.answer()
            return answer
        return None

    try:
        yield result
    finally:
        child.kill()


def _call_in_fork(work: Callable[[], T]) -> T:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    torch.set_num_threads(1)  # a fork has only the calling thread
    return work()
