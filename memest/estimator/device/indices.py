"""Indices as CUDA takes them: on the card, and as places where they were masks.

`expandTensors` of ATen/native/IndexingUtils.h calls `nonzero` for each mask and copies what is on
the host; `masked_select` is `index` by the mask (ATen/native/cuda/IndexKernel.cpp; both torch
2.11). A number that is written through one mask is filled in (`canDispatchToMaskedFill` of
TensorAdvancedIndexing.cpp).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.tensors import on_gpu
from memest.estimator.kernels.indexing import MASK_DTYPES, broadcast

aten = torch.ops.aten

_COPIED_FIRST = (aten.index_put.default, aten._unsafe_index_put.default)


def as_taken(
    mode: Any, func: Any, types: Any, args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """The call as CUDA makes it, after what it does to its indices; as it is where a mask is not
    known.
    """
    is_select = func is aten.masked_select.default
    source, indices = args[0], args[1]
    if is_select:
        mask, source = broadcast((args[1], args[0]))
        indices = [mask]
    given = [index for index in indices if index is not None]
    masks = [index for index in given if index.dtype in MASK_DTYPES]
    if (masks and _is_fill(args)) or not (masks or not all(map(on_gpu, given))):
        return func, args
    if func in _COPIED_FIRST:
        func, source = aten.index_put_.default, mode.call(aten.clone.default, types, (source,), {})
    taken: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in MASK_DTYPES
        if is_mask:
            index = _places(mode, types, index)
        if index is not None and not on_gpu(index):
            index = mode.call(aten._to_copy.default, types, (index,), {"device": _META})
        taken += index.unbind(1) if is_mask else [index]
    return aten.index.Tensor if is_select else func, (source, taken, *args[2:])


_META = torch.device("meta")


def _places(mode: Any, types: Any, mask: Tensor) -> Tensor:
    if on_gpu(mask):
        found: Tensor = mode.call(aten.nonzero.default, types, (mask,), {})
        return found
    on_host: Tensor = mode.host.nonzero(mask)
    return on_host


def _is_fill(args: tuple[Any, ...]) -> bool:
    is_written = len(args) > 2
    return is_written and args[2].numel() == 1 and not (len(args) > 3 and args[3])
