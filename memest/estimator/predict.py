"""From a plan to a prediction: the one path through the rooms."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memest.errors import MemestError, TraceError
from memest.estimator.gpus import DEFAULT_GPUS, Gpu, custom_gpu, find_gpu
from memest.plan import TrainingPlan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memest.estimator.replay import Replayed
    from memest.estimator.step import Program
    from memest.models_meta.batch import Batch
    from memest.report import Prediction, Verdict

TARGET_TORCH = (2, 11)
"""The torch release whose CUDA behaviour the kernel tables mirror, and with which runs were
measured.
"""

PRIMARY_GPU = "h200"
"""Whose figures head a report when no GPU is asked for: the largest of the default set."""


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """A plan's program on one kind of GPU, with what the report says about the model."""

    program: Program
    model: dict[str, Any]
    param_groups: dict[str, dict[str, int]]
    """Numbers of elements by dtype: of all parameters, the trained ones, and optimizer state."""

    host_bytes: int
    notes: tuple[str, ...]
    seq_len: int
    image_size: int | None


def predict(plan: TrainingPlan, *, trust_remote_code: bool = False) -> Prediction:
    """What a run of `plan` would print on each GPU, without a GPU.

    Raises:
        MemestError: the plan cannot be run, or memest cannot model it.
    """
    from memest.estimator.replay import replay
    from memest.estimator.summary import summarise

    started = time.perf_counter()
    gpus = judged_gpus(plan)
    primary = gpus[0] if plan.gpu or plan.gpu_memory else find_gpu(PRIMARY_GPU)
    traced = trace_plan(plan, primary, trust_remote_code=trust_remote_code)

    def run(program: Program, limit_bytes: int | None) -> Replayed:
        return replay(
            program,
            num_steps=plan.steps,
            num_micro_batches=plan.accumulate_grad_batches,
            limit_bytes=limit_bytes,
        )

    unlimited = run(traced.program, None)
    verdicts: dict[str, Verdict] = {}
    results: dict[str, Replayed] = {}
    for gpu in {g.name: g for g in (primary, *gpus)}.values():
        on_gpu, free = traced, unlimited
        if not _runs_alike(gpu, primary):
            on_gpu = trace_plan(plan, gpu, trust_remote_code=trust_remote_code)
            free = run(on_gpu.program, None)
        limit = min(gpu.limit_bytes, plan.memory_limit or gpu.limit_bytes)
        result = free if free.peak_reserved_bytes <= limit else run(on_gpu.program, limit)
        results[gpu.name] = result
        verdicts[gpu.name] = _verdict(result, free, limit, on_gpu.program)
    return summarise(
        plan=plan,
        traced=traced,
        primary=primary,
        result=results[primary.name],
        unlimited=unlimited,
        verdicts={g.name: verdicts[g.name] for g in gpus},
        outcome=verdicts[primary.name].verdict,
        elapsed_s=time.perf_counter() - started,
    )


def judged_gpus(plan: TrainingPlan) -> list[Gpu]:
    """The GPUs that the plan asks about, or the default set."""
    gpus = [find_gpu(name) for name in plan.gpu]
    if plan.gpu_memory is not None:
        gpus.append(custom_gpu(plan.gpu_memory))
    return gpus or [find_gpu(name) for name in DEFAULT_GPUS]


def _runs_alike(gpu: Gpu, other: Gpu) -> bool:
    """Whether the same kernels run on both: cards of one chip differ in memory alone."""
    return (gpu.capability, gpu.num_sms) == (other.capability, other.num_sms)


def _verdict(result: Replayed, free: Replayed, limit: int, program: Program) -> Verdict:
    from memest.report import Outcome, Verdict

    reserved = result.peak_reserved_bytes
    if result.failed is None:
        return Verdict(
            verdict=Outcome.FITS,
            margin_bytes=limit - reserved,
            limit_bytes=limit,
            reserved_bytes=reserved,
        )
    site = program.storages.sites[result.failed.storage]
    where = ", ".join(part for part in (site.phase, site.module, site.op) if part)
    return Verdict(
        verdict=Outcome.OOM,
        margin_bytes=limit - free.peak_reserved_bytes,
        limit_bytes=limit,
        reserved_bytes=reserved,
        at=f"step {result.failed.step}, {where}",
    )


_NOT_TRACED: dict[str, Any] = {
    "name": "",
    "gpu": (),
    "gpu_memory": None,
    "memory_limit": None,
    "steps": 1,
}
"""Keys that change the replay and not the trace."""

_SAME_CHIP: dict[str, Any] = {
    "name": "",
    "label": "",
    "memory_bytes": 0,
    "context_bytes": 0,
    "source": "",
}
"""What two cards of one chip may differ in."""


def trace_plan(plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False) -> TracedPlan:
    """The program of `plan` on `gpu`; plans that differ in limits and steps alone share it."""
    canonical = replace(plan, **_NOT_TRACED)
    with _quiet():
        return _trace(canonical, replace(gpu, **_SAME_CHIP), trust_remote_code)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What libraries say about the model concerns a run, not its prediction."""
    from logging import ERROR

    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


@functools.lru_cache(maxsize=8)
def _trace(plan: TrainingPlan, gpu: Gpu, trust_remote_code: bool) -> TracedPlan:
    from memest.estimator.optimizers import (
        make_grad_scaler,
        make_optimizer,
        managed_state_bytes,
        optimizer_state_tensors,
    )
    from memest.estimator.step import StepTracer
    from memest.estimator.trace import MemKind, Recorder, StorageTable
    from memest.models_meta.assemble import (
        assemble,
        compute_dtype,
        describe_model,
        half_dtype,
        input_dtype,
        loss_of,
        sequence_length,
        trained_parameters,
    )
    from memest.models_meta.quantization import FusedGemmRule, quant_state_tensors, quantize_nf4
    from memest.models_meta.registry import resolve_config

    config = resolve_config(plan.model_name, trust_remote_code=trust_remote_code)
    seq_len = sequence_length(plan, config)
    recorder = Recorder(gpu, StorageTable())
    is_mixed = plan.precision.endswith("-mixed")
    tracer = StepTracer(
        recorder,
        autocast_dtype=half_dtype(plan) if is_mixed else None,
        accumulates=plan.accumulate_grad_batches > 1,
    )
    notes: list[str] = []
    quantize = functools.partial(
        quantize_nf4,
        compute_dtype=compute_dtype(plan),
        double_quant=plan.double_quant,
        skip=plan.quant_skip,
        rule=FusedGemmRule(capability=gpu.capability, num_sms=gpu.num_sms),
    )

    def build() -> nn.Module:
        assembled = assemble(plan, config, quantize=quantize)
        notes.extend(assembled.notes)
        return assembled.module

    model = tracer.setup(build)
    for tensor in quant_state_tensors(model):
        recorder.label(tensor, MemKind.BUFFERS)
    batch = _batch(plan, model, seq_len)
    trained = trained_parameters(model)
    optimizer = make_optimizer(plan.optim, trained, momentum=plan.momentum)
    try:
        program = tracer.run(
            model,
            functools.partial(move_batch, recorder, batch, input_dtype(plan)),
            functools.partial(loss_of, output=batch.loss_output),
            optimizer,
            make_grad_scaler() if plan.precision == "16-mixed" else None,
            plan.accumulate_grad_batches,
        )
    except MemestError:
        raise
    except Exception as error:  # the model's own code, which may do anything
        raise _model_failure(plan, model, error) from error
    return TracedPlan(
        program=program,
        model=describe_model(model),
        param_groups={
            "params": _by_dtype(model.parameters()),
            "grads": _by_dtype(p.grad for p in trained if p.grad is not None),
            "optimizer": _by_dtype(optimizer_state_tensors(optimizer)),
        },
        host_bytes=managed_state_bytes(optimizer),
        notes=(*notes, *batch.notes),
        seq_len=seq_len,
        image_size=batch.image_size,
    )


def _model_failure(plan: TrainingPlan, model: nn.Module, error: Exception) -> TraceError:
    """Name the innermost module of `model` in which its code raised."""
    names = {id(module): name for name, module in model.named_modules()}
    where, frames = "", error.__traceback__
    while frames is not None:
        where = names.get(id(frames.tb_frame.f_locals.get("self")), where)
        frames = frames.tb_next
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return TraceError(
        f"`{where or plan.model_name}` fails on the meta device: {first_line}",
        hint="its code needs a real device or other inputs; memest cannot predict this plan",
    )


def _batch(plan: TrainingPlan, model: nn.Module, seq_len: int) -> Batch:
    from memest.models_meta.batch import make_batch

    return make_batch(
        model,
        batch_size=plan.batch_size,
        seq_len=seq_len,
        image_size=plan.image_size,
        padded=plan.is_padded,
    )


def move_batch(recorder: Any, batch: Batch, float_dtype: torch.dtype | None) -> dict[str, Any]:
    """The batch as it arrives on the GPU: meta tensors, with twins of what has values."""
    import torch

    moved: dict[str, Any] = dict(batch.flags)
    for item in batch.tensors:
        dtype = item.value.dtype
        if float_dtype is not None and dtype.is_floating_point:
            dtype = float_dtype
        moved[item.name] = torch.empty(item.value.shape, dtype=dtype, device="meta")
        if item.is_real:
            recorder.values.adopt(moved[item.name], item.value)
    return moved


def _by_dtype(tensors: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in tensors:
        key = str(tensor.dtype).removeprefix("torch.")
        counts[key] = counts.get(key, 0) + tensor.numel()
    return counts
