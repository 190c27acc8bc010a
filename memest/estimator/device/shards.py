"""Lists of DTensors, whose operators run on what this process holds of each.

torch asks, for each operator on a list, how every tensor of it is divided and what comes out, and
remembers the answer; the asking takes a time that grows with the square of the list's length, and
a prediction asks most lists once. Where all that meet lie alike, the answer is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def local_foreach(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise operator on lists of DTensors that lie alike; else `NotImplemented`."""
    name = func._schema.name.removeprefix("aten::")
    if not name.startswith("_foreach_") or name in _REDUCTIONS or kwargs:
        return NotImplemented
    lists = [value for value in args if _is_tensors(value)]
    if not lists or not all(map(_lie_alike, zip(*lists, strict=True))):
        return NotImplemented
    local = tuple([t._local_tensor for t in v] if _is_tensors(v) else v for v in args)
    if any(isinstance(value, Tensor) and hasattr(value, "_local_tensor") for value in local):
        return NotImplemented
    made = mode.__torch_dispatch__(func, (), local, kwargs)
    if not made:
        return None
    return [_like(tensor, one) for tensor, one in zip(args[0], made, strict=True)]


_REDUCTIONS = frozenset(("_foreach_norm", "_foreach_max", "_foreach_powsum"))


def _is_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _lie_alike(tensors: Sequence[Any]) -> bool:
    """Whether the i-th of all lists are DTensors of one shape, divided in one way."""
    specs = [getattr(tensor, "_spec", None) for tensor in tensors]
    first = specs[0]
    if first is None or any(p.is_partial() for p in first.placements):
        return False
    return all(spec is first or _same(spec, first) for spec in specs)


def _same(spec: Any, other: Any) -> bool:
    return bool(
        spec is not None
        and spec.mesh == other.mesh
        and spec.placements == other.placements
        and spec.shape == other.shape
    )


def _like(tensor: Any, local: Tensor) -> Any:
    """A DTensor of `local`, divided as `tensor` is."""
    spec = tensor._spec
    if local.dtype is not spec.tensor_meta.dtype:
        meta = type(spec.tensor_meta)(spec.shape, spec.stride, local.dtype)
        spec = spec.shallow_copy_with_tensor_meta(meta)
    return type(tensor)(local, spec, requires_grad=False)
