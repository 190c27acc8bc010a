"""DistributedDataParallel's reducer: buckets that gradients go into and come from.

torch's Python code of `DistributedDataParallel` runs as it is. Its reducer is C++, which asks for
gradients on a device, so `Reducer` mirrors `torch/csrc/distributed/c10d/reducer.cpp` of torch 2.11
(the name of the function it stands for is in each docstring). In the first step every gradient of
a dtype shares one bucket (without `find_unused_parameters`); the forward after the first summed
backward makes the buckets anew, in the order in which gradients arrived.

The sums take no time here: NCCL has a stream of its own, and nothing is freed that waits for it.
What has been summed may live on (`works.py`): the buckets of the first step, which are made anew in
the second forward, may live until its backward sums one of the new ones. With a communication hook
(`hooks.py`) a bucket is what the hook makes of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from memest.errors import UnsupportedError
from memest.estimator.device.distributed.hooks import (
    CommHook,
    GradBucket,
    all_reduced,
    builtin_hook,
)
from memest.estimator.device.distributed.start import broadcast, verify_params
from memest.estimator.device.live import LiveRecorder
from memest.estimator.device.patches import Patches
from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import MAIN
from memest.estimator.device.tensors import Place

FIRST_BUCKET_BYTES = 1 << 20
"""`kDefaultFirstBucketBytes` (`reducer.hpp`)."""

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
        self._hook: CommHook | None = None
        self._futures: dict[int, Any] = {}
        self._results: dict[int, Tensor] = {}
        self._next = 0
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
            self.session.clear_shelf(self._summed_at)

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """As `prepare_for_backward`: the next backward sums gradients."""
        self._ensure_finished()
        self._expects_hooks = True
        self._missing = set(range(len(self._params)))
        self._waiting = [set(members) for members in self._buckets]
        self._next = 0
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
        if self._hook is None:
            self._shelve_buckets()
        self._sync_order(len(self._params) + 1, len(buckets))
        self._has_rebuilt = True
        self._arrivals = []
        self._futures.clear()
        self._results.clear()
        self._flats.clear()
        self._views.clear()
        self._make_buckets(buckets)
        return True

    def _shelve_buckets(self) -> None:
        for flat in self._flats:
            self.session.shelve(flat, self._summed_at)

    def register(self, hook: CommHook) -> None:
        """As `register_comm_hook`: `hook` reduces each bucket from now on.

        Raises:
            RuntimeError: there is one already; the message is torch's.
        """
        if self._hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self._hook = hook

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        return (self._hook or self._run_allreduce_hook)(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """As `run_allreduce_hook`: what is done where nobody has registered another."""
        return all_reduced(self._group, bucket.buffer())

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
        for bucket in range(len(self._buckets)):
            self._reduce(bucket)
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
            if self._hook is None:
                view.mul_(1 / self._group.size())
            return
        if self._hook is None:
            torch.mul(grad, 1 / self._group.size(), out=view)
        else:
            view.copy_(grad)
        if self._is_view:
            parameter.grad = view

    def _ready(self, index: int) -> None:
        """As `mark_variable_ready`: buckets are reduced in their order, as they fill; the last one
        ends the reduction with the backward.
        """
        self._missing.discard(index)
        self._waiting[self._bucket_of[index]].discard(index)
        while self._next < len(self._buckets) and not self._waiting[self._next]:
            self._reduce(self._next)
            self._next += 1
        if not self._missing:
            if torch._C._current_graph_task_id() == -1:  # no backward, as all are unused
                return
            _at_end_of_backward(self._finalize)

    def _reduce(self, bucket: int) -> None:
        """As `all_reduce_bucket`."""
        self.session.works.another()
        if self._hook is not None:
            members = self._buckets[bucket]
            self._futures[bucket] = self._hook(
                GradBucket(
                    self._flats[bucket],
                    [self._views[id(self._params[i])] for i in members],
                    [self._params[i] for i in members],
                    bucket,
                    is_last=bucket == len(self._buckets) - 1,
                )
            )

    @torch.no_grad()
    def _finalize(self) -> None:
        """As `finalize_backward`: what is reduced goes back into the gradients."""
        self._expects_hooks = self._needs_finalize = False
        self._has_summed_anew = self._has_rebuilt
        if not self._has_rebuilt:
            self._summed_at = self.session.event(MAIN)[0]
        if self._waits_for_end:
            self._join_streams()
        for bucket, members in enumerate(self._buckets):
            reduced = self._reduced(bucket)
            for index in members:
                self._take_back(index, reduced)

    def _reduced(self, bucket: int) -> Mapping[int, Tensor]:
        """By parameter what a bucket came to: `populate_bucket_views_out` of a hook's result,
        which lives until there is the next.
        """
        if self._hook is None:
            return self._views
        future = self._futures[bucket]
        future.wait()
        result = _tensor_of(future.value(), self._flats[bucket])
        self._results[bucket] = result
        return dict(self._pieces(bucket, result))

    def _take_back(self, index: int, reduced: Mapping[int, Tensor]) -> None:
        """As `finalize_bucket_dense`."""
        parameter = self._params[index]
        view, out = self._views[id(parameter)], reduced[id(parameter)]
        if self._is_view:
            if not _is_alias(view, out):
                view.copy_(out)
        elif index in self._unused:
            return
        elif parameter.grad is None:
            parameter.grad = out.clone()
        else:
            parameter.grad.copy_(out)

    def _make_buckets(self, buckets: Iterable[Sequence[int]]) -> None:
        """As `initialize_buckets`: a flat tensor each, with views of the parameters' shapes."""
        self._views: dict[int, Tensor] = {}
        self._buckets = [list(members) for members in buckets]
        self._bucket_of = {index: i for i, ms in enumerate(self._buckets) for index in ms}
        self._flats: list[Tensor] = []
        for bucket, members in enumerate(self._buckets):
            params = [self._params[i] for i in members]
            flat = torch.empty(
                sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device
            )
            self.session.label(flat, MemKind.BUCKETS)
            self._flats.append(flat)
            self._views |= self._pieces(bucket, flat)
            for parameter in params:
                self._move_grad(parameter)

    def _pieces(self, bucket: int, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """What of `flat` is each parameter's, in its shape."""
        start = 0
        for index in self._buckets[bucket]:
            parameter = self._params[index]
            piece = flat[start : start + parameter.numel()]
            yield id(parameter), _in_the_shape_of(parameter, piece)
            start += parameter.numel()

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
        self.session.works.another()


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
            broadcast([t for t in tensors if recorder.place(t) is Place.CARD], buffer_size)

    def register(reducer: Reducer, state: Any, hook: Any) -> None:
        reducer.register(partial(hook, state))

    def register_builtin(reducer: Reducer, kind: Any) -> None:
        reducer.register(partial(builtin_hook(kind), reducer._group))

    made: Any = type("Reducer", (Reducer,), {"session": recorder})
    patches.set(dist, "Reducer", made)
    patches.set(dist, "Logger", Logger)
    patches.set(dist, "_broadcast_coalesced", broadcast_coalesced)
    patches.set(dist, "_verify_params_across_processes", verify_params)
    patches.set(dist, "_register_comm_hook", register)
    patches.set(dist, "_register_builtin_comm_hook", register_builtin)


def _tensor_of(value: Any, flat: Tensor) -> Tensor:
    """As `PythonCommHook::parseHookResult`: a tensor, or a list of one.

    Raises:
        RuntimeError: a hook's result is none, or not of as many elements as its bucket.
    """
    found = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if not isinstance(found, Tensor):
        raise RuntimeError(f"expected the hook's result is a Tensor or a TensorList got {value}")
    if found.numel() != flat.numel():
        raise RuntimeError(
            f"a communication hook gave {found.numel()} elements for a bucket of {flat.numel()}"
        )
    return found.reshape(-1)


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
