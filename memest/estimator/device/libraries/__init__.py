"""Libraries that bring kernels of their own, on the virtual GPU.

Each file stands in for what one of them runs outside of torch's operators, and for nothing else:
their Python code runs as it is.
"""

from __future__ import annotations

from memest.estimator.device.imports import ImportHooks
from memest.estimator.device.libraries import (
    availability,
    bitsandbytes,
    compilers,
    deepspeed,
    extensions,
    flash_attn,
    litgpt,
    triton,
)
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Let what the script imports find a GPU; called when `torch.cuda` is there."""
    availability.install(patches)
    triton.install(patches, mode, hooks)
    bitsandbytes.install(patches, mode, hooks)
    flash_attn.install(patches, mode, hooks)
    compilers.install(patches, mode, hooks)
    deepspeed.install(patches, mode, hooks)
    litgpt.install(patches, mode, hooks)
    extensions.install(patches, mode, hooks)
