"""Order of autograd nodes in gradients of gradients.

Nodes run by their sequence number, the highest first; each thread numbers its own
(`at::sequence_number`, `torch/csrc/autograd/engine.cpp` of torch 2.11). The backward of CUDA
tensors runs in a thread of the device, which numbers nodes under `create_graph`. The backward of
meta tensors runs in the calling thread, so nodes get the numbers of two threads here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from memest.estimator.tensors.patches import Patches

_WRAPPED = torch._C._functorch

RENUMBERED = 1 << 40  # offset of the virtual GPU's sequence numbers, which torch's do not reach


def _next_number() -> int:
    """Return the sequence number of this thread's next autograd node."""
    return torch._C._autograd._get_sequence_nr()


class DeviceThread:
    """Numbers the nodes of a backward as the thread of a GPU would; calls `at_end` after it."""

    def __init__(self, at_end: Callable[[], None] = lambda: None) -> None:
        self._at_end = at_end
        self._is_running = False
        self._is_mixed = False
        self._num_made = 0  # sequence numbers that the device thread assigned during backward
        self._starts = [0]
        self._skipped = [_next_number()]  # sequence numbers where stretches between backwards begin

    def install(self, patches: Patches) -> None:
        """Replace autograd's entry point, so that every backward gets these numbers."""
        engine = torch.autograd.graph._engine_run_backward

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(engine, outputs, *args, **kwargs)

        patches.set(torch.autograd.graph, "_engine_run_backward", run)
        patches.set(torch.autograd, "_engine_run_backward", run)

    def _run(self, engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `_engine_run_backward(outputs, grad_outputs, retain_graph, create_graph, ...)`."""
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
        self._at_end()
        return grads

    def _number(self, tensors: Iterable[Any], first: int) -> None:
        """Number the nodes of `tensors`; a number from `first` on belongs to the device thread."""
        for node in _below(tensors, lambda node: node._sequence_nr() < RENUMBERED):
            number = node._sequence_nr()
            if number < first:
                number -= self._skipped[bisect_right(self._starts, number) - 1]
            else:
                number += self._num_made - first
            node._set_sequence_nr(number + RENUMBERED)


def _below(tensors: Iterable[Any], is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the nodes of `tensors`, each once, without those below unwanted nodes."""
    todo = [node for tensor in tensors for node in _nodes(tensor)]
    seen = set()
    while todo:
        node = todo.pop()
        if node not in seen and is_wanted(node):
            seen.add(node)
            todo += [below for below, _ in node.next_functions if below is not None]
            yield node


def _nodes(made: Any) -> Iterator[Any]:
    """Yield the nodes of a tensor and of the tensors that `torch.func` has wrapped in it."""
    if isinstance(made, torch.autograd.graph.GradientEdge):
        yield made.node
    while isinstance(made, Tensor):
        if made.grad_fn is not None:
            yield made.grad_fn
        if not _WRAPPED.is_functorch_wrapped_tensor(made):
            return
        made = _WRAPPED.get_unwrapped(made)


def _leaves(outputs: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors whose gradients a backward adds to."""
    for node in _below(outputs, lambda node: True):
        if hasattr(node, "variable"):
            yield node.variable
