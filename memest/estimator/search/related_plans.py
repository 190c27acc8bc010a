"""The programs of plans that train one model, from as few traces as possible.

They differ in the optimizer, checkpointing, the micro-batches of a step and the batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.search.trace_series import TraceSeries
from memest.estimator.trace.family.reuse import FormBroken
from memest.estimator.trace.family.splices import OptimizerStep, of_one_micro_batch
from memest.estimator.trace.traced import TracedPlan
from memest.estimator.trace.virtual_run import repeats_micro_batches
from memest.estimator.traced_plan import trace_plan
from memest.plan import TrainingPlan

SAME_MODEL: Mapping[str, Any] = {"optim": "sgd", "act_ckpt": False}
"""Values of the keys in which related plans differ, batches apart."""


class RelatedPlans:
    """The traced plans of related plans on one chip.

    With and without checkpointing one optimizer and two micro-batches are traced, at a few sizes;
    of every other optimizer one step.

    Args:
        gpu: whose kernels run.
        steps: values of one spacing that hold the batch sizes.
        batches: the batch sizes that will be asked for.
    """

    def __init__(self, gpu: Gpu, steps: Sequence[int], batches: Sequence[int]) -> None:
        self.gpu, self.steps, self.batches = gpu, steps, batches
        self._series: dict[TrainingPlan, TraceSeries] = {}
        self._optimizers: dict[TrainingPlan, OptimizerStep | None] = {}
        self._lead = ""

    def at(self, plan: TrainingPlan) -> TracedPlan:
        """The traced plan of `plan`.

        Raises:
            MemestError: it cannot be predicted.
        """
        if not repeats_micro_batches(plan):
            return self._traced(plan)
        self._lead = self._lead or plan.optim
        with suppress(FormBroken):
            if plan.optim == self._lead:
                return self._in_short(plan)
            step = self._step(plan)
            if step is not None:
                return step.put_into(self._in_short(replace(plan, optim=self._lead)))
        return self._traced(plan)

    def _in_short(self, plan: TrainingPlan) -> TracedPlan:
        """By the trace of two micro-batches, which holds that of one."""
        two = self._traced(replace(plan, accumulate_grad_batches=2))
        return of_one_micro_batch(two) if plan.accumulate_grad_batches == 1 else two

    def _traced(self, plan: TrainingPlan) -> TracedPlan:
        key = replace(plan, batch_size=1)
        if key not in self._series:
            self._series[key] = TraceSeries(plan, self.gpu, "batch_size")
            self._series[key].cover(self.steps, asked=self.batches)
        return self._series[key].at(plan.batch_size)

    def _step(self, plan: TrainingPlan) -> OptimizerStep | None:
        """That of the optimizer of `plan`, if it is all in which a plan with it is another."""
        size = min((b for b in self.batches if b > 1), default=1)
        short = replace(plan, act_ckpt=False, accumulate_grad_batches=1, batch_size=size)
        if short not in self._optimizers:
            self._optimizers[short] = None
            with suppress(FormBroken):
                own = trace_plan(short, self.gpu)
                beside = self._in_short(replace(short, optim=self._lead))
                self._optimizers[short] = OptimizerStep(own, beside)
        return self._optimizers[short]
