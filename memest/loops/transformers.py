"""The Trainer of transformers 5.17, with a probe at each phase.

`training_step` of trainer.py moves the batch to the GPU, then calls `compute_loss` and the
backward. Gradients are clipped, the optimizer steps, and `zero_grad` precedes the callbacks.
"""

import tempfile
from typing import Any

import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from memest.loops.data import Inputs
from memest.loops.job import LEARNING_RATE, Task
from memest.models_meta.assemble import loss_of
from memest.plan import TrainingPlan
from memest.plan.optimizers import OPTIMIZERS
from memest.report import Phase


def fit(task: Task) -> None:
    """Train `task.model` for the plan's steps, and evaluate as often as the plan specifies."""
    plan = task.job.plan
    with tempfile.TemporaryDirectory() as folder:
        # as in a user's script the Trainer makes the optimizer, in groups with and without decay
        optimizer = None if "optim" in _optimizer_arguments(plan) else task.make_optimizer()
        trainer = ProbedTrainer(
            task,
            model=task.model,
            args=TrainingArguments(output_dir=folder, **_training_arguments(plan)),
            train_dataset=range(plan.steps * plan.accumulate_grad_batches),
            eval_dataset=range(plan.limit_val_batches) if plan.validates else None,
            optimizers=(optimizer, None),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class ProbedTrainer(Trainer):
    """`Trainer(**options)` that trains on the micro-batches of `task` and records memory."""

    def __init__(self, task: Task, **options: Any) -> None:
        self.task, self.listener, self.num_ahead = task, task.job.listener, task.job.num_ahead
        super().__init__(**options)
        self.add_callback(_Messenger(self))

    def get_train_dataloader(self) -> Any:
        """Return a loader of the training micro-batches."""
        return self.accelerator.prepare(_loader(self.train_dataset, self.task.batch))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of the validation micro-batches; `eval_dataset` is ignored."""
        return self.accelerator.prepare(_loader(self.eval_dataset, self.task.val_batch))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return (list of a step's micro-batches, number of items in them), as transformers does.
        transformers loads all micro-batches of a step to the GPU before the first one runs.

        A simulated plan can have fewer micro-batches per step than the user's plan. The list has
        only the `num_batches` micro-batches that the simulation runs. `num_ahead` of `Job` is the
        number of micro-batches left out. As many micro-batches are moved to `device` in addition,
        where they take memory.
        """
        result = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [self.task.batch(number) for number in range(self.num_ahead)]
        self._ahead = [send_to_device(batch, device) for batch in batches]
        return result

    def training_step(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Tensor:
        """Return a micro-batch's loss; record memory before its forward and after its backward."""
        self.record(Phase.BEFORE_FORWARD)
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        self.record(Phase.AFTER_BACKWARD)
        self.listener.on_step()
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool = False, *args: Any, **kw: Any
    ) -> Any:
        """Return the micro-batch's loss, or (loss, {"loss": loss}) if `return_outputs`."""
        if not model.training:
            loss = loss_of(model, inputs, self.task.feed.loss_output)
        else:
            loss = self.task.loss(model, inputs)
            self.record(Phase.AFTER_FORWARD)
        return (loss, {"loss": loss}) if return_outputs else loss

    def record(self, phase: Phase) -> None:
        """Append a row of memory figures for `phase`."""
        self.task.job.recorder.record(phase, self.model, self.optimizer)


class _Messenger(TrainerCallback):
    def __init__(self, trainer: ProbedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.listener.on_ready()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.record(Phase.AFTER_OPTIMIZER_STEP)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.record(Phase.AFTER_VALIDATION)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.listener.on_end()


def _loader(numbers: Any, batch_of: Any) -> Any:
    return torch.utils.data.DataLoader(
        numbers, batch_size=1, collate_fn=lambda indices: batch_of(indices[0])
    )


def _optimizer_arguments(plan: TrainingPlan) -> dict[str, Any]:
    """Return {argument of `TrainingArguments`: value} for the plan's optimizer. The result is {} if
    `Trainer` lacks the optimizer, or for options such as `momentum`."""
    name = OPTIMIZERS[plan.optim].transformers
    if not name or plan.momentum or plan.nesterov or plan.optim_options:
        return {}
    decay = {} if plan.weight_decay is None else {"weight_decay": plan.weight_decay}
    return {"optim": name, "learning_rate": LEARNING_RATE, **decay}


def _training_arguments(plan: TrainingPlan) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if plan.gradient_clip_val is not None:
        options["max_grad_norm"] = plan.gradient_clip_val
    if plan.validates:
        interval = plan.val_check_interval or plan.steps * plan.accumulate_grad_batches
        options["eval_strategy"] = "steps"
        options["eval_steps"] = interval // plan.accumulate_grad_batches
    return {
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": plan.accumulate_grad_batches, "max_steps": plan.steps,
        "bf16": plan.precision == "bf16-mixed", "fp16": plan.precision == "16-mixed",
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "log_level": "error",
        **_optimizer_arguments(plan), **options, **dict(plan.trainer_options),
    }  # fmt: skip
