"""`torch.cuda` on a card that is not there: devices, streams, events, random state.

torch asks its C++ for all of it, through functions of `torch._C` that a build without CUDA lacks;
they stand here, and answer from the simulated card. What tells of memory is in `memory.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memest.errors import UnsupportedError
from memest.estimator.device.attributes import CUDA, resolve
from memest.estimator.device.live import LiveRecorder
from memest.estimator.device.patches import Patches
from memest.estimator.device.streams import MAIN, Event, Stream
from memest.estimator.hardware.gpus import Gpu

CUDA_VERSION = "13.0"
"""Of the build that is simulated: torch 2.11.0+cu130."""

CUDNN_VERSION = 91900
"""Likewise."""

DRIVER_VERSION = 13000
"""Of CUDA, as the driver gives it."""


class DeviceProperties(SimpleNamespace):
    """What `torch.cuda.get_device_properties` returns."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def properties_of(gpu: Gpu) -> DeviceProperties:
    """The properties of `gpu` that torch and libraries ask for; the sizes of its caches and
    registers are those of compute capability 9.0 (CUDA C++ Programming Guide, table 30).
    """
    major, minor = gpu.capability
    return DeviceProperties(
        name=gpu.label,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.num_sms,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448 if major >= 9 else 166912,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        gcnArchName="",
        clock_rate=0,
        memory_clock_rate=0,
        memory_bus_width=0,
    )


def install(patches: Patches, recorder: LiveRecorder) -> None:
    """Let `torch.cuda` speak of one GPU, that of `recorder`."""
    _install_devices(patches, recorder)
    _install_streams(patches, recorder)
    _install_random(patches)
    _install_refusals(patches, recorder)


def _install_devices(patches: Patches, recorder: LiveRecorder) -> None:
    gpu = recorder.gpu
    properties = properties_of(gpu)
    arch = f"sm_{gpu.capability[0]}{gpu.capability[1]}"

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
        "_cuda_getArchFlags": lambda: arch,
        "_cuda_getCompiledVersion": lambda: DRIVER_VERSION,
        "_cuda_getDriverVersion": lambda: DRIVER_VERSION,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_canDeviceAccessPeer": lambda a, b: False,
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
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
        "_accelerator_getDeviceCapability": lambda index: {"supported_dtypes": ()},
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
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    patches.set(torch.backends.cudnn, "is_available", lambda: True)
    patches.set(torch.backends.cudnn, "version", lambda: CUDNN_VERSION)
    patches.set(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    for name in ("rangePushA", "rangePop", "markA", "rangeStartA", "rangeEnd"):
        patches.set(torch.cuda.nvtx._nvtx, name, lambda *args: 0)  # type: ignore[attr-defined]


def _of(device: Any, properties: DeviceProperties) -> DeviceProperties:
    resolve(device)
    return properties


def _install_streams(patches: Patches, recorder: LiveRecorder) -> None:
    class CudaStream(Stream):
        """`torch.cuda.Stream` of the virtual GPU."""

        def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
            resolve(device)
            number = options.get("number")
            super().__init__(recorder, recorder.new_stream() if number is None else number)
            self.device = CUDA
            self.priority = priority
            self.device_index, self.device_type = 0, 1

        @property
        def cuda_stream(self) -> int:
            """A handle: 0 is the default stream."""
            return self.number

        @property
        def stream_id(self) -> int:
            """Likewise."""
            return self.number

        def record_event(self, event: Any = None) -> Any:
            """A point in this stream."""
            event = event or CudaEvent()
            event.record(self)
            return event

        def query(self) -> bool:
            """Whether all work is done: the GPU lags."""
            return recorder.event(self.number) <= recorder._host

        def is_capturing(self) -> bool:
            """No graph is ever captured."""
            return False

        def __enter__(self) -> CudaStream:
            context = on_stream(self)
            context.__enter__()
            self._contexts = [*getattr(self, "_contexts", ()), context]
            return self

        def __exit__(self, *exception: Any) -> None:
            self._contexts.pop().__exit__(*exception)

        def __repr__(self) -> str:
            return f"<torch.cuda.Stream device=cuda:0 cuda_stream={self.number:#x}>"

    class CudaEvent(Event):
        """`torch.cuda.Event` of the virtual GPU."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(recorder)
            self.device = CUDA

        def query(self) -> bool:
            """Whether the GPU has passed it."""
            return self.time <= recorder._host

        def elapsed_time(self, end: Event) -> float:
            """Milliseconds between the two by the model of time; at least a microsecond."""
            return max(1e-3, (end.time - self.time) / 1e3)

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        with recorder.on_stream(stream.number):
            yield

    def current_stream(device: Any = None) -> CudaStream:
        return CudaStream(number=recorder.stream)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            recorder._switch(stream.number)

    tc: Any = torch.cuda
    patches.set(tc, "Stream", CudaStream)
    patches.set(tc.streams, "Stream", CudaStream)
    patches.set(tc, "Event", CudaEvent)
    patches.set(tc.streams, "Event", CudaEvent)
    patches.set(tc, "ExternalStream", CudaStream)
    patches.set(tc, "StreamContext", on_stream)
    patches.set(tc, "stream", on_stream)
    patches.set(tc, "current_stream", current_stream)
    patches.set(tc, "default_stream", lambda device=None: CudaStream(number=MAIN))
    patches.set(tc, "set_stream", set_stream)
    patches.set(torch.accelerator, "current_stream", current_stream)
    patches.set(torch.accelerator, "set_stream", set_stream)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index=0: recorder.stream)


def _install_random(patches: Patches) -> None:
    """The state of a generator that draws nothing: what is put in comes out again."""
    states = {"seed": 0, "state": torch.Generator().get_state()}

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
        def device(self) -> torch.device:
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
