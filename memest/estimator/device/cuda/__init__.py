"""What stands for `torch.cuda`, and for what torch asks of CUDA and NVML beside it."""

from __future__ import annotations

from memest.estimator.device.cuda import (
    comm,
    device_class,
    driver,
    foreach,
    graphs,
    memory,
    nvml,
    profiling,
)
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let torch find one GPU, that of `mode`."""
    device_class.install(patches)
    driver.install(patches, mode)
    comm.install(patches)
    memory.install(patches, mode)
    foreach.install(patches, mode)
    graphs.install(patches, mode)
    nvml.install(patches, mode)
    profiling.install(patches, mode)
