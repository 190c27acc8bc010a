"""ZeRO 3's order of gathers: what is fetched before a module runs, ahead of it, and let go after.

Mirrors DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py
(`PartitionedParameterCoordinator`): the first micro-batch is recorded, the later ones prefetch what
comes next in that record.

Left out: leaf modules (none are set by default), parameters that a module returns.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import Enum

import torch
from torch import nn

from memest.estimator.device.streams import Time
from memest.estimator.parallel.zero import GPU
from memest.estimator.parallel.zero3_parameters import (
    Handle,
    ParameterStore,
    Partitioned,
    Status,
)

# DeepSpeed 0.19.8, runtime/zero/config.py; Lightning leaves them as they are.
PREFETCH_NUMEL = 50_000_000
PERSISTENCE_NUMEL = 100_000
MAX_LIVE_NUMEL = 1_000_000_000
MAX_REUSE_NUMEL = 1_000_000_000

# partitioned_param_coordinator.py, `__init__`.
MAX_FETCH_EVENTS = 2

_NEVER = -(10**10)


class _Mode(Enum):
    INVALID = 0
    RECORD = 1
    COMPLETE = 2


class Coordinator:
    """Fetches and releases the parameters of modules.

    Args:
        store: the parameters.
        root: whose submodules run.
        stream: on which parameters are gathered.
    """

    def __init__(self, store: ParameterStore, root: nn.Module, stream: int) -> None:
        self.store = store
        self.recorder = store.recorder
        self.stream = stream
        self._ids = {module: index for index, module in enumerate(root.modules())}
        self._own: dict[nn.Module, dict[int, Partitioned]] = {}
        for module in self._ids:
            found = (store.find(p) for p in module.parameters(recurse=False))
            self._own[module] = {one.index: one for one in found if one is not None}
        self._mode = _Mode.INVALID
        self._modules: list[nn.Module] = []
        self._order: list[tuple[Partitioned, int]] = []
        self._queue: deque[tuple[Partitioned, int]] = deque()
        self._fetched_for: defaultdict[Partitioned, int] = defaultdict(lambda: _NEVER)
        self._in_flight: dict[Partitioned, Handle] = {}
        self._events: deque[Time] = deque()
        self._releases: dict[tuple[nn.Module, int], frozenset[int]] = {}
        self._backwards: dict[nn.Module, None] = {}
        """Modules whose backward runs, the innermost last."""

        self._recomputed: defaultdict[nn.Module, dict[int, Partitioned]] = defaultdict(dict)
        self._step = 0
        self._num_available = 0

    def register(self, module: nn.Module, one: Partitioned) -> None:
        """`register_external_parameter`: `module` uses a parameter of another."""
        self._own[module][one.index] = one

    def begin(self) -> None:
        """`reset_step`: another micro-batch."""
        self._drop_in_flight()
        if self._mode is not _Mode.COMPLETE:
            self._compare_with_others(len(self._modules))
        if self._mode is _Mode.RECORD:
            self._order = [
                (one, step) for step, module in enumerate(self._modules) for one in self._of(module)
            ]
            for _ in range(2):
                self._compare_with_others(len(self._order))
            self._mode = _Mode.COMPLETE
        elif self._mode is _Mode.INVALID:
            self._mode = _Mode.RECORD
        self._queue = deque(self._order)
        self._fetched_for.clear()
        self._step = 0
        self._num_available = 0

    def fetch(self, module: nn.Module, *, forward: bool) -> None:
        """Before `module` runs: its parameters, and a bucket of those that come next."""
        if self._mode is _Mode.COMPLETE and not self._is_expected(module):
            self._invalidate()
        if self._mode is _Mode.RECORD:
            self._modules.append(module)
        if not forward:
            self._backwards[module] = None
        needed = self._of(module)
        self._gather(needed)
        is_recomputed = forward and torch._C._current_graph_task_id() != -1
        for one in needed:
            one.module_ids.add(self._ids[module])
            if is_recomputed and self._backwards and not one.param.requires_grad:
                owner = next(reversed(self._backwards))
                self._recomputed[owner][one.index] = one
                one.module_ids.add(self._ids[owner])
            self._wait_for(one)
        recorder = self.recorder
        recorder.stream_waits(recorder.stream, recorder.event(self.stream))
        if self._mode is _Mode.COMPLETE:
            self._prefetch(needed)
        self._step += 1

    def release(self, module: nn.Module, *, forward: bool) -> None:
        """After `module` ran: its parameters, unless they are needed again soon."""
        params = {one.index: one for one in self._of(module)}
        if self._mode is _Mode.COMPLETE:
            let_go = set(self._releasable(module, self._step))
        else:
            let_go = set(params)
        if not forward:
            recomputed = self._recomputed.pop(module, {})
            let_go.update(i for i, one in recomputed.items() if not one.is_persistent)
            params |= recomputed
            self._backwards.pop(module, None)
        for one in params.values():
            one.module_ids.discard(self._ids[module])
            if one.index in let_go:
                self._release(one)

    def release_leftovers(self) -> None:
        """`release_backward_leftovers`: of modules whose inputs have no gradient."""
        while self._backwards:
            module, _ = self._backwards.popitem()
            params = {one.index: one for one in self._of(module)}
            params |= self._recomputed.pop(module, {})
            for one in params.values():
                one.module_ids.discard(self._ids[module])
                if not one.is_persistent:
                    self._release(one)

    def release_all(self) -> None:
        """`release_and_reset_all`: before the optimizer's step."""
        for one in self.store.params:
            handle = self._in_flight.pop(one, None)
            if handle is not None:
                handle.wait()
            one.module_ids.clear()
            self._release(one)

    def _compare_with_others(self, num_ints: int) -> None:
        """`assert_ints_same_as_other_ranks` (runtime/zero/utils.py): the length, then the list."""
        for numel in (1, num_ints):
            sent = torch.empty(numel, dtype=torch.int64, device=GPU)
            self.recorder.host_waits(self.recorder.event(self.recorder.stream))
            del sent

    def _of(self, module: nn.Module) -> list[Partitioned]:
        own = self._own[module]
        return [own[index] for index in sorted(own)]

    def _is_expected(self, module: nn.Module) -> bool:
        return self._step < len(self._modules) and self._modules[self._step] is module

    def _invalidate(self) -> None:
        """`_invalidate_trace`: this micro-batch is not as the one recorded."""
        self._mode = _Mode.INVALID
        self._modules, self._order = [], []
        self._queue.clear()
        self._fetched_for.clear()
        self._drop_in_flight()

    def _drop_in_flight(self) -> None:
        for one, handle in self._in_flight.items():
            handle.wait()
            self._release(one)
        self._in_flight.clear()

    def _gather(self, params: Iterable[Partitioned]) -> None:
        """`__all_gather_params_`."""
        away = [one for one in params if one.status is Status.AWAY]
        if not away:
            return
        self._num_available += sum(one.numel for one in away)
        with self.recorder.on_stream(self.stream):
            handle = self.store.gather(away)
        for one in away:
            self._in_flight[one] = handle

    def _wait_for(self, one: Partitioned) -> None:
        """Take a gathered parameter over; the host is at most a few gathers ahead of the GPU."""
        handle = self._in_flight.pop(one, None)
        if handle is None:
            return
        with self.recorder.on_stream(self.stream):
            if len(self._events) > MAX_FETCH_EVENTS:
                self.recorder.host_waits(self._events.popleft())
            handle.wait()
            self._events.append(self.recorder.event(self.stream))

    def _prefetch(self, needed: Iterable[Partitioned]) -> None:
        """Take the module's own parameters off the queue, then gather what follows in it."""
        fresh = {one for one in needed if self._fetched_for[one] < self._step}
        taken: set[Partitioned] = set()
        while self._queue and len(taken) < len(fresh):
            one, step = self._queue.popleft()
            self._fetched_for[one] = step
            taken.add(one)
        limit = min(MAX_LIVE_NUMEL - self._num_available, PREFETCH_NUMEL)
        ahead: set[Partitioned] = set()
        numel = 0
        while self._queue and numel < limit:
            one, step = self._queue.popleft()
            self._fetched_for[one] = max(self._fetched_for[one], step)
            if one.status is Status.AWAY and one not in ahead:
                ahead.add(one)
                numel += one.numel
        self._gather(ahead)

    def _release(self, one: Partitioned) -> None:
        """`__release_param`."""
        if one.status is Status.THERE and not one.module_ids:
            self.store.free(one)
            self._num_available -= one.numel

    def _releasable(self, module: nn.Module, step: int) -> frozenset[int]:
        """`__params_to_release`, which remembers its first answer."""
        known = self._releases.get((module, step))
        if known is None:
            known = self._releases[module, step] = frozenset(self._not_reused(module, step))
        return known

    def _not_reused(self, module: nn.Module, step: int) -> Iterator[int]:
        candidates = {
            one.index
            for one in self._of(module)
            if not one.is_persistent and self._fetched_for[one] <= step
        }
        numel = 0
        for later in self._modules[step:]:
            if numel >= MAX_REUSE_NUMEL or not candidates:
                break
            for one in self._of(later):
                candidates.discard(one.index)
                numel += one.numel
        yield from candidates
