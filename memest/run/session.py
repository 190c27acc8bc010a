"""A block of code (`memest.virtual_gpu`) or a script on a virtual GPU, in this process."""

import _thread
import atexit
import gc
import linecache
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.utils.data._utils import fetch

from memest.child import Terminated
from memest.errors import MemestError, PlanError, UnsupportedError, shown
from memest.estimator.allocator.blocks import SMALL_SEGMENT_BYTES
from memest.estimator.gpu.worlds import ALONE, Rank
from memest.estimator.hardware.gpus import DEFAULT_GPUS, Gpu, custom_gpu, find_gpu
from memest.estimator.predict import PRIMARY_GPU
from memest.estimator.replay.scenarios import describe_deferred_blocks
from memest.estimator.tensors.patches import Patches
from memest.estimator.versions import check_torch, find_release, simulating
from memest.estimator.virtual_gpu import StepLimit, VirtualGpu
from memest.report import Ending, RunReport
from memest.run.kept_files import KeptFiles, kept_files
from memest.run.summary import report_of
from memest.run.target import Target
from memest.units import counted, parse_bytes

_LONGEST_CHAIN = 20  # longest chain of `__context__` that is searched
_LONGEST_ERROR = 400  # characters of an error in a report
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as in shells
_MEMEST = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).parent)
_RUNPY = ("<frozen runpy>", runpy.__file__)
_TRACKERS = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug"}
"""Settings that turn off services which record runs (documentation of each service)."""

_NOT_RUN = ImportError("not run")  # cause of the error for a module that does not exist


def _with_smaller_batches(original: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """Return a wrapper of `original`, DataLoader's `fetch`, that loads 1/`parts` of each batch."""

    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        index = possibly_batched_index
        if self.auto_collation and len(index) > 1:
            index = index[: max(1, len(index) // parts)]
        return original(self, index)

    return fetch


class Session:
    """Context manager that `virtual_gpu` returns: its block runs on a simulated CUDA GPU.

    Args:
        gpu: the GPU to simulate.
        memory_limit: bytes that its allocator may reserve at most; None is all.
        name: name of the code, for the report.
        rank: the rank of a distributed script that the block simulates.
        batch_parts: DataLoaders load 1/`batch_parts` of each batch.
        torch_release: simulated release of torch; None is the installed one.
        others: names of other GPUs for which the report has a verdict.
        options: keyword arguments of `VirtualGpu`, where they are explained: `max_steps`,
            `is_strict`, `roots`, `is_immediate`.
    """

    def __init__(
        self, gpu: Gpu, *, memory_limit: int | None = None, name: str = "a block of code",
        rank: Rank = ALONE, batch_parts: int = 1, torch_release: str | None = None,
        others: Sequence[str] = DEFAULT_GPUS, **options: Any,
    ) -> None:  # fmt: skip
        self.gpu = gpu
        self._others = others
        self._open = ExitStack()
        self._torch_release = torch_release
        self.name = name
        self.ending = Ending.RUNNING
        self.error = ""
        self.rank = rank
        usable = gpu.limit_bytes - rank.communicator_bytes
        if memory_limit is not None and memory_limit < SMALL_SEGMENT_BYTES:
            lacks_unit = memory_limit < 1000  # the user must have meant GiB
            raise PlanError(
                f"a cap of {memory_limit} bytes is below the allocator's smallest segment, 2 MiB",
                hint=f"give its unit: `{memory_limit}GiB`" if lacks_unit else "give more",
            )
        limit = None if memory_limit is None else min(memory_limit, usable)
        with simulating(torch_release):
            self.virtual = VirtualGpu(gpu, limit_bytes=limit, rank=rank, **options)
        self.virtual.mode.memory.logs_driver = rank.world_size == 1
        self._batch_parts = batch_parts
        self._patches = Patches()
        self._started = 0.0
        self._elapsed_s: float | None = None

    def __enter__(self) -> "Session":
        if self._elapsed_s is not None or self._started:
            raise MemestError(
                "this virtual GPU was used before", hint="call `memest.virtual_gpu` again"
            )
        with ExitStack() as stack:
            stack.enter_context(simulating(self._torch_release))
            stack.enter_context(self.virtual)
            stack.callback(self._patches.undo)
            self._open = stack.pop_all()
        if self._batch_parts > 1:
            for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
                smaller = _with_smaller_batches(fetcher.fetch, self._batch_parts)
                self._patches.set(fetcher, "fetch", smaller)
            self.virtual.mode.notes.add(
                f"batches of DataLoaders are cut to 1/{self._batch_parts}, as asked"
            )
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._elapsed_s = time.perf_counter() - self._started
        self.ending, self.error = ending_of(error)
        self._open.__exit__(kind, error, trace)

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now, as `torch.cuda.memory_allocated`."""
        self.virtual.mode.memory.settle()
        return self.virtual.allocator.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved now, as `torch.cuda.memory_reserved`."""
        return self.virtual.allocator.reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Highest number of bytes allocated so far; resets by the code have no effect."""
        return self.virtual.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest number of bytes reserved so far; resets by the code have no effect."""
        return self.virtual.peak_reserved_bytes

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        return self.virtual.num_steps

    def report(self) -> RunReport:
        """Return the report of what the block has run so far, within the block or after it."""
        elapsed = self._elapsed_s
        if elapsed is None:
            elapsed = time.perf_counter() - self._started if self._started else 0.0
        with simulating(self._torch_release):
            return report_of(
                self.virtual, name=self.name, ending=self.ending, error=self.error,
                elapsed_s=elapsed, others=self._others,
            )  # fmt: skip


def virtual_gpu(
    gpu: str = PRIMARY_GPU, *, gpu_memory: int | str | None = None,
    memory_limit: int | str | None = None, beside: int | str | None = None,
    max_steps: int | None = None, strict: bool = False, torch_release: str | None = None,
) -> Session:  # fmt: skip
    """Simulate a GPU for the code of a `with` block.

        with memest.virtual_gpu("a100-80gb") as gpu:
            train()
        print(gpu.peak_allocated_bytes, gpu.report())

    Within the block `torch.cuda` reports that GPU. Tensors on it have shapes and no values, and
    `torch.OutOfMemoryError` is raised where a GPU would. Only one virtual GPU exists at a time.

    Args:
        gpu: a name of `memest gpus`.
        gpu_memory: memory of a GPU that is not in the catalogue, in bytes or as `24GiB`; its
            kernels are those of `gpu`.
        memory_limit: most memory that the allocator may reserve; None is the GPU's.
        beside: memory of the GPU that other processes hold; None is none.
        max_steps: optimizer steps after which a `SystemExit` ends the block; None is no limit.
        strict: raise an error where the code reads a tensor's value, which is otherwise guessed.
        torch_release: simulated release of torch, such as `2.11`; the installed one by default.

    Raises:
        PlanError: there is no such GPU, a size is invalid, memest cannot simulate the release, or
            the installed torch is too old.
        MemestError: when the block is entered while another one is active.
    """
    check_torch()
    device = find_gpu(gpu)
    if gpu_memory is not None:
        device = custom_gpu(parse_bytes(gpu_memory), device)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    if max_steps is not None and max_steps < 1:
        raise PlanError(f"`max_steps` is {max_steps}", hint="give at least 1, or leave it out")
    return Session(
        device if beside is None else device.beside(parse_bytes(beside)), memory_limit=limit,
        max_steps=max_steps, is_strict=strict,
        torch_release=None if torch_release is None else find_release(torch_release).name,
    )  # fmt: skip


def ending_of(error: BaseException | None) -> tuple[Ending, str]:
    """Return (how a script ended, its error as a line); `error` is what it raised, or None."""
    if error is None:
        return Ending.FINISHED, ""
    if _is_step_limit(error):
        return Ending.STOPPED, ""
    if isinstance(error, Terminated):
        return Ending.INTERRUPTED, "SIGTERM"
    if isinstance(error, SystemExit):
        has_code = error.code not in (None, 0)
        return Ending.FINISHED, f"SystemExit: {error.code}" if has_code else ""
    if isinstance(error, KeyboardInterrupt):
        return Ending.INTERRUPTED, "KeyboardInterrupt"
    text = " ".join(str(error).split())
    ending = Ending.CRASHED
    if isinstance(error, torch.OutOfMemoryError):
        ending = Ending.OOM
        text = re.sub(r" GPU \d+ has.*", "", text)  # the report has the rest
    elif refusal_within(error) is not None:
        ending = Ending.UNSUPPORTED
    return ending, f"{type(error).__name__}: {text[:_LONGEST_ERROR]}"


def _is_step_limit(error: BaseException | None) -> bool:
    """Return whether `error` is a `StepLimit`, or was raised while one was handled."""
    for _ in range(_LONGEST_CHAIN):
        if error is None or isinstance(error, StepLimit):
            break
        error = error.__context__
    return isinstance(error, StepLimit)


def refusal_within(error: BaseException | None) -> MemestError | None:
    """Return the first memest error in the chain of `error` and its causes; None without one."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MemestError):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of running a script. `decides` is text on memory blocks that another stream or a
    collective uses. A verdict can depend on when such blocks are freed. Without such blocks,
    `decides` is empty."""

    exit_code: int  # exit code of the script
    error_text: str  # text that Python would write to stderr, such as a traceback
    refusal: MemestError | None  # call that cannot be simulated, if that ended the script
    report: RunReport | None  # report, or None if the script never used the GPU
    decides: str = ""  # blocks that returned at the latest free timing, and may return earlier


def run_target(target: Target, session: Session, *, limit_s: float | None = None) -> RunResult:
    """Run the script or module `target` on the GPU of `session`, whose block it enters and leaves.
    After `limit_s` seconds (None: never) an error ends the run and names the current line.

    Raises:
        PlanError: the module is not there, or cannot be run.
    """
    _cache_source(target)
    original_argv, original_path = sys.argv, sys.path[:]
    sys.argv = [target.name, *target.args]
    is_folder = target.is_module or target.path.is_dir()
    # as in Python, the script's folder is the first entry, in place of the command's
    sys.path[:1] = [str(target.path if is_folder else target.path.parent)]
    error: BaseException | None = None
    gc.collect()  # earlier objects do not affect when the next collections run
    try:
        with kept_files() as files, mock.patch.dict(os.environ, _TRACKERS | os.environ):
            try:
                with session, time_limit(limit_s, session.virtual.mode.attribution.lines.current):
                    with _exit_functions(), _exits_with_report():
                        _run_script(target)
                    session.virtual.mode.rank.mailbox.finish()
            finally:
                _note_kept(session, files)
    except BaseException as raised:
        error = raised
    finally:
        sys.argv, sys.path[:] = original_argv, original_path
    if isinstance(error, PlanError) and error.__cause__ is _NOT_RUN:
        raise error
    memory = session.virtual.mode.memory
    is_gpu_used = session.peak_allocated_bytes or memory.num_ooms
    report = session.report() if is_gpu_used else None
    decides = ""
    if session.virtual.depends_on_time:
        decides = describe_deferred_blocks(memory.storages)
    return replace(_result_of(error, report), decides=decides)


def _note_kept(session: Session, files: KeptFiles) -> None:
    for paths, template in (
        (files.paths, "put back: {}, which the script has changed or deleted"),
        (files.not_kept, "not put back: {}, which the script may have changed"),
    ):
        if paths:
            others = f" and {counted(len(paths) - 1, 'other file')}" if len(paths) > 1 else ""
            session.virtual.mode.notes.add(template.format(f"`{Path(paths[0]).name}`{others}"))


@contextmanager
def time_limit(seconds: float | None, line: Callable[[], str]) -> Iterator[None]:
    """End the block after `seconds` (None: never) by an `UnsupportedError`. Its text has `line()`,
    the current line of the script."""
    if seconds is None:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise UnsupportedError(
            f"the script has run for {seconds:g} s, and is at {line() or 'a line of a library'}",
            hint="does it wait for another rank? A longer `--time-limit` gives it more",
        )

    number = getattr(signal, "SIGALRM", signal.SIGTERM)  # Windows lacks SIGALRM
    old_handler = signal.signal(number, end)
    if hasattr(signal, "setitimer"):  # this timer also interrupts system calls
        start: Callable[[], object] = partial(signal.setitimer, signal.ITIMER_REAL, seconds)
        cancel: Callable[[], object] = partial(signal.setitimer, signal.ITIMER_REAL, 0)
    else:
        timer = threading.Timer(seconds, _thread.interrupt_main, [number])
        timer.daemon = True
        start, cancel = timer.start, timer.cancel
    start()
    try:
        yield
    finally:
        cancel()
        signal.signal(number, old_handler)


@contextmanager
def _exits_with_report() -> Iterator[None]:
    """Make `os._exit` raise `SystemExit` in the script's main thread, so that a report follows."""
    real_exit, pid = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
            real_exit(status)
        raise SystemExit(status)

    with mock.patch.object(os, "_exit", end):
        yield


@contextmanager
def _exit_functions() -> Iterator[None]:
    """Call `atexit` functions of the script at the end of the block, while the GPU is active."""
    original_register, original_unregister = atexit.register, atexit.unregister
    registered: list[tuple[Callable[..., Any], Callable[[], object]]] = []

    def register(func: Any, *args: Any, **kwargs: Any) -> Any:
        package = (getattr(func, "__module__", None) or "").partition(".")[0]
        if package == "torch" or package in sys.stdlib_module_names:
            return original_register(func, *args, **kwargs)
        registered.append((func, partial(func, *args, **kwargs)))
        return func

    def unregister(func: Any) -> None:
        registered[:] = [(other, call) for other, call in registered if other != func]
        original_unregister(func)

    atexit.register, atexit.unregister = register, unregister  # type: ignore[assignment]
    try:
        yield
    finally:
        atexit.register, atexit.unregister = original_register, original_unregister
        while registered:
            func, call = registered.pop()
            try:
                call()
            except BaseException as error:  # as in Python: print it, and call the next function
                if not _is_step_limit(error):
                    text = f"Exception ignored in atexit callback {func!r}:\n{traceback_of(error)}"
                    sys.stderr.write(text)


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


def _cache_source(target: Target) -> None:
    """Store the script's text for the report, since the script may change or delete its file."""
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
        if error.code is None or isinstance(error.code, int):
            return RunResult(error.code or 0, "", None, report)
        return RunResult(1, f"{error.code}\n", None, report)
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
    """Return the traceback of `error` as text, without the frames of memest."""
    summary = traceback.TracebackException.from_exception(error)
    _drop_own_frames(summary, set())
    return "".join(summary.format())


def _drop_own_frames(summary: traceback.TracebackException, seen: set[int]) -> None:
    if id(summary) in seen:
        return
    seen.add(id(summary))
    summary.stack = traceback.StackSummary.from_list(_frames_of_script(summary.stack))
    inner = [summary.__cause__, summary.__context__, *(getattr(summary, "exceptions", None) or ())]
    for exception in inner:
        if exception is not None:
            _drop_own_frames(exception, seen)


def _frames_of_script(frames: Iterable[traceback.FrameSummary]) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of the script and of libraries, without those of memest. Frames of torch
    that memest called are left out too."""
    is_script_begun = is_called_by_memest = False
    for frame in frames:
        if frame.filename.startswith(_MEMEST) or frame.filename in _RUNPY:
            is_called_by_memest = is_script_begun
        elif not frame.filename.startswith(_TORCH):
            is_script_begun = True
            is_called_by_memest = False
            yield frame
        elif not is_called_by_memest:
            yield frame
