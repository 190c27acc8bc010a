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
from memest.estimator.tensors.patches import Patches, constants
from memest.estimator.tensors.placement import GPU
from memest.estimator.torch_api.cuda import nvidia_smi
from memest.estimator.torch_api.cuda.driver import FACTS, UUID, driver_version

DRIVER_VERSION = "580.159.03"  # driver of the H200 on which memest was measured
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND = 2, 3, 6
_PCI_BUS_ID = "00000000:00:00.0"


class _Error(Exception):
    """Replacement of `pynvml.NVMLError`, used if nvidia-ml-py is not installed."""

    number = 999

    def __init__(self, value: int | None = None) -> None:
        self.value = self.number if value is None else value
        super().__init__(self.value)

    def __str__(self) -> str:
        return "Not Supported" if self.value == _NOT_SUPPORTED else f"NVML error {self.value}"


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Replace `pynvml` and torch's NVML queries by functions for the virtual GPU of `mode`."""
    installed = sys.modules.get("pynvml")
    module = installed if installed is not None and hasattr(installed, "NVMLError") else _stub()
    patches.set_item(sys.modules, "pynvml", module)
    for name, value in list(vars(module).items()):
        if name.startswith("nvml") and callable(value) and not isinstance(value, type):
            patches.set(module, name, _not_supported(module))
    patches.set_all(constants(_facts(mode.gpu)), module)
    patches.set_methods(_NvmlFunctions(mode, module), module)
    nvidia_smi.install(patches, module)
    patches.set(torch.cuda, "pynvml", module)
    patches.set(torch.cuda, "_HAS_PYNVML", True)
    patches.set(torch.cuda, "_raw_device_uuid_nvml", lambda: [f"GPU-{UUID}"])


@cache
def _stub() -> ModuleType:
    """Return a substitute for the module `pynvml`, for a process without nvidia-ml-py."""
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


class _NvmlFunctions:
    """Replacements of NVML's functions, for the virtual GPU; all GPU indices have one handle."""

    def __init__(self, mode: CudaSimMode, module: ModuleType) -> None:
        self._mode, self._error, self._handle = mode, module.NVMLError, object()

    def _process_bytes(self) -> int:
        self._mode.memory.settle()
        return self._mode.gpu.context_bytes + self._mode.memory.allocator.reserved_bytes

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        # a script may name GPUs of another machine
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if index not in range(GPU.num_visible) and str(index) not in visible:
            raise self._error(_INVALID_ARGUMENT)
        return self._handle

    def nvmlDeviceGetHandleByUUID(self, uuid: Any) -> object:
        if (uuid.decode() if isinstance(uuid, bytes) else uuid) != f"GPU-{UUID}":
            raise self._error(_NOT_FOUND)
        return self._handle

    def nvmlDeviceGetHandleByPciBusId(self, pci_bus_id: Any) -> object:
        return self._handle

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
        total = self._mode.gpu.memory_bytes
        used = self._mode.gpu.beside_bytes + self._process_bytes()
        free = max(0, total - used)
        return SimpleNamespace(version=version, total=total, reserved=0, used=used, free=free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        instances = dict.fromkeys(("gpuInstanceId", "computeInstanceId"))
        process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=self._process_bytes(), **instances)
        return [process]

    def nvmlErrorString(self, number: int) -> str:
        return f"NVML error {number}"

    nvmlDeviceGetHandleByIndex_v2 = nvmlDeviceGetHandleByIndex
    nvmlDeviceGetComputeRunningProcesses_v2 = nvmlDeviceGetComputeRunningProcesses
    nvmlDeviceGetComputeRunningProcesses_v3 = nvmlDeviceGetComputeRunningProcesses


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
