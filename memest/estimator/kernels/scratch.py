"""What a CUDA kernel allocates beside its outputs, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memest.estimator.hardware.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Scratch:
    """Requested bytes of a kernel's temporaries, in the order in which it asks for them.

    All of them are freed by the time the operation returns.
    """

    before: tuple[int, ...] = ()
    """Allocated before the outputs."""

    after: tuple[int, ...] = ()
    """Allocated after the outputs."""


OLDEST = -1
"""In place of a position: the oldest live temporary of the size is freed, not the latest."""

TRIED = -2
"""In place of a position: at its first call the kernel makes a temporary of this size if the card
has so much, or else of that of the next such event, frees it, and has the cache emptied.
"""


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One request to the allocator while an operation runs."""

    num_bytes: int
    """Requested bytes; negative when freed: then the latest live temporary of that size."""

    output: int | None = None
    """Position in the operation's results, `None` for a temporary, `OLDEST` to free one, or
    `TRIED`.
    """


Events = tuple[KernelEvent, ...]
EventsFn = Callable[[tuple[Any, ...], dict[str, Any], Any, Gpu], Events]
ScratchFn = Callable[[tuple[Any, ...], dict[str, Any], Any, Gpu], Scratch]


def bytes_of(tensor: Tensor) -> int:
    """What the elements of `tensor` take."""
    return tensor.numel() * tensor.itemsize


def temporaries(*num_bytes: int) -> list[KernelEvent]:
    """Temporaries as they are made (positive) and freed (negative); nothing is asked for 0."""
    return [KernelEvent(n) for n in num_bytes if n]


def passing(*num_bytes: int) -> list[KernelEvent]:
    """Temporaries that are made one after the other and freed in reverse."""
    return temporaries(*num_bytes, *(-n for n in reversed(num_bytes)))


def outputs(tensors: Mapping[int, int]) -> list[KernelEvent]:
    """Results by position, with their bytes; nothing is asked for 0."""
    return [KernelEvent(num_bytes, output) for output, num_bytes in tensors.items() if num_bytes]


def scratch_of(events: Events) -> Scratch:
    """The temporaries that live when most bytes are asked for, split at the first output.

    A coarser view of the same events: what was freed before that moment is left out, and what is
    `TRIED`.
    """
    live: list[tuple[int, bool]] = []
    largest: list[tuple[int, bool]] = []
    most = total = 0
    before = True
    for event in events:
        if event.output == TRIED:
            continue
        if event.output is not None and event.output != OLDEST:
            before = False
            total += event.num_bytes
        elif event.num_bytes > 0:
            live.append((event.num_bytes, before))
            total += event.num_bytes
        else:
            last = max(i for i, (n, _) in enumerate(live) if n == -event.num_bytes)
            del live[last]
            total += event.num_bytes
        if total > most:
            most, largest = total, list(live)
    return Scratch(
        before=tuple(n for n, early in largest if early),
        after=tuple(n for n, early in largest if not early),
    )
