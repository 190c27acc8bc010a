"""What every strategy does around the step of one rank, in the order of Lightning 2.6."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memest.estimator.device.streams import StreamRecorder
from memest.plan import TrainingPlan

BuildOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class StepModule(nn.Module):
    """Stands for the LightningModule: its forward is `training_step`, as strategies call it.

    Args:
        model: what is trained.
        loss_of_batch: moves the next batch and returns the loss.
    """

    def __init__(self, model: nn.Module, loss_of_batch: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss_of_batch = loss_of_batch

    def forward(self, batch_idx: int) -> Tensor:
        """The loss of the next micro-batch."""
        return self._loss_of_batch(self.model)


@dataclass(frozen=True, slots=True)
class HostTerm:
    """Bytes of host memory that one rank holds on purpose."""

    what: str
    num_bytes: int
    arithmetic: str
    is_pinned: bool = False


class Strategy:
    """A strategy that divides nothing; the others override what they do otherwise.

    All methods run under the recorder, so what they make and free on the meta device is recorded.
    The order of a micro-batch: `forward`, `zero_grad` (first of a step), `backward`, and after the
    last (or after each, with `steps_each_micro_batch`) `optimizer_step`.
    """

    steps_each_micro_batch = False
    """DeepSpeed counts micro-batches itself, so Lightning asks it to step after each."""

    uses_autocast = True
    """Whether `*-mixed` precision is torch's autocast."""

    def __init__(self, plan: TrainingPlan, recorder: StreamRecorder, rank: int = 0) -> None:
        self.plan = plan
        self.recorder = recorder
        self.rank = rank
        self.world_size = plan.world_size
        self.module: nn.Module = nn.Identity()
        """What the forward is called on."""

        self.optimizer: torch.optim.Optimizer

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around everything else: patches and process groups."""
        yield

    def setup(self, step: StepModule) -> None:
        """Wrap the module, which lies on the GPU."""
        self.module = step

    def make_optimizer(self, build: BuildOptimizer) -> None:
        """After `setup`: the optimizer over what this rank trains."""
        self.optimizer = build([p for p in self.module.parameters() if p.requires_grad])

    def forward(self, *, is_last: bool) -> Tensor:
        """The loss; `is_last` in the micro-batch that ends with a step."""
        return self.module(0)  # type: ignore[no-any-return]

    def zero_grad(self) -> None:
        """As `optimizer.zero_grad(set_to_none=True)`."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """The backward of `loss`, which is scaled already."""
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, scaler: Any, *, is_last: bool) -> None:
        """The update; a gradient scaler's steps around it where there is one."""
        with torch.no_grad():
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.unscale_(self.optimizer)
                scaler.step(self.optimizer)
                scaler.update()

    def host_terms(self) -> list[HostTerm]:
        """What this rank holds in host memory at the end of a step."""
        return []
