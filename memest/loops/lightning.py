"""The Lightning side of a measured run: the module, its phases, and the Trainer.

Where the four phases lie in Lightning 2.6 (`pytorch/loops/optimization/automatic.py`): the closure
runs `training_step`, then `zero_grad` on the first micro-batch of a step, then
`on_before_backward`, the backward, `on_after_backward`. `optimizer_step` calls the closure on the
last micro-batch and returns while the closure still holds its result, two scalars of 512 B each.
DeepSpeed counts micro-batches itself, so Lightning calls `optimizer_step` on each of them; the last
alone is a phase. `before_forward` is read before a strategy's wrapper is entered, which may gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from memest.models_meta.assemble import loss_of
from memest.plan import TrainingPlan
from memest.report import Phase
from memest.loops.job import Job, Listener
from memest.loops.probe import PhaseRecorder
from memest.loops.strategies import make_strategy, shard_model

Inputs = dict[str, Any]


class FineTune(L.LightningModule):
    """The fine-tune of a plan, with a probe at each phase.

    The batch is on the host and is moved inside `training_step`, after the first probe.

    Args:
        model: on the device, ready to train.
        make_optimizer: called once the strategy has divided the model.
        batches: inputs on the host; used in turn, over and over.
        recorder: takes the rows.
        loss_output: the output to differentiate.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[], torch.optim.Optimizer],
        batches: Sequence[Inputs],
        recorder: PhaseRecorder,
        *,
        loss_output: str = "loss",
    ) -> None:
        super().__init__()
        self.model = model
        self._make_optimizer = make_optimizer
        self._batches = batches
        self._recorder = recorder
        self._loss_output = loss_output

    def _record(self, phase: Phase) -> None:
        self._recorder.record(phase, self.trainer.model, self.trainer.optimizers[0])

    def cpu(self) -> Any:
        """Lightning asks for the module on the host when all is done; nobody needs it there."""
        return self

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, over parameters as the strategy left them."""
        return self._make_optimizer()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before anything of the micro-batch."""
        self._record(Phase.BEFORE_FORWARD)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of the next micro-batch; `batch` is its number."""
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
        if self._recorder.is_last_micro_batch:
            self._record(Phase.AFTER_OPTIMIZER_STEP)


class ShardedFineTune(FineTune):
    """The same under FSDP2, which Lightning leaves to the module itself."""

    plan: TrainingPlan

    def configure_model(self) -> None:
        """Divide the model over the mesh of the strategy."""
        shard_model(self.model, self.plan, self.device_mesh)


class _Messenger(Callback):
    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._listener.on_ready()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._listener.on_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._listener.on_end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._listener.on_error(exception)


class OneProcess(LightningEnvironment):
    """One process, whatever the environment says of launchers and clusters."""

    def __init__(self) -> None:
        super().__init__()
        self._node_rank = self._group_rank = 0

    @property
    def creates_processes_externally(self) -> bool:
        """It is all that there is."""
        return True

    def local_rank(self) -> int:
        """The first."""
        return 0

    def node_rank(self) -> int:
        """The first."""
        return 0


def fit(module: FineTune, job: Job) -> None:
    """Train for the plan's steps; a listener that does not return spares the teardown.

    Every rank gets the same micro-batches.
    """
    plan = job.plan
    num_batches = plan.steps * plan.accumulate_grad_batches
    precision: Any = plan.precision  # one of Lightning's own, as the plan checks
    trainer = L.Trainer(
        accelerator=job.accelerator,
        devices=1 if job.is_alone else plan.devices,
        precision=precision,
        strategy=job.strategy or make_strategy(plan, module.model),
        plugins=[OneProcess()] if job.is_alone else None,
        accumulate_grad_batches=plan.accumulate_grad_batches,
        max_epochs=1,
        max_steps=plan.steps,
        limit_train_batches=num_batches,
        callbacks=[_Messenger(job.listener)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    numbers: Any = range(num_batches)
    trainer.fit(module, torch.utils.data.DataLoader(numbers, batch_size=None, num_workers=0))
