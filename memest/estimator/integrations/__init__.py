"""Libraries with their own kernels, on the virtual GPU.

Each file replaces the part of a library that runs outside of torch's operators.
"""

import functools
import sys

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.integrations import (
    bitsandbytes,
    compilers,
    deepspeed,
    flash_attn,
    hub,
    litgpt,
    torchvision,
    triton,
    vllm,
)
from memest.estimator.tensors.patches import Patches


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Register the integrations of all libraries; each acts once the script imports its library.

    Call it after `torch.cuda` is patched.
    """
    forget()
    patches.on_undo(forget)
    for library in (
        triton, bitsandbytes, flash_attn, compilers, deepspeed, litgpt, torchvision, vllm, hub,
    ):  # fmt: skip
        library.install(patches, mode, hooks)


_MODULES = (
    "transformers.utils.import_utils", "accelerate.utils.imports", "torch.utils._triton",
    "peft.import_utils", "lightning_utilities.core.imports", "bitsandbytes.backends.cuda.ops",
)  # fmt: skip
"""Modules with cached checks of libraries for a GPU."""


def forget() -> None:
    """Clear cached results of functions of libraries that check for packages or for a GPU."""
    for name in _MODULES:
        for function in list(vars(sys.modules.get(name, object)).values()):
            if isinstance(function, functools._lru_cache_wrapper):  # others may only look alike
                function.cache_clear()
