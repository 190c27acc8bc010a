"""Attribution: the module, phase and line of the script for which memory is requested."""

from __future__ import annotations

from typing import Any

import torch

from memest.estimator.device.history import History
from memest.estimator.device.labels import Labels
from memest.estimator.device.lines import ScriptLines
from memest.estimator.device.memory import Memory
from memest.estimator.device.messages import refusal
from memest.estimator.device.modules import LiveModules
from memest.estimator.device.storages import Site


class Attribution:
    """Finds the origin (`Site`) of each request.

    Args:
        memory: its storages get labels, its history tells the phase before.
        lines: finds the line of the script.
    """

    def __init__(self, memory: Memory, lines: ScriptLines) -> None:
        self.lines = lines
        self.modules = LiveModules()
        self.labels = Labels(memory, self.modules)
        self.phase_given = ""
        """Phase that a hook has set, such as `optimizer`; "" lets autograd decide."""

        self.has_closure = False
        """Whether the running optimizer step calls a closure of the script."""

        self.has_started = False
        """Whether a module or a backward has run."""

        self._history: History = memory.history
        self._sites: dict[Any, Site] = {}

    def site(self, func: Any) -> Site:
        """Origin of a request by `func`, an operator or a name; one object per origin."""
        module, phase = self.modules.current(), self.phase()
        line, caller = self.lines.current(), ""
        if phase in ("setup", "forward"):
            self.modules.note_line(line)
        elif phase == "backward" and (saved := self.modules.line_of_backward()):
            line, caller = saved, line if line != saved else ""
        key = (func if isinstance(func, str) else id(func), module, phase, line, caller)
        site = self._sites.get(key)
        if site is None:
            name = func if isinstance(func, str) else str(func).removesuffix(".default")
            site = self._sites[key] = Site(name, module, phase, line, caller)
        return site

    def phase(self) -> str:
        """Phase of the run: setup, forward, backward, optimizer, evaluation or generation."""
        if torch._C._current_graph_task_id() != -1:
            self.has_started = True
            return "backward"
        is_running, has_grad = self.modules.is_running, torch.is_grad_enabled()
        if self.phase_given and not (is_running or (has_grad and self.has_closure)):
            return self.phase_given
        if not self.has_started:
            self.has_started = is_running
        if not self.has_started:
            return "setup"
        if not has_grad:
            if not is_running and self._history.phase in ("backward", "optimizer"):
                return "optimizer"  # clipping, a moving average
            if self.modules.is_generating:
                return "generation"
            if self.modules.is_evaluating:
                return "evaluation"
        return "forward"

    def failure(self, func: Any, error: Exception) -> Exception:
        """Error that a script gets where `func` cannot be simulated; its own stays as it is."""
        module = self.modules.current().partition(".")[2]
        where = self.lines.current() or (f"`{module}`" if module else "the script")
        return refusal(func, error, where)
