"""bitsandbytes on the virtual GPU: its own Python, without its library of kernels.

Its CUDA backend makes tensors by torch and passes their addresses to a native library, which
allocates nothing through torch. A stub library replaces it. Paged states, from `cudaMallocManaged`,
are on the host here.

Source: bitsandbytes 0.50.2, cextension.py, functional.py, backends/cuda/ops.py. Evidence: measured
plans with `use_qlora` and with its optimizers (validation/runs/*.jsonl).
"""

import ctypes
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.work import WorkLog
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import META

_CPU_LIBRARY = "libbitsandbytes_cpu"
_PARAM_NORM = 7  # position of `param_norm` in `optimizer_update_32bit`


def _note_call(*args: Any) -> int:
    """Record that a kernel of the library was called; return 0 (success)."""
    WorkLog.has_called = True
    return 0


class KernelLibrary:
    """Stub of bitsandbytes' CUDA library `libbitsandbytes_cuda*`, without kernels. A call of one of
    its functions is recorded, and does nothing. Functions with `_cpu` in their names are the real
    ones of bitsandbytes' CPU library in `folder`. `load` is a function that opens a library by its
    path, such as `ctypes.cdll.LoadLibrary`."""

    def __init__(self, load: Callable[[str], Any], folder: str) -> None:
        self._load = load
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("has_"):  # a feature of the CPU library, absent from the CUDA one
            raise AttributeError(name)
        function: Any = _note_call
        if "_cpu" in name:
            suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
            function = getattr(self._load(os.path.join(self._folder, _CPU_LIBRARY + suffix)), name)
        setattr(self, name, function)
        return function


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Make bitsandbytes load a stub of its CUDA library, also if it is already imported."""
    load = ctypes.cdll.LoadLibrary

    @patches.wrap(ctypes.cdll, "LoadLibrary")
    def load_library(load: Any, name: Any) -> Any:
        folder, file = os.path.split(str(name))
        if file.startswith("libbitsandbytes_cuda"):
            return KernelLibrary(load, folder)
        return load(name)

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        tensor: Any = torch.empty(shape, dtype=dtype, device=META)
        mode.host.put(tensor)
        tensor.is_paged, tensor.page_deviceid = True, 0
        return tensor

    def library_beside(module: ModuleType) -> Any:
        library = KernelLibrary(load, os.path.dirname(str(module.__file__)))
        return sys.modules["bitsandbytes.cextension"].CudaBNBNativeLibrary(library)

    def after_extension(module: ModuleType) -> None:
        if not isinstance(module.lib, module.CudaBNBNativeLibrary):  # no build for this CUDA
            patches.set(module, "lib", library_beside(module))

    def after_functional(module: ModuleType) -> None:
        patches.set(module, "get_paged", get_paged)
        patches.on_undo(vars(module)["name2qmap"].clear)  # tensors of this GPU

    def after_import(module: ModuleType) -> None:
        library = sys.modules["bitsandbytes.functional"].lib
        if not getattr(library, "compiled_with_cuda", False):  # imported before, or no such build
            library = library_beside(module)
            for name in ("functional", "cextension", "backends.cuda.ops"):
                if (importer := sys.modules.get(f"bitsandbytes.{name}")) is not None:
                    patches.set(importer, "lib", library)
        if find_spec("bitsandbytes.backends") is None:
            return  # before 0.46 all functions call the library
        __import__("bitsandbytes.backends.cuda.ops")
        props = getattr(sys.modules["bitsandbytes.backends.cuda.ops"], "_gpu_dispatch_props", None)
        if props is not None:
            props.cache_clear()
            patches.on_undo(props.cache_clear)
        operators = torch.ops.bitsandbytes
        if not hasattr(operators, "optimizer_update_32bit"):
            return  # before 0.47 the optimizers call the library
        update = _WithNumbers(operators.optimizer_update_32bit)
        patches.set(operators, "optimizer_update_32bit", update)

    if "bitsandbytes" not in sys.modules:
        hooks.after("bitsandbytes.cextension", after_extension)
    hooks.after("bitsandbytes.functional", after_functional)
    hooks.after("bitsandbytes", after_import)


class _WithNumbers:
    """Wrapper of the operator `optimizer_update_32bit` that passes its `param_norm` as a number."""

    def __init__(self, update: Any) -> None:
        self._update = update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._update, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        norm = args[_PARAM_NORM]
        if isinstance(norm, Tensor):
            args = (*args[:_PARAM_NORM], norm.item(), *args[_PARAM_NORM + 1 :])
        return self._update(*args, **kwargs)
