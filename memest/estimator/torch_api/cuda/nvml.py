"""NVML: the module `pynvml`, and torch's own queries.

Functions of an installed nvidia-ml-py are replaced. If it is missing or broken, a module of the
same name has the functions that scripts commonly use, one for the whole process. Memory is that of
the simulated GPU; load, temperature, power and clocks are 0. Everything else raises
`NVMLError_NotSupported`, as NVML does for features that a GPU lacks.
"""

import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.tensors.patches import Patches, constant, constants
from memest.estimator.tensors.placement import GPU
from memest.estimator.torch_api.cuda import nvidia_smi
from memest.estimator.torch_api.cuda.driver import FACTS, UUID, driver_version

DRIVER_VERSION = "580.159.03"  # driver of the H200 on which memest was measured
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND = 2, 3, 6
_PCI_BUS_ID = "00000000:00:00.0"


class _Error(Exception):
    """`pynvml.NVMLError` where nvidia-ml-py is not installed."""

    number = 999

    def __init__(self, value: int | None = None) -> None:
        self.value = self.number if value is None else value
        super().__init__(self.value)

    def __str__(self) -> str:
        return "Not Supported" if self.value == _NOT_SUPPORTED else f"NVML error {self.value}"


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Answer `pynvml` and torch's queries to NVML for the virtual GPU."""
    found = sys.modules.get("pynvml")
    module = _stub() if found is None or not hasattr(found, "NVMLError") else found
    if module is not found:
        sys.modules["pynvml"] = module
        patches.on_undo(lambda: _put_back(found))
    functions = _answers(mode, module)
    for name, value in list(vars(module).items()):
        if name.startswith("nvml") and callable(value) and not isinstance(value, type):
            patches.set(module, name, _not_supported(module))
    patches.set_all(functions, module)
    nvidia_smi.install(patches, module)
    patches.set(torch.cuda, "pynvml", module)
    patches.set(torch.cuda, "_HAS_PYNVML", True)
    patches.set(torch.cuda, "_raw_device_uuid_nvml", lambda: [f"GPU-{UUID}"])
    patches.set_all({"_get_nvml_device_index": _index_of}, torch.cuda, torch.cuda.memory)


def _put_back(found: ModuleType | None) -> None:
    if found is None:
        sys.modules.pop("pynvml", None)
    else:
        sys.modules["pynvml"] = found


def _index_of(device: Any) -> int:
    """Return a device's index in NVML, which ignores `CUDA_VISIBLE_DEVICES`."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    if index not in range(GPU.num_visible):
        visible = list(range(GPU.num_visible))
        raise RuntimeError(f"device {index} is not visible (CUDA_VISIBLE_DEVICES={visible})")
    return int(index)


@cache
def _stub() -> ModuleType:
    """Return the module for scripts that import `pynvml` where nvidia-ml-py is missing."""
    module = ModuleType("pynvml", "NVML of the virtual GPU.")
    module.__spec__ = ModuleSpec("pynvml", None)
    vars(module).update(FACTS["nvml"]["constants"])
    error = vars(module)["NVMLError"] = type("NVMLError", (_Error,), {"__module__": "pynvml"})
    for name, number in FACTS["nvml"]["errors"].items():
        vars(module)[name] = type(name, (error,), {"number": number, "__module__": "pynvml"})

    def lacks(name: str) -> Any:
        if name.startswith("nvml"):
            return _not_supported(module)
        raise AttributeError(f"module 'pynvml' has no attribute {name!r}")

    vars(module)["__getattr__"] = lacks
    return module


def _not_supported(module: ModuleType) -> Any:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise module.NVMLError(_NOT_SUPPORTED)

    return refused


def _answers(mode: CudaSimMode, module: ModuleType) -> dict[str, Any]:
    gpu, allocator = mode.gpu, mode.memory.allocator
    handle = object()

    def process_bytes() -> int:
        mode.memory.settle()
        return gpu.context_bytes + allocator.reserved_bytes

    def by_index(index: int) -> object:
        # a script may name GPUs of its own machine
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if index not in range(GPU.num_visible) and str(index) not in named:
            raise module.NVMLError(_INVALID_ARGUMENT)
        return handle

    def by_uuid(uuid: Any) -> object:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        if text != f"GPU-{UUID}":
            raise module.NVMLError(_NOT_FOUND)
        return handle

    def memory(handle: Any, version: Any = None) -> Any:
        used = gpu.beside_bytes + process_bytes()
        return SimpleNamespace(
            version=version, total=gpu.memory_bytes, reserved=0, used=used,
            free=max(0, gpu.memory_bytes - used),
        )  # fmt: skip

    def processes(handle: Any) -> list[Any]:
        return [
            SimpleNamespace(
                pid=os.getpid(), usedGpuMemory=process_bytes(),
                gpuInstanceId=None, computeInstanceId=None,
            )
        ]  # fmt: skip

    return constants(_facts(gpu)) | {
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByIndex_v2": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetHandleByPciBusId": constant(handle),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetComputeRunningProcesses_v2": processes,
        "nvmlDeviceGetComputeRunningProcesses_v3": processes,
        "nvmlErrorString": lambda number: f"NVML error {number}",
    }


def _facts(gpu: Gpu) -> dict[str, Any]:
    cuda = driver_version()
    return FACTS["nvml"]["answers"] | {
        "nvmlSystemGetDriverVersion": DRIVER_VERSION,
        "nvmlSystemGetNVMLVersion": f"{cuda // 1000}.{DRIVER_VERSION}",
        "nvmlSystemGetCudaDriverVersion": cuda,
        "nvmlSystemGetCudaDriverVersion_v2": cuda,
        "nvmlDeviceGetCount": GPU.num_visible, "nvmlDeviceGetCount_v2": GPU.num_visible,
        "nvmlDeviceGetName": gpu.label, "nvmlDeviceGetUUID": f"GPU-{UUID}",
        "nvmlDeviceGetIndex": GPU.device.index, "nvmlDeviceGetMinorNumber": GPU.device.index,
        "nvmlDeviceGetCudaComputeCapability": gpu.capability,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetPciInfo": SimpleNamespace(
            busId=_PCI_BUS_ID, busIdLegacy=_PCI_BUS_ID[4:], domain=0, bus=0, device=0,
            pciDeviceId=0, pciSubSystemId=0,
        ),
    }  # fmt: skip
