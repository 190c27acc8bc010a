"""Memory of a CUDA kernel in addition to its outputs, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scratch:
    """Requested bytes of a kernel's temporaries, in the order of its requests.

    All of them are freed by the time the operation returns.
    """

    before: tuple[int, ...] = ()  # allocated before the outputs
    after: tuple[int, ...] = ()  # allocated after the outputs
    outputs: tuple[int, ...] | None = None  # bytes of outputs that differ from their elements


INDEX_BYTES = 8  # size of an int64

OLDEST = -1
"""Value of `KernelEvent.output` for a free of the oldest temporary of this size, not the latest."""

TRIED = -2
"""Value of `KernelEvent.output` for a workspace that cuDNN tries at the kernel's first call.

If the workspace does not fit, the next such event is tried. Then it is freed and the cache
emptied.
"""


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One request to the allocator while an operation runs."""

    num_bytes: int
    """Bytes of the request; negative for a free of the latest live temporary of that size."""

    output: int | None = None
    """Position of the allocated output in the results; None for a temporary; `OLDEST`; `TRIED`."""


Events = list[KernelEvent]


def temporaries(*num_bytes: int) -> Events:
    """Return events of temporaries: positive bytes allocate, negative free, 0 does nothing."""
    return [KernelEvent(n) for n in num_bytes if n]


def around(num_bytes: Sequence[int], events: Events) -> Events:
    """Return events of temporaries of `num_bytes`, which exist while `events` happen."""
    return temporaries(*num_bytes) + events + temporaries(*(-n for n in reversed(num_bytes)))


def passing(*num_bytes: int) -> Events:
    """Return events of temporaries that are all allocated, then freed in reverse order."""
    return around(num_bytes, [])


def outputs(tensors: Mapping[int, int]) -> Events:
    """Return events that allocate outputs; `tensors` has their bytes by position."""
    return [KernelEvent(num_bytes, output) for output, num_bytes in tensors.items() if num_bytes]


def contiguous_copy(*tensors: Tensor | None) -> tuple[int, ...]:
    """Bytes of `tensor.contiguous()` for each tensor that is not contiguous."""
    return tuple(t.nbytes for t in tensors if t is not None and not t.is_contiguous())


def copies_in(memory_format: torch.memory_format, *tensors: Tensor) -> tuple[int, ...]:
    """Bytes of `tensor.contiguous(memory_format)` for each tensor that has another format."""
    return tuple(t.nbytes for t in tensors if not t.is_contiguous(memory_format=memory_format))
