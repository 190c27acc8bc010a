"""Copies between the card and the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.tensors import CPU, META, is_meta, storage_key
from memest.estimator.device.values import MAX_SHOWN_NUMEL

aten = torch.ops.aten

WITH_A_NUMBER = {
    aten.masked_fill.Tensor: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill_.Scalar,
}
"""Operators that read the number in a tensor of the host (`masked_fill__cuda` of Indexing.cu), and
those that are given it.
"""


def with_number(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A call of one of `WITH_A_NUMBER` that is given the number."""
    if func not in WITH_A_NUMBER or is_meta(args[2]):
        return func, args
    return WITH_A_NUMBER[func], (*args[:2], args[2].item())


COPIES_BACKWARD = ("ToCopyBackward0", "_FromHostBackward")
"""Nodes of copies whose gradient goes to where the copied lies."""


def as_dtype_layout(args: tuple[Any, ...], kwargs: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """A call of `aten::to.device` as one of the overload that names all it is given."""
    tensor, device, dtype, *rest = args
    options = dict(zip(("non_blocking", "copy", "memory_format"), rest, strict=False))
    given = {"device": device, "dtype": dtype, **options, **kwargs}
    return aten.to.dtype_layout, (tensor,), given


def awaited_device() -> torch.device | None:
    """Where autograd expects the gradient that is being computed, `meta` for what has no data."""
    node = torch._C._current_autograd_node()
    if node is None or node.name() not in COPIES_BACKWARD:
        return None
    (after, number), *_ = node.next_functions
    return None if after is None else after._input_metadata[number].device


def copied(mode: Any, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """What `copy_` or `_to_copy` to the host returns: values where they are known, or guessed."""
    is_copy_ = func is aten.copy_.default
    source: Tensor = args[1] if is_copy_ else args[0]
    # a parameter has no data on the host, as none of a model built there has
    is_parameter = isinstance(source, torch.nn.Parameter)
    awaited = awaited_device()
    is_known = not is_parameter and awaited != META
    told = mode.assumed.told(source) if is_known else None
    value = mode.values.value_of(source) if is_known and told is None else told
    dtype = args[0].dtype if is_copy_ else kwargs.get("dtype") or source.dtype
    if value is None:
        if is_copy_:
            target: Tensor = args[0]
            return target
        if awaited == CPU:
            return torch.zeros(source.size(), dtype=dtype)
        made = torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=META)
        mode.host.put(made)
        return made
    is_guessed = told is not None or storage_key(source) in mode.values.guessed
    if is_guessed and source.numel() <= MAX_SHOWN_NUMEL:
        what = f"a copy of {str(source.dtype).removeprefix('torch.')} to the host"
        mode.guesses.note(what)
    known: Tensor = args[0].copy_(value) if is_copy_ else value.to(dtype).clone()
    return known
