"""The programs of one plan over many sizes, from as few traces as possible.

Of a strategy each size is traced by itself: when a block that two streams share returns to its pool
depends on how long the kernels take, which is no polynomial in the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from memest.errors import PlanError
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.trace.family.call_log import CallLog, LoggedTrace, logged_trace
from memest.estimator.trace.family.reuse import (
    DEGREE,
    Family,
    FormBroken,
    with_value,
)
from memest.estimator.trace.traced import TracedPlan
from memest.estimator.traced_plan import trace_plan
from memest.plan import TrainingPlan

SPACING = {"batch_size": 1, "seq_len": 64}
"""Between the samples of a guess. Attention pads masks to 8 tokens and sums of rows to 32, so other
lengths are no polynomial's.
"""

GROWTH = 4
"""How much larger the next size is that a search tries while everything fits."""


class TraceSeries:
    """The traced plans of one plan with another value of one key, from as few traces as possible.

    Args:
        plan: the plan; its own value of `key` does not matter.
        gpu: whose kernels run.
        key: `batch_size` or `seq_len`.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        gpu: Gpu,
        key: str = "batch_size",
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self.plan, self.gpu, self.key = plan, gpu, key
        self.num_traces = 0
        self.trust_remote_code = trust_remote_code
        self._traces: dict[int, LoggedTrace] = {}
        self._covered: dict[int, Family] = {}
        self._families: dict[tuple[int, int], Family] = {}
        self._broken: set[tuple[int, int]] = set()  # starts and spacings that make no family

    def trace(self, value: int) -> LoggedTrace:
        """The trace at `value`, made once."""
        if value not in self._traces:
            plan = with_value(self.plan, self.key, value)
            trust = self.trust_remote_code
            if self.is_alone:
                traced = trace_plan(plan, self.gpu, trust_remote_code=trust)
                self._traces[value] = LoggedTrace(traced, CallLog())
            else:
                self._traces[value] = logged_trace(plan, self.gpu, trust_remote_code=trust)
            self.num_traces += 1
        return self._traces[value]

    @property
    def is_alone(self) -> bool:
        """Whether every size has a trace of its own."""
        return self.plan.is_distributed

    def at(self, value: int) -> TracedPlan:
        """The traced plan at `value`: of a family that covers it, or its own trace."""
        return self.known(value) or self.trace(value).traced

    def known(self, value: int) -> TracedPlan | None:
        """The traced plan at `value` if it takes no other trace than those made so far."""
        if value in self._traces:
            return self._traces[value].traced
        if value in self._covered:
            with suppress(FormBroken):
                return self._with_length(self._covered[value].at(value), value)
        return None

    def guess(self, value: int) -> TracedPlan:
        """As `at`, but from any family whose decisions by shapes fall alike; nothing is checked."""
        spacing = SPACING[self.key]
        traced = [v for v in self._traces if v > 1]
        is_short = self.key == "seq_len" and value < min(traced, default=0)  # not surely a plan
        is_own = self.is_alone or value == 1 or value % spacing
        if value in self._traces or is_own or is_short:
            return self.trace(value).traced
        for family in reversed(self._families.values()):
            with suppress(FormBroken):
                return self._with_length(family.at(value), value)
        if self._is_alone(value):
            return self.trace(value).traced
        for start in dict.fromkeys((min(traced, default=value), value)):
            with suppress(FormBroken, PlanError):
                return self._with_length(self.family(start, spacing).at(value), value)
        return self.trace(value).traced

    def _is_alone(self, value: int) -> bool:
        """Whether no size asked for before, nor the next of a search, decides as `value` does.

        One trace is less than a family then.
        """
        family = next(iter(self._families.values()), None)
        own = None if family is None else family.outcomes(value)
        if family is None or own is None:
            return False
        others = (GROWTH * value, *(v for v in self._traces if v > 1))
        return all(family.outcomes(other) != own for other in others)

    def forget_families(self) -> None:
        """Families that turned out not to hold are made no more use of; traces are kept."""
        self._families.clear()
        self._covered.clear()

    def cover(self, values: Iterable[int], *, asked: Iterable[int] | None = None) -> None:
        """Make `at` cheap for `values`; whatever it returns has been checked as far as it can be.

        Of `values` only those in `asked` matter, all by default: the others are steps between.

        A run of values with one spacing is cut where a decision by shapes falls otherwise. Each
        part is covered by a family of its first few, if that agrees with a trace at the last that
        is asked for; if not, each half by itself. Where few of many are asked for, the family is of
        the first and the last of these, if the same calls are made at both.
        """
        if self.is_alone:
            return
        values = sorted(set(values) - {1})
        wanted = set(values if asked is None else asked)
        for run in runs_of_one_spacing(values):
            if not self._span(run, wanted):
                self._cover(run, wanted)

    def _span(self, run: Sequence[int], asked: set[int]) -> bool:
        """Whether the sizes asked for, all multiples of the first, are covered by their ends.

        What is padded to a multiple, and therefore no polynomial, is not so at multiples of a size
        at which it is not; and where it is, its differences are no multiples of the sizes'.
        """
        held = sorted(asked.intersection(run))
        is_few = DEGREE[self.key] == 1 and DEGREE[self.key] + 2 < len(held) < len(run) // 2
        if not is_few or any(value % held[0] for value in held):
            return False
        first, last = held[0], held[-1]
        ends = [self.trace(first), self.trace(last)]
        try:
            family = Family(ends, self.gpu, first, last - first, step=run[1] - run[0])
            for value in held:
                family.at(value)
        except FormBroken:
            return False
        self._covered |= dict.fromkeys(held, family)
        return True

    def family(self, start: int, spacing: int = 1) -> Family:
        """The family whose first sample is at `start`; nothing is checked away from its samples.

        Raises:
            FormBroken: the samples do not make the same calls, or are those of a strategy.
        """
        if self.is_alone:
            raise FormBroken(f"`{self.plan.strategy}` is traced size by size")
        if (start, spacing) in self._broken:
            raise FormBroken(f"the samples from {start} differ")
        if (start, spacing) not in self._families:
            self._broken.add((start, spacing))
            sizes = [start + i * spacing for i in range(DEGREE[self.key] + 1)]
            samples = [self.trace(size) for size in sizes]
            self._families[start, spacing] = Family(samples, self.gpu, start, spacing)
            self._broken.remove((start, spacing))
        return self._families[start, spacing]

    def agrees(self, family: Family, value: int) -> bool:
        """Whether `family` says at `value` what a trace there says."""
        try:
            made = self._with_length(family.at(value), value)
        except FormBroken:
            return False
        return made == self.trace(value).traced

    def _with_length(self, traced: TracedPlan, value: int) -> TracedPlan:
        return replace(traced, seq_len=value) if self.key == "seq_len" else traced

    def _cover(self, run: Sequence[int], asked: set[int]) -> None:
        if len(asked.intersection(run)) <= DEGREE[self.key] + 2:
            return
        middle = len(run) // 2
        try:
            family = self.family(run[0], run[1] - run[0])
            is_other = (i for i, v in enumerate(run) if not family.chooses_alike(v))
            end = next(is_other, len(run))
            held = asked.intersection(run[:end])
            if held and self.agrees(family, max(held)):
                self._covered |= dict.fromkeys(run[:end], family)
                self._cover(run[end:], asked)
                return
            middle = min(middle, end)
        except FormBroken:
            pass
        self._cover(run[:middle], asked)
        self._cover(run[middle:], asked)


def runs_of_one_spacing(values: Sequence[int]) -> list[list[int]]:
    """Ascending `values` cut into arithmetic progressions, from the left.

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
