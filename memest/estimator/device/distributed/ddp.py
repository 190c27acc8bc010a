"""DistributedDataParallel's reducer: buckets that gradients go into and come from.

torch's Python code of `DistributedDataParallel` runs as it is. Its reducer is C++, which asks for
gradients on a device, so `Reducer` mirrors `torch/csrc/distributed/c10d/reducer.cpp` of torch 2.11
(the name of the function it stands for is in each docstring). In the first step every gradient of
a dtype shares one bucket (without `find_unused_parameters`); the forward after the first summed
backward makes the buckets anew, in the order in which gradients arrived.

The sums take no time here: NCCL has a stream of its own, and nothing is freed that waits for it.
What has been summed may live on: `ProcessGroupNCCL` keeps a collective's tensors on a shelf of its
work (`stashed_for_allocator_safety_`), the watchdog passes on the shelves of what is done whenever
it looks, and the next collective empties those. So the buckets of the first step, which are made
anew in the second forward, may live until its backward sums one of the new ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from memest.errors import UnsupportedError
from memest.estimator.device.live import LiveRecorder
from memest.estimator.device.patches import Patches
from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import MAIN
from memest.estimator.device.tensors import Place

FIRST_BUCKET_BYTES = 1 << 20
"""`kDefaultFirstBucketBytes` (`reducer.hpp`)."""

WATCHDOG_US = 100_000
"""How often the watchdog looks (`kWatchdogThreadSleepMillis`, `ProcessGroupNCCL.cpp`)."""

BEST_SHARE = 0.85
"""Of the peak rates that an optimizer's kernels come to at best: 0.84 for AdamW over 740 million
parameters in 32 bits on an H100; `scripts/measure_pace.py` measures it.
"""

BROADCASTS_IN_FLIGHT = 2
"""`max_in_flight` of `broadcast_coalesced` (`comm.cpp`)."""

NOT_FINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This "
    "error indicates that your module has parameters that were not used in producing loss. You can "
    "enable unused parameter detection by passing the keyword argument "
    "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by making "
    "sure all `forward` function outputs participate in calculating loss."
)
"""As `Reducer::ensure_prior_reduction_finished` words it."""


class NotFinished(RuntimeError):
    """A reduction waits for gradients that never came."""

    def __init__(self, missing: Sequence[nn.Parameter]) -> None:
        super().__init__(NOT_FINISHED)
        self.missing_shapes = [tuple(parameter.shape) for parameter in missing]


class Reducer:
    """`dist.Reducer` of the virtual GPU; its parameters are those of C++'s constructor."""

    session: ClassVar[LiveRecorder]

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool],
        bucket_bytes_cap: int,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        param_to_name_mapping: Any = None,
        first_bucket_bytes_cap: int = FIRST_BUCKET_BYTES,
        *options: Any,
    ) -> None:
        if any(expect_sparse_gradients):
            raise UnsupportedError(
                "sparse gradients under `DistributedDataParallel` cannot be simulated",
                hint="make the embeddings with `sparse=False`",
            )
        self._params = list(params)
        self._group = process_group
        self._caps = [first_bucket_bytes_cap, bucket_bytes_cap]
        self._finds_unused = find_unused_parameters
        self._is_static = False
        self._is_view = gradient_as_bucket_view
        self._arrivals: list[int] = []
        self._has_rebuilt = self._has_summed_anew = False
        self._num_iterations = 0
        self._summed_at = 0.0
        self._expects_hooks = self._waits_for_end = False
        self._needs_finalize = False
        self._missing: set[int] = set()
        self._unused: set[int] = set()
        recorder = self.session
        self._stream = recorder.accumulates_on = recorder.stream
        self._make_buckets(bucket_indices)
        if find_unused_parameters:
            self._note_used()
        self._index_of = {id(p): i for i, p in enumerate(self._params)}
        self._add_hooks()

    def _add_hooks(self) -> None:
        me = weakref.ref(self)

        def arrived(parameter: nn.Parameter) -> None:
            reducer = me()
            if reducer is not None:
                reducer._arrived(parameter)

        params: list[Any] = self._params
        hooks = [p.register_post_accumulate_grad_hook(arrived) for p in params]
        self._remove = weakref.finalize(self, _remove_all, hooks)

    # what DistributedDataParallel asks for

    def prepare_for_forward(self) -> None:
        """As `prepare_for_forward`: counts iterations.

        Shelves are empty once there was a collective in the next iteration.
        """
        self._num_iterations += 1
        if self._has_summed_anew:
            self.session.clear_shelf()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """As `prepare_for_backward`: the next backward sums gradients."""
        self._ensure_finished()
        self._expects_hooks = True
        self._missing = set(range(len(self._params)))
        self._waiting = [set(members) for members in self._buckets]
        self._unused = set()
        if self._finds_unused and not self._is_static:
            self._unused = self._not_reached(outputs)
        self._needs_finalize = False
        for index in self._unused:
            self._ready(index)

    def _rebuild_buckets(self) -> bool:
        """As `rebuild_buckets`: once, in the order of arrival."""
        self._ensure_finished()
        if not self._should_rebuild or not self._arrivals:
            return False
        order: list[Tensor] = [self._params[i] for i in self._arrivals]
        buckets, _ = c10d._compute_bucket_assignment_by_size(
            [*order], self._caps, [False] * len(order), self._arrivals
        )
        self._sync_order(len(self._params) + 1, len(buckets))
        self._has_rebuilt = True
        self._arrivals = []
        if self._may_be_kept():
            self._shelve_buckets()
        self._views.clear()
        self._make_buckets(buckets)
        return True

    def _shelve_buckets(self) -> None:
        for view in self._views.values():
            self.session.shelve(view)

    def _may_be_kept(self) -> bool:
        """Whether the watchdog may not have looked since the sums of the first step were done."""
        return self.session.host_time[0] - self._summed_at < BEST_SHARE * WATCHDOG_US

    def set_logger(self, logger: Any) -> None:
        """Nothing is logged."""

    def _set_static_graph(self) -> None:
        """As `set_static_graph`: which parameters are used is looked for in the first step."""
        self._is_static = True
        self._note_used()

    def _note_used(self) -> None:
        """As `initialize_local_used_map`."""
        params = self._params
        self._used = torch.empty(len(params), dtype=torch.int32, device=params[0].device)
        self.session.label(self._used, MemKind.BUCKETS)

    @torch.no_grad()
    def _delay_all_reduce(self) -> None:
        """As `delay_all_reduce`: of a static graph's first iteration, at the end of its backward.

        All gradients are copied then, and are parameters that got none taken for zero.
        """
        self._needs_finalize = True
        for index, parameter in enumerate(self._params):
            if parameter.grad is None:
                self._unused.add(index)
            else:
                self._copy_in(parameter)
        self._missing.clear()
        self._finalize()

    def _remove_autograd_hooks(self) -> None:
        self._remove()

    def _check_reducer_finalized(self) -> None:
        self._ensure_finished()

    def _set_forward_pass_work_handle(self, work: Any, divides: bool) -> None:
        """Uneven inputs: all ranks have as many here."""

    def _install_post_backward_futures(self, futures: Any) -> None:
        """What is waited for at the end of a backward has come."""

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """Nothing is logged."""

    # the backward

    @property
    def _should_rebuild(self) -> bool:
        return (self._is_static or not self._finds_unused) and not self._has_rebuilt

    def _ensure_finished(self) -> None:
        if self._expects_hooks and self._needs_finalize:
            raise NotFinished([self._params[i] for i in sorted(self._missing)])

    def _not_reached(self, outputs: Sequence[Tensor]) -> set[int]:
        """As `search_unused_parameters`: no path leads from `outputs` to their accumulators."""
        seen: set[Any] = set()
        found: set[int] = set()
        waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                found.add(self._index_of.get(id(variable), -1))
            waiting += [following for following, _ in node.next_functions if following is not None]
        return set(range(len(self._params))) - found

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter) -> None:
        """As `autograd_hook`: the gradient of `parameter` is summed."""
        self._note_stream(parameter)
        if not self._expects_hooks:
            return
        if self._is_static and self._num_iterations == 1:
            return  # until `_delay_all_reduce`
        index = self._index_of[id(parameter)]
        if self._should_rebuild:
            self._arrivals.append(index)
        self._needs_finalize = True
        if index in self._missing:
            self._copy_in(parameter)
            self._ready(index)

    def _note_stream(self, parameter: nn.Parameter) -> None:
        """The engine: the accumulator's stream waits for the model's, and uses the gradient."""
        recorder = self.session
        if self._stream == MAIN:
            return
        recorder.stream_waits(self._stream, recorder.event(MAIN))
        assert parameter.grad is not None
        recorder.record_stream(parameter.grad, self._stream)
        if not self._waits_for_end:
            self._waits_for_end = True
            _at_end_of_backward(self._join_streams)

    def _join_streams(self) -> None:
        """The engine: at the end of a backward its caller's stream waits for the others."""
        self._waits_for_end = False
        self.session.stream_waits(MAIN, self.session.event(self._stream))

    def _copy_in(self, parameter: nn.Parameter) -> None:
        """As `mark_variable_ready_dense`."""
        view, grad = self._views[id(parameter)], parameter.grad
        assert grad is not None
        if _is_alias(grad, view):
            view.mul_(1 / self._group.size())
            return
        torch.mul(grad, 1 / self._group.size(), out=view)
        if self._is_view:
            parameter.grad = view

    def _ready(self, index: int) -> None:
        """As `mark_variable_ready`: the last one ends the reduction with the backward."""
        self._missing.discard(index)
        waiting = self._waiting[self._bucket_of[index]]
        waiting.discard(index)
        if not waiting and not self._may_be_kept():  # the bucket is summed, so shelves are emptied
            self.session.clear_shelf()
        if not self._missing:
            if torch._C._current_graph_task_id() == -1:  # no backward, as all are unused
                return
            _at_end_of_backward(self._finalize)

    @torch.no_grad()
    def _finalize(self) -> None:
        """As `finalize_backward`: what is summed goes back into the gradients."""
        self._expects_hooks = self._needs_finalize = False
        self._has_summed_anew = self._has_rebuilt
        if not self._has_rebuilt:
            self._summed_at = self.session.event(MAIN)[0]
        if self._waits_for_end:
            self._join_streams()
        if self._is_view:
            return
        for index, parameter in enumerate(self._params):
            if index in self._unused:
                continue
            view = self._views[id(parameter)]
            if parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def _make_buckets(self, buckets: Iterable[Sequence[int]]) -> None:
        """As `initialize_buckets`: a flat tensor each, with views of the parameters' shapes."""
        self._views: dict[int, Tensor] = {}
        self._buckets = [list(members) for members in buckets]
        self._bucket_of = {index: i for i, ms in enumerate(self._buckets) for index in ms}
        for members in self._buckets:
            params = [self._params[i] for i in members]
            flat = torch.empty(
                sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device
            )
            self.session.label(flat, MemKind.BUCKETS)
            start = 0
            for parameter in params:
                piece = flat[start : start + parameter.numel()]
                self._views[id(parameter)] = _in_the_shape_of(parameter, piece)
                start += parameter.numel()
                self._move_grad(parameter)

    @torch.no_grad()
    def _move_grad(self, parameter: nn.Parameter) -> None:
        """As `initialize_bucket_views`: a gradient that is there goes into the new bucket."""
        grad, view = parameter.grad, self._views[id(parameter)]
        if self._is_view and grad is not None and not _is_alias(grad, view):
            view.copy_(grad)
            parameter.grad = view

    def _sync_order(self, *counts: int) -> None:
        """As `sync_bucket_indices`: the order of rank 0 is sent to all."""
        device = self._params[0].device
        sent = [torch.empty(n, dtype=torch.int32, device=device) for n in counts]
        del sent
        self.session.host_waits(self.session.event(MAIN))  # and reads it


class Logger:
    """`dist.Logger`: takes everything, and keeps nothing."""

    def __init__(self, reducer: Any) -> None:
        pass

    def _get_ddp_logging_data(self) -> Any:
        return SimpleNamespace(strs_map={}, ints_map={})

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def install(patches: Patches, recorder: LiveRecorder) -> None:
    """Let `torch.nn.parallel.DistributedDataParallel` find the mirror."""

    def broadcast_coalesced(
        group: Any, tensors: Sequence[Tensor], buffer_size: int, source: int = 0
    ) -> None:
        with torch.no_grad():
            _broadcast([t for t in tensors if recorder.place(t) is Place.CARD], buffer_size)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "a communication hook of `DistributedDataParallel` cannot be simulated",
            hint="run the script without it; see docs/run.md",
        )

    made: Any = type("Reducer", (Reducer,), {"session": recorder})
    patches.set(dist, "Reducer", made)
    patches.set(dist, "Logger", Logger)
    patches.set(dist, "_broadcast_coalesced", broadcast_coalesced)
    patches.set(dist, "_verify_params_across_processes", _verify_params)
    patches.set(dist, "_register_comm_hook", refuse)
    patches.set(dist, "_register_builtin_comm_hook", refuse)


def _verify_params(group: Any, params: Sequence[Tensor], logger: Any = None) -> None:
    """As `verify_params_across_processes`: their number is gathered, flat and one by one, and then
    their sizes and strides are sent from rank 0.
    """
    device = params[0].device
    given = torch.empty(1, dtype=torch.int64, device=device)
    found = [torch.empty_like(given) for _ in range(group.size())]
    flat = torch.empty(group.size(), dtype=torch.int64, device=device)
    del flat
    num_told = 2 * sum(parameter.dim() for parameter in params)
    told = torch.empty(num_told, dtype=torch.int64, device=device)
    del told, found, given


def _broadcast(tensors: Sequence[Tensor], buffer_bytes: int) -> None:
    """As `broadcast_coalesced`: buckets are flattened, sent, and copied back, two in flight."""
    if not tensors:
        return
    buckets, _ = c10d._compute_bucket_assignment_by_size(list(tensors), [buffer_bytes])
    in_flight: list[Tensor | None] = []
    for indices in buckets:
        if len(in_flight) >= BROADCASTS_IN_FLIGHT:
            in_flight.pop(0)
        members = [tensors[i].detach() for i in indices]
        whole = len(members) > 1
        in_flight.append(torch.cat([t.contiguous().view(-1) for t in members]) if whole else None)
    while in_flight:
        in_flight.pop(0)


def _in_the_shape_of(parameter: Tensor, piece: Tensor) -> Tensor:
    """As `initialize_bucket_views`: with the parameter's strides where it is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense.default(parameter):
        return piece.as_strided(parameter.size(), parameter.stride(), piece.storage_offset())
    return piece.view(parameter.shape)


def _is_alias(a: Tensor, b: Tensor) -> bool:
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return bool(same_storage and a.storage_offset() == b.storage_offset())


def _at_end_of_backward(action: Any) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(action)


def _remove_all(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()
