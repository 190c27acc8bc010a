"""Host parameters without data, so that they can move to the GPU.

`Module.to` replaces a parameter's data, which torch rejects between a real and a meta tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import (
    CPU,
    META,
    PLAIN,
    Place,
    is_meta,
    local_part,
    true_device,
)


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Install parameters without data, and moves of their data."""
    make = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if isinstance(data, Tensor) and not mode.is_off and _is_plain_on_host(data):
            data = _without_data(data, mode)
        return make(cls, data, requires_grad)

    patches.set(nn.Parameter, "__new__", staticmethod(new))
    _install_data(patches, mode)
    _install_grad(patches, mode)
    are_alike = torch._has_compatible_shallow_copy_type

    def can_replace(tensor: Tensor, other: Tensor) -> bool:
        """Return True for host and GPU, between which `Module.to` may set a parameter's data."""
        if is_meta(tensor) == is_meta(other):
            return are_alike(tensor, other)
        return mode.host.place(tensor if is_meta(tensor) else other) is not Place.META

    patches.set(torch, "_has_compatible_shallow_copy_type", can_replace)
    _install_lazy(patches)


_MOVES = "half float double char short int long cuda cpu to get_device".split()


def _install_lazy(patches: Patches) -> None:
    """Give parameters without a shape the replaced tensor methods."""
    lazy: Any = UninitializedParameter.__mro__[1]  # the class that buffers have, too
    known = [getattr(Tensor, name) for name in _MOVES]
    known += [Tensor.untyped_storage, torch._has_compatible_shallow_copy_type]
    patches.set(lazy, "_allowed_methods", [*lazy._allowed_methods, *known])


def _without_data(data: Tensor, mode: CudaSimMode) -> Tensor:
    """Return a host tensor like `data` without data; a small one gets known values."""
    with _disable_current_modes():
        size, stride = data.size(), data.stride()
        bare = torch.empty_strided(size, stride, dtype=data.dtype, device=META)
    mode.host.put(bare)
    mode.values.adopt_small(bare, data)
    return bare


def _is_plain_on_host(data: Tensor) -> bool:
    return type(data) in PLAIN and not is_meta(data) and true_device(data).type == "cpu"


def _install_data(patches: Patches, mode: CudaSimMode) -> None:
    """Let `Tensor.data` be set between a real tensor and one without data."""
    data_of: Any = vars(torch._C.TensorBase)["data"]
    swap_tensors: Any = torch.utils.swap_tensors

    def set_data(tensor: Tensor, value: Tensor) -> None:
        if is_meta(tensor) and not is_meta(value) and _is_gradient(tensor):
            value = _without_data(value, mode)
        if is_meta(tensor) != is_meta(value):
            swapped = Tensor._make_subclass(type(tensor), value.detach(), tensor.requires_grad)
            vars(swapped).update(vars(tensor))  # class and attributes are swapped as well
            grad = tensor.grad if tensor.is_leaf else None
            try:
                swap_tensors(tensor, swapped)
            except RuntimeError:  # autograd holds it: a graph that an exception has left behind
                if not is_meta(tensor):
                    raise
                data_of.__set__(tensor, _without_data(value, mode))
            if grad is not None and is_meta(grad) != is_meta(tensor):
                tensor.grad = _dummy_grad(grad, is_meta(tensor))
            return
        data_of.__set__(tensor, value)

    patches.set(Tensor, "data", property(data_of.__get__, set_data))


def _install_grad(patches: Patches, mode: CudaSimMode) -> None:
    """Let a host tensor without data have a real `Tensor.grad`, and refuse that of another place.

    The words are those of `check_and_update_grad` (torch/csrc/autograd/python_variable.cpp).
    """
    grad_of: Any = vars(torch._C.TensorBase)["grad"]

    def set_grad(tensor: Tensor, value: Tensor | None) -> None:
        given = value.device.type if isinstance(value, Tensor) else ""
        if not mode.is_off and {given, tensor.device.type} == {"cpu", "cuda"}:
            raise RuntimeError(
                f"attempting to assign a gradient with device type '{given}' to a tensor with "
                f"device type '{tensor.device.type}'. Please ensure that the gradient and the "
                "tensor are on the same device"
            )
        grad_of.__set__(tensor, value if value is None else _like_weight(value, tensor, mode))

    patches.set(Tensor, "grad", property(grad_of.__get__, set_grad, grad_of.__delete__))


def _like_weight(grad: Tensor, weight: Tensor, mode: CudaSimMode) -> Tensor:
    """Return the gradient of a host weight, with data if and only if the weight has data."""
    part, has_no_data = local_part(grad), is_meta(local_part(weight))
    if is_meta(part) == has_no_data or mode.host.place(local_part(weight)) is Place.META:
        return grad
    made = _without_data(part, mode) if has_no_data else _dummy_grad(part, has_no_data=False)
    return made if part is grad else type(grad)(made, grad._spec, requires_grad=False)  # type: ignore


def _dummy_grad(grad: Tensor, has_no_data: bool) -> Tensor:
    """Return a dummy gradient for `Module.to` on the parameter's device, as torch requires."""
    where = META if has_no_data else CPU
    with _disable_current_modes():
        return torch.empty_strided(grad.size(), grad.stride(), dtype=grad.dtype, device=where)


def _is_gradient(tensor: Tensor) -> bool:
    """Return whether C++ holds `tensor`, like a parameter's `grad`; it cannot be swapped then."""
    use_count: int = tensor._use_count()  # type: ignore[attr-defined]
    return use_count > 1 and not tensor.requires_grad
