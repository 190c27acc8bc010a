"""Triton on the virtual GPU: kernels launch into nothing.

What a kernel reads and writes, torch has allocated before the launch, so that a launch that does
nothing asks for the same memory. Libraries take other code where Triton is missing; where it cannot
be installed, `triton_stand_in` stands there.
Source: triton 3.6.0, runtime/jit.py, runtime/autotuner.py, runtime/driver.py, testing.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from memest.estimator.device.imports import ImportHooks
from memest.estimator.device.libraries.triton_stand_in import StandInFinder
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD

MILLISECONDS = 1.0
"""What every kernel takes where a script times it."""


class Driver:
    """`triton.runtime.driver.active`: the card that Triton would compile for.

    Args:
        mode: of the virtual GPU.
        target: makes the target out of backend, architecture and size of a warp.
    """

    def __init__(self, mode: CudaSimMode, target: Callable[..., Any]) -> None:
        self._mode = mode
        self._target = target
        self.utils = self
        self.get_current_stream = lambda device=0: mode.timeline.stream

    def get_current_device(self) -> int:
        """Of the one card."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Nothing to choose from."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """The card's compute capability."""
        return self._mode.gpu.capability

    def get_current_target(self) -> Any:
        """What kernels would be compiled for."""
        major, minor = self._mode.gpu.capability
        return self._target("cuda", major * 10 + minor, 32)

    def get_active_torch_device(self) -> Any:
        """The card."""

        return CARD.device

    def get_device_interface(self) -> Any:
        """As torch has it."""
        import torch

        return torch.cuda

    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        """What kernels that fill the card ask for."""
        import torch

        found: Any = torch.cuda.get_device_properties(0)
        return {
            "max_shared_mem": found.shared_memory_per_block_optin,
            "max_num_regs": found.regs_per_multiprocessor,
            "multiprocessor_count": found.multi_processor_count,
            "warpSize": found.warp_size,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }

    def get_benchmarker(self) -> Callable[..., Any]:
        """What times kernels."""
        return do_bench

    @classmethod
    def is_active(cls) -> bool:
        """It is."""
        return True


def do_bench(fn: Callable[[], Any], *args: Any, quantiles: Any = None, **kwargs: Any) -> Any:
    """`triton.testing.do_bench`: `fn` runs once; nobody knows how long it takes."""
    fn()
    return MILLISECONDS if quantiles is None else [MILLISECONDS] * len(quantiles)


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Let launches do nothing, and Triton be there."""
    is_installed = "triton" in sys.modules or PathFinder.find_spec("triton") is not None
    if not is_installed:
        finder = StandInFinder(lambda target: Driver(mode, target), do_bench)
        finder.install()
        patches.on_undo(finder.remove)
        return

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        """A launch of the kernel."""

    def without_launches(module: ModuleType) -> None:
        for name in ("JITFunction", "Autotuner", "Heuristics"):
            kind = vars(module).get(name)
            if kind is not None:
                patches.set(kind, "run", launch)
                patches.set(kind, "warmup", launch)

    def with_driver(module: ModuleType) -> None:
        target = __import__("triton.backends.compiler", fromlist=["GPUTarget"]).GPUTarget
        patches.set(module.driver, "_active", Driver(mode, target))

    def with_bench(module: ModuleType) -> None:
        patches.set(module, "do_bench", do_bench)
        patches.set(module, "do_bench_cudagraph", do_bench)

    hooks.after("triton.runtime.jit", without_launches)
    hooks.after("triton.runtime.autotuner", without_launches)
    hooks.after("triton.runtime.driver", with_driver)
    hooks.after("triton.testing", with_bench)
