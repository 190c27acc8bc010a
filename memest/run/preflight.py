"""`memest.preflight`: a check, before a script starts, whether it will fit its real GPU."""

import ast
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import memest
from memest.child import spawn
from memest.errors import OOM_EXIT_CODE, PlanError, shown
from memest.estimator.allocator.blocks import SMALL_SEGMENT_BYTES
from memest.estimator.allocator.settings import EXPANDABLE, VARIABLES
from memest.estimator.hardware.gpus import Gpu, match_device, nearest_gpu
from memest.packages import is_in_packages, with_nvml
from memest.report import Ending, RunReport
from memest.units import GIB, gib_or_mib, parse_bytes

# The real GPU, identified without a CUDA context on it.
#
# NVML is used where nvidia-ml-py is installed. It cannot identify the GPU that CUDA would choose
# among slices or GPUs of several kinds; then a short process uses torch. A process with a context
# uses torch itself.

_PROBE = (
    "import json, torch; p = torch.cuda.get_device_properties(0); "
    "print(json.dumps([p.name, p.total_memory, p.major, p.minor, torch.cuda.mem_get_info(0)[0]]))"
)
_PROBE_TIMEOUT_S = 60.0
_NO_DEVICE = ("", "-1", "NoDevFiles")  # values of `CUDA_VISIBLE_DEVICES` that hide every GPU
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
VARIABLE = "MEMEST_PREFLIGHT"
"""Environment variable; `off`, `0`, `no` or `false` skips the check, `inside` marks a check."""

INSIDE = "inside"
_OFF = ("0", "off", "no", "false", INSIDE)
_DONE = "MEMEST_PREFLIGHT_DONE"
"""Variable that names the checked process and command, so that its children skip the check."""

OTHERS_SHARE = 0.02  # share of the GPU from which other processes are mentioned
ENDLESS = "32TiB"  # memory of a GPU on which everything fits, to measure the need of a script
NO_SCRIPT = (
    "there is no script to run, as in a notebook; the code within"
    " `with memest.virtual_gpu(...):` is simulated"
)
_ENDS = (Ending.FINISHED, Ending.STOPPED)
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_RULE = "-" * 80
_BOOT = (
    "import faulthandler, sys; faulthandler.dump_traceback_later({seconds}, exit=True); "
    "sys.path.append({folder!r}); "
    "from memest.cli import main; main()"
)
EIGHT_BIT_SHARE = 0.74
"""Share of two float32 moments that bitsandbytes' blockwise 8-bit ones save: 8 B to 2 B and 8 B per
256 elements (`bitsandbytes/optim/optimizer.py`: blocks of 256, one float32 `absmax` each).
"""

PARTS = (2, 4, 8, 16, 32, 64)  # numbers of parts into which a micro-batch is cut
RUNNERS = frozenset(("ipykernel_launcher", "pytest", "py.test", "unittest"))
"""Programs that run code with arguments of their own, such as pytest."""

_MEMEST = Path(__file__).resolve().parents[1]
_LIBRARY = Path(os.__file__).resolve().parent  # folder of Python's own library


@dataclass(frozen=True, slots=True)
class DeviceAtHand:
    """Real GPU that this process would use, and its free memory."""

    name: str
    total_bytes: int  # total of `torch.cuda.get_device_properties`, without the driver's own memory
    capability: tuple[int, int]
    free_bytes: int  # free bytes, including the cache of this process's allocator
    has_context: bool = False  # CUDA context of the process that read `free_bytes` is not in it

    @property
    def gpu(self) -> Gpu:
        """The catalogue's entry of this GPU, or of the most similar GPU, with this GPU's memory."""
        gpu = match_device(self.name, self.total_bytes)
        return gpu or nearest_gpu(self.capability, self.total_bytes)

    @property
    def is_known(self) -> bool:
        """True if the catalogue has this GPU."""
        return match_device(self.name, self.total_bytes) is not None

    @property
    def room_bytes(self) -> int:
        """Bytes that torch's allocator can reserve on this GPU, by the memory that is free."""
        gpu = self.gpu
        free = self.free_bytes - (0 if self.has_context else gpu.context_bytes)
        return max(0, min(free, gpu.limit_bytes))

    @property
    def others_bytes(self) -> int:
        """Bytes of this GPU that other processes hold."""
        context = self.gpu.context_bytes if self.has_context else 0
        return max(0, self.total_bytes - self.free_bytes - context)


def device_at_hand(environment: Mapping[str, str] | None = None) -> DeviceAtHand | None:
    """Return the real GPU that CUDA would call `cuda:0`; None without a GPU. `environment` has
    variables such as `CUDA_VISIBLE_DEVICES`, which select it; None is the environment of this
    process."""
    environment = os.environ if environment is None else environment
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    first_visible = None if visible is None else visible.partition(",")[0].strip()
    if first_visible in _NO_DEVICE:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        if has_context is None or has_context(0):
            return _gpu_of_this_process(torch)
    if not _has_driver():
        return None
    order = environment.get("CUDA_DEVICE_ORDER", "")
    with suppress(_UnsureError):
        # a list, since `with_nvml` returns None without NVML, and `_read_nvml` without a GPU
        devices = with_nvml(lambda nvml: [_read_nvml(nvml, first_visible, order)])
        if devices is not None:
            return devices[0]
    return _gpu_of_another_process()


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _gpu_of_this_process(torch: Any) -> DeviceAtHand:
    device = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info(0)
    free += torch.cuda.memory_reserved(0)
    capability = (device.major, device.minor)
    return DeviceAtHand(device.name, device.total_memory, capability, free, has_context=True)


def _gpu_of_another_process() -> DeviceAtHand | None:
    """Return the GPU that torch finds in a child process; None if it finds none or fails."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_PROBE_TIMEOUT_S, check=True,
        )  # fmt: skip
        name, total, major, minor, free = json.loads(process.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None
    return DeviceAtHand(name, total, (major, minor), free, has_context=True)


class _UnsureError(Exception):
    """Raised when NVML cannot identify the GPU that CUDA would choose."""


def _read_nvml(nvml: Any, visible: str | None, order: str) -> DeviceAtHand | None:
    """Return the GPU that CUDA would call `cuda:0`. `nvml` is the module pynvml. `visible` is the
    first item of `CUDA_VISIBLE_DEVICES`: an index, a UUID, or None if unset. Return None if no GPU
    has that index. `order` is the value of `CUDA_DEVICE_ORDER`. Raise `_UnsureError` if CUDA's
    order of GPUs may differ from NVML's, or if CUDA uses a MIG instance."""
    if visible is not None and not visible.isdecimal():
        handle = nvml.nvmlDeviceGetHandleByUUID(visible)
    else:
        index, count = int(visible or 0), nvml.nvmlDeviceGetCount()
        if index >= count:
            return None
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        if order != "PCI_BUS_ID" and len({nvml.nvmlDeviceGetName(h) for h in handles}) > 1:
            raise _UnsureError  # CUDA's order is fastest first
        handle = handles[index]
    with suppress(nvml.NVMLError_NotSupported):  # GPUs without MIG do not support the query
        current_mode, _ = nvml.nvmlDeviceGetMigMode(handle)
        if current_mode:
            raise _UnsureError  # CUDA uses a MIG instance of it
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    total = memory.total - memory.reserved
    name = nvml.nvmlDeviceGetName(handle)
    return DeviceAtHand(name, total, (major, minor), total - memory.used)


class Outcome(StrEnum):
    """Outcome of a preflight, which checks whether a script fits its GPU."""

    FITS = "fits"
    TIGHT = "tight"  # fits, with less to spare than the margin
    OOM = "oom"
    UNKNOWN = "unknown"  # the virtual run gave no answer; `why` has the reason
    OFF = "off"  # not checked: switched off, a later rank, or within a virtual run


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Result of `memest.preflight`: whether the script fits, or why that is unknown."""

    outcome: Outcome
    why: str = ""  # reason of the outcome `unknown`
    report: RunReport | None = field(default=None, repr=False)  # Report of the virtual run
    elapsed_s: float = 0.0


class PreflightStop(SystemExit):
    """Raised to end a script that will not fit; the exit code is 5 if it is not caught."""

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

    The script runs once more from its first line, in another process, for `max_steps` optimizer
    steps. The virtual GPU is like the real one, with its free memory. If the run is out of memory,
    the report goes to stderr and `PreflightStop`, a `SystemExit`, ends the script. If it fits,
    nothing is printed. If that is unknown, a line on stderr has the reason, and the script goes on.

    The check runs once per script: not again in the same process or in its children, and only on
    rank 0. `MEMEST_PREFLIGHT=off` in the environment turns it off.

    Args:
        max_steps: optimizer steps to simulate.
        time_limit: seconds after which the check is given up.
        margin: memory, in bytes or as `2GiB`; a warning is printed if less than this stays free.
            None is `Gpu.spread_bytes`, the memory that another driver or CUDA may take.

    Raises:
        PreflightStop: the script will not fit.
        PlanError: `margin` is not a size, or `max_steps` is below 1.
    """
    global _done
    margin_bytes = None if margin is None else parse_bytes(margin)
    if max_steps < 1:
        raise PlanError(f"`max_steps` is {shown(max_steps)}", hint="three are enough")
    if _is_off():
        return _OFF_HERE
    main = sys.modules.get("__main__")
    if _done is not None:
        checked_main, result = _done
        if checked_main is main:
            return result
    command = typed_command(sys._getframe(1))
    if command is not None:
        key = json.dumps([command.folder, *command.words])
        pid, _, checked_key = os.environ.get(_DONE, "").partition(" ")
        if checked_key == key and pid != str(os.getpid()):  # checked by a parent process
            return _OFF_HERE
        os.environ[_DONE] = f"{os.getpid()} {key}"
    started = time.monotonic()
    result = _simulate(command, max_steps, started + time_limit, margin_bytes)
    result = replace(result, elapsed_s=time.monotonic() - started)
    _done = main, result
    if result.outcome is Outcome.UNKNOWN:
        _print_lines([f"memest preflight: not checked: {result.why}"])
    elif result.outcome is Outcome.OOM:
        raise PreflightStop(result)
    return result


def report_measured(result: Preflight | None) -> Iterator[dict[str, float]]:
    """Print the predicted and the measured peak of reserved memory; then yield one dict with both.

    The dict has `memest/predicted_gib` and `memest/measured_gib`, for a logger. The measured peak
    is torch's, since its last reset. Without a report in `result`, or without CUDA in this process,
    nothing is printed or yielded.
    """
    report = None if result is None else result.report
    torch = sys.modules.get("torch")
    if report is None or torch is None or not torch.cuda.is_initialized():
        return
    measured = torch.cuda.max_memory_reserved()
    _print_lines(["", report.summary(measured_bytes=measured)])  # below a progress bar
    predicted = report.verdicts[report.gpu].reserved_bytes
    yield {"memest/predicted_gib": predicted / GIB, "memest/measured_gib": measured / GIB}


def _is_off() -> bool:
    if os.environ.get(VARIABLE, "").strip().lower() in _OFF:
        return True
    if multiprocessing.parent_process() is not None:
        return True  # a worker process that imports the script
    ranks = [os.environ.get(name, "").strip() for name in _RANK_VARIABLES]
    if any(rank not in ("", "0", "-1") for rank in ranks):
        return True  # not the first rank
    virtual = sys.modules.get("memest.estimator.virtual_gpu")
    return virtual is not None and virtual.VirtualGpu._active is not None


def _print_lines(lines: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _simulate(
    command: "Command | None", max_steps: int, deadline: float, margin_bytes: int | None
) -> Preflight:
    """Simulate `command` for `max_steps` steps until `deadline` (monotonic, seconds), and return
    whether it fits. Print a report if not, and a warning if less than `margin_bytes` stays free
    (None: `Gpu.spread_bytes`). The outcome is unknown if `command` is None, as in a notebook."""
    if command is None:
        return Preflight(outcome=Outcome.UNKNOWN, why=NO_SCRIPT)
    size = os.environ.get("WORLD_SIZE", "1").strip()
    if size not in ("", "1"):
        why = f"several GPUs are not simulated yet (`WORLD_SIZE` is {size})"
        return Preflight(outcome=Outcome.UNKNOWN, why=why)
    device = device_at_hand()
    if device is None:
        return Preflight(outcome=Outcome.UNKNOWN, why="there is no CUDA GPU here")
    script = _Script(command, device, max_steps, deadline)
    report, why = script.run()
    if report is None:
        return Preflight(outcome=Outcome.UNKNOWN, why=why)
    if not report.fits:
        _print_lines([_RULE, *_oom_lines(script, report), _RULE])
        return Preflight(outcome=Outcome.OOM, report=report)
    if report.ending not in _ENDS or report.error:
        why = f"the virtual run ended early: {report.error}"
        return Preflight(outcome=Outcome.UNKNOWN, report=report, why=why)
    spare = report.verdicts[report.gpu].margin_bytes
    if margin_bytes is None:
        margin_bytes = device.gpu.spread_bytes
    if spare >= margin_bytes:
        return Preflight(outcome=Outcome.FITS, report=report)
    needs, usable = gib_or_mib(report.limit_bytes - spare), gib_or_mib(report.limit_bytes)
    _print_lines([f"memest preflight: `{command.label}` fits {_gpu_text(device)}, but it is tight:"
            f" needs {needs} of {usable} usable, {gib_or_mib(spare)} to spare"
            f" after {report.num_steps} steps"])  # fmt: skip
    return Preflight(outcome=Outcome.TIGHT, report=report)


def _oom_lines(script: "_Script", report: RunReport) -> list[str]:
    """Return lines on `script`, which does not fit: report, needed memory, possible changes."""
    own_report = replace(report, verdicts={report.gpu: report.verdicts[report.gpu]}, notes=())
    lines = [
        f"memest preflight: `{script.command.label}` will not fit {_gpu_text(script.device)}, so it"
        f" is stopped before it starts; `{VARIABLE}=off` lets it run",
        "",
        str(own_report),
        "",
    ]
    endless, _ = script.run(memory=ENDLESS)
    if endless is None or endless.ending not in _ENDS:
        return lines
    needs = endless.verdicts[endless.gpu].needs_bytes
    lacking_bytes = needs - report.limit_bytes
    lines.append(f"needs {gib_or_mib(needs)}: {gib_or_mib(lacking_bytes)} more than there is")
    if gpus := [n for n, v in endless.verdicts.items() if v.word == "fits" and n != endless.gpu]:
        lines.append(f"fits: {', '.join(gpus)}")
    candidates = _possible_changes(endless, lacking_bytes) if lacking_bytes > 0 else ()
    suggestions = [change for change in candidates if change.saved_bytes >= lacking_bytes]
    for change in suggestions:
        if not (change.options or change.alloc_conf):
            continue  # applies only to an edited script
        new_report, _ = script.run(change.options, alloc_conf=change.alloc_conf)
        if new_report is not None and new_report.fits and not new_report.error:
            new_needs = gib_or_mib(new_report.verdicts[new_report.gpu].needs_bytes)
            return [*lines, f"best change, simulated: {change.title}: needs {new_needs} of"
                    f" {gib_or_mib(new_report.limit_bytes)} usable ({change.price})"]  # fmt: skip
    return lines + render_suggestions(suggestions)


@dataclass(frozen=True, slots=True)
class _Script:
    command: "Command"
    device: DeviceAtHand
    max_steps: int
    deadline: float  # time on the monotonic clock at which the check is given up

    def run(
        self, options: Sequence[str] = (), *, memory: str | None = None, alloc_conf: str = ""
    ) -> tuple[RunReport | None, str]:
        """Run the script by `memest run` on a virtual GPU; return (report, "") or (None, the
        reason). The virtual GPU is like `self.device`. `options` are added to the command.
        `memory`, such as `32TiB`, replaces the GPU's memory; None is the memory that is free on the
        real GPU. `alloc_conf` is added to the allocator's settings."""
        device = self.device
        gpu_options = ["--gpu", device.gpu.name]
        if memory is not None:
            gpu_options += ["--gpu-memory", memory]
        else:
            if not device.is_known:
                gpu_options += ["--gpu-memory", str(device.total_bytes)]
            if device.room_bytes < device.gpu.limit_bytes:
                gpu_options += ["--memory-limit", str(max(SMALL_SEGMENT_BYTES, device.room_bytes))]
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            return None, "no time is left"
        arguments = [*gpu_options, "--max-steps", str(self.max_steps), "--no-input", *options]
        prefix = "memest-preflight-"
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
            environment = {**os.environ, VARIABLE: INSIDE}
            if alloc_conf:
                newer, older = VARIABLES
                current_conf = os.environ.get(newer, os.environ.get(older, ""))
                environment[newer] = ",".join(filter(None, (current_conf, alloc_conf)))
            return _run_script(self.command, arguments, environment, Path(folder), seconds)


def _run_script(
    script: "Command", options: list[str], environment: dict[str, str], folder: Path, seconds: float
) -> tuple[RunReport | None, str]:
    """Run `script` by `memest run` with `options`; return (report, "") or (None, the reason). The
    run takes at most `seconds`, has variables `environment`, and writes files to `folder`."""
    report_path, output = folder / "report.json", folder / "output.txt"
    folder_of_memest = str(Path(str(memest.__file__)).parents[1])  # a link under `--python`
    # the child prints its stack and ends itself if this process can no longer end it
    boot = _BOOT.format(seconds=int(seconds) + 5, folder=folder_of_memest)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", boot, "run", *options, "--json", str(report_path)]
    child = spawn([*command, *script.words], output, cwd=script.folder, env=environment)
    try:
        if child.wait(seconds) is None:
            return None, f"the virtual run did not end within {seconds:.0f} s"
    finally:
        child.kill()
    if (report := RunReport.read(report_path)) is not None:
        return report, ""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    last_line = "".join(f": {line}" for line in lines[-1:])
    return None, errors[-1] if errors else f"the virtual run ended early{last_line}"


def _gpu_text(device: DeviceAtHand) -> str:
    name = device.gpu.name if device.is_known else device.name
    room = f"{gib_or_mib(device.room_bytes)} for its allocator"
    others = device.others_bytes
    if others > OTHERS_SHARE * device.total_bytes:
        return f"{name} ({room}; other processes hold {gib_or_mib(others)})"
    return f"{name} ({room})"


# Changes for a script that does not fit: estimates from its peak on an unlimited GPU.
#
# `memest run` can apply some of them without touching the script; the preflight tries those.


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Change that may make a script fit. `memest run` simulates the change with `options`, or with
    `alloc_conf`. If both are empty, it cannot, since the change is an edit of the script."""

    title: str
    price: str  # cost in plain words
    saved_bytes: int  # estimated saving
    options: tuple[str, ...] = ()  # options of `memest run` that simulate it
    alloc_conf: str = ""  # addition to `PYTORCH_ALLOC_CONF` that simulates it


def _possible_changes(report: RunReport, lacking_bytes: int) -> Iterator[Suggestion]:
    """Yield changes that apply to most scripts, with their estimated savings, cheapest first.

    `report` is of the script on a GPU with enough memory; the real one lacks `lacking_bytes`.
    """
    sizes = {term.name: term.num_bytes for term in report.terms}
    in_step = report.peak.phase == "optimizer"
    temporaries = sizes.get("temporaries", 0)
    cached = report.verdicts[report.gpu].needs_bytes - report.peak_allocated_bytes
    if in_step and temporaries:
        price = "nothing: the same update in one kernel, without temporaries"
        yield Suggestion("`fused=True` in the optimizer", price, temporaries)
    if cached and EXPANDABLE not in report.allocator:
        title = f"`PYTORCH_ALLOC_CONF={EXPANDABLE}` in the environment"
        price = "nothing: the allocator keeps less in pieces that nothing fits into"
        yield Suggestion(title, price, cached, alloc_conf=EXPANDABLE)
    activations = sizes.get("activations", 0)
    scalable = activations + sizes.get("batch", 0) + (0 if in_step else temporaries)
    if parts := next((n for n in PARTS if scalable - scalable // n >= lacking_bytes), 0):
        title = f"1/{parts} of the micro-batch, and {parts} times the accumulation"
        price = "same mathematics, at most a little more time"
        yield Suggestion(title, price, scalable - scalable // parts, ("--batch-parts", str(parts)))
    price = "same mathematics, about a third more time"
    yield Suggestion("activation checkpointing, if it is not on", price, activations // 2)
    state = sizes.get("optimizer", 0)
    title = "an 8-bit optimizer, if its state is of 32 bits"
    yield Suggestion(title, "another optimizer", int(state * EIGHT_BIT_SHARE))
    title = "LoRA adapters instead of all parameters"
    yield Suggestion(title, "fewer parameters trained", sizes.get("grads", 0) + state)


def render_suggestions(suggestions: Sequence[Suggestion]) -> list[str]:
    """Return lines on the first two of `suggestions`; if empty, a line that no change is enough."""
    if not suggestions:
        return [
            "best change: none alone is enough; a smaller model, several GPUs or offload may be"
        ]
    lines = [
        f"{name}: {change.title} (about {gib_or_mib(change.saved_bytes)} less; {change.price})"
        for name, change in zip(("best change", "or"), suggestions, strict=False)
    ]
    check = "estimated from the contents of the peak; check the changed script by `memest run`"
    return [*lines, check]


@dataclass(frozen=True, slots=True)
class Command:
    """A script or a module with its arguments, as `memest run` takes them."""

    words: tuple[str, ...]  # words of the command: `train.py --bs 8`, or `-m package.train --bs 8`
    folder: str  # working folder of the command

    @property
    def label(self) -> str:
        """The command as text for messages."""
        name, *arguments = self.words
        return " ".join((os.path.basename(name) or name, *arguments))


def typed_command(frame: FrameType | None = None) -> Command | None:
    """Return the command that runs this process's script, such as `train.py --lr 1`. A notebook or
    Python shell has no script of its own, but may run one, by `%run train.py`. Then the result is
    the command of the nearest script in `frame` and its callers. Return None if there is no script,
    as in a notebook with `frame` None."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if getattr(sys, "frozen", False):  # an executable, as PyInstaller makes it
        return None
    if spec is not None and spec.name != "__main__":
        name = spec.name.removesuffix(".__main__")
        if name.partition(".")[0] in RUNNERS:
            return None
        for index, (word, next_word) in enumerate(pairwise(sys.orig_argv)):
            if word == "-m" and next_word in (name, f"{name}.__main__"):
                return Command(tuple(sys.orig_argv[index:]), os.getcwd())
        return Command(("-m", name, *sys.argv[1:]), os.getcwd())
    if file is None:
        return _caller_command(frame)
    if not os.path.isfile(file) or Path(file).stem in RUNNERS:
        return None
    return _script_command(file)


def _script_command(file: str) -> Command:
    """Return the command of the script `file` as typed, even if the script changed `sys.argv`."""
    for folder in dict.fromkeys((os.getcwd(), os.environ.get("PWD") or os.getcwd())):
        for index, word in enumerate(sys.orig_argv[1:], 1):
            path = os.path.join(folder, word)
            with suppress(OSError):
                if path == file or os.path.samefile(path, file):
                    return Command(tuple(sys.orig_argv[index:]), folder)
    return Command((os.path.abspath(file), *sys.argv[1:]), os.getcwd())


def _caller_command(frame: FrameType | None) -> Command | None:
    """Return the command of the nearest script or module in `frame` and its callers, or None."""
    while frame is not None:
        names: dict[str, Any] = frame.f_globals
        file, name = names.get("__file__"), names.get("__name__", "")
        frame = frame.f_back
        if not isinstance(file, str) or not os.path.isfile(file):
            continue
        path = Path(file).resolve()
        if is_in_packages(path) or path.is_relative_to(_MEMEST) or _LIBRARY in path.parents:
            continue  # frame of a library
        if name == "__main__":
            return Command((os.path.abspath(file), *sys.argv[1:]), os.getcwd())
        if _runs_by_itself(file):
            return Command(("-m", name), os.getcwd())
    return None


def _runs_by_itself(file: str) -> bool:
    """Return whether the module `file` has an `if __name__ == "__main__":`."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    return any(
        isinstance(node, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        for node in tree.body
    )
