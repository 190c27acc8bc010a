"""For Lightning: the preflight as a callback of the `Trainer`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memest.errors import MemestError
from memest.run.preflight import preflight

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
    """`memest.preflight` when `trainer.fit` begins, before the model goes to the GPU.

        trainer = L.Trainer(callbacks=[PreflightCallback()])

    Args:
        max_steps, time_limit, margin: as of `memest.preflight`.
    """

    def __init__(
        self, *, max_steps: int = 3, time_limit: float = 120.0, margin: int | str | None = None
    ) -> None:
        self._options: dict[str, Any] = {
            "max_steps": max_steps, "time_limit": time_limit, "margin": margin,
        }  # fmt: skip

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning calls it first."""
        if stage == "fit" and trainer.is_global_zero:
            preflight(**self._options)
