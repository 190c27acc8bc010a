"""Where Dynamo breaks a graph in two: calls of a logger, whatever their level.

`torch/_dynamo/variables/misc.py` (`LoggingLoggerVariable`) of torch 2.11 and 2.13: the function
runs up to the call, the call is made, and what follows is a graph of its own. Models of
transformers whose class is no `...ForCausalLM` (GPT-2's) break so between logits and loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from memest.estimator.device.libraries.inductor.compiler import (
    MadeOnMeta,
    NotCompiled,
    as_the_compiler,
)
from memest.estimator.device.patches import Patches

LOGS = ("debug", "info", "warning", "error", "critical", "exception", "log")
"""Methods of a logger, with those of transformers (`warning_once`)."""


class Broken(NotCompiled):
    """A function is no single graph."""


def _break() -> None:
    raise Broken("it calls a logger")


@contextmanager
def broken_by_loggers(meets: Callable[[], None] = _break) -> Iterator[None]:
    """Within it `meets` is called in place of a logger's methods, but those of torch's own."""
    patches = Patches()
    for name in dir(logging.Logger):
        if name.removesuffix("_once") in LOGS:
            patches.set(logging.Logger, name, _instead_of(getattr(logging.Logger, name), meets))
    try:
        yield
    finally:
        patches.undo()


def _instead_of(method: Callable[..., Any], meets: Callable[[], None]) -> Callable[..., Any]:
    def called(logger: logging.Logger, *args: Any, **kwargs: Any) -> Any:
        if logger.name.partition(".")[0] == "torch":  # the compiler's
            return method(logger, *args, **kwargs)
        return meets()

    return called


def _own_gradient(*args: Any, **kwargs: Any) -> Any:
    raise NotCompiled("it calls a logger, and has a gradient of its own")


def in_parts(function: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """`function` as a graph that calls one module for each stretch between breaks."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
    from torch.fx.passes.split_module import split_module

    breaks: list[int] = []

    def here() -> None:
        tracing = get_proxy_mode()
        assert tracing is not None
        breaks.append(len(tracing.tracer.graph.nodes))

    def run(*inputs: Tensor) -> Any:
        with MadeOnMeta(), broken_by_loggers(here):
            return function(*inputs)

    patches = Patches()
    patches.set(torch.autograd.Function, "apply", _own_gradient)
    try:
        with as_the_compiler():
            traced = make_fx(run, pre_dispatch=True)(*tensors)
    finally:
        patches.undo()
    place = {node: i for i, node in enumerate(traced.graph.nodes)}
    return split_module(traced, traced, lambda node: sum(place[node] >= at for at in breaks))


def inputs_of(parts: fx.GraphModule, tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """By the name of a part, tensors without data like those that it gets."""
    found: dict[str, list[Tensor]] = {}

    class Listening(fx.Interpreter):
        def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found[target] = [_leaf_like(value) for value in args]
            return super().call_module(target, args, kwargs)

    with as_the_compiler(), MadeOnMeta():
        Listening(parts).run(*tensors)
    return found


def _leaf_like(tensor: Tensor) -> Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)
