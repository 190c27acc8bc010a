"""The fused kernels that Inductor writes in Triton's language."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from memest.estimator.hardware.work import fused_work
from memest.estimator.hardware.work_log import WorkLog
from memest.estimator.tensors.patches import Patches


class Kernel:
    """A kernel that Inductor has written, which leaves no values.

    Its first run times several ways to launch it (`benchmark_gpu`, `bench` of `CachingAutotuner`).
    That needs copies of the tensors that it changes, and an array as large as the L2 cache.
    """

    def __init__(self, name: str, source: str, log: WorkLog) -> None:
        self.name = name
        self._log = log
        self._num_ways, self._changes = _ways_to_launch(source)

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch the kernel, which does nothing."""
        self._log.add(fused_work(value for value in args if isinstance(value, Tensor)))
        ways, self._num_ways = self._num_ways, 1
        if ways < 2:
            return
        cache_bytes = torch.cuda.get_device_properties().L2_cache_size
        tensors = [value for value in args if isinstance(value, Tensor)]
        changed = [tensors[i] for i in self._changes if i < len(tensors)]
        for _ in range(ways):
            copies = [tensor.clone() for tensor in changed]
            del copies
            cleared = torch.empty(cache_bytes, dtype=torch.uint8, device="cuda")
            copies = [tensor.clone() for tensor in changed]
            del copies, cleared


def kernels_for(log: WorkLog) -> Callable[..., Kernel]:
    """Return the replacement of `AsyncCompile.triton`, whose kernels add their work to `log`."""
    return lambda self, name, source, *args, **options: Kernel(name, source, log)


def _ways_to_launch(source: str) -> tuple[int, list[int]]:
    """Return the number of timed configurations, and the tensors that a kernel changes."""
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    found: list[tuple[int, list[int]]] = []

    def cached_autotune(
        size_hints: Any, configs: Sequence[Any], triton_meta: Any, *args: Any, **options: Any
    ) -> Any:
        names = [name for name, kind in triton_meta["signature"].items() if str(kind)[:1] == "*"]
        changed = options["inductor_meta"].get("mutated_arg_names", ())
        found.append((len(configs), [names.index(name) for name in changed if name in names]))
        return lambda function: function

    triton: Any = vars(triton_heuristics)["triton"]
    patches = Patches()
    patches.set(triton_heuristics, "cached_autotune", cached_autotune)
    patches.set(triton_heuristics, "Config", _Config)
    patches.set(triton_heuristics, "InductorConfig", _Config)
    patches.set(triton, "Config", _Config)
    patches.set(triton_helpers, "set_driver_to_gpu", lambda: None)
    try:
        _load(source)
    finally:
        patches.undo()
    return found[0] if found else (1, [])


class _Config:
    """Replacement of `triton.Config`; Inductor removes equal ones."""

    def __init__(self, kwargs: Any, **options: Any) -> None:
        self.kwargs = kwargs
        self.__dict__.update({"num_warps": 4, "num_stages": 2, "dynamic_scale_rblock": True})
        self.__dict__.update(options)


class _Source(InspectLoader):
    """Loads a module from its text, under a file name of its own."""

    file = "<memest kernel>"

    def __init__(self, text: str) -> None:
        self._text = text

    def is_package(self, fullname: str) -> bool:
        """Return False: it is a module."""
        return False

    def get_source(self, fullname: str) -> str:
        """Return the text."""
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        """Return the code, whose functions name `file`."""
        return compile(self._text, self.file, "exec")


def _load(source: str) -> None:
    """Run the module of a kernel, which calls what decorates the kernel.

    `linecache` holds its lines meanwhile, since `triton.jit` reads them by `inspect`.
    """
    loader = _Source(source)
    spec = spec_from_loader("kernel", loader)
    assert spec is not None
    module = module_from_spec(spec)
    vars(module).update(
        {"__file__": loader.file, "AttrsDescriptor": dict, "AttrsDescriptorWrapper": dict}
    )
    lines = source.splitlines(keepends=True)
    linecache.cache[loader.file] = (len(source), None, lines, loader.file)
    try:
        loader.exec_module(module)
    finally:
        del linecache.cache[loader.file]
