"""From a plan to its program on one GPU, where no strategy divides it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memest.errors import MemestError
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import MemKind
from memest.estimator.hardware.libraries import libraries_bytes
from memest.estimator.optimizers.specs import (
    make_grad_scaler,
    make_optimizer,
    managed_state_bytes,
    optimizer_state_tensors,
)
from memest.estimator.trace.program import Program
from memest.estimator.trace.step import StepTracer
from memest.estimator.trace.traced import (
    TracedPlan,
    build_module,
    elements_by_dtype,
    import_adapters,
    model_failure,
    move_batch,
)
from memest.models_meta.assemble import (
    describe_model,
    half_dtype,
    input_dtype,
    loss_of,
    sequence_length,
    trained_parameters,
)
from memest.models_meta.batch import Batch, make_batch
from memest.models_meta.flash_attention import stand_in
from memest.models_meta.geometry import layer_geometry
from memest.models_meta.quantized.nf4 import quant_state_tensors
from memest.models_meta.registry import quiet_transformers, resolve_config
from memest.plan import TrainingPlan

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


def trace_with(
    recorder: Recorder, plan: TrainingPlan, *, trust_remote_code: bool = False
) -> TracedPlan:
    """The program of `plan` as `recorder`, which is fresh, sees it; nothing is kept for later."""
    with quiet_transformers(), stand_in(plan.attn_implementation):
        return trace_one(canonical(plan), recorder, trust_remote_code)


def canonical(plan: TrainingPlan) -> TrainingPlan:
    """`plan` without what changes the replay alone; a strategy's steps are traced one by one."""
    steps = min(plan.steps, MAX_TRACED_STEPS) if plan.is_distributed else 1
    return replace(plan, **_NOT_TRACED, steps=steps)


def trace_one(plan: TrainingPlan, recorder: Recorder, trust_remote_code: bool) -> TracedPlan:
    """The program of `plan`, which is canonical, as `recorder` sees it."""
    gpu = recorder.gpu
    config = resolve_config(plan.model_name, trust_remote_code=trust_remote_code)
    seq_len = sequence_length(plan, config)
    tracer = StepTracer(
        recorder,
        autocast_dtype=half_dtype(plan) if plan.precision.endswith("-mixed") else None,
        accumulates=plan.accumulate_grad_batches > 1,
    )
    notes: list[str] = []
    import_adapters(plan)
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
