"""`torch.cuda` on a card that is not there: devices, streams, events, random state.

torch asks its C++ for all of it, through functions of `torch._C` that a build without CUDA lacks;
they stand here, and answer from the simulated card. What tells of memory is in `memory.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from memest.errors import UnsupportedError
from memest.estimator.device import cuda_streams
from memest.estimator.device.attributes import CUDA, resolve
from memest.estimator.device.live import LiveRecorder
from memest.estimator.device.patches import Patches
from memest.estimator.device.properties import DeviceProperties, properties_of
from memest.estimator.device.runtime import Cudart

CUDA_VERSION = "13.0"
"""Of the build that is simulated: torch 2.11.0+cu130."""

CUDNN_VERSION = 91900
"""Likewise."""

DRIVER_VERSION = 13000
"""Of CUDA, as the driver gives it."""

ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
"""That the wheels for CUDA 13.0 are built for (`.ci/manywheel/build_cuda.sh`, torch 2.11)."""


def install(patches: Patches, recorder: LiveRecorder) -> None:
    """Let `torch.cuda` speak of one GPU, that of `recorder`."""
    _install_devices(patches, recorder)
    cuda_streams.install(patches, recorder)
    _install_random(patches)
    _install_refusals(patches, recorder)


def _install_devices(patches: Patches, recorder: LiveRecorder) -> None:
    gpu = recorder.gpu
    properties = properties_of(gpu)
    debug_mode = [0]

    def set_sync_debug_mode(mode: int) -> None:
        debug_mode[0] = mode
        if mode:
            recorder.note("`torch.cuda.set_sync_debug_mode`: nothing warns of synchronisation here")

    def synchronize(*args: Any) -> None:
        for number in range(recorder._num_streams):
            recorder.host_waits(recorder.event(number))

    def set_device(index: int) -> None:
        resolve(int(index)) if index >= 0 else None

    def clear_workspaces(*args: Any) -> None:
        recorder.clear_workspaces()

    in_c: dict[str, Any] = {
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        "_cuda_synchronize": synchronize,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_getArchFlags": lambda: ARCHITECTURES,
        "_cuda_getCompiledVersion": lambda: DRIVER_VERSION,
        "_cuda_getDriverVersion": lambda: DRIVER_VERSION,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_canDeviceAccessPeer": lambda a, b: False,
        "_cuda_set_sync_debug_mode": set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": lambda: debug_mode[0],
        "_cuda_clearCublasWorkspaces": clear_workspaces,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_jiterator_compile_and_launch_kernel": _refuse("torch.cuda.jiterator"),
        "_has_cudnn": True,
        "has_cuda": True,
        "_get_accelerator": lambda *args: CUDA,
        "_accelerator_getAccelerator": lambda: CUDA,
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_setDeviceIndex": lambda index: None,
        "_accelerator_exchangeDevice": lambda index: 0,
        "_accelerator_maybeExchangeDevice": lambda index: 0,
        "_accelerator_hooks_device_count": lambda: 1,
        "_accelerator_hooks_get_current_device": lambda: 0,
        "_accelerator_hooks_set_current_device": lambda index: None,
        "_accelerator_hooks_exchange_device": lambda index: 0,
        "_accelerator_hooks_maybe_exchange_device": lambda index: 0,
        "_accelerator_synchronizeDevice": synchronize,
        "_accelerator_getDeviceCapability": lambda index: {"supported_dtypes": set(_DTYPES)},
        "_accelerator_isAllocatorInitialized": lambda: True,
    }
    for name, value in in_c.items():
        patches.set(torch._C, name, value)
    in_cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "_is_compiled": lambda: True,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "_device_count_nvml": lambda: 1,
        "_raw_device_count_nvml": lambda: 1,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "_get_device_properties": lambda index=0: properties,
        "get_device_properties": lambda device=None: _of(device, properties),
        "can_device_access_peer": lambda device, peer: False,
    }
    for name, value in in_cuda.items():
        patches.set(torch.cuda, name, value)
    patches.set(torch.version, "cuda", CUDA_VERSION)
    patches.set(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    _install_libraries(patches)
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    patches.set(torch.backends.cudnn, "is_available", lambda: True)
    patches.set(torch.backends.cudnn, "version", lambda: CUDNN_VERSION)
    patches.set(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    cudart = Cudart(lambda device: torch.cuda.mem_get_info(device))
    patches.set(torch._C, "_cudart", cudart)
    patches.set(torch.cuda, "_cudart", cudart)
    patches.set(torch.cuda, "cudart", lambda: cudart)
    for name in _NVTX:
        patches.set(torch.cuda.nvtx._nvtx, name, lambda *args: 0)  # type: ignore[attr-defined]


def _install_libraries(patches: Patches) -> None:
    """Switches of cuDNN, cuBLAS and cuSOLVER: what is set is what is read."""
    backends: dict[str, Any] = {}

    def switch(get: str, set_: str, default: Any) -> None:
        def put(value: Any) -> None:
            backends[get] = value

        patches.set(torch._C, get, lambda: backends.get(get, default))
        patches.set(torch._C, set_, put)

    c: Any = torch._C
    switch("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit", 10)
    switch(
        "_get_linalg_preferred_backend",
        "_set_linalg_preferred_backend",
        c._get_linalg_preferred_backend(),
    )
    switch(
        "_get_blas_preferred_backend",
        "_set_blas_preferred_backend",
        c._get_blas_preferred_backend(),
    )
    patches.set(c, "_cuda_tunableop_is_enabled", lambda: False)
    patches.set(torch.backends.cuda, "is_flash_attention_available", lambda: True)


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
    resolve(device)
    return properties


def _install_random(patches: Patches) -> None:
    """The state of a generator that draws nothing: what is put in comes out again."""
    states: dict[str, Any] = {"seed": 0, "state": torch.Generator().get_state()}

    def manual_seed(seed: int) -> None:
        states["seed"] = int(seed)

    def set_state(state: Any, device: Any = "cuda") -> None:
        states["state"] = state.clone()

    def seed() -> None:
        states["seed"] = torch.initial_seed()

    class Generator(torch.Generator):
        """`torch.Generator`, for the virtual GPU as well."""

        def __new__(cls, device: Any = "cpu") -> Generator:
            made = super().__new__(cls)
            made.__dict__["_device"] = resolve(device)
            return made

        def __init__(self, device: Any = "cpu") -> None:
            pass

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            """Where it draws."""
            return torch.device(self.__dict__["_device"])

    functions: dict[str, Any] = {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": seed,
        "seed_all": seed,
        "initial_seed": lambda: states["seed"],
        "get_rng_state": lambda device="cuda": states["state"].clone(),
        "set_rng_state": set_state,
        "get_rng_state_all": lambda: [states["state"].clone()],
        "set_rng_state_all": lambda new: set_state(new[0]) if len(new) else None,
    }
    for name, function in functions.items():
        patches.set(torch.cuda, name, function)
        patches.set(torch.cuda.random, name, function)
    patches.set(torch, "Generator", Generator)
    patches.set(torch.cuda, "default_generators", (Generator("cuda"),))


def _refuse(what: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{what} cannot be simulated", hint="run the script without it; see docs/run.md"
        )

    return refused


def _install_refusals(patches: Patches, recorder: LiveRecorder) -> None:
    """What has no simulation is refused by name."""
    refuse = _refuse("a CUDA graph")
    for name in ("CUDAGraph", "graph"):  # classes, since annotations name them
        patches.set(torch.cuda, name, type(name, (), {"__init__": refuse}))
    patches.set(torch.cuda, "make_graphed_callables", _refuse("a CUDA graph"))
    patches.set(torch.cuda, "graph_pool_handle", refuse)
    in_c = {
        "_cuda_getCurrentBlasHandle": "a handle of cuBLAS",
        "_cuda_getCurrentSolverHandle": "a handle of cuSOLVER",
        "_cuda_tunableop_enable": "torch.cuda.tunable",
        "_cuda_tunableop_tuning_enable": "torch.cuda.tunable",
    }
    for name, what in in_c.items():
        patches.set(torch._C, name, _refuse(what))
