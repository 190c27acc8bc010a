"""Libraries with their own kernels, on the virtual GPU.

Each file replaces the part of a library that runs outside of torch's operators, and nothing else.
Their Python code runs as it is.
"""

from __future__ import annotations

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.integrations import (
    availability,
    bitsandbytes,
    compilers,
    deepspeed,
    extensions,
    flash_attn,
    litgpt,
    triton,
)
from memest.estimator.tensors.patches import Patches


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Install the GPU for libraries that the script imports; called after `torch.cuda`."""
    availability.install(patches)
    triton.install(patches, mode, hooks)
    bitsandbytes.install(patches, mode, hooks)
    flash_attn.install(patches, mode, hooks)
    compilers.install(patches, mode, hooks)
    deepspeed.install(patches, mode, hooks)
    litgpt.install(patches, mode, hooks)
    extensions.install(patches, mode, hooks)
