"""Strides of results on CUDA where the meta kernel gives others, and copies of other strides.

Kernels that use `TensorIterator` return the same strides on the CPU, so a test compares with it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _prims_common
from torch._ops import OpOverload

from memest.estimator.ops.registry import Args, KernelCall, RequestRule
from memest.estimator.ops.temporaries import Scratch

aten = torch.ops.aten


def contiguous(call: KernelCall) -> Any:
    """Return the results of `call` with contiguous strides, unlike torch's meta kernel."""
    if isinstance(call.out, Tensor):
        return strided(call.out, _prims_common.make_contiguous_strides_for(call.out.shape))
    return tuple(t if t is None else t.contiguous() for t in call.out)


def strides_like(position: int) -> Callable[[KernelCall], Any]:
    """Return a rule for `Op.layout`: the first result has the strides of argument `position`."""

    def rule(call: KernelCall) -> Any:
        strides = torch.empty_like(call.args[position]).stride()
        if isinstance(call.out, Tensor):
            return strided(call.out, strides)
        first, *rest = call.out
        return (first if first is None else strided(first, strides), *rest)

    return rule


def elementwise(call: KernelCall) -> Tensor:
    """Return the result with the strides that TensorIterator computes from the arguments."""
    out: Tensor = call.out
    tensors = [arg.expand(out.shape) for arg in call.args if isinstance(arg, Tensor) and arg.dim()]
    return (
        strided(out, _prims_common.compute_elementwise_output_strides(*tensors)) if tensors else out
    )


def with_pointwise_strides(func: OpOverload, args: Args, out: Any) -> Any:
    """Return the result `out` of the pointwise `func(*args)`, with CUDA's strides. If all operands
    are contiguous and have the shape of `out`, CUDA makes `out` contiguous (`fast_set_up` of
    TensorIterator.cpp). This resets strides of dimensions of size 1, which torch's meta kernels may
    keep. In other cases, such as a number as operand, `out` is returned unchanged."""
    if not isinstance(out, Tensor) or func.overloadpacket in _EMPTY_LIKE or _has_number(func, args):
        return out
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not all(t.shape == out.shape and t.is_contiguous() for t in tensors):
        return out
    return strided(out, _prims_common.make_contiguous_strides_for(out.shape))


_EMPTY_LIKE = {getattr(aten, name) for name in (
    "clone", "conj_physical", "deg2rad", "hardtanh", "nan_to_num", "rad2deg",
)}  # fmt: skip
"""Pointwise operators that make their result by `empty_like`."""


def _has_number(func: OpOverload, args: Args) -> bool:
    """Return whether an operand is a number: CUDA then keeps strides of dimensions of size 1."""
    overload = func._overloadname.lower()
    if "scalar" in overload and func not in (aten.pow.Tensor_Scalar, aten.lerp.Scalar):
        return True
    operands = zip(func._schema.arguments, args, strict=False)
    return any(isinstance(a, int | float) and "Tensor" in str(s.type) for s, a in operands)


def strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return `tensor` if it has these `strides`, else a new tensor without values that has them."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their storage without gaps or overlap, in some order."""
    return tensor.is_contiguous() or bool(aten.is_non_overlapping_and_dense.default(tensor))


def contiguous_copy(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return the bytes of a contiguous copy of each tensor that needs one; None needs none."""
    return tuple(t.nbytes for t in tensors if t is not None and not t.is_contiguous())


def copies_in(memory_format: torch.memory_format, *tensors: Tensor) -> tuple[int, ...]:
    """Return the bytes of a copy in `memory_format` of each tensor that has another format."""
    return tuple(t.nbytes for t in tensors if not t.is_contiguous(memory_format=memory_format))


def contiguous_args(*positions: int, is_before: bool = False) -> RequestRule:
    """Return a rule for contiguous copies of the arguments at `positions`. The copies are made
    after the outputs, or before them (`is_before`)."""

    def contiguous_copies(call: KernelCall) -> Scratch:
        """Allocations of contiguous copies of arguments.

        Sources: `contiguous()` in SoftMax.cu, layer_norm_kernel.cu, MaxUnpooling.cu and the files
        of upsampling, pooling and padding.
        """
        copies = contiguous_copy(*(call.args[position] for position in positions))
        return Scratch(before=copies) if is_before else Scratch(after=copies)

    return contiguous_copies
