"""DeepSpeed on the virtual GPU: its own engine, without the optimizers that it compiles.

Its Python makes every tensor of an optimizer; the C++ extension (csrc/adam/multi_tensor_adam.cu,
cpu_adam_impl.cpp, csrc/lion/, csrc/adagrad/) allocates nothing. An extension that does nothing
replaces it; other extensions are refused like any CUDA code.

Source: DeepSpeed 0.19.8. Evidence: scripts on two H100s (validation/scripts/field/z*.py) and plans
on four H200s (validation/runs/h200-multi.jsonl).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches, constant, setting
from memest.estimator.tensors.placement import CPU, INSIDE, on_gpu
from memest.estimator.tensors.storages import MemKind
from memest.models_meta.sharding import States

Maker = Callable[..., Tensor]

KERNELS = frozenset("fused_adam cpu_adam fused_lion cpu_lion cpu_adagrad".split())
"""Extensions by the names of their builders in deepspeed/ops/op_builder."""

_MAKERS = "tensor empty zeros ones full arange eye randn".split()  # wrapped by `zero.Init`
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_MODULES_WITH_STATE = ("deepspeed.comm.comm", "deepspeed.utils.groups", _PARTITION)
"""Modules that store groups and contexts of a run in global variables."""


class _Extension:
    """Stub of a C++ extension. Its functions do nothing and return 0 (success)."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return constant(0)


def _for_scripts_only(wrap: Callable[..., Maker]) -> Callable[..., Maker]:
    """Return a variant of `wrap`, DeepSpeed's function that wraps a tensor factory. A tensor
    factory (`Maker`) is a function such as `torch.zeros`. The variant also wraps one. If the
    script calls the wrapped factory, DeepSpeed's wrapper runs. If memest or C++ calls it within an
    operator, the original factory runs."""

    def wrapping(make: Maker, *args: Any, **kwargs: Any) -> Maker:
        wrapped = wrap(make, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Tensor:
            return make(*args, **kwargs) if INSIDE.depth else wrapped(*args, **kwargs)

        return call

    return wrapping


def _cpu_info(get_cpu_info: Callable[[], Any]) -> Any:
    """Return `{}` to DeepSpeed, which reads only the CPU's vendor, and `get_cpu_info()` to others.
    `cpuinfo` takes a second in a new process."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return {} if caller.startswith("deepspeed.") else get_cpu_info()


def _label(mode: CudaSimMode, engine: Any) -> None:
    """Label tensors of DeepSpeed's `engine`: optimizer states, gradients, parameters, buckets."""
    optimizer = engine.optimizer
    if optimizer is None:
        return
    states = States(engine.module, optimizer)
    tensors_by_kind = {
        MemKind.OPTIMIZER: states.optimizer(),
        MemKind.GRADS: states.grads(),
        MemKind.PARAMS: states.params(),
        MemKind.BUCKETS: _buckets(optimizer),
    }
    for kind, tensors in tensors_by_kind.items():
        for tensor in tensors:
            mode.memory.label(tensor, kind)


def _buckets(optimizer: Any) -> Iterator[Tensor]:
    """Yield the buffers of gradient buckets: several in ZeRO stages 1 and 2, one in stage 3."""
    yield from getattr(optimizer, "ipg_buffer", None) or ()
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buffer = getattr(bucket, "buffer", None)
        yield from (buffer,) if isinstance(buffer, Tensor) else buffer or ()


def _watch_stages_1_and_2(mode: CudaSimMode, patches: Patches, module: ModuleType) -> None:
    """Label the buckets of ZeRO stages 1 and 2 (`module`), and assume that gradients are finite."""
    kind = module.DeepSpeedZeroOptimizer

    @patches.wrap(kind, "_has_inf_or_nan")
    def check_finite(has_inf_or_nan: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `has_inf_or_nan`; return a tensor that is zero: no gradient is infinite or NaN."""
        flag = has_inf_or_nan(*args, **kwargs)
        if isinstance(flag, Tensor) and on_gpu(flag):
            with _disable_current_modes():
                mode.values.adopt(flag, torch.zeros(flag.shape, dtype=flag.dtype, device=CPU))
        return flag

    @patches.wrap(kind, "setup_buckets" if hasattr(kind, "setup_buckets") else "backward_prologue")
    def labelled_buckets(set_up: Any, optimizer: Any) -> None:
        set_up(optimizer)
        for tensor in _buckets(optimizer):
            mode.memory.label(tensor, MemKind.BUCKETS)


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Make DeepSpeed use the virtual GPU and stubs of extensions, also if already imported."""

    def after_builder(module: ModuleType) -> None:
        @patches.wrap(module.OpBuilder, "load")
        def load_extension(load: Any, builder: Any, *args: Any, **kwargs: Any) -> Any:
            return _Extension() if builder.name in KERNELS else load(builder, *args, **kwargs)

    def after_engine(module: ModuleType) -> None:
        @patches.wrap(module.DeepSpeedEngine, "step")
        def labelled_step(step: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
            _label(mode, engine)
            try:
                with setting(mode.work, "is_in_engine", True):
                    return step(engine, *args, **kwargs)
            finally:
                _label(mode, engine)

    def after_parameters(module: ModuleType) -> None:
        @patches.wrap(module, "_dist_allgather_fn")
        def labelled_gather(gather: Any, shard: Tensor, gathered: Tensor, *args: Any) -> Any:
            mode.memory.label(gathered, MemKind.GATHERED)
            return gather(shard, gathered, *args)

        for name in _MAKERS:
            patches.set(module, f"_orig_torch_{name}", getattr(torch, name))
        wrap = module.zero_wrapper_for_fp_tensor_constructor
        patches.set(module, "zero_wrapper_for_fp_tensor_constructor", _for_scripts_only(wrap))

    def restore_afterwards(module: ModuleType) -> None:
        before = dict(vars(module))
        patches.on_undo(lambda: vars(module).update(before))

    for name in _MODULES_WITH_STATE:
        hooks.after(name, restore_afterwards)
    patches.set(functional, "linear", functional.linear)  # `zero.Init` does not restore it
    hooks.after("deepspeed.runtime.engine", after_engine)
    watch = partial(_watch_stages_1_and_2, mode, patches)
    hooks.after("deepspeed.runtime.zero.stage_1_and_2", watch)
    hooks.after("deepspeed.ops.op_builder.builder", after_builder)
    hooks.after(
        "cpuinfo",
        lambda module: patches.set(module, "get_cpu_info", partial(_cpu_info, module.get_cpu_info)),
    )
    hooks.after("deepspeed.utils.nvtx", lambda module: patches.set(module, "enable_nvtx", False))
    accelerator = "deepspeed.accelerator.real_accelerator"  # it looks for a GPU once
    hooks.after(accelerator, lambda module: patches.set(module, "ds_accelerator", None))
    hooks.after(_PARTITION, after_parameters)
