"""Later steps of a plan, as repetitions of the logged forwards and backwards of its first step.

A micro-batch makes the same requests in every step, so only the loop and the optimizer's step run
again. It may make others, and each step runs as a whole, if in the first step

1. the model keeps a tensor that it made, such as a table of positions;
2. the host draws random numbers, such as the layers to drop;
3. a value is guessed, since the report counts the guesses;
4. the model reads a value that the step changes: of a weight, or of a buffer such as a flag;
5. the micro-batch frees a tensor that was there before it, other than an input;
6. the model changes a number, a flag or a name that it keeps, such as a count of calls.

The same holds under a strategy, and with batches that differ. Left out: state in other objects.
"""

import pickle
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.replay.call_log import Call, CallRecorder
from memest.estimator.tensors.known_values import FROM_BUFFER, FROM_PARAMETER
from memest.estimator.tensors.placement import CPU, META
from memest.estimator.tensors.storages import MemKind, free_of
from memest.estimator.virtual_gpu import VirtualGpu
from memest.models_meta.assemble import loss_of


@dataclass(frozen=True, slots=True)
class _Position:
    """One point of a run: lengths of its logs (events, work, calls), operators so far (`num_ops`)
    and those not modelled, and the offset of the GPU's random numbers (`random`)."""

    event: int
    work: int
    call: int
    num_ops: int
    unmodelled: Counter[str]
    random: int  # offset of the GPU's generator


@dataclass(slots=True)
class _Stretch:
    """Log entries (events, work, calls) that one forward or one backward made from `start` on.
    `num_ops`, `unmodelled` and `random` are the increases of these fields of `_Position` since
    `start`."""

    start: _Position
    events: list[int]
    work: "array[int]"
    calls: Sequence[Call]
    num_ops: int
    unmodelled: Counter[str]
    random: int


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """A tensor that is alive after the backward: storage id (`index`), shape, strides and dtype."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _MicroBatch:
    """Record of one micro-batch of the first step, from which later steps repeat it. Storages are
    given by their ids. `held` are storages that the graph of the loss keeps alive, in the order of
    their frees. `kept` are workspaces that stay allocated for later steps."""

    forward: _Stretch
    loss: _TensorSpec
    inputs: dict[int, str]  # names of the inputs, by the ids of their storages
    host: Any  # state of the host before the forward
    backward: _Stretch | None = None
    grads: list[tuple[nn.Parameter, _TensorSpec]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # by the graph of the loss, as they are freed
    freed_inputs: set[int] = field(default_factory=set)  # that the backward needed last
    kept: set[int] = field(default_factory=set)  # workspaces of cuBLAS, which later steps use too


class StepRepeater:
    """Runs the micro-batches of a plan's first step, and repeats their log entries in later steps.
    A step has `num_micro_batches`. If `calls` is None, operator calls are not recorded."""

    def __init__(
        self, virtual: VirtualGpu, calls: CallRecorder | None, num_micro_batches: int
    ) -> None:
        self._mode, self._guesses = virtual.mode, virtual.guesses
        self._memory = virtual.mode.memory
        self._calls = calls
        self._num_micro_batches = num_micro_batches
        self._number = 0  # micro-batches that have begun
        self._micro_batches: list[_MicroBatch] = []
        self._repeats = False  # flag: the micro-batches from now on are repeated
        self._running: _MicroBatch | None = None  # its backward has not begun
        self._repeated: _MicroBatch | None = None  # its backward is repeated next
        self._ids: dict[int, int] = {}  # of its storages, by the ids of the first step's
        self._inputs: dict[int, Tensor] = {}  # that the running repetition frees, by those ids
        self._held: list[Tensor] = []  # by the graph of the running repetition's loss

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run each backward of autograd by `_run_backward` until the block ends."""
        graph, name = torch.autograd.graph, "_engine_run_backward"
        wrapper = partial(self._run_backward, graph._engine_run_backward)
        with (
            mock.patch.object(graph, name, wrapper),
            mock.patch.object(torch.autograd, name, wrapper),
        ):
            yield

    def loss_of(self, model: nn.Module, inputs: dict[str, Any], output: str) -> Tensor:
        """Return the loss of the next micro-batch. Its forward runs, or repeats the first step's.

        `inputs` are the keyword arguments of `model`. `output` is "loss", or names the output of
        `model` whose mean is the loss (`assemble.loss_of`).
        """
        step, position = divmod(self._number, self._num_micro_batches)
        self._number += 1
        if self._number == self._num_micro_batches + 1:  # the second step begins
            self._repeats = self._complete_records()
        if self._repeats:
            return self._repeat_forward(self._micro_batches[position], inputs)
        if self._number == 1:
            self._mode.values.watch(model)
            self._versions = _versions(model.parameters()), _versions(model.buffers())
            self._attributes = _attributes(model)
        host, start = self._host_state(), self._position()
        loss = loss_of(model, inputs, output)
        spec = self._spec_of(loss)
        if step == 0 and spec is not None:
            self._model = model
            ids = {self._memory.id_of(v): k for k, v in inputs.items() if isinstance(v, Tensor)}
            input_names = {index: name for index, name in ids.items() if index is not None}
            self._running = _MicroBatch(self._since(start), spec, input_names, host)
        return loss

    def _run_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run autograd's `engine` with its arguments, or repeat the log entries of the first step's
        backward. Return the engine's result; () for a repetition."""
        if self._repeated is not None:
            return self._repeat_backward(self._repeated)
        running, self._running = self._running, None
        if running is None:  # within a backward, or not in the first step
            return engine(*args, **kwargs)
        start = self._position()
        self._add_frees(running, start)
        result = engine(*args, **kwargs)
        running.backward = self._since(start)
        if self._can_repeat(running):
            self._micro_batches.append(running)
        return result

    def _add_frees(self, running: _MicroBatch, end: _Position) -> None:
        """Append to the forward of `running` the frees that directly follow its events in the log,
        up to `end`. They free storages of the forward, such as autocast's copies, except the
        loss."""
        events = running.forward.events
        allocated = {event for event in events if event >= 0} - {running.loss.index}
        log = self._memory.log.events
        position = running.forward.start.event + len(events)
        while position < end.event and log[position] < 0 and free_of(log[position]) in allocated:
            events.append(log[position])
            position += 1

    def _can_repeat(self, micro_batch: _MicroBatch) -> bool:
        """Complete the record of `micro_batch` after its backward, and return whether later steps
        can repeat it."""
        assert micro_batch.backward is not None
        events = (*micro_batch.forward.events, *micro_batch.backward.events)
        allocated = {event for event in events if event >= 0}
        freed = {free_of(event) for event in events if event < 0}
        kinds = self._memory.storages.kinds
        alive = allocated - freed
        for parameter in self._model.parameters():
            if parameter.grad is not None and self._memory.id_of(parameter.grad) in alive:
                grad = self._spec_of(parameter.grad)
                if grad is None:
                    return False
                micro_batch.grads.append((parameter, grad))
        micro_batch.freed_inputs = freed - allocated
        micro_batch.kept = {index for index in alive if kinds[index] is MemKind.WORKSPACE}
        grads = {grad.index for _, grad in micro_batch.grads}
        micro_batch.held = list(alive - micro_batch.kept - grads - {micro_batch.loss.index})
        return (
            micro_batch.freed_inputs <= micro_batch.inputs.keys()
            and micro_batch.loss.index not in freed
            and self._reads_constants()
            and _attributes(self._model) == self._attributes
            and self._host_state() == micro_batch.host
        )

    def _reads_constants(self) -> bool:
        """Return whether all values that the model has read so far are the same in later steps."""
        weights, buffers = self._versions
        sources = self._mode.values.read
        if _versions(self._model.parameters()) != weights or sources & FROM_PARAMETER:
            return False
        return not sources & FROM_BUFFER or _versions(self._model.buffers()) == buffers

    def _complete_records(self) -> bool:
        """Sort the `held` storages of each micro-batch by the time at which they were freed. Return
        whether later steps can repeat all micro-batches."""
        self._memory.settle()
        log = self._memory.log
        for micro_batch in self._micro_batches:
            assert micro_batch.backward is not None
            start = micro_batch.backward.start.event + len(micro_batch.backward.events)
            frees = [free_of(event) for event in log.events[start:]]
            positions = [i for i, index in enumerate(frees) if index in micro_batch.held]
            first, last = min(positions, default=0), max(positions, default=-1)
            held = [index for index in frees[first : last + 1] if index != micro_batch.loss.index]
            if sorted(held) != sorted(micro_batch.held):  # some live on, or others are among them
                return False
            micro_batch.held = held
        return len(self._micro_batches) == self._num_micro_batches and not log.is_full

    def _repeat_forward(self, micro_batch: _MicroBatch, inputs: dict[str, Any]) -> Tensor:
        self._ids = {}
        self._inputs = {i: inputs[micro_batch.inputs[i]] for i in micro_batch.freed_inputs}
        self._repeat_events(micro_batch.forward, micro_batch.kept, self._ids)
        self._repeated = micro_batch
        with _disable_current_modes():
            self._held = [torch.empty(0, device=META) for _ in micro_batch.held]
            leaf = torch.empty(0, device=CPU, requires_grad=True)
            # a list drops its last item first
            loss = _Loss.apply(leaf, micro_batch.loss, self._held[::-1])  # type: ignore[no-untyped-call]
        self._memory.adopt(loss, self._ids[micro_batch.loss.index])
        return loss

    def _repeat_backward(self, micro_batch: _MicroBatch) -> tuple[()]:
        ids, self._repeated = self._ids, None
        assert micro_batch.backward is not None
        self._repeat_events(micro_batch.backward, micro_batch.kept, ids)
        for parameter, spec in micro_batch.grads:
            parameter.grad = _empty(spec)
            self._memory.adopt(parameter.grad, ids[spec.index])
        graph_tensors, self._held = self._held, []
        for index, tensor in zip(micro_batch.held, graph_tensors, strict=True):
            self._memory.adopt(tensor, ids[index])
        return ()

    def _repeat_events(self, stretch: _Stretch, workspaces: set[int], ids: dict[int, int]) -> None:
        """Repeat the log entries of `stretch`. Storages in `workspaces` are not allocated again.
        `ids` gets the id of each new storage, by its id in the first step."""
        memory, mode = self._memory, self._mode
        memory.settle()
        positions = []  # position in the log of each event of the stretch
        for event in stretch.events:
            positions.append(len(memory.log.events))
            if event < 0:
                if self._inputs.pop(free_of(event), None) is None:
                    memory.free(ids[free_of(event)])
                memory.settle()
            elif event not in workspaces:
                ids[event] = memory.allocate_like(event)
        positions.append(len(memory.log.events))
        if self._calls is not None:
            self._calls.repeat(stretch.calls, stretch.start.event, positions, ids)
        mode.work.events.extend(stretch.work)
        mode.kernels.coverage.num_ops += stretch.num_ops
        mode.kernels.coverage.unmodelled += stretch.unmodelled
        mode.rng.default.offset += stretch.random

    def _spec_of(self, tensor: Any) -> _TensorSpec | None:
        """Return a description of `tensor`; None unless it is on the GPU and fills its storage."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return None
        index = self._memory.id_of(tensor)
        if index is None:
            return None
        spec = _TensorSpec(index, tensor.size(), tensor.stride(), tensor.dtype)
        is_alike = _empty(spec).untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        return spec if is_alike else None

    def _host_state(self) -> Any:
        """Return a value that changes if the host draws random numbers or a value is guessed."""
        with _disable_current_modes():
            torch_state = torch.default_generator.get_state().numpy().tobytes()
        counts = self._guesses.counts.total(), self._mode.host.rng.num_waiting
        return random.getstate(), pickle.dumps(np.random.get_state()), torch_state, counts

    def _position(self) -> _Position:
        self._memory.settle()
        mode = self._mode
        return _Position(
            event=len(self._memory.log.events), work=len(mode.work.events),
            call=0 if self._calls is None else self._calls.num_calls,
            num_ops=mode.kernels.coverage.num_ops,
            unmodelled=mode.kernels.coverage.unmodelled.copy(), random=mode.rng.default.offset,
        )  # fmt: skip

    def _since(self, start: _Position) -> _Stretch:
        end = self._position()
        return _Stretch(
            start, self._memory.log.events[start.event :].tolist(),
            self._mode.work.events[start.work :],
            () if self._calls is None else self._calls.calls_since(start.call),
            end.num_ops - start.num_ops, end.unmodelled - start.unmodelled,
            end.random - start.random,
        )  # fmt: skip


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _attributes(model: nn.Module) -> list[list[tuple[str, Any]]]:
    """Return (name, value) of attributes that are numbers, flags, strings or None, by module."""
    kinds = (bool, int, float, str, NoneType)
    return [
        [item for item in vars(module).items() if type(item[1]) in kinds]
        for module in model.modules()
    ]


class _Loss(torch.autograd.Function):
    """Autograd function that makes the loss of a repeated forward, so that its backward can be
    called. The graph has no reference to the loss."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, spec: _TensorSpec, tensors: list[Tensor]) -> Tensor:
        """Return a meta tensor of the shape, strides and dtype in `spec`, as the loss. The graph
        keeps `tensors` alive. `leaf` only makes the loss require a gradient."""
        ctx.held = tensors
        return _empty(spec)


def _empty(spec: _TensorSpec) -> Tensor:
    with _disable_current_modes():
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=META)
