"""Virtual GPU in `torch.cuda`: properties, `cudart()`, switches of libraries, generators."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from memest.errors import UnsupportedError
from memest.estimator.gpu.host import as_meta
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.random import CudaRng, GpuGenerator
from memest.estimator.tensors.patches import Patches, constant, constants, refusing, unsupported
from memest.estimator.tensors.placement import CPU, GPU, META, Place, resolve
from memest.estimator.versions import simulated
from memest.plan.reading import read_table

true_class: Any = torch.device


class _LikeTrueClass(type):
    """Metaclass that makes a class equal to torch's own `torch.device` in `isinstance` and `==`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, true_class)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, true_class)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is true_class

    def __hash__(cls) -> int:
        return hash(true_class)


class device(metaclass=_LikeTrueClass):
    """Replacement of `torch.device`, for which a number alone is the index of a CUDA device."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of torch's own class, made from the arguments."""
        if len(args) == 1 and not kwargs and type(args[0]) is int:
            return true_class("cuda", args[0])
        return true_class(*args, **kwargs)


device.__module__, device.__qualname__ = "torch", "device"


UUID = "00000000-0000-0000-0000-000000000000"  # UUID of the virtual GPU


class DeviceProperties(SimpleNamespace):
    """Properties of the virtual GPU, as `torch.cuda.get_device_properties` returns them."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def properties_of(gpu: Gpu) -> DeviceProperties:
    """Return the properties of `gpu` that torch and libraries read from CUDA."""
    major, minor = gpu.capability
    per_sm = gpu.multiprocessor
    return DeviceProperties(
        name=gpu.label, major=major, minor=minor, total_memory=gpu.memory_bytes, uuid=UUID,
        multi_processor_count=gpu.num_sms, max_threads_per_multi_processor=per_sm.threads,
        shared_memory_per_block_optin=per_sm.block_shared_kib << 10,
        shared_memory_per_multiprocessor=per_sm.shared_kib << 10,
        L2_cache_size=int(gpu.l2_kib * 1024 * gpu.memory_share), **FACTS["properties"],
    )  # fmt: skip


CudaError = IntEnum("CudaError", {"success": 0})  # `cudaError`, as far as torch has it in Python


class Cudart:
    """Functions of CUDA's runtime that torch exposes to Python (`torch/csrc/cuda/shared`). All
    calls succeed. `cudaHostRegister` pins no memory."""

    cudaError = CudaError
    cudaGetErrorString = constant("no error")
    cudaProfilerStart = cudaProfilerStop = constant(CudaError.success)
    cudaHostRegister = cudaHostUnregister = constant(CudaError.success)

    def cudaMemGetInfo(self, device: Any) -> tuple[int, int]:
        return torch.cuda.mem_get_info(device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unsupported(f"`torch.cuda.cudart().{name}`")


def _install_comm(patches: Patches) -> None:
    """Make scatter, broadcast and gather of `torch.nn.parallel.comm` accept one device only."""

    def on_one(send: Callable[[Any], Any]) -> Callable[..., list[Any]]:
        def send_to(tensors: Any, devices: Sequence[int], *options: Any) -> list[Any]:
            if len(devices) > 1:
                raise UnsupportedError(
                    f"`nn.DataParallel` on {len(devices)} GPUs cannot be simulated",
                    hint="run the script on one device",
                )
            return [send(tensors)]

        return send_to

    patches.set(torch._C, "_scatter", on_one(lambda tensor: tensor.to(GPU.device)))
    patches.set(torch._C, "_broadcast", on_one(lambda tensor: tensor))
    patches.set(torch._C, "_broadcast_coalesced", on_one(list))
    patches.set(torch._C, "_gather", lambda tensors, dim, *options: torch.cat([*tensors], dim))


def _install_foreach(patches: Patches, mode: CudaSimMode) -> None:
    """Make `_group_tensors_by_device_and_dtype` group tensors by their devices in a real run."""

    @patches.wrap(torch._C, "_group_tensors_by_device_and_dtype")
    def grouped(group: Any, lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
        devices = {Place.GPU: GPU.device, Place.META: META}
        try:
            found = group(lists, with_indices)
        except RuntimeError:
            places = {mode.host.place(t) for column in lists for t in column if t is not None}
            if places != {Place.REAL, Place.HOST}:  # tensors of the host with and without values
                raise
            rows = {key: indices for key, (_, indices) in group(as_meta(lists), True).items()}
            found = {k: ([[c[i] for i in at if c] for c in lists], at) for k, at in rows.items()}
        for (device, dtype), (members, indices) in found.items():
            for position, tensor in enumerate(members[0]):
                place = Place.META if tensor is None else mode.host.place(tensor)
                target = devices.get(place, CPU) if device.type == "meta" else device
                columns, numbers = groups.setdefault((target, dtype), ([[] for _ in members], []))
                for column, member in zip(columns, members, strict=True):
                    column += member[position : position + 1]
                numbers += indices[position : position + 1]  # none unless `with_indices`
        return groups


CUDA_VERSION = "13.0"  # `torch.version.cuda` on a CPU build: that of torch 2.11.0+cu130
DRIVER_VERSION = 13000  # CUDA version of the driver under which memest was measured


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Make `torch.cuda` report the virtual GPU of `mode` instead of GPUs of this machine."""
    patches.set(torch, "device", device)
    answers = {"number of GPUs": GPU.num_visible, "current GPU": GPU.device.index}
    replacements = [(owner, constants(values)) for owner, values in FACTS["constants"].items()]
    for section, answer in answers.items():
        for owner, names in FACTS[section].items():
            replacements.append((owner, constants(dict.fromkeys(names, answer))))
    refused = {name: refusing(what) for name, what in FACTS["refused"].items()}
    for owner, functions in (*replacements, ("_C", refused)):
        patches.set_all(functions, attrgetter(owner)(torch))
    _install_devices(patches, mode)
    _install_libraries(patches, mode)
    _install_generators(patches, mode.rng)
    _install_comm(patches)
    _install_foreach(patches, mode)


FACTS: dict[str, Any] = read_table(__file__, "facts.json")
"""Functions without a simulation of their own, by the part of torch that has them.

They return `constants`, the `number of GPUs` or the `current GPU`. Pinned host memory is not
simulated, so its statistics are 0. `refused` are functions of `torch._C` that raise, with the name
to report. `properties` are those of every GPU. `dtypes` are those of
`torch.accelerator.get_device_capability`, the architectures those of the wheels for CUDA 13.0.
`nvml` has constants of nvml.h and return values of NVML.
"""


def _install_devices(patches: Patches, mode: CudaSimMode) -> None:
    properties = properties_of(mode.gpu)

    def synchronize(*args: Any) -> None:
        mode.timeline.host_waits(mode.timeline.idle)

    def set_device(index: int) -> None:
        if index >= 0:
            resolve(int(index))

    accelerator = constant(torch.device("cuda"))
    dtypes = {getattr(torch, name) for name in FACTS["dtypes"] if hasattr(torch, name)}
    c_members: dict[str, Any] = {
        "_get_accelerator": accelerator,
        "_accelerator_getAccelerator": accelerator,
        "_cuda_setDevice": set_device,
        "_cuda_synchronize": synchronize,
        "_cuda_clearCublasWorkspaces": lambda *args: mode.kernels.clear_workspaces(),
        "_accelerator_synchronizeDevice": synchronize,
        "_accelerator_getDeviceCapability": lambda *args: {"supported_dtypes": {*dtypes}},
        "_has_cudnn": True,
        "has_cuda": True,
    }
    patches.set_all(c_members, torch._C)
    patches.set(torch.cuda, "_initialized", True)
    patches.set(torch.cuda, "_cached_device_count", GPU.num_visible)
    patches.set(torch.cuda, "_get_device_properties", lambda index=0: properties)
    patches.set(torch.version, "hip", None)
    patches.set(torch.backends.mps, "is_available", constant(False))  # Lightning prefers MPS
    if torch.version.cuda is None:  # torchvision compares a CUDA build's version with its own
        patches.set(torch.version, "cuda", CUDA_VERSION)
    patches.set(torch._C, "_cuda_getCompiledVersion", compiled_version)
    patches.set(torch._C, "_cuda_getDriverVersion", driver_version)


def compiled_version() -> int:
    """Return the CUDA version that torch was built for, such as 13000 for 13.0."""
    major, minor = str(torch.version.cuda).split(".")[:2]
    return int(major) * 1000 + int(minor) * 10


def driver_version() -> int:
    """Return the CUDA version of the simulated driver, such as 13000; never older than torch's."""
    return max(DRIVER_VERSION, compiled_version())


def _install_libraries(patches: Patches, mode: CudaSimMode) -> None:
    """Replace the switches of cuDNN, cuBLAS and cuSOLVER; reading one returns the value set."""
    values: dict[str, Any] = {}

    def switch(get: str, set_: str, default: Any, note: str = "") -> None:
        def put(value: Any) -> None:
            values[get] = value
            if note and value != default:
                mode.notes.add(note)

        patches.set(torch._C, get, lambda: values.get(get, default))
        patches.set(torch._C, set_, put)

    torch_c: Any = torch._C
    switch("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit", 10)
    switch("_cuda_get_conv_benchmark_empty_cache", "_cudnn_set_conv_benchmark_empty_cache", True)
    for kind in ("linalg", "blas"):
        get, set_ = f"_get_{kind}_preferred_backend", f"_set_{kind}_preferred_backend"
        name = f"torch.backends.cuda.preferred_{kind}_library"
        note = f"`{name}`: memory is that of the default library"
        switch(get, set_, getattr(torch_c, get)(), note)
    note = "`torch.cuda.set_sync_debug_mode`: nothing warns of synchronisation here"
    switch("_cuda_get_sync_debug_mode", "_cuda_set_sync_debug_mode", 0, note)
    patches.set(torch.backends.cudnn, "version", constant(simulated().cudnn_version))
    patches.set_all({"_cudart": Cudart()}, torch_c, torch.cuda)


class Generator(torch.Generator):
    """Replacement of `torch.Generator`; generators for the virtual GPU are `OnGpu` objects."""

    rng: ClassVar[CudaRng]
    kind_on_gpu: "ClassVar[type[OnGpu]]"

    def __new__(cls, device: Any = "cpu") -> "Generator":
        is_on_gpu = torch.device(resolve(device)).type == "cuda"
        generator: Any = super().__new__(cls.kind_on_gpu if is_on_gpu else cls)
        cls.rng.of_script.pop(generator._cdata, None)
        if is_on_gpu:
            generator.on_gpu = cls.rng.of_script[generator._cdata] = GpuGenerator()
        return generator

    def __init__(self, device: Any = "cpu") -> None:
        pass


class OnGpu(Generator):
    """Random generator of the virtual GPU, with the interface of `torch.Generator`."""

    on_gpu: GpuGenerator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU.device

    def manual_seed(self, seed: int) -> "OnGpu":
        self.on_gpu.manual_seed(seed)
        return self

    def seed(self) -> int:
        seed = super().seed()
        self.on_gpu.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        return self.on_gpu.seed

    def get_state(self) -> torch.Tensor:
        return self.on_gpu.state()

    def set_state(self, state: torch.Tensor) -> "OnGpu":
        self.on_gpu.set_state(state)
        return self

    def clone_state(self) -> Any:
        return type(self)(self.device).graphsafe_set_state(self)

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Any) -> Any:
        self.on_gpu.seed, self.on_gpu.offset = state.on_gpu.seed, state.on_gpu.offset
        return self


def _install_generators(patches: Patches, rng: CudaRng) -> None:
    """Replace `torch.Generator` and the default generators of `torch.cuda`. `rng` has the random
    states of the virtual GPU."""
    generator: Any = type("Generator", (Generator,), {"rng": rng, "__module__": "torch"})
    generator.kind_on_gpu = type("Generator", (OnGpu, generator), {"__module__": "torch"})
    gpu_generator = generator("cuda")
    gpu_generator.on_gpu = rng.of_script[gpu_generator._cdata] = rng.default
    patches.set(torch, "Generator", generator)
    patches.set(torch.cuda, "default_generators", (gpu_generator,) * GPU.num_visible)
    if hasattr(torch._C, "_accelerator_getDefaultGenerator"):  # since 2.14
        patches.set(torch._C, "_accelerator_getDefaultGenerator", lambda device: gpu_generator)
