"""What copies between the GPU and the host need on the GPU.

Source (torch 2.11): `copy_requires_temporaries` and `copy_kernel_cuda` of
aten/src/ATen/native/cuda/Copy.cu.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def to_host_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Bytes of the temporaries of `copy_` or `_to_copy` to the host, in order.

    Memory that lies in the same order on both sides is copied as it is. Else it is made contiguous
    first; a cast is the host's, but for a copy that is not waited for.
    """
    if func is aten.copy_.default:
        target, source = args[0], args[1]
        is_waited_for = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        dtype, is_alike = target.dtype, target.stride() == source.stride()
    else:
        source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
        is_waited_for, is_alike = not kwargs.get("non_blocking", False), True
    if dtype == source.dtype and is_alike and _is_dense(source):
        return ()
    is_cast_here = dtype != source.dtype and not is_waited_for
    cast = (source.numel() * dtype.itemsize,) if is_cast_here else ()
    if source.is_contiguous():
        return cast
    return (*cast, source.numel() * (dtype if is_cast_here else source.dtype).itemsize)


def to_card_bytes(target: Tensor, source: Tensor, *, is_waited_for: bool) -> int:
    """Bytes of the temporary of a copy from the host into `target`.

    A cast is the host's, but for a copy that is not waited for; what lies in another order is
    copied as the host has it, and put in order here.
    """
    is_alike = target.stride() == source.stride() and _is_dense(target)
    if target.dtype == source.dtype:
        if is_alike or target.is_contiguous():
            return 0
    elif not is_waited_for:
        return target.numel() * source.itemsize
    return 0 if target.is_contiguous() else target.numel() * target.itemsize


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or bool(aten.is_non_overlapping_and_dense.default(tensor))
