"""`torch.cuda` on a card that is not there: devices, streams, events, random state.

torch asks its C++ for all of it, through functions of `torch._C` that a build without CUDA lacks;
they stand here, and answer from the simulated card. What tells of memory is in `memory.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from memest.errors import UnsupportedError
from memest.estimator.device.cuda import generators, streams
from memest.estimator.device.cuda.properties import DeviceProperties, properties_of
from memest.estimator.device.cuda.runtime import Cudart
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD, is_another, resolve

CUDA_VERSION = "13.0"
"""`torch.version.cuda` on a CPU build of torch; that of the measured build, torch 2.11.0+cu130."""

CUDNN_VERSION = 91900
"""cuDNN version of the same build."""

DRIVER_VERSION = 13000
"""CUDA version of the driver under which memest was measured."""

ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
"""That the wheels for CUDA 13.0 are built for (`.ci/manywheel/build_cuda.sh`, torch 2.11)."""


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let `torch.cuda` speak of one GPU, that of `mode`."""
    _install_devices(patches, mode)
    _install_libraries(patches, mode)
    streams.install(patches, mode)
    generators.install(patches, mode.rng)
    _install_refusals(patches, mode)


_FACTS: dict[str, Any] = {
    "_cuda_init": None, "_cuda_isInBadFork": False,
    "_cuda_hasPrimaryContext": True, "_cuda_getArchFlags": ARCHITECTURES,
    "_cuda_ipc_collect": None,
    "_cuda_canDeviceAccessPeer": False, "_cuda_sleep": None,
    "_accelerator_setDeviceIndex": None, "_accelerator_hooks_set_current_device": None,
    "_accelerator_isAllocatorInitialized": True, "_cuda_tunableop_is_enabled": False,
}  # fmt: skip
"""What functions of `torch._C` return, whatever they are asked."""

_FACTS_OF_CUDA: dict[str, Any] = {
    "_lazy_init": None, "_is_compiled": True, "is_initialized": True, "is_available": True,
    "can_device_access_peer": False,
}  # fmt: skip
"""Likewise of `torch.cuda`."""

_COUNTS = {
    "_C": ("_cuda_getDeviceCount", "_accelerator_hooks_device_count"),
    "cuda": ("device_count", "_device_count_nvml", "_raw_device_count_nvml"),
}
"""What says how many GPUs there are."""

_INDICES = {
    "_C": (
        "_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice",
        "_accelerator_getDeviceIndex", "_accelerator_exchangeDevice",
        "_accelerator_maybeExchangeDevice", "_accelerator_hooks_get_current_device",
        "_accelerator_hooks_exchange_device", "_accelerator_hooks_maybe_exchange_device",
    ),
    "cuda": ("_exchange_device", "_maybe_exchange_device"),
}  # fmt: skip
"""What says which one is current."""

_DEVICES = {"_C": ("_get_accelerator", "_accelerator_getAccelerator")}


def _constant(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _install_devices(patches: Patches, mode: CudaSimMode) -> None:
    properties = properties_of(mode.gpu)
    for name, value in _FACTS.items():
        patches.set(torch._C, name, _constant(value))
    for name, value in _FACTS_OF_CUDA.items():
        patches.set(torch.cuda, name, _constant(value))
    answers = (_COUNTS, CARD.num_visible), (_INDICES, CARD.device.index), (_DEVICES, CARD.device)
    for names, answer in answers:
        for owner, functions in names.items():
            for name in functions:
                patches.set(getattr(torch, owner), name, _constant(answer))

    def synchronize(*args: Any) -> None:
        for number in range(mode.timeline.num_streams):
            mode.timeline.host_waits(mode.timeline.event(number))

    def set_device(index: int) -> None:
        resolve(int(index)) if index >= 0 else None

    def clear_workspaces(*args: Any) -> None:
        mode.kernels.clear_workspaces()

    def capability(*args: Any) -> dict[str, Any]:
        return {"supported_dtypes": set(_DTYPES)}

    in_c: dict[str, Any] = {
        "_cuda_setDevice": set_device,
        "_cuda_synchronize": synchronize,
        "_cuda_clearCublasWorkspaces": clear_workspaces,
        "_accelerator_synchronizeDevice": synchronize,
        "_accelerator_getDeviceCapability": capability,
        "_has_cudnn": True,
        "has_cuda": True,
    }
    patches.set_all(torch._C, in_c)
    patches.set(torch.cuda, "_initialized", True)
    patches.set(torch.cuda, "_get_device_properties", lambda index=0: properties)
    patches.set(torch.cuda, "get_device_properties", lambda device=None: _of(device, properties))
    if torch.version.cuda is None:  # torchvision compares a CUDA build's own value with its own
        patches.set(torch.version, "cuda", CUDA_VERSION)
    patches.set(torch._C, "_cuda_getCompiledVersion", compiled_version)
    patches.set(torch._C, "_cuda_getDriverVersion", driver_version)


def compiled_version() -> int:
    """Return the CUDA version that torch is built for, as `CUDA_VERSION` of cuda.h counts it."""
    major, minor = str(torch.version.cuda).split(".")[:2]
    return int(major) * 1000 + int(minor) * 10


def driver_version() -> int:
    """Return the CUDA version of the driver, which is never older than torch's."""
    return max(DRIVER_VERSION, compiled_version())


def _install_libraries(patches: Patches, mode: CudaSimMode) -> None:
    """Switches of cuDNN, cuBLAS and cuSOLVER: what is set is what is read."""
    values: dict[str, Any] = {}

    def switch(get: str, set_: str, default: Any, note: str = "") -> None:
        def put(value: Any) -> None:
            values[get] = value
            if note and value != default:
                mode.notes.add(note)

        patches.set(torch._C, get, lambda: values.get(get, default))
        patches.set(torch._C, set_, put)

    c: Any = torch._C
    switch("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit", 10)
    for kind in ("linalg", "blas"):
        get, set_ = f"_get_{kind}_preferred_backend", f"_set_{kind}_preferred_backend"
        name = f"torch.backends.cuda.preferred_{kind}_library"
        note = f"`{name}`: memory is that of the default library"
        switch(get, set_, getattr(c, get)(), note)
    note = "`torch.cuda.set_sync_debug_mode`: nothing warns of synchronisation here"
    switch("_cuda_get_sync_debug_mode", "_cuda_set_sync_debug_mode", 0, note)
    patches.set(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    cudnn = {"is_available": True, "version": CUDNN_VERSION, "is_acceptable": True}
    for name, value in cudnn.items():
        patches.set(torch.backends.cudnn, name, _constant(value))
    cudart = Cudart(lambda device: torch.cuda.mem_get_info(device))
    patches.set(c, "_cudart", cudart)
    patches.set(torch.cuda, "_cudart", cudart)
    patches.set(torch.cuda, "cudart", lambda: cudart)
    for name in _NVTX:
        patches.set(torch.cuda.nvtx._nvtx, name, lambda *args: 0)  # type: ignore[attr-defined]


_NVTX = (
    "rangePushA", "rangePop", "markA", "rangeStartA", "rangeEnd", "deviceRangeStart",
    "deviceRangeEnd",
)  # fmt: skip

_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""Of `torch.accelerator.get_device_capability`."""


def _of(device: Any, properties: DeviceProperties) -> DeviceProperties:
    """All GPUs of a host are of one kind."""
    if not is_another(device):
        resolve(device)
    return properties


def _refuse(what: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{what} cannot be simulated", hint="run the script without it; see docs/run.md"
        )

    return refused


def _install_refusals(patches: Patches, mode: CudaSimMode) -> None:
    """What has no simulation is refused by name."""
    in_c = {
        "_cuda_getCurrentBlasHandle": "a handle of cuBLAS",
        "_cuda_getCurrentSolverHandle": "a handle of cuSOLVER",
        "_cuda_tunableop_enable": "torch.cuda.tunable",
        "_cuda_tunableop_tuning_enable": "torch.cuda.tunable",
        "_cuda_jiterator_compile_and_launch_kernel": "torch.cuda.jiterator",
    }
    for name, what in in_c.items():
        patches.set(torch._C, name, _refuse(what))
