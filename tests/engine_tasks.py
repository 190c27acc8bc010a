"""Tasks for workers, in a module that a new process imports at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memest.loops.job import RunOptions
    from memest.plan import TrainingPlan
    from memest.report import Measurement


def work(number: int, *, folder: Path) -> int:
    """Square a number. The worker of 1 is killed once, that of 2 always."""
    mark = folder / f"mark-{number}"
    if number == 2 or (number == 1 and not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2


def refuse(number: int) -> int:
    """Raise an error that memest expects."""
    from memest.errors import PlanError

    raise PlanError(f"{number} is not a plan", hint="take three")


def stumble(number: int) -> int:
    """Raise an error that memest does not expect."""
    raise ValueError(f"{number} came unexpectedly")


def first_gpu(number: int) -> str:
    """Return the GPUs of this worker."""
    time.sleep(0.5)  # so that each worker has one task
    return os.environ["CUDA_VISIBLE_DEVICES"]


def experiment(
    plan: TrainingPlan, options: RunOptions, deliver: Callable[[Measurement], Any]
) -> None:
    """End as the plan's name says, with the GPUs of this process in the report."""
    from memest.report import Measurement, Outcome

    if plan.name == "raises":
        raise ValueError("the seventh wrong thing")
    time.sleep(0.5)  # so that each GPU has one
    measured = Measurement(
        name=plan.label, plan=plan.to_dict(), model={}, gpu="h200", peak_allocated_bytes=19,
        peak_reserved_bytes=23, process_bytes=29, host_bytes=31, phases=(),
        verdict=Outcome.OOM if plan.name == "is too large" else Outcome.FITS, versions={},
        elapsed_s=0.5, device={"visible": os.environ.get("CUDA_VISIBLE_DEVICES", "")},
        context_bytes=6, note="",
    )  # fmt: skip
    deliver(measured)
