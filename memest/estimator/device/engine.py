"""The order in which autograd runs the gradients of gradients.

Nodes run by their number, the highest first, and each thread numbers those that it makes
(`at::sequence_number`, thread-local; `torch/csrc/autograd/engine.cpp` of torch 2.11). The backward
of CUDA tensors runs in a thread of the device, so what it makes under `create_graph` has that
thread's numbers. The backward of meta tensors runs in the thread that asks for it, which numbers
both in one row; once there are nodes of both kinds, they get the numbers of two threads here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.patches import Patches

_WRAPPED = torch._C._functorch

RENUMBERED = 1 << 40
"""Added to the numbers given here, so that they are told from those that torch gave."""


def _next_number() -> int:
    """The number that this thread gives to the next node."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


class DeviceThread:
    """Numbers what a backward makes as the thread of a GPU would."""

    def __init__(self) -> None:
        self._is_running = False
        self._is_mixed = False
        self._num_made = 0
        """In backwards: what the thread of the device has numbered."""
        self._starts = [0]
        self._skipped = [_next_number()]
        """By the number at which a stretch between backwards starts, those before it that are not
        the script's."""

    def install(self, patches: Patches) -> None:
        """Let every backward run here."""
        engine = torch.autograd.graph._engine_run_backward

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(engine, outputs, *args, **kwargs)

        patches.set(torch.autograd.graph, "_engine_run_backward", run)
        patches.set(torch.autograd, "_engine_run_backward", run)

    def _run(self, engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As `_engine_run_backward(outputs, grad_outputs, retain_graph, create_graph, ...)`."""
        if self._is_running:  # a backward within it: the same thread
            return engine(outputs, *args, **kwargs)
        if self._is_mixed:
            self._number([*outputs, *args[0]], RENUMBERED)
        self._is_running = True
        first = _next_number()
        try:
            grads = engine(outputs, *args, **kwargs)
        finally:
            self._is_running = False
            last = _next_number()
        if last > first:
            if args[2]:
                self._is_mixed = True
                is_kept = kwargs["accumulate_grad"]
                made = [leaf.grad for leaf in _leaves(outputs)] if is_kept else grads
                self._number(made, first)
            self._num_made += last - first
            self._starts.append(last)
            self._skipped.append(self._skipped[-1] + last - first)
        return grads

    def _number(self, tensors: Iterable[Any], first: int) -> None:
        """Number what made `tensors`; what has a number from `first` on is the device's."""
        for node in _below(tensors, lambda node: node._sequence_nr() < RENUMBERED):
            number = node._sequence_nr()
            if number < first:
                number -= self._skipped[bisect_right(self._starts, number) - 1]
            else:
                number += self._num_made - first
            node._set_sequence_nr(number + RENUMBERED)


def _below(tensors: Iterable[Any], is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes that made `tensors`, each once; not what lies below those that are not wanted."""
    todo = [node for tensor in tensors for node in _nodes(tensor)]
    seen = set()
    while todo:
        node = todo.pop()
        if node not in seen and is_wanted(node):
            seen.add(node)
            todo += [below for below, _ in node.next_functions if below is not None]
            yield node


def _nodes(made: Any) -> Iterator[Any]:
    """What made a tensor, and what is wrapped in it by `torch.func`."""
    if isinstance(made, torch.autograd.graph.GradientEdge):
        yield made.node
    while isinstance(made, Tensor):
        if made.grad_fn is not None:
            yield made.grad_fn
        if not _WRAPPED.is_functorch_wrapped_tensor(made):
            return
        made = _WRAPPED.get_unwrapped(made)


def _leaves(outputs: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors whose gradients a backward adds to."""
    for node in _below(outputs, lambda node: True):
        if hasattr(node, "variable"):
            yield node.variable
