"""Requests of CUDA kernels: what one call allocates and frees, in order."""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memest.estimator.gpu.memory import Memory
from memest.estimator.gpu.messages import BENCHMARK
from memest.estimator.gpu.timeline import Timeline
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.matmul import LT_WORKSPACE_BYTES, CublasWorkspaces
from memest.estimator.ops.registry import Op, ValueOf
from memest.estimator.ops.temporaries import OLDEST, TRIED, Scratch
from memest.estimator.tensors.lines import Notes
from memest.estimator.tensors.placement import INSIDE
from memest.estimator.tensors.storages import NEW_HANDLE, Coverage, Site

aten = torch.ops.aten

_empty_strided = torch.empty_strided  # not the virtual GPU's, which looks for `device="cuda"`


def _empty_meta(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _empty_strided(size, stride, dtype=dtype, device="meta")


@dataclass(slots=True, unsafe_hash=True)
class Recipe:
    """Outputs and allocations of an operator call, reused by calls with the same shapes."""

    specs: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]
    """Sizes, strides and dtype of each output; None is a gradient that was not requested."""

    is_tuple: bool  # True if the call returns a tuple or list
    events: tuple[tuple[int | None, int | None], ...]
    """(bytes, position of the output; None for a temporary, `OLDEST` or `TRIED`) in order. Bytes of
    None mean the output's own size, negative bytes a free."""

    is_partial: bool  # True if something about the kernel is not modelled
    has_empty: bool  # an output takes no memory: it is empty, or only the meta kernel returns it
    work: int | None = field(default=None, compare=False)  # number of the work in the log of time

    def make_outputs(self) -> Any:
        """Return new meta tensors like the outputs of the call: a tuple, or one tensor."""
        outputs = [None if spec is None else _empty_meta(*spec) for spec in self.specs]
        return tuple(outputs) if self.is_tuple else outputs[0]


class KernelCalls:
    """Allocator requests of operator calls, made in `memory` as CUDA's kernels make them. `site_of`
    returns the origin of the memory that an operator allocates; `value_of` the known values of a
    tensor, or None. `coverage` counts calls whose kernels are not fully modelled."""

    def __init__(
        self, gpu: Gpu, memory: Memory, timeline: Timeline, site_of: Callable[[Any], Site],
        value_of: ValueOf, notes: Notes,
    ) -> None:  # fmt: skip
        self.coverage = Coverage()
        self._gpu = gpu
        self._memory = memory
        self._timeline = timeline
        self._site_of = site_of
        self._value_of = value_of
        self._notes = notes
        self.recipes: dict[Any, Recipe] = {}
        self._repeatable: set[int] = set()
        self._searched: set[Recipe] = set()
        self._cublas = CublasWorkspaces(gpu.capability)
        self._cublas_ids: list[int] = []
        self._threads_with_handle: set[str] = set()

    def key_of(self, op: Op, args: Any, kwargs: Any) -> Any:
        """Return the key of a call in the cache `recipes`. Return None if no call of `op` has been
        cached so far, whatever its shapes. Return None also for a call that has no key, such as one
        with a sparse tensor."""
        if id(op.func) not in self._repeatable:
            return None
        try:
            return _cache_key(op, args, kwargs)
        except RuntimeError:  # a sparse tensor has no strides
            return None

    def new_recipe(self, op: Op, args: Any, kwargs: Any, out: Any, key: Any) -> Recipe:
        """Return the recipe of the call `op(*args, **kwargs)` with result `out`. Cache it if later
        calls can reuse it. `key` is the result of `key_of`."""
        self.coverage.has_convolutions |= op.is_convolution
        num_objects, num_recipes = gc.get_count()[0], len(self.recipes)
        numbers = () if op.from_values is None else op.from_values(self._value_of, args)
        recipe = recipe_of(self._gpu, op, args, kwargs, out, numbers)
        if _can_repeat(op, args, out):
            self._repeatable.add(id(op.func))
            self.recipes[key or _cache_key(op, args, kwargs)] = recipe
        if len(self.recipes) > num_recipes:
            # negative if Python has collected garbage meanwhile
            self._memory.pace.add_objects(max(0, gc.get_count()[0] - num_objects))
        return recipe

    def request(self, op: Op, args: Any, kwargs: Any, out: Any, recipe: Recipe) -> None:
        """Allocate the outputs and temporaries of one call, and free its temporaries. Raise
        `torch.OutOfMemoryError` if an allocation does not fit the GPU."""
        memory = self._memory
        if recipe.is_partial:
            self.coverage.unmodelled[op.name] += 1
        temporary: list[int] = []
        try:
            self._allocate(op, args, kwargs, out, recipe, temporary)
        finally:  # also if one of them was out of memory
            for index in reversed(temporary):
                memory.free(index)
        if recipe.has_empty:
            for tensor in filter(is_on_gpu, results_of(out)):
                if tensor.untyped_storage()._cdata not in memory.live:
                    memory.allocate(tensor, self._site_of(op.func), memory.kind, 0)

    def _allocate(
        self, op: Op, args: Any, kwargs: Any, out: Any, recipe: Recipe, temporary: list[int]
    ) -> None:
        """Allocate and free as `recipe` lists; append ids of temporaries left to `temporary`."""
        memory = self._memory
        results = results_of(out)
        site: Site | None = None
        events = self._events_without_tries(recipe) if op.is_convolution else recipe.events
        for num_bytes, position in events:
            if position is None or position == OLDEST:
                assert num_bytes is not None
                site = site or self._site_of(op.func)
                if num_bytes < 0:
                    sizes = memory.storages.num_bytes
                    candidates = temporary if position == OLDEST else reversed(temporary)
                    freed = next(i for i in candidates if sizes[i] == -num_bytes)
                    temporary.remove(freed)
                    memory.free(freed)
                else:
                    temporary.append(memory.allocate_workspace(num_bytes, site))
            elif (tensor := results[position]).untyped_storage()._cdata not in memory.live:
                site = site or self._site_of(op.func)
                memory.allocate(tensor, site, memory.kind, num_bytes)
        if op.takes_handle:
            # a thread has its own handle, a handle a workspace per stream (CublasHandlePool.cpp)
            thread = "main" if torch._C._current_autograd_node() is None else "backward"
            handle = thread, self._timeline.stream
            kept_sizes, passing_sizes = self._cublas.bytes_for(op.func, args, kwargs, handle)
            for num_bytes in passing_sizes:
                temporary.append(memory.allocate_workspace(num_bytes, self._site_of(op.func)))
            if (kept_sizes or passing_sizes) and thread not in self._threads_with_handle:
                self._threads_with_handle.add(thread)
                memory.use_driver(NEW_HANDLE)
            for num_bytes in kept_sizes:
                index = memory.allocate_workspace(num_bytes, self._site_of(op.func))
                self._cublas_ids.append(index)

    def _events_without_tries(self, recipe: Recipe) -> Iterator[tuple[int | None, int | None]]:
        """Yield the events of `recipe` that the caller has to apply. Workspaces that cuDNN tries
        (`TRIED`) are not among the yielded events. At the recipe's first call, this method itself
        allocates and frees the tried workspaces, as `cudnn.benchmark` does. Later it skips them.

        An event is a pair (bytes, position of the output), such as:

            (512, None)     allocate a temporary of 512 bytes
            (-512, None)    free the latest temporary of 512 bytes
            (-512, OLDEST)  free the oldest temporary of 512 bytes
            (512, 0)        allocate the first output, with 512 bytes
            (None, 0)       allocate the first output, with the bytes of its storage
        """
        is_new = recipe not in self._searched
        self._searched.add(recipe)
        is_over = False
        for num_bytes, position in recipe.events:
            if position != TRIED:
                is_over = False
                yield num_bytes, position
            elif is_new and not is_over:
                assert num_bytes is not None
                self._notes.add(BENCHMARK)
                is_over = self._memory.try_workspace(num_bytes, self._site_of("cudnn.benchmark"))

    def clear_workspaces(self) -> None:
        """Free cuBLAS's workspaces, as Lightning does before a fit; later calls allocate again.
        cuBLASLt's are freed last (`clearCublasWorkspaces`, CublasHandlePool.cpp of torch 2.11)."""
        sizes = self._memory.storages.num_bytes
        for index in sorted(self._cublas_ids, key=lambda i: sizes[i] == LT_WORKSPACE_BYTES):
            self._memory.free(index)
        self._cublas_ids = []
        self._cublas = CublasWorkspaces(self._gpu.capability)


def recipe_of(
    gpu: Gpu, op: Op, args: Any, kwargs: Any, out: Any, numbers: tuple[int, ...]
) -> Recipe:
    """Return the recipe of the call `op(*args, **kwargs)` on `gpu` with result `out`, meta tensors.
    If allocations depend on values of tensors, `numbers` are from these (`Op.from_values`)."""
    is_tuple = isinstance(out, list | tuple)
    results = results_of(out)
    specs = tuple(
        [
            None if t is None else (t.size(), t.stride(), t.dtype)
            for t in results
            if t is None or is_on_gpu(t)
        ]
    )
    requests = op.requests(op.call(args, kwargs, out, gpu, numbers)) if op.requests else None
    is_partial = not op.is_modelled(args, kwargs, gpu)
    events: list[tuple[int | None, int | None]]
    if requests is None or isinstance(requests, Scratch):
        requests = requests or Scratch()
        output_bytes = requests.outputs or (None,) * len(results)
        events = [(n, None) for n in requests.before]
        events += [(output_bytes[i], i) for i, t in enumerate(results) if is_on_gpu(t)]
        events += [(n, None) for n in requests.after]
    else:
        events = [(e.num_bytes, e.output) for e in requests]
    allocated = {position for _, position in events}
    has_empty = any(i not in allocated for i, t in enumerate(results) if is_on_gpu(t))
    return Recipe(specs, is_tuple, tuple(events), is_partial, has_empty)


def _can_repeat(op: Op, args: Any, out: Any) -> bool:
    """Return whether later calls with the same shapes can reuse this call's recipe. They can if the
    operator is a plain in-place one, or if each output has a storage of its own. Storages are
    compared, since the schema of `_unsafe_view` does not mark its result as a view."""
    if op.is_plain_in_place:
        return out is args[0]
    if op.is_mutable or any(r.alias_info is not None for r in op.func._schema.returns):
        return False
    outputs = out if isinstance(out, list | tuple) else (out,)
    results = [result for result in outputs if result is not None]
    if not results or not all(map(is_on_gpu, results)):
        return False
    storages = {t.untyped_storage()._cdata for t in results}
    if any(isinstance(a, Tensor) and a.untyped_storage()._cdata in storages for a in args):
        return False
    is_own = all(
        t.storage_offset() == 0
        and t.untyped_storage().nbytes() == dense_bytes(t.size(), t.stride(), t.element_size())
        for t in results
    )
    return len(storages) == len(results) and is_own and op.shaped_by is None


def results_of(out: Any) -> tuple[Any, ...]:
    """Return an operator's result `out`, one value or nested lists, as a flat tuple."""
    if not isinstance(out, list | tuple):
        return (out,)
    flat: list[Any] = []
    for item in out:
        flat += item if isinstance(item, list | tuple) else (item,)
    return tuple(flat)


def is_on_gpu(value: Any) -> bool:
    """Return whether `value` is a meta tensor, which stands for one on the GPU."""
    return isinstance(value, Tensor) and value.device.type == "meta"


def _cache_key(op: Op, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the cache key of a call: operator, default dtype, autocast, shapes and options. Float
    arguments of a plain in-place operator are left out, since they differ in each step."""
    state = torch.get_default_dtype(), INSIDE.autocast_block
    if op.is_plain_in_place:
        args = [float if type(value) is float else value for value in args]
        kwargs = {k: float if type(v) is float else v for k, v in kwargs.items()}
    return (id(op.func), *state, *map(_signature, args), *map(_signature, kwargs.items()))


_SEQUENCES = (list, tuple)


def _signature(value: Any) -> Any:
    """Return a hashable key: a tensor's size, strides, dtype and alignment; else type and value."""
    if isinstance(value, Tensor):
        offset = value.storage_offset() % 16
        return value.size(), value.stride(), value.dtype, value.device.type, offset
    if isinstance(value, _SEQUENCES):
        return tuple([_signature(item) for item in value])
    return type(value), value


def dense_bytes(size: Iterable[int], stride: Iterable[int], item_bytes: int) -> int:
    """Return bytes of the smallest storage for a tensor of this size and stride at offset 0, with
    elements of `item_bytes`.

    >>> dense_bytes((2, 3), (3, 1), 4), dense_bytes((2, 0), (1, 1), 4)
    (24, 0)
    """
    last_offset = 0
    for n, step in zip(size, stride, strict=True):
        if n == 0:
            return 0
        last_offset += (n - 1) * step
    return (last_offset + 1) * item_bytes
