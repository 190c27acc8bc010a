"""`memest.preflight`: a script looks, before it starts, whether it will fit its real GPU."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from memest.errors import PlanError, shown
from memest.estimator.allocator.settings import VARIABLES
from memest.report import Ending, RunReport
from memest.run.advice import Suggestion, render_suggestions, suggestions
from memest.run.device_at_hand import DeviceAtHand, device_at_hand
from memest.run.typed import Typed, typed_command
from memest.units import format_gib, parse_bytes

VARIABLE = "MEMEST_PREFLIGHT"
"""`off`, `0`, `no` or `false` in the environment: nothing is checked. The script that is simulated
finds `inside`."""

INSIDE = "inside"
_OFF = ("0", "off", "no", "false", INSIDE)
_DONE = "MEMEST_PREFLIGHT_DONE"
"""Holds the process and the command that were checked, for processes that the script starts."""

OOM_EXIT_CODE = 5
"""Of a script that is stopped: as `memest run --check`."""

TIGHT_SHARE = 0.02
"""Of what can be reserved: what should stay free where `margin` is not given. Within this, reserved
memory is predicted (docs/accuracy.md; docs/scripts.md has the misses)."""

ENDLESS = "32TiB"
"""A card on which everything fits, to learn how much a script needs; no node has as much."""

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_QUIET = {"WANDB_MODE": "disabled"}  # docs.wandb.ai, environment variables
_SMALLEST_LIMIT = 2 << 20
_RULE = "-" * 80
_BOOT = (
    "import signal, sys; signal.alarm({seconds}); sys.path.append({folder!r}); "
    "from memest.cli import main; main()"
)


class Outcome(StrEnum):
    """What a preflight has found."""

    FITS = "fits"
    TIGHT = "tight"
    """It fits, with less to spare than the margin."""

    OOM = "oom"
    UNKNOWN = "unknown"
    """It could not be told; `why` says the reason."""

    OFF = "off"
    """There was nothing to do here: switched off, another rank, within a virtual run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """The result of `memest.preflight`."""

    outcome: Outcome
    why: str = ""
    report: RunReport | None = field(default=None, repr=False)
    """Of the virtual run."""

    elapsed_s: float = 0.0


class PreflightStop(SystemExit):
    """The script will not fit; ends it with exit code 5 if nobody catches it.

    Args:
        result: of the preflight.
    """

    def __init__(self, result: Preflight) -> None:
        super().__init__(OOM_EXIT_CODE)
        self.result = result


_OFF_HERE = Preflight(outcome=Outcome.OFF)
_done: tuple[object, Preflight] | None = None
"""What was found, and the module `__main__` that it is about: `%run` makes a new one each time."""


def preflight(
    *, max_steps: int = 3, time_limit: float = 120.0, margin: int | str | None = None
) -> Preflight:
    """Simulate the first steps of the running script, and stop it if it will not fit.

        import memest

        memest.preflight()  # first thing in the script

    The script runs once more from its first line in a process of its own, on a virtual GPU like the
    real one with what is free on it, until `max_steps` optimizer steps are done. If that is out of
    memory, the report goes to stderr and `PreflightStop`, a `SystemExit`, ends the script. If it
    fits nothing is said. Where it cannot be told a line on stderr says why, and the script goes on.

    Once per script: not again in the same process, nor in those that it starts; only rank 0 checks;
    `MEMEST_PREFLIGHT=off` in the environment switches it off.

    Args:
        max_steps: optimizer steps to simulate.
        time_limit: seconds after which it steps aside.
        margin: what should stay free, in bytes or as `2GiB`; a warning says if less does. None is
            2 % of what can be reserved.

    Raises:
        PreflightStop: it will not fit.
        PlanError: `margin` is no size, or there are no steps.
    """
    global _done
    margin_bytes = None if margin is None else parse_bytes(margin)
    if max_steps < 1:
        raise PlanError(
            f"`max_steps` is {shown(max_steps)}", hint="three say what there is to know"
        )
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
        _tell([f"memest preflight: not checked: {result.why}"])
    elif result.outcome is Outcome.OOM:
        raise PreflightStop(result)
    return result


def _is_off() -> bool:
    if os.environ.get(VARIABLE, "").strip().lower() in _OFF:
        return True
    if multiprocessing.parent_process() is not None:
        return True  # a worker that imports the script
    if any(os.environ.get(name, "").strip() not in ("", "0", "-1") for name in _RANKS):
        return True
    virtual = sys.modules.get("memest.estimator.device.virtual_gpu")
    return virtual is not None and virtual.VirtualGpu._active is not None


def _is_first(typed: Typed) -> bool:
    """Whether no process above this one has checked the same command; those below will know."""
    command = json.dumps([typed.folder, *typed.words])
    process, _, checked = os.environ.get(_DONE, "").partition(" ")
    if checked == command and process != str(os.getpid()):
        return False
    os.environ[_DONE] = f"{os.getpid()} {command}"
    return True


def _tell(lines: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class _Ran:
    """What became of a virtual run: a report, or the reason why there is none."""

    report: RunReport | None
    why: str = ""


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

    def result(self, typed: Typed | None) -> Preflight:
        """What `preflight` returns; texts are written here but for the reason of an unknown."""
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
        ran = self._run(typed, device)
        report = ran.report
        if report is None:
            return self._unknown(ran.why)
        if not report.fits:
            self._tell_oom(typed, device, report)
            return Preflight(outcome=Outcome.OOM, report=report, elapsed_s=self.elapsed_s)
        if report.ending not in (Ending.FINISHED, Ending.STOPPED) or report.error:
            return self._unknown(f"the virtual run ended early: {report.error}", report)
        spare = report.limit_bytes - report.peak_reserved_bytes
        margin = self.margin_bytes
        if margin is None:
            margin = int(TIGHT_SHARE * report.limit_bytes)
        if spare >= margin:
            return Preflight(outcome=Outcome.FITS, report=report, elapsed_s=self.elapsed_s)
        self._tell_tight(typed, device, report, spare)
        return Preflight(outcome=Outcome.TIGHT, report=report, elapsed_s=self.elapsed_s)

    def _unknown(self, why: str, report: RunReport | None = None) -> Preflight:
        return Preflight(outcome=Outcome.UNKNOWN, why=why, report=report, elapsed_s=self.elapsed_s)

    def _tell_tight(
        self, typed: Typed, device: DeviceAtHand, report: RunReport, spare_bytes: int
    ) -> None:
        _tell(
            [
                f"memest preflight: `{typed.label}` fits {_card(device)}, but it is tight:"
                f" {format_gib(report.peak_reserved_bytes)} of"
                f" {format_gib(report.limit_bytes)} reserved, {format_gib(spare_bytes)} to spare"
                f" after {report.num_steps} steps"
            ]
        )

    def _tell_oom(self, typed: Typed, device: DeviceAtHand, report: RunReport) -> None:
        lines = [
            _RULE,
            f"memest preflight: `{typed.label}` will not fit {_card(device)}, so it is stopped"
            f" before it starts; `{VARIABLE}=off` lets it run",
            "",
            str(replace(report, verdicts={report.gpu: report.verdicts[report.gpu]}, notes=())),
            "",
        ]
        endless = self._run(typed, device, memory=ENDLESS).report
        if endless is not None and endless.ending in (Ending.FINISHED, Ending.STOPPED):
            need, limit = endless.peak_reserved_bytes, report.limit_bytes
            over = format_gib(need - limit)
            lines.append(f"needs {format_gib(need)} reserved: {over} more than there is")
            if fitting := _fitting(endless):
                lines.append(f"fits: {', '.join(fitting)}")
            found = suggestions(endless, limit)
            lines += self._tried(typed, device, found) or render_suggestions(found)
        _tell([*lines, _RULE])

    def _tried(self, typed: Typed, device: DeviceAtHand, found: Iterable[Suggestion]) -> list[str]:
        """The first of `found` that fits when it is simulated, if time is left to."""
        for each in found:
            if not each.can_be_simulated:
                continue
            report = self._run(typed, device, each.options, alloc_conf=each.alloc_conf).report
            if report is not None and report.fits and not report.error:
                room = f"{format_gib(report.peak_reserved_bytes)} of"
                return [
                    f"best change, simulated: {each.title}: {room}"
                    f" {format_gib(report.limit_bytes)} reserved ({each.price})"
                ]
        return []

    def _run(
        self,
        typed: Typed,
        device: DeviceAtHand,
        options: Sequence[str] = (),
        memory: str | None = None,
        alloc_conf: str = "",
    ) -> _Ran:
        """The script on a virtual card like `device`, or like it with `memory`."""
        card = ["--gpu", device.gpu.name]
        if memory is not None:
            card += ["--gpu-memory", memory]
        else:
            if not device.is_known:
                card += ["--gpu-memory", str(device.total_bytes)]
            if device.room_bytes < device.gpu.limit_bytes:
                card += ["--memory-limit", str(max(_SMALLEST_LIMIT, device.room_bytes))]
        seconds = self.time_limit - self.elapsed_s
        if seconds <= 0:
            return _Ran(None, "no time is left")
        folder = Path(tempfile.mkdtemp(prefix="memest-preflight-"))
        try:
            steps = ("--max-steps", str(self.max_steps), "--no-input")
            return _run_script(
                typed, [*card, *steps, *options], _environment(alloc_conf), folder, seconds
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _environment(alloc_conf: str) -> dict[str, str]:
    """Of a virtual run: the script's, and settings of the allocator beside those that it has."""
    found = {**os.environ, **_QUIET, VARIABLE: INSIDE}
    if alloc_conf:
        newer, older = VARIABLES
        before = os.environ.get(newer, os.environ.get(older, ""))
        found[newer] = ",".join(filter(None, (before, alloc_conf)))
    return found


def _run_script(
    typed: Typed, options: list[str], environment: dict[str, str], folder: Path, seconds: float
) -> _Ran:
    """`memest run OPTIONS` on a script, its output kept away, for at most `seconds`."""
    report, output = folder / "report.json", folder / "output.txt"
    boot = _BOOT.format(seconds=int(seconds) + 5, folder=str(Path(__file__).parents[2]))
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", boot, "run", *options, "--json", str(report)]
    with output.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            [*command, *typed.words],
            cwd=typed.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return _Ran(None, f"the virtual run did not end within {seconds:.0f} s")
        finally:
            _end(process)
    if report.is_file():
        return _Ran(RunReport.from_dict(json.loads(report.read_text(encoding="utf-8"))))
    return _Ran(None, _last_error(output.read_text(encoding="utf-8", errors="replace")))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and all that it has started."""
    with contextlib.suppress(OSError):  # where nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("Error: "):
            return line.removeprefix("Error: ")
    return f"the virtual run ended early: {lines[-1]}" if lines else "the virtual run ended early"


def _card(device: DeviceAtHand) -> str:
    name = device.gpu.name if device.is_known else device.name
    room = f"{format_gib(device.room_bytes)} for its allocator"
    others = device.others_bytes
    if others > TIGHT_SHARE * device.total_bytes:
        return f"{name} ({room}; other processes hold {format_gib(others)})"
    return f"{name} ({room})"


def _fitting(report: RunReport) -> list[str]:
    return [
        name
        for name, verdict in report.verdicts.items()
        if verdict.verdict == "fits" and name != report.gpu
    ]
