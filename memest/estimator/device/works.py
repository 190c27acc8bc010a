"""What a script holds of collectives that go on without it: works, and futures of their tensors.

`ProcessGroupNCCL.cpp` and `ivalue_inl.h` of torch 2.11:

- A work keeps its tensors until somebody calls `wait()`. Where nobody does, they are on its shelf
  (`stashed_for_allocator_safety_`) until the watchdog has seen that it is done, and then the next
  collective begins.
- Its future is complete from the start, so that what follows by `then` runs at once: on a stream
  from torch's pool, another one each time. What it allocates is of that stream's own pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import tensors_in

c10d: Any = getattr(torch._C, "_distributed_c10d", None)


class _Recorder(Protocol):
    stream: int

    def event(self, stream: int) -> tuple[float, float]:
        """When `stream` will have done what it has been given."""

    def stream_waits(self, stream: int, event: tuple[float, float]) -> None:
        """`stream` goes on only after `event`."""

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """`stream` uses the storage of `tensor`."""

    def new_stream(self) -> int:
        """One of torch's pool."""

    def on_stream(self, stream: int) -> AbstractContextManager[None]:
        """What runs inside runs on `stream`."""

    def shelve(self, tensor: Tensor, done: float) -> None:
        """A collective, `done` then, keeps `tensor` beyond its death."""

    def empty_shelves(self) -> None:
        """What is due is let go of."""


class Works:
    """Collectives that nobody has waited for yet."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._kept: Any = WeakKeyDictionary()
        self._last: Any = None
        """What pybind finds again, so that the script is given the same object."""

    def install(self, patches: Patches) -> None:
        """Let what a script asks of a work be seen."""
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
            return CardFuture(self._recorder, self._recorder.stream, list(tensors))

        patches.set(work, "wait", waits)
        patches.set(work, "get_future", future)

    def another(self) -> None:
        """A collective begins: what earlier ones keep is let go of, where that is due."""
        self._last = None
        self._recorder.empty_shelves()

    def begun(self, tensors: Sequence[Tensor]) -> Any:
        """A collective that keeps `tensors`, as operators return it."""
        self._last = work = c10d.FakeWork()
        if tensors:
            done, _ = self._recorder.event(self._recorder.stream)
            self._kept[work] = kept = finalize(work, self._shelve, tensors, done)
            kept.atexit = False
        return work.boxed()

    def _shelve(self, tensors: Iterable[Tensor], done: float) -> None:
        for tensor in tensors:
            self._recorder.shelve(tensor, done)


class CardFuture(torch.futures.Future[Any]):
    """`torch.futures.Future` of `value`, which `stream` of the card computes."""

    def __new__(cls, *args: Any) -> CardFuture:
        """Of no devices, of which this torch has none."""
        return super().__new__(cls)

    def __init__(self, recorder: _Recorder, stream: int, value: Any) -> None:
        super().__init__()
        self._recorder = recorder
        self._stream = stream
        self.set_result(value)

    def wait(self) -> Any:
        """As C++'s: the current stream goes on after what computes the value, and uses it."""
        self._joins(self._recorder.stream)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """As C++'s of a future that is complete."""
        stream = self._recorder.new_stream()
        self._joins(stream)
        with self._recorder.on_stream(stream):
            value = callback(self)
        return CardFuture(self._recorder, stream, value)

    def _joins(self, stream: int) -> None:
        self._recorder.stream_waits(stream, self._recorder.event(self._stream))
        for tensor in tensors_in((self.value(),)):
            self._recorder.record_stream(tensor, stream)
