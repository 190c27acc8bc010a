"""Pending collectives: their `Work` handles, and futures of their tensors.

`ProcessGroupNCCL.cpp` and `ivalue_inl.h` of torch 2.11: a work keeps its tensors until `wait()`.
Without a `wait()` they are stashed (`stashed_for_allocator_safety_`) until the watchdog has seen
the end of the collective and the next one begins. A work's future is complete from the start, so a
callback of `then` runs at once, on the next stream of torch's pool.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from memest.estimator.gpu.memory import Memory
from memest.estimator.gpu.timeline import Time, Timeline
from memest.estimator.gpu.worlds import Rank
from memest.estimator.hardware import gpus
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import storage_key, tensors_in

c10d: Any = getattr(torch._C, "_distributed_c10d", None)


def _completed_work_class() -> Any:
    """Return the class of a completed `Work`, such as `FakeWork`; None if torch has no `Work`."""
    if c10d is None or hasattr(c10d, "FakeWork"):
        return getattr(c10d, "FakeWork", None)

    class DoneWork(c10d.Work):  # type: ignore[misc]
        def wait(self, timeout: Any = None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        synchronize = wait

    return DoneWork


DoneWork: Any = _completed_work_class()

Communicator = tuple[str, int | None]
"""Group name (empty for the default group), and the peer if it sends or receives unbatched."""

DEFAULT: Communicator = "", None


class PendingWorks:
    """NCCL's communicators of this rank, and its pending collectives and messages. Each `Work`
    (torch's handle of a collective) keeps tensors alive until the script waits for it."""

    def __init__(self, timeline: Timeline, memory: Memory) -> None:
        self._timeline = timeline
        self._memory = memory
        self._finalizers: Any = WeakKeyDictionary()  # by work; each holds the work's tensors
        self._last_work: Any = None  # kept alive so that pybind returns the same object
        self.messages: dict[Communicator, set[tuple[int, bool]]] = defaultdict(set)
        """Communicator -> ranks to which it sends (True) or from which it receives (False)."""

        self._streams: dict[Communicator, int] = {}  # stream of the messages of each communicator
        self.collectives: set[Communicator] = set()  # communicators that have run a collective
        self._created: set[Communicator] = set()  # communicators that were created with their group
        self.is_batch = False  # True within `batch_isend_irecv`
        self.is_eager = False  # `init_process_group` has a `device_id`: pairs have no communicator
        self._alone: set[str] = set()  # groups of only this rank that have communicated
        self._registered: dict[int, Any] = {}  # work by functional result (`WorkRegistry`)

    def install(self, patches: Patches) -> None:
        """Make `wait` and `get_future` of torch's `Work` follow the simulated streams."""
        wait = DoneWork.wait

        def wait_on_stream(work: Any, *args: Any, **kwargs: Any) -> Any:
            finalizer = self._finalizers.pop(work, None)
            if finalizer is not None:
                _, _, (_, end), _ = finalizer.detach()  # (work, `_stash`, (tensors, end), kwargs)
                self._timeline.stream_waits(self._timeline.stream, end)
            return wait(work, *args, **kwargs)

        def future(work: Any) -> Any:
            finalizer = self._finalizers.get(work)
            tensors: Sequence[Tensor] = ()
            if finalizer is not None:
                _, _, (tensors, _), _ = finalizer.peek()
            return GpuFuture(self._timeline, self._memory, self._timeline.stream, list(tensors))

        patches.set(DoneWork, "wait", wait_on_stream)
        patches.set(DoneWork, "get_future", future)

    def communicate(
        self,
        group: Any,
        name: str = "",
        peer: int | None = None,
        messages: Collection[tuple[int, bool]] = (),
    ) -> int:
        """Record a collective or a message of process group `group`; return the stream for it.

        `peer` is the other rank of a message, and None for a collective. `name` is the operator's
        name. It is "send" if this rank sends the message, and another name if it receives.
        `messages` is not empty for a collective that NCCL runs as messages, such as a scatter. Each
        element is (other rank, True if this rank sends).

        Each pair of ranks has a communicator and a stream for its messages
        (`ProcessGroupNCCL::pointToPoint`). Messages share the communicator of the group within
        `batch_isend_irecv`, or if `init_process_group` got a `device_id`.
        """
        self.release_due()
        stream = self._timeline.stream
        group_name = self._name(group)
        if group.size() < 2:
            if group_name:
                self._alone.add(group_name)
            return stream
        if messages:
            self.messages[group_name, None].update(messages)
        elif peer is None:
            self.collectives.add((group_name, None))
        else:
            is_shared = self.is_batch or self.is_eager
            communicator = group_name, None if is_shared else peer
            self.messages[communicator].add((peer, name == "send"))
            if communicator not in self._streams:
                self._streams[communicator] = self._timeline.new_stream()
            stream = self._streams[communicator]
        return stream

    @staticmethod
    def _name(group: Any) -> str:
        default = torch.distributed.distributed_c10d._world.default_pg  # or None, after its end
        is_default = default is not None and group.group_name == default.group_name
        return "" if is_default else str(group.group_name)

    def create(self, group: Any) -> None:
        """Record the communicator that NCCL creates at once for a `group` with a `device_id`."""
        if group.size() > 1:
            self._created.add((self._name(group), None))
        elif self._name(group):
            self._alone.add(self._name(group))

    @property
    def communicators(self) -> set[Communicator]:
        """Communicators that NCCL has created for at least two ranks."""
        return self.collectives | set(self.messages) | self._created

    def library_bytes(self, rank: Rank) -> int:
        """Return NCCL's bytes on the GPU of `rank`: kernels, communicators and their buffers."""
        total = gpus.SUBGROUP_OF_ONE_BYTES * len(self._alone)
        if rank.world_size == 1:
            return total + (gpus.COMMUNICATOR_OF_ONE_BYTES if rank.is_launched else 0)
        total += gpus.NCCL_KERNELS_BYTES if self.communicators else 0
        total += gpus.MESSAGES_BYTES if self.messages else 0
        for communicator in self.communicators:
            has_collectives = communicator in self.collectives
            total += gpus.SUBGROUP_BYTES if has_collectives else gpus.WITHOUT_COLLECTIVES_BYTES
        for messages in self.messages.values():
            for _, sends in messages:
                total += gpus.SENDING_BYTES if sends else gpus.RECEIVING_BYTES
        return total

    def release_due(self) -> None:
        """Free tensors that finished collectives kept alive. Each new collective calls this."""
        self._last_work = None
        self._memory.unstash()

    def register(self, results: Any) -> None:
        """Keep the last new `Work` alive until `wait_for` gets one of the tensors in `results`."""
        for tensor in tensors_in((results,)):
            if type(tensor) is Tensor:  # no wrapper of a result that is registered already
                self._registered[storage_key(tensor)] = self._last_work

    def wait_for(self, tensor: Tensor) -> None:
        """Wait for the registered `Work` whose result is `tensor`, if there is one."""
        work = self._registered.pop(storage_key(tensor), None)
        if work is not None:
            work.wait()

    def new_work(self, tensors: Sequence[Tensor], stream: int) -> Any:
        """Return a new `Work` of a collective on `stream`, boxed for C++ as operators return it.

        The `Work` keeps `tensors` alive. Its `wait` makes the current stream wait for `stream`.
        """
        self._last_work = work = DoneWork()
        if tensors or stream != self._timeline.stream:
            end = self._timeline.event(stream)
            self._finalizers[work] = finalizer = finalize(work, self._stash, tensors, end)
            finalizer.atexit = False
        return work.boxed()

    def _stash(self, tensors: Iterable[Tensor], end: Time) -> None:
        fast_end, _ = end
        for index in map(self._memory.id_of, tensors):
            if index is not None:
                self._memory.stash(index, fast_end)


class GpuFuture(torch.futures.Future[Any]):
    """`torch.futures.Future` of `value`, which work on the GPU's stream `stream` computes."""

    def __new__(cls, *args: Any) -> "GpuFuture":
        """Make a future without devices, because a CPU build of torch refuses CUDA devices."""
        return super().__new__(cls)

    def __init__(self, timeline: Timeline, memory: Memory, stream: int, value: Any) -> None:
        super().__init__()
        self._timeline = timeline
        self._memory = memory
        self._stream = stream
        self.set_result(value)

    def wait(self) -> Any:
        """Make the current stream wait for the value, and return the value."""
        self._make_wait(self._timeline.stream)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Run `callback` now, on a stream of torch's pool; return the future of its result."""
        stream = self._timeline.new_stream()
        self._make_wait(stream)
        with self._timeline.on_stream(stream):
            value = callback(self)
        return GpuFuture(self._timeline, self._memory, stream, value)

    def _make_wait(self, stream: int) -> None:
        self._timeline.stream_waits(stream, self._timeline.event(self._stream))
        for tensor in tensors_in((self.value(),)):
            self._memory.record_stream(tensor, stream)
