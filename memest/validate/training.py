"""The Lightning side of a measured run: the module, its phases, and the Trainer.

Where the four phases lie in Lightning 2.6 (`pytorch/loops/optimization/automatic.py`): the closure
runs `training_step`, then `zero_grad` on the first micro-batch of a step, then
`on_before_backward`, the backward, `on_after_backward`. `optimizer_step` calls the closure on the
last micro-batch and returns while the closure still holds its result, two scalars of 512 B each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from memest.models_meta.assemble import loss_of
from memest.plan import TrainingPlan
from memest.report import Phase
from memest.validate.probe import PhaseRecorder

Inputs = dict[str, Any]


class FineTune(L.LightningModule):
    """The fine-tune of a plan, with a probe at each phase.

    The batch is on the host and is moved inside `training_step`, after the first probe.

    Args:
        model: on the device, ready to train.
        optimizer: over its trained parameters.
        batches: inputs on the host; used in turn, over and over.
        recorder: takes the rows.
        loss_output: the output to differentiate.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Sequence[Inputs],
        recorder: PhaseRecorder,
        *,
        loss_output: str = "loss",
    ) -> None:
        super().__init__()
        self.model = model
        self._optimizer = optimizer
        self._batches = batches
        self._recorder = recorder
        self._loss_output = loss_output

    def _record(self, phase: Phase) -> None:
        self._recorder.record(phase, self.model, self._optimizer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, made beforehand."""
        return self._optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of the next micro-batch; `batch` is its number."""
        self._record(Phase.BEFORE_FORWARD)
        inputs = self._batches[batch_idx % len(self._batches)]
        return loss_of(self.model, self._moved(inputs), self._loss_output)

    def _moved(self, inputs: Inputs) -> Inputs:
        return {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def on_before_backward(self, loss: Tensor) -> None:
        """After the forward and, on the first micro-batch of a step, after `zero_grad`."""
        self._record(Phase.AFTER_FORWARD)

    def on_after_backward(self) -> None:
        """Before the graph's last tensors, the loss among them, are dropped."""
        self._record(Phase.AFTER_BACKWARD)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The step, then the last phase of it."""
        super().optimizer_step(*args, **kwargs)
        self._record(Phase.AFTER_OPTIMIZER_STEP)


class _Exits(Callback):
    """Tells of the end of the training, or of an error, before Lightning copies all to the host."""

    def __init__(
        self, on_end: Callable[[], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self._on_end = on_end
        self._on_error = on_error

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._on_end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._on_error(exception)


def fit(
    module: FineTune,
    plan: TrainingPlan,
    *,
    accelerator: str = "gpu",
    on_end: Callable[[], None],
    on_error: Callable[[BaseException], None],
) -> None:
    """Train for the plan's steps; a callback that does not return spares the teardown."""
    num_batches = plan.steps * plan.accumulate_grad_batches
    precision: Any = plan.precision  # one of Lightning's own, as the plan checks
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=precision,
        strategy=plan.strategy,
        accumulate_grad_batches=plan.accumulate_grad_batches,
        max_epochs=1,
        max_steps=plan.steps,
        limit_train_batches=num_batches,
        callbacks=[_Exits(on_end, on_error)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    numbers: Any = range(num_batches)
    trainer.fit(module, torch.utils.data.DataLoader(numbers, batch_size=None, num_workers=0))
