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
from memest.estimator.device.live import LiveRecorder
from memest.estimator.device.patches import Patches


def install(patches: Patches, recorder: LiveRecorder) -> None:
    """Let torch find one GPU, that of `recorder`."""
    device_class.install(patches)
    driver.install(patches, recorder)
    comm.install(patches)
    memory.install(patches, recorder)
    foreach.install(patches, recorder)
    graphs.install(patches, recorder)
    nvml.install(patches, recorder)
    profiling.install(patches, recorder)
