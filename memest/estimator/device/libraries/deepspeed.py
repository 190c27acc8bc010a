"""DeepSpeed on the virtual GPU: its own engine, without the optimizers that it compiles.

Its Python makes every tensor of an optimizer and hands them to an extension in C++ that takes and
frees nothing (csrc/adam/multi_tensor_adam.cu, cpu_adam_impl.cpp, csrc/lion/, csrc/adagrad/). So an
extension that does nothing is loaded in its place; another is refused as any in CUDA is.
Source: DeepSpeed 0.19.8. Evidence: scripts measured on two H100s (results/scripts/field/z*.py), and
plans on four H200s (results/h200-multi.jsonl).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.imports import ImportHooks
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import INSIDE

Maker = Callable[..., Tensor]

KERNELS = frozenset((
    "fused_adam", "cpu_adam", "fused_lion", "cpu_lion", "cpu_adagrad",
))  # fmt: skip
"""Extensions by the names of their builders in deepspeed/ops/op_builder."""

_MAKERS = "tensor empty zeros ones full arange eye randn".split()
"""Functions of torch that `deepspeed.zero.Init` wraps, as it has kept them."""


class _Extension:
    """Every function takes what it is given, and says that all went well."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _for_scripts(wrap: Callable[..., Maker]) -> Callable[..., Maker]:
    """Of the functions that `wrap` makes, none is called where memest, or torch in C++, makes a
    tensor: what runs an operator here is Python.
    """

    def wrapping(make: Maker, *args: Any, **kwargs: Any) -> Maker:
        wrapped = wrap(make, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Tensor:
            return make(*args, **kwargs) if INSIDE.depth else wrapped(*args, **kwargs)

        return call

    return wrapping


def install(patches: Patches, hooks: ImportHooks) -> None:
    """Let DeepSpeed, when it is imported or where it was, find the GPU and its extensions."""

    def after_builder(module: ModuleType) -> None:
        load = module.OpBuilder.load

        def load_extension(builder: Any, *args: Any, **kwargs: Any) -> Any:
            return _Extension() if builder.name in KERNELS else load(builder, *args, **kwargs)

        patches.set(module.OpBuilder, "load", load_extension)

    def after_accelerator(module: ModuleType) -> None:
        patches.set(module, "ds_accelerator", None)  # which looks for a GPU once

    def after_parameters(module: ModuleType) -> None:
        for name in _MAKERS:
            patches.set(module, f"_orig_torch_{name}", getattr(torch, name))
        wrap = module.zero_wrapper_for_fp_tensor_constructor
        patches.set(module, "zero_wrapper_for_fp_tensor_constructor", _for_scripts(wrap))

    hooks.after("deepspeed.ops.op_builder.builder", after_builder)
    hooks.after("deepspeed.accelerator.real_accelerator", after_accelerator)
    hooks.after("deepspeed.runtime.zero.partition_parameters", after_parameters)
