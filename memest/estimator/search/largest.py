"""Search for the largest batch size or sequence length that fits a GPU.

A size fits if its program, replayed under the GPU's limit as in `predict`, fits. The search does
not assume that a size with more memory fits worse. The allocator packs some sizes better than their
neighbours, and frees its cache when a GPU is full.

1. Let the size grow fourfold until it does not fit; close in by secant and bisection, so that
   `value` fits and `value + 1` does not.
2. Try the sizes above, one by one, while the bytes requested at one moment stay below the
   limit (more cannot fit), at most `NUM_NEIGHBOURS` of them.
3. Trace the size above the answer by itself. If the program made from traces of other sizes
   (`reuse`) is not the same to the byte, search again from traces at the answer.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from memest.engines import Event, find_engine, notify
from memest.errors import MemestError, PlanError, raise_if_all_failed, result_or_error
from memest.estimator.allocator.blocks import round_request
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.predict import Trial, usable_bytes
from memest.estimator.replay.replay import Program, TracedPlan, rename, streams_of
from memest.estimator.replay.reuse import NotInterpolable, with_value
from memest.estimator.search.related_plans import GROWTH, SPACING, TraceSeries
from memest.estimator.tensors.storages import free_of
from memest.models_meta.assemble import sequence_length
from memest.models_meta.batch import MAX_TOKENS
from memest.models_meta.registry import resolve_config
from memest.plan import TrainingPlan
from memest.plan.reading import read_table
from memest.plan.training_plan import PLAN_KEYS
from memest.report import Verdict

SCHEMA = "memest.largest/1"

NUM_NEIGHBOURS = {"batch_size": 16, "seq_len": 2}  # sizes above the answer that are tried
NUM_ANCHORS = 3  # searches from traces near the answer, before every size is traced
FIRST_SEQ_LEN = 64  # first sequence length of the search


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """Largest batch size or sequence length with which a plan fits a GPU, and how it was found.
    `value` is None if not even the smallest size fits; the other fields are then those of the
    smallest."""

    plan: TrainingPlan  # plan with the largest value, or with the smallest if none fits
    gpu: str
    key: str  # `batch_size` or `seq_len`
    value: int | None  # largest value; None if not even the smallest fits
    peak_allocated_bytes: int
    peak_reserved_bytes: int  # peak of `value`; if none fits, of the smallest, unlimited
    verdict: Verdict  # verdict of `plan` on this GPU
    next_needs_bytes: int | None  # least limit for `value + 1`; None beyond `ceiling`
    at: str  # place where the next larger value runs out of memory
    ceiling: str  # bound other than memory that ended the search; else empty
    num_traces: int
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with `value` as `max_batch_size` or `max_seq_len` (None: none
        fits)."""
        return {
            "schema": SCHEMA, "name": self.plan.label, "gpu": self.gpu,
            f"max_{self.key}": self.value, "fits": self.value is not None,
            "limit_bytes": self.verdict.limit_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "needs_bytes": self.verdict.needs_bytes, "margin_bytes": self.verdict.margin_bytes,
            "is_tight": self.verdict.is_tight,
            "next_needs_bytes": self.next_needs_bytes, "next_oom_at": self.at,
            "ceiling": self.ceiling, "num_traces": self.num_traces,
            "elapsed_s": round(self.elapsed_s, 3), "plan": self.plan.to_dict(),
        }  # fmt: skip


def largest(plan: TrainingPlan, gpus: Sequence[Gpu], key: str) -> list[Largest]:
    """Return, for each of `gpus`, the largest `batch_size` or `seq_len` (`key`) with which `plan`
    fits. GPUs of one chip share simulations."""
    results = []
    series_by_chip: dict[str, TraceSeries] = {}
    for gpu in gpus:
        series = series_by_chip.setdefault(gpu.chip, TraceSeries(plan, gpu, key))
        results.append(_Search(series, gpu).run())
    return results


def peak_requested(program: Program, num_micro_batches: int) -> int:
    """Return the peak of allocated bytes in the first two steps, with each request rounded to its
    block size. The peak of reserved bytes is at least as large. `num_micro_batches` is the number
    of micro-batches per step of the plan. If a step of `program` has fewer, at most three
    micro-batches of a step are played: the first, one from the middle, and the last. Further ones
    would repeat the events of the one from the middle."""
    num_bytes = [round_request(n) if n else 0 for n in program.storages.num_bytes]
    num_played = len(program.steps[0])
    if num_played != num_micro_batches:
        num_played = min(num_micro_batches, 3)  # the first, one from the middle, the last
    alive: dict[int, None] = {}
    total = peak = 0
    for step in range(2):
        for renames, events in streams_of(program, step, num_played):
            rename(alive, renames)
            for event in events:  # a storage id if it allocates, else `free_of` decodes it
                if event >= 0 and event not in alive:
                    alive[event] = None
                    total += num_bytes[event]
                    peak = max(peak, total)
                elif event < 0 and (index := free_of(event)) in alive:
                    del alive[index]
                    total -= num_bytes[index]
            if events is program.setup:  # the setup has no limit
                peak = total
    return peak


class _Search:
    """Search for the largest value of one plan key with which the plan of `series` fits `gpu`."""

    def __init__(self, series: TraceSeries, gpu: Gpu) -> None:
        self.series, self.plan, self.gpu = series, series.plan, gpu
        self.limit = usable_bytes(series.plan, gpu)
        self._is_batch = series.key == "batch_size"
        self._may_interpolate = True  # False if every size is simulated
        self._trials: dict[int, Trial | PlanError] = {}
        self._config = resolve_config(
            self.plan.model_name, trust_remote_code=self.plan.trust_remote_code
        )

    def run(self) -> Largest:
        """Search with interpolated programs until simulated runs near the answer confirm it. If
        none do, search again and simulate every size."""
        start_time = time.perf_counter()
        low = self._search()
        for _ in range(NUM_ANCHORS):
            if self._is_confirmed(low):
                break
            self.series.forget_interpolations()
            self._trials.clear()
            with suppress(NotInterpolable):
                self.series.interpolation(abs(low), SPACING[self.series.key])
            low = self._search()
        else:
            self._may_interpolate = False
            self._trials.clear()
            low = self._search()
        return self._report(low, time.perf_counter() - start_time)

    def trial(self, value: int) -> Trial | None:
        """Return the plan's cached result at the size `value`; None if the plan is invalid."""
        if value not in self._trials:
            label = f"{self.plan.label}: {self.series.key} {value} on {self.gpu.name}"
            notify(Event(label=label, is_done=False, weight=0, total=0, task=value))
            try:
                self._trials[value] = Trial(self._traced(value), self.plan, self.gpu)
            except PlanError as error:
                self._trials[value] = error
        result = self._trials[value]
        return result if isinstance(result, Trial) else None

    def _traced(self, value: int) -> TracedPlan:
        plan = with_value(self.plan, self.series.key, value)  # raises if it is no valid plan
        if not self._may_interpolate:
            return self.series.at(value)
        # an interpolation does not run the checks of a simulated run
        if self._is_batch:
            num_tokens = value * self.series.at(2).seq_len
        else:
            sequence_length(plan, self._config)  # raises if the model has no such positions
            num_tokens = value * plan.batch_size
        if num_tokens > MAX_TOKENS:
            raise PlanError(f"`{self.series.key}` {value} is beyond {MAX_TOKENS} tokens")
        return self.series.guess(value)

    def _fits(self, value: int) -> bool:
        trial = self.trial(value)
        return trial is not None and trial.fits

    def _search(self) -> int:
        """Return the largest size that fits. If none fits, return minus the smallest valid size."""
        low = self._smallest()
        if low < 1:
            return low
        high = GROWTH * low
        while self._fits(high):
            low, high = high, GROWTH * high
        return self._beyond(self._close_in(low, high))

    def _smallest(self) -> int:
        """Return a size that fits, to begin with, or if none fits, minus the smallest valid one."""
        sizes = [2, 1]  # a batch of one often chooses other kernels, and is rarely the answer
        if not self._is_batch:
            longer = [FIRST_SEQ_LEN << i for i in range(8)]  # up to 8192
            sizes = longer + [FIRST_SEQ_LEN >> i for i in range(7)]  # down to 1
        size = next((value for value in sizes if self.trial(value) is not None), None)
        if size is None:
            raise next(e for e in self._trials.values() if isinstance(e, PlanError))
        invalid = 0
        while not self._fits(size):  # `invalid` is no valid plan, `size` is one
            if size - invalid == 1:
                return -size
            middle = (invalid + size) // 2
            if self.trial(middle) is None:
                invalid = middle
            else:
                size = middle
        return size

    def _close_in(self, low: int, high: int) -> int:
        """Narrow `low`, a size that fits, and `high`, which does not, to neighbours; return
        `low`."""
        spacing = SPACING[self.series.key]
        may_use_secant = True
        while (width := high - low) > 1:
            middle = self._secant(low, high) if may_use_secant else (low + high) // 2
            middle = min(max(middle, low + 1), high - 1)
            if width > spacing and low % spacing == 0 and high % spacing == 0:
                # programs are interpolated at multiples of `spacing` alone
                middle = min(max(middle // spacing, low // spacing + 1) * spacing, high - spacing)
            if self._fits(middle):
                low = middle
            else:
                high = middle
            may_use_secant = 2 * (high - low) <= width  # else bisect once
        return low

    def _secant(self, low: int, high: int) -> int:
        """Return the size between `low` and `high` at which reserved bytes reach the limit, by
        linear interpolation. Return the middle if that is not possible."""
        low_trial, high_trial = self.trial(low), self.trial(high)
        if low_trial is None or high_trial is None:  # an invalid plan
            return (low + high) // 2
        low_bytes = low_trial.scenarios[0].unlimited.peak_reserved_bytes
        growth = high_trial.scenarios[0].unlimited.peak_reserved_bytes - low_bytes
        if growth <= 0:
            return (low + high) // 2
        return low + (self.limit - low_bytes) * (high - low) // growth

    def _beyond(self, value: int) -> int:
        """Return the largest size that fits, at least `value`, which fits. Larger sizes are tried,
        until `NUM_NEIGHBOURS` in a row do not fit. The allocator packs some sizes better than their
        smaller neighbours. The trials end early at a size whose requests alone exceed the limit."""
        largest = value
        num_neighbours = NUM_NEIGHBOURS[self.series.key]
        while value - largest < num_neighbours:
            value += 1
            trial = self.trial(value)
            if trial is None:
                break
            num_micro_batches = self.plan.accumulate_grad_batches
            if peak_requested(trial.traced.program, num_micro_batches) > self.limit:
                break
            if trial.fits:
                largest = value
        return largest

    def _is_confirmed(self, value: int) -> bool:
        """Return whether simulated runs confirm the answer `value`. The interpolated program at
        `value + 1` must equal that of a simulated run. For `seq_len`, the program at `value` is
        compared too, since the next length often chooses other kernels. If `value + 1` is invalid,
        only the program at `value` is compared. A negative `value` is minus the smallest valid
        size, if none fits."""
        sizes = []
        if value > 0 and self.trial(value + 1) is not None:
            sizes.append(value + 1)
        if not sizes or not self._is_batch:
            sizes.append(abs(value))
        guesses = {size: self.series.guess(size) for size in sizes}  # before runs at these sizes
        return all(self.series.trace(size) == traced for size, traced in guesses.items())

    def _report(self, value: int, elapsed_s: float) -> Largest:
        """Return the result for `value`, the largest size that fits or minus the smallest one."""
        size = abs(value)
        trial = self.trial(size)
        assert trial is not None
        next_trial = self.trial(value + 1) if value > 0 else trial
        error = self._trials.get(value + 1)
        replay = trial.results[0] if trial.fits else trial.scenarios[0].unlimited
        return Largest(
            plan=with_value(self.plan, self.series.key, size), gpu=self.gpu.name,
            key=self.series.key, value=value if value > 0 else None,
            peak_allocated_bytes=replay.peak_allocated_bytes,
            peak_reserved_bytes=replay.peak_reserved_bytes, verdict=trial.verdict,
            next_needs_bytes=None if next_trial is None else next_trial.verdict.needs_bytes,
            at="" if next_trial is None else next_trial.verdict.at,
            ceiling=str(error) if isinstance(error, PlanError) else "",
            num_traces=self.series.num_traces, elapsed_s=elapsed_s,
        )  # fmt: skip


TECHNIQUES: dict[str, dict[str, Any]] = read_table(__file__, "techniques.json")
"""Plan keys of each technique and combination, from the baseline on; AdamW unless one is named."""

_TECHNIQUE_KEYS = {
    "precision", "optim", "momentum", "nesterov", "act_ckpt", "use_lora", "use_qlora",
    "double_quant", "quant", "kbit_ckpt",
}  # fmt: skip
"""Keys of a plan that a technique sets."""

_ADAPTER_KEYS = {
    name for name, row in PLAN_KEYS.items() if row.section == PLAN_KEYS["use_lora"].section
}


@dataclass(frozen=True, slots=True)
class TechniqueRow:
    """Largest batch size or sequence length with one technique on one GPU, or the error."""

    technique: str
    gpu: str
    largest: Largest | None
    error: str = ""  # error of a technique that does not work with the model

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        values = {} if self.largest is None else self.largest.to_dict()
        return {"technique": self.technique, "gpu": self.gpu, "error": self.error} | values


def technique_values(plan: TrainingPlan) -> dict[str, dict[str, Any]]:
    """Return the keys of `plan` with each of `TECHNIQUES`, as {technique: {plan key: value}}. Keys
    that techniques decide, such as `optim`, have the technique's values. Other keys have the values
    of `plan`. Keys that a technique ignores are left out, such as `freeze` with LoRA."""
    values_by_technique = {}
    for technique, changes in TECHNIQUES.items():
        dropped = set(_TECHNIQUE_KEYS)
        if "use_qlora" not in changes:
            dropped |= {"quant_skip", "quant_load"}
        if "use_lora" in changes or "use_qlora" in changes:
            dropped.add("freeze")
        else:
            dropped |= _ADAPTER_KEYS
        if plan.offloads:  # offload works with one optimizer only
            dropped.remove("optim")
        values = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in dropped}
        values_by_technique[technique] = values | changes | {"name": f"{plan.label}: {technique}"}
    return values_by_technique


def largest_of_all(
    plan: TrainingPlan, gpus: Sequence[Gpu], key: str = "batch_size", *, jobs: int | None = None
) -> list[TechniqueRow]:
    """Return the largest `batch_size` or `seq_len` (`key`) with each of `TECHNIQUES` on each GPU.
    Rows are ordered by technique. A technique that cannot be run gives rows with an `error`. `jobs`
    is the number of processes; None is one per core. Raise `MemestError` if none of the techniques
    can be run; the error is the first one's."""
    search = partial(result_or_error, _rows, gpus=tuple(gpus), key=key)
    tasks = list(technique_values(plan).items())
    results = find_engine("local", jobs).map(
        search, tasks, died=lambda task, error: error, label=lambda task: f"{plan.label}, {task[0]}"
    )
    raise_if_all_failed(results)
    rows: list[TechniqueRow] = []
    for (name, _), result in zip(tasks, results, strict=True):
        if isinstance(result, MemestError):
            rows += [TechniqueRow(name, gpu.name, None, str(result)) for gpu in gpus]
        else:
            rows += result
    return rows


def _rows(
    task: tuple[str, Mapping[str, Any]], *, gpus: tuple[Gpu, ...], key: str
) -> list[TechniqueRow]:
    name, values = task
    results = largest(TrainingPlan(**values), gpus, key)
    return [TechniqueRow(name, row.gpu, row) for row in results]
