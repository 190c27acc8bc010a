"""Files that a script reads and writes: checkpoints and published weights."""

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches
from memest.estimator.torch_api.files import checkpoints, pretrained


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Install reading and writing of tensors without data."""
    checkpoints.install(patches, mode)
    pretrained.install(patches, mode, hooks)
    checkpoints.install_safetensors(patches, mode, hooks)
