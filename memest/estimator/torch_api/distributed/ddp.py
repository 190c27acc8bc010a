"""DistributedDataParallel: torch's own reducer, run on tensors without data.

The installed Python and C++ decide the buckets, when they are rebuilt, which parameters are unused,
and the input of a communication hook. Four things depend on the GPU or on NCCL, and are done here:

- Tensors that C++ makes for the reducer are on the GPU.
- `_NcclGroup` runs the reducer's collectives on a stream of their own; NCCL may stash a summed
  bucket (`gpu/pending.py`).
- A gradient is accumulated on the stream on which the reducer was made.
- A future of a communication hook is complete on another stream, for which the model's waits.

Two differences to a GPU remain: the reducer has no timer, and the copy of `local_used_map` blocks.
"""

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from memest.errors import UnsupportedError
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.gpu.timeline import MAIN
from memest.estimator.tensors.patches import Patches, setting
from memest.estimator.tensors.placement import INSIDE, tensors_in
from memest.estimator.tensors.storages import MemKind

_ProcessGroup: Any = c10d.ProcessGroup
_Reducer: Any = c10d.Reducer

_MISSING = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""Indices of parameters in the message of `Reducer::ensure_prior_reduction_finished`."""


class NotFinished(RuntimeError):
    """torch's error for parameters without a gradient after a backward, with their shapes."""

    def __init__(self, message: str, missing: Sequence[nn.Parameter]) -> None:
        super().__init__(message)
        self.missing_shapes = [tuple(parameter.shape) for parameter in missing]


class _NcclGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group that simulates NCCL for the C++ reducer. Its collectives return finished work,
    since the reducer waits in C++, which calls no Python function."""

    def __init__(self, mode: CudaSimMode, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._mode = mode
        self.group = group
        self.is_rebuilt = self.is_summed_again = False
        self._first_buckets: set[int] = set()
        self.summed_at = -1.0  # microseconds when the last of `_first_buckets` is summed

    def getBackendName(self) -> str:
        return "nccl"

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        """Sum the gradient buckets `tensors` over the ranks, and return a finished `Work`.

        NCCL keeps the buckets of a collective allocated ("stashed") until `Work.wait()` is called.
        The C++ reducer does not call `Work.wait()`, but waits for the future of the `Work`. So the
        buckets stay stashed. This matters only for the first buckets, which new buckets replace
        once. The ids of the first buckets are stored here, for the call of `Memory.stash` in
        `broadcast`.
        """
        self._mode.works.communicate(self.group)
        self.is_summed_again = self.is_rebuilt
        if not self.is_rebuilt:
            self.summed_at, _ = self._mode.timeline.event(MAIN)
            ids = map(self._mode.memory.id_of, tensors)
            self._first_buckets.update(index for index in ids if index is not None)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> Any:
        """Gather `tensors`, the parameters' sizes, into `outputs`, which C++ reads immediately.
        Return the finished `Work`."""
        work = self.group.allgather(outputs, tensors, options)
        work.wait()
        return work

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        """Return a finished `Work` of a broadcast from rank 0. Nothing is sent, since every rank
        has equal values, and no time passes. DistributedDataParallel broadcasts weights at the
        start. Later it broadcasts the order of the gradient buckets that replace the first buckets.
        In the second case, `Memory.kind`, the kind of new memory, is `MemKind.BUCKETS`. Then call
        `Memory.stash` for the first buckets, which NCCL keeps until the new ones are summed."""
        mode = self._mode
        if mode.memory.kind is MemKind.BUCKETS:
            for index in self._first_buckets:
                mode.memory.stash(index, self.summed_at)
            self._first_buckets.clear()
            self.is_rebuilt = True
            mode.works.release_due()
            for tensor in tensors:
                mode.memory.label(tensor, MemKind.WORKSPACE)
        return _done(tensors)


def _done(tensors: list[Tensor]) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return c10d.__dict__["_create_work_from_future"](future)


class Reducer(_Reducer):  # type: ignore[misc]
    """torch's C++ reducer of DistributedDataParallel, for parameters on the virtual GPU."""

    session: ClassVar[CudaSimMode]

    def __init__(self, params: Sequence[nn.Parameter], *args: Any, **options: Any) -> None:
        indices, limits, process_group, are_sparse, *others = args
        if any(are_sparse):
            raise UnsupportedError(
                "sparse gradients under `DistributedDataParallel` cannot be simulated",
                hint="make the embeddings with `sparse=False`",
            )
        mode = self.session
        mode.timeline.accumulates_on = mode.timeline.stream
        self._params = params
        self._group = _NcclGroup(mode, process_group)
        self._accumulation = _Accumulation(mode, params)
        weakref.finalize(self, self._accumulation.remove)
        with self._buckets_on_gpu():
            super().__init__(params, indices, limits, self._group, are_sparse, *others, **options)

    @contextmanager
    def _buckets_on_gpu(self) -> Iterator[None]:
        """Within the block, place tensors that the C++ reducer makes on the GPU. They are labelled
        as gradient buckets (`MemKind.BUCKETS`)."""
        with setting(self.session.memory, "kind", MemKind.BUCKETS), _on_gpu():
            yield

    def prepare_for_forward(self) -> None:
        """Prepare a forward, as torch does. Also free the old gradient buckets if new ones have
        replaced them and have been summed. The reducer may replace (rebuild) its buckets once,
        after the first backward. NCCL keeps the old buckets allocated until the new ones are summed
        (validation/scripts/measured_ranks.json). Tensors of a communication hook are not freed
        here. They stay until NCCL's watchdog runs."""
        super().prepare_for_forward()
        if self._group.is_summed_again:
            self.session.memory.unstash(self._group.summed_at)

    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets in the order in which gradients were ready, if torch decides so;
        return whether it did. Raise `NotFinished` if a parameter got no gradient in the last
        backward."""
        try:
            with self._buckets_on_gpu():
                return super()._rebuild_buckets()
        except RuntimeError as error:
            match = _MISSING.search(str(error))
            if match is None:
                raise
            missing = [self._params[int(index)] for index in match[1].split()]
            raise NotFinished(str(error), missing) from error

    def _set_static_graph(self) -> None:
        with self._buckets_on_gpu():
            super()._set_static_graph()

    def _delay_all_reduce(self) -> None:
        self._accumulation.join()
        with _on_gpu():
            super()._delay_all_reduce()

    def _remove_autograd_hooks(self) -> None:
        self._accumulation.remove()
        super()._remove_autograd_hooks()

    def _set_forward_pass_work_handle(self, work: Any, divides: bool) -> None:
        """Do nothing. With uneven inputs (`join`) torch stores `work`, a sum of the active ranks,
        and whether it divides gradients by the initial number of ranks. Simulated ranks all have
        equally many inputs."""


class _Accumulation:
    """Gradient accumulation on another stream than the model's, as autograd's engine does it. The
    accumulation stream is the one on which the reducer made its `AccumulateGrad` nodes. It waits
    for the model's stream before it adds a gradient. The gradient is recorded on the accumulation
    stream (`record_stream`). At the end of the backward, the model's stream waits for the
    accumulation stream (`GraphTask::exec_post_processing`)."""

    def __init__(self, mode: CudaSimMode, params: Iterable[nn.Parameter]) -> None:
        self._mode = mode
        self._stream = mode.timeline.stream
        self._waits_for_end = False
        self._hooks: list[Any] = []
        if self._stream != MAIN:
            parameters: Iterable[Any] = params
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._move_to_stream) for p in parameters
            ]

    def _move_to_stream(self, parameter: nn.Parameter) -> None:
        mode = self._mode
        mode.timeline.stream_waits(self._stream, mode.timeline.event(MAIN))
        assert parameter.grad is not None
        mode.memory.record_stream(parameter.grad, self._stream)
        if not self._waits_for_end:
            self._waits_for_end = True
            _at_end_of_backward(self.join)

    def join(self) -> None:
        """Make the model's stream wait until the gradients of a backward are accumulated."""
        if self._waits_for_end:
            self._waits_for_end = False
            self._mode.timeline.stream_waits(MAIN, self._mode.timeline.event(self._stream))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Make `torch.nn.parallel.DistributedDataParallel` run on the virtual GPU."""

    def register_builtin(reducer: Reducer, kind: Any) -> None:
        """Register the Python communication hook that does what torch's C++ hook `kind` does."""
        is_fp16 = kind == c10d.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if is_fp16 else default_hooks.allreduce_hook
        register(reducer, reducer._group.group, hook)

    def register(reducer: Reducer, state: Any, hook: Any) -> None:
        c10d._register_comm_hook(reducer, state, _with_wait(hook))

    reducer_class: Any = type("Reducer", (Reducer,), {"session": mode})
    patches.set(dist, "Reducer", reducer_class)
    patches.set(c10d.Logger, "set_runtime_stats_and_log", lambda logger: None)  # times of CUDA
    for name in ("_broadcast_coalesced", "_verify_params_across_processes"):
        patches.set(dist, name, partial(_on_nccl, mode, getattr(c10d, name)))
    patches.set(dist, "_register_comm_hook", register)
    patches.set(dist, "_register_builtin_comm_hook", register_builtin)


def _with_wait(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a communication hook that calls `hook`, and waits for its futures at the end of the
    backward. The wait raises `RuntimeError` if a result has fewer elements than its bucket."""
    futures: list[tuple[Any, int]] = []

    def wait() -> None:
        for future, num_elements in futures:
            sizes = [tensor.numel() for tensor in tensors_in((future.wait(),))]
            if sizes and sizes[0] < num_elements:
                raise RuntimeError(
                    f"a communication hook gave {sizes[0]} elements for a bucket of {num_elements}"
                )
        futures.clear()

    def run(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        futures.append((future, bucket.buffer().numel()))
        if bucket.is_last():
            if torch._C._current_graph_task_id() == -1:  # outside of a backward
                wait()
            else:
                _at_end_of_backward(wait)
        return future

    return run


def _on_nccl(mode: CudaSimMode, function: Callable[..., Any], group: Any, *args: Any) -> Any:
    """Call the C++ function `function` with `args` and, in place of `group`, a group that simulates
    NCCL. Tensors that it makes are on the GPU."""
    with _on_gpu(), torch.no_grad():
        return function(_NcclGroup(mode, group), *args)


def _on_gpu() -> AbstractContextManager[None]:
    """Return a context in which meta tensors that C++ makes are placed on the virtual GPU."""
    return setting(INSIDE, "composite", True)


def _at_end_of_backward(action: Any) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(action)
