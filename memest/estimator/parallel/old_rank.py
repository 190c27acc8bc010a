"""From a plan with a strategy to the program of one rank of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from memest.errors import MemestError
from memest.estimator.device.storages import MemKind, StorageTable
from memest.estimator.device.streams import MAIN, StreamRecorder
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.libraries import DEEPSPEED_HOST_BYTES, libraries_bytes
from memest.estimator.optimizers.specs import (
    make_grad_scaler,
    make_optimizer,
    optimizer_state_tensors,
)
from memest.estimator.parallel.step import StrategyTracer
from memest.estimator.parallel.strategy import HostTerm, Strategy
from memest.estimator.trace.program import Program
from memest.estimator.trace.replay import replay
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
from memest.models_meta.quantized.nf4 import quant_state_tensors
from memest.models_meta.registry import resolve_config
from memest.plan import TrainingPlan
from memest.report import Term
from memest.units import format_bytes, format_gib

MAX_ALL_RANKS = 8
"""Up to here every rank of ZeRO 1 and 2 is traced; beyond, some."""


def trace_worst_rank(
    plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False
) -> TracedPlan:
    """The program of the rank that reserves most, then allocates most."""
    traced = [
        trace_rank(plan, gpu, rank=rank, trust_remote_code=trust_remote_code)
        for rank in candidate_ranks(plan)
    ]
    return traced[0] if len(traced) == 1 else max(traced, key=functools.partial(_need, plan))


def candidate_ranks(plan: TrainingPlan) -> Sequence[int]:
    """Ranks of which one holds the most.

    Under DDP and FSDP the first, which never gets the padding. ZeRO 1 and 2 cut the joined
    parameters without regard to where one ends, and a rank keeps what overlaps its part: all of
    them, or of many the first, the second, one in the middle, the last.
    """
    is_cut = plan.is_deepspeed and not plan.strategy.startswith("deepspeed_stage_3")
    if not is_cut:
        return (0,)
    if plan.devices <= MAX_ALL_RANKS:
        return range(plan.devices)
    return (0, 1, plan.devices // 2, plan.devices - 1)


def _need(plan: TrainingPlan, traced: TracedPlan) -> tuple[int, int]:
    run = replay(
        traced.program, num_steps=plan.steps, num_micro_batches=plan.accumulate_grad_batches
    )
    return run.peak_reserved_bytes, run.peak_allocated_bytes


def trace_rank(
    plan: TrainingPlan, gpu: Gpu, *, rank: int = 0, trust_remote_code: bool = False
) -> TracedPlan:
    """The program of one rank."""
    config = resolve_config(plan.model_name, trust_remote_code=trust_remote_code)
    seq_len = sequence_length(plan, config)
    notes: list[str] = []
    recorder = StreamRecorder(gpu, StorageTable())
    strategy = make_strategy(plan, recorder, rank)
    tracer = StrategyTracer(
        strategy,
        autocast_dtype=half_dtype(plan) if plan.precision.endswith("-mixed") else None,
        num_micro_batches=plan.accumulate_grad_batches,
    )
    import_adapters(plan)
    model = tracer.setup(functools.partial(build_module, plan, gpu, config, notes))
    for tensor in quant_state_tensors(model):
        recorder.label(tensor, MemKind.BUFFERS)
    described = describe_model(model)
    trained_bytes = sum(p.numel() * p.element_size() for p in trained_parameters(model))
    batch = make_batch(
        model,
        batch_size=plan.batch_size,
        seq_len=seq_len,
        image_size=plan.image_size,
        padded=plan.is_padded,
    )
    program = _run(tracer, plan, model, batch)
    program.ranges_stay = plan.devices > 1
    kept = tracer.kept
    host_terms = _host_terms(strategy)
    return TracedPlan(
        program=program,
        model=described,
        param_groups={
            "params": elements_by_dtype(kept.params()),
            "grads": elements_by_dtype(kept.grads()),
            "optimizer": elements_by_dtype(optimizer_state_tensors(strategy.optimizer)),
        },
        host_bytes=sum(term.num_bytes for term in host_terms),
        notes=(*notes, *batch.notes, *_notes(plan, rank, trained_bytes)),
        seq_len=seq_len,
        image_size=batch.image_size,
        host_terms=host_terms,
        libraries_bytes=libraries_bytes(plan),
    )


def _host_terms(strategy: Strategy) -> tuple[Term, ...]:
    """Of all ranks, which hold the same."""
    held = strategy.host_terms()
    if held:
        arithmetic = f"{format_bytes(DEEPSPEED_HOST_BYTES)} as measured"
        held.append(HostTerm("libraries", DEEPSPEED_HOST_BYTES, arithmetic))
    num_ranks = strategy.world_size
    times = f"{num_ranks} GPUs x " if num_ranks > 1 else ""
    return tuple(
        Term(
            kind=term.what,
            num_bytes=num_ranks * term.num_bytes,
            arithmetic=f"{times}{term.arithmetic}",
            why="pinned" if term.is_pinned else "pageable",
        )
        for term in held
    )


def _notes(plan: TrainingPlan, rank: int, trained_bytes: int) -> Iterator[str]:
    """What is assumed of a run on several GPUs."""
    yield (
        f"the figures are those of rank {rank} of {plan.devices}, and no rank holds more; the cache"
        " is emptied once more when the strategy has wrapped the model"
    )
    yield (
        f"{format_bytes(libraries_bytes(plan))} of NCCL on each GPU, as on four H200 of one host"
    )
    if plan.is_ddp:
        yield (
            f"a rank may hold the first step's buckets, {format_gib(trained_bytes)}, into the"
            " second: measured on a few ranks where steps are short, and not counted here"
        )
    if plan.strategy == "fsdp":
        yield (
            "blocks that two streams share come back when the GPU has caught up with the host:"
            " reserved memory differs between the ranks of one run, by up to 11 % where measured"
        )


def make_strategy(plan: TrainingPlan, recorder: StreamRecorder, rank: int) -> Strategy:
    """The strategy of `plan` as `rank` runs it."""
    kind: type[Strategy]
    if plan.is_ddp:
        from memest.estimator.parallel.ddp import Ddp as kind
    elif plan.strategy == "fsdp":
        from memest.estimator.parallel.fsdp import Fsdp as kind
    elif plan.strategy == "fsdp2":
        from memest.estimator.parallel.fsdp2 import Fsdp2 as kind
    elif plan.strategy.startswith("deepspeed_stage_3"):
        from memest.estimator.parallel.zero3 import Zero3 as kind
    else:
        from memest.estimator.parallel.zero12 import Zero12 as kind
    return kind(plan, recorder, rank)


def _run(tracer: StrategyTracer, plan: TrainingPlan, model: nn.Module, batch: Batch) -> Program:
    def loss_of_batch(module: nn.Module) -> Tensor:
        recorder = tracer.recorder
        assert isinstance(recorder, StreamRecorder)
        recorder.host_waits(recorder.event(MAIN))  # copies from pageable memory wait
        inputs = move_batch(recorder, batch, input_dtype(plan))
        return loss_of(module, inputs, batch.loss_output)

    try:
        return tracer.run_steps(
            model,
            loss_of_batch,
            functools.partial(
                make_optimizer, plan.optim, momentum=plan.momentum, nesterov=plan.nesterov
            ),
            make_grad_scaler() if plan.precision == "16-mixed" and not plan.is_deepspeed else None,
            plan.steps,
        )
    except MemestError:
        raise
    except Exception as error:  # the model's own code, which may do anything
        raise model_failure(plan, model, error) from error
