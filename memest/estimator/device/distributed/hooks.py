"""Communication hooks of DistributedDataParallel: what a hook gets, and those built into torch.

Hooks are Python, and run as they are: those of `torch.distributed.algorithms.ddp_comm_hooks` and a
user's own. Of C++ are the bucket that they get (`GradBucket`, `comm.hpp`) and two hooks
(`default_comm_hooks.cpp`), for which stand those of Python that do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


class GradBucket:
    """`dist.GradBucket`: a flat tensor of gradients, and views of it."""

    def __init__(
        self,
        buffer: Tensor,
        gradients: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
        index: int,
        *,
        is_last: bool,
    ) -> None:
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """Its place in the order in which buckets are reduced."""
        return self._index

    def buffer(self) -> Tensor:
        """The flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Another flat tensor takes its place."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the flat tensor in the shapes of the parameters."""
        return self._gradients

    def parameters(self) -> list[nn.Parameter]:
        """Those of the gradients."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last to be reduced."""
        return self._is_last


CommHook = Callable[[GradBucket], Any]
"""A hook with its state: it returns a future of what a bucket comes to."""


def all_reduced(group: Any, buffer: Tensor) -> Any:
    """A future of the sum of `buffer` over `group`."""
    return dist.all_reduce(buffer, group=group, async_op=True).get_future()


def builtin_hook(kind: Any) -> Callable[[Any, Any], Any]:
    """What `dist.BuiltinCommHookType` stands for."""
    if kind.name == "FP16_COMPRESS":
        return default_hooks.fp16_compress_hook
    return default_hooks.allreduce_hook


__all__ = ["CommHook", "GradBucket", "all_reduced", "builtin_hook"]
