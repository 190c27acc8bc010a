"""memest predicts the GPU memory of a fine-tune before a GPU is rented.

    from memest import TrainingPlan, predict

    print(predict(TrainingPlan(model_name="blip2-flan-t5-xxl", optim="adam_8bit", batch_size=2)))

    with memest.virtual_gpu("a100-80gb") as gpu:
        train()  # any code, on a GPU that is not there

    memest.preflight()  # first line of a script: stop it if it will not fit the real GPU

Importing it loads neither torch nor transformers; `predict` and `virtual_gpu` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memest.errors import MemestError
from memest.plan import TrainingPlan
from memest.report import Prediction

if TYPE_CHECKING:
    from memest.estimator.kernels.registry import register_kernel
    from memest.estimator.kernels.scratch import Scratch
    from memest.estimator.predict import predict
    from memest.run.preflight import Preflight, PreflightStop, preflight
    from memest.run.session import virtual_gpu

__version__ = "0.2.0"
__all__ = [
    "MemestError", "Prediction", "Preflight", "PreflightStop", "Scratch", "TrainingPlan", "predict",
    "preflight", "register_kernel", "virtual_gpu",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "predict":
        from memest.estimator.predict import predict

        return predict
    if name in ("Preflight", "PreflightStop", "preflight"):
        from memest.run import preflight

        return getattr(preflight, name)
    if name == "virtual_gpu":
        from memest.run.session import virtual_gpu

        return virtual_gpu
    if name == "register_kernel":
        from memest.estimator.kernels.registry import register_kernel

        return register_kernel
    if name == "Scratch":
        from memest.estimator.kernels.scratch import Scratch

        return Scratch
    raise AttributeError(f"module `memest` has no attribute `{name}`")
