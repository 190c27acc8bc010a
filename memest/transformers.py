"""The preflight as a callback of transformers' `Trainer`."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from memest.run.preflight import preflight, report_measured

__all__ = ["PreflightCallback"]


class PreflightCallback(TrainerCallback):
    """Callback whose construction runs `memest.preflight`, before a `Trainer` uses the GPU.

        trainer = Trainer(model=model, args=args, callbacks=[PreflightCallback()])

    When the training ends, it prints the predicted and measured peak, and logs them to `report_to`.

    Args:
        max_steps, time_limit, margin: as in `memest.preflight`.
    """

    def __init__(
        self, *, max_steps: int = 3, time_limit: float = 120.0, margin: int | str | None = None
    ) -> None:
        self._result = preflight(max_steps=max_steps, time_limit=time_limit, margin=margin)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, Any] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Print and log the predicted and measured peak with the last of the training's logs."""
        if "train_runtime" not in (logs or {}):
            return
        for figures in report_measured(self._result):
            state.log_history.append({**figures, "step": state.global_step})
            kinds = get_reporting_integration_callbacks(args.report_to)  # type: ignore[no-untyped-call]
            for kind in kinds:
                kind().on_log(args, state, control, logs=dict(figures), **kwargs)
