"""Calls of operators on meta, and what the registry says that CUDA's kernels request for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.ops.registry import op_of
from memest.estimator.ops.temporaries import Scratch
from memest.units import GIB
from tests.requests_at_peak import scratch_of


def gpu(capability: tuple[int, int] = (9, 0), num_sms: int = 132) -> Gpu:
    """A GPU of this compute capability."""
    return Gpu(
        name="test",
        label="Test",
        memory_bytes=80 * GIB,
        capability=capability,
        num_sms=num_sms,
        memory_gb_s=4800,
        context_bytes=0,
        source="test",
    )


H100 = find_gpu("h100-80gb")
H200 = gpu()
A100 = gpu((8, 0), 108)
L40S = gpu((8, 9), 142)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def requested(func: Any, args: tuple[Any, ...], kwargs: Any, out: Any, gpu: Gpu) -> Any:
    """Return the result of an operator's rule for a call with result `out`."""
    op = op_of(func)
    assert op.requests is not None
    return op.requests(op.call(args, kwargs, out, gpu))


def laid_out(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The result `out` with CUDA's strides."""
    op = op_of(func)
    assert op.layout is not None
    return op.layout(op.call(args, {}, out))


def result_of(func: OpOverload, *args: Any) -> Any:
    """Result of a call on meta."""
    op = op_of(func)
    return func(*args) if op.result is None else op.result(op.call(args, {}))


def requests(func: OpOverload, *args: Any, out: Any = None) -> list[int]:
    """Bytes that a call on an H100 allocates (positive) and frees (negative), in order."""
    made = result_of(func, *args) if out is None else out
    return [event.num_bytes for event in requested(func, args, {}, made, H100)]


def sizes(func: OpOverload, args: tuple[Any, ...], out: Any, **kwargs: Any) -> list[int]:
    """Bytes that a call on an H100 allocates, outputs included, in order."""
    events = requested(func, args, kwargs, out, H100)
    return [event.num_bytes for event in events if event.num_bytes > 0]


def scratch(func: OpOverload, *args: Any, on: Gpu = H200) -> Scratch:
    """Temporaries of a call at its peak."""
    found = requested(func, args, {}, result_of(func, *args), on)
    return found if isinstance(found, Scratch) else scratch_of(found)


def workspaces(func: OpOverload, *args: Any) -> tuple[int, ...]:
    """Bytes of the temporaries of a call on an H100, in order."""
    found = scratch(func, *args, on=H100)
    return (*found.before, *found.after)
