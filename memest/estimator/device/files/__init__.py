"""What a script reads from the disk, and writes to it: checkpoints and published weights."""

from __future__ import annotations

from memest.estimator.device.files import checkpoints, pretrained, safetensors_files
from memest.estimator.device.imports import ImportHooks
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Let tensors without data go to files and come from them."""
    checkpoints.install(patches, mode)
    pretrained.install(patches, mode, hooks)
    safetensors_files.install(patches, mode, hooks)
