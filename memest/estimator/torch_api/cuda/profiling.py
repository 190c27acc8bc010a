"""`torch.profiler`: the host's side of a trace, without kernels.

A profiler with CUDA activity runs for the CPU alone.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.autograd import profiler

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches, refusing

NOTE = (
    "the profiler's CUDA activity has no kernels, no kernel times and no memory here; its CPU "
    "activity is of the simulation"
)


_IN_ITS_PLACE = (
    "use `torch.cuda.memory._record_memory_history`, which torch recommends in its place"
)


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let profilers with CUDA activity run, and print once that kernels have no times."""

    def tell() -> None:
        if NOTE not in mode.notes.texts:
            mode.notes.add(NOTE)
            sys.stderr.write(f"memest: {NOTE}\n")

    init = profiler.profile.__init__

    @functools.wraps(init)
    def without_cuda(self: Any, *args: Any, **options: Any) -> None:
        device = options.pop("use_device", None)
        asks = bool(options.pop("use_cuda", False)) or device == "cuda"
        is_enabled = args[0] if args else options.get("enabled", True)
        if asks and is_enabled:
            tell()
        if asks:
            options["use_cpu"] = True
            device = None
        init(self, *args, use_device=device, **options)

    patches.set(profiler.profile, "__init__", without_cuda)
    refused = refusing("a profiler's memory timeline", _IN_ITS_PLACE)
    patches.set(torch.profiler.profile, "export_memory_timeline", refused)
    supported = torch.autograd._supported_activities  # type: ignore[attr-defined]

    def activities() -> set[Any]:
        return {*supported(), torch.profiler.ProfilerActivity.CUDA}

    patches.set(torch.autograd, "_supported_activities", activities)

    def enter(self: Any) -> Any:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("NVTX annotation context manager is not reentrant")
        self.entered = True
        return self

    patches.set(profiler.emit_nvtx, "__enter__", enter)
    patches.set(profiler.emit_nvtx, "__exit__", lambda self, *exception: False)
