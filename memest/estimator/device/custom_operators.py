"""Operators that torch runs by way of others: what is recorded is those.

Composite operators of torch, where autograd has not taken them apart (in inference mode, or within
another's kernel); and what libraries add to torch with a kernel written in Python, which makes its
tensors by torch and launches something on them. On the virtual GPU the launch does nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from memest.estimator.device.cuda_semantics import decisions_again
from memest.estimator.device.tensors import INSIDE

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_KEYS_OF_PYTHON = {
    "CUDA": torch._C.DispatchKey.CUDA,
    "CompositeExplicitAutograd[alias]": torch._C.DispatchKey.CompositeExplicitAutograd,
    "CompositeImplicitAutograd[alias]": _COMPOSITE,
}
_OF_TORCH = ("aten", "prims", "prim", "memest", "quantized", "c10d", "_c10d_functional")
_OWN_KERNEL = ("CPU", "CUDA", "Meta", "CompositeExplicitAutograd")
_ONE_KERNEL_ON_CUDA = ("aten::_fused_rms_norm",)
"""Composite where torch was built without CUDA."""

_EXPLICIT = ("aten::_euclidean_dist",)
"""Made of others below autograd, which has a formula for the whole."""


def key_of_other_operators(func: Any) -> Any:
    """The dispatch key under which `func` calls other operators, or None for a kernel of its own.

    torch's dispatcher keeps where each kernel was registered: in a file of Python or of C++.
    """
    name = func._schema.name
    if func._schema.overload_name:
        name = f"{name}.{func._schema.overload_name}"
    if name in _ONE_KERNEL_ON_CUDA:
        return None
    if name in _EXPLICIT:
        return torch._C.DispatchKey.CompositeExplicitAutograd
    if name.partition("::")[0] in _OF_TORCH:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        is_composite = has_kernel(name, "CompositeImplicitAutograd") and not any(
            has_kernel(name, key) for key in _OWN_KERNEL
        )
        return _COMPOSITE if is_composite else None
    for line in torch._C._dispatch_dump(name).splitlines():
        key, _, rest = line.partition(": ")
        if key in _KEYS_OF_PYTHON and ".py:" in rest:
            return _KEYS_OF_PYTHON[key]
    return None


def run_by_others(mode: Any, key: Any, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run `func`, which calls other operators under `key`, so that those are recorded."""
    depth, INSIDE.depth = INSIDE.depth, 0
    try:
        with mode, decisions_again():
            return func._op_dk(key, *args, **kwargs)
    finally:
        INSIDE.depth = depth
