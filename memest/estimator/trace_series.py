"""The programs of one plan over many sizes, from as few traces as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memest.errors import PlanError
from memest.estimator.gpus import Gpu
from memest.estimator.reuse import (
    DEGREE,
    Family,
    FormBroken,
    LoggedTrace,
    logged_trace,
    with_value,
)
from memest.estimator.traced_plan import TracedPlan
from memest.plan import TrainingPlan


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
        self._trust_remote_code = trust_remote_code
        self._traces: dict[int, LoggedTrace] = {}
        self._covered: dict[int, Family] = {}
        self._families: dict[tuple[int, int], Family] = {}

    def trace(self, value: int) -> LoggedTrace:
        """The trace at `value`, made once."""
        if value not in self._traces:
            plan = with_value(self.plan, self.key, value)
            self._traces[value] = logged_trace(
                plan, self.gpu, trust_remote_code=self._trust_remote_code
            )
            self.num_traces += 1
        return self._traces[value]

    def at(self, value: int) -> TracedPlan:
        """The traced plan at `value`: of a family that covers it, or its own trace."""
        if value in self._traces or value not in self._covered:
            return self.trace(value).traced
        try:
            return self._with_length(self._covered[value].at(value), value)
        except FormBroken:
            return self.trace(value).traced

    def guess(self, value: int) -> TracedPlan:
        """As `at`, but from any family whose decisions by shapes fall alike; nothing is checked."""
        if value in self._traces or value == 1:
            return self.trace(value).traced
        for family in reversed(self._families.values()):
            try:
                return self._with_length(family.at(value), value)
            except FormBroken:
                continue
        try:
            return self._with_length(self.family(value).at(value), value)
        except (FormBroken, PlanError):
            return self.trace(value).traced

    def forget_families(self) -> None:
        """Families that turned out not to hold are made no more use of; traces are kept."""
        self._families.clear()
        self._covered.clear()

    def cover(self, values: Iterable[int]) -> None:
        """Make `at` cheap for `values`; whatever it returns has been checked as far as it can be.

        A run of values with one spacing is cut where a decision by shapes falls otherwise. Each
        part is covered by a family of its first few, if that agrees with a trace at its last; if
        not, each half by itself.
        """
        for run in runs_of_one_spacing(sorted(set(values) - {1})):
            self._cover(run)

    def family(self, start: int, spacing: int = 1) -> Family:
        """The family whose first sample is at `start`; nothing is checked away from its samples.

        Raises:
            FormBroken: the samples do not make the same calls.
        """
        if (start, spacing) not in self._families:
            sizes = [start + i * spacing for i in range(DEGREE[self.key] + 1)]
            samples = [self.trace(size) for size in sizes]
            self._families[start, spacing] = Family(samples, self.gpu, start, spacing)
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

    def _cover(self, run: Sequence[int]) -> None:
        if len(run) <= DEGREE[self.key] + 2:
            return
        middle = len(run) // 2
        try:
            family = self.family(run[0], run[1] - run[0])
            is_other = (i for i, v in enumerate(run) if not family.chooses_alike(v))
            end = next(is_other, len(run))
            if self.agrees(family, run[end - 1]):
                self._covered |= dict.fromkeys(run[:end], family)
                self._cover(run[end:])
                return
            middle = min(middle, end)
        except FormBroken:
            pass
        self._cover(run[:middle])
        self._cover(run[middle:])


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
