"""GPU memory of training, predicted without a GPU.

    from memest import TrainingPlan, predict

    print(predict(TrainingPlan(model_name="blip2-flan-t5-xxl", optim="adam_8bit", batch_size=2)))

    with memest.virtual_gpu("a100-80gb") as gpu:
        train()  # any code, on a GPU that is not there

    memest.preflight()  # first line of a script: stop it if it will not fit the real GPU

Importing it loads neither torch nor transformers; `predict` and `virtual_gpu` do.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memest.errors import MemestError
    from memest.estimator.ops.registry import register_kernel
    from memest.estimator.ops.temporaries import Scratch
    from memest.estimator.predict import predict
    from memest.plan import TrainingPlan
    from memest.report import Prediction
    from memest.run.preflight import Preflight, PreflightStop, preflight
    from memest.run.session import virtual_gpu

__path__ = [os.path.realpath(folder) for folder in __path__]  # `memest run --python` links to it
__version__ = "0.3.0"
__all__ = [
    "MemestError", "Prediction", "Preflight", "PreflightStop", "Scratch", "TrainingPlan", "predict",
    "preflight", "register_kernel", "virtual_gpu",
]  # fmt: skip
_MODULES = {
    "MemestError": "errors", "Prediction": "report", "Preflight": "run.preflight",
    "PreflightStop": "run.preflight", "Scratch": "estimator.ops.temporaries",
    "TrainingPlan": "plan", "load_ipython_extension": "notebook", "predict": "estimator.predict",
    "preflight": "run.preflight", "register_kernel": "estimator.ops.registry",
    "virtual_gpu": "run.session",
}  # fmt: skip
"""Name -> module that is imported at its first use."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module `memest` has no attribute `{name}`")
    return getattr(import_module(f"memest.{_MODULES[name]}"), name)
