"""Small models on one rank of several virtual GPUs, by Lightning's strategies."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from memest.estimator.device.ranks import Ranks
from memest.estimator.device.storages import RETURNED, MemKind
from memest.estimator.device.virtual_gpu import VirtualGpu
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.parallel.rank import strategy_of
from memest.estimator.parallel.zero import HostAdam
from memest.estimator.trace import virtual_run
from memest.estimator.trace.program import Program
from memest.loops.job import Job, Listener
from memest.loops.lightning import fit
from memest.loops.optimizers import make_optimizer
from memest.loops.probe import CudaMemory
from memest.loops.task import Task
from memest.plan import TrainingPlan
from memest.report import Phase

WITHOUT_END = 1 << 50


def gpu_of_rank(rank: int, world_size: int) -> VirtualGpu:
    """An H200 that is one of a host's."""
    return VirtualGpu(
        find_gpu("h200"),
        limit_bytes=WITHOUT_END,
        lines=virtual_run.NoLines(),
        ranks=Ranks(rank=rank, world_size=world_size, num_local=world_size),
    )


class WithLoss(nn.Module):
    """Gives the sum of what a model returns as the loss of an output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=self.body(x))


class _Watch(virtual_run._Watch):
    def ended(self) -> None:
        self.virtual.recorder.labels.of_models()


def run_rank(
    make: Callable[[], nn.Module], shape: Sequence[int], *, rank: int = 0, **options: Any
) -> Program:
    """What `rank` does for the steps of a plan with these `options`; inputs are of `shape`."""
    plan = TrainingPlan(model_name="m", **options)
    virtual = gpu_of_rank(rank, plan.world_size)
    watch = _Watch(virtual, None, lambda: None)  # type: ignore[arg-type]
    recorder = virtual_run._PhaseRecorder(
        CudaMemory(), plan.accumulate_grad_batches, on_row=watch.reached
    )
    recorder.on_start = watch.starts
    job = watch.job = Job(
        plan,
        recorder,
        Listener(on_end=watch.ended, on_ready=watch.ready),
        strategy=strategy_of(plan, virtual.recorder, rank),
        is_alone=True,
        rank=rank,
    )
    x = torch.zeros(*shape)
    contexts = virtual_run._as_before(), virtual_run._quietly(), virtual_run.without_cycles()
    with contexts[0], contexts[1], contexts[2], virtual, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, to users
        with torch.device("cuda"):
            model = WithLoss(make())
        watch.has_model(model)
        torch.cuda.empty_cache()
        recorder.start()

        def optimizer() -> torch.optim.Optimizer:
            return make_optimizer(plan, [p for p in model.parameters() if p.requires_grad])

        task = Task(
            plan=plan,
            model=model,
            make_optimizer=optimizer,
            batches=[{"x": x}],
            val_batches=[],
            recorder=recorder,
        )
        fit(task, job)
    return virtual_run._program(watch)


def events_until(program: Program, step: int, micro_batch: int, phase: Phase) -> list[int]:
    """All events before this probe."""
    found = list(program.setup)
    for number, batches in enumerate(program.steps):
        for micro, batch in enumerate(batches):
            for part in batch:
                found += part.events
                if part.probe and (number, micro, part.probe.phase) == (step, micro_batch, phase):
                    return found
    raise LookupError(phase)


def alive_after(program: Any, events: Sequence[int]) -> Counter[MemKind]:
    """Bytes by kind that `events` leave; `program` has their storages."""
    living: dict[int, None] = {}
    for event in events:
        if event >= 0:
            living[event] = None
        elif event > RETURNED:
            living.pop(~event, None)
    found: Counter[MemKind] = Counter()
    for index in living:
        found[program.storages.kinds[index]] += program.storages.num_bytes[index]
    return found


def made(program: Program, events: Sequence[int], kind: MemKind) -> list[int]:
    """Bytes of what `events` made for `kind`, in order."""
    table = program.storages
    return [
        table.num_bytes[e]
        for e in events
        if e >= 0 and table.kinds[e] is kind and table.num_bytes[e]
    ]


class StepModule(nn.Module):
    """Stands for a LightningModule: its forward is a micro-batch.

    Args:
        model: what is trained.
        x: the batch.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.model = model
        self._x = x

    def forward(self) -> Tensor:
        loss: Tensor = self.model(self._x)
        return loss


class ZeroRun:
    """One rank under DeepSpeed's mirror, without Lightning, step by step; one at a time.

    Args:
        kind: the stage.
        plan: with its options.
        make: the model, made on the GPU in the plan's precision.
        shape: of the batch.
        rank: of the plan's GPUs.
        prepare: what is done to the model before it is divided.
    """

    _open: VirtualGpu | None = None

    def __init__(
        self,
        kind: type[Any],
        plan: TrainingPlan,
        make: Callable[[], nn.Module],
        shape: Sequence[int],
        *,
        rank: int = 0,
        prepare: Callable[[Any], Any] = lambda model: None,
    ) -> None:
        ZeroRun.close()
        self.plan = plan
        ZeroRun._open = virtual = gpu_of_rank(rank, plan.world_size)
        virtual.__enter__()
        self.recorder = virtual.recorder
        self.events: list[int] = []
        dtype = torch.float32 if plan.precision == "32-true" else torch.bfloat16
        with torch.device("cuda"):
            self.model: Any = make().to(dtype)
            prepare(self.model)
            x = torch.empty(*shape, dtype=dtype)
        for parameter in self.model.parameters():
            self.recorder.label(parameter, MemKind.PARAMS)
        self.step_module = StepModule(self.model, x)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        is_on_host = plan.optim == "deepspeed_cpu"
        inner = HostAdam(trained) if is_on_host else make_optimizer(plan, trained)
        self.zero = kind(plan, virtual.recorder, rank)
        self.zero.start(self.step_module, inner)
        del inner
        self.take()

    @classmethod
    def close(cls) -> None:
        """End the run that is open."""
        if cls._open is not None:
            cls._open.__exit__()
            cls._open = None

    def take(self) -> list[int]:
        """The events since the last call."""
        self.recorder.settle()
        taken = self.recorder.log.events[len(self.events) :].tolist()
        self.events += taken
        return taken

    def micro_batch(self, *, is_last: bool = True) -> tuple[list[int], list[int]]:
        """The events of a forward and of a backward."""
        with self.zero.linear_layers():
            with self.zero.forward():
                loss = self.step_module()
            forward = self.take()
            self.zero.backward(loss, is_last=is_last)
            del loss
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.recorder.label(parameter.grad, MemKind.GRADS)
        return forward, self.take()

    def step(self) -> list[int]:
        """The optimizer's step."""
        with self.zero.linear_layers():
            self.zero.step(is_last=True)
        return self.take()

    def sizes(self, events: Sequence[int], kind: MemKind) -> list[int]:
        """Bytes of what `events` made for `kind`."""
        table = self.recorder.storages
        return [table.num_bytes[e] for e in events if e >= 0 and table.kinds[e] is kind]

    def alive(self) -> Counter[MemKind]:
        """Bytes by kind of what lives now."""
        return alive_after(self.recorder, self.events)
