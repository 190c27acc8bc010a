"""Copies between the card and the host."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from memest.estimator.device.guesses import Guesses
from memest.estimator.device.lines import ScriptLines
from memest.estimator.device.tensors import META, storage_key
from memest.estimator.device.values import LiveValues

aten = torch.ops.aten

MAX_SHOWN_NUMEL = 64
"""A copy to the host of up to so many elements is taken for something that the script looks at."""


def as_dtype_layout(args: tuple[Any, ...], kwargs: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """A call of `aten::to.device` as one of the overload that names all it is given."""
    tensor, device, dtype, *rest = args
    options = dict(zip(("non_blocking", "copy", "memory_format"), rest, strict=False))
    given = {"device": device, "dtype": dtype, **options, **kwargs}
    return aten.to.dtype_layout, (tensor,), given


class _Recorder(Protocol):
    values: LiveValues
    guesses: Guesses
    lines: ScriptLines

    def put_on_host(self, tensor: Tensor) -> None:
        """Let a tensor without data lie there."""


def copied(recorder: _Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """What `copy_` or `_to_copy` to the host returns: values where they are known, or guessed."""
    is_copy_ = func is aten.copy_.default
    source: Tensor = args[1] if is_copy_ else args[0]
    # a parameter has no data on the host, as none of a model built there has
    is_parameter = isinstance(source, torch.nn.Parameter)
    value = None if is_parameter else recorder.values.value_of(source)
    dtype = args[0].dtype if is_copy_ else kwargs.get("dtype") or source.dtype
    if value is None:
        if is_copy_:
            target: Tensor = args[0]
            return target
        made = torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=META)
        recorder.put_on_host(made)
        return made
    if storage_key(source) in recorder.values.guessed and source.numel() <= MAX_SHOWN_NUMEL:
        what = f"a copy of {str(source.dtype).removeprefix('torch.')} to the host"
        recorder.guesses.note(recorder.lines.current(), what)
    known: Tensor = args[0].copy_(value) if is_copy_ else value.to(dtype).clone()
    return known
