"""DeepSpeed in Lightning, without DeepSpeed: Lightning's own strategy drives a mirror of it.

`lightning.pytorch.strategies.DeepSpeedStrategy` and its precision plugin run as they are; what they
ask of the package `deepspeed` is answered by `zero12` and `zero3`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn

from memest.estimator.device.streams import StreamRecorder
from memest.estimator.parallel.zero import HostAdam, Zero
from memest.estimator.parallel.zero3 import Zero3
from memest.estimator.parallel.zero12 import Zero12
from memest.plan import TrainingPlan


class Engine(nn.Module):
    """Stands for `deepspeed.DeepSpeedEngine`, around a LightningModule.

    Args:
        module: whose forward is a micro-batch.
        zero: what happens around it.
    """

    lr_scheduler: Any = None

    def __init__(self, module: nn.Module, zero: Zero) -> None:
        super().__init__()
        self.module = module
        self._zero = zero
        self._micro_steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        with self._zero.forward():
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Of the micro-batch under way."""
        self._zero.backward(loss, is_last=self._is_boundary)

    def step(self) -> None:
        """After each micro-batch; the last of a step updates the parameters."""
        self._zero.step(is_last=self._is_boundary)
        self._micro_steps += 1

    @property
    def _is_boundary(self) -> bool:
        """`is_gradient_accumulation_boundary`."""
        num_micro_batches = self._zero.plan.accumulate_grad_batches
        return (self._micro_steps + 1) % num_micro_batches == 0


class MirroredDeepSpeed(DeepSpeedStrategy):
    """Lightning's strategy of one rank of `plan`, with a mirror in place of the package."""

    def __init__(self, plan: TrainingPlan, recorder: StreamRecorder, rank: int = 0) -> None:
        DDPStrategy.__init__(self)  # DeepSpeedStrategy's own asks for the package
        kind = Zero3 if plan.strategy.startswith("deepspeed_stage_3") else Zero12
        self.config: dict[str, Any] = {}
        self.zero: Zero = kind(plan, recorder, rank)
        self._for_good = ExitStack()

    def _init_config_if_needed(self) -> None:
        """The plan is the configuration."""

    def _set_deepspeed_activation_checkpointing(self) -> None:
        """Layers are checkpointed by torch's own functions."""

    def _init_deepspeed_distributed(self) -> None:
        self._set_node_environment_variables()
        torch.distributed.init_process_group("nccl")

    def _init_optimizers(self) -> Any:
        if self.zero.plan.optim != "deepspeed_cpu":
            return super()._init_optimizers()
        model = self.lightning_module
        assert model is not None
        return HostAdam([p for p in model.parameters() if p.requires_grad]), None

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        self.zero.start(model, optimizer)
        self._for_good.enter_context(self.zero.linear_layers())
        return Engine(model, self.zero), self.zero.zero

    def teardown(self) -> None:
        """Also ends what DeepSpeed changes for as long as a process lives."""
        self._for_good.close()
        super().teardown()
