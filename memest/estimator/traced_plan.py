"""From a plan to its program on one kind of GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memest.errors import MemestError, TraceError
from memest.estimator.closed_form import LayerGeometry, layer_geometry
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import MemKind, StorageTable
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.libraries import libraries_bytes
from memest.estimator.kernels.attention.flash2 import check_gpu
from memest.estimator.optimizers import (
    make_grad_scaler,
    make_optimizer,
    managed_state_bytes,
    optimizer_state_tensors,
)
from memest.estimator.step import Program, StepTracer
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
from memest.models_meta.batch import Batch, make_batch
from memest.models_meta.flash_attention import stand_in
from memest.models_meta.int8 import ASSUMPTION, quantize_int8
from memest.models_meta.quantization import FusedGemmRule, quant_state_tensors, quantize_nf4
from memest.models_meta.registry import ModelConfig, quiet_transformers, resolve_config
from memest.plan import TrainingPlan
from memest.plan_values import FLASH_ATTENTION_2
from memest.report import Term


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
    host_terms: tuple[Term, ...] = ()
    """What every rank together holds in host memory."""

    geometry: LayerGeometry | None = None
    """Of the model's layers, where a textbook knows them."""

    libraries_bytes: int = 0
    """Of NCCL and others on each GPU, beside the allocator and the context."""


_NOT_TRACED: dict[str, Any] = {
    "name": "",
    "gpu": (),
    "gpu_memory": None,
    "memory_limit": None,
    "host_memory": None,
}
"""Keys that change the replay and not the trace."""

MAX_TRACED_STEPS = 3
"""Steps of a strategy that differ: the first makes the optimizer's state, the second what the
strategy rebuilds."""

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
    with quiet_transformers(), stand_in(plan.attn_implementation):
        return _trace(_canonical(plan), replace(gpu, **_SAME_CHIP), trust_remote_code)


def trace_with(
    recorder: Recorder, plan: TrainingPlan, *, trust_remote_code: bool = False
) -> TracedPlan:
    """The program of `plan` as `recorder`, which is fresh, sees it; nothing is kept for later."""
    with quiet_transformers(), stand_in(plan.attn_implementation):
        return _traced(_canonical(plan), recorder, trust_remote_code)


def _canonical(plan: TrainingPlan) -> TrainingPlan:
    """`plan` without what changes the replay alone; a strategy's steps are traced one by one."""
    steps = min(plan.steps, MAX_TRACED_STEPS) if plan.is_distributed else 1
    return replace(plan, **_NOT_TRACED, steps=steps)


@functools.lru_cache(maxsize=8)
def _trace(plan: TrainingPlan, gpu: Gpu, trust_remote_code: bool) -> TracedPlan:
    if plan.is_distributed:
        from memest.estimator.parallel.rank import trace_worst_rank

        return trace_worst_rank(plan, gpu, trust_remote_code=trust_remote_code)
    return _traced(plan, Recorder(gpu, StorageTable()), trust_remote_code)


def _traced(plan: TrainingPlan, recorder: Recorder, trust_remote_code: bool) -> TracedPlan:
    gpu = recorder.gpu
    config = resolve_config(plan.model_name, trust_remote_code=trust_remote_code)
    seq_len = sequence_length(plan, config)
    tracer = StepTracer(
        recorder,
        autocast_dtype=half_dtype(plan) if plan.precision.endswith("-mixed") else None,
        accumulates=plan.accumulate_grad_batches > 1,
    )
    notes: list[str] = []
    model = tracer.setup(functools.partial(build_module, plan, gpu, config, notes))
    for tensor in quant_state_tensors(model):
        recorder.label(tensor, MemKind.BUFFERS)
    batch = make_batch(
        model,
        batch_size=plan.batch_size,
        seq_len=seq_len,
        image_size=plan.image_size,
        padded=plan.is_padded,
    )
    trained = trained_parameters(model)
    optimizer = tracer.setup_optimizer(
        functools.partial(
            make_optimizer, plan.optim, trained, momentum=plan.momentum, nesterov=plan.nesterov
        )
    )
    program = _run(tracer, plan, model, batch, optimizer)
    param_groups = {
        "params": elements_by_dtype(model.parameters()),
        "grads": elements_by_dtype(p.grad for p in trained if p.grad is not None),
        "optimizer": elements_by_dtype(optimizer_state_tensors(optimizer)),
    }
    return TracedPlan(
        program=program,
        model=describe_model(model),
        param_groups=param_groups,
        host_bytes=managed_state_bytes(optimizer),
        notes=(*notes, *batch.notes),
        seq_len=seq_len,
        image_size=batch.image_size,
        libraries_bytes=libraries_bytes(plan),
        geometry=layer_geometry(model, config),
    )


def _run(
    tracer: StepTracer,
    plan: TrainingPlan,
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
) -> Program:
    try:
        return tracer.run(
            model,
            functools.partial(move_batch, tracer.recorder, batch, input_dtype(plan)),
            functools.partial(loss_of, output=batch.loss_output),
            optimizer,
            make_grad_scaler() if plan.precision == "16-mixed" else None,
            plan.accumulate_grad_batches,
        )
    except MemestError:
        raise
    except Exception as error:  # the model's own code, which may do anything
        raise model_failure(plan, model, error) from error


def build_module(plan: TrainingPlan, gpu: Gpu, config: ModelConfig, notes: list[str]) -> nn.Module:
    """The module of `plan` on the current device; appends to `notes` what was decided."""
    quantize = functools.partial(
        quantize_nf4,
        compute_dtype=compute_dtype(plan),
        double_quant=plan.double_quant,
        skip=plan.quant_skip,
        rule=FusedGemmRule(capability=gpu.capability, num_sms=gpu.num_sms),
    )
    if plan.quant == "int8":
        quantize = functools.partial(quantize_int8, skip=plan.quant_skip)
        notes.append(ASSUMPTION)
    if plan.attn_implementation == FLASH_ATTENTION_2:
        check_gpu(gpu)
    assembled = assemble(plan, config, quantize=quantize)
    notes.extend(assembled.notes)
    return assembled.module


def model_failure(plan: TrainingPlan, model: nn.Module, error: Exception) -> TraceError:
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


def move_batch(recorder: Any, batch: Batch, float_dtype: torch.dtype | None) -> dict[str, Any]:
    """The batch as it arrives on the GPU: meta tensors, with twins of what has values."""
    moved: dict[str, Any] = dict(batch.flags)
    for item in batch.tensors:
        dtype = item.value.dtype
        if float_dtype is not None and dtype.is_floating_point:
            dtype = float_dtype
        moved[item.name] = torch.empty(item.value.shape, dtype=dtype, device="meta")
        if item.is_real:
            recorder.values.adopt(moved[item.name], item.value)
    return moved


def elements_by_dtype(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Numbers of elements of `tensors` by the name of their dtype."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        key = str(tensor.dtype).removeprefix("torch.")
        counts[key] = counts.get(key, 0) + tensor.numel()
    return counts
