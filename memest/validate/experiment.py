"""One plan, run for real in this process: the model on the GPU, Lightning, the four phases.

The report also has the machine: its GPU, driver and libraries, and the memory of the process.
"""

import gc
import gzip
import io
import math
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memest.errors import MemestError, UnsupportedError
from memest.estimator.hardware.gpus import match_device
from memest.estimator.versions import installed_versions
from memest.loops.job import Job, Listener, RunOptions, run_job
from memest.loops.probe import CudaMemory, PhaseRecorder
from memest.packages import with_nvml
from memest.plan import TrainingPlan
from memest.report import Measurement, Outcome, Phase
from memest.writing import write_whole

_PACKAGES = (
    "torch", "transformers", "lightning", "peft", "bitsandbytes", "accelerate", "deepspeed",
    "flash_attn",
)  # fmt: skip
BEFORE_MODEL = "before the model"
AFTER_SETUP = "after the strategy's setup"
ACTIONS = {
    "alloc": 0, "free_completed": 1, "segment_alloc": 2, "segment_free": 3, "free_requested": 4,
}  # fmt: skip
"""Number of each action in a recording. `free_requested` marks a free that other streams defer."""

MAX_ENTRIES = 4_000_000  # number of events above which torch drops the oldest
_OOM_MESSAGES = (
    "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""Messages of CUDA's libraries when their own allocation fails, like `torch.OutOfMemoryError`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Facts about a CUDA device, from its driver."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_sms: int
    driver: str
    num_devices: int = 1  # devices of the machine, as CUDA reports them

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values for reports."""
        return {**asdict(self), "capability": list(self.capability)}

    @property
    def catalogue_name(self) -> str:
        """Name in the catalogue, or the driver's name if the catalogue lacks the GPU."""
        gpu = match_device(self.name, self.memory_bytes)
        return self.name if gpu is None else gpu.name


def query_device(index: int = 0) -> Device:
    """Open the CUDA device `index` and return its facts; `UnsupportedError` without one."""
    elsewhere = "run it on a machine with an NVIDIA GPU; `memest predict` needs none"
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"torch {torch.__version__} is built without CUDA",
            hint="install a CUDA build of torch (https://pytorch.org/get-started/locally)",
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split())[:300]
        if "driver" in text and "old" in text:
            raise UnsupportedError(
                f"the NVIDIA driver is too old for torch {torch.__version__}: {text}",
                hint="update the driver, or install a torch built for an older CUDA",
            ) from error
        raise UnsupportedError(f"no CUDA device can be used: {text}", hint=elsewhere) from error
    return Device(
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        driver=with_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion())) or "unknown",
        num_devices=torch.cuda.device_count(),
    )


def measured_versions() -> dict[str, str]:
    """Return versions of memest, of the libraries that affect memory, and of CUDA."""
    return installed_versions(*_PACKAGES) | {"cuda": str(torch.version.cuda)}


def device_used_bytes(index: int) -> int | None:
    """Return bytes in use on GPU `index` by all processes, read without CUDA; None without NVML."""
    return with_nvml(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(_nvml_handle(nvml, index)).used))


def device_clock_mhz(index: int) -> int | None:
    """Return the current SM clock of GPU `index` in MHz; None without NVML."""
    return with_nvml(
        lambda nvml: int(nvml.nvmlDeviceGetClockInfo(_nvml_handle(nvml, index), nvml.NVML_CLOCK_SM))
    )


def process_figures(used_before: int | None, index: int) -> dict[str, int]:
    """Return this process's bytes on GPU `index` by source, the most reliable source first. The
    first source is NVML's figure of the process, if NVML has one. The next is the growth of the
    used memory since `used_before`. `used_before` is what NVML gave as used before CUDA was opened;
    None leaves this source out. The last, always there, is all memory that is not free."""
    figures: dict[str, int] = {}
    own_bytes = with_nvml(lambda nvml: _process_bytes(nvml, index))
    if own_bytes:
        figures["NVML, this process"] = own_bytes
    used_bytes = device_used_bytes(index)
    if used_bytes is not None and used_before is not None:
        figures["NVML, device now less before"] = used_bytes - used_before
    free, total = torch.cuda.mem_get_info(index)
    figures["cudaMemGetInfo, total less free"] = total - free
    return figures


def _process_bytes(nvml: Any, index: int) -> int | None:
    """Return the bytes that NVML gives for this process on GPU `index`; None if unknown. A
    container may hide the process's id: the only process on the GPU is then taken for this one."""
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(_nvml_handle(nvml, index))
    own = [process for process in processes if process.pid == os.getpid()] or processes
    if len(own) != 1 or own[0].usedGpuMemory is None:
        return None
    return int(own[0].usedGpuMemory)


def _nvml_handle(nvml: Any, index: int) -> Any:
    """Return NVML's handle of the device that CUDA calls `index`, under `CUDA_VISIBLE_DEVICES`."""
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    device = visible[index] if any(visible) and index < len(visible) else str(index)
    if device.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    return nvml.nvmlDeviceGetHandleByUUID(device)


def sample_host(moment: str) -> dict[str, Any]:
    """Return a sample: host memory in bytes by name, and `moment`, a name for the time.

    `RssAnon` and `RssShmem` are of this process. `pinned_allocated` is torch's pinned memory, which
    they may not include; it is there only if CUDA is open. `MemAvailable` is of the machine.
    """
    of_process = _read_proc("/proc/self/status", ("RssAnon", "RssShmem"))
    of_machine = _read_proc("/proc/meminfo", ("MemAvailable",))
    return {"moment": moment, **of_process, **_pinned_bytes(), **of_machine}


def _peak_host_bytes() -> int:
    """Return the highest resident memory of this process; 0 on Windows, where it is not read."""
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def held_bytes(samples: Sequence[dict[str, Any]]) -> int:
    """Return how far this process's host memory grew, at most, since before the model.

        max(own(s) for s in samples) - own(sample with the moment `BEFORE_MODEL`)
        own(s) = RssAnon + max(RssShmem, pinned_allocated)

    Pages of files are left out, since ranks share them. Libraries take 0.8 to 1.4 GiB of such pages
    in each rank, by a measurement without tensors on the host.
    """
    before = next((s for s in samples if s["moment"] == BEFORE_MODEL), {})
    return max(map(_own_bytes, samples), default=0) - _own_bytes(before)


def explaining(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return up to three of `samples` to report: before the model, after setup, the highest."""
    if not samples:
        return []
    by_moment = {s["moment"]: s for s in reversed(samples)}  # the first sample of each moment
    highest = max(samples, key=_own_bytes)
    selection = [by_moment[m] for m in (BEFORE_MODEL, AFTER_SETUP) if m in by_moment]
    if not any(sample is highest for sample in selection):
        selection.append(highest)
    return selection


def _own_bytes(sample: dict[str, Any]) -> int:
    pinned: int = max(sample.get("RssShmem", 0), sample.get("pinned_allocated", 0))
    return pinned + int(sample.get("RssAnon", 0))


def _read_proc(path: str, keys: Sequence[str]) -> dict[str, int]:
    """Return {key: bytes} of lines such as `RssAnon: 2048 kB` in `path`; {} without the file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key: int(value.split()[0]) * 1024 for key, value in pairs if key in keys}


def _pinned_bytes() -> dict[str, int]:
    read_stats = getattr(torch.cuda, "host_memory_stats", None)
    if read_stats is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    num_bytes = read_stats().get("allocated_bytes.current")
    return {} if num_bytes is None else {"pinned_allocated": int(num_bytes)}


def file_stem(label: str) -> str:
    """Return a file name for the experiment `label`.

    >>> file_stem("opt-2.7b accumulation, lr x4")
    'opt-2.7b-accumulation-lr-x4'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:80] or "experiment"


def write_recording(path: Path) -> None:
    """Write the allocator's events so far to `path`: the array of `event_table`, gzipped.

    PyTorch's own snapshot (<https://pytorch.org/memory_viz>) is written next to it as `.pickle`.
    """
    snapshot = torch.cuda.memory._snapshot()
    trace = snapshot["device_traces"][torch.cuda.current_device()]
    path.parent.mkdir(parents=True, exist_ok=True)
    table = io.BytesIO()
    with gzip.GzipFile(fileobj=table, mode="wb", mtime=0) as file:
        np.save(file, event_table(trace), allow_pickle=False)
    write_whole(path, table.getvalue())
    write_whole(snapshot_path(path), pickle.dumps(snapshot, protocol=4))


def snapshot_path(path: Path) -> Path:
    """Return the path of PyTorch's snapshot next to the recording `path`.

    >>> snapshot_path(Path("runs/gpt2-fp32.npy.gz")).name
    'gpt2-fp32.pickle'
    """
    return path.with_name(f"{path.name.removesuffix('.npy.gz')}.pickle")


def count_events() -> int:
    """Return the number of the allocator's events so far. The call is slow."""
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    return sum(event["action"] in ACTIONS for event in trace)


def event_table(trace: Iterable[Mapping[str, Any]]) -> npt.NDArray[np.int64]:
    """Return the events of `trace`, a device's list in PyTorch's snapshot, as an array of 4 rows.

    A column is an event: action (a number of `ACTIONS`), address minus the lowest one, bytes, and
    stream, numbered in order of appearance. Older recordings have 3 rows, without streams, and no
    action `free_requested`.

    >>> event_table([{"action": "segment_alloc", "addr": 512, "size": 2048},
    ...              {"action": "alloc", "addr": 1024, "size": 100, "stream": 7}]).tolist()
    [[2, 0], [0, 512], [2048, 100], [0, 1]]
    """
    events = [e for e in trace if e["action"] in ACTIONS]
    lowest = min((e["addr"] for e in events), default=0)
    streams: dict[int, int] = {}
    rows = []
    for event in events:
        stream = streams.setdefault(event.get("stream", 0), len(streams))
        rows.append((ACTIONS[event["action"]], event["addr"] - lowest, event["size"], stream))
    return np.array(rows, dtype=np.int64).reshape(-1, 4).T  # also for no events


@dataclass(slots=True)
class _Run:
    """State of a running experiment, from which a report can be made at any moment. `started` and
    `ends` are seconds of `time.perf_counter`."""

    job: Job
    device: Device
    used_before: int | None  # bytes in use on the GPU before CUDA was opened
    started: float
    ends: list[float] = field(default_factory=list)  # ends of the steps' kernels
    rank: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)  # host memory, several GPUs
    marks: list[int] = field(default_factory=list)  # allocator events before each row
    setup: dict[str, int] = field(default_factory=dict)  # peaks of building the model

    @property
    def plan(self) -> TrainingPlan:
        """The plan of the run."""
        return self.job.plan

    @property
    def recorder(self) -> PhaseRecorder:
        """Recorder of the memory at each phase of a step."""
        return self.job.recorder

    def note_end_of_step(self) -> None:
        """Wait for the kernels if a step is complete, and record the time at which they ended."""
        if self.recorder.rows[-1].phase is Phase.AFTER_OPTIMIZER_STEP:
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    def sample(self, moment: str) -> None:
        if self.plan.is_distributed:
            self.samples.append(sample_host(moment))

    def begin_training(self) -> None:
        """Separate the memory of training from that of the setup, on several GPUs; else do nothing.
        Store the peaks so far in `setup` and reset them. Then empty torch's cache."""
        if not self.plan.is_distributed:
            return
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
        self.sample(AFTER_SETUP)

    def report(self, verdict: Outcome, note: str = "") -> Measurement:
        clock = device_clock_mhz(self.rank)
        reading = self.recorder.note_peaks()
        figures = process_figures(self.used_before, self.rank)
        source, process_bytes = next(iter(figures.items()))
        context = process_bytes - reading.reserved_bytes
        options = self.job.options
        notes = self.job.data_notes
        host_bytes = _peak_host_bytes()
        if self.plan.is_distributed:
            self.sample("the end")
            host_bytes = held_bytes(self.samples)
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
            versions=measured_versions(),
            elapsed_s=round(time.perf_counter() - self.started, 3),
            device={
                **self.device.to_dict(),
                **({"sm_clock_mhz": clock} if clock else {}),
                "process_source": source,
                "process_figures": figures,
                "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
                or os.environ.get("PYTORCH_ALLOC_CONF", ""),
                "weights": options.weights,
                "data": str(options.data) if options.data else "synthetic",
                **({"rank": self.rank} if self.plan.is_distributed else {}),
                **self.setup,
                **({"host_samples": explaining(self.samples)} if self.samples else {}),
                **({"event_marks": self.marks} if self.marks else {}),
            },
            context_bytes=context,
            step_seconds=tuple(round(b - a, 6) for a, b in pairwise(self.ends)),
            note="; ".join([note, *notes] if note else notes),
        )


def run_experiment(
    plan: TrainingPlan, options: RunOptions, deliver: Callable[[Measurement], Any]
) -> None:
    """Train for the plan's steps on the GPU of this rank, and pass the report to `deliver`.

    `deliver` is called once, before Lightning's teardown copies the model to the host. Running out
    of memory is a verdict; every other error is raised. Only rank 0 records the allocator.
    """
    if plan.alloc_conf:
        os.environ["PYTORCH_ALLOC_CONF"] = plan.alloc_conf
        torch.cuda.memory._set_allocator_settings(plan.alloc_conf)
    rank = int(os.environ["LOCAL_RANK"]) if plan.is_distributed else 0
    used_before = device_used_bytes(rank)
    started = time.perf_counter()
    recorder = PhaseRecorder(CudaMemory(), plan.accumulate_grad_batches)
    samples = [sample_host("the start")] if plan.is_distributed else []
    device = query_device(rank)
    if plan.is_distributed:  # with the rank's share of the cores, for DeepSpeed's Adam
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.world_size))
        torch.cuda.set_device(rank)
        torch.cuda.synchronize()  # opens the context
    job = Job(plan, recorder, Listener(on_end=lambda: None), options)
    run = _Run(job, device, used_before, started, rank=rank, samples=samples)
    recorder.on_row = run.note_end_of_step
    run.sample("after CUDA's start")
    if plan.memory_limit is not None and plan.memory_limit < device.memory_bytes:
        fraction = memory_fraction(plan.memory_limit, device.memory_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, rank)
    if options.snapshots is not None and rank == 0:
        path = options.snapshots / f"{file_stem(plan.label)}.npy.gz"
        deliver = _record_events(run, path, deliver)
    execute(run, where=f"cuda:{rank}", deliver=deliver)


def _record_events(
    run: _Run, path: Path, deliver: Callable[[Measurement], Any]
) -> Callable[[Measurement], Any]:
    """Begin to record the allocator's events, and return `deliver` with a first step added. That
    step writes the events to `path`. From now on, `run.marks` gets the number of events so far at
    each phase. Call this function before the model is built."""
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=MAX_ENTRIES
    )
    run.recorder.on_row = lambda: run.marks.append(count_events())

    def write_and_deliver(measurement: Measurement) -> None:
        write_recording(path)
        deliver(measurement)

    return write_and_deliver


def execute(
    run: _Run, *, where: str, deliver: Callable[[Measurement], Any], accelerator: str = "gpu"
) -> None:
    """Train on the device `where`, such as `cuda:0`; pass the report to `deliver` at the end or
    when out of memory. `accelerator` is Lightning's name of the device's kind."""
    delivered: list[BaseException | None] = []

    def on_end() -> None:
        if run.plan.is_distributed and accelerator == "gpu":
            torch.cuda.synchronize()  # other ranks wait for this rank's kernels
        measurement = run.report(Outcome.FITS)
        delivered.append(None)
        deliver(measurement)

    def on_error(error: BaseException) -> None:
        if not delivered and is_out_of_memory(error):
            delivered.append(error)
            traceback.print_exception(error, file=sys.stderr)
            note = " ".join(str(error).split())[:400]  # the rest repeats advice
            deliver(run.report(Outcome.OOM, note or type(error).__name__))

    run.job.listener = Listener(
        on_end=on_end, on_error=on_error, on_ready=run.begin_training,
        on_step=lambda: run.sample("after a micro-batch"),
        on_model=lambda model: run.sample("after the model"),
    )  # fmt: skip
    run.job.where, run.job.accelerator = where, accelerator
    try:
        run.sample(BEFORE_MODEL)
        run_job(run.job)
    except Exception as error:
        on_error(error)
        if not delivered:
            raise


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """Return the fraction for `torch.cuda.set_per_process_memory_fraction`, so that torch's limit
    is exactly `limit_bytes`. Torch multiplies the fraction by `total_bytes` and rounds down.

    >>> int(memory_fraction(80 * 2**30, 143155 * 2**20) * 143155 * 2**20) == 80 * 2**30
    True
    """
    fraction = limit_bytes / total_bytes
    while int(fraction * total_bytes) < limit_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that the GPU ran out of memory."""
    if isinstance(error, MemestError):
        return False
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or any(m in text for m in _OOM_MESSAGES)
