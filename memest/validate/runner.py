"""Runs many experiments, each in a process of its own; a failed process is a result, too."""

import dataclasses
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from memest.child import CAN_FORK, Child, DiedError, begin, fork, leave, submit, write_to
from memest.engines import Engine, Event, Local, find_engine, watched
from memest.errors import MemestError, PlanError, UnsupportedError
from memest.estimator.predict import packages_of
from memest.loops.job import RunOptions
from memest.models_meta.registry import resolve_config
from memest.packages import how_to_install, is_installed, require
from memest.plan import TrainingPlan
from memest.plan.keys import FLASH_ATTENTION_2
from memest.report import Measurement, Outcome
from memest.units import gib_or_mib
from memest.validate import results as results_file
from memest.validate.experiment import (
    Device,
    file_stem,
    measured_versions,
    query_device,
    run_experiment,
)
from memest.validate.results import SKIPPED
from memest.writing import write_whole

# Ranks: a process per GPU, with the environment of `torchrun`, which all end together.
#
# A rank with a report waits until all have one, because others may still read its memory.

POLL_S = 0.02
_RANK_KEYS = (
    "setup_peak_allocated_bytes", "setup_peak_reserved_bytes", "host_samples", "event_marks",
)  # fmt: skip
"""Keys of a rank's `device` that the merged report has in `ranks`."""

OOM_GRACE_S = 2.0  # wait for other ranks after one is out of memory, since they may hang
_NAME_WIDTH = 34
T = TypeVar("T")
LOG_LINES = 4  # number of last lines of a failed run's log in its note


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return `torchrun`'s environment for `rank` of `world_size` on a node; `port` is rank 0's."""
    from memest.estimator.gpu.worlds import Rank

    environment = Rank(rank=rank, world_size=world_size, num_local=world_size).environment(port)
    return environment | {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def run_ranks(num_ranks: int, run: Callable[[Path], NoReturn], folder: Path) -> list[Measurement]:
    """Run `num_ranks` ranks, a process each, and return their reports.

    `run` gets the path of a file in `folder`. It trains as one rank, writes its report to that
    file, and does not return. If a rank is out of memory, its report is enough: ranks that write
    none soon are left out. If no rank is out of memory and one ends without a report, the list is
    empty. The log of that rank is printed.
    """
    if not CAN_FORK:
        raise UnsupportedError(
            "a measured run on several GPUs needs Linux", hint="run `memest validate` on Linux"
        )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])  # unused
    children: list[Child] = []
    paths = [folder / f"rank{rank}.json" for rank in range(num_ranks)]

    def begin(rank: int) -> None:
        os.environ.update(rank_environment(rank, num_ranks, port))
        if rank:  # rank 0 writes to the experiment's log
            write_to(folder / f"rank{rank}.log")
        run(paths[rank])

    try:
        for rank in range(num_ranks):
            children.append(fork(partial(begin, rank)))
        return _collect(children, paths, folder)
    finally:
        for child in children:
            child.kill()


def wait_for_the_end() -> NoReturn:
    """Keep this process, a rank that has written its report, alive until another process ends it.
    If the rank ended by itself, ranks that exchange data with it might hang."""
    while True:
        time.sleep(POLL_S)


def merge(measured: Sequence[Measurement]) -> Measurement:
    """Return the report of the worst of `measured` ranks, with the figures of each in `ranks`.

    A rank out of memory is the worst, otherwise the one with most reserved, then most allocated
    memory. `host_bytes` is the sum over the ranks.
    """
    worst = max(
        measured,
        key=lambda m: (m.verdict is Outcome.OOM, m.peak_reserved_bytes, m.peak_allocated_bytes),
    )
    return dataclasses.replace(
        worst,
        device={k: v for k, v in worst.device.items() if k not in _RANK_KEYS},
        host_bytes=sum(m.host_bytes for m in measured),
        ranks=tuple(_rank_figures(m) for m in sorted(measured, key=_rank)),
    )


def _rank(measured: Measurement) -> int:
    return int(measured.device.get("rank", 0))


def _rank_figures(measured: Measurement) -> dict[str, Any]:
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes", "host_bytes")
    return {
        "rank": _rank(measured),
        "verdict": str(measured.verdict),
        **{key: getattr(measured, key) for key in keys},
        **{key: measured.device[key] for key in _RANK_KEYS if key in measured.device},
    }


def _collect(children: Sequence[Child], paths: Sequence[Path], folder: Path) -> list[Measurement]:
    """Return the reports that the ranks `children` write to `paths`, as `run_ranks` does."""
    deadline = float("inf")  # earlier once a rank is out of memory
    reports: dict[int, Measurement] = {}
    while True:
        ended = {rank for rank, child in enumerate(children) if child.poll() is not None}
        for rank, path in enumerate(paths):  # again, for reports written in the meantime
            if rank not in reports and (measured := Measurement.read(path)) is not None:
                reports[rank] = measured
        if len(reports) == len(paths) or time.monotonic() >= deadline:
            return list(reports.values())
        has_oom = any(report.verdict is Outcome.OOM for report in reports.values())
        if has_oom:
            deadline = min(deadline, time.monotonic() + OOM_GRACE_S)
        time.sleep(POLL_S)  # an ended rank may hang its peers
        if not has_oom and ended - reports.keys():
            for rank, child in enumerate(children):
                if child.poll() is not None and Measurement.read(paths[rank]) is None:
                    _print_log(rank, folder)
            return []


def _print_log(rank: int, folder: Path) -> None:
    if rank:
        with suppress(OSError):
            log = folder / f"rank{rank}.log"
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
    sys.stderr.write(f"rank {rank} ended without a report\n")
    sys.stderr.flush()


def header() -> str:
    """Return the header of a table of measurements."""
    return (
        f"{'experiment':<{_NAME_WIDTH}}  {'verdict':<7}"
        f"  {'allocated':>10}  {'reserved':>10}  {'process':>10}  {'host':>10}  {'time':>7}"
    )


def table_row(measurement: Measurement) -> str:
    """Return the row of `measurement` in a table with the columns of `header`."""
    start = f"{measurement.name:<{_NAME_WIDTH}}"
    if measurement.verdict is Outcome.FAILED:
        word = "skipped" if measurement.note.startswith(SKIPPED) else "failed"
        return f"{start}  {word:<7}  {measurement.note.removeprefix(SKIPPED)[:200]}"
    sizes = (*measurement.levels.values(), measurement.host_bytes)
    cells = "".join(f"  {gib_or_mib(size):>10}" for size in sizes)
    return f"{start}  {measurement.verdict:<7}{cells}  {f'{measurement.elapsed_s:.1f} s':>7}"


Experiment = Callable[[TrainingPlan, RunOptions, Callable[[Measurement], Any]], None]


def start_experiment(
    plan: TrainingPlan, options: RunOptions, *, report: Path, log: Path,
    experiment: Experiment = run_experiment, is_copy: bool = True,
) -> Child:  # fmt: skip
    """Start `experiment` in a child process: a fork of this one (`is_copy`), or a new one. The
    process writes the measurement to `report`, and its output to `log`."""
    return begin(partial(run_and_exit, plan, options, report, experiment), log, is_copy=is_copy)


def run_and_exit(
    plan: TrainingPlan, options: RunOptions, report: Path, experiment: Experiment
) -> NoReturn:
    """Run `experiment`, write its measurement to `report`, and end the process without any
    teardown. A plan with a Lightning strategy gets a process per GPU; their reports are merged."""
    if not plan.is_distributed:
        _run_and_deliver(plan, options, report, experiment, lambda: leave(0))
    measured = run_ranks(
        plan.world_size,
        lambda path: _run_and_deliver(plan, options, path, experiment, wait_for_the_end),
        report.parent,
    )
    if measured:
        write_whole(report, merge(measured).to_json())
    leave(0 if measured else 1)


def _run_and_deliver(
    plan: TrainingPlan, options: RunOptions, report: Path, experiment: Experiment,
    end: Callable[[], NoReturn],
) -> NoReturn:  # fmt: skip
    def deliver(measurement: Measurement) -> NoReturn:
        write_whole(report, measurement.to_json())
        end()

    try:
        experiment(plan, options, deliver)
        sys.stderr.write("the training ended without a report\n")
    except MemestError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        sys.stderr.write(f"Error: {error}{hint}\n")
    except BaseException:
        traceback.print_exc()
    leave(1)


def call_in_child(function: Callable[[], T]) -> T:
    """Return `function()`, called in a child process; a GPU opened in it is closed at its end.

    Raises:
        MemestError: `function` raised an error, whose text is the message, or its process died.
    """
    try:
        return submit(partial(_with_memest_errors, function)).answer()  # type: ignore[no-any-return]
    except DiedError as error:
        raise MemestError(
            "a child process ended without a result", hint="see the system's log"
        ) from error


def _with_memest_errors(function: Callable[[], T]) -> T:
    try:
        return function()
    except MemestError:
        raise
    except Exception as error:
        raise MemestError(f"{type(error).__name__}: {error}") from error


def detect_device() -> Device:
    """Return the CUDA device, detected in a child; `UnsupportedError` if torch can use none."""
    require("torch", "lightning")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # detects without opening CUDA
    is_open = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return query_device() if is_open else call_in_child(query_device)


def validate(
    plans: Sequence[TrainingPlan], *, results: Path, device: Device, resume: bool = False,
    timeout_s: float = 600.0, options: RunOptions | None = None,
    start: Callable[..., Child] | None = None, engine: str = "local", workers: int | None = None,
) -> list[Measurement]:  # fmt: skip
    """Run every plan, append its measured report to `results`, and return the reports in order.

    Plans for one GPU run at the same time, one per GPU. Plans for several GPUs, and those that hold
    much of the host's memory, run alone on a node. When all have ended, the file has the order of
    the plans.

    Args:
        plans: each with a label of its own.
        results: path of the JSON Lines file, with one report a line.
        device: GPU that is measured, the result of `detect_device`.
        resume: continue a file that holds results, skipping those.
        timeout_s: seconds for each single experiment; after them, it is ended as failed.
        options: whether weights are random or pretrained, the folder of the data set, and the
            folder for recordings of the allocator. None: random weights, synthetic data, no
            recordings.
        start: replaces `start_experiment`; None forks, or spawns where a fork is not possible.
        engine: where the experiments run: "local" (this machine), "ray" or "slurm".
        workers: experiments at a time; None is one per GPU.

    Raises:
        MemestError: two plans have the same label, a model is unknown, every plan needs a package
            that is missing, or `results` cannot be used. Also raised if a plan sets `beside`, the
            memory of other processes: a measured run is alone on its GPU.
    """
    _check_plans(plans)
    missing = [_missing_package(plan) for plan in plans]
    if missing and all(missing):
        require(*missing)
    completed = results_file.prepare(results, resume=resume)
    pending = [plan for plan in plans if not results_file.is_done(plan, completed)]
    options = options or RunOptions()
    if start is None and engine != "local":
        start = partial(start_experiment, is_copy=False)
    for plan in pending:
        resolve_config(plan.model_name, trust_remote_code=plan.trust_remote_code)
    measure = partial(
        _measure, logs=_log_folder(results.absolute()), device=device, timeout_s=timeout_s,
        options=options, start=start,
    )  # fmt: skip
    reports = {m.name: m for m in completed}

    def store(event: Event) -> None:
        if event.is_done:
            reports[event.label] = event.result
            results_file.append(results, event.result)

    with watched(store):
        for runner, members in _engines_and_plans(pending, engine, workers, device):
            runner.map(
                measure, members, label=lambda plan: plan.label,
                died=lambda plan, error: _failed_measurement(device, plan, str(error)),
            )  # fmt: skip
    with suppress(OSError):  # not there, or holds logs of failed runs
        _log_folder(results).rmdir()
    labels = [plan.label for plan in plans]
    results_file.sort(results, labels)
    return [reports[label] for label in labels]


def detect_on(engine: str) -> Device:
    """Return the GPU of a worker of `engine`, a name as in `memest.engines`."""
    if engine == "local":
        return detect_device()
    (result,) = find_engine(engine, 1, gpus=1).map(
        _detect, ["GPU"], died=lambda task, error: error, label=lambda task: "the check of the GPU"
    )
    if isinstance(result, MemestError):
        raise result
    return result


def _detect(task: str) -> Device:
    return detect_device()


def _engines_and_plans(
    plans: Sequence[TrainingPlan], engine: str, workers: int | None, device: Device
) -> Iterator[tuple[Engine, list[TrainingPlan]]]:
    """Yield pairs (engine, its plans), to be run in this order; arguments are as in `validate`."""
    if engine != "local":
        for num_gpus in sorted({plan.world_size for plan in plans}):
            members = [plan for plan in plans if plan.world_size == num_gpus]
            yield find_engine(engine, workers, gpus=num_gpus), members
        return
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    visible = names or [str(index) for index in range(device.num_devices)]
    num_workers = workers or len(visible)
    if num_workers > len(visible):
        raise PlanError(
            f"`--workers {workers}` is more than the {len(visible)} GPUs of this machine",
            hint="each experiment has a GPU of its own; leave `--workers` out",
        )
    if num_workers == 1:
        yield Local(workers=1), list(plans)
        return
    shared = [plan for plan in plans if not _is_alone(plan)]
    yield Local(workers=num_workers, visible=visible), shared
    yield Local(workers=1), [plan for plan in plans if _is_alone(plan)]


def _is_alone(plan: TrainingPlan) -> bool:
    return plan.is_distributed or plan.optim.startswith("paged_") or plan.offloads


def _check_plans(plans: Sequence[TrainingPlan]) -> None:
    labels: set[str] = set()
    for label in (plan.label for plan in plans):
        if label in labels:
            raise PlanError(f"two experiments are named `{label}`", hint="give each its own `name`")
        labels.add(label)
    for plan in plans:
        if plan.beside:
            raise PlanError(
                f"`beside` of `{plan.label}` cannot be measured: the run is alone on its GPU",
                hint="cap it with `memory_limit`",
            )


def _import_all(plan: TrainingPlan) -> bool:
    """Import modules of all experiments, and `plan`'s; return whether a fork can then open CUDA."""
    import transformers

    with _without_bitsandbytes():
        import memest.loops.data
        import memest.loops.lightning
        import memest.models_meta.assemble
        import memest.models_meta.sharding  # noqa: F401

    config = resolve_config(plan.model_name, trust_remote_code=plan.trust_remote_code)
    if config.architecture:
        getattr(transformers, config.architecture)
    is_open = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return not is_open and "bitsandbytes" not in sys.modules


@cache
def _reaches_gpu_by_fork() -> bool:
    """Return whether a fork can open CUDA; it cannot if an import has opened CUDA here."""
    try:
        call_in_child(query_device)
    except MemestError:
        return False
    return True


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Prevent an import of `bitsandbytes` in the block, as by peft 0.21: it opens the GPU."""
    name = "bitsandbytes"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _measure(
    plan: TrainingPlan, *, logs: Path, device: Device, timeout_s: float, options: RunOptions,
    start: Callable[..., Child] | None,
) -> Measurement:  # fmt: skip
    """Return the measurement of `plan`, run for at most `timeout_s`. If it fails, its output stays
    in the folder `logs`. `start` is as in `validate`."""
    refusal = _refusal(device, plan)
    if refusal:
        return _failed_measurement(device, plan, f"{SKIPPED}{refusal}")
    log = logs / f"{file_stem(plan.label)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if start is None:
        can_fork = CAN_FORK and _import_all(plan) and _reaches_gpu_by_fork()
        start = partial(start_experiment, is_copy=can_fork)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memest-") as folder:
        report = Path(folder, "report.json")
        child = start(plan, options, report=report, log=log)
        ending = _wait_for(child, timeout_s)
        measured = Measurement.read(report)
    if measured is not None:
        log.unlink(missing_ok=True)
        return measured
    note = f"{ending}: {_last_lines(log)} (log: {log.parent.name}/{log.name})"
    return _failed_measurement(device, plan, note, time.monotonic() - started)


def _wait_for(child: Child, timeout_s: float) -> str:
    """Wait at most `timeout_s` seconds for `child`, then kill it; return how it ended as text."""
    try:
        code = child.wait(timeout_s)
    finally:
        child.kill()
    if code is None:
        return f"ended after {timeout_s:g} s, the time limit"
    if code >= 0:
        return f"failed with exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def _refusal(device: Device, plan: TrainingPlan) -> str:
    """Return why `plan` cannot run on this machine, whose GPU is `device`; empty text if it can."""
    if plan.world_size > device.num_devices:
        return f"it needs {plan.world_size} GPUs, and the machine has {device.num_devices}"
    missing = _missing_package(plan)
    if missing:
        return f"it needs `{missing}` ({how_to_install(missing)})"
    try:
        needed_bytes = predicted_host_bytes(plan)
    except MemestError:
        return ""  # an unpredictable plan can still be measured
    machine_bytes = host_memory_bytes()
    if needed_bytes <= machine_bytes:
        return ""
    return (
        f"it holds {gib_or_mib(needed_bytes)} in host memory, "
        f"and the machine has {gib_or_mib(machine_bytes)}"
    )


def _missing_package(plan: TrainingPlan) -> str:
    attention = ["flash_attn"] if plan.attn_implementation == FLASH_ATTENTION_2 else []
    needed = [*packages_of(plan), *attention]
    return next((name for name in needed if not is_installed(name)), "")


def predicted_host_bytes(plan: TrainingPlan) -> int:
    """Return the predicted bytes of host memory; 0 without paged optimizer or offload."""
    if not (plan.optim.startswith("paged_") or plan.offloads):
        return 0
    return call_in_child(partial(_predict_host_bytes, plan))


def _predict_host_bytes(plan: TrainingPlan) -> int:
    from memest.estimator.predict import predict

    torch.set_num_threads(1)  # a fork has only the calling thread
    return predict(plan).host_bytes


def host_memory_bytes() -> int:
    """Return the bytes of host memory that this process can use; `sys.maxsize` on Windows.

    This is the machine's memory or, if smaller, the limit of a Linux control group.
    """
    limits = [sys.maxsize]
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or the limit is `max`
            continue
    return min(limits)


def _failed_measurement(
    device: Device, plan: TrainingPlan, note: str, elapsed_s: float = 0.0
) -> Measurement:
    return Measurement(
        name=plan.label, plan=plan.to_dict(), model={}, gpu=device.catalogue_name,
        peak_allocated_bytes=0, peak_reserved_bytes=0, process_bytes=0, host_bytes=0, phases=(),
        verdict=Outcome.FAILED, versions=measured_versions(), elapsed_s=round(elapsed_s, 3),
        device=device.to_dict(), context_bytes=0, note=note,
    )  # fmt: skip


def _log_folder(results: Path) -> Path:
    return results.with_name(f"{results.stem}.logs")


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "no log"
    last = [line.strip()[:300] for line in lines if line.strip()][-LOG_LINES:]
    return " | ".join(last) or "no output"
