"""From a plan with a strategy to the program of one rank of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memest.estimator.device.ranks import Ranks
from memest.estimator.device.storages import StorageTable
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.libraries import DEEPSPEED_HOST_BYTES, libraries_bytes
from memest.estimator.readings import held_later
from memest.estimator.trace.replay import replay
from memest.estimator.trace.traced import TracedPlan
from memest.estimator.trace.virtual_run import ranks_of, run_plan
from memest.plan import TrainingPlan
from memest.report import Term
from memest.units import format_bytes

MAX_ALL_RANKS = 8
"""Up to here every rank of ZeRO 1 and 2 is traced; beyond, some."""

MAX_ALL_RANKS_OF_FSDP = 4
"""Likewise of FSDP1, of whose ranks beyond it the first and the last are traced."""


def run_ranks(
    plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False
) -> tuple[TracedPlan, ...]:
    """The programs of ranks that differ, the one that reserves most, then allocates most, first."""
    first = ranks_of(plan)
    traced = [
        run_rank(plan, gpu, replace(first, rank=rank), trust_remote_code=trust_remote_code)
        for rank in candidate_ranks(plan)
    ]
    if len(traced) > 1:
        traced.sort(key=functools.partial(_need, plan), reverse=True)
    return tuple(traced)


def candidate_ranks(plan: TrainingPlan) -> Sequence[int]:
    """Ranks that differ, of which one holds the most.

    Under DDP all hold the same, and under FSDP2 and ZeRO-3 none more than the first. FSDP1, and
    ZeRO 1 and 2, cut joined parameters without regard to where one ends, and a rank keeps what
    overlaps its part: all ranks, or of many some.
    """
    if plan.strategy == "fsdp" and plan.sharding_strategy != "NO_SHARD":
        is_few = plan.world_size <= MAX_ALL_RANKS_OF_FSDP
        return range(plan.world_size) if is_few else (0, plan.world_size - 1)
    is_cut = plan.is_deepspeed and not plan.strategy.startswith("deepspeed_stage_3")
    if not is_cut:
        return (0,)
    if plan.world_size <= MAX_ALL_RANKS:
        return range(plan.world_size)
    return (0, 1, plan.world_size // 2, plan.world_size - 1)


def _need(plan: TrainingPlan, traced: TracedPlan) -> tuple[int, int]:
    run = replay(
        traced.program, num_steps=plan.steps, num_micro_batches=plan.accumulate_grad_batches
    )
    return run.peak_reserved_bytes, run.peak_allocated_bytes


def run_rank(
    plan: TrainingPlan, gpu: Gpu, ranks: Ranks, *, trust_remote_code: bool = False
) -> TracedPlan:
    """The program of one rank."""
    traced = run_plan(plan, gpu, ranks=ranks, trust_remote_code=trust_remote_code)
    host_terms = tuple(_of_all_ranks(plan, traced.host_terms))
    return replace(
        traced,
        notes=(*traced.notes, *_notes(plan, ranks.rank, traced.program.storages)),
        host_terms=host_terms,
        host_bytes=sum(term.num_bytes for term in host_terms) or traced.host_bytes,
    )


def _of_all_ranks(plan: TrainingPlan, terms: Sequence[Term]) -> Iterator[Term]:
    """`terms` of one rank, of which each holds the same, and what libraries hold beside them."""
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
    """What is assumed of a run on several GPUs."""
    yield (
        f"the figures are those of rank {rank} of {plan.world_size}, the one of those that differ"
        " that reserves most; the cache is emptied once more when the model has been wrapped"
    )
    yield (
        f"{format_bytes(libraries_bytes(plan))} of NCCL on each GPU, as on four H200 of one host"
    )
    kept = held_later(storages)
    if kept and plan.world_size > 1:
        yield f"between low and high of a figure: {kept}"
