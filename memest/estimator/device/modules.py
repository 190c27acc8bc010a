"""Which module runs, in the forward and in the backward."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from memest.estimator.device.tensors import INSIDE


class LiveModules:
    """Which module of which model runs, of models that are not known before they run.

    A module is named by the path below the outermost module that was called, behind that one's
    class: `GPT2LMHeadModel.transformer.h.0`.
    """

    MAX_NOTES = 200_000

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._stack: list[nn.Module] = []
        self._starts: list[int] = []
        self._owners: list[tuple[str, str]] = []
        self._known_owners: dict[tuple[str, str], tuple[str, str]] = {}
        self._line = ""
        self._models: dict[int, weakref.ref[nn.Module]] = {}
        self.is_generating = False
        """Whether the model that ran last was called by a function named `generate`."""

        self.is_evaluating = False
        """Whether it was in evaluation mode."""

        self.on_call: Callable[[nn.Module, bool], None] | None = None
        """Told of each call of an outermost module, and whether it is the first."""

    def hooks(self) -> list[Any]:
        """Follow every module's forward; the handles that end it."""
        return [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Within it `module` runs, by other means than a call."""
        self._enter(module, ())
        try:
            yield
        finally:
            self._leave(module, (), None)

    @property
    def is_running(self) -> bool:
        """Whether a module's forward runs."""
        return bool(self._stack)

    def current(self) -> str:
        """The path of the running module, or the one whose backward runs; "" outside of all."""
        if self._stack:
            return self._names.get(id(self._stack[-1]), "")
        return self._in_backward()[0]

    def models(self) -> list[nn.Module]:
        """The outermost modules that have run and still exist."""
        found = [(key, reference()) for key, reference in self._models.items()]
        for key, model in found:
            if model is None:
                del self._models[key]
        return [model for _, model in found if model is not None]

    def owner_of(self, parameter: Any) -> str:
        """The path of the module that holds `parameter`; "" of one that has not run."""
        return self._parameters.get(id(parameter), "")

    def path_of(self, module: nn.Module) -> str:
        """The path of `module`; "" of one that has not run."""
        return self._names.get(id(module), "")

    def line_of_backward(self) -> str:
        """The line whose forward made the node that runs backward."""
        return self._in_backward()[1]

    def note_line(self, line: str) -> None:
        """What runs forward now was asked for by `line`."""
        if line != self._line:
            self._line = line
            self._note(-1)

    def _in_backward(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        if node is None:
            return "", ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameters.get(id(variable), ""), ""
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[index] if index >= 0 else ("", "")

    def forget(self) -> None:
        """A step is over: what nodes of long ago belonged to is not asked any more."""
        if len(self._starts) > 2 * self.MAX_NOTES:
            del self._starts[: -self.MAX_NOTES], self._owners[: -self.MAX_NOTES]

    def _note(self, offset: int = 0) -> None:
        """Nodes from the next one on belong to the running module and line.

        An operator is seen below autograd, when its node has been numbered: `offset` -1.
        """
        start = torch._C._autograd._get_sequence_nr() + offset
        name = self._names.get(id(self._stack[-1]), "") if self._stack else ""
        owner = name, self._line
        owner = self._known_owners.setdefault(owner, owner)
        if self._starts and self._starts[-1] >= start:
            self._owners[-1] = owner
            return
        self._starts.append(start)
        self._owners.append(owner)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if INSIDE.depth:
            return  # it is only traced
        if not self._stack:
            self._call(module)
        self._stack.append(module)
        self._note()

    def _call(self, module: nn.Module) -> None:
        """An outermost module is called."""
        if len(self._starts) > 4 * self.MAX_NOTES:
            self.forget()  # a script that only generates takes no steps
        is_new = id(module) not in self._names
        if is_new:
            root = type(module).__name__
            self._models[id(module)] = weakref.ref(module)
            for name, child in module.named_modules():
                path = f"{root}.{name}" if name else root
                self._names.setdefault(id(child), path)
                for parameter in child._parameters.values():
                    self._parameters.setdefault(id(parameter), path)
        self.is_evaluating = not module.training
        self.is_generating = not torch.is_grad_enabled() and _is_called_by("generate")
        if self.on_call is not None:
            self.on_call(module, is_new)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if INSIDE.depth:
            return
        if self._stack:
            self._stack.pop()
        self._note()


def _is_called_by(name: str) -> bool:
    """Whether a function of this name is running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False
