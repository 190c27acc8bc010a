"""Memory of a CUDA kernel in addition to its outputs, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scratch:
    """Requested bytes of a kernel's temporaries, in the order of its requests.

    All of them are freed by the time the operation returns.
    """

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
    """One request to the allocator while an operation runs."""

    num_bytes: int
    """Bytes of the request; negative for a free of the latest live temporary of that size."""

    output: int | None = None
    """Position of the allocated output in the results; None for a temporary; `OLDEST`; `TRIED`."""


Events = list[KernelEvent]


def temporaries(*num_bytes: int, oldest: bool = False) -> Events:
    """Return events of temporaries: positive bytes allocate, negative free, 0 does nothing.

    Frees are of the latest temporary of the size, or of the oldest one.
    """
    return [KernelEvent(n, OLDEST if oldest else None) for n in num_bytes if n]


def tried(num_bytes: Sequence[int]) -> Events:
    """Return events of workspaces that cuDNN tries, the first of which that fits."""
    return [KernelEvent(n, TRIED) for n in num_bytes]


def around(num_bytes: Sequence[int], events: Events) -> Events:
    """Return events of temporaries of `num_bytes`, which exist while `events` happen."""
    return temporaries(*num_bytes) + events + temporaries(*(-n for n in reversed(num_bytes)))


def passing(*num_bytes: int) -> Events:
    """Return events of temporaries that are all allocated, then freed in reverse order."""
    return around(num_bytes, [])


def outputs(tensors: Mapping[int, int]) -> Events:
    """Return events that allocate outputs; `tensors` has their bytes by position."""
    return [KernelEvent(num_bytes, output) for output, num_bytes in tensors.items() if num_bytes]
