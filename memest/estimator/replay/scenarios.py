"""Scenarios of a plan: a replay for each rank that differs and each free timing of shared blocks.

The return of a block that two streams use, or that a collective holds, depends on the speed of the
GPU. So each rank is replayed with three free timings: immediately, at the latest moment, and
immediately in the first step alone. A real rank should be between the extremes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from memest.estimator.allocator.settings import parse_settings
from memest.estimator.replay.replay import Replayed, Run, TracedPlan
from memest.estimator.tensors.storages import FreeTiming, Site, StorageTable
from memest.plan import TrainingPlan
from memest.report import Interval, Outcome, Verdict
from memest.units import ceil_div, format_bytes

UNIT_BYTES = 2 << 20  # step of the search: segments are multiples of it (`kSmallBuffer`)
NUM_PROBES = 8  # evenly spaced limits that are tried from the top before the bisection
MAX_SEARCH_EVENTS = 1_500_000  # replayed by a search at most, 2 s of CPU; most runs have 100,000
MIN_REPLAYS = 3  # replays of a search, however long the run is


class LimitResult(NamedTuple):
    """Result of a replay under a limit. `units` is the peak reserved if the run `fits`, else the
    limit to which requests without room raised the limit. It is 0 if such a request failed."""

    fits: bool
    units: int  # of `UNIT_BYTES`


class LeastLimit:
    """Search for the least memory limit under which a run fits, by replays. Reserved bytes do not
    measure this need, since the allocator fills the GPU with cached blocks.

    A run can fit under one limit and fail under a larger one. Under the smaller limit, the
    allocator frees cached blocks earlier, which can leave larger free blocks. So the search tries
    up to `NUM_PROBES` limits from the top downwards, until one fails. Then it bisects between this
    limit and the lowest one that fits. The result fits, and the result less `UNIT_BYTES` does not.
    If `MAX_SEARCH_EVENTS` allows few replays, the bisection ends early, at a limit that fits.

    Args:
        replay: function that replays the run under a limit in bytes. A request for which no memory
            is left raises the limit, so that the replay can go on. The function returns (True, peak
            reserved) if no request did so, else (False, raised limit). In some replays, such a
            request fails instead, and the function returns (False, 0). This is so with allocator
            settings other than the defaults, and if a library tries requests that may fail.
        allocated_bytes: peak allocated without a limit.
        reserved_bytes: peak reserved without a limit.
        num_events: events of one replay.
        has_early_effect: whether the limit has an effect before it is reached. Examples are
            `garbage_collection_threshold`, and expandable segments under the cap of
            `set_per_process_memory_fraction`.
    """

    def __init__(
        self, replay: Callable[[int], tuple[bool, int]], allocated_bytes: int, reserved_bytes: int,
        *, num_events: int, has_early_effect: bool = False,
    ) -> None:  # fmt: skip
        self._replay = replay
        self._num_replays_left = max(MIN_REPLAYS, MAX_SEARCH_EVENTS // max(1, num_events))
        self._allocated = allocated_bytes // UNIT_BYTES
        self._reserved = ceil_div(reserved_bytes, UNIT_BYTES)
        self._has_early_effect = has_early_effect
        self._result_by_limit: dict[int, LimitResult] = {}
        self._may_probe = self._num_replays_left > 2 * NUM_PROBES

    def add(self, limit_bytes: int, fits: bool, result_bytes: int) -> None:
        """Record a replay under `limit_bytes`. `result_bytes` are the bytes of its `LimitResult`,
        before they are rounded up to whole units."""
        result = LimitResult(fits, ceil_div(result_bytes, UNIT_BYTES))
        self._result_by_limit[limit_bytes // UNIT_BYTES] = result

    def fits(self, limit_bytes: int) -> bool:
        """Return whether the run fits under `limit_bytes`."""
        return self._result_under(limit_bytes // UNIT_BYTES).fits

    def bytes_for(self, limit_bytes: int) -> int:
        """Return the least limit in bytes under which the run fits; try `limit_bytes` first."""
        limit, top = limit_bytes // UNIT_BYTES, self._reserved
        while not self._result_under(top).fits:  # only if limits have an early effect
            top += ceil_div(top, 8)  # by an eighth
        # low fails, high fits
        low, high = limit, self._result_under(top).units
        if self._result_under(limit).fits:
            low, high = -1, self._result_under(limit).units
        too_low = min(self._allocated, top) - 1  # less than the allocated peak
        if not self._may_probe:
            return self._bisect(max(low, min(too_low, high - 1)), high)
        for step in reversed(range(NUM_PROBES)):
            probe = too_low + step * (top - too_low) // NUM_PROBES
            if low < probe < high and self._may_try(probe):
                result = self._result_under(probe)
                if not result.fits:
                    return self._bisect(probe, high, guess=result.units)
                high = result.units
        return self._bisect(low, high)

    def _bisect(self, low: int, high: int, guess: int | None = None) -> int:
        """Return the least limit found, in bytes, between `low`, which fails, and `high`, which
        fits. Arguments are in units of `UNIT_BYTES`; `guess`, unless None, is tried first."""
        while high - low > 1:  # low fails, high fits
            probe = (low + high) // 2 if guess is None else max(low + 1, min(guess, high - 1))
            if not self._may_try(probe):
                break
            fits, units = self._result_under(probe)
            if fits:  # if a guess fits, the limit just below is likely to fail and end the search
                guess = units - 1 if guess is not None and probe < high - 1 else None
                high = units
            else:  # the limit to which requests raised the middle one is likely to fit
                guess = units if guess is None else None
                low = probe
        return high * UNIT_BYTES

    def _may_try(self, limit: int) -> bool:
        return limit in self._result_by_limit or self._num_replays_left > 0

    def _result_under(self, limit: int) -> LimitResult:
        """Return the result of a replay under `limit` units of `UNIT_BYTES`; it is cached."""
        if limit not in self._result_by_limit:
            self._result_by_limit[limit] = self._replay_under(limit)
        return self._result_by_limit[limit]

    def _replay_under(self, limit: int) -> LimitResult:
        if limit < 0:
            return LimitResult(fits=False, units=0)
        if not self._has_early_effect:
            if limit >= self._reserved:
                return LimitResult(fits=True, units=self._reserved)
            # a run that reserves less than both limits is the same under both: the same requests
            # of the driver succeed and fail
            for other_limit, result in self._result_by_limit.items():
                if result.fits and result.units <= limit <= other_limit:
                    return result
        self._num_replays_left = max(0, self._num_replays_left - 1)
        fits, num_bytes = self._replay(limit * UNIT_BYTES)
        units = ceil_div(num_bytes, UNIT_BYTES)
        if fits:  # expandable segments can exceed the size that was compared with a cap
            units = min(limit, units)
        return LimitResult(fits, units)


def highest_need(runs: Sequence[LeastLimit], limit_bytes: int) -> int:
    """Return the highest of the least limits in bytes under which `runs` fit; each search tries
    `limit_bytes` first."""
    need_bytes = 0
    for run in runs:
        # a run that fits under `need_bytes` can fail under the larger `limit_bytes`
        fails_at_limit = need_bytes <= limit_bytes and not run.fits(limit_bytes)
        if need_bytes == 0 or fails_at_limit or not run.fits(need_bytes):
            need_bytes = max(need_bytes, run.bytes_for(limit_bytes))
    return need_bytes


def run_of_plan(plan: TrainingPlan, traced: TracedPlan) -> Run:
    """Return `traced`, one rank's simulated run, as a run to replay with the plan's steps, number
    of micro-batches and allocator settings."""
    settings = parse_settings(plan.alloc_conf)
    return Run(
        traced.program, plan.steps, plan.accumulate_grad_batches, settings,
        is_share=plan.memory_limit is not None or settings.memory_fraction < 1,
    )  # fmt: skip


class Scenario:
    """Run of one rank, with an assumed `timing`: when blocks are freed that several streams use.
    `unlimited` is its replay without a memory limit, made here if it is None. `traced` is the
    simulated run of the plan's rank, None for a script."""

    def __init__(
        self, run: Run, timing: FreeTiming = FreeTiming.LATEST, unlimited: Replayed | None = None,
        traced: TracedPlan | None = None,
    ) -> None:  # fmt: skip
        self.run, self.timing = run, timing
        self.unlimited = unlimited or run.on(None, timing)
        self._traced = traced
        self.least = LeastLimit(
            lambda limit: _fits_and_bytes(run.on(limit, timing, is_soft=True)),
            self.unlimited.peak_allocated_bytes, self.unlimited.peak_reserved_bytes,
            num_events=self.unlimited.num_events, has_early_effect=not run.settings.is_default,
        )  # fmt: skip

    @property
    def traced(self) -> TracedPlan:
        """The simulated run of the plan's rank; `AssertionError` for a script, which has none."""
        assert self._traced is not None, "a script has none"
        return self._traced

    def under(self, limit_bytes: int) -> Replayed:
        """Replay the run with at most `limit_bytes` reserved, and return the result."""
        if self.unlimited.peak_reserved_bytes <= limit_bytes and self.run.settings.is_default:
            return self.unlimited
        result = self.run.on(limit_bytes, self.timing)
        self.least.add(limit_bytes, *_fits_and_bytes(result))
        return result


def _fits_and_bytes(result: Replayed) -> tuple[bool, int]:
    if result.failed is not None or result.lacking_bytes:
        return False, result.lacking_bytes
    return True, result.peak_reserved_bytes


def scenarios_of(plan: TrainingPlan, worst: TracedPlan) -> list[Scenario]:
    """Return a scenario for each simulated rank, and each assumed time at which blocks that streams
    share are freed. The ranks are `worst`, which reserves the most, and its `others`. The scenario
    that reserves the most is first."""
    scenarios: list[Scenario] = []
    for traced in (worst, *worst.others):
        timings = [FreeTiming.LATEST]
        if plan.world_size > 1 and traced.program.storages.depends_on_time:
            timings = list(FreeTiming)
        for timing in timings:
            scenarios.append(Scenario(run_of_plan(plan, traced), timing, traced=traced))
    key = attrgetter("unlimited.peak_reserved_bytes", "unlimited.peak_allocated_bytes")
    return sorted(scenarios, key=key, reverse=True)


def verdict_over(
    scenarios: Sequence[Scenario], results: Sequence[Replayed], limit_bytes: int, spread_bytes: int
) -> Verdict:
    """Return the verdict on a GPU from `results`, the replay of each scenario under `limit_bytes`.
    The verdict is `fits` if every scenario fits, OOM if a rank fails in all its scenarios, else
    `may`. It stores `spread_bytes`, by which another driver can lower the limit."""
    needs = highest_need([scenario.least for scenario in scenarios], limit_bytes)
    failed = [i for i, result in enumerate(results) if result.failed is not None]
    index = failed[0] if failed else 0
    result, storages = results[index], scenarios[index].run.program.storages
    verdict = Verdict(
        verdict=Outcome.FITS, margin_bytes=limit_bytes - needs, limit_bytes=limit_bytes,
        reserved_bytes=result.peak_reserved_bytes, spread_bytes=spread_bytes,
    )  # fmt: skip
    if result.failed is None:
        return verdict
    at = where_failed(result.failed.step, storages.sites[result.failed.storage])
    programs = [id(scenario.run.program) for scenario in scenarios]  # one per rank
    fitting = {programs[i] for i, result in enumerate(results) if result.failed is None}
    if not fitting.issuperset(programs):  # a rank fails in all its scenarios
        return replace(verdict, verdict=Outcome.OOM, at=at)
    decides = describe_deferred_blocks(storages)
    return replace(verdict, verdict=Outcome.MAY, at=at, decides=decides)


def where_failed(step: int, site: Site) -> str:
    """Return where a request failed, as text: `step`, and the phase, module and so on of `site`."""
    return ", ".join(filter(None, (f"step {step}", site.phase, site.module, site.op, site.where)))


def describe_deferred_blocks(storages: StorageTable) -> str:
    """Describe the blocks in `storages` whose free depends on GPU timing; "" if there are none."""
    clauses = []
    if storages.stashed:
        num_bytes = sum(storages.num_bytes[index] for index in storages.stashed)
        clauses.append(f"{format_bytes(num_bytes)} of the first step's buckets may live on")
    if storages.deferred:
        largest = max(storages.deferred, key=storages.num_bytes.__getitem__)
        clauses.append(
            f"{len(storages.deferred)} blocks that two streams share come back sooner or later,"
            f" the largest of {format_bytes(storages.num_bytes[largest])} for"
            f" {storages.kinds[largest]}"
        )
    return "; ".join(clauses)


def interval(values: Iterable[int], *, outside_bytes: int = 0) -> Interval:
    """Return the least and the greatest of `values`, each with `outside_bytes` added."""
    totals = [value + outside_bytes for value in values]
    return Interval(low_bytes=min(totals), high_bytes=max(totals))


def intervals(results: Sequence[Replayed], *, outside_bytes: int) -> dict[str, Interval]:
    """Return the least and greatest peak over `results`, for `allocated`, `reserved` and `process`.
    The bytes of the process are the reserved ones plus `outside_bytes`, outside the allocator."""
    reserved = [replay.peak_reserved_bytes for replay in results]
    return {
        "allocated": interval(replay.peak_allocated_bytes for replay in results),
        "reserved": interval(reserved),
        "process": interval(reserved, outside_bytes=outside_bytes),
    }


def phase_intervals(results: Sequence[Replayed]) -> tuple[Interval, ...]:
    """Return, for each phase that all `results` reach, the least and greatest bytes allocated at
    its end."""
    return tuple(
        interval(row.allocated_bytes for row in rows)
        for rows in zip(*(result.rows for result in results), strict=False)
    )
