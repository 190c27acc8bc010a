"""Small models on one rank of several virtual GPUs, by Lightning's strategies."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from memest.estimator.gpu.worlds import Mailbox, Rank
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay import virtual_run
from memest.estimator.replay.replay import Program
from memest.estimator.tensors.storages import RETURNED, MemKind
from memest.estimator.virtual_gpu import VirtualGpu
from memest.loops.data import Feed
from memest.loops.job import Job, Listener, Task, make_optimizer
from memest.loops.lightning import fit
from memest.loops.probe import CudaMemory, PhaseRecorder
from memest.plan import TrainingPlan
from memest.report import Phase

UNLIMITED_BYTES = 1 << 50


_said = Mailbox()
"""What the first rank of the last run has said to the others."""


def gpu_of_rank(rank: int, world_size: int) -> VirtualGpu:
    """An H200 that is one of a host's; the other ranks of a run come after the first."""
    global _said
    if rank == 0:
        _said = Mailbox()
    return VirtualGpu(
        find_gpu("h200"),
        limit_bytes=UNLIMITED_BYTES,
        lines=virtual_run.NoLines(),
        rank=Rank(rank=rank, world_size=world_size, num_local=world_size, mailbox=_said),
    )


class WithLoss(nn.Module):
    """Gives the sum of what a model returns as the loss of an output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=self.body(x))


class _TrainingCallbacks(virtual_run._TrainingCallbacks):
    def steps_done(self) -> None:
        self.virtual.mode.attribution.label_models()


def run_rank(
    make: Callable[[], nn.Module], shape: Sequence[int], *, rank: int = 0, **options: Any
) -> Program:
    """What `rank` does for the steps of a plan with these `options`; inputs are of `shape`."""
    plan = TrainingPlan(model_name="m", **options)
    virtual = gpu_of_rank(rank, plan.world_size)
    watch = _TrainingCallbacks(virtual, None, None)  # type: ignore[arg-type]
    recorder = PhaseRecorder(CudaMemory(), plan.accumulate_grad_batches)
    recorder.on_start, recorder.on_row = watch.training_starts, watch.probe_read
    job = watch.job = Job(
        plan,
        recorder,
        Listener(on_end=watch.steps_done, on_ready=watch.model_wrapped),
        is_alone=True,
        rank=rank,
    )
    x = torch.zeros(*shape)
    contexts = (
        virtual_run._environment_restored(),
        virtual_run._without_messages(),
        virtual_run.without_gc(),
    )
    with contexts[0], contexts[1], contexts[2], virtual, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, to users
        with torch.device("cuda"):
            model = WithLoss(make())
        watch.model_built(model)
        torch.cuda.empty_cache()
        recorder.start()

        def optimizer() -> torch.optim.Optimizer:
            return make_optimizer(plan, [p for p in model.parameters() if p.requires_grad])

        feed = Feed(
            batches=[{"x": x}],
            val_batches=[],
            loss_output="loss",
            seq_len=0,
            padded=False,
            image_size=None,
        )
        fit(Task(job, model, optimizer, feed))
    return virtual_run._program(watch)


def events_until(program: Program, step: int, micro_batch: int, phase: Phase) -> list[int]:
    """All events before this probe."""
    found = list(program.setup)
    for number, batches in enumerate(program.steps):
        for micro, batch in enumerate(batches):
            for part in batch:
                found += part.events
                if (number, micro, part.phase) == (step, micro_batch, phase):
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
