"""Triton, with kernel launches that do nothing, which request the same memory.

Where Triton cannot be installed, `triton_stub` replaces it, so that libraries take the same paths.
Source: triton 3.6.0, runtime/jit.py, runtime/autotuner.py, runtime/driver.py, testing.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.integrations.triton_stub import Finder
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import GPU

MILLISECONDS = 1.0  # assumed time of every kernel that a script times


class Driver:
    """`triton.runtime.driver.active`: the GPU for which Triton would compile.

    `target` makes Triton's target from backend, architecture and warp size.
    """

    def __init__(self, mode: CudaSimMode, target: Callable[..., Any]) -> None:
        self._mode = mode
        self._target = target
        self.utils = self
        self.get_current_stream = lambda device=0: mode.timeline.stream

    def get_current_device(self) -> int:
        """Return the index of the only GPU."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Ignore the device, because there is one GPU."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """Return the GPU's compute capability."""
        return self._mode.gpu.capability

    def get_current_target(self) -> Any:
        """Return the target of compilation."""
        major, minor = self._mode.gpu.capability
        return self._target("cuda", major * 10 + minor, 32)

    def get_active_torch_device(self) -> Any:
        """Return the device of the GPU."""

        return GPU.device

    def get_device_interface(self) -> Any:
        """Return `torch.cuda`, as torch does."""
        import torch

        return torch.cuda

    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        """Return properties that persistent kernels read."""
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
        """Return the function that times kernels."""
        return do_bench

    @classmethod
    def is_active(cls) -> bool:
        """Return True: the driver is always usable."""
        return True


def do_bench(fn: Callable[[], Any], *args: Any, quantiles: Any = None, **kwargs: Any) -> Any:
    """Run `fn` once and return a constant time, in place of `triton.testing.do_bench`."""
    fn()
    return MILLISECONDS if quantiles is None else [MILLISECONDS] * len(quantiles)


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Install Triton, with launches that do nothing."""
    is_installed = "triton" in sys.modules or PathFinder.find_spec("triton") is not None
    if not is_installed:
        finder = Finder(lambda target: Driver(mode, target), do_bench)
        finder.install(patches, is_first=False)
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
        # Triton 3.2 (torch 2.6) has no property in front of it
        name = "_active" if "_active" in vars(module.driver) else "active"
        patches.set(module.driver, name, Driver(mode, target))

    def with_bench(module: ModuleType) -> None:
        patches.set(module, "do_bench", do_bench)
        patches.set(module, "do_bench_cudagraph", do_bench)

    hooks.after("triton.runtime.jit", without_launches)
    hooks.after("triton.runtime.autotuner", without_launches)
    hooks.after("triton.runtime.driver", with_driver)
    hooks.after("triton.testing", with_bench)
