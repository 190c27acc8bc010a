"""`memest.preflight`: a check, before a script starts, whether it will fit its real GPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import memest
from memest.child import spawn
from memest.errors import PlanError, shown
from memest.estimator.allocator.settings import VARIABLES
from memest.report import Ending, RunReport
from memest.run.advice import render_suggestions, suggestions
from memest.run.device_at_hand import DeviceAtHand, device_at_hand
from memest.run.typed_command import Command, typed_command
from memest.units import GIB, gib_or_mib, parse_bytes

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

NO_SCRIPT = (
    "there is no script to run, as in a notebook; the code within"
    " `with memest.virtual_gpu(...):` is simulated"
)
_ENDS = (Ending.FINISHED, Ending.STOPPED)
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
    result = _check(typed, max_steps, time_limit, margin_bytes)
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


def _check(
    typed: Command | None, max_steps: int, time_limit: float, margin_bytes: int | None
) -> Preflight:
    """Simulate the script and print the outcome, unless it fits or is unknown."""
    started = time.monotonic()

    def ended(outcome: Outcome, report: RunReport | None = None, why: str = "") -> Preflight:
        elapsed_s = time.monotonic() - started
        return Preflight(outcome=outcome, why=why, report=report, elapsed_s=elapsed_s)

    if typed is None:
        return ended(Outcome.UNKNOWN, why=NO_SCRIPT)
    size = os.environ.get("WORLD_SIZE", "1").strip()
    if size not in ("", "1"):
        why = f"several GPUs are not simulated yet (`WORLD_SIZE` is {size})"
        return ended(Outcome.UNKNOWN, why=why)
    device = device_at_hand()
    if device is None:
        return ended(Outcome.UNKNOWN, why="there is no CUDA GPU here")
    script = _Script(typed, device, max_steps, started + time_limit)
    report, why = script.run()
    if report is None:
        return ended(Outcome.UNKNOWN, why=why)
    if not report.fits:
        _print([_RULE, *_oom_lines(script, report), _RULE])
        return ended(Outcome.OOM, report)
    if report.ending not in _ENDS or report.error:
        return ended(Outcome.UNKNOWN, report, f"the virtual run ended early: {report.error}")
    spare = report.verdicts[report.gpu].margin_bytes
    if spare >= (device.gpu.spread_bytes if margin_bytes is None else margin_bytes):
        return ended(Outcome.FITS, report)
    needs, usable = gib_or_mib(report.limit_bytes - spare), gib_or_mib(report.limit_bytes)
    _print([f"memest preflight: `{typed.label}` fits {_gpu(device)}, but it is tight:"
            f" needs {needs} of {usable} usable, {gib_or_mib(spare)} to spare"
            f" after {report.num_steps} steps"])  # fmt: skip
    return ended(Outcome.TIGHT, report)


def _oom_lines(script: _Script, report: RunReport) -> list[str]:
    """Return lines on a script that does not fit: its report, its need, and what would help."""
    own = replace(report, verdicts={report.gpu: report.verdicts[report.gpu]}, notes=())
    lines = [
        f"memest preflight: `{script.typed.label}` will not fit {_gpu(script.device)}, so it is"
        f" stopped before it starts; `{VARIABLE}=off` lets it run",
        "",
        str(own),
        "",
    ]
    endless, _ = script.run(memory=ENDLESS)
    if endless is None or endless.ending not in _ENDS:
        return lines
    limit = report.limit_bytes
    needs = endless.verdicts[endless.gpu].needs_bytes
    lines.append(f"needs {gib_or_mib(needs)}: {gib_or_mib(needs - limit)} more than there is")
    if fitting := [n for n, v in endless.verdicts.items() if v.word == "fits" and n != endless.gpu]:
        lines.append(f"fits: {', '.join(fitting)}")
    found = suggestions(endless, limit)
    for change in found:
        if not change.can_be_simulated:
            continue
        changed, _ = script.run(change.options, alloc_conf=change.alloc_conf)
        if changed is not None and changed.fits and not changed.error:
            needs = changed.verdicts[changed.gpu].needs_bytes
            return [*lines, f"best change, simulated: {change.title}: needs {gib_or_mib(needs)} of"
                    f" {gib_or_mib(changed.limit_bytes)} usable ({change.price})"]  # fmt: skip
    return lines + render_suggestions(found)


@dataclass(frozen=True, slots=True)
class _Script:
    """A script that is simulated on GPUs like `device`."""

    typed: Command
    device: DeviceAtHand
    max_steps: int
    deadline: float
    """Time on the monotonic clock at which the check is given up."""

    def run(
        self, options: Sequence[str] = (), *, memory: str | None = None, alloc_conf: str = ""
    ) -> tuple[RunReport | None, str]:
        """Run the script on a virtual GPU like `device`, or like it with `memory`.

        Return its report, or None and the reason why there is none.
        """
        device = self.device
        of_gpu = ["--gpu", device.gpu.name]
        if memory is not None:
            of_gpu += ["--gpu-memory", memory]
        else:
            if not device.is_known:
                of_gpu += ["--gpu-memory", str(device.total_bytes)]
            if device.room_bytes < device.gpu.limit_bytes:
                of_gpu += ["--memory-limit", str(max(_SMALLEST_LIMIT, device.room_bytes))]
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            return None, "no time is left"
        words = [*of_gpu, "--max-steps", str(self.max_steps), "--no-input", *options]
        name = "memest-preflight-"
        with tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True) as folder:
            return _run_script(self.typed, words, _environment(alloc_conf), Path(folder), seconds)


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
    room = f"{gib_or_mib(device.room_bytes)} for its allocator"
    others = device.others_bytes
    if others > OTHERS_SHARE * device.total_bytes:
        return f"{name} ({room}; other processes hold {gib_or_mib(others)})"
    return f"{name} ({room})"
