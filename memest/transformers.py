"""For transformers: the preflight as a callback of the `Trainer`."""

from __future__ import annotations

from transformers import TrainerCallback

from memest.run.preflight import preflight

__all__ = ["PreflightCallback"]


class PreflightCallback(TrainerCallback):
    """`memest.preflight` when the callback is made, before a `Trainer` puts its model on the GPU.

        trainer = Trainer(model=model, args=args, callbacks=[PreflightCallback()])

    Args:
        max_steps, time_limit, margin: as of `memest.preflight`.
    """

    def __init__(
        self, *, max_steps: int = 3, time_limit: float = 120.0, margin: int | str | None = None
    ) -> None:
        preflight(max_steps=max_steps, time_limit=time_limit, margin=margin)
