"""A loop as users write it: forward, backward, clipping, step, `zero_grad` after the step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memest.loops.data import moved
from memest.loops.job import Task
from memest.models_meta.assemble import half_dtype, loss_of
from memest.report import Phase


def fit(task: Task) -> None:
    """Train `task.model` for the plan's steps, and validate as often as the plan specifies."""
    loop, listener, plan = _Loop(task), task.job.listener, task.job.plan
    listener.on_ready()
    num_batches = plan.steps * plan.accumulate_grad_batches
    for number in range(1, num_batches + 1):
        loop.micro_batch(number - 1)
        if number % plan.accumulate_grad_batches == 0:
            loop.step()
        listener.on_step()
        if plan.validates and number % (plan.val_check_interval or num_batches) == 0:
            loop.validate()
    listener.on_end()


class _Loop:
    def __init__(self, task: Task) -> None:
        self.task, self.plan, self.where = task, task.job.plan, task.job.where
        self.device_type = torch.device(self.where).type
        self.model, self.optimizer = task.model, task.make_optimizer()
        is_scaled = self.plan.precision == "16-mixed"
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=is_scaled)

    def micro_batch(self, number: int) -> None:
        """Run forward and backward of micro-batch `number` (from 0); record memory around each."""
        self._record(Phase.BEFORE_FORWARD)
        inputs = moved(self.task.batch(number), self.where)
        with self._autocast():
            loss = self.task.loss(self.model, inputs)
        loss = loss / self.plan.accumulate_grad_batches
        self._record(Phase.AFTER_FORWARD)
        self.scaler.scale(loss).backward()
        self._record(Phase.AFTER_BACKWARD)

    def step(self) -> None:
        """Clip the gradients, run the optimizer's step, free the gradients, record the memory."""
        if self.plan.gradient_clip_val:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.gradient_clip_val)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self._record(Phase.AFTER_OPTIMIZER_STEP)

    @torch.no_grad()
    def validate(self) -> None:
        """Compute the losses of the validation micro-batches, and record the memory."""
        self.model.eval()
        for number in range(self.plan.limit_val_batches):
            inputs = moved(self.task.val_batch(number), self.where)
            with self._autocast():
                loss_of(self.model, inputs, self.task.feed.loss_output)
        self.model.train()
        self._record(Phase.AFTER_VALIDATION)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.plan.precision.endswith("-mixed"):
            return nullcontext()
        return torch.autocast(self.device_type, half_dtype(self.plan))

    def _record(self, phase: Phase) -> None:
        self.task.job.recorder.record(phase, self.model, self.optimizer)
