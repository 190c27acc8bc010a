"""bitsandbytes on the virtual GPU: its own Python, without the library of kernels that it loads.

The CUDA backend of bitsandbytes (backends/cuda/ops.py) makes its tensors by torch and hands their
addresses to a native library, whose kernels ask torch's allocator for nothing. So a library that
does nothing is loaded in its place. Paged states come from `cudaMallocManaged`, outside of the
allocator; they lie where tensors of the host do.
Source: bitsandbytes 0.50.2, cextension.py, functional.py, backends/cuda/ops.py. Evidence: measured
plans with `use_qlora` and with its optimizers (results/*.jsonl).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.imports import ImportHooks
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import META

_CPU_LIBRARY = "libbitsandbytes_cpu"
_PARAM_NORM = 7
"""Where `optimizer_update_32bit` takes it."""


class _Kernel:
    """A function of the library: it takes what it is given, and says that all went well."""

    argtypes: Any = None
    restype: Any = None

    def __call__(self, *args: Any) -> int:
        return 0


class KernelLibrary:
    """Every function of `libbitsandbytes_cuda*`; those for the CPU are the real ones."""

    def __init__(self, load: Callable[[str], Any], folder: str) -> None:
        self._load = load
        self._folder = folder
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("has_"):  # it tells of the CPU, which the build for CUDA cannot
            raise AttributeError(name)
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = self._on_cpu(name) if "_cpu" in name else _Kernel()
        return found

    def _on_cpu(self, name: str) -> Any:
        suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
        return getattr(self._load(os.path.join(self._folder, _CPU_LIBRARY + suffix)), name)


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Let bitsandbytes, when it is imported or where it was, find its library for CUDA."""
    load = ctypes.cdll.LoadLibrary

    def load_library(name: Any) -> Any:
        folder, file = os.path.split(str(name))
        if file.startswith("libbitsandbytes_cuda"):
            return KernelLibrary(load, folder)
        return load(name)

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        made: Any = torch.empty(shape, dtype=dtype, device=META)
        mode.host.put(made)
        made.is_paged, made.page_deviceid = True, 0
        paged: Tensor = made
        return paged

    def after_functional(module: ModuleType) -> None:
        patches.set(module, "get_paged", get_paged)
        patches.on_undo(vars(module)["name2qmap"].clear)  # tensors of this card

    def after_import(module: ModuleType) -> None:
        functional = sys.modules["bitsandbytes.functional"]
        library = functional.lib
        if not getattr(library, "compiled_with_cuda", False):  # imported before, or no such build
            folder = os.path.dirname(str(module.__file__))
            library = sys.modules["bitsandbytes.cextension"].CudaBNBNativeLibrary(
                KernelLibrary(load, folder)
            )
            patches.set(functional, "lib", library)
            patches.set(sys.modules["bitsandbytes.cextension"], "lib", library)
        __import__("bitsandbytes.backends.cuda.ops")
        forget_card = sys.modules["bitsandbytes.backends.cuda.ops"]._gpu_dispatch_props.cache_clear
        forget_card()
        patches.on_undo(forget_card)
        operators = torch.ops.bitsandbytes
        update = _WithNumbers(operators.optimizer_update_32bit)
        patches.set(operators, "optimizer_update_32bit", update)

    patches.set(ctypes.cdll, "LoadLibrary", load_library)
    hooks.after("bitsandbytes.functional", after_functional)
    hooks.after("bitsandbytes", after_import)


class _WithNumbers:
    """An operator where C++ takes a tensor's value for a number: `param_norm` of LARS and LAMB."""

    def __init__(self, update: Any) -> None:
        self._update = update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._update, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        norm = args[_PARAM_NORM]
        if isinstance(norm, Tensor):
            args = (*args[:_PARAM_NORM], norm.item(), *args[_PARAM_NORM + 1 :])
        return self._update(*args, **kwargs)
