"""Simulated run of a plan on one kind of GPU: a program (allocator events), cached for replays."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from memest.estimator.gpu.worlds import Rank
from memest.estimator.hardware.gpus import DEEPSPEED_HOST_BYTES, Gpu, libraries_bytes
from memest.estimator.ops.convolution import Calls, has_same_workspaces, recorded_calls
from memest.estimator.replay.replay import Run, TracedPlan
from memest.estimator.replay.reuse import NotInterpolable, on_other_chip
from memest.estimator.replay.scenarios import describe_deferred_blocks
from memest.estimator.replay.virtual_run import (
    UNLIMITED_BYTES,
    canonical,
    logged_trace,
    rank_of,
    run_plan,
)
from memest.estimator.tensors.storages import StorageTable
from memest.estimator.versions import TorchRelease, simulated
from memest.plan import TrainingPlan
from memest.report import Term
from memest.units import format_bytes

MAX_ALL_RANKS = 8  # number of ranks of ZeRO 1 and 2 up to which all are traced
MAX_ALL_RANKS_OF_FSDP = 4  # ranks of FSDP1 up to which all are traced; else the first and the last


def run_ranks(plan: TrainingPlan, gpu: Gpu) -> tuple[TracedPlan, ...]:
    """Simulate the ranks of `plan` that can differ (`candidate_ranks`) on `gpu`. The run that
    reserves the most is first."""
    first = rank_of(plan)
    runs = [run_rank(plan, gpu, replace(first, rank=rank)) for rank in candidate_ranks(plan)]

    def need(traced: TracedPlan) -> tuple[int, int]:
        run = Run(traced.program, plan.steps, plan.accumulate_grad_batches).on(None)
        return run.peak_reserved_bytes, run.peak_allocated_bytes

    return tuple(sorted(runs, key=need, reverse=True) if len(runs) > 1 else runs)


def candidate_ranks(plan: TrainingPlan) -> Sequence[int]:
    """Return one rank of each group of equal ranks, including the one that needs the most memory.
    All ranks of DDP are equal; rank 0 of FSDP2 and ZeRO-3 needs the most. FSDP1 and ZeRO 1 and 2
    split flat parameters at any element, so all ranks differ; of many ranks, a few are returned."""
    if plan.strategy == "fsdp" and plan.sharding_strategy != "NO_SHARD":
        is_few = plan.world_size <= MAX_ALL_RANKS_OF_FSDP
        return range(plan.world_size) if is_few else (0, plan.world_size - 1)
    if not plan.is_deepspeed or plan.strategy.startswith("deepspeed_stage_3"):
        return (0,)
    if plan.world_size <= MAX_ALL_RANKS:
        return range(plan.world_size)
    return (0, 1, plan.world_size // 2, plan.world_size - 1)


def run_rank(plan: TrainingPlan, gpu: Gpu, rank: Rank) -> TracedPlan:
    """Simulate `rank` of `plan` on `gpu`; the result has the host memory of all ranks together."""
    traced = run_plan(plan, gpu, rank=rank)
    host_terms = tuple(_host_terms_of_ranks(plan, traced.host_terms))
    return replace(
        traced,
        notes=(*traced.notes, *_notes(plan, rank.rank, traced.program.storages)),
        host_terms=host_terms,
        host_bytes=sum(term.num_bytes for term in host_terms) or traced.host_bytes,
    )


def _host_terms_of_ranks(plan: TrainingPlan, terms: Sequence[Term]) -> Iterator[Term]:
    """Yield report rows of the host memory of all ranks together; `terms` are those of one rank."""
    if not terms:
        return
    arithmetic = f"{format_bytes(DEEPSPEED_HOST_BYTES)} as measured"
    libraries = Term(
        kind="libraries", num_bytes=DEEPSPEED_HOST_BYTES, arithmetic=arithmetic, why="pageable"
    )
    num_ranks = plan.world_size
    times = f"{num_ranks} GPUs x " if num_ranks > 1 else ""
    for term in (*terms, libraries):
        yield replace(
            term, num_bytes=num_ranks * term.num_bytes, arithmetic=f"{times}{term.arithmetic}"
        )


def _notes(plan: TrainingPlan, rank: int, storages: StorageTable) -> Iterator[str]:
    """Yield the report's sentences on what is assumed in a run of `rank`, which has `storages`."""
    yield (
        f"the figures are those of rank {rank} of {plan.world_size}, the one of those that differ"
        " that reserves most; the cache is emptied once more when the model has been wrapped"
    )
    yield (
        f"{format_bytes(libraries_bytes(plan))} of NCCL on each GPU, as on four H200 of one host"
    )
    description = describe_deferred_blocks(storages)
    if description and plan.world_size > 1:
        yield f"between low and high of a figure: {description}"


def trace_plan(plan: TrainingPlan, gpu: Gpu) -> TracedPlan:
    """Simulate `plan` on `gpu`, or return its cached run. With several ranks, the result is the run
    of the rank that reserves the most. Its `others` are the runs of other ranks. Plans that differ
    only in limits and steps share a run. A run on another kind of GPU is converted from the first
    one, if the plan makes the same operator calls."""
    gpu = replace(
        gpu, name="", label="", source="", memory_bytes=UNLIMITED_BYTES, memory_range_bytes=None,
        context_bytes=0,
    )  # fmt: skip
    plan = canonical(plan)
    traces = _cached_traces(plan, simulated())
    for other, trace, calls in traces:
        is_same = replace(other, chip="") == replace(gpu, chip="")
        if is_same and has_same_workspaces(calls, gpu, other):
            return trace
    for other, trace, calls in traces:
        with suppress(NotInterpolable):
            traced = on_other_chip(trace, other, gpu)
            traces.append((gpu, traced, calls))
            return traced
    with recorded_calls() as calls:
        if plan.is_distributed:
            worst, *others = run_ranks(plan, gpu)
            trace = replace(worst, others=tuple(others))
        else:
            trace = logged_trace(plan, gpu)
    traces.append((gpu, trace, calls))
    return trace


@functools.lru_cache(maxsize=8)
def _cached_traces(
    plan: TrainingPlan, release: TorchRelease
) -> list[tuple[Gpu, TracedPlan, Calls]]:
    """Return the cached list of (GPU, run, convolution calls) of `plan` under the torch `release`.
    The list is empty at first; `trace_plan` appends to it. The convolution calls are those of the
    run by cuDNN, from `recorded_calls`. If the calls have the same workspaces on another GPU,
    `trace_plan` reuses the run there."""
    return []
