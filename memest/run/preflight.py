"""`memest.preflight`: a check, before a script starts, whether it will fit its real GPU."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import memest
from memest.child import spawn
from memest.errors import PlanError, shown
from memest.estimator.allocator.settings import VARIABLES
from memest.packages import is_in_packages
from memest.report import Ending, RunReport
from memest.run.advice import Suggestion, render_suggestions, suggestions
from memest.run.device_at_hand import DeviceAtHand, device_at_hand
from memest.units import GIB, format_gib, parse_bytes

RUNNERS = frozenset(("ipykernel_launcher", "pytest", "py.test", "unittest"))
"""Programs that run code with arguments of their own, such as pytest."""

_MEMEST = Path(__file__).resolve().parents[1]
_LIBRARY = Path(os.__file__).resolve().parent
"""Folder of Python's own library."""


@dataclass(frozen=True, slots=True)
class Command:
    """A script or a module with its arguments, as `memest run` takes them."""

    words: tuple[str, ...]
    """Words of the command: `train.py --bs 8`, or `-m package.train --bs 8`."""

    folder: str
    """Working folder of the command."""

    @property
    def label(self) -> str:
        """Name for messages."""
        name, *rest = self.words
        return " ".join((os.path.basename(name) or name, *rest))


def typed_command(frame: FrameType | None = None) -> Command | None:
    """Return the command that this process was started to run; None in a notebook or a shell.

    `frame` is the caller's. A script that a session runs (`%run train.py`) has a command.
    """
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if getattr(sys, "frozen", False):
        return None
    if spec is not None and spec.name != "__main__":
        return _of_module(spec.name.removesuffix(".__main__"))
    if file is not None:
        is_runner = Path(file).stem in RUNNERS
        return _of_script(file) if os.path.isfile(file) and not is_runner else None
    return _of_callers(frame)


def _of_module(name: str) -> Command | None:
    if name.partition(".")[0] in RUNNERS:
        return None
    typed = sys.orig_argv
    for at in range(1, len(typed) - 1):
        if typed[at] == "-m" and typed[at + 1] in (name, f"{name}.__main__"):
            return Command(("-m", *typed[at + 1 :]), os.getcwd())
    return Command(("-m", name, *sys.argv[1:]), os.getcwd())


def _of_script(file: str) -> Command:
    """Return the script with the arguments of its command line, even if it changed `sys.argv`."""
    for folder in dict.fromkeys((os.getcwd(), os.environ.get("PWD") or os.getcwd())):
        for at, word in enumerate(sys.orig_argv[1:], 1):
            if os.path.join(folder, word) == file or _is_same(os.path.join(folder, word), file):
                return Command(tuple(sys.orig_argv[at:]), folder)
    return Command((os.path.abspath(file), *sys.argv[1:]), os.getcwd())


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _of_callers(frame: FrameType | None) -> Command | None:
    """Return the script or module that called `preflight` from a notebook or a shell."""
    while frame is not None:
        names: dict[str, Any] = frame.f_globals
        file, name = names.get("__file__"), names.get("__name__", "")
        frame = frame.f_back
        if not isinstance(file, str) or not os.path.isfile(file) or _is_library(file):
            continue
        if name == "__main__":
            return Command((os.path.abspath(file), *sys.argv[1:]), os.getcwd())
        if _runs_by_itself(file):
            return Command(("-m", name), os.getcwd())
    return None


def _is_library(file: str) -> bool:
    path = Path(file).resolve()
    return is_in_packages(path) or path.is_relative_to(_MEMEST) or _LIBRARY in path.parents


def _runs_by_itself(file: str) -> bool:
    """Return whether a module has an `if __name__ == "__main__":`."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    return any(
        isinstance(node, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        for node in tree.body
    )


VARIABLE = "MEMEST_PREFLIGHT"
"""Variable of the environment; `off`, `0`, `no`, `false` end the check, `inside` marks it."""

INSIDE = "inside"
_OFF = ("0", "off", "no", "false", INSIDE)
_DONE = "MEMEST_PREFLIGHT_DONE"
"""Variable that names the checked process and command, so that its children skip the check."""

OOM_EXIT_CODE = 5
"""Exit code of a script that is stopped, as of `memest run --check`."""

OTHERS_SHARE = 0.02
"""Share of the GPU that other processes have to hold to be named."""

ENDLESS = "32TiB"
"""Memory of a GPU on which everything fits, to measure the need of a script."""

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_QUIET = {"WANDB_MODE": "disabled"}  # docs.wandb.ai, environment variables
_SMALLEST_LIMIT = 2 << 20
_RULE = "-" * 80
_BOOT = (
    "import faulthandler, sys; faulthandler.dump_traceback_later({seconds}, exit=True); "
    "sys.path.append({folder!r}); "
    "from memest.cli import main; main()"
)


class Outcome(StrEnum):
    """Outcome of a preflight."""

    FITS = "fits"
    TIGHT = "tight"
    """Fits, with less to spare than the margin."""

    OOM = "oom"
    UNKNOWN = "unknown"
    """The virtual run gave no answer; `why` has the reason."""

    OFF = "off"
    """Unchecked: switched off, a later rank, or within a virtual run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """The result of `memest.preflight`."""

    outcome: Outcome
    why: str = ""
    report: RunReport | None = field(default=None, repr=False)
    """Report of the virtual run."""

    elapsed_s: float = 0.0


class PreflightStop(SystemExit):
    """End of a script that will not fit, with exit code 5 if it is not caught."""

    def __init__(self, result: Preflight) -> None:
        super().__init__(OOM_EXIT_CODE)
        self.result = result


_OFF_HERE = Preflight(outcome=Outcome.OFF)
_done: tuple[object, Preflight] | None = None
"""Result of the check in this process, and the module `__main__` for which it ran.

Each `%run` in a notebook makes a new `__main__`, which is checked again.
"""


def preflight(
    *, max_steps: int = 3, time_limit: float = 120.0, margin: int | str | None = None
) -> Preflight:
    """Simulate the first steps of the running script, and stop it if it will not fit.

        import memest

        memest.preflight()  # first thing in the script

    The script runs once more from its first line in its own process, for `max_steps` optimizer
    steps. The virtual GPU is like the real one, with its free memory. If the run is out of memory,
    the report goes to stderr and `PreflightStop`, a `SystemExit`, ends the script. If it fits,
    nothing is printed. If that is unknown, a line on stderr has the reason, and the script goes on.

    It runs once per script: not again in the same process or in its children, and only on rank 0.
    `MEMEST_PREFLIGHT=off` in the environment turns it off.

    Args:
        max_steps: optimizer steps to simulate.
        time_limit: seconds after which the check is given up.
        margin: memory that should stay free, in bytes or as `2GiB`; a warning follows if less does.
            None is `Gpu.spread_bytes`, as for `tight` in every report.

    Raises:
        PreflightStop: it will not fit.
        PlanError: `margin` is no size, or there are no steps.
    """
    global _done
    margin_bytes = None if margin is None else parse_bytes(margin)
    if max_steps < 1:
        raise PlanError(f"`max_steps` is {shown(max_steps)}", hint="three are enough")
    if _is_off():
        return _OFF_HERE
    main = sys.modules.get("__main__")
    if _done is not None and _done[0] is main:
        return _done[1]
    typed = typed_command(sys._getframe(1))
    if typed is not None and not _is_first(typed):
        return _OFF_HERE
    result = _Check(max_steps, time_limit, margin_bytes).result(typed)
    _done = main, result
    if result.outcome is Outcome.UNKNOWN:
        _print([f"memest preflight: not checked: {result.why}"])
    elif result.outcome is Outcome.OOM:
        raise PreflightStop(result)
    return result


def report_measured(result: Preflight | None) -> Iterator[dict[str, float]]:
    """Print the predicted and the measured peak of this process; yield both, in GiB.

    The measured peak is torch's, since its last reset. Without a prediction the result is empty.
    """
    report = None if result is None else result.report
    torch = sys.modules.get("torch")
    if report is None or torch is None or not torch.cuda.is_initialized():
        return
    measured = torch.cuda.max_memory_reserved()
    _print(["", report.summary(measured_bytes=measured)])  # below a progress bar
    predicted = report.verdicts[report.gpu].reserved_bytes
    yield {"memest/predicted_gib": predicted / GIB, "memest/measured_gib": measured / GIB}


def _is_off() -> bool:
    if os.environ.get(VARIABLE, "").strip().lower() in _OFF:
        return True
    if multiprocessing.parent_process() is not None:
        return True  # a worker that imports the script
    if any(os.environ.get(name, "").strip() not in ("", "0", "-1") for name in _RANKS):
        return True
    virtual = sys.modules.get("memest.estimator.virtual_gpu")
    return virtual is not None and virtual.VirtualGpu._active is not None


def _is_first(typed: Command) -> bool:
    """Return whether no parent process has checked the command, and mark it for child processes."""
    command = json.dumps([typed.folder, *typed.words])
    process, _, checked = os.environ.get(_DONE, "").partition(" ")
    if checked == command and process != str(os.getpid()):
        return False
    os.environ[_DONE] = f"{os.getpid()} {command}"
    return True


def _print(lines: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


class _Check:
    """One preflight."""

    def __init__(self, max_steps: int, time_limit: float, margin_bytes: int | None) -> None:
        self.max_steps = max_steps
        self.time_limit = time_limit
        self.margin_bytes = margin_bytes
        self.started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def result(self, typed: Command | None) -> Preflight:
        """Check the script, print the outcome, and return the result of `preflight`."""
        if typed is None:
            return self._unknown(
                "there is no script to run, as in a notebook; the code within"
                " `with memest.virtual_gpu(...):` is simulated"
            )
        size = os.environ.get("WORLD_SIZE", "1").strip()
        if size not in ("", "1"):
            return self._unknown(f"several GPUs are not simulated yet (`WORLD_SIZE` is {size})")
        device = device_at_hand()
        if device is None:
            return self._unknown("there is no CUDA GPU here")
        report, why = self._run(typed, device)
        if report is None:
            return self._unknown(why)
        if not report.fits:
            self._print_oom(typed, device, report)
            return self._ended(Outcome.OOM, report)
        if report.ending not in (Ending.FINISHED, Ending.STOPPED) or report.error:
            return self._unknown(f"the virtual run ended early: {report.error}", report)
        spare = report.verdicts[report.gpu].margin_bytes
        margin = device.gpu.spread_bytes if self.margin_bytes is None else self.margin_bytes
        if spare >= margin:
            return self._ended(Outcome.FITS, report)
        _print(
            [
                f"memest preflight: `{typed.label}` fits {_gpu(device)}, but it is tight:"
                f" needs {format_gib(report.limit_bytes - spare)} of"
                f" {format_gib(report.limit_bytes)} usable, {format_gib(spare)} to spare"
                f" after {report.num_steps} steps"
            ]
        )
        return self._ended(Outcome.TIGHT, report)

    def _unknown(self, why: str, report: RunReport | None = None) -> Preflight:
        return self._ended(Outcome.UNKNOWN, report, why)

    def _ended(self, outcome: Outcome, report: RunReport | None, why: str = "") -> Preflight:
        return Preflight(outcome=outcome, why=why, report=report, elapsed_s=self.elapsed_s)

    def _print_oom(self, typed: Command, device: DeviceAtHand, report: RunReport) -> None:
        lines = [
            _RULE,
            f"memest preflight: `{typed.label}` will not fit {_gpu(device)}, so it is stopped"
            f" before it starts; `{VARIABLE}=off` lets it run",
            "",
            str(replace(report, verdicts={report.gpu: report.verdicts[report.gpu]}, notes=())),
            "",
        ]
        endless, _ = self._run(typed, device, memory=ENDLESS)
        if endless is not None and endless.ending in (Ending.FINISHED, Ending.STOPPED):
            need, limit = endless.verdicts[endless.gpu].needs_bytes, report.limit_bytes
            over = format_gib(need - limit)
            lines.append(f"needs {format_gib(need)}: {over} more than there is")
            if fitting := _fitting(endless):
                lines.append(f"fits: {', '.join(fitting)}")
            found = suggestions(endless, limit)
            lines += self._try(typed, device, found) or render_suggestions(found)
        _print([*lines, _RULE])

    def _try(self, typed: Command, device: DeviceAtHand, found: Iterable[Suggestion]) -> list[str]:
        """Simulate the changes in `found` until one fits or time is up; return lines that describe
        it.
        """
        for each in found:
            if not each.can_be_simulated:
                continue
            report, _ = self._run(typed, device, each.options, alloc_conf=each.alloc_conf)
            if report is not None and report.fits and not report.error:
                needs = format_gib(report.verdicts[report.gpu].needs_bytes)
                return [
                    f"best change, simulated: {each.title}: needs {needs} of"
                    f" {format_gib(report.limit_bytes)} usable ({each.price})"
                ]
        return []

    def _run(
        self,
        typed: Command,
        device: DeviceAtHand,
        options: Sequence[str] = (),
        memory: str | None = None,
        alloc_conf: str = "",
    ) -> tuple[RunReport | None, str]:
        """Run the script on a virtual GPU like `device`, or like it with `memory`.

        Return its report, or None and the reason why there is none.
        """
        of_gpu = ["--gpu", device.gpu.name]
        if memory is not None:
            of_gpu += ["--gpu-memory", memory]
        else:
            if not device.is_known:
                of_gpu += ["--gpu-memory", str(device.total_bytes)]
            if device.room_bytes < device.gpu.limit_bytes:
                of_gpu += ["--memory-limit", str(max(_SMALLEST_LIMIT, device.room_bytes))]
        seconds = self.time_limit - self.elapsed_s
        if seconds <= 0:
            return None, "no time is left"
        steps = ("--max-steps", str(self.max_steps), "--no-input")
        words, environment = [*of_gpu, *steps, *options], _environment(alloc_conf)
        name = "memest-preflight-"
        with tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True) as folder:
            return _run_script(typed, words, environment, Path(folder), seconds)


def _environment(alloc_conf: str) -> dict[str, str]:
    """Return the environment of a virtual run: the script's, with allocator settings."""
    found = {**os.environ, **_QUIET, VARIABLE: INSIDE}
    if alloc_conf:
        newer, older = VARIABLES
        before = os.environ.get(newer, os.environ.get(older, ""))
        found[newer] = ",".join(filter(None, (before, alloc_conf)))
    return found


def _run_script(
    typed: Command, options: list[str], environment: dict[str, str], folder: Path, seconds: float
) -> tuple[RunReport | None, str]:
    """Run `memest run OPTIONS` on a script, with its output hidden, for at most `seconds`."""
    report, output = folder / "report.json", folder / "output.txt"
    folder_of_memest = str(Path(str(memest.__file__)).parents[1])  # a link under `--python`
    boot = _BOOT.format(seconds=int(seconds) + 5, folder=folder_of_memest)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", boot, "run", *options, "--json", str(report)]
    child = spawn([*command, *typed.words], output, cwd=typed.folder, env=environment)
    try:
        if child.wait(seconds) is None:
            return None, f"the virtual run did not end within {seconds:.0f} s"
    finally:
        child.kill()
    if report.is_file():
        return RunReport.from_dict(json.loads(report.read_text(encoding="utf-8"))), ""
    return None, _last_error(output.read_text(encoding="utf-8", errors="replace"))


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("Error: "):
            return line.removeprefix("Error: ")
    return f"the virtual run ended early: {lines[-1]}" if lines else "the virtual run ended early"


def _gpu(device: DeviceAtHand) -> str:
    name = device.gpu.name if device.is_known else device.name
    room = f"{format_gib(device.room_bytes)} for its allocator"
    others = device.others_bytes
    if others > OTHERS_SHARE * device.total_bytes:
        return f"{name} ({room}; other processes hold {format_gib(others)})"
    return f"{name} ({room})"


def _fitting(report: RunReport) -> list[str]:
    return [n for n, v in report.verdicts.items() if v.word == "fits" and n != report.gpu]
