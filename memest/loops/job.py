"""A plan's job: build its model, batches and optimizer, and train.

`memest validate` runs this code on a GPU, `memest predict` on a virtual one.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from memest.errors import PlanError
from memest.loops import data
from memest.loops.probe import PhaseRecorder
from memest.models_meta.assemble import assemble, describe_model, loss_of, trained_parameters
from memest.models_meta.registry import resolve_config
from memest.packages import require
from memest.plan import TrainingPlan
from memest.plan.optimizers import BITSANDBYTES, DEEPSPEED, OPTIMIZERS

LEARNING_RATE = 1e-4  # learning rate of every optimizer; it has no effect on memory
SEED = 20


def make_optimizer(
    plan: TrainingPlan, params: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the plan's optimizer over `params`, with its library's defaults and the plan's options.

    Raises:
        PlanError: the optimizer does not take an option, or these parameters.
        UnsupportedError: the optimizer's library is not installed.
    """
    row = OPTIMIZERS[plan.optim]
    cls = _optimizer_class(row.library, row.class_name)
    options: dict[str, Any] = {"lr": LEARNING_RATE, **dict(row.options)}
    if plan.weight_decay is not None:
        options["weight_decay"] = plan.weight_decay
    if plan.momentum:
        options["momentum"] = plan.momentum
    if plan.nesterov:
        options["nesterov"] = True
    options |= dict(plan.optim_options)
    try:
        optimizer: torch.optim.Optimizer = cls(params, **options)
    except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
        raise PlanError(
            f"`{row.class_name}` cannot be made for this model: {' '.join(str(error).split())}",
            hint="change `optim` or its options, or `freeze` the parameters that it does not take",
        ) from error
    return optimizer


def _optimizer_class(library: str, name: str) -> Any:
    if library == DEEPSPEED:  # host optimizer, compiled at first use
        require("deepspeed")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam
    if library == BITSANDBYTES:
        require("bitsandbytes")
        import bitsandbytes  # here, because it opens the GPU

        return getattr(bitsandbytes.optim, name)
    return getattr(torch.optim, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options of a run that are not in its plan. They name the weights to load, the data to train
    on, and a folder for a record of the allocator's events."""

    weights: str = "random"  # `random`, or `pretrained`: from the Hub or a local folder
    data: Path | None = None  # `datasets` folder of `image` and `text`; None: synthetic
    snapshots: Path | None = None  # folder for a recording of the allocator; None records nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Callbacks of a run. `on_end` is called after the last step, or `on_error` after an error.
    With Lightning, either call precedes the trainer's teardown, which can move tensors to the host.
    A callback can thus still read the memory of the training."""

    on_end: Callable[[], None]
    on_error: Callable[[BaseException], None] = lambda error: None
    on_ready: Callable[[], None] = lambda: None  # called before the first step
    on_step: Callable[[], None] = lambda: None  # called at the end of a micro-batch
    on_model: Callable[[Any], None] = lambda model: None  # called when the model is built


@dataclass(slots=True)
class Job:
    """Training run: its plan, options and callbacks, and the results that `run_job` fills in."""

    plan: TrainingPlan
    recorder: PhaseRecorder
    listener: Listener
    options: RunOptions = field(default_factory=RunOptions)
    where: str = "cuda"  # device on which the model is built
    accelerator: str = "gpu"  # accelerator of Lightning's Trainer: `gpu`, or `cpu` in tests
    is_alone: bool = False  # True if this process simulates one rank and contacts no others
    num_ahead: int = 0  # micro-batches of a step that are loaded and not run
    rank: int = 0  # rank of this process where it represents all
    loss_of: Callable[..., Any] = loss_of  # of a model in training; see `assemble.loss_of`
    values: dict[str, Any] = field(default_factory=dict)  # plan keys with the sizes that were used
    model: dict[str, Any] = field(default_factory=dict)  # class and numbers of parameters
    notes: list[str] = field(default_factory=list)  # decisions made during the run
    data_notes: list[str] = field(default_factory=list)  # such as an ignored image size


@dataclass(frozen=True, slots=True)
class Task:
    """Model, micro-batches and optimizer of a job, as each training loop uses them."""

    job: Job
    model: Any  # module on the device, in training mode
    make_optimizer: Callable[[], Any]  # called after a strategy has sharded the model
    feed: data.Feed

    def loss(self, model: Any, inputs: data.Inputs) -> Any:
        """Return the loss of `model` for the micro-batch `inputs`, which is on the device."""
        return self.job.loss_of(model, inputs, self.feed.loss_output)

    def batch(self, number: int) -> data.Inputs:
        """Return training micro-batch `number`, counted from 0."""
        return self.feed.batches[number % len(self.feed.batches)]

    def val_batch(self, number: int) -> data.Inputs:
        """Return validation micro-batch `number`, counted from 0."""
        return self.feed.val_batches[number % len(self.feed.val_batches)]


def run_job(job: Job) -> None:
    """Build the model of `job.plan`, train it for the plan's steps, and fill in `job`'s results."""
    plan, options = job.plan, job.options
    torch.manual_seed(SEED)
    config = resolve_config(plan.model_name, trust_remote_code=plan.trust_remote_code)
    model = _build_model(job, config)
    if options.data is None:
        feed = data.synthetic_feed(plan, model, config)
    else:
        feed = data.dataset_feed(plan, config, options.data)
    seq_len = None if plan.lengths else feed.seq_len
    sized_plan = replace(plan, seq_len=seq_len, image_size=feed.image_size, padded=feed.padded)
    job.values = sized_plan.to_dict()
    job.notes.extend(feed.notes)
    job.data_notes = list(feed.notes) if options.data is not None else []
    make_optimizer = partial(_optimizer_over, plan, model)
    if not plan.is_distributed:  # before the loop, so that its allocations count as setup
        optimizer = make_optimizer()
        make_optimizer = partial(lambda optimizer: optimizer, optimizer)
    task = Task(job, model, make_optimizer, feed)
    del model, feed, make_optimizer
    job.listener.on_model(task.model)
    gc.collect()
    if job.accelerator == "gpu":
        torch.cuda.empty_cache()
    job.recorder.start()
    import_module(f"memest.loops.{plan.loop}").fit(task)


def _build_model(job: Job, config: Any) -> Any:
    plan = job.plan
    is_random = job.options.weights == "random"
    load = partial(data.load_base, plan, config, is_random=is_random, device=job.where)
    assembled = assemble(
        plan,
        config,
        device=job.where,
        load=load if plan.loads_quantized or not is_random else None,
        initialise=data.initialise if is_random and not plan.loads_quantized else None,
    )
    job.notes.extend(assembled.notes)
    model = assembled.module
    if plan.activation_checkpointing_policy:
        import_module("memest.models_meta.sharding").stop_caching(model)  # imports FSDP
    job.model = describe_model(model)
    trained_parameters(model)  # fails early if there are none
    return model


def _optimizer_over(plan: TrainingPlan, model: Any) -> Any:
    """Make the optimizer over the trained parameters, which a strategy may have replaced."""
    return make_optimizer(plan, trained_parameters(model))
