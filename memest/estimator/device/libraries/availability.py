"""What libraries have found out about the machine and keep: asked again on the virtual GPU."""

from __future__ import annotations

import functools
import sys

from memest.estimator.device.patches import Patches

_MODULES = (
    "transformers.utils.import_utils", "accelerate.utils.imports", "torch.utils._triton",
    "peft.import_utils", "lightning_utilities.core.imports", "bitsandbytes.backends.cuda.ops",
)  # fmt: skip


def install(patches: Patches) -> None:
    """Forget the answers of a machine without a GPU; those of the virtual one in the end."""
    forget()
    patches.on_undo(forget)


def forget() -> None:
    """Clear every cached function of the modules that say what is available."""
    for name in _MODULES:
        for function in list(vars(sys.modules.get(name, object)).values()):
            if isinstance(function, functools._lru_cache_wrapper):  # others may only look alike
                function.cache_clear()
