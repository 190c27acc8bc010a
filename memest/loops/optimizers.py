"""A plan's optimizer, made by its own library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memest.errors import PlanError
from memest.packages import require
from memest.plan import TrainingPlan
from memest.plan.optimizers import BITSANDBYTES, DEEPSPEED, OPTIMIZERS

LEARNING_RATE = 1e-4  # learning rate of every optimizer; it has no effect on memory


def make_optimizer(
    plan: TrainingPlan, params: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the plan's optimizer over `params`, with its library's defaults and the plan's options.

    Raises:
        PlanError: it does not take an option, or these parameters.
        UnsupportedError: its library is not installed.
    """
    row = OPTIMIZERS[plan.optim]
    kind = _class_of(row.library, row.class_name)
    options: dict[str, Any] = {"lr": LEARNING_RATE, **dict(row.options)}
    if plan.weight_decay is not None:
        options["weight_decay"] = plan.weight_decay
    if plan.momentum:
        options["momentum"] = plan.momentum
    if plan.nesterov:
        options["nesterov"] = True
    options |= dict(plan.optim_options)
    try:
        made: torch.optim.Optimizer = kind(params, **options)
    except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
        raise PlanError(
            f"`{row.class_name}` cannot be made for this model: {' '.join(str(error).split())}",
            hint="change `optim` or its options, or `freeze` the parameters that it does not take",
        ) from error
    return made


def _class_of(library: str, name: str) -> Any:
    if library == DEEPSPEED:  # on the host, compiled at first use
        require("deepspeed")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam
    if library == BITSANDBYTES:
        require("bitsandbytes")
        import bitsandbytes  # here, because it opens the GPU

        return getattr(bitsandbytes.optim, name)
    return getattr(torch.optim, name)
