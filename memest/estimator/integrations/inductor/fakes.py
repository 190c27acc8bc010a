"""Fake tensors that are on `cuda` in Python and on `meta` in C++.

Without a GPU, C++ refuses autograd for tensors on `cuda`: `InputMetadata` reads the current stream.
Operators above autograd take CUDA's decisions (`ops/autograd_ops.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

from memest.estimator.ops.attention import cudnn_output
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import GPU, META
from memest.estimator.versions import simulated

_DEVICE = torch.ops.prim.device.default
_ATTENTION = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_LAID_OUT = (2, 8)  # first whose meta kernel follows the query's strides (_meta_registrations.py)


def install(patches: Patches) -> None:
    """Let fake tensors be on `meta` for C++."""
    from torch._subclasses import fake_tensor

    kind: Any = fake_tensor.FakeTensor
    make, dispatch = kind.__new__, kind.__torch_dispatch__.__func__
    handlers: Any = fake_tensor._DISPATCH_META_HANDLERS

    def new(cls: Any, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return make(cls, mode, elem, _in_c(torch.device(device)), *args, **kwargs)

    def device(tensor: Any) -> torch.device:
        in_kernel = tensor.fake_mode.in_kernel_invocation
        return META if in_kernel else fake_device(tensor)

    def fake_device(tensor: Any) -> torch.device:
        found: torch.device = vars(tensor)["fake_device"]
        return GPU.device if found.type == "meta" else found

    def set_fake_device(tensor: Any, value: torch.device) -> None:
        vars(tensor)["fake_device"] = _in_c(value)

    def device_in_c(args: Any) -> torch.device:
        in_kernel = args[0].fake_mode.in_kernel_invocation
        return META if in_kernel else vars(args[0])["fake_device"]

    def torch_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return device_in_c(args)
        return dispatch(cls, func, types, args, kwargs or {})

    def is_on(name: str) -> property:
        return property(lambda tensor: device(tensor).type == name)

    patches.set(kind, "__new__", staticmethod(new))
    patches.set(kind, "__torch_dispatch__", classmethod(torch_dispatch))
    patches.set(kind, "device", property(device, kind.device.fset))
    patches.set(kind, "fake_device", property(fake_device, set_fake_device))
    for name in ("cuda", "cpu", "meta"):
        patches.set(kind, f"is_{name}", is_on(name))
    no_gpu = property(lambda mode: True)  # `torch.tensor` makes its data on the host first
    patches.set(fake_tensor.FakeTensorMode, "avoid_device_init", no_gpu)
    before = handlers[_DEVICE]
    handlers[_DEVICE] = device_in_c
    patches.on_undo(lambda: handlers.update({_DEVICE: before}))
    _lay_out_attention(patches)


def _lay_out_attention(patches: Patches) -> None:
    """Give cuDNN's attention the strides that later meta kernels have.

    A real run with torch 2.6 and 2.7 raises if cuDNN is chosen, so this is for newer kernels only.
    """
    from torch import _meta_registrations
    from torch._subclasses.fake_impls import op_implementations_dict

    meta_kernel = _meta_registrations.meta__scaled_dot_product_cudnn_attention
    is_older = "alloc_with_matching_layout" not in meta_kernel.__code__.co_names
    if is_older and simulated().version >= _LAID_OUT:
        op_implementations_dict[_ATTENTION] = attention_as_on_cuda
        patches.on_undo(lambda: op_implementations_dict.pop(_ATTENTION))


def attention_as_on_cuda(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return fake results of `func`, the output in the layout of the query."""
    with in_kernel_invocation_manager(fake_mode):
        made = cudnn_output(args, func(*args, **kwargs))
    return fake_mode.wrap_meta_outputs_with_default_device_logic(made, func, args, None)


def _in_c(device: torch.device) -> torch.device:
    return META if device.type == "cuda" else device
