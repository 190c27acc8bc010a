"""Scenarios of a plan: ranks that differ, and free timings of shared blocks.

The return of a block that two streams use, or that a collective holds, depends on the speed of the
GPU. So each rank is replayed with three free timings: immediately, at the latest moment, and
immediately in the first step alone. A real rank should be between the extremes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from memest.estimator.allocator.least_limit import LeastLimit, highest_need
from memest.estimator.allocator.settings import AllocatorSettings, parse_settings
from memest.estimator.replay.program import TracedPlan
from memest.estimator.replay.replay import Replayed, Run
from memest.estimator.tensors.storages import FreeTiming, Site, StorageTable
from memest.plan import TrainingPlan
from memest.report import Interval, Outcome, Verdict
from memest.units import format_bytes


def run_of_plan(plan: TrainingPlan, traced: TracedPlan) -> Run:
    """Return the run of one rank of `plan`."""
    settings = settings_of(plan)
    return Run(
        traced.program,
        plan.steps,
        plan.accumulate_grad_batches,
        settings,
        is_share=plan.memory_limit is not None or settings.memory_fraction < 1,
    )


class Scenario:
    """A run with one free timing, `timing`.

    `free` is its replay without a limit, and `traced` has facts about the model of a plan.
    """

    def __init__(
        self,
        run: Run,
        timing: FreeTiming = FreeTiming.LATEST,
        free: Replayed | None = None,
        traced: TracedPlan | None = None,
    ) -> None:
        self.run, self.timing = run, timing
        self.free = free or run.on(None, timing)
        self._traced = traced
        self.least = LeastLimit(
            lambda limit: _ending(run.on(limit, timing, is_soft=True)),
            self.free.peak_allocated_bytes,
            self.free.peak_reserved_bytes,
            num_events=self.free.num_events,
            is_felt_early=not run.settings.is_default,
        )

    @property
    def traced(self) -> TracedPlan:
        """Facts about the model of a plan."""
        assert self._traced is not None, "a script has none"
        return self._traced

    def under(self, limit_bytes: int) -> Replayed:
        """Replay it where the allocator can reserve no more than `limit_bytes`."""
        if self.free.peak_reserved_bytes <= limit_bytes and self.run.settings.is_default:
            return self.free
        result = self.run.on(limit_bytes, self.timing)
        self.least.add(limit_bytes, *_ending(result))
        return result


def _ending(result: Replayed) -> tuple[bool, int]:
    if result.failed is not None or result.lacking_bytes:
        return False, result.lacking_bytes
    return True, result.peak_reserved_bytes


def scenarios_of(plan: TrainingPlan, worst: TracedPlan) -> list[Scenario]:
    """Return every scenario of the traced ranks; the one that reserves most is first."""
    found: list[Scenario] = []
    for traced in (worst, *worst.others):
        depends_on_time = plan.world_size > 1 and traced.program.storages.depends_on_time
        for timing in FreeTiming if depends_on_time else (FreeTiming.LATEST,):
            found.append(Scenario(run_of_plan(plan, traced), timing, traced=traced))
    key = attrgetter("free.peak_reserved_bytes", "free.peak_allocated_bytes")
    return sorted(found, key=key, reverse=True)


def verdict_over(
    scenarios: Sequence[Scenario], results: Sequence[Replayed], limit_bytes: int, spread_bytes: int
) -> Verdict:
    """Return the verdict on a GPU, from `results` of `scenarios` under its limit.

    It fits if every scenario fits, and is out of memory if a rank is so in all its scenarios.
    """
    failed = [i for i, result in enumerate(results) if result.failed is not None]
    needs = highest_need([scenario.least for scenario in scenarios], limit_bytes)
    first = failed[0] if failed else 0
    shown, storages = results[first], scenarios[first].run.program.storages
    verdict = Verdict(
        verdict=Outcome.OOM if failed else Outcome.FITS,
        margin_bytes=limit_bytes - needs,
        limit_bytes=limit_bytes,
        reserved_bytes=shown.peak_reserved_bytes,
        spread_bytes=spread_bytes,
        at=where_failed(shown.failed.step, storages.sites[shown.failed.storage])
        if shown.failed
        else "",
    )
    of_ranks: dict[int, list[bool]] = {}
    for scenario, result in zip(scenarios, results, strict=True):
        of_ranks.setdefault(id(scenario.run.program), []).append(result.failed is not None)
    if not failed or any(map(all, of_ranks.values())):
        return verdict
    return replace(verdict, verdict=Outcome.MAY, decides=describe_deferred_blocks(storages))


def where_failed(step: int, site: Site) -> str:
    """Return step, phase, module, operator and line of a failed request."""
    return ", ".join(filter(None, (f"step {step}", site.phase, site.module, site.op, site.where)))


def describe_deferred_blocks(storages: StorageTable) -> str:
    """Describe the blocks whose return depends on time; empty if there are none."""
    words = []
    if storages.stashed:
        num_bytes = sum(storages.num_bytes[index] for index in storages.stashed)
        words.append(f"{format_bytes(num_bytes)} of the first step's buckets may live on")
    if storages.deferred:
        largest = max(storages.deferred, key=storages.num_bytes.__getitem__)
        words.append(
            f"{len(storages.deferred)} blocks that two streams share come back sooner or later,"
            f" the largest of {format_bytes(storages.num_bytes[largest])} for"
            f" {storages.kinds[largest]}"
        )
    return "; ".join(words)


def interval(values: Iterable[int], *, outside_bytes: int = 0) -> Interval:
    """Return the lowest and the highest of `values`, each plus `outside_bytes`."""
    found = [value + outside_bytes for value in values]
    return Interval(low_bytes=min(found), high_bytes=max(found))


def intervals(results: Sequence[Replayed], *, outside_bytes: int) -> dict[str, Interval]:
    """Return intervals of the peaks of allocated, reserved and process bytes.

    The process has `outside_bytes` outside the allocator.
    """
    reserved = [each.peak_reserved_bytes for each in results]
    return {
        "allocated": interval(each.peak_allocated_bytes for each in results),
        "reserved": interval(reserved),
        "process": interval(reserved, outside_bytes=outside_bytes),
    }


def phase_intervals(results: Sequence[Replayed]) -> tuple[Interval, ...]:
    """Return intervals of the bytes allocated at each probe that all results reach."""
    return tuple(
        interval(row.allocated_bytes for row in rows)
        for rows in zip(*(result.rows for result in results), strict=False)
    )


def settings_of(plan: TrainingPlan) -> AllocatorSettings:
    """Return the allocator's settings in a run of `plan`; torch's message in a `PlanError`."""
    return parse_settings(plan.alloc_conf)
