"""CUDA graphs: what is captured takes its memory from a pool of its own, and is replayed without.

A private pool is a stream's pools under another number: what is freed during a capture comes back
to it, and `empty_cache` leaves it alone as long as a graph of it lives
(`beginAllocateToPool`, `releasePool` of c10/cuda/CUDACachingAllocator.cpp, and
aten/src/ATen/cuda/CUDAGraph.cpp, torch 2.11). Evidence: seven scripts recorded on an H100.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, ClassVar

import torch

from memest.estimator.allocator.caching import FIRST_PRIVATE_POOL
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD

NOT_BEGUN = "capture_end() called before capture_begin()."


class Captures:
    """The private pools of a session, and the graphs that hold them."""

    def __init__(self, mode: CudaSimMode) -> None:
        self.mode = mode
        self.graphs = Counter[int]()
        """Of each pool."""

        self._numbers = itertools.count(1)
        self._generator_state: tuple[torch.Tensor, ...] = ()

    def new_pool(self) -> tuple[int, int]:
        """As `graph_pool_handle`."""
        return 0, next(self._numbers)

    def begin(self, pool: tuple[int, int]) -> None:
        """From now on requests are served from `pool`.

        The default generator keeps a seed and an offset on the card while a graph draws from it
        (`CUDAGeneratorState::register_graph`, CUDAGeneratorImpl.cpp).
        """
        if not self._generator_state:
            made = (torch.empty(1, dtype=torch.int64, device=CARD.device) for _ in range(2))
            self._generator_state = tuple(made)
        self.graphs[pool[1]] += 1
        self.mode.timeline.capture_into(FIRST_PRIVATE_POOL + pool[1])

    def release(self, pool: tuple[int, int]) -> None:
        """A graph of `pool` is gone."""
        self.graphs[pool[1]] -= 1
        if not self.graphs[pool[1]]:
            self.mode.memory.allocator.released_pools.add(FIRST_PRIVATE_POOL + pool[1])
        if not +self.graphs:
            self._generator_state = ()


class CudaGraph:
    """`torch.cuda.CUDAGraph` of the virtual GPU."""

    captures: ClassVar[Captures]

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: tuple[int, int] | None = None

    def capture_begin(self, pool: tuple[int, int] | None = None, **options: Any) -> None:
        """Capture what follows on the current stream."""
        self._pool = pool or self.captures.new_pool()
        self.captures.begin(self._pool)

    def capture_end(self) -> None:
        """What follows runs again.

        Raises:
            RuntimeError: nothing is captured.
        """
        if self._pool is None:
            raise RuntimeError(NOT_BEGUN)
        self.captures.mode.timeline.capture_into(None)

    def instantiate(self) -> None:
        """Nothing is asked for."""

    def replay(self) -> None:
        """Nothing is asked for."""

    def reset(self) -> None:
        """Give up the memory of the graph; that of others of its pool stays."""
        if self._pool is not None:
            self.captures.release(self._pool)
            self._pool = None

    def pool(self) -> tuple[int, int]:
        """For other graphs to share."""
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Nothing is asked for."""

    def debug_dump(self, debug_path: str) -> None:
        """Nothing is written."""

    def __del__(self) -> None:
        self.reset()


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let torch capture graphs on the virtual GPU."""
    captures = Captures(mode)
    graph = type("CUDAGraph", (CudaGraph,), {"captures": captures, "__module__": "torch.cuda"})
    for owner in (torch.cuda, torch.cuda.graphs):
        patches.set(owner, "CUDAGraph", graph)
        patches.set(owner, "graph_pool_handle", captures.new_pool)
    patches.set(
        torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: mode.timeline.is_capturing
    )
    patches.set(torch.cuda.graph, "default_capture_stream", None)
    patches.set(torch._C, "_host_emptyCache", lambda: None)
