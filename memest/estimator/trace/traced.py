"""A plan's program with what the report says of the model, and the steps that make one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memest.errors import TraceError
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.attention.flash2 import check_gpu
from memest.estimator.trace.program import Program
from memest.models_meta.assemble import (
    assemble,
    compute_dtype,
)
from memest.models_meta.batch import Batch
from memest.models_meta.geometry import LayerGeometry
from memest.models_meta.quantized.fused_gemm import FusedGemmRule
from memest.models_meta.quantized.int8 import ASSUMPTION, quantize_int8
from memest.models_meta.quantized.nf4 import quantize_nf4
from memest.models_meta.registry import ModelConfig
from memest.plan import TrainingPlan
from memest.plan.values import FLASH_ATTENTION_2
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

    trained_bytes: int = 0
    """Of the trained parameters before a strategy divides them."""


def import_adapters(plan: TrainingPlan) -> None:
    """Import peft, if `plan` needs it, before anything is recorded: what its libraries make when
    they are imported is no part of a step.
    """
    if plan.uses_adapters:
        import memest.models_meta.adapters  # noqa: F401


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


def model_failure(plan: TrainingPlan, model: nn.Module | None, error: Exception) -> TraceError:
    """Name the innermost module of `model` in which its code raised."""
    names = {} if model is None else {id(m): name for name, m in model.named_modules()}
    where, frames = "", error.__traceback__
    while frames is not None:
        where = names.get(id(frames.tb_frame.f_locals.get("self")), where)
        frames = frames.tb_next
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return TraceError(
        f"`{where or plan.model_name}` fails: {first_line}",
        hint="a GPU would most likely say the same; if not, memest cannot predict this plan",
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
