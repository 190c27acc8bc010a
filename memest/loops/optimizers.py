"""The optimizers that a plan can name, as torch and bitsandbytes make them on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memest.errors import UnsupportedError
from memest.plan import TrainingPlan

LEARNING_RATE = 1e-4
"""Of every optimizer; it has no effect on memory."""

_TORCH: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "adamw_single": (torch.optim.AdamW, {"foreach": False, "fused": False}),
    "adam": (torch.optim.Adam, {}),
    "adam_fused": (torch.optim.Adam, {"fused": True}),
    "adam_single": (torch.optim.Adam, {"foreach": False, "fused": False}),
    "sgd": (torch.optim.SGD, {}),
    "sgd_fused": (torch.optim.SGD, {"fused": True}),
    "sgd_single": (torch.optim.SGD, {"foreach": False, "fused": False}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop_single": (torch.optim.RMSprop, {"foreach": False}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adagrad_single": (torch.optim.Adagrad, {"foreach": False}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adafactor_foreach": (torch.optim.Adafactor, {"foreach": True}),
}

BITSANDBYTES = {
    "adam_8bit": "Adam8bit",
    "adamw_8bit": "AdamW8bit",
    "paged_adam_8bit": "PagedAdam8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "lion_8bit": "Lion8bit",
    "lion_32bit": "Lion32bit",
    "paged_lion_8bit": "PagedLion8bit",
    "paged_lion_32bit": "PagedLion32bit",
}
"""A plan's name -> the class in `bitsandbytes.optim`."""


def make_optimizer(
    plan: TrainingPlan, params: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The plan's optimizer over `params`, with its library's defaults.

    Raises:
        UnsupportedError: it is not known here, or needs a package.
    """
    options: dict[str, Any] = {"lr": LEARNING_RATE}
    if plan.optim == "deepspeed_cpu":
        return _deepspeed_cpu_adam()(params, **options)
    if plan.momentum:
        options["momentum"] = plan.momentum
    if plan.nesterov:
        options["nesterov"] = True
    if plan.optim in BITSANDBYTES:
        return _bitsandbytes_class(BITSANDBYTES[plan.optim])(params, **options)
    if plan.optim not in _TORCH:
        raise UnsupportedError(
            f"optimizer `{plan.optim}` cannot be measured",
            hint=f"choose one of {', '.join(f'`{n}`' for n in (*_TORCH, *BITSANDBYTES))}",
        )
    optimizer, own = _TORCH[plan.optim]
    return optimizer(params, **options, **own)


def _deepspeed_cpu_adam() -> Callable[..., torch.optim.Optimizer]:
    """DeepSpeed's Adam on the host, decoupled weight decay by default; compiled at first use."""
    from memest.loops.packages import require

    require("deepspeed")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam  # type: ignore[no-any-return]


def _bitsandbytes_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    from memest.loops.packages import require

    require("bitsandbytes")
    import bitsandbytes  # here, because it opens the GPU

    return getattr(bitsandbytes.optim, name)  # type: ignore[no-any-return]
