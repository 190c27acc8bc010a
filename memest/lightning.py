"""The preflight as a callback of Lightning's `Trainer`."""

import sys
from typing import TYPE_CHECKING, Any

from memest.errors import MemestError
from memest.run.preflight import Preflight, preflight, report_measured

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise MemestError(
            "`memest.lightning` needs `lightning`", hint="pip install lightning"
        ) from error

__all__ = ["PreflightCallback"]


class PreflightCallback(Callback):
    """Lightning callback that predicts the peak memory by `memest.preflight` when a fit begins.

    The model goes to the GPU afterwards. At the end of the fit, a line on stderr and the loggers
    have the predicted and the measured peak.

        trainer = L.Trainer(callbacks=[PreflightCallback()])

    Args:
        max_steps: optimizer steps to simulate.
        time_limit: seconds after which the preflight is given up.
        margin: memory, in bytes or as text such as `2GiB`. A warning is printed if less than this
            would stay free at the peak. None is `Gpu.spread_bytes`, the memory that another driver
            or CUDA may take.
    """

    def __init__(
        self, *, max_steps: int = 3, time_limit: float = 120.0, margin: int | str | None = None
    ) -> None:
        self._options: dict[str, Any] = {
            "max_steps": max_steps, "time_limit": time_limit, "margin": margin,
        }  # fmt: skip
        self._result: Preflight | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Run the preflight on global rank 0 before a fit (`stage` is `fit`)."""
        if stage == "fit" and trainer.is_global_zero:
            self._result = preflight(**self._options)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the predicted and the measured peak, to stderr and to loggers."""
        for figures in report_measured(self._result):
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)
