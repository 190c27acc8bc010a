"""The step of one rank under a strategy, traced as Lightning runs it: one step after another.

Unlike on one GPU (`estimator/step.py`), the second step is not the first one again: DDP makes its
buckets anew, gathered parameters come from other pools. So each of the first steps is traced, with
its first micro-batch, one in the middle, and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memest.estimator.device.cuda_semantics import autocast, cuda_semantics
from memest.estimator.device.modules import ModuleTracker
from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import StreamRecorder
from memest.estimator.device.values import python_values
from memest.estimator.optimizers.specs import optimizer_state_tensors
from memest.estimator.parallel.strategy import BuildOptimizer, StepModule, Strategy
from memest.estimator.trace.program import MicroBatch, Part, Probe, Program, StateBytes
from memest.estimator.trace.step import LossScaler, StepTracer, without_cycles
from memest.models_meta.states import States
from memest.report import Phase


class StrategyTracer(StepTracer):
    """Traces the setup and the steps of one model under `strategy`."""

    def __init__(
        self, strategy: Strategy, *, autocast_dtype: torch.dtype | None, num_micro_batches: int
    ) -> None:
        recorder = strategy.recorder
        super().__init__(recorder, autocast_dtype=autocast_dtype, accumulates=num_micro_batches > 1)
        self.program = Program(recorder.storages, coverage=recorder.coverage)
        self._streams: StreamRecorder = recorder
        self._strategy = strategy
        self._num_micro_batches = num_micro_batches
        self.kept: States

    def run_steps(
        self,
        model: nn.Module,
        loss_of_batch: Callable[[nn.Module], Tensor],
        build_optimizer: BuildOptimizer,
        scaler: LossScaler | None,
        num_steps: int,
    ) -> Program:
        """Wrap `model`, make its optimizer, trace `num_steps` steps of it."""
        recorder, strategy = self._streams, self._strategy
        recorder.tracker = ModuleTracker(model)
        step = StepModule(model, loss_of_batch)
        with ExitStack() as stack:
            stack.enter_context(without_cycles())
            stack.enter_context(strategy.active())
            stack.enter_context(cuda_semantics(recorder.gpu))
            stack.enter_context(python_values(recorder.values))
            stack.enter_context(recorder)
            recorder.phase = "strategy"
            strategy.setup(step)
            strategy.make_optimizer(build_optimizer)
            self.kept = States(strategy.module, strategy.optimizer)
            self.program.setup += recorder.take_events()
            self.program.steps = [self._step(scaler) for _ in range(num_steps)]
            self.program.num_known_steps = len(self.program.steps)
        recorder.take_events()
        return self.program

    def _step(self, scaler: LossScaler | None) -> list[MicroBatch]:
        traced = min(self._num_micro_batches, 3)
        return [self._played(micro == 0, micro == traced - 1, scaler) for micro in range(traced)]

    def _played(self, is_first: bool, is_last: bool, scaler: LossScaler | None) -> MicroBatch:
        recorder, strategy = self._streams, self._strategy
        assert recorder.tracker is not None
        recorder.phase = "forward"
        states = [self._state_bytes()]
        dtype = self._autocast_dtype if strategy.uses_autocast else None
        with recorder.tracker.hooked(), autocast(dtype) if dtype else nullcontext():
            loss = strategy.forward(is_last=is_last)
        closure_loss = loss / self._num_micro_batches
        result = closure_loss.detach().clone()
        del loss
        forward = recorder.take_events()
        if is_first:
            strategy.zero_grad()
        recorder.phase = "backward"
        scaled = closure_loss if scaler is None else scaler.scale(closure_loss)
        zero_grad = recorder.take_events()
        states.append(self._state_bytes())
        with recorder.tracker.hooked():
            strategy.backward(scaled, is_last=is_last)
        backward = recorder.take_events()
        self._label_grads()
        states.append(self._state_bytes())
        optimizer = None
        if is_last or strategy.steps_each_micro_batch:
            recorder.phase = "optimizer"
            strategy.optimizer_step(scaler, is_last=is_last)
            optimizer = recorder.take_events()
            for tensor in optimizer_state_tensors(strategy.optimizer):
                recorder.label(tensor, MemKind.OPTIMIZER)
        states.append(self._state_bytes())
        del scaled, closure_loss, result
        before, after, made, stepped = states
        parts = [
            Part((), Probe(Phase.BEFORE_FORWARD, before)),
            Part([*forward, *zero_grad], Probe(Phase.AFTER_FORWARD, after)),
            Part(backward, Probe(Phase.AFTER_BACKWARD, made)),
        ]
        if optimizer is not None:  # DeepSpeed counts the micro-batches itself, the last is read
            probe = Probe(Phase.AFTER_OPTIMIZER_STEP, stepped) if is_last else None
            parts.append(Part(optimizer, probe))
        return [*parts, Part(recorder.take_events())]

    def _label_grads(self) -> None:
        for tensor in self.kept.grads():
            self._streams.label(tensor, MemKind.GRADS)

    def _state_bytes(self) -> StateBytes:
        """As the probe of a measured run sums them, on this rank."""
        kept = self.kept
        return StateBytes(
            params=_num_bytes(kept.params()),
            grads=_num_bytes(kept.grads()),
            optimizer=_num_bytes(kept.optimizer()),
        )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == "meta")
