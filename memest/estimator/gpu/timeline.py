"""Timeline of the simulated GPU: CUDA streams, and the time at which each finishes its work.

The allocator returns a block that another stream used (`record_stream`) only after the GPU has
passed the point at which it was freed (`free` and `process_events` of
`c10/cuda/CUDACachingAllocator.cpp`). The return therefore depends on time: the host launches
operators in order, and each stream executes its own (`hardware/pace.py`). On several GPUs the
return decides how much each rank reserves. The log assumes the latest return (`is_slow`); a replay
may return the block at once.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.pace import LAUNCH_QUEUE, Table, table_of
from memest.estimator.hardware.work import LINK, Work, WorkLog, by_bytes

MAIN = 0  # the stream on which the model runs
STREAMS_PER_POOL = 32  # `kStreamsPerPool` (CUDAStream.cpp), per priority; then the first again
MAX_SWITCHES = 400_000  # switches between streams, with their positions in the autograd graph
WATCHDOG_US = 100_000  # period of `kWatchdogThreadSleepMillis` (ProcessGroupNCCL.cpp)
LOAD_US = 2500.0
"""Least host microseconds of an operator's first launch, which loads kernels. 0 where the GPU is
assumed to lag most. In scripts on two H100s of validation/scripts/ the first step of AdamW, with
its dozen operators, took 33 to 300 ms longer than the next. `scripts/measure_pace.py` measures it
too."""

SEGMENT_US = ((2, 63), (64, 68), (256, 75), (512, 100), (1024, 131), (4096, 295), (8192, 510))
"""(MiB, microseconds): shortest of eleven host times of a `cudaMalloc`: `scripts/measure_pace.py`
on the host of an H100. On another host it took up to eight times as long."""

KERNEL_SPREAD = (0.8, 1.3)
"""Bounds of kernels' times relative to the estimate. Totals of 27 measured trainings were 0.93 to
1.28 times the estimate (`kernels` of validation/scripts/step_times.json)."""

FASTEST_HOST = 0.7
"""Launches of the fastest of eleven measured hosts, relative to their mean: they differ by a factor
of two."""

WAIT_US = 2000.0
"""Time that a collective waits for the other ranks at the slowest pace. Assumed, not measured: it
was chosen to fit FSDP1 scripts of the first 29 in validation/scripts/measured_ranks.json."""

CAPTURING = "CUDA error: operation not permitted when stream is capturing"

Time = tuple[float, float]  # microseconds since the start, at the fast and at the slow pace
START: Time = (0.0, 0.0)


def segment_us(num_bytes: int) -> float:
    """Return the microseconds that the host spends on a `cudaMalloc` of `num_bytes`."""
    mib, cost = zip(*SEGMENT_US, strict=True)
    return float(np.interp(num_bytes / 2**20, mib, cost))


def later(a: Time, b: Time) -> Time:
    """Return the later of two times, separately at the fast and at the slow pace."""
    return max(a[0], b[0]), max(a[1], b[1])


class Timeline:
    """Streams of the simulated GPU, and the clock of the host that launches kernels.

    A time is a pair of microseconds since the start, at a fast and at a slow pace: the bounds of
    kernels' times (`KERNEL_SPREAD`). `log` records launches and waits, to estimate a step's time.
    """

    def __init__(self, gpu: Gpu, log: WorkLog) -> None:
        self.log = log
        self.stream = MAIN
        self.accumulates_on = MAIN  # stream of the parameters' `AccumulateGrad` nodes
        self.leaf_streams: Any = WeakIdKeyDictionary()
        """Stream of a parameter's own `AccumulateGrad` node, where it is known."""

        self.is_slow = False  # the slower pace decides when a deferred block returns
        self.num_streams = 1
        self.host_time = START  # microseconds of the host since the start
        self._gpu = gpu
        self._loaded: set[Any] = set()  # operators that were launched
        self._kernels_us: dict[int, float] = {}  # by the number of the work in the log
        self._capture_pool: int | None = None
        self.mem_pool: int | None = None  # number of the pool of `torch.cuda.use_mem_pool`
        self._tree_pool: int | None = None  # that of CUDA graph trees while they run a function
        self.streams_of_pools: dict[int, int] = {}  # stream that allocates from a private pool
        self._pools: dict[int, list[int]] = defaultdict(list)
        self._num_taken: dict[int, int] = defaultdict(int)
        self._queues: dict[int, deque[Time]] = defaultdict(partial(deque, maxlen=LAUNCH_QUEUE))
        """End times of the last launches of each stream."""

        self._busy_until: dict[int, Time] = {}
        self._is_set_in_backward = False  # the script has set the stream while a node runs
        self._switch_numbers: list[int] = []  # autograd's next sequence number at each `switch`
        self._switched_to: list[int] = []  # the streams of these switches

    # --- the clock

    @cached_property
    def _table(self) -> Table:
        return table_of(self._gpu, has_own=False)

    @property
    def matters(self) -> bool:
        """True if times can decide which block serves a request: with several streams or GPUs."""
        return self.is_slow or self.num_streams > 1

    def at_pace(self, time: Time) -> float:
        """Return the microseconds of `time` at the slow pace if `is_slow`, else at the fast one."""
        fast, slow = time
        return slow if self.is_slow else fast

    def event(self, stream: int) -> Time:
        """Return the time at which `stream` finishes its work so far, as `Event.record` does."""
        return self._busy_until.get(stream, START)

    @property
    def idle(self) -> Time:
        """Time at which all streams finish the work launched so far."""
        return reduce(later, self._busy_until.values(), START)

    def stream_waits(self, stream: int, event: Time) -> None:
        """Make `stream` wait until time `event`; the host does not wait."""
        self._busy_until[stream] = later(self.event(stream), event)

    def host_waits(self, event: Time) -> None:
        """Make the host wait until time `event`; `RuntimeError` while a graph is captured."""
        if self._capture_pool is not None:
            raise RuntimeError(CAPTURING)
        self.log.wait()
        self.host_time = later(self.host_time, event)

    def synchronize(self, stream: int | None = None) -> None:
        """Make the host wait for all work of `stream`, by default the current one."""
        self.host_waits(self.event(self.stream if stream is None else stream))

    def advance_host(self, fast_us: float, slow_us: float) -> None:
        """Advance the host's clock: by `fast_us` at the fast pace, by `slow_us` at the slow one."""
        self.host_time = self.host_time[0] + fast_us, self.host_time[1] + slow_us

    def launch(self, func: Any, recipe: Any) -> None:
        """Launch the kernels of one call of `func` on the current stream. The first launch of
        `func` loads kernels. The host then waits for all streams ("Lazy Loading", CUDA Programming
        Guide 13; measured on pipelines of four H200s). `recipe` is the `Recipe` of the call
        (gpu/kernel_calls.py). Its field `work` is the index of the call's kernels in `log.works`,
        or -1 for a call without a kernel. `recipe` is None for a read of a value."""
        if func not in self._loaded:
            self._loaded.add(func)
            self.advance_host(LOAD_US, 0.0)
            self.host_time = later(self.host_time, self.idle)
        index = -1 if recipe is None else recipe.work
        if index >= 0 and index not in self._kernels_us:
            self._kernels_us[index] = 1e6 * self._table.kernel_s(self.log.works[index])
        self._enqueue(self.stream, self._kernels_us.get(index, 0.0))

    def transfer(self, num_bytes: int, stream: int) -> None:
        """Launch a transfer of `num_bytes` to other GPUs on `stream`, after the current stream."""
        self.log.add(Work(LINK, (num_bytes,), "", 0, num_bytes))
        self.stream_waits(stream, self.event(self.stream))
        self._enqueue(stream, num_bytes / self._gpu.link_gb_s * 1e-3, WAIT_US)

    def copy_pageable(self, direction: str, num_bytes: int) -> None:
        """Copy pageable memory in `direction` "to_gpu" or "to_host"; the host waits for the end."""
        work = by_bytes(f"{direction}_pageable", num_bytes)
        self._enqueue(self.stream, 1e6 * self._table.kernel_s(work))
        self.synchronize()

    def _enqueue(self, stream: int, duration: float, wait: float = 0.0) -> None:
        if self._capture_pool is not None:
            return
        launch_us = FASTEST_HOST * self._table.launch_us
        self.advance_host(launch_us, launch_us)
        queue = self._queues[stream]
        if len(queue) == LAUNCH_QUEUE:  # full: the host waits for the end of the oldest launch
            self.host_time = later(self.host_time, queue[0])
        fast, slow = later(self.event(stream), self.host_time)
        low, high = KERNEL_SPREAD
        end = self._busy_until[stream] = fast + low * duration, slow + high * duration + wait
        queue.append(end)

    # --- streams

    def new_stream(self, priority: int = 0) -> int:
        """Return the next stream of `priority`, one of `STREAMS_PER_POOL` that are used in turn."""
        pool = self._pools[priority]
        turn = self._num_taken[priority] % STREAMS_PER_POOL
        self._num_taken[priority] += 1
        if turn == len(pool):
            pool.append(self.num_streams)
            self.num_streams += 1
        return pool[turn]

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Make `stream` the current one within the block."""
        outer_stream, was_set_in_backward = self.stream, self._is_set_in_backward
        self._is_set_in_backward = torch._C._current_autograd_node() is not None
        self.switch(stream)
        try:
            yield
        finally:
            self._is_set_in_backward = was_set_in_backward
            self.switch(outer_stream)

    def switch(self, stream: int) -> None:
        """Make `stream` the current one, as `torch.cuda.set_stream` does. In the forward, also
        store autograd's next sequence number. The nodes made until the next switch have this number
        or higher ones, so `_stream_of` finds the stream of a node by its number."""
        self.stream = stream
        if torch._C._current_autograd_node() is None:
            self._switch_numbers.append(torch._C._autograd._get_sequence_nr())
            self._switched_to.append(stream)
            if len(self._switched_to) > MAX_SWITCHES:  # nodes of the older half have run backward
                half = len(self._switched_to) // 2
                del self._switch_numbers[:half], self._switched_to[:half]

    def stream_of_call(self, args: tuple[Any, ...], is_sum: bool) -> int:
        """Return the stream on which the running operator, called with `args`, is launched.

        In the forward it is the current stream. In the backward, autograd is running a node of its
        graph. The operator is launched on the stream on which the forward of this node ran.

        A sum of gradients (`is_sum`) is launched on the stream of the node that gets the sum
        (`InputBuffer::add`). If a parameter gets the sum, it is the parameter's stream in
        `leaf_streams`, by default `accumulates_on`. The simulations of FSDP and of DDP set these
        two attributes. The stream of a sum then waits for the running node's.
        """
        node = torch._C._current_autograd_node()
        if node is None or self._is_set_in_backward:
            return self.stream
        node_stream = self._stream_of(node)
        consumer = _consumer_of_sum(node, args[0].shape) if is_sum else None
        if consumer is None:
            return node_stream
        variable = getattr(consumer, "variable", None)
        if variable is None or variable in self.leaf_streams:
            stream = self._stream_of(consumer)
        else:
            stream = self.accumulates_on
        self.stream_waits(stream, self.event(node_stream))
        return stream

    def _stream_of(self, node: Any) -> int:
        """Return the stream of the backward `node`: the stream on which its forward ran. The
        `AccumulateGrad` node of a parameter has no forward. Its stream is looked up by the
        parameter in `leaf_streams`, which the simulation of FSDP fills. A parameter that is not
        found has the current stream."""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self.leaf_streams.get(variable, self.stream)
        index = bisect_right(self._switch_numbers, node._sequence_nr()) - 1
        return self._switched_to[index] if index >= 0 else MAIN

    # --- capture of CUDA graphs

    @property
    def is_capturing(self) -> bool:
        """True if kernels are captured into a CUDA graph instead of executed."""
        return self._capture_pool is not None

    def capture_into(self, pool: int | None) -> None:
        """Begin the capture of a CUDA graph into the private pool `pool` (number); None ends it."""
        self._capture_pool = pool
        if pool is not None:
            self.streams_of_pools[pool] = self.stream

    def serve_from(self, pool: int | None) -> None:
        """Serve all requests from the private pool `pool`, in backward too; None ends that."""
        self._tree_pool = pool
        if pool is not None:
            self.streams_of_pools[pool] = self.stream

    @property
    def pool(self) -> int:
        """Number of the pool that serves the next request: that of the stream, or a private one."""
        if self._capture_pool is not None:
            return self._capture_pool
        if self._tree_pool is not None:
            return self._tree_pool
        if self.mem_pool is None or torch._C._current_autograd_node() is not None:
            return self.stream  # backward runs in another thread
        self.streams_of_pools[self.mem_pool] = self.stream
        return self.mem_pool


def _consumer_of_sum(node: Any, shape: torch.Size) -> Any:
    """Return the node after autograd's `node` that gets a gradient of `shape`, or None."""
    for consumer, index in node.next_functions:
        inputs = getattr(consumer, "_input_metadata", ())
        if index < len(inputs) and tuple(inputs[index].shape) == shape:
            return consumer
    return None
