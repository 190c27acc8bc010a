"""The machine of a measured run: its GPU and driver, its libraries, and the memory of a process."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import match_device
from memest.estimator.versions import installed_versions
from memest.packages import with_nvml

_PACKAGES = (
    "torch", "transformers", "lightning", "peft", "bitsandbytes", "accelerate", "deepspeed",
    "flash_attn",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A CUDA device, as its driver presents it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_sms: int
    driver: str
    num_devices: int = 1  # devices of the machine, as CUDA reports them

    def to_dict(self) -> dict[str, Any]:
        """Return the dict of the reports."""
        return {**asdict(self), "capability": list(self.capability)}

    @property
    def catalogue_name(self) -> str:
        """Name in the catalogue, or the driver's name if the catalogue lacks the GPU."""
        gpu = match_device(self.name, self.memory_bytes)
        return self.name if gpu is None else gpu.name


def query_device(index: int = 0) -> Device:
    """Return the CUDA device of this index, which is opened; `UnsupportedError` without one."""
    import torch

    elsewhere = "run it on a machine with an NVIDIA GPU; `memest predict` needs none"
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"torch {torch.__version__} is built without CUDA",
            hint="install a CUDA build of torch (https://pytorch.org/get-started/locally)",
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split())[:300]
        if "driver" in text and "old" in text:
            raise UnsupportedError(
                f"the NVIDIA driver is too old for torch {torch.__version__}: {text}",
                hint="update the driver, or install a torch built for an older CUDA",
            ) from error
        raise UnsupportedError(f"no CUDA device can be used: {text}", hint=elsewhere) from error
    return Device(
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        driver=with_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion())) or "unknown",
        num_devices=torch.cuda.device_count(),
    )


def measured_versions() -> dict[str, str]:
    """Return versions of memest, of the libraries that affect memory, and of CUDA."""
    found = installed_versions(*_PACKAGES)
    with suppress(ImportError):
        import torch

        found["cuda"] = str(torch.version.cuda)
    return found


def device_used_bytes(index: int) -> int | None:
    """Return memory of all processes by NVML, or None. Opens no CUDA context."""
    return with_nvml(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, index)).used))


def device_clock_mhz(index: int) -> int | None:
    """Return the clock of the multiprocessors by NVML, MHz, or None."""
    return with_nvml(
        lambda nvml: int(nvml.nvmlDeviceGetClockInfo(_handle(nvml, index), nvml.NVML_CLOCK_SM))
    )


def process_figures(used_before: int | None, index: int) -> dict[str, int]:
    """Return memory of this process on the device, by source, the most reliable first.

    They are NVML per process, the growth since `used_before` (read before CUDA was opened), and all
    memory that is not free.
    """
    import torch

    figures: dict[str, int] = {}
    own = with_nvml(lambda nvml: _own_bytes(nvml, index))
    if own:
        figures["NVML, this process"] = own
    used = device_used_bytes(index)
    if used is not None and used_before is not None:
        figures["NVML, device now less before"] = used - used_before
    free, total = torch.cuda.mem_get_info(index)
    figures["cudaMemGetInfo, total less free"] = total - free
    return figures


def _own_bytes(nvml: Any, index: int) -> int | None:
    """Return the memory of our process by id, or of the only one (ids differ in a container)."""
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(_handle(nvml, index))
    mine = [p for p in processes if p.pid == os.getpid()] or processes
    return None if len(mine) != 1 or mine[0].usedGpuMemory is None else int(mine[0].usedGpuMemory)


def _handle(nvml: Any, index: int) -> Any:
    """Return NVML's handle of the device that CUDA calls `index`, under `CUDA_VISIBLE_DEVICES`."""
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    chosen = visible[index] if any(visible) and index < len(visible) else str(index)
    if chosen.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(chosen))
    return nvml.nvmlDeviceGetHandleByUUID(chosen)
