"""Memory of the GPU: its storages, their blocks, and frees that wait for a stream.

Each request goes to the caching allocator as the operator runs. So a script runs out of memory
where it would on the GPU.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.gpu.history import History
from memest.estimator.gpu.messages import out_of_memory
from memest.estimator.gpu.timeline import MAIN, WATCHDOG_US, Timeline, segment_us
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.tensors.placement import storage_key
from memest.estimator.tensors.storages import (
    FIRST_KERNEL,
    MemKind,
    Site,
    StorageTable,
    free_of,
    return_of,
)

OBJECTS_PER_STORAGE = 4  # containers per live storage: two of torch, the weak reference, the block


class GarbagePace:
    """Correction of the threshold of Python's `gc` for the container objects that memest creates.
    The threshold is raised by their number, so that collections run when they do in a real run.

    A module that is built and replaced is often part of a cycle. Its GPU memory is held until
    Python collects cycles: when 700 more containers were made than dropped (`gc.get_threshold`).
    Code that runs for every operator leaves no cycles, and makes tuples of a known length. Python
    counts a tuple from an iterator as made and not as dropped. Tensors that a real run holds in C++
    alone, such as gradients, have Python objects here; these still count.
    """

    def __init__(self) -> None:
        self._num_objects = 0  # objects that memest made since the last collection
        self._script_threshold = (0, 0, 0)
        self._raised = 0  # first number of the threshold that memest has set last
        self._is_active = False

    def start(self) -> None:
        """Begin the correction: store the script's own threshold, and watch for collections."""
        self._num_objects, self._is_active = 0, True
        self._script_threshold = gc.get_threshold()
        self._raised = self._script_threshold[0]
        gc.callbacks.append(self._on_collection)

    def add_objects(self, num_objects: int) -> None:
        """Raise the threshold by `num_objects`, the number of objects that memest made. A negative
        number lowers the threshold, by the objects that memest freed."""
        if not self._is_active or not gc.isenabled():
            self._num_objects += num_objects
            return
        threshold = gc.get_threshold()
        if threshold[0] != self._raised:  # the script has set its own threshold
            self._script_threshold, self._num_objects = threshold, 0
        self._num_objects += num_objects
        if self._script_threshold[0]:  # with 0, Python collects nothing
            self._raised = max(1, self._script_threshold[0] + self._num_objects)
            gc.set_threshold(self._raised, *self._script_threshold[1:])

    def stop(self) -> None:
        """End the correction: restore the script's own threshold, if memest's is still set."""
        self._is_active = False
        if self._on_collection in gc.callbacks:  # the script may have cleared them
            gc.callbacks.remove(self._on_collection)
        if gc.get_threshold()[0] == self._raised:
            gc.set_threshold(*self._script_threshold)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            if gc.get_threshold()[0] == self._raised:
                self._raised = self._script_threshold[0]
                gc.set_threshold(*self._script_threshold)
            self._num_objects = 0


class _Reference(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage, with its id (`index`) and its `storage_key` (`key`). One object
    has all three, since each long-lived object changes when Python collects garbage."""

    __slots__ = ("index", "key")

    index: int
    key: int


class Memory:
    """Storages on the simulated GPU, each with a block of the caching allocator. `timeline` decides
    when a block that several streams use returns to its pool."""

    def __init__(self, gpu: Gpu, allocator: CachingAllocator, timeline: Timeline) -> None:
        self.gpu = gpu
        self.allocator = allocator
        self.storages = StorageTable()
        self.history = History(allocator, self.storages)
        self.log = self.history.log
        self.live: dict[int, int] = {}  # storage id by the key of a storage that is alive
        self.blocks: dict[int, Block] = {}
        self.kind = MemKind.ACTIVATIONS  # kind of the storages that operators allocate now
        self.lock = threading.RLock()
        self.pace = GarbagePace()
        self.num_ooms = 0
        self.refused: tuple[int, Site, int] | None = None  # bytes, site and bytes reserved then
        self.refused_id: int | None = None  # id of the storage of the last refused request
        self.is_immediate = False  # flag: free blocks at once, even if other streams use them
        self.logs_driver = False  # flag: log events of the driver; only scripts on one GPU do
        self.on_free: Callable[[int], None] = lambda key: None  # called with a freed storage's key
        self.on_fold: Callable[[], None] = lambda: None  # called before `History.fold` searches
        self.addresses: dict[int, int] = {}  # of storages without a block, by id
        self.raw_blocks: dict[int, int] = {}  # ids of blocks without a tensor, by address
        self.overwritten: dict[int, str] = {}  # torch's error for a use of a storage, by its key
        self._timeline = timeline
        self._references: dict[int, _Reference] = {}
        self._on_free = self._storage_freed
        self._freed: list[int] = []  # ids of storages that the next `settle` frees
        self._uses: dict[int, set[int]] = {}  # streams by id, as `record_stream` records them
        self._pending: list[tuple[float, int]] = []  # heap of (end of the last use, id)
        self._stashed: dict[int, float] = {}  # end of the collective by id

    # --- requests

    def allocate(
        self, tensor: Tensor, site: Site, kind: MemKind, num_bytes: int | None = None
    ) -> None:
        """Allocate the storage of a meta tensor, unless it is allocated already. `num_bytes` None
        means the storage's own size, and 0 makes no request to the allocator. Reports name `site`,
        its origin, and `kind`, its use. If the GPU has no room, raise `torch.OutOfMemoryError`."""
        self._return_blocks()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        num_storages = len(self.storages.num_bytes)
        size = storage.nbytes() if num_bytes is None else num_bytes
        index = self.storages.add(size, site, kind)
        self._hold(storage, index)
        self._request(index)
        self.pace.add_objects(OBJECTS_PER_STORAGE * (len(self.storages.num_bytes) - num_storages))

    def _hold(self, storage: torch.UntypedStorage, index: int) -> None:
        """Record that `storage` has id `index`; when Python frees it, free its GPU memory too."""
        key = storage._cdata
        self.live[key] = index
        reference = self._references[index] = _Reference(storage, self._on_free)
        reference.index, reference.key = index, key

    def adopt(self, tensor: Tensor, index: int) -> None:
        """Attach `tensor` to the storage `index`, which has no tensor; they are freed together."""
        self._hold(tensor.untyped_storage(), index)

    def hold_at(self, storage: torch.UntypedStorage, address: int) -> None:
        """Put `storage` on the GPU at `address`, in a CUDA graph's memory: nothing is allocated."""
        index = self.storages.add(0, Site("", "", ""), self.kind)
        self._hold(storage, index)
        self._request(index)
        self.addresses[index] = address

    def detach(self, key: int) -> None:
        """Free the block of the storage with `storage_key` `key`; the storage keeps its address."""
        index = self.live[key]
        address, storage = self.address_of(key), self._references.pop(index)()
        self._release(index)
        if storage is not None:
            self.hold_at(storage, address)

    def address_of(self, key: int) -> int:
        """Return the address of the live storage with this `storage_key`; 0 if it is empty."""
        index = self.live[key]
        block = self.blocks.get(index)
        return self.addresses.get(index, 0) if block is None else block.address

    def blocks_of(self, pool: int) -> dict[int, Block]:
        """Return {storage id: block in use} of `pool`, the number of a stream or private pool."""
        self.settle()
        return {index: block for index, block in self.blocks.items() if block.stream == pool}

    def restore(
        self, pool: int, live: Mapping[int, int], owners: Collection[int], site: Site
    ) -> None:
        """Free the blocks in use of the private pool `pool`, and allocate `live`, {address: bytes},
        in it. `owners` has the `storage_key` of each storage that gets a block. The storage gets
        the block at its own address (`address_of`). Ids of blocks without an owner are added to
        `raw_blocks`, by address. Reports name `site` as the origin of all blocks."""
        for index in self.blocks_of(pool):
            reference = self._references.get(index)
            if reference is None:
                self.free(index)
            else:
                self.detach(reference.key)
        self.settle()
        for address, num_bytes in live.items():
            index = self.raw_blocks[address] = self.storages.add(num_bytes, site, self.kind)
            self.blocks[index] = self.allocator.malloc_at(address, num_bytes, pool)
            self.log.open.append(index)
            self.storages.streams[index] = pool
            self.history.allocated(index, site)
        for key in owners:
            index = self.raw_blocks.pop(self.address_of(key))
            old_index = self.live[key]
            storage = self._references.pop(old_index)()
            self._release(old_index)
            if storage is not None:
                self._hold(storage, index)

    def allocate_like(self, index: int) -> int:
        """Allocate a storage like storage `index`, but without a tensor; return the new id."""
        storages = self.storages
        copy = storages.add(storages.num_bytes[index], storages.sites[index], storages.kinds[index])
        self._request(copy)
        return copy

    def allocate_workspace(self, num_bytes: int, site: Site) -> int:
        """Allocate a workspace for `site`; return its id, for `free`. Raise as `allocate`."""
        self._return_blocks()
        index = self.storages.add(num_bytes, site, MemKind.WORKSPACE)
        self._request(index)
        return index

    def _request(self, index: int) -> None:
        """Request memory for the storage `index`, and log it. Raise as `allocate`."""
        self.settle()
        num_bytes = self.storages.num_bytes[index]
        pool = self._timeline.pool
        if num_bytes:
            old_reserved_bytes = self.allocator.reserved_bytes
            try:
                self.blocks[index] = self.allocator.malloc(num_bytes, pool)
            except OutOfMemory:
                self.num_ooms += 1
                self.history.emptied()  # the allocator emptied its cache before it raised
                self.refused_id = index
                self.refused = num_bytes, self.storages.sites[index], self.allocator.reserved_bytes
                message = out_of_memory(self.gpu, self.allocator, num_bytes)
                raise torch.OutOfMemoryError(message) from None
            if self._timeline.is_slow and self.allocator.reserved_bytes > old_reserved_bytes:
                segment_bytes = self.allocator.reserved_bytes - old_reserved_bytes
                self._timeline.advance_host(segment_us(segment_bytes), 0.0)
        self.log.open.append(index)
        if pool != MAIN:
            self.storages.streams[index] = pool
        if num_bytes:
            self.history.allocated(index, self.storages.sites[index])

    def try_workspace(self, num_bytes: int, site: Site) -> bool:
        """Try a workspace of `num_bytes`: allocate it, free it, and empty the cache. Return True.
        If the GPU has less than `num_bytes` outside the allocator, change nothing and return False.
        The allocator can still refuse the request, for example if its own limit is lower. Then
        halve the size until it fits. `generate_and_filter_plans` of Conv_v8.cpp (torch 2.11) and
        its caller do so."""
        self.settle()
        if num_bytes > self.gpu.limit_bytes - self.allocator.reserved_bytes:
            return False
        old_num_ooms = self.num_ooms  # a refused try is no error of the script
        while num_bytes:
            try:
                index = self.allocate_workspace(num_bytes, site)
                self.storages.tried.add(index)
                self.free(index)
                break
            except torch.OutOfMemoryError:
                num_bytes //= 2
        self.num_ooms = old_num_ooms
        self.settle()
        self.allocator.empty_cache()
        self.history.emptied()
        return True

    def resize(self, tensor: Tensor, num_bytes: int, site: Site, kind: MemKind) -> None:
        """Allocate `num_bytes` for the storage of `tensor`, then free its old block, as
        `resize_bytes_cuda` does. `kind` is its use from then on. The origin stays the operator and
        module that allocated it first, or is `site` if it was not on the GPU."""
        with self.lock:
            storage = tensor.untyped_storage()
            index = self.live.pop(storage._cdata, None)
            if index is not None and num_bytes:
                old_site = self.storages.sites[index]
                site = Site(old_site.op, old_site.module, site.phase)
            storage.resize_(num_bytes)
            self._move(index, tensor, site if num_bytes else Site("", "", site.phase), kind)

    def grow(self, tensor: Tensor, site: Site) -> None:
        """Allocate a larger block for the storage of `tensor`, which has grown, then free the old
        one (cuda/Resize.cpp). `site` is the origin of the request."""
        with self.lock:
            index = self.live.pop(tensor.untyped_storage()._cdata, None)
            kind = self.kind if index is None else self.storages.kinds[index]
            self._move(index, tensor, site, kind)

    def _move(self, index: int | None, tensor: Tensor, site: Site, kind: MemKind) -> None:
        """Allocate a new block for the storage of `tensor`, then free its old block. `index` is the
        id of the storage with the old block, or None if the storage had no block on the GPU.
        `site` and `kind` are the origin and the use of the new block."""
        self.allocate(tensor, site, kind)
        if index is not None:
            self._references.pop(index, None)
            self._release(index)

    def use_driver(self, event: int) -> None:
        """Log that the driver takes memory: `event` is `FIRST_KERNEL`, or `NEW_HANDLE` of cuBLAS.
        Do nothing unless `logs_driver`."""
        if self.logs_driver:
            self.settle()
            if event == FIRST_KERNEL:
                self.allocator.addresses.load_first_kernel()
            else:
                self.allocator.addresses.create_cublas_handle()
            self.log.open.append(event)

    # --- frees

    def free(self, index: int) -> None:
        """Free storage `index` at the next `settle`. Garbage collection may call this anywhere."""
        self._freed.append(index)

    def _storage_freed(self, reference: _Reference) -> None:
        index, key = reference.index, reference.key
        self._release(index)
        self._references.pop(index, None)
        self.addresses.pop(index, None)
        if self.live.get(key) == index:
            del self.live[key]
            self.overwritten.pop(key, None)
            self.on_free(key)
        self.pace.add_objects(-OBJECTS_PER_STORAGE)

    def _release(self, index: int) -> None:
        """Free storage `index`. Its block returns later if a stream or collective still uses it."""
        if self.is_immediate:
            self._uses.pop(index, None)
        elif index in self._stashed:
            self.storages.stashed.add(index)
        else:
            timeline = self._timeline
            events = map(timeline.event, self._uses.pop(index, ()))
            end_time = max(map(timeline.at_pace, events), default=0.0)
            if end_time > timeline.at_pace(timeline.host_time):
                self.storages.deferred.add(index)
                heappush(self._pending, (end_time, index))
        self.free(index)

    def _return_blocks(self) -> None:
        """Return to their pools the deferred blocks whose streams are done (`process_events`)."""
        timeline, pending = self._timeline, self._pending
        while pending:
            end_time, index = pending[0]  # the earliest
            if end_time > timeline.at_pace(timeline.host_time):
                return
            heappop(pending)
            self._return(index)

    def _return(self, index: int) -> None:
        """Return the block of storage `index` to its pool, after its last use by a stream."""
        self.settle()
        block = self.blocks.pop(index, None)
        if block is not None:
            if index in self.storages.stashed:  # the allocator does not defer these
                self.allocator.free(block)
            else:
                self.allocator.complete(block)
        self.log.open.append(return_of(index))

    def settle(self) -> None:
        """Free the memory of storages that Python has freed since the last call."""
        if self._freed:
            with self.lock:  # any thread of the script may be here
                self._settle()

    def _settle(self) -> None:
        freed = self._freed
        position = 0  # no iterator: garbage collection can append to `freed` at any time
        log, blocks, storages = self.log.open, self.blocks, self.storages
        while position < len(freed):
            index = freed[position]
            position += 1
            log.append(free_of(index))
            if index in storages.stashed:
                continue
            if index in storages.deferred:
                block = blocks.get(index)
                if block is not None:
                    self.allocator.defer(block)
                continue
            block = blocks.pop(index, None)
            if block is not None:
                self.allocator.free(block)
        del freed[:position]
        if self.history.is_fold_due:
            self.on_fold()
            self.history.fold()

    # --- uses by other streams and by collectives

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Record that `stream` uses the storage of `tensor`, as `Tensor.record_stream` does."""
        index = self.id_of(tensor)
        if index is None:
            return
        home = self.storages.streams.get(index, MAIN)
        if self._timeline.streams_of_pools.get(home, home) != stream:
            self._uses.setdefault(index, set()).add(stream)

    def stash(self, index: int, end_time: float) -> None:
        """Record that a collective uses storage `index` until `end_time` (microseconds)."""
        self._stashed[index] = end_time

    def unstash(self, until: float | None = None) -> None:
        """Free storages stashed for collectives that ended by `until` (microseconds). At the start
        of a new collective, `until` is None. None stands for the host's time less a period of
        NCCL's watchdog."""
        if until is None:
            until = self._timeline.host_time[0] - WATCHDOG_US
        indices = sorted(index for index, end_time in self._stashed.items() if end_time <= until)
        for index in indices:
            del self._stashed[index]
            if index in self.storages.stashed:
                self._return(index)

    # --- what is stored

    def id_of(self, tensor: Tensor) -> int | None:
        """Return the id of the storage of `tensor`; None if it is not on the GPU."""
        return self.live.get(storage_key(tensor))

    def label(self, tensor: Tensor, kind: MemKind) -> None:
        """Set the kind (use, in reports) of the storage of `tensor`, if it is on the GPU."""
        index = self.id_of(tensor)
        if index is not None:
            self.storages.kinds[index] = kind
