"""Many experiments, one process each: an end of any kind is a result, and the next one starts."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memest.errors import MemestError, PlanError
from memest.loops.job import RunOptions
from memest.loops.packages import how_to_install, is_installed, require
from memest.plan import TrainingPlan
from memest.plan.optimizers import BITSANDBYTES, DEEPSPEED, OPTIMIZERS
from memest.plan.values import FLASH_ATTENTION_2
from memest.report import Measurement, Outcome
from memest.units import format_gib
from memest.validate import results as results_file
from memest.validate.device import Device, library_versions, query_device
from memest.validate.processes import (
    Child,
    call_in_child,
    fork_experiment,
    read_report,
    spawn_experiment,
)
from memest.validate.snapshot import file_stem

POLL_S = 0.05
TICK_S = 1.0
LOG_LINES = 4
"""Last lines of a failed run's log that its note repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a suite stands, told about once a second and at the end of each experiment."""

    number: int
    total: int
    name: str
    elapsed_s: float
    measurement: Measurement | None = None
    """Of the experiment, once it has ended."""

    was_done: bool = False
    """It was in the results already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """How experiments are run: the arguments of `validate`, with their defaults applied."""

    results: Path
    device: Device
    timeout_s: float
    options: RunOptions
    on_progress: Callable[[Progress], Any]
    start: Callable[..., Child]
    host_bytes: Callable[[TrainingPlan], int]
    machine_bytes: int
    done: list[Measurement] = field(default_factory=list)


def detect_device() -> Device:
    """The CUDA device, asked in a child process: this one opens nothing.

    Raises:
        UnsupportedError: there is none that torch can use, or a package is missing.
    """
    require("torch", "lightning")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks without opening CUDA
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return query_device()
    return call_in_child(query_device)


def validate(
    plans: Sequence[TrainingPlan],
    *,
    results: Path,
    device: Device,
    resume: bool = False,
    timeout_s: float = 600.0,
    options: RunOptions | None = None,
    on_progress: Callable[[Progress], Any] = lambda progress: None,
    start: Callable[..., Child] | None = None,
    host_bytes: Callable[[TrainingPlan], int] | None = None,
    machine_bytes: int | None = None,
) -> list[Measurement]:
    """Run every plan and append its measured report to `results`; the reports, in order.

    Args:
        plans: each with a label of its own.
        results: a JSON Lines file.
        device: what `detect_device` found.
        resume: go on with a file that holds results, passing over what it has.
        timeout_s: seconds after which an experiment is ended, which is a failed one.
        options: weights and data.
        on_progress: told about each experiment while it runs and when it ends.
        start: starts an experiment; None forks, or spawns where a fork is not possible.
        host_bytes: predicts what a plan holds in the host's memory.
        machine_bytes: the host's memory; None asks the machine.

    Raises:
        MemestError: two plans have one label, a model does not exist, every plan needs a package
            that is missing, or `results` cannot be written or holds something else.
    """
    _check_labels(plans)
    missing = [_missing_package(plan) for plan in plans]
    if missing and all(missing):
        require(*missing)
    done = results_file.prepare(results, resume=resume)
    pending = [plan for plan in plans if not results_file.is_done(plan, done)]
    options = options or RunOptions()
    if start is None:
        can_fork = _import_all(pending, options) and _reaches_gpu_by_fork()
        start = fork_experiment if can_fork else spawn_experiment
    runner = Runner(
        results=results,
        device=device,
        timeout_s=timeout_s,
        options=options,
        on_progress=on_progress,
        start=start,
        host_bytes=host_bytes or predicted_host_bytes,
        machine_bytes=machine_bytes or host_memory_bytes(),
        done=done,
    )
    return [_one(runner, plan, number, len(plans)) for number, plan in enumerate(plans, 1)]


def _check_labels(plans: Sequence[TrainingPlan]) -> None:
    labels: set[str] = set()
    for label in (plan.label for plan in plans):
        if label in labels:
            raise PlanError(f"two experiments are named `{label}`", hint="give each its own `name`")
        labels.add(label)


def _import_all(plans: Sequence[TrainingPlan], options: RunOptions) -> bool:
    """Import what the experiments share; whether a fork can still open CUDA afterwards."""
    import torch
    import transformers

    with _without_bitsandbytes():
        import memest.loops.data
        import memest.loops.lightning
        import memest.loops.optimizers
        import memest.loops.strategies
        import memest.models_meta.assemble
        import memest.models_meta.registry
        import memest.models_meta.sharding
        import memest.models_meta.states
        import memest.models_meta.wrapping

    for plan in plans:
        config = memest.models_meta.registry.resolve_config(
            plan.model_name, trust_remote_code=options.trust_remote_code
        )
        if config.architecture:
            getattr(transformers, config.architecture)
    is_open = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return not is_open and "bitsandbytes" not in sys.modules


def _reaches_gpu_by_fork() -> bool:
    """Whether a fork can open CUDA; not if an import has opened it here, torch knowing or not."""
    try:
        call_in_child(query_device)
    except MemestError:
        return False
    return True


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Keeps `bitsandbytes`, which opens the GPU, from being imported; peft 0.21 tries to.

    A child imports it where its plan needs it (peft/helpers.py alone does at import, and only to
    know its layers where adapters are rescaled).
    """
    name = "bitsandbytes"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _one(runner: Runner, plan: TrainingPlan, number: int, total: int) -> Measurement:
    label = plan.label
    known = next((m for m in runner.done if m.name == label), None)
    started = time.monotonic()
    if known is None:

        def tick() -> None:
            elapsed = time.monotonic() - started
            runner.on_progress(Progress(number=number, total=total, name=label, elapsed_s=elapsed))

        tick()
        measurement = _measure(runner, plan, tick)
        results_file.append(runner.results, measurement)
    else:
        measurement = known
    runner.on_progress(
        Progress(
            number=number,
            total=total,
            name=label,
            elapsed_s=time.monotonic() - started,
            measurement=measurement,
            was_done=known is not None,
        )
    )
    return measurement


def _measure(runner: Runner, plan: TrainingPlan, tick: Callable[[], None]) -> Measurement:
    refusal = _refusal(runner, plan)
    if refusal:
        reason = f"{results_file.SKIPPED}{refusal}"
        return _unfinished(runner.device, plan.label, plan.to_dict(), reason, 0.0)
    log = _log_path(runner.results, plan.label)
    log.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memest-") as folder:
        report = Path(folder, "report.json")
        child = runner.start(plan, runner.options, report=report, log=log)
        ending = _wait(child, runner.timeout_s, tick)
        measured = read_report(report)
    if measured is not None:
        log.unlink(missing_ok=True)
        if not any(log.parent.iterdir()):
            log.parent.rmdir()
        return measured
    note = f"{ending}: {_tail(log)} (log: {log.parent.name}/{log.name})"
    elapsed = round(time.monotonic() - started, 3)
    return _unfinished(runner.device, plan.label, plan.to_dict(), note, elapsed)


def _wait(child: Child, timeout_s: float, tick: Callable[[], None]) -> str:
    """How the child ended; it has ended when this returns or raises."""
    deadline = time.monotonic() + timeout_s
    next_tick = time.monotonic() + TICK_S
    try:
        while (code := child.poll()) is None:
            now = time.monotonic()
            if now >= deadline:
                return f"ended after {timeout_s:g} s, the time limit"
            if now >= next_tick:
                tick()
                next_tick += TICK_S
            time.sleep(POLL_S)
    finally:
        child.kill()
    if code >= 0:
        return f"failed with exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def _refusal(runner: Runner, plan: TrainingPlan) -> str:
    """Why the plan must not run on this machine; empty where it may."""
    if plan.world_size > runner.device.num_devices:
        return f"it needs {plan.world_size} GPUs, and the machine has {runner.device.num_devices}"
    missing = _missing_package(plan)
    if missing:
        return f"it needs `{missing}` ({how_to_install(missing)})"
    try:
        needed = runner.host_bytes(plan)
    except MemestError:
        return ""  # what cannot be predicted can still be measured
    if needed <= runner.machine_bytes:
        return ""
    return (
        f"it holds {format_gib(needed)} in host memory, "
        f"and the machine has {format_gib(runner.machine_bytes)}"
    )


def _missing_package(plan: TrainingPlan) -> str:
    """Return the first package that the plan needs and that is not installed, or nothing."""
    of_optimizer = OPTIMIZERS[plan.optim].library
    needed = {
        "bitsandbytes": plan.use_qlora or of_optimizer == BITSANDBYTES,
        "flash_attn": plan.attn_implementation == FLASH_ATTENTION_2,
        "deepspeed": plan.is_deepspeed or of_optimizer == DEEPSPEED,
    }
    return next(
        (name for name, is_used in needed.items() if is_used and not is_installed(name)), ""
    )


def predicted_host_bytes(plan: TrainingPlan) -> int:
    """Host memory that the run holds on purpose: paged optimizers and offload hold some."""
    if not (plan.optim.startswith("paged_") or plan.offloads):
        return 0

    def ask() -> int:
        import torch

        from memest.estimator.predict import predict

        torch.set_num_threads(1)  # the threads of the parent are not here
        return predict(plan).host_bytes

    return call_in_child(ask)


def host_memory_bytes() -> int:
    """The machine's memory, or what its control group (v2, v1) lets this process have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or `max`
            continue
    return min(limits)


def _unfinished(
    device: Device, name: str, plan: dict[str, Any], note: str, elapsed_s: float
) -> Measurement:
    return Measurement(
        name=name,
        plan=plan,
        model={},
        gpu=device.catalogue_name,
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        process_bytes=0,
        host_bytes=0,
        phases=(),
        verdict=Outcome.FAILED,
        versions=library_versions(),
        elapsed_s=elapsed_s,
        device=device.to_dict(),
        context_bytes=0,
        note=note,
    )


def _log_path(results: Path, label: str) -> Path:
    return results.with_name(f"{results.stem}.logs") / f"{file_stem(label)}.log"


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "no log"
    last = [line.strip()[:300] for line in lines if line.strip()][-LOG_LINES:]
    return " | ".join(last) or "no output"
