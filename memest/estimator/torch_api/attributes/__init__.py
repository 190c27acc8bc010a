"""Methods of `torch.Tensor` that depend on the device, for tensors of a virtual GPU.

A build of torch without CUDA rejects `"cuda"` before any Python hook runs. So methods and
constructors with a device argument are replaced here.
"""

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches
from memest.estimator.torch_api.attributes import constructors, host_values, moves


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Install attributes of the simulated place, and moves between places."""
    moves.install_places(patches, mode)
    moves.install(patches, mode)
    constructors.install(patches)
    moves.install_parameters(patches, mode)
    host_values.install(patches, mode)
