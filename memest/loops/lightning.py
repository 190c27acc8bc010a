"""Lightning's Trainer: the module of a plan, its probes, and the Trainer's settings.

Phases of Lightning 2.6 (`pytorch/loops/optimization/automatic.py`): the closure runs
`training_step`, `zero_grad` on a step's first micro-batch, `on_before_backward`, the backward and
`on_after_backward`. `optimizer_step` calls the closure on the last micro-batch; DeepSpeed's calls
it on each. `before_forward` is read before a strategy's wrapper, which may gather, is entered.
"""

from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from memest.loops.data import moved
from memest.loops.job import Listener, Task
from memest.models_meta import sharding
from memest.models_meta.assemble import loss_of
from memest.packages import require
from memest.plan import TrainingPlan
from memest.report import Phase

NUM_SANITY_STEPS = 2  # validation batches that Lightning runs before the first step, by default


def make_strategy(plan: TrainingPlan, model: nn.Module) -> Any:
    """Return the argument `strategy` of Lightning's `Trainer`: an object, or `auto` on one GPU.

    Raises:
        PlanError: the model has no layer of a class to wrap or to checkpoint.
        UnsupportedError: DeepSpeed is not installed.
    """
    from lightning.pytorch import strategies

    if plan.is_ddp:
        options: dict[str, Any] = {"gradient_as_bucket_view": plan.gradient_as_bucket_view}
        if plan.bucket_cap_mb is not None:
            options["bucket_cap_mb"] = plan.bucket_cap_mb
        if plan.strategy == "ddp_find_unused_parameters_true":
            options["find_unused_parameters"] = True
        return strategies.DDPStrategy(**options)
    if plan.strategy == "fsdp":
        options = {"sharding_strategy": plan.sharding_strategy}
        if shape := sharding.hybrid_shape(plan):
            options["device_mesh"] = shape
        if names := sharding.checkpointed_class_names(model, plan):
            options["activation_checkpointing_policy"] = sharding.classes_named(model, names)
        layer_classes = sharding.classes_named(model, sharding.wrap_class_names(model, plan))
        return strategies.FSDPStrategy(auto_wrap_policy=layer_classes, **options)
    if plan.strategy == "fsdp2":
        shape = sharding.hybrid_shape(plan) or (plan.world_size, 1)
        return strategies.ModelParallelStrategy(*shape)  # replicas by shards, for `shard_model`
    if not plan.is_deepspeed:
        return "auto"
    require("deepspeed")
    stage = int(plan.strategy.removeprefix("deepspeed_stage_")[0])
    return strategies.DeepSpeedStrategy(
        stage=stage, offload_optimizer=plan.offloads,
        offload_parameters=plan.offloads and stage == 3, reduce_bucket_size=plan.reduce_bucket_size,
        allgather_bucket_size=plan.allgather_bucket_size,
        logging_batch_size_per_gpu=plan.batch_size,  # else Lightning reads the data loader
    )  # fmt: skip


def shard_model(model: nn.Module, plan: TrainingPlan, mesh: Any) -> None:
    """Shard `model` in place by FSDP2, over Lightning's device `mesh` (`ModelParallelStrategy`)."""
    is_hybrid = sharding.hybrid_shape(plan) is not None
    sharding.fully_shard_layers(model, plan, mesh if is_hybrid else mesh["data_parallel"])


class FineTune(L.LightningModule):
    """Lightning module that trains a plan's model, and records the memory at each phase of a step.

    The batch is moved to the GPU in `training_step`, after the first record of a micro-batch.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = task.model
        self._task = task

    def _record(self, phase: Phase) -> None:
        self._task.job.recorder.record(phase, self.trainer.model, self.trainer.optimizers[0])

    def cpu(self) -> Any:
        """Return the module unmoved; Lightning calls this at the end to move it to the host."""
        return self

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer over the parameters, which the strategy may have replaced."""
        return self._task.make_optimizer()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Record the memory before the micro-batch moves to the GPU."""
        self._record(Phase.BEFORE_FORWARD)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of micro-batch `batch_idx`, counted from 0; `batch` is unused."""
        inputs = self._task.batch(batch_idx)
        loss: Tensor = self._task.loss(self.model, moved(inputs, self.device))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Compute the loss of validation micro-batch `batch_idx`; `batch` is unused."""
        inputs = self._task.val_batch(batch_idx)
        loss_of(self.model, moved(inputs, self.device), self._task.feed.loss_output)

    def on_validation_end(self) -> None:
        """Record the memory after a validation, when the module trains again."""
        self._record(Phase.AFTER_VALIDATION)

    def on_before_backward(self, loss: Tensor) -> None:
        """Record the memory between forward and backward. In a step's first micro-batch, Lightning
        has called `zero_grad` after the forward, before this method."""
        self._record(Phase.AFTER_FORWARD)

    def on_after_backward(self) -> None:
        """Record the memory after the backward, while the graph's last tensors are alive."""
        self._record(Phase.AFTER_BACKWARD)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step the optimizer, then record the memory.

        Lightning calls this method once per training step, for the last micro-batch. With DeepSpeed
        it calls this method for every micro-batch; the memory is recorded for the last one only.
        `args` and `kwargs` are Lightning's arguments, and are passed on unchanged. One of them is
        the closure that runs the forward and the backward of the micro-batch.
        """
        super().optimizer_step(*args, **kwargs)
        if self._task.job.recorder.is_last_micro_batch:
            self._record(Phase.AFTER_OPTIMIZER_STEP)


class ShardedFineTune(FineTune):
    """`FineTune` under FSDP2: the module shards its model itself, as Lightning requires."""

    def configure_model(self) -> None:
        """Shard the model in place over the strategy's device mesh, before training."""
        shard_model(self.model, self._task.job.plan, self.device_mesh)


class _Messenger(Callback):
    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._listener.on_ready()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._listener.on_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._listener.on_end()
        trainer.strategy.optimizers = []  # else their state moves to the host

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._listener.on_error(exception)


class OneProcess(LightningEnvironment):
    """Lightning environment of one process that simulates global rank `rank`, with `num_local`
    ranks per host. Environment variables of launchers, such as torchrun, have no effect."""

    creates_processes_externally = True  # so Lightning starts no processes
    main_address, main_port = "127.0.0.1", 1  # are never contacted

    def __init__(self, rank: int, num_local: int) -> None:
        super().__init__()
        self._host, self._rank = divmod(rank, num_local)

    def local_rank(self) -> int:
        """Return the rank within its host, from 0."""
        return self._rank

    def node_rank(self) -> int:
        """Return the index of the rank's host, from 0."""
        return self._host


def fit(task: Task) -> None:
    """Train the model of `task` for the plan's steps by Lightning's Trainer. All ranks get the same
    micro-batches. A listener may end the process before the Trainer's teardown."""
    job, plan = task.job, task.job.plan
    module_class = ShardedFineTune if plan.strategy == "fsdp2" else FineTune
    module = module_class(task)
    num_batches = plan.steps * plan.accumulate_grad_batches
    precision: Any = plan.precision  # a precision of Lightning, checked by the plan
    interval: Any = {}
    if plan.val_check_interval is not None:
        interval = {"val_check_interval": plan.val_check_interval, "check_val_every_n_epoch": None}
    trainer = L.Trainer(
        accelerator=job.accelerator, devices=plan.devices, num_nodes=plan.num_nodes,
        precision=precision,
        strategy=make_strategy(plan, module.model),
        plugins=[OneProcess(job.rank, plan.devices)] if job.is_alone else None,
        accumulate_grad_batches=plan.accumulate_grad_batches,
        gradient_clip_val=plan.gradient_clip_val,
        gradient_clip_algorithm=plan.gradient_clip_algorithm if plan.gradient_clip_val else None,
        max_epochs=1, max_steps=plan.steps,
        limit_train_batches=num_batches, limit_val_batches=plan.limit_val_batches,
        num_sanity_val_steps=NUM_SANITY_STEPS if plan.validates else 0,
        callbacks=[_Messenger(job.listener)], use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **interval,
    )  # fmt: skip
    trainer.fit(module, _number_loader(num_batches), _number_loader(plan.limit_val_batches))


def _number_loader(count: int) -> Any:
    """Return a DataLoader of the numbers 0 to `count` - 1; None if `count` is 0. The module takes
    the micro-batches from its task."""
    numbers: Any = range(count)
    return torch.utils.data.DataLoader(numbers, batch_size=None, num_workers=0) if count else None
