"""`torch.cuda.cudart()` of the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from memest.errors import UnsupportedError


class CudaError(IntEnum):
    """`cudaError` as far as torch shows it."""

    success = 0


class Cudart:
    """The functions of CUDA's runtime that torch hands to Python (`torch/csrc/cuda/shared`).

    Args:
        memory: (free, total) bytes of a device.
    """

    cudaError = CudaError

    def __init__(self, memory: Callable[[Any], tuple[int, int]]) -> None:
        self.cudaMemGetInfo = memory

    def cudaGetErrorString(self, error: int) -> str:
        """Nothing ever fails here."""
        return "no error"

    def cudaProfilerStart(self) -> CudaError:
        """No profiler listens."""
        return CudaError.success

    cudaProfilerStop = cudaProfilerStart

    def cudaHostRegister(self, *args: Any) -> CudaError:
        """Memory of the host is not pinned, and behaves as if it were."""
        return CudaError.success

    cudaHostUnregister = cudaHostRegister

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"`torch.cuda.cudart().{name}` cannot be simulated",
            hint="run the script without it; see docs/run.md",
        )
