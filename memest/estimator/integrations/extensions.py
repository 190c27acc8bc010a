"""CUDA extensions that a script compiles: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from memest.errors import UnsupportedError
from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches

_HINT = "run the script without it; see docs/run.md for what is supported"


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Make `torch.utils.cpp_extension` refuse code for a GPU's compiler."""

    def after(module: ModuleType) -> None:
        patches.set(module, "load", _guarded(module.load, mode, _wants_cuda))
        patches.set(module, "load_inline", _guarded(module.load_inline, mode, _wants_cuda))
        patches.set(
            module, "CUDAExtension", _guarded(module.CUDAExtension, mode, lambda *a, **k: True)
        )

    hooks.after("torch.utils.cpp_extension", after)


def _wants_cuda(*args: Any, **options: Any) -> bool:
    """Return whether the sources include GPU code; a string of C++ names no such file."""
    if options.get("with_cuda") or options.get("cuda_sources"):
        return True
    sources = options.get("sources", args[1] if len(args) > 1 else ())
    sources = (sources,) if isinstance(sources, str) else sources
    return any(str(source).endswith((".cu", ".cuh")) for source in sources) or len(args) > 2


def _guarded(
    function: Callable[..., Any], mode: CudaSimMode, wants_cuda: Callable[..., bool]
) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if not wants_cuda(*args, **options):
            return function(*args, **options)
        name = options.get("name", args[0] if args else "")
        where = mode.attribution.lines.current() or "the script"
        raise UnsupportedError(
            f"{where}: `{name}` is an extension in CUDA, whose kernels cannot be simulated",
            hint=_HINT,
        )

    return call
