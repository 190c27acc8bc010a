"""CUDA graphs, private pools, and the memory of torch's CUDA graph trees.

`torch.compile(mode="reduce-overhead")` runs torch's own `torch/_inductor/cudagraph_trees.py`: it
runs a compiled function in a pool of its own, then captures it, then replays the graph. Replaced
here are the C++ functions that it calls (torch/csrc/cuda/Module.cpp and
c10/cuda/CUDACachingAllocator.cpp of torch 2.11).
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.allocator.blocks import FIRST_PRIVATE_POOL
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.work import Work
from memest.estimator.tensors.patches import Patches, constant, refusing, setting
from memest.estimator.tensors.placement import GPU, storage_key

Pool = tuple[int, int]  # id of a private pool: 0 and its number


def _number_of(pool: Pool) -> int:
    return FIRST_PRIVATE_POOL + pool[1]  # in the allocator


class Captures:
    """Private memory pools of a run: ids, numbers of users, and captures of CUDA graphs into
    pools."""

    def __init__(self, mode: CudaSimMode) -> None:
        self.mode = mode
        self.num_users = Counter[Pool]()  # graphs and `MemPool` objects of each pool
        self._numbers = itertools.count(1)
        self._states: Any = WeakKeyDictionary()  # seed and offset on the GPU, by generator

    def new_pool(self) -> Pool:
        """Return the id (0, number) of a new private pool, as torch's `graph_pool_handle` does."""
        return 0, next(self._numbers)

    def begin(self, pool: Pool) -> None:
        """Begin a capture: until it ends, allocate from the private pool with id `pool`."""
        self.register(torch.cuda.default_generators[GPU.device.index])
        self.num_users[pool] += 1
        self.mode.timeline.capture_into(_number_of(pool))

    def register(self, generator: torch.Generator) -> None:
        """Allocate seed and offset of `generator` on the GPU, as
        `CUDAGeneratorState::register_graph` does (CUDAGeneratorImpl.cpp, torch 2.11). They are
        freed with the last graph."""
        if generator not in self._states:
            tensors = (torch.empty(1, dtype=torch.int64, device=GPU.device) for _ in range(2))
            self._states[generator] = tuple(tensors)

    def release(self, pool: Pool) -> None:
        """Record that a user of `pool` was freed. A pool without users can free its segments."""
        self.num_users[pool] -= 1
        if not self.num_users[pool]:
            self.mode.memory.allocator.released_pools.add(_number_of(pool))
        if not any(self.num_users.values()):
            self._states.clear()


class CudaGraph:
    """CUDA graph of the virtual GPU, as `torch.cuda.CUDAGraph`; a replay requests no memory."""

    captures: ClassVar[Captures]

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: Pool | None = None
        self._work: Work | None = None

    def capture_begin(self, pool: Pool | None = None, **options: Any) -> None:
        self._pool = pool or self.captures.new_pool()
        self.captures.begin(self._pool)
        self.captures.mode.work.capture()

    def capture_end(self) -> None:
        """End the capture; raise `RuntimeError` if none has begun."""
        if self._pool is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        self.captures.mode.timeline.capture_into(None)
        self._work = self.captures.mode.work.captured()

    def replay(self) -> None:
        """Record a launch of all captured kernels in one call; they request no memory."""
        if self._work is not None:
            self.captures.mode.work.add(self._work)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.captures.register(generator)

    instantiate = enable_debug_mode = debug_dump = constant(None)

    def reset(self) -> None:
        """Release the graph's pool; its memory can be freed if no graph or `MemPool` uses it."""
        if self._pool is not None:
            self.captures.release(self._pool)
            self._pool = None

    def pool(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def __del__(self) -> None:
        self.reset()


class MemPool:
    """Private memory pool, in place of `torch.cuda.MemPool`; it keeps its free segments while it
    exists. When it is deleted, torch frees them immediately, memest at the next `empty_cache`."""

    captures: ClassVar[Captures]

    def __init__(self, allocator: Any = None, *options: bool, **kwargs: bool) -> None:
        if allocator is not None or any((*options, *kwargs.values())):
            name = "allocator"
            if allocator is None:  # the first positional option is `use_on_oom`
                name = min(kwargs, default="use_on_oom")
            refusing(f"torch.cuda.MemPool({name}=...)")()
        self.id = self.captures.new_pool()
        self.captures.num_users[self.id] += 1

    def use_count(self) -> int:
        """Return the number of users of the pool: this object and CUDA graphs."""
        return self.captures.num_users[self.id]

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the pool's segments as `torch.cuda.memory_snapshot` does, always without
        traces."""
        return torch._C._cuda_memorySnapshot((*self.id, include_traces))["segments"]

    def __del__(self) -> None:
        if hasattr(self, "id"):
            self.captures.release(self.id)


class _PoolFunctions:
    """Methods `NAME` that replace the functions `torch._C._cuda_NAME`, with which torch's CUDA
    graph trees use private pools."""

    def __init__(self, mode: CudaSimMode) -> None:
        self._mode, self._memory = mode, mode.memory

    def beginAllocateCurrentThreadToPool(self, device: int, pool: Pool) -> None:
        self._mode.timeline.serve_from(_number_of(pool))

    beginAllocateCurrentStreamToPool = beginAllocateToPool = beginAllocateCurrentThreadToPool

    def endAllocateToPool(self, device: int, pool: Pool) -> None:
        self._mode.timeline.serve_from(None)

    def releasePool(self, device: int, pool: Pool) -> None:
        """Do nothing, since a CUDA graph of the graph trees still uses the pool."""

    def getCheckpointState(self, device: int, pool: Pool) -> tuple[int, dict[int, int]]:
        """Return (number of the pool, {address: bytes} of its allocated blocks)."""
        number = _number_of(pool)
        blocks = self._memory.blocks_of(number).values()
        return number, {block.address: block.num_bytes for block in blocks}

    def setCheckpointPoolState(self, device: int, state: Any, stale: Any, live: list[int]) -> None:
        """Restore the pool's blocks to `state`, a result of `getCheckpointState`. `live` has the
        keys (`_cdata`) of the storages that own the blocks; `stale` is ignored."""
        site = self._mode.attribution.site("setCheckpointPoolState")
        number, blocks = state
        with self._memory.lock:
            self._memory.restore(number, blocks, live, site)

    def checkPoolLiveAllocations(self, device: int, pool: Pool, addresses: set[int]) -> bool:
        blocks = self._memory.blocks_of(_number_of(pool)).values()
        return {block.address for block in blocks} == addresses


class _StorageFunctions:
    """Methods `NAME` that replace the functions `torch._C._NAME`, for tensors of CUDA graph trees.
    A tensor that a replayed graph writes has an address in the pool and no block of its own."""

    def __init__(self, mode: CudaSimMode) -> None:
        self._memory = mode.memory

    def construct_storage_from_data_pointer(
        self, address: int, device: torch.device, num_bytes: int
    ) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(num_bytes, device="meta")  # type: ignore[no-untyped-call]
        self._memory.hold_at(storage, address)
        return storage

    def construct_CUDA_Tensor_From_Storage_And_Metadata(self, meta: Any, storage: Any) -> Tensor:
        with _disable_current_modes():
            tensor = torch.empty(0, dtype=meta["dtype"], device="meta")
            return tensor.set_(storage, meta["storage_offset"], meta["size"], meta["stride"])

    def tensors_data_ptrs_at_indices_equal(
        self, tensors: Sequence[Any], addresses: Sequence[int], indices: Sequence[int]
    ) -> bool:
        return all(tensors[i].data_ptr() == addresses[i] for i in indices)

    def has_Standard_Deleter(self, key: int) -> bool:
        return self._memory.live.get(key) in self._memory.blocks

    def free_And_Remove_DeleterFn(self, key: int) -> None:
        self._memory.detach(key)

    def set_storage_access_error_msg(self, tensor: Tensor, message: str) -> None:
        self._memory.overwritten[storage_key(tensor)] = message

    def set_storage_data_ptr_access_error_msg(self, key: int, message: str) -> None:
        self._memory.overwritten[key] = message


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Replace torch's CUDA graphs, private pools and functions of graph trees by the ones here."""
    captures = Captures(mode)
    patches.set_methods(_PoolFunctions(mode), torch._C, prefix="_cuda_")
    patches.set_methods(_StorageFunctions(mode), torch._C, prefix="_")

    @contextmanager  # as in torch: Dynamo of 2.14 reads `use_mem_pool.__wrapped__`
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        """Within the block, serve requests of this thread from `pool`; `device` is ignored."""
        with setting(mode.timeline, "mem_pool", _number_of(pool.id)):
            yield

    members = {"captures": captures, "__module__": "torch.cuda"}
    pool_members = {
        "MemPool": type("MemPool", (MemPool,), members),
        "use_mem_pool": use_mem_pool,
        "MemPoolContext": refusing("torch.cuda.memory.MemPoolContext"),
    }
    for owner in (torch.cuda, torch.cuda.memory):
        patches.set_all({k: v for k, v in pool_members.items() if hasattr(owner, k)}, owner)
    graphs = torch.cuda.graphs
    graph = type("CUDAGraph", (CudaGraph,), members)
    graph_members = {"CUDAGraph": graph, "graph_pool_handle": captures.new_pool}
    patches.set_all(graph_members, torch.cuda, graphs)
    patches.set(graphs, "_cuda_isCurrentStreamCapturing", lambda: mode.timeline.is_capturing)
    patches.set(torch.cuda.graph, "default_capture_stream", None)
