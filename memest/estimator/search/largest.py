"""The largest batch size, or sequence length, at which a plan fits a card.

Whether a size fits is decided by replaying its program under the card's limit, as `predict` does.
The search does not take it for granted that what needs more memory fits worse: the allocator packs
one size better than its neighbour, and gives back its cache when a card is full.

1. Let the size grow fourfold until it does not fit; close in by secant and bisection, so that
   `value` fits and `value + 1` does not.
2. Look at the sizes above, one by one, for as long as even the bytes requested at one moment stay
   below the limit (what requests more cannot fit), at most `NUM_NEIGHBOURS` of them.
3. Trace the size above the answer by itself. Where the program that was made from traces of other
   sizes (`reuse`) is not the same to the byte, search again from traces at the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memest.errors import PlanError
from memest.estimator.allocator.blocks import round_request
from memest.estimator.device.storages import death_of
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.predict import usable_bytes
from memest.estimator.readings import (
    Reading,
    readings_of,
    replay_plan,
    run_under,
    verdict_of,
    verdict_over,
)
from memest.estimator.search.trace_series import GROWTH, SPACING, TraceSeries
from memest.estimator.trace.family.reuse import FormBroken, with_value
from memest.estimator.trace.program import Program
from memest.estimator.trace.replay import Replayed, rename, streams_of
from memest.estimator.trace.traced import TracedPlan
from memest.models_meta.assemble import sequence_length
from memest.models_meta.batch.make import MAX_TOKENS
from memest.models_meta.registry import resolve_config
from memest.plan import TrainingPlan
from memest.report import Outcome, Verdict

SCHEMA = "memest.largest/1"

NUM_NEIGHBOURS = {"batch_size": 16, "seq_len": 2}
"""Sizes above the answer that are looked at for one that fits all the same."""

NUM_ANCHORS = 3
"""Times that the search is repeated from traces near its answer before every size is traced."""

FIRST_SEQ_LEN = 64
"""Where the search for a sequence length begins."""


class Trial:
    """What a run of a traced plan on one card comes to; replayed as far as it is asked for.

    Args:
        traced: the plan's program.
        plan: how many steps and micro-batches it has.
        limit: bytes that the allocator may reserve.
        free: the replay without a limit, where it is known.
    """

    def __init__(
        self, traced: TracedPlan, plan: TrainingPlan, limit: int, free: Replayed | None = None
    ) -> None:
        self._traced, self._plan, self._limit = traced, plan, limit
        if free is not None:
            self.free = free

    @cached_property
    def _readings(self) -> list[Reading]:
        """More than one where ranks differ, or time decides; the one that reserves most first."""
        is_one = not self._plan.is_distributed
        return [] if is_one else readings_of(self._plan, self._traced)

    @cached_property
    def _over_readings(self) -> tuple[Verdict, tuple[Replayed, ...]]:
        return verdict_over(self._readings, self._limit)

    @cached_property
    def free(self) -> Replayed:
        """The run on a card without end."""
        if self._readings:
            return self._readings[0].free
        if "result" in self.__dict__ and not self.result.num_retries:
            return self.result  # it never came to the limit
        return self._replay(None)

    @cached_property
    def result(self) -> Replayed:
        """The run on the card."""
        if self._readings:
            return self._over_readings[1][0]
        free = self.__dict__.get("free")
        if free is not None:
            return run_under(self._plan, self._traced, self.free, self._limit)
        return self._replay(self._limit)

    @cached_property
    def verdict(self) -> Verdict:
        """As `predict` gives it."""
        if self._readings:
            return self._over_readings[0]
        return verdict_of(self.result, self.free, self._limit, self._traced)

    @cached_property
    def requested_bytes(self) -> int:
        """Most bytes requested at one moment, each as its block: no allocator can reserve less."""
        return peak_requested(self._traced.program, self._plan.accumulate_grad_batches)

    @property
    def fits(self) -> bool:
        """Whether it runs to its end, in every reading."""
        if self._readings:
            return self.verdict.verdict is Outcome.FITS
        return self.result.failed is None

    def _replay(self, limit_bytes: int | None) -> Replayed:
        return replay_plan(self._plan, self._traced, limit_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest value of one key with which a plan fits a card, and how it was found."""

    plan: TrainingPlan
    """With the largest value, or the smallest that was tried where none fits."""

    gpu: str
    key: str
    """`batch_size` or `seq_len`."""

    value: int | None
    """None where not even the smallest fits."""

    limit_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Of `value` on this card; where none fits, what the smallest needs on a card without end."""

    margin_bytes: int
    """Limit less the peak reserved; below 0 where none fits."""

    next_needs_bytes: int | None
    """What `value + 1` would reserve on a card without end; None where it is beyond `ceiling`."""

    at: str
    """Where the next larger value runs out of memory."""

    ceiling: str
    """What stopped the search before memory did; empty elsewhere."""

    num_traces: int
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `max_batch_size` or `max_seq_len` is `value`."""
        return {
            "schema": SCHEMA,
            "name": self.plan.label,
            "gpu": self.gpu,
            f"max_{self.key}": self.value,
            "fits": self.value is not None,
            "limit_bytes": self.limit_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "margin_bytes": self.margin_bytes,
            "next_needs_bytes": self.next_needs_bytes,
            "next_oom_at": self.at,
            "ceiling": self.ceiling,
            "num_traces": self.num_traces,
            "elapsed_s": round(self.elapsed_s, 3),
            "plan": self.plan.to_dict(),
        }


def max_batch(plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False) -> Largest:
    """The largest `batch_size` with which `plan` fits `gpu`; the plan's own does not matter.

    Raises:
        MemestError: the plan cannot be run, or memest cannot model it.
    """
    return largest(plan, [gpu], "batch_size", trust_remote_code=trust_remote_code)[0]


def max_seq_len(plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False) -> Largest:
    """The largest `seq_len` with which `plan` fits `gpu`, up to the model's positions.

    Raises:
        MemestError: the plan cannot be run, or memest cannot model it.
    """
    return largest(plan, [gpu], "seq_len", trust_remote_code=trust_remote_code)[0]


def largest(
    plan: TrainingPlan, gpus: Sequence[Gpu], key: str, *, trust_remote_code: bool = False
) -> list[Largest]:
    """The largest value of `key` on each of `gpus`; cards of one chip share their traces."""
    found = []
    all_series: dict[tuple[Any, ...], TraceSeries] = {}
    for gpu in gpus:
        chip = (gpu.capability, gpu.num_sms)
        if chip not in all_series:
            all_series[chip] = TraceSeries(plan, gpu, key, trust_remote_code=trust_remote_code)
        found.append(_Search(all_series[chip], gpu).run())
    return found


def boundary_suite(found: Sequence[Largest]) -> dict[str, Any]:
    """A suite for `memest validate`: of each plan the largest value that fits, and the next one.

    Each experiment is capped to the limit that the search had, so that any larger GPU of the same
    chip runs out of memory where the card would.
    """
    experiments = []
    for row in found:
        plan = {k: v for k, v in row.plan.to_dict().items() if v is not None and v != []}
        plan |= {"memory_limit": row.limit_bytes}
        plan.pop("gpu", None)
        for value, expected in ((row.value, "fits"), ((row.value or 0) + 1, "oom")):
            if value:
                name = f"{row.plan.label}, {row.key} {value}"
                experiments.append({**plan, "name": name, row.key: value, "expected": expected})
    return {"experiments": experiments}


def limit_of(plan: TrainingPlan, gpu: Gpu) -> int:
    """Bytes that the allocator may reserve."""
    return usable_bytes(plan, gpu)


def peak_requested(program: Program, num_micro_batches: int) -> int:
    """Most bytes alive at one moment of the steps, each request as the block that it needs.

    No allocator reserves less. A third step, and a micro-batch in the middle, repeat another.
    """
    num_bytes = [round_request(n) if n else 0 for n in program.storages.num_bytes]
    num_played = len(program.steps[0])
    if num_played != num_micro_batches:  # one from the middle is as another
        num_played = min(num_micro_batches, 3)
    alive: dict[int, None] = {}
    total = peak = 0
    for step in range(2):
        for shift, events in streams_of(program, step, num_played):
            rename(alive, shift)
            for event in events:
                if event >= 0:
                    if event not in alive:
                        alive[event] = None
                        total += num_bytes[event]
                        peak = max(peak, total)
                elif death_of(event) in alive:
                    del alive[death_of(event)]
                    total -= num_bytes[death_of(event)]
            if events is program.setup:  # how the model came onto the GPU is not judged
                peak = total
    return peak


class _Search:
    """The search of the module's docstring, for one plan and card."""

    def __init__(self, series: TraceSeries, gpu: Gpu) -> None:
        self.series, self.plan, self.gpu = series, series.plan, gpu
        self.limit = limit_of(series.plan, gpu)
        self._is_batch = series.key == "batch_size"
        self._guesses = True
        self._trials: dict[int, Trial | PlanError] = {}
        self._config = resolve_config(
            self.plan.model_name, trust_remote_code=series.trust_remote_code
        )

    def run(self) -> Largest:
        """Search until a trace confirms the answer; at last with a trace for every size."""
        started = time.perf_counter()
        low = self._search()
        for _ in range(NUM_ANCHORS):
            if not self._guesses or self._is_confirmed(low):
                break
            self.series.forget_families()
            self._trials.clear()
            with suppress(FormBroken):
                self.series.family(max(low, -low), SPACING[self.series.key])
            low = self._search()
        else:
            self._guesses = False
            self._trials.clear()
            low = self._search()
        return self._report(low, time.perf_counter() - started)

    def trial(self, value: int) -> Trial | None:
        """What `value` comes to, or None where the plan does not exist with it; asked once."""
        if value not in self._trials:
            try:
                self._trials[value] = Trial(self._traced(value), self.plan, self.limit)
            except PlanError as error:
                self._trials[value] = error
        found = self._trials[value]
        return found if isinstance(found, Trial) else None

    def _traced(self, value: int) -> TracedPlan:
        plan = with_value(self.plan, self.series.key, value)  # refuses what is no plan
        if not self._guesses:
            return self.series.at(value)
        if not self._is_batch:
            sequence_length(plan, self._config)
        tokens = value * (self.series.at(2).seq_len if self._is_batch else plan.batch_size)
        if tokens > MAX_TOKENS:
            raise PlanError(f"`{self.series.key}` {value} is beyond {MAX_TOKENS} tokens")
        return self.series.guess(value)

    def _fits(self, value: int) -> bool:
        found = self.trial(value)
        return found is not None and found.fits

    def _search(self) -> int:
        """The largest value that fits, or less than 1: minus the smallest, which does not."""
        low = self._smallest()
        if low < 1:
            return low
        high = GROWTH * low
        while self._fits(high):
            low, high = high, GROWTH * high
        return self._beyond(self._close_in(low, high))

    def _smallest(self) -> int:
        """A value that fits, or minus the smallest value that makes a plan."""
        if self._is_batch:
            tries = [2, 1]  # a batch of one is a form of its own, and seldom the answer
        else:
            tries = [FIRST_SEQ_LEN << i for i in range(8)] + [FIRST_SEQ_LEN >> i for i in range(7)]
        allowed = next((value for value in tries if self.trial(value) is not None), None)
        if allowed is None:
            raise next(e for e in self._trials.values() if isinstance(e, PlanError))
        too_small = 0
        while not self._fits(allowed):
            value = (too_small + allowed) // 2
            if allowed - too_small == 1:
                return -allowed
            if self.trial(value) is None:
                too_small = value
            else:
                allowed = value
        return allowed

    def _close_in(self, low: int, high: int) -> int:
        """`low` fits and `high` does not; returned is a value that fits below one that does not."""
        is_secant = True
        while high - low > 1:
            middle = (low + high) // 2
            above = self.trial(high)
            if is_secant and above is not None:
                middle = min(max(self._secant(low, high), low + 1), high - 1)
            spacing = SPACING[self.series.key]
            if high - low > spacing and not (low % spacing or high % spacing):
                middle = min(max(middle // spacing, low // spacing + 1) * spacing, high - spacing)
            width = high - low
            if self._fits(middle):
                low = middle
            else:
                high = middle
            is_secant = 2 * (high - low) <= width  # else bisect once
        return low

    def _secant(self, low: int, high: int) -> int:
        """Where the reserved bytes would cross the limit if they grew evenly."""
        below, above = self.trial(low), self.trial(high)
        assert below is not None
        assert above is not None
        room = self.limit - below.free.peak_reserved_bytes
        growth = above.free.peak_reserved_bytes - below.free.peak_reserved_bytes
        return low + room * (high - low) // growth if growth > 0 else (low + high) // 2

    def _beyond(self, value: int) -> int:
        """`value`, or a larger one that fits although a smaller does not."""
        largest = value
        num_neighbours = NUM_NEIGHBOURS[self.series.key]
        while value - largest < num_neighbours:
            value += 1
            found = self.trial(value)
            if found is None or found.requested_bytes > self.limit:
                break
            if found.fits:
                largest = value
        return largest

    def _is_confirmed(self, value: int) -> bool:
        """Whether traces of the answer's neighbourhood say what was guessed there."""
        sizes = [v for v in (value + 1,) if v > 1 and self.trial(v) is not None]
        if not sizes or not self._is_batch:  # of lengths the next is often of another form
            sizes.append(max(value, -value))
        guessed = {v: self.series.guess(v) for v in sizes}
        return all(self.series.trace(v).traced == traced for v, traced in guessed.items())

    def _report(self, value: int, elapsed_s: float) -> Largest:
        shown = max(value, -value)
        found = self.trial(shown)
        assert found is not None
        above = self.trial(value + 1) if value > 0 else found
        error = self._trials.get(value + 1)
        used = found.result if found.fits else found.free
        return Largest(
            plan=with_value(self.plan, self.series.key, shown),
            gpu=self.gpu.name,
            key=self.series.key,
            value=value if value > 0 else None,
            limit_bytes=self.limit,
            peak_allocated_bytes=used.peak_allocated_bytes,
            peak_reserved_bytes=used.peak_reserved_bytes,
            margin_bytes=found.verdict.margin_bytes,
            next_needs_bytes=None if above is None else above.free.peak_reserved_bytes,
            at="" if above is None else above.verdict.at,
            ceiling=str(error) if isinstance(error, PlanError) else "",
            num_traces=self.series.num_traces,
            elapsed_s=elapsed_s,
        )
