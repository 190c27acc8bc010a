"""What code asks of the allocator of a virtual GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from memest.estimator.virtual_gpu import VirtualGpu
from memest.units import MIB

WORKSPACE = 32 * MIB
"""Of cuBLAS on an H100 or H200, at its first product in each thread; it stays."""


class Requests:
    """What is asked of the allocator of `gpu`, in order: bytes, below 0 where they are freed."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self.seen: list[int] = []
        allocator: Any = gpu.allocator
        malloc, free = allocator.malloc, allocator.free
        sizes: dict[int, int] = {}

        def asked(num_bytes: int, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(num_bytes)
            block = malloc(num_bytes, *args, **kwargs)
            sizes[id(block)] = num_bytes
            return block

        def freed(block: Any) -> Any:
            self.seen.append(-sizes.pop(id(block), block.num_bytes))
            return free(block)

        allocator.malloc, allocator.free = asked, freed

    def of(self, run: Callable[[], Any]) -> list[int]:
        """The requests of `run`, whose result is let go after them.

        What is freed between two requests has no order among itself.
        """
        return [
            number
            for is_freed, run_of in itertools.groupby(self.in_order(run), lambda n: n < 0)
            for number in (sorted(run_of) if is_freed else run_of)
        ]

    def in_order(self, run: Callable[[], Any]) -> list[int]:
        """The same with what is freed as it is."""
        self.gpu.mode.memory.settle()
        self.seen.clear()
        result = run()
        self.gpu.mode.memory.settle()
        seen = list(self.seen)
        del result
        return seen

    def made(self, run: Callable[[], Any]) -> list[int]:
        """Of the requests of `run` those that ask for memory."""
        return [number for number in self.of(run) if number > 0]


def without_workspaces(requests: list[int]) -> list[int]:
    """Without those of cuBLAS."""
    return [number for number in requests if number != WORKSPACE]


def peak(requests: list[int]) -> int:
    """The most bytes of `requests` that are held at once."""
    return max(itertools.accumulate(requests, initial=0))
