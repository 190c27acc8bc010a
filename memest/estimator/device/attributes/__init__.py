"""The methods of `torch.Tensor` that know devices, for tensors of a card that is not there.

torch's C++ resolves `"cuda"` before anything written in Python is asked, and a build without CUDA
refuses it. So the methods and constructors that take a device stand here once more: they turn the
device into what reaches the mode, and the attributes say what the script expects.
"""

from __future__ import annotations

from memest.estimator.device.attributes import (
    constructors,
    host_values,
    moves,
    parameters,
    places,
)
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let tensors say where the mode has put them, and go where the script sends them."""
    places.install(patches, mode)
    moves.install(patches, mode)
    constructors.install(patches)
    parameters.install(patches, mode)
    host_values.install(patches, mode)
