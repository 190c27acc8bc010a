"""One rank of a process group of any size, alone in its process: nothing is sent.

torch's own `fake` backend answers what a strategy asks of its group (rank, size, subgroups). The
collectives themselves move no memory that the caching allocator sees: NCCL's buffers are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from memest.errors import UnsupportedError
from memest.estimator.device.streams import StreamRecorder

_COLLECTIVES = (
    "all_gather_single", "all_gather_into_tensor", "all_gather", "reduce_scatter_single",
    "reduce_scatter_tensor", "reduce_scatter", "all_reduce", "broadcast", "barrier",
)  # fmt: skip


@contextmanager
def process_group(recorder: StreamRecorder, world_size: int, rank: int) -> Iterator[None]:
    """A group of `world_size` of which this process is `rank`, whose collectives do nothing.

    Raises:
        UnsupportedError: the process belongs to a group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        recorder.transfer(max((t.numel() * t.element_size() for t in tensors), default=0))
        return _Done() if async_op else None

    if dist.is_initialized():
        raise UnsupportedError(
            "this process belongs to a group of `torch.distributed` already",
            hint="predict in a process of its own, or before `init_process_group`",
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with ExitStack() as stack:
            for name in _COLLECTIVES:
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, collective))
            yield
    finally:
        dist.destroy_process_group()


class _Done:
    def wait(self, *args: Any) -> bool:
        return True
