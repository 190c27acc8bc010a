"""Memory of a CUDA kernel in addition to its outputs, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes of each temporary of a kernel, in the order of allocation: `before` and `after` its
    outputs. All are freed by the time the operator returns. `outputs` has the bytes of each
    output's storage if they are not those of its elements, else None."""

    before: tuple[int, ...] = ()  # allocated before the outputs
    after: tuple[int, ...] = ()  # allocated after the outputs
    outputs: tuple[int, ...] | None = None  # bytes of outputs that differ from their elements


OLDEST = -1
"""Value of `KernelEvent.output` for a free of the oldest temporary of this size, not the latest."""

TRIED = -2
"""Value of `KernelEvent.output` for a workspace that cuDNN tries at the kernel's first call.

If the workspace does not fit, the next such event is tried. Then it is freed and the cache
emptied.
"""


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One allocation or free of a temporary or an output while an operator runs."""

    num_bytes: int
    """Bytes of the request; negative for a free of the latest live temporary of that size."""

    output: int | None = None
    """Position of the allocated output in the results; None for a temporary; `OLDEST`; `TRIED`."""


Events = list[KernelEvent]


def temporaries(*num_bytes: int, oldest: bool = False) -> Events:
    """Return an event for each of `num_bytes`: n allocates a temporary of n bytes, -n frees one,
    and 0 is skipped. The latest temporary of n bytes is freed, or with `oldest` the oldest."""
    return [KernelEvent(n, OLDEST if oldest else None) for n in num_bytes if n]


def tried(num_bytes: Sequence[int]) -> Events:
    """Return events that try workspaces of `num_bytes`, in this order, until one fits. cuDNN does
    so when it benchmarks its algorithms."""
    return [KernelEvent(n, TRIED) for n in num_bytes]


def around(num_bytes: Sequence[int], events: Events) -> Events:
    """Return `events` between allocations of temporaries of `num_bytes` and their frees."""
    return temporaries(*num_bytes) + events + temporaries(*(-n for n in reversed(num_bytes)))


def passing(*num_bytes: int) -> Events:
    """Return events that allocate temporaries of `num_bytes` in order, and free them in reverse."""
    return around(num_bytes, [])


def outputs(tensors: Mapping[int, int]) -> Events:
    """Return events that allocate outputs; `tensors` has their bytes by position in the results."""
    return [KernelEvent(num_bytes, output) for output, num_bytes in tensors.items() if num_bytes]
