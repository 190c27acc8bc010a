"""One plan read more than once: by ranks that differ, and with blocks that come back early or late.

When a block comes back that two streams use, or that a collective keeps, depends on how fast the
GPU is. A run on several GPUs is therefore read thrice for each rank that was traced: with such
blocks back as they die, at the latest moment (`Timeline`), and so after the first step alone.
What any rank of a real run shows should lie between the lowest and the highest of these. On one
GPU there is one reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memest.estimator.allocator.settings import AllocatorSettings, parse_settings
from memest.estimator.device.storages import Returns, StorageTable
from memest.estimator.trace.replay import Observer, Replayed, replay
from memest.estimator.trace.traced import TracedPlan
from memest.plan import TrainingPlan
from memest.report import Interval, Outcome, Verdict
from memest.units import format_bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """A rank of a plan, with blocks that come back at one moment, on a card without end."""

    plan: TrainingPlan
    traced: TracedPlan
    returns: Returns
    free: Replayed

    def under(self, limit_bytes: int) -> Replayed:
        """The same where the allocator can reserve no more than `limit_bytes`."""
        return run_under(self.plan, self.traced, self.free, limit_bytes, self.returns)

    def verdict(self, result: Replayed, limit_bytes: int) -> Verdict:
        """What `result`, which is that `under` the limit, says."""
        return verdict_of(result, self.free, limit_bytes, self.traced)


def readings_of(plan: TrainingPlan, worst: TracedPlan) -> list[Reading]:
    """Every reading of the ranks that were traced, the one that reserves most first."""
    ranks = (worst, *worst.others)
    found = [
        Reading(plan, traced, returns, replay_plan(plan, traced, None, returns))
        for traced in ranks
        for returns in (Returns if _depends_on_time(plan, traced) else (Returns.LATEST,))
    ]
    found.sort(
        key=lambda reading: (reading.free.peak_reserved_bytes, reading.free.peak_allocated_bytes),
        reverse=True,
    )
    return found


def verdict_over(
    readings: Sequence[Reading], limit_bytes: int
) -> tuple[Verdict, tuple[Replayed, ...]]:
    """The verdict on a card, and each reading under its limit.

    It fits where every reading does, and is out of memory where a rank is in each of its own.
    """
    results = tuple(reading.under(limit_bytes) for reading in readings)
    failed = [i for i, result in enumerate(results) if result.failed is not None]
    if not failed:
        return readings[0].verdict(results[0], limit_bytes), results
    verdict = readings[failed[0]].verdict(results[failed[0]], limit_bytes)
    of_ranks: dict[int, list[bool]] = {}
    for reading, result in zip(readings, results, strict=True):
        of_ranks.setdefault(id(reading.traced), []).append(result.failed is not None)
    if any(map(all, of_ranks.values())):
        return verdict, results
    decides = held_later(readings[failed[0]].traced.program.storages)
    return replace(verdict, verdict=Outcome.MAY, decides=decides), results


def verdict_of(result: Replayed, free: Replayed, limit: int, traced: TracedPlan) -> Verdict:
    """What a replay under `limit` bytes says; `free` is the same run without a limit."""
    reserved = result.peak_reserved_bytes
    if result.failed is None:
        return Verdict(
            verdict=Outcome.FITS,
            margin_bytes=limit - reserved,
            limit_bytes=limit,
            reserved_bytes=reserved,
        )
    site = traced.program.storages.sites[result.failed.storage]
    where = ", ".join(part for part in (site.phase, site.module, site.op) if part)
    return Verdict(
        verdict=Outcome.OOM,
        margin_bytes=limit - free.peak_reserved_bytes,
        limit_bytes=limit,
        reserved_bytes=reserved,
        at=f"step {result.failed.step}, {where}",
    )


def held_later(storages: StorageTable) -> str:
    """The blocks whose return depends on time, in words; empty where there are none."""
    words = []
    if storages.shelved:
        num_bytes = sum(storages.num_bytes[index] for index in storages.shelved)
        words.append(f"{format_bytes(num_bytes)} of the first step's buckets may live on")
    if storages.deferred:
        largest = max(storages.deferred, key=storages.num_bytes.__getitem__)
        words.append(
            f"{len(storages.deferred)} blocks that two streams share come back sooner or later,"
            f" the largest of {format_bytes(storages.num_bytes[largest])} for"
            f" {storages.kinds[largest]}"
        )
    return "; ".join(words)


def interval(values: Iterable[int], *, beside: int = 0) -> Interval:
    """The lowest and the highest of `values`, each with `beside` more."""
    found = [value + beside for value in values]
    return Interval(low_bytes=min(found), high_bytes=max(found))


def phase_intervals(results: Sequence[Replayed]) -> tuple[Interval, ...]:
    """Of the bytes allocated at each probe; as many as all of them reach."""
    return tuple(
        interval(row.allocated_bytes for row in rows)
        for rows in zip(*(result.rows for result in results), strict=False)
    )


def settings_of(plan: TrainingPlan) -> AllocatorSettings:
    """Of the allocator in a run of `plan`.

    Raises:
        PlanError: torch refuses `alloc_conf`; the message is torch's.
    """
    return parse_settings(plan.alloc_conf)


def is_share(plan: TrainingPlan) -> bool:
    """Whether the limit is what the plan allows itself of a card that has more."""
    return plan.memory_limit is not None or settings_of(plan).memory_fraction < 1


def run_under(
    plan: TrainingPlan,
    traced: TracedPlan,
    free: Replayed,
    limit_bytes: int,
    returns: Returns = Returns.LATEST,
) -> Replayed:
    """The run where the allocator can reserve no more; `free` is the same without a limit.

    With settings the limit may be felt before it is reached.
    """
    if free.peak_reserved_bytes <= limit_bytes and settings_of(plan).is_default:
        return free
    return replay_plan(plan, traced, limit_bytes, returns)


def replay_plan(
    plan: TrainingPlan,
    traced: TracedPlan,
    limit_bytes: int | None,
    returns: Returns = Returns.LATEST,
    *,
    observer: Observer | None = None,
) -> Replayed:
    """The plan's steps, by its settings of the allocator."""
    return replay(
        traced.program,
        num_steps=plan.steps,
        num_micro_batches=plan.accumulate_grad_batches,
        limit_bytes=limit_bytes,
        returns=returns,
        settings=settings_of(plan),
        is_share=is_share(plan),
        observer=observer,
    )


def _depends_on_time(plan: TrainingPlan, traced: TracedPlan) -> bool:
    return plan.world_size > 1 and traced.program.storages.depends_on_time
