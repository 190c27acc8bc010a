"""Run of a plan's own training loop on a virtual GPU without a memory limit, logged as a program.

Of a step's micro-batches the first, the last and one from the middle run; the others repeat these
(`program`). Replays of the program apply real limits.
"""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn

from memest.errors import MemestError, PlanError, TraceError, UnsupportedError
from memest.estimator.allocator.settings import DEFAULT
from memest.estimator.gpu.worlds import Rank
from memest.estimator.hardware.gpus import Gpu, libraries_bytes
from memest.estimator.hardware.work import CUT
from memest.estimator.ops.attention import check_gpu
from memest.estimator.replay.call_log import CallRecorder
from memest.estimator.replay.repeat import StepRepeater
from memest.estimator.replay.replay import (
    Part,
    Program,
    StateBytes,
    TracedPlan,
    find_renames,
    within_model,
)
from memest.estimator.tensors.lines import ScriptLines
from memest.estimator.tensors.storages import MemKind, StorageTable
from memest.estimator.torch_api.distributed.ddp import NotFinished
from memest.estimator.virtual_gpu import GRADS_LIVE_ON, VirtualGpu
from memest.loops.job import Job, Listener, run_job
from memest.loops.probe import CudaMemory, PhaseRecorder
from memest.models_meta.assemble import sequence_length
from memest.models_meta.geometry import LayerGeometry, layer_geometry
from memest.models_meta.quantized import ASSUMPTION, quant_state_tensors
from memest.models_meta.registry import ModelConfig, quiet_transformers, resolve_config
from memest.plan import TrainingPlan
from memest.plan.keys import FLASH_ATTENTION_2
from memest.report import Phase, PhaseRow, Term
from memest.units import counted

UNLIMITED_BYTES = 1 << 50  # memory of a GPU that no plan fills
MAX_STEPS = 2  # steps that differ: the first one allocates the optimizer's state
MAX_STEPS_OF_STRATEGY = 3  # steps that differ: optimizer state first, then rebuilt buckets
MAX_MICRO_BATCHES = 2  # micro-batches that differ: one allocates gradients, one adds to them
MAX_MICRO_BATCHES_APART = 3
"""Simulated micro-batches of a step if its last differs from the others. A strategy sums gradients
over the GPUs in the last one only. The Trainer of transformers loads all batches of a step at once
and frees them one by one."""


def canonical(plan: TrainingPlan) -> TrainingPlan:
    """Return `plan` with only what affects its program, a cache key that similar plans share."""
    plan = replace(  # without keys that affect the replay alone
        plan, name="", gpu=(), gpu_memory=None, memory_limit=None, host_memory=None, alloc_conf=""
    )
    if _is_whole(plan):
        return plan
    steps = min(plan.steps, MAX_STEPS_OF_STRATEGY) if plan.is_distributed else MAX_STEPS
    count = plan.accumulate_grad_batches if plan.loop == "transformers" else _num_run(plan)
    return replace(plan, steps=steps, accumulate_grad_batches=count)


def repeats_micro_batches(plan: TrainingPlan) -> bool:
    """Return whether all micro-batches of a step, except the first, make equal allocator events.
    The optimizer's step, which follows the last micro-batch, is not compared."""
    return not (_is_whole(plan) or plan.is_distributed or plan.loop == "transformers")


def _num_run(plan: TrainingPlan) -> int:
    limit = MAX_MICRO_BATCHES if repeats_micro_batches(plan) else MAX_MICRO_BATCHES_APART
    return min(plan.accumulate_grad_batches, limit)


def _is_whole(plan: TrainingPlan) -> bool:
    """Return whether every step has to be simulated: batches differ, or the plan has validation."""
    return plan.validates or bool(plan.lengths)


def shortened(plan: TrainingPlan) -> tuple[TrainingPlan, int]:
    """Return (`plan` with the steps and micro-batches to simulate, number of micro-batches per step
    that are left out)."""
    plan = canonical(plan)
    if _is_whole(plan):
        return plan, 0
    num_run = _num_run(plan)
    return replace(plan, accumulate_grad_batches=num_run), plan.accumulate_grad_batches - num_run


def model_failure(plan: TrainingPlan, model: nn.Module | None, error: Exception) -> TraceError:
    """Return an error that names the innermost module of `model` whose code raised `error`. It
    names the plan's model if no module is found, or if `model` is None."""
    names = {} if model is None else {id(m): name for name, m in model.named_modules()}
    module_name, traceback = "", error.__traceback__
    while traceback is not None:
        module_name = names.get(id(traceback.tb_frame.f_locals.get("self")), module_name)
        traceback = traceback.tb_next
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return TraceError(
        f"`{module_name or plan.model_name}` fails: {first_line}",
        hint="a GPU would most likely fail too; if not, memest cannot predict this plan",
    )


def elements_by_dtype(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return {dtype such as `bfloat16`: number of elements of all `tensors` of this dtype}."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return dict(counts)


class NoLines(ScriptLines):
    """Stub of `ScriptLines`, the finder of a script's running line, for a run without a script."""

    def frame(self, frame: Any = None) -> None:
        """Return None, whatever `frame` is: a plan has no script."""
        return

    def current(self) -> str:
        """Return "", since there is no script."""
        return ""


@dataclass(slots=True)
class _TrainingCallbacks:
    """Callbacks of a plan's training loop, which collect the parts of `run_plan`'s result: phases,
    numbers of elements, host memory and the shape of a layer."""

    virtual: VirtualGpu
    config: ModelConfig
    calls: CallRecorder | None
    job: Any = None
    model: Any = None
    num_setup: int = 0
    num_storages: int = 0
    rows: list[tuple[int, PhaseRow]] = field(default_factory=list)  # with the events before each
    param_groups: dict[str, dict[str, int]] = field(default_factory=dict)
    host_bytes: int = 0
    host_terms: tuple[Term, ...] = ()
    geometry: LayerGeometry | None = None

    def _cut(self) -> int:
        """End a section (`Span`) of the log of operator calls. Return the number of allocator
        events so far."""
        mode = self.virtual.mode
        mode.memory.settle()
        if self.calls is not None:
            self.calls.cut()
        self.num_storages = len(mode.memory.storages.num_bytes)
        return len(mode.memory.log.events)

    def training_starts(self) -> None:
        """Mark the end of the setup in the log: the model is wrapped and the cache is empty."""
        self.virtual.mode.attribution.has_started = True
        del self.virtual.mode.work.events[:]
        self.virtual.mode.work.has_host = False
        self.num_setup = self._cut()

    def model_built(self, model: nn.Module) -> None:
        """Store `model`, and label the scales of its quantised weights as buffers."""
        self.model = model
        mode = self.virtual.mode
        for tensor in quant_state_tensors(model):
            mode.memory.label(tensor, MemKind.BUFFERS)

    def model_wrapped(self) -> None:
        """If the plan has a strategy for several GPUs, empty the cache and start to record
        phases."""
        if self.job.plan.is_distributed:
            gc.collect()
            torch.cuda.empty_cache()
            self.job.recorder.start()

    def probe_read(self) -> None:
        """Store the newest row of `PhaseRecorder`, with the number of allocator events so far.
        `PhaseRecorder` reads the memory at the end of each phase, such as a forward. It adds a row,
        and then calls this function. After a backward, also store the number of elements of the
        gradients."""
        row = self.job.recorder.rows[-1]
        self.rows.append((self._cut(), row))
        if row.phase is Phase.AFTER_BACKWARD:
            self.virtual.mode.work.events.append(CUT)
            self.param_groups["grads"] = elements_by_dtype(self.job.recorder.states.grads())

    def steps_done(self) -> None:
        """Store what the report needs, after the last step and before tensors are freed. That is
        the elements of each dtype, the bytes on the host, and the shape of a layer."""
        states = self.job.recorder.states
        tensors = list({id(t): t for t in states.optimizer()}.values())
        gpu_tensors = [t for t in tensors if t.device.type == "cuda"]
        self.param_groups["params"] = elements_by_dtype(states.params())
        self.param_groups["optimizer"] = elements_by_dtype(gpu_tensors)
        self.host_bytes = sum(t.nbytes for t in tensors if hasattr(t, "is_paged"))
        if self.job.plan.offloads:
            self.host_terms = tuple(_host_terms(self.virtual.mode.host.held()))
        self.geometry = layer_geometry(self.model, self.config)
        self.virtual.mode.attribution.label_models()


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector until the block ends, so that equal plans run equally.
    Reference cycles that the run leaves, such as its model, are collected when the block ends."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@without_gc()
def run_plan(
    plan: TrainingPlan, gpu: Gpu, *, num_ahead: int = 0, rank: Rank | None = None,
    records_calls: bool = False,
) -> TracedPlan:  # fmt: skip
    """Simulate all steps of `plan` and return its program; `shortened` makes a long plan short.

    Args:
        plan: plan to run.
        gpu: GPU whose kernels run.
        num_ahead: micro-batches per step that are loaded but not run, since `shortened` left them
            out. The Trainer of transformers puts all batches of a step on the GPU at once.
        rank: rank to simulate; None is rank 0.
        records_calls: whether operator calls are logged, in `calls` of the result.
    """
    config = resolve_config(plan.model_name, trust_remote_code=plan.trust_remote_code)
    seq_len = sequence_length(plan, config)
    if plan.attn_implementation == FLASH_ATTENTION_2:
        check_gpu(gpu)
    rank = rank or rank_of(plan)
    virtual = VirtualGpu(
        gpu, limit_bytes=UNLIMITED_BYTES, lines=NoLines(), rank=rank, settings=DEFAULT
    )
    calls = CallRecorder(virtual.mode) if records_calls else None
    watch = _TrainingCallbacks(virtual, config, calls)
    recorder = PhaseRecorder(CudaMemory(), plan.accumulate_grad_batches)
    recorder.on_start, recorder.on_row = watch.training_starts, watch.probe_read
    watch.job = job = Job(
        plan, recorder,
        Listener(on_end=watch.steps_done, on_model=watch.model_built, on_ready=watch.model_wrapped),
        is_alone=True, num_ahead=num_ahead, rank=rank.rank, where=f"cuda:{rank.local_rank}",
    )  # fmt: skip
    with nullcontext() if calls is None else calls.watching():
        _run(job, virtual, watch)
    return TracedPlan(
        program=_program(watch), model=job.model, param_groups=watch.param_groups,
        host_bytes=watch.host_bytes, host_terms=watch.host_terms, notes=tuple(_notes(watch)),
        seq_len=seq_len, image_size=job.values["image_size"],
        libraries_bytes=libraries_bytes(plan), geometry=watch.geometry, work=virtual.mode.work,
        calls=None if calls is None else calls.calls,
    )  # fmt: skip


def logged_trace(plan: TrainingPlan, gpu: Gpu) -> TracedPlan:
    """Simulate the `shortened` plan on `gpu`; the result includes a log of its operator calls."""
    plan, num_ahead = shortened(plan)
    return run_plan(plan, gpu, num_ahead=num_ahead, records_calls=True)


def rank_of(plan: TrainingPlan) -> Rank:
    """Return rank 0 of `plan`, with the number of all ranks and of those on one host."""
    return Rank(world_size=plan.world_size, num_local=plan.devices)


def _run(job: Job, virtual: VirtualGpu, watch: _TrainingCallbacks) -> None:
    try:
        repeating: AbstractContextManager[None] = nullcontext()
        if not (_is_whole(job.plan) or job.plan.is_distributed):  # later steps repeat the first
            repeater = StepRepeater(virtual, watch.calls, job.plan.accumulate_grad_batches)
            job.loss_of, repeating = repeater.loss_of, repeater.watching()
        with _environment_restored(), _without_messages(), compiling_late(), repeating, virtual:
            run_job(job)
    except MemestError:
        raise
    except NotFinished as error:
        shapes = error.missing_shapes
        raise PlanError(
            f"plain `ddp` cannot train this: {len(shapes)} trained parameters get no gradient,"
            f" such as one of shape {shapes[0]}",
            hint="use `strategy: ddp_find_unused_parameters_true`, or `freeze` them",
        ) from error
    except Exception as error:  # the model's own code may raise anything
        raise model_failure(job.plan, watch.model, error) from error
    if virtual.mode.memory.log.is_full:
        raise UnsupportedError(
            f"a step of `{job.plan.label}` has too many events to be kept",
            hint="reduce `accumulate_grad_batches` to 1",
        )


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Restore Lightning's rank and the environment variables when the block ends."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank, num_threads = getattr(rank_zero_only, "rank", None), torch.get_num_threads()
    try:
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": str(num_threads)}):
            yield
    finally:
        rank_zero_only.rank = rank  # type: ignore[attr-defined]


@contextmanager
def compiling_late() -> Iterator[None]:
    """Within the block, make `torch.compile` compile a function at its first call only. Else the
    import of bitsandbytes, which compiles host kernels, would import Inductor and take a second."""
    compile_: Any = torch.compile

    @wraps(compile_)
    def compile_late(model: Any = None, **options: Any) -> Any:
        if not isinstance(model, FunctionType):
            return compile_(model, **options)
        compiled = cache(lambda: compile_(model, **options))

        @wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    with mock.patch.object(torch, "compile", compile_late):
        yield


@contextmanager
def _without_messages() -> Iterator[None]:
    import lightning.pytorch  # noqa: F401 - sets its level as it is imported

    names = ("lightning.pytorch", "lightning.fabric", "bitsandbytes", "DeepSpeed")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with quiet_transformers():
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _notes(watch: _TrainingCallbacks) -> Iterator[str]:
    plan = watch.job.plan
    yield from watch.job.notes
    if plan.use_qlora and plan.quant == "int8":
        yield ASSUMPTION
    yield from (note for note in watch.virtual.notes if note != GRADS_LIVE_ON)  # of a script's own
    for (_, what), count in sorted(watch.virtual.guesses.counts.items()):
        yield f"{what}: read {count} times in what ran, not known without a GPU, and guessed"


def _host_terms(tensors: Iterable[tuple[int, bool]]) -> Iterator[Term]:
    """Yield the report's rows of host memory; `tensors` has (bytes, `is_pinned`) of each. Pinned
    ones are rounded up to a power of two (`CachingHostAllocatorImpl::allocate`)."""
    sizes = list(tensors)
    pinned = [1 << (num_bytes - 1).bit_length() for num_bytes, is_pinned in sizes if is_pinned]
    pageable = [num_bytes for num_bytes, is_pinned in sizes if not is_pinned]
    rounded = f"{counted(len(pinned), 'tensor')}, each to the next power of two"
    if pinned:
        yield Term(kind="pinned tensors", num_bytes=sum(pinned), arithmetic=rounded, why="pinned")
    if pageable:
        arithmetic = counted(len(pageable), "tensor")
        yield Term(kind="tensors", num_bytes=sum(pageable), arithmetic=arithmetic, why="pageable")


def _program(watch: _TrainingCallbacks) -> Program:
    mode = watch.virtual.mode
    events = mode.memory.log.events
    is_wrapped = watch.job.plan.is_distributed  # True if a strategy wraps the model
    root = mode.attribution.modules.path_of(watch.model) if is_wrapped else ""
    program = Program(
        storages=_storages(mode.memory.storages, watch.num_storages, root),
        setup=events[: watch.num_setup].tolist(),
        coverage=mode.kernels.coverage,
    )
    start = watch.num_setup
    for end, row in watch.rows:
        state = StateBytes(row.params_bytes, row.grads_bytes, row.optimizer_bytes)
        part = Part(events[start:end].tolist(), row.phase, state)
        start = end
        if row.step == len(program.steps):
            program.steps.append([])
        step: list[Any] = program.steps[row.step]
        if row.micro_batch == len(step):
            step.append([])
        step[row.micro_batch].append(part)
    if watch.job.plan.is_distributed:
        program.ranges_stay = watch.job.plan.world_size > 1
        program.num_known_steps = len(program.steps)
    find_renames(program)
    return program


def _storages(storages: StorageTable, count: int, root: str) -> StorageTable:
    """Return the first `count` storages, with names of modules relative to the plan's model. `root`
    is the path of the plan's model within the modules that wrap it, such as Lightning's. If `root`
    is "", the outermost module is the model."""
    indices = set(range(count))
    return StorageTable(
        num_bytes=storages.num_bytes[:count],
        sites=[within_model(site, root) for site in storages.sites[:count]],
        kinds=storages.kinds[:count],
        streams={index: stream for index, stream in storages.streams.items() if index < count},
        deferred=storages.deferred & indices,
        stashed=storages.stashed & indices,
    )
