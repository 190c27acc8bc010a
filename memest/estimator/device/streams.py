"""CUDA streams of a traced run: which pool a storage comes from, and when a freed one returns.

The caching allocator keeps the free blocks of each stream apart. A block that another stream used
(`record_stream`) is counted as freed at once and handed out again only after the GPU has passed the
point at which it was freed (`c10/cuda/CUDACachingAllocator.cpp`, `free` and `process_events`,
which looks at each request). Whether it has depends on time: the host launches one operator after
another, and each stream works through its own (`speed.py`). On one GPU that is taken as it comes
out; on several, where it decides how much each rank reserves, the events say when a block comes
back at the latest (`SLOWEST`), and a replay may let it come back at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import MemKind, Site, StorageTable, return_of
from memest.estimator.device.tensors import tensors_in
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.speed import (
    LAUNCH_QUEUE,
    LAUNCH_US,
    LOAD_US,
    host_copy_us,
    kernel_us,
    speed_of,
    transfer_us,
)

MAIN = 0
"""The stream on which the model runs."""

STREAMS_PER_POOL = 32
"""`kStreamsPerPool` (c10/cuda/CUDAStream.cpp), for each priority; then the first comes again."""

MAX_SWITCHES = 400_000
"""Between streams, of which a running script's recorder remembers where they were."""

SLOWEST = 2.2
"""How many times as long as at its peak rates a GPU of several is given for its kernels:
`scripts/measure_pace.py` on an H100, of GPT-2's steps 1.3 to 2.2.
"""

WATCHDOG_US = 100_000
"""How often NCCL's watchdog looks (`kWatchdogThreadSleepMillis`, `ProcessGroupNCCL.cpp`)."""

BEST_SHARE = 0.85
"""Of the peak rates that an optimizer's kernels come to at best: 0.84 for AdamW over 740 million
parameters in 32 bits on an H100; `scripts/measure_pace.py` measures it.
"""

WAIT_US = 2000.0
"""How long a collective waits for the other ranks at the slowest pace: a guess, made with the FSDP1
scripts of the first 29 in results/scripts/measured_ranks.json in sight; it was not measured itself.
"""

CAPTURING = "CUDA error: operation not permitted when stream is capturing"

Time = tuple[float, float]
"""Microseconds since the start, with kernels at the peak rates and at `SLOWEST`."""

START: Time = (0.0, 0.0)


def later(a: Time, b: Time) -> Time:
    """At each pace the later of two times."""
    return max(a[0], b[0]), max(a[1], b[1])


class StreamRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A `Recorder` that knows on which stream a storage is made and used."""

    def __init__(self, gpu: Gpu, storages: StorageTable) -> None:
        super().__init__(gpu, storages)
        self.stream = MAIN
        self.accumulates_on = MAIN
        """The stream on which the nodes were made that add to the gradients of parameters."""

        self.leaf_streams: Any = WeakIdKeyDictionary()
        """By parameter the stream on which its own such node was made, where that is known."""

        self._pool: int | None = None
        self._streams_of_pools: dict[int, int] = {}
        self._num_streams = 1
        self._pools: dict[int, list[int]] = defaultdict(list)
        self._num_taken: dict[int, int] = defaultdict(int)
        self._speed = speed_of(gpu)
        self._durations: dict[int, float] = {}
        self._loaded: set[Any] = set()
        self.is_slow = False
        """Which pace decides when a deferred block returns."""

        self.is_prompt = False
        """Whether blocks return as they die, whoever shares them."""

        self._shelf: dict[int, float] = {}
        self._host = START
        self._queues: dict[int, deque[Time]] = defaultdict(partial(deque, maxlen=LAUNCH_QUEUE))
        """When the last launches of each stream will be done."""

        self._busy_until: dict[int, Time] = {}
        self._uses: dict[int, set[int]] = {}
        self._pending: list[tuple[float, int]] = []
        self._given_in_backward = False
        self._starts: list[int] = []
        self._streams: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        node = torch._C._current_autograd_node()
        is_given = node is None or self._given_in_backward
        stream = self.stream if is_given else self._stream_of_call(node, func, args)
        kwargs = kwargs or {}
        before, self.stream = self.stream, stream
        if stream != before:
            for tensor in tensors_in(args):
                self.record_stream(tensor, stream)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.stream = before
        if not func.is_view:
            if func not in self._loaded:
                self._loaded.add(func)
                self.host_spends(LOAD_US, 0.0)
            self._launch(stream, self._duration(func, args, kwargs, out))
        return out

    def _duration(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> float:
        """Of the kernels of the call that was recorded last; calls that are alike have one."""
        recipe = self.last_recipe
        known = None if recipe is None else self._durations.get(id(recipe))
        if known is None:
            known = kernel_us(self.gpu, self._speed, func, args, kwargs, out)
            if recipe is not None:
                self._durations[id(recipe)] = known
        return known

    def transfer(self, num_bytes: int) -> None:
        """A collective on the current stream moves `num_bytes`."""
        self._launch(self.stream, transfer_us(self._speed, num_bytes), WAIT_US)

    def copy_from_host(self, num_bytes: int) -> None:
        """A copy of pageable memory on the current stream, for which the host waits."""
        self._launch(self.stream, host_copy_us(self._speed, num_bytes))
        self.host_waits(self.event(self.stream))

    def host_spends(self, fast: float, slow: float) -> None:
        """The host is busy for so many microseconds, at either pace of the GPU."""
        self._host = self._host[0] + fast, self._host[1] + slow

    @property
    def is_capturing(self) -> bool:
        """Whether what runs is captured as a CUDA graph, and not executed."""
        return self._pool is not None

    def capture_into(self, pool: int | None) -> None:
        """Serve requests from this private pool, under whose number its blocks go; None: what runs
        is not captured any more.
        """
        self._pool = pool
        if pool is not None:
            self._streams_of_pools[pool] = self.stream

    @property
    def home(self) -> int:
        """The stream, or the private pool, whose blocks serve the next request."""
        return self.stream if self._pool is None else self._pool

    def _launch(self, stream: int, duration: float, wait: float = 0.0) -> None:
        if self._pool is not None:
            return
        self.host_spends(LAUNCH_US, LAUNCH_US)
        queue = self._queues[stream]
        if len(queue) == LAUNCH_QUEUE:
            self.host_waits(queue[0])
        fast, slow = later(self.event(stream), self._host)
        done = self._busy_until[stream] = fast + duration, slow + SLOWEST * duration + wait
        queue.append(done)

    def _stream_of_call(self, node: Any, func: Any, args: tuple[Any, ...]) -> int:
        """The stream of a call within `node`; a sum that the engine makes is the next node's.

        Gradients that meet are summed on the stream of the node that they are for
        (`InputBuffer::add`): of a parameter on `accumulates_on`.
        """
        producer = self._stream_of(node)
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            for consumer, index in node.next_functions:
                taken = getattr(consumer, "_input_metadata", ())
                if index < len(taken) and tuple(taken[index].shape) == args[0].shape:
                    variable = getattr(consumer, "variable", None)
                    stream = self._stream_of(consumer)
                    if variable is not None and variable not in self.leaf_streams:
                        stream = self.accumulates_on
                    self.stream_waits(stream, self.event(producer))
                    return stream
        return producer

    def _stream_of(self, node: Any) -> int:
        """The stream of a node of the backward: that on which its forward ran.

        The engine waits for the inputs and notes that the stream uses them (`InputBuffer::add`,
        torch/csrc/autograd/input_buffer.cpp).
        """
        variable = getattr(node, "variable", None)
        if variable is not None:
            stream: int = self.leaf_streams.get(variable, self.stream)
            return stream
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._streams[index] if index >= 0 else MAIN

    def new_stream(self, priority: int = 0) -> int:
        """As `getStreamFromPool`: one of `STREAMS_PER_POOL`, each in its turn."""
        pool = self._pools[priority]
        turn = self._num_taken[priority] % STREAMS_PER_POOL
        self._num_taken[priority] += 1
        if turn == len(pool):
            pool.append(self._num_streams)
            self._num_streams += 1
        return pool[turn]

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """What runs inside runs on `stream`."""
        before, was_given = self.stream, self._given_in_backward
        self._given_in_backward = torch._C._current_autograd_node() is not None
        self._switch(stream)
        try:
            yield
        finally:
            self._given_in_backward = was_given
            self._switch(before)

    def _switch(self, stream: int) -> None:
        self.stream = stream
        if torch._C._current_autograd_node() is None:
            self._starts.append(torch._C._autograd._get_sequence_nr())
            self._streams.append(stream)

    def forget_switches(self) -> None:
        """The nodes of long ago do not run backward any more."""
        if len(self._starts) > MAX_SWITCHES:
            half = len(self._starts) // 2
            del self._starts[:half], self._streams[:half]

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A value that the host reads: it waits for the stream that computes it."""
        self.host_waits(self.event(self.stream))
        return super()._read(func, args, kwargs)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """As `Tensor.record_stream`: `stream` uses the storage of `tensor`."""
        index = self.id_of(tensor)
        if index is None:
            return
        home = self.storages.streams.get(index, MAIN)
        if self._streams_of_pools.get(home, home) != stream:
            self._uses.setdefault(index, set()).add(stream)

    def event(self, stream: int) -> Time:
        """As `Event.record`: when `stream` will have done what it has been given."""
        return self._busy_until.get(stream, START)

    def stream_waits(self, stream: int, event: Time) -> None:
        """`stream` goes on only after `event`; the host does not wait."""
        self._busy_until[stream] = later(self.event(stream), event)

    def host_waits(self, event: Time) -> None:
        """The host goes on only after `event`.

        Raises:
            RuntimeError: that is captured, as CUDA words it.
        """
        if self._pool is not None:
            raise RuntimeError(CAPTURING)
        self._host = later(self._host, event)

    @property
    def host_time(self) -> Time:
        """Microseconds of the host since the start."""
        return self._host

    def has_passed(self, event: Time) -> bool:
        """Whether `event` lies behind the host."""
        return event[self.is_slow] <= self._host[self.is_slow]

    def shelve(self, tensor: Tensor, done: float) -> None:
        """A collective, which is `done` then, may keep the storage of `tensor`, should it die."""
        index = self.id_of(tensor)
        if index is not None:
            self.shelve_storage(index, done)

    def shelve_storage(self, index: int, done: float) -> None:
        """As `shelve`, for the storage of this id."""
        self._shelf[index] = done

    def empty_shelves(self) -> None:
        """Those that NCCL's watchdog has passed on by now at the latest; a collective does so."""
        self.clear_shelf(self._host[0] - BEST_SHARE * WATCHDOG_US)

    def clear_shelf(self, until: float) -> None:
        """What collectives that were done `until` then have kept dies now at the latest."""
        if not self._shelf:
            return
        late = sorted(index for index, done in self._shelf.items() if done <= until)
        for index in late:
            del self._shelf[index]
            if index in self.storages.shelved:
                self._returns(index)

    def _return_blocks(self) -> None:
        """Before a request: blocks that all have done with return to their pools."""
        while self._pending and self._pending[0][0] <= self._host[self.is_slow]:
            self._returns(heappop(self._pending)[1])

    def _returns(self, index: int) -> None:
        """The block of `index`, whose free was deferred, is back in its pool."""
        self.events.append(return_of(index))

    def resize(self, tensor: Tensor, num_bytes: int, kind: MemKind = MemKind.ACTIVATIONS) -> None:
        """As `untyped_storage().resize_`: the old block is freed, a new one taken for `kind`."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        index = self._live.pop(key, None)
        site = Site("", "", self.phase) if index is None else self.storages.sites[index]
        if index is not None:
            self._references.pop(index, None)
            self._end(index)
        storage.resize_(num_bytes)
        if num_bytes:
            self._born(tensor, None, Site(site.op, site.module, self.phase), kind)

    def _workspace(self, num_bytes: int, site: Site) -> int:
        self._return_blocks()
        index = super()._workspace(num_bytes, site)
        if self.home != MAIN:
            self.storages.streams[index] = self.home
        return index

    def _born(self, tensor: Tensor, num_bytes: int | None, site: Site, kind: MemKind) -> None:
        self._return_blocks()
        first = len(self.storages.num_bytes)
        super()._born(tensor, num_bytes, site, kind)
        if self.home != MAIN and len(self.storages.num_bytes) > first:
            self.storages.streams[first] = self.home

    def _end(self, index: int) -> None:
        if self.is_prompt:
            self._ends(index)
            self._uses.pop(index, None)
            return
        if index in self._shelf:
            self.storages.shelved.add(index)
            self._ends(index)
            return
        self._ends(index)
        pace = self.is_slow
        done = max((self.event(stream)[pace] for stream in self._uses.pop(index, ())), default=0.0)
        if done > self._host[pace]:
            self.storages.deferred.add(index)
            heappush(self._pending, (done, index))

    def _died(self, index: int, key: int) -> None:
        self._end(index)
        self._references.pop(index, None)
        if self._live.get(key) == index:
            del self._live[key]
            self.values.forget(key)


class Stream:
    """Stands for `torch.cuda.Stream` towards the code of a strategy."""

    def __init__(self, recorder: StreamRecorder, number: int) -> None:
        self.recorder = recorder
        self.number = number

    def wait_stream(self, other: Stream) -> None:
        """Go on only after what `other` has been given."""
        self.recorder.stream_waits(self.number, self.recorder.event(other.number))

    def wait_event(self, event: Event) -> None:
        """Go on only after `event`."""
        self.recorder.stream_waits(self.number, event.time)

    def record_event(self, event: Event | None = None) -> Event:
        """A point in this stream."""
        event = event or Event(self.recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for this stream."""
        self.recorder.host_waits(self.recorder.event(self.number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, recorder: StreamRecorder) -> None:
        self.recorder = recorder
        self.time = START

    def record(self, stream: Stream | None = None) -> None:
        """Mark the point that `stream`, or the current one, has come to."""
        number = self.recorder.stream if stream is None else stream.number
        self.time = self.recorder.event(number)

    def wait(self, stream: Stream | None = None) -> None:
        """`stream`, or the current one, goes on only after this event."""
        number = self.recorder.stream if stream is None else stream.number
        self.recorder.stream_waits(number, self.time)

    def synchronize(self) -> None:
        """The host waits for this event."""
        self.recorder.host_waits(self.time)

    def query(self) -> bool:
        """Whether the GPU has passed it: it lags."""
        return False
