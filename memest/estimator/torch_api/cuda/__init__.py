"""`torch.cuda`, and the queries of torch to CUDA and NVML, for the virtual GPU."""

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches
from memest.estimator.torch_api.cuda import driver, memory, nvml, streams


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Install one GPU, that of `mode`, in torch."""
    driver.install(patches, mode)
    memory.install(patches, mode)
    streams.install_graphs(patches, mode)
    nvml.install(patches, mode)
    streams.install_profiler(patches, mode)
