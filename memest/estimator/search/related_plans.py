"""Programs (allocator events) of plans that train one model, from few simulated runs.

The plans differ in the optimizer, checkpointing, the micro-batches of a step, and the batch size or
the sequence length.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from memest.errors import MemestError, PlanError, UnsupportedError
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.replay.replay import TracedPlan
from memest.estimator.replay.reuse import (
    DEGREE,
    Interpolation,
    NotInterpolable,
    OptimizerStep,
    of_one_micro_batch,
    with_value,
)
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.replay.virtual_run import logged_trace, repeats_micro_batches
from memest.plan import TrainingPlan

SPACING = {"batch_size": 1, "seq_len": 64}  # of a guess's samples: attention pads to 8 and 32
GROWTH = 4  # factor to the next size that a search tries while everything fits

MAY_TRACE: ContextVar[bool] = ContextVar("MAY_TRACE", default=True)
"""False in a forked process, where autograd does not work: new simulated runs are refused."""


def _run_if_allowed(trace: Callable[..., TracedPlan], *args: Any) -> TracedPlan:
    """Return `trace(*args)`, the simulated run of a plan. Raise `UnsupportedError` in a forked
    process, which cannot simulate."""
    if not MAY_TRACE.get():
        raise UnsupportedError("a forked process cannot run a plan")
    return trace(*args)


class TraceSeries:
    """Programs of `plan` on `gpu` at any batch size or sequence length (`key`), from few runs."""

    def __init__(self, plan: TrainingPlan, gpu: Gpu, key: str = "batch_size") -> None:
        self.plan, self.gpu, self.key = plan, gpu, key
        self.num_traces = 0
        self._traces: dict[int, TracedPlan] = {}
        self._num_runs = DEGREE[key] + 2  # of a checked interpolation: samples, and one to compare
        self._covered: dict[int, Interpolation] = {}
        self._interpolations: dict[tuple[int, int], Interpolation] = {}
        self._broken: set[tuple[int, int]] = set()  # starts and spacings without an interpolation

    def trace(self, value: int) -> TracedPlan:
        """Simulate the plan with its `key` set to `value`, or return the cached result."""
        if value not in self._traces:
            plan = with_value(self.plan, self.key, value)
            trace = trace_plan if self.must_simulate else logged_trace
            self._traces[value] = _run_if_allowed(trace, plan, self.gpu)
            self.num_traces += 1
        return self._traces[value]

    @property
    def must_simulate(self) -> bool:
        """True if each size has to be simulated, since the plan has a strategy for several GPUs."""
        return self.plan.is_distributed

    def at(self, value: int) -> TracedPlan:
        """Return the run at the size `value`: cached, interpolated if checked (`cover`), or
        simulated."""
        return self.find(value) or self.trace(value)

    def find(self, value: int) -> TracedPlan | None:
        """Return the run at the size `value` if it is cached or can be interpolated, else None."""
        if value in self._traces:
            return self._traces[value]
        if value in self._covered:
            with suppress(NotInterpolable):
                return self._with_length(self._covered[value].at(value), value)
        return None

    def guess(self, value: int) -> TracedPlan:
        """Return the run at the size `value`, interpolated unchecked if possible, else
        simulated."""
        spacing = SPACING[self.key]
        sizes = [v for v in self._traces if v > 1]
        may_be_invalid = self.key == "seq_len" and value < min(sizes, default=0)
        needs_run = self.must_simulate or value == 1 or value % spacing != 0
        if value in self._traces or needs_run or may_be_invalid:
            return self.trace(value)
        for interpolation in reversed(self._interpolations.values()):
            with suppress(NotInterpolable):
                return self._with_length(interpolation.at(value), value)
        if self._is_special(value):
            return self.trace(value)
        for start in dict.fromkeys((min(sizes, default=value), value)):
            with suppress(NotInterpolable, PlanError):
                return self._with_length(self.interpolation(start, spacing).at(value), value)
        return self.trace(value)

    def _is_special(self, value: int) -> bool:
        """Return whether the size `value` has to be simulated, since its kernel choices differ from
        those of other sizes. The other sizes are all simulated ones and `GROWTH * value`, which a
        search tries next. Runs for an interpolation at `value` would then serve no other size."""
        interpolation = next(iter(self._interpolations.values()), None)
        outcomes = None if interpolation is None else interpolation.outcomes(value)
        if interpolation is None or outcomes is None:
            return False
        sizes = (GROWTH * value, *(v for v in self._traces if v > 1))
        return all(interpolation.outcomes(size) != outcomes for size in sizes)

    def forget_interpolations(self) -> None:
        """Drop all interpolations, because one was wrong; simulated runs stay cached."""
        self._interpolations.clear()
        self._covered.clear()

    def cover(self, values: Iterable[int], *, queried: Iterable[int] | None = None) -> None:
        """Prepare interpolations, so that `at` simulates few of the sizes `values`. `queried` are
        the sizes for which `at` will be called; None means all `values`. Other `values` only fill
        the gaps, since an interpolation needs runs at equally spaced sizes. `_cover_by_ends` is
        tried first. Otherwise the sizes are cut into ranges with equal kernel choices. A range is
        interpolated from runs at its first sizes. A simulated run at its largest queried size has
        to agree. Else the range is halved, and each half is tried."""
        if self.must_simulate:
            return
        values = sorted(set(values) - {1})
        queried_sizes = set(values if queried is None else queried)
        for run in runs_of_one_spacing(values):
            if not self._cover_by_ends(run, queried_sizes):
                self._cover(run, queried_sizes)

    def _cover_by_ends(self, progression: Sequence[int], queried: set[int]) -> bool:
        """Interpolate the batch sizes that are in both `progression` and `queried`, from runs at
        the smallest and the largest. Return whether that succeeded. It is tried only if few of the
        equally spaced sizes `progression` are in `queried`. All queried sizes must be multiples of
        the smallest. Kernels may pad other sizes, and padded sizes follow no polynomial."""
        sizes = sorted(queried.intersection(progression))
        is_linear = DEGREE[self.key] == 1
        if not is_linear or not self._num_runs < len(sizes) < len(progression) // 2:
            return False
        first, last = sizes[0], sizes[-1]
        if any(value % first for value in sizes):
            return False
        ends = [self.trace(first), self.trace(last)]
        try:
            interpolation = Interpolation(
                ends, self.gpu, first, last - first, step=progression[1] - progression[0]
            )
            for value in sizes:
                interpolation.at(value)
        except NotInterpolable:
            return False
        self._covered |= dict.fromkeys(sizes, interpolation)
        return True

    def interpolation(self, start: int, spacing: int = 1) -> Interpolation:
        """Return the interpolation from runs at sizes `start`, `start + spacing` and so on,
        unchecked. Raise `NotInterpolable` if the runs differ in more than sizes, or the plan has
        several GPUs."""
        if self.must_simulate:
            raise NotInterpolable(f"`{self.plan.strategy}` is traced size by size")
        if (start, spacing) in self._broken:
            raise NotInterpolable(f"the samples from {start} differ")
        if (start, spacing) not in self._interpolations:
            self._broken.add((start, spacing))
            sizes = [start + i * spacing for i in range(DEGREE[self.key] + 1)]
            samples = [self.trace(size) for size in sizes]
            self._interpolations[start, spacing] = Interpolation(samples, self.gpu, start, spacing)
            self._broken.remove((start, spacing))
        return self._interpolations[start, spacing]

    def agrees(self, interpolation: Interpolation, value: int) -> bool:
        """Return whether `interpolation` equals a simulated run at the size `value`."""
        with suppress(NotInterpolable):
            return self._with_length(interpolation.at(value), value) == self.trace(value)
        return False

    def _with_length(self, traced: TracedPlan, value: int) -> TracedPlan:
        return replace(traced, seq_len=value) if self.key == "seq_len" else traced

    def _cover(self, run: Sequence[int], queried: set[int]) -> None:
        """Cover the sizes of `run`, an arithmetic progression, as `cover` describes."""
        if len(queried.intersection(run)) <= self._num_runs:  # no run is saved
            return
        middle = len(run) // 2
        try:
            interpolation = self.interpolation(run[0], run[1] - run[0])
            ends = (i for i, v in enumerate(run) if not interpolation.has_same_kernels(v))
            end = next(ends, len(run))
            sizes = queried.intersection(run[:end])
            if sizes and self.agrees(interpolation, max(sizes)):
                self._covered |= dict.fromkeys(run[:end], interpolation)
                self._cover(run[end:], queried)
                return
            middle = min(middle, end)
        except NotInterpolable:
            pass
        self._cover(run[:middle], queried)
        self._cover(run[middle:], queried)


def runs_of_one_spacing(values: Sequence[int]) -> list[list[int]]:
    """Cut ascending `values` into arithmetic progressions, from the left on.

    >>> runs_of_one_spacing([2, 3, 4, 8, 16, 24])
    [[2, 3, 4], [8, 16, 24]]
    """
    runs: list[list[int]] = []
    for value in values:
        run = runs[-1] if runs else []
        if len(run) == 1 or (len(run) > 1 and value - run[-1] == run[-1] - run[-2]):
            run.append(value)
        else:
            runs.append([value])
    return runs


SAME_MODEL: Mapping[str, Any] = {"optim": "sgd", "act_ckpt": False}
"""Plans that are equal with these values, except for batches, share simulated runs."""


class RelatedPlans:
    """Programs on `gpu` of plans that differ in `key`, optimizer, checkpointing or micro-batches.
    `key` is `batch_size` or `seq_len`, and `values` are its values in the plans. `sizes` are the
    values for which interpolations are prepared, such as an equally spaced list that includes
    `values`. If `accumulates`, plans are simulated with two micro-batches per step. The program
    with one micro-batch is derived from that run. Each further optimizer is simulated once."""

    def __init__(
        self, gpu: Gpu, sizes: Sequence[int], values: Sequence[int], key: str = "batch_size", *,
        accumulates: bool = True,
    ) -> None:  # fmt: skip
        self.gpu, self.sizes, self.values, self.key = gpu, sizes, values, key
        self.accumulates = accumulates
        self._series: dict[TrainingPlan, TraceSeries] = {}
        self._covered: set[TrainingPlan] = set()
        self._optimizers: dict[TrainingPlan, OptimizerStep | None] = {}
        self._lead: TrainingPlan | None = None

    def at(self, plan: TrainingPlan) -> TracedPlan:
        """Return the program of `plan`; raise `MemestError` if `plan` cannot be predicted."""
        if not repeats_micro_batches(plan):
            return self._traced(plan)
        self._lead = self._lead or plan
        with suppress(NotInterpolable):
            if plan.optim == self._lead.optim:
                return self._from_two_micro_batches(plan)
            step = self._step(plan, self._lead)
            if step is not None:
                return step.applied_to(
                    self._from_two_micro_batches(replace(plan, optim=self._lead.optim))
                )
        return self._traced(plan)

    def _from_two_micro_batches(self, plan: TrainingPlan) -> TracedPlan:
        """Return the program of `plan`, whose optimizer is that of the first plan passed to `at`.
        If `accumulates`, only a run with two micro-batches per step is simulated. A program with
        one micro-batch is derived from it."""
        if not self.accumulates:
            return self._traced(plan)
        two = self._traced(replace(plan, accumulate_grad_batches=2))
        return of_one_micro_batch(two) if plan.accumulate_grad_batches == 1 else two

    def _traced(self, plan: TrainingPlan) -> TracedPlan:
        key, value = with_value(plan, self.key, 1), getattr(plan, self.key)
        series = self._series.setdefault(key, TraceSeries(plan, self.gpu, self.key))
        if value != 1 and key not in self._covered:  # a size of 1 has its own trace
            self._covered.add(key)
            series.cover(self.sizes, queried=self.values)
        return series.at(value)

    def _step(self, plan: TrainingPlan, lead: TrainingPlan) -> OptimizerStep | None:
        """Return the events of the optimizer's step of `plan`. They are found by comparing two
        runs: one with its optimizer, one with that of `lead`. None if a run fails or the runs
        differ in more."""
        own_size = getattr(plan, self.key)
        size = min((value for value in self.values if value > 1), default=own_size)
        short_plan = replace(with_value(plan, self.key, size), act_ckpt=lead.act_ckpt)
        if self.accumulates:
            short_plan = replace(short_plan, accumulate_grad_batches=1)
        if short_plan not in self._optimizers:
            self._optimizers[short_plan] = None
            with suppress(NotInterpolable, MemestError):  # the lead plan itself may fail
                own_run = _run_if_allowed(trace_plan, short_plan, self.gpu)
                lead_run = self._from_two_micro_batches(replace(short_plan, optim=lead.optim))
                self._optimizers[short_plan] = OptimizerStep(own_run, lead_run)
        return self._optimizers[short_plan]
