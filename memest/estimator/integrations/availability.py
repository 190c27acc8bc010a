"""Cached checks of libraries for a GPU, which run again on the virtual GPU."""

from __future__ import annotations

import functools
import sys

from memest.estimator.tensors.patches import Patches

_MODULES = (
    "transformers.utils.import_utils", "accelerate.utils.imports", "torch.utils._triton",
    "peft.import_utils", "lightning_utilities.core.imports", "bitsandbytes.backends.cuda.ops",
)  # fmt: skip


def install(patches: Patches) -> None:
    """Clear the results of a machine without a GPU now, and those of the virtual GPU at the end."""
    forget()
    patches.on_undo(forget)


def forget() -> None:
    """Clear every cached function of the modules that check availability."""
    for name in _MODULES:
        for function in list(vars(sys.modules.get(name, object)).values()):
            if isinstance(function, functools._lru_cache_wrapper):  # others may only look alike
                function.cache_clear()
