"""What a CUDA kernel allocates beside its outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scratch:
    """Requested bytes of a kernel's temporaries, in the order in which it asks for them.

    All of them are freed by the time the operation returns.
    """

    before: tuple[int, ...] = ()
    """Allocated before the outputs."""

    after: tuple[int, ...] = ()
    """Allocated after the outputs."""
