"""Pending collectives: their works, and futures of their tensors.

`ProcessGroupNCCL.cpp` and `ivalue_inl.h` of torch 2.11:

- A work keeps its tensors until `wait()` is called. Without a `wait()` they are stashed
  (`stashed_for_allocator_safety_`) until the watchdog has seen that the collective is done and the
  next collective begins.
- Its future is complete from the start. So a callback of `then` runs at once, on the next stream of
  torch's pool, and allocates from that stream's own blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from memest.estimator.device.memory import Memory
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import tensors_in
from memest.estimator.device.timeline import Timeline

c10d: Any = getattr(torch._C, "_distributed_c10d", None)


class Works:
    """Collectives whose work was not waited for yet."""

    def __init__(self, timeline: Timeline, memory: Memory) -> None:
        self._timeline = timeline
        self._memory = memory
        self._kept: Any = WeakKeyDictionary()
        self._last: Any = None
        """Last work, kept alive so that pybind returns the same object to the script."""

    def install(self, patches: Patches) -> None:
        """Follow `wait` and `get_future` of works."""
        work: Any = c10d.FakeWork
        wait = work.wait

        def waits(work: Any, *args: Any, **kwargs: Any) -> Any:
            kept = self._kept.pop(work, None)
            if kept is not None:
                kept.detach()
            return wait(work, *args, **kwargs)

        def future(work: Any) -> Any:
            kept = self._kept.get(work)
            tensors, _ = ((), 0.0) if kept is None else kept.peek()[2]
            return CardFuture(self._timeline, self._memory, self._timeline.stream, list(tensors))

        patches.set(work, "wait", waits)
        patches.set(work, "get_future", future)

    def another(self) -> None:
        """Begin a collective: release the stashes of earlier ones that are due."""
        self._last = None
        self._memory.unstash()

    def begun(self, tensors: Sequence[Tensor]) -> Any:
        """Return the work of a collective that keeps `tensors`, boxed as operators return it."""
        self._last = work = c10d.FakeWork()
        if tensors:
            done, _ = self._timeline.event(self._timeline.stream)
            self._kept[work] = kept = finalize(work, self._stash, tensors, done)
            kept.atexit = False
        return work.boxed()

    def _stash(self, tensors: Iterable[Tensor], done: float) -> None:
        for tensor in tensors:
            self._memory.stash(tensor, done)


class CardFuture(torch.futures.Future[Any]):
    """Future of `value`, which a stream of the GPU computes."""

    def __new__(cls, *args: Any) -> CardFuture:
        """Make it without devices, which a CPU build of torch refuses."""
        return super().__new__(cls)

    def __init__(self, timeline: Timeline, memory: Memory, stream: int, value: Any) -> None:
        super().__init__()
        self._timeline = timeline
        self._memory = memory
        self._stream = stream
        self.set_result(value)

    def wait(self) -> Any:
        """Let the current stream wait for the value and use it."""
        self._joins(self._timeline.stream)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Run `callback` at once on a stream of torch's pool."""
        stream = self._timeline.new_stream()
        self._joins(stream)
        with self._timeline.on_stream(stream):
            value = callback(self)
        return CardFuture(self._timeline, self._memory, stream, value)

    def _joins(self, stream: int) -> None:
        self._timeline.stream_waits(stream, self._timeline.event(self._stream))
        for tensor in tensors_in((self.value(),)):
            self._memory.record_stream(tensor, stream)
