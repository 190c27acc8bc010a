"""Methods of `torch.Tensor` that depend on the device, for tensors of a virtual GPU.

torch's C++ resolves `"cuda"` before any Python hook runs, and a build without CUDA rejects it. So
methods and constructors with a device argument are replaced here. They convert the device for the
mode, and attributes return the device that the script expects.
"""

from __future__ import annotations

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches
from memest.estimator.torch_api.attributes import constructors, host_values, moves, parameters


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Install attributes of the simulated place, and moves between places."""
    moves.install_places(patches, mode)
    moves.install(patches, mode)
    constructors.install(patches)
    parameters.install(patches, mode)
    host_values.install(patches, mode)
