"""One training run as a program of event streams, in the order in which Lightning runs a step.

Lightning 2.6 (`pytorch/loops/optimization/automatic.py`): the optimizer's step calls a closure that
runs the forward, then `zero_grad(set_to_none=True)` on the first micro-batch of a step, then the
backward. The gradients of the step before therefore live through the next forward.

Each stretch is traced once and replayed as often as the plan asks: a micro-batch that makes
gradients, one that adds to them, the optimizer's first step, which makes its state, and its later
steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memest.estimator.device.cuda_semantics import autocast, cuda_semantics
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.modules import ModuleTracker
from memest.estimator.device.storages import MemKind
from memest.estimator.device.values import python_values
from memest.estimator.optimizers.specs import optimizer_state_bytes, optimizer_state_tensors
from memest.estimator.trace.program import MicroBatch, Program, StateBytes


class LossScaler(Protocol):
    """What `16-mixed` needs of a gradient scaler."""

    def scale(self, outputs: Any) -> Any:
        """The loss times the scale."""

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale."""

    def step(self, optimizer: Any) -> Any:
        """Let the optimizer step."""

    def update(self) -> None:
        """Adapt the scale."""


class StepTracer:
    """Traces the setup and the step of one model.

    Args:
        recorder: records; also holds the GPU whose kernels are meant.
        autocast_dtype: of mixed precision; None elsewhere.
        accumulates: whether a step has more than one micro-batch.
    """

    def __init__(
        self, recorder: Recorder, *, autocast_dtype: torch.dtype | None, accumulates: bool
    ) -> None:
        self.recorder = recorder
        self.program = Program(recorder.storages, coverage=recorder.coverage)
        self._autocast_dtype = autocast_dtype
        self._accumulates = accumulates

    def setup(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build the model and record where its parameters and buffers go."""
        recorder = self.recorder
        recorder.phase = "setup"
        with recorder, torch.device("meta"):
            model = build()
        for name, parameter in model.named_parameters():
            recorder.adopt(parameter, MemKind.PARAMS)
            recorder.label(parameter, MemKind.PARAMS, name.rpartition(".")[0])
        for name, buffer in model.named_buffers():
            if buffer.device.type == "meta":
                recorder.adopt(buffer, MemKind.BUFFERS)
                recorder.label(buffer, MemKind.BUFFERS, name.rpartition(".")[0])
        recorder.clear_workspaces()
        self.program.setup = recorder.take_events()
        return model

    def setup_optimizer(self, build: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Make the optimizer; some make their state at once (Adagrad)."""
        with self.recorder:
            optimizer = build()
        for tensor in optimizer_state_tensors(optimizer):
            self.recorder.label(tensor, MemKind.OPTIMIZER)
        self.program.setup += self.recorder.take_events()
        return optimizer

    def run(
        self,
        model: nn.Module,
        move_batch: Callable[[], dict[str, Any]],
        loss_of: Callable[[nn.Module, dict[str, Any]], Tensor],
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler | None,
        num_micro_batches: int,
    ) -> Program:
        """Trace the step of `model`; every argument's tensors are meta tensors."""
        program, recorder = self.program, self.recorder
        recorder.tracker = ModuleTracker(model)
        program.before = _state_bytes(model, optimizer)

        def micro_batch() -> MicroBatch:
            return self._micro_batch(model, move_batch, loss_of, scaler, num_micro_batches)

        with ExitStack() as stack:
            stack.enter_context(without_cycles())
            stack.enter_context(cuda_semantics(recorder.gpu))
            stack.enter_context(python_values(recorder.values))
            stack.enter_context(recorder)
            program.first = micro_batch()
            trained = [p for p in model.parameters() if p.grad is not None]
            for parameter in trained:
                assert parameter.grad is not None
                recorder.label(parameter.grad, MemKind.GRADS, recorder.tracker.owner_of(parameter))
            ids = (recorder.id_of(p.grad) for p in trained if p.grad is not None)
            program.grads = [index for index in ids if index is not None]
            if self._accumulates:
                program.accumulating = micro_batch()
            program.optimizer_first = self._optimizer_step(optimizer, scaler)
            for tensor in optimizer_state_tensors(optimizer):
                recorder.label(tensor, MemKind.OPTIMIZER)
            program.optimizer_next = self._optimizer_step(optimizer, scaler)
            program.after = _state_bytes(model, optimizer)
        recorder.take_events()
        return program

    def _micro_batch(
        self,
        model: nn.Module,
        move_batch: Callable[[], dict[str, Any]],
        loss_of: Callable[[nn.Module, dict[str, Any]], Tensor],
        scaler: LossScaler | None,
        num_micro_batches: int,
    ) -> MicroBatch:
        recorder = self.recorder
        recorder.phase = "forward"
        assert recorder.tracker is not None
        with recorder.tracker.hooked(), autocast(self._autocast_dtype):
            loss = loss_of(model, move_batch())
        closure_loss = loss / num_micro_batches
        result = closure_loss.detach().clone()
        del loss
        forward = recorder.take_events()
        recorder.phase = "backward"
        scaled = closure_loss if scaler is None else scaler.scale(closure_loss)
        scaling = recorder.take_events()
        with recorder.tracker.hooked():
            scaled.backward()
        backward = recorder.take_events()
        del scaled, closure_loss, result
        return MicroBatch(forward, backward, recorder.take_events(), scaling)

    def _optimizer_step(
        self, optimizer: torch.optim.Optimizer, scaler: LossScaler | None
    ) -> list[int]:
        recorder = self.recorder
        recorder.phase = "optimizer"
        with torch.no_grad():
            if scaler is None:
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        return recorder.take_events()


@contextmanager
def without_cycles() -> Any:
    """No collection in the middle of the trace, so that two traces of a plan are the same."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """As the probe of the lab sums them: elements times item size, gradients as they will be."""

    def num_bytes(tensors: Iterable[Tensor | None]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    return StateBytes(
        params=num_bytes(model.parameters()),
        grads=num_bytes(p.grad for p in model.parameters()),
        optimizer=optimizer_state_bytes(optimizer),
    )
