"""Run of a script in this process, as Python would run it."""

import _thread
import atexit
import gc
import linecache
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import torch

from memest.errors import MemestError, PlanError, UnsupportedError, shown
from memest.estimator.replay.scenarios import describe_deferred_blocks
from memest.report import Ending, RunReport
from memest.run.kept_files import KeptFiles, kept_files
from memest.run.session import Session, ending_of, refusal_within
from memest.run.target import Target
from memest.units import counted

INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as in shells
_MEMEST = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).parent)
_RUNPY = ("<frozen runpy>", runpy.__file__)
_TRACKERS = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug"}
"""Settings that turn off services which record runs (documentation of each service)."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a script's run."""

    exit_code: int  # exit code of the script
    error_text: str  # text that Python would write to stderr, such as a traceback
    refusal: MemestError | None  # call that cannot be simulated, if that ended the script
    report: RunReport | None  # report, or None if the script never used the GPU
    decides: str = ""  # blocks that returned at the latest free timing, and may return earlier


def run_target(target: Target, session: Session, *, limit_s: float | None = None) -> RunResult:
    """Run `target` on the GPU of `session`, which has not been entered.

    After `limit_s` seconds it is ended, with its current line.

    Raises:
        PlanError: the module is not there, or cannot be run.
    """
    _keep_source(target)
    before = sys.argv, sys.path[:]
    sys.argv = [target.name, *target.args]
    is_folder = target.is_module or target.path.is_dir()
    sys.path[:1] = [str(target.path if is_folder else target.path.parent)]  # as Python does
    error: BaseException | None = None
    gc.collect()  # earlier objects do not affect when the next collections run
    try:
        with kept_files() as kept, mock.patch.dict(os.environ, _TRACKERS | os.environ):
            try:
                with session, time_limit(limit_s, session.virtual.mode.attribution.lines.current):
                    with _exit_functions(), _exits_with_report():
                        _run_script(target)
                    session.virtual.mode.rank.mailbox.finish()
            finally:
                _note_kept(session, kept)
    except BaseException as raised:
        error = raised
    finally:
        sys.argv, sys.path[:] = before
    if isinstance(error, PlanError) and error.__cause__ is _NOT_RUN:
        raise error
    virtual = session.virtual
    mode = virtual.mode
    is_used = session.peak_allocated_bytes or mode.memory.num_ooms
    report = session.report() if is_used else None
    decides = describe_deferred_blocks(mode.memory.storages) if virtual.depends_on_time else ""
    return replace(_result_of(error, report), decides=decides)


def _note_kept(session: Session, kept: KeptFiles) -> None:
    for paths, words in (
        (kept.paths, "put back: {}, which the script has changed or deleted"),
        (kept.not_kept, "not put back: {}, which the script may have changed"),
    ):
        if paths:
            rest = f" and {counted(len(paths) - 1, 'other file')}" if len(paths) > 1 else ""
            session.virtual.mode.notes.add(words.format(f"`{Path(paths[0]).name}`{rest}"))


@contextmanager
def time_limit(seconds: float | None, line: Callable[[], str]) -> Iterator[None]:
    """Raise an `UnsupportedError` with the current line after `seconds`; None is no limit."""
    if seconds is None:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise UnsupportedError(
            f"the script has run for {seconds:g} s, and is at {line() or 'a line of a library'}",
            hint="does it wait for another rank? A longer `--time-limit` gives it more",
        )

    number = getattr(signal, "SIGALRM", signal.SIGTERM)  # Windows lacks SIGALRM
    before = signal.signal(number, end)
    timer = threading.Timer(seconds, _thread.interrupt_main, [number])
    timer.daemon = True
    has_clock = hasattr(signal, "setitimer")  # a timer that also interrupts system calls
    signal.setitimer(signal.ITIMER_REAL, seconds) if has_clock else timer.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0) if has_clock else timer.cancel()
        signal.signal(number, before)


@contextmanager
def _exits_with_report() -> Iterator[None]:
    """Make `os._exit` raise `SystemExit` in the script's main thread, so that a report follows."""
    leave, process = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        if os.getpid() != process or threading.current_thread() is not threading.main_thread():
            leave(status)
        raise SystemExit(status)

    with mock.patch.object(os, "_exit", end):
        yield


@contextmanager
def _exit_functions() -> Iterator[None]:
    """Call the functions that the block registers with `atexit` at its end, with the GPU.

    Those of torch and of Python's library wait for the end of the process.
    """
    before = atexit.register, atexit.unregister
    registered: list[tuple[Callable[..., Any], Callable[[], object]]] = []

    def register(func: Any, *args: Any, **kwargs: Any) -> Any:
        home = (getattr(func, "__module__", None) or "").partition(".")[0]
        if home == "torch" or home in sys.stdlib_module_names:
            return before[0](func, *args, **kwargs)
        registered.append((func, partial(func, *args, **kwargs)))
        return func

    def unregister(func: Any) -> None:
        registered[:] = [pair for pair in registered if pair[0] != func]
        before[1](func)

    atexit.register, atexit.unregister = register, unregister  # type: ignore[assignment]
    try:
        yield
    finally:
        atexit.register, atexit.unregister = before
        while registered:
            func, call = registered.pop()
            try:
                call()
            except BaseException as error:  # as in Python: print it, and call the next function
                if ending_of(error)[0] is not Ending.STOPPED:
                    text = f"Exception ignored in atexit callback {func!r}:\n{traceback_of(error)}"
                    sys.stderr.write(text)


_NOT_RUN = ImportError("not run")


def _run_script(target: Target) -> None:
    if not target.is_module:
        runpy.run_path(str(target.path), run_name="__main__")
        return
    name = target.name
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    if spec is None:
        raise PlanError(
            f"no such module: {shown(name)}", hint="is it installed here?"
        ) from _NOT_RUN
    runpy.run_module(target.name, run_name="__main__", alter_sys=True)


def _keep_source(target: Target) -> None:
    """Store the text of the script, which may delete itself or change it."""
    if not target.is_module and target.path.is_file():
        try:
            text = target.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return
        name = str(target.path)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _result_of(error: BaseException | None, report: RunReport | None) -> RunResult:
    ending, _ = ending_of(error)
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or isinstance(code, int):
            return RunResult(code or 0, "", None, report)
        return RunResult(1, f"{code}\n", None, report)
    if error is None or ending is Ending.STOPPED:
        return RunResult(0, "", None, report)
    if ending is Ending.INTERRUPTED:
        return RunResult(INTERRUPTED_EXIT_CODE, traceback_of(error), None, report)
    refusal = refusal_within(error)
    if refusal is None:
        return RunResult(1, traceback_of(error), None, report)
    text = "" if refusal is error else traceback_of(error)
    return RunResult(refusal.exit_code, text, refusal, report)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of the script's own run, without memest's frames."""
    summary = traceback.TracebackException.from_exception(error)
    _drop_own_frames(summary, set())
    return "".join(summary.format())


def _drop_own_frames(summary: traceback.TracebackException, seen: set[int]) -> None:
    if id(summary) in seen:
        return
    seen.add(id(summary))
    summary.stack = traceback.StackSummary.from_list(_frames_of_script(summary.stack))
    inner = [summary.__cause__, summary.__context__, *(getattr(summary, "exceptions", None) or ())]
    for each in inner:
        if each is not None:
            _drop_own_frames(each, seen)


def _frames_of_script(frames: Iterable[traceback.FrameSummary]) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of the script and of libraries, without those of replaced kernels."""
    has_begun = is_within = False
    for frame in frames:
        if frame.filename.startswith(_MEMEST) or frame.filename in _RUNPY:
            is_within = has_begun
        elif not frame.filename.startswith(_TORCH):
            has_begun, is_within = True, False
            yield frame
        elif not is_within:
            yield frame
