"""Which module runs, in the forward and in the backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class ModuleTracker:
    """Which module runs: in the forward by hooks, in the backward by the sequence numbers of
    autograd's nodes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(m): name for name, m in model.named_modules()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []
        self._parameters = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow every module's forward."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def owner_of(self, parameter: Tensor) -> str:
        """The path of the module that holds `parameter`."""
        return self._parameters.get(id(parameter), "")

    def current(self) -> str:
        """The path of the running module, or the one whose backward runs; "" outside of all."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            return self._stack[-1] if self._stack else ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameters.get(id(variable), "")
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[index] if index >= 0 else ""

    def _note(self, owner: str) -> None:
        start = torch._C._autograd._get_sequence_nr()
        self._starts.append(start)
        self._owners.append(owner)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
        self._note(self._stack[-1])

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._note(self._stack[-1] if self._stack else "")
