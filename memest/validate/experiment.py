"""One plan, run for real in this process: the model on the GPU, Lightning, the four phases."""

from __future__ import annotations

import gc
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memest.errors import MemestError
from memest.loops.job import Job, Listener, RunOptions, run_job
from memest.loops.probe import CudaMemory, PhaseRecorder
from memest.plan import TrainingPlan
from memest.report import Measurement, Outcome
from memest.validate import host
from memest.validate.device import (
    Device,
    device_used_bytes,
    library_versions,
    process_figures,
    query_device,
)
from memest.validate.snapshot import count_events, file_stem, start_recording, write_recording

_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""How CUDA's libraries say what `torch.OutOfMemoryError` says, when their own allocation fails."""


@dataclass(slots=True)
class _Run:
    """What is known of a run so far; enough for a report at any moment."""

    job: Job
    device: Device
    used_before: int | None
    started: float
    rank: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Of host memory; taken where the plan is distributed."""

    marks: list[int] = field(default_factory=list)
    """Events of the allocator before each row, where they are recorded."""

    setup: dict[str, int] = field(default_factory=dict)
    """Peaks of building and dividing the model, which are no part of the training's."""

    @property
    def plan(self) -> TrainingPlan:
        """What is run."""
        return self.job.plan

    @property
    def recorder(self) -> PhaseRecorder:
        """What reads the phases."""
        return self.job.recorder

    def sample(self, moment: str) -> None:
        if self.plan.is_distributed:
            self.samples.append(host.sample(moment, of_cuda=moment != "the start"))

    def begin_training(self) -> None:
        """The strategy has divided the model: peaks count from here, on an empty cache."""
        import torch

        self.recorder.note_peaks()
        self.setup = {
            "setup_peak_allocated_bytes": self.recorder.peak_allocated_bytes,
            "setup_peak_reserved_bytes": self.recorder.peak_reserved_bytes,
        }
        self.recorder.peak_allocated_bytes = self.recorder.peak_reserved_bytes = 0
        gc.collect()
        if self.recorder.memory.device_type == "cuda":
            torch.cuda.empty_cache()
        self.recorder.start()
        self.sample(host.AFTER_SETUP)

    def report(self, verdict: Outcome, note: str = "") -> Measurement:
        now = self.recorder.note_peaks()
        figures = process_figures(self.used_before, self.rank)
        source, held = next(iter(figures.items()))
        context = held - now.reserved_bytes
        options = self.job.options
        notes = self.job.data_notes
        host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.plan.is_distributed:
            self.sample("the end")
            host_bytes = host.held_bytes(self.samples)
        return Measurement(
            name=self.plan.label,
            plan=self.job.values or self.plan.to_dict(),
            model=self.job.model,
            gpu=self.device.catalogue_name,
            peak_allocated_bytes=self.recorder.peak_allocated_bytes,
            peak_reserved_bytes=self.recorder.peak_reserved_bytes,
            process_bytes=self.recorder.peak_reserved_bytes + context,
            host_bytes=host_bytes,
            phases=tuple(self.recorder.rows),
            verdict=verdict,
            versions=library_versions(),
            elapsed_s=round(time.perf_counter() - self.started, 3),
            device={
                **self.device.to_dict(),
                "process_source": source,
                "process_figures": figures,
                "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
                or os.environ.get("PYTORCH_ALLOC_CONF", ""),
                "weights": options.weights,
                "data": str(options.data) if options.data else "synthetic",
                **({"rank": self.rank} if self.plan.is_distributed else {}),
                **self.setup,
                **({"host_samples": host.explaining(self.samples)} if self.samples else {}),
                **({"event_marks": self.marks} if self.marks else {}),
            },
            context_bytes=context,
            note="; ".join([note, *notes] if note else notes),
        )


def run_experiment(
    plan: TrainingPlan, options: RunOptions, deliver: Callable[[Measurement], Any]
) -> None:
    """Train for the plan's steps on one CUDA device and hand the report to `deliver`.

    The device is the first, or that of `LOCAL_RANK` where this process is a rank of several. The
    recording of the allocator is that of rank 0.

    `deliver` is called once, before Lightning's teardown copies the model to the host, so a
    `deliver` that leaves the process spares that. Out of memory is a verdict; every other error is
    raised.
    """
    if plan.alloc_conf:
        import torch

        os.environ["PYTORCH_ALLOC_CONF"] = plan.alloc_conf
        torch.cuda.memory._set_allocator_settings(plan.alloc_conf)
    rank = int(os.environ["LOCAL_RANK"]) if plan.is_distributed else 0
    used_before = device_used_bytes(rank)
    started = time.perf_counter()
    recorder = PhaseRecorder(CudaMemory(), plan.accumulate_grad_batches)
    at_start = [host.sample("the start")] if plan.is_distributed else []
    device = query_device(rank)
    if plan.is_distributed:
        _open_device(rank, plan.world_size)
    job = Job(plan, recorder, Listener(on_end=lambda: None), options)
    run = _Run(job, device, used_before, started, rank=rank, samples=at_start)
    run.sample("after CUDA's start")
    limit_memory(plan.memory_limit, device.memory_bytes, rank)
    if options.snapshots is not None and rank == 0:
        deliver = _recorded(run, options.snapshots / f"{file_stem(plan.label)}.npy.gz", deliver)
    execute(run, where=f"cuda:{rank}", deliver=deliver)


def _open_device(rank: int, num_ranks: int) -> None:
    """The rank's own GPU, and its share of the cores: DeepSpeed's Adam runs on them."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    torch.cuda.set_device(rank)
    torch.cuda.synchronize()  # opens the context


def _recorded(
    run: _Run, path: Path, deliver: Callable[[Measurement], Any]
) -> Callable[[Measurement], Any]:
    """`deliver`, with the allocator recorded from here to there, and its events at each row."""
    start_recording()
    run.recorder.on_row = lambda: run.marks.append(count_events())

    def write_and_deliver(measurement: Measurement) -> None:
        write_recording(path)
        deliver(measurement)

    return write_and_deliver


def execute(
    run: _Run, *, where: str, deliver: Callable[[Measurement], Any], accelerator: str = "gpu"
) -> None:
    """Build and train on the device `where`; the core of `run_experiment`, which a CPU can run."""
    delivered: list[BaseException | None] = []

    def on_end() -> None:
        if run.plan.is_distributed and accelerator == "gpu":
            import torch

            torch.cuda.synchronize()  # others still wait for this rank's kernels
        measured = run.report(Outcome.FITS)
        delivered.append(None)
        deliver(measured)

    def on_error(error: BaseException) -> None:
        if not delivered and is_out_of_memory(error):
            delivered.append(error)
            traceback.print_exception(error, file=sys.stderr)
            deliver(run.report(Outcome.OOM, _first_line(error)))

    run.job.listener = _listener(run, on_end, on_error)
    run.job.where, run.job.accelerator = where, accelerator
    try:
        run.sample(host.BEFORE_MODEL)
        run_job(run.job)
    except Exception as error:
        on_error(error)
        if not delivered:
            raise


def _listener(
    run: _Run, on_end: Callable[[], None], on_error: Callable[[BaseException], None]
) -> Listener:
    if not run.plan.is_distributed:
        return Listener(on_end=on_end, on_error=on_error)
    return Listener(
        on_end=on_end,
        on_error=on_error,
        on_ready=run.begin_training,
        on_step=lambda: run.sample("after a micro-batch"),
        on_model=lambda model: run.sample("after the model"),
    )


def limit_memory(limit_bytes: int | None, total_bytes: int, index: int = 0) -> None:
    """Cap what the caching allocator reserves; a limit of all that the device has is none."""
    if limit_bytes is None or limit_bytes >= total_bytes:
        return
    import torch

    torch.cuda.set_per_process_memory_fraction(memory_fraction(limit_bytes, total_bytes), index)


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """The fraction whose product with `total_bytes`, cut to a whole number, is `limit_bytes`.

    >>> int(memory_fraction(80 * 2**30, 143155 * 2**20) * 143155 * 2**20) == 80 * 2**30
    True
    """
    fraction = limit_bytes / total_bytes
    while int(fraction * total_bytes) < limit_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU's memory, and not something else, was at an end."""
    if isinstance(error, MemestError):
        return False
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or any(t in text for t in _OUT_OF_MEMORY)


def _first_line(error: BaseException) -> str:
    """The message on one line, cut where it repeats advice."""
    return " ".join(str(error).split())[:400] or type(error).__name__
