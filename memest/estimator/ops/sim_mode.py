"""Protocol of the dispatch mode: the part that operator families use."""

from typing import Any, Protocol

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.registry import Args, Kwargs
from memest.estimator.tensors.known_values import KnownValues
from memest.estimator.tensors.lines import Notes


class SimMode(Protocol):
    """Interface of the dispatch mode, `gpu.mode.CudaSimMode`, which operators cannot import."""

    gpu: Gpu
    values: KnownValues
    notes: Notes
    sparse: Any  # `ops.sparse.SparseTensors`
    attribution: Any
    guessed: Any
    guesses: Any
    host: Any
    memory: Any
    rank: Any
    timeline: Any
    works: Any

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    def call(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run operator `func` on the simulated GPU, and return its result."""

    def allocate_and_free(self, func: Any, *sizes: int) -> None:
        """Allocate and free workspaces of `sizes` bytes, one by one, as operator `func` does."""
