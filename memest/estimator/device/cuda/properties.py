"""What `torch.cuda.get_device_properties` says of a GPU beside what the catalogue holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from memest.estimator.hardware.gpus import Gpu

UUID = "00000000-0000-0000-0000-000000000000"
"""Of the virtual GPU."""


class Multiprocessor(NamedTuple):
    """What one offers."""

    threads: int
    shared_kib: int
    block_shared_kib: int
    """Of that, for one block that opts in."""


MULTIPROCESSORS = {
    (7, 0): Multiprocessor(2048, 96, 96),
    (7, 5): Multiprocessor(1024, 64, 64),
    (8, 0): Multiprocessor(2048, 164, 163),
    (8, 6): Multiprocessor(1536, 100, 99),
    (8, 7): Multiprocessor(1536, 164, 163),
    (8, 9): Multiprocessor(1536, 100, 99),
    (9, 0): Multiprocessor(2048, 228, 227),
    (10, 0): Multiprocessor(2048, 228, 227),
    (10, 3): Multiprocessor(2048, 228, 227),
    (12, 0): Multiprocessor(1536, 100, 99),
}
"""By compute capability: CUDA Programming Guide 13, table 30 "Memory Information per Compute
Capability" and table 31; 7.0 in the guide of CUDA 12.
"""

L2_KIB = {
    "t4": 4096, "v100-16gb": 6144, "v100-32gb": 6144, "a100-40gb": 40960, "a100-80gb": 40960,
    "a10g": 6144, "a6000": 6144, "rtx-3090": 6144, "l4": 49152, "l40s": 98304,
    "rtx-4090": 73728, "rtx-6000-ada": 98304, "rtx-5090": 98304, "h100-80gb": 51200,
    "h100-pcie-80gb": 51200, "b200": 129536,
}  # fmt: skip
"""By the catalogue's names: NVIDIA's whitepapers of Volta, Turing, Ampere (GA100, GA102), Ada,
Hopper and RTX Blackwell, each in its table of GPUs; the B200's from pytorch/ao#4002.
"""

_LIKE = (9, 0)
_LIKE_L2_KIB = 51200
"""The H100's, where no figure of the card itself was found."""


class DeviceProperties(SimpleNamespace):
    """What `torch.cuda.get_device_properties` returns."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def properties_of(gpu: Gpu) -> DeviceProperties:
    """The properties of `gpu` that torch and libraries ask for."""
    major, minor = gpu.capability
    per_sm = MULTIPROCESSORS.get(gpu.capability, MULTIPROCESSORS[_LIKE])
    return DeviceProperties(
        name=gpu.label,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.num_sms,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        max_threads_per_multi_processor=per_sm.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=per_sm.block_shared_kib << 10,
        shared_memory_per_multiprocessor=per_sm.shared_kib << 10,
        L2_cache_size=L2_KIB.get(gpu.name, _LIKE_L2_KIB) << 10,
        uuid=UUID,
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        gcnArchName="",
        clock_rate=0,
        memory_clock_rate=0,
        memory_bus_width=0,
    )
