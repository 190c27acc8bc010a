"""Attribution of memory to the module, the phase and the line that requested it."""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memest.estimator.gpu.history import History
from memest.estimator.gpu.memory import Memory
from memest.estimator.gpu.messages import refusal
from memest.estimator.tensors.lines import ScriptLines
from memest.estimator.tensors.placement import is_meta, local_part, storage_key, tensors_in
from memest.estimator.tensors.storages import MemKind, Site


class LiveModules:
    """Tracker of the module that is running. A model's modules get their paths at its first call. A
    path begins with the model's class: `GPT2LMHeadModel.transformer.h.0`."""

    MAX_NOTES = 200_000

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._removed: list[Any] = []  # hooks that `without_hooks` has removed, by torch's dict
        # by `id`, as are the next two; the reference is to the module, since Python reuses ids
        self._path_by_module: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._path_by_parameter: dict[int, str] = {}
        self._models: dict[int, weakref.ref[nn.Module]] = {}
        self._stack: list[str] = []  # paths of the running modules, the innermost last
        self._line = ""  # running line of the script
        self._number = 0  # autograd's next number at the last request of a forward
        self._starts: list[int] = []  # sequence numbers of autograd, from which `_owners` hold
        self._owners: list[tuple[str, str]] = []  # (path of the module, line)
        self._unique_owners: dict[tuple[str, str], tuple[str, str]] = {}  # equal ones, stored once
        self.is_generating = False  # flag: a function named `generate` called the last model
        self.is_evaluating = False  # True if the last model was in evaluation mode
        self.on_call: Callable[[nn.Module, bool], None] | None = None
        """Callback for each call of an outermost module; its argument is True for the first."""

    def hooks(self) -> list[Any]:
        """Register global forward hooks of torch for all modules; return their handles."""
        self._handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self._handles

    def _hook_dicts(self) -> list[Any]:
        names = ("pre_hooks", "hooks", "hooks_always_called")
        return [getattr(nn.modules.module, f"_global_forward_{name}") for name in names]

    def _remove_hooks(self) -> None:
        ids = [handle.id for handle in self._handles]
        self._removed = []
        for hooks in self._hook_dicts():
            self._removed.append({key: hooks.pop(key) for key in ids if key in hooks})

    def _restore_hooks(self) -> None:
        for hooks, removed in zip(self._hook_dicts(), self._removed, strict=True):
            hooks.update(removed)

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Remove the hooks that `hooks` has registered, within the block, which may be nested."""
        outer = self._removed
        self._remove_hooks()
        try:
            yield
        finally:
            self._restore_hooks()
            self._removed = outer

    @contextmanager
    def with_hooks(self) -> Iterator[None]:
        """Install the hooks again within the block, for use inside `without_hooks`."""
        self._restore_hooks()
        try:
            yield
        finally:
            self._remove_hooks()

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Mark `module` as running within the block, for compiled code that does not call it."""
        self._enter(module, ())
        try:
            yield
        finally:
            self._leave(module, (), None)

    @property
    def is_running(self) -> bool:
        """True while a module's forward runs."""
        return bool(self._stack)

    def current(self) -> str:
        """Return the path of the running module, in forward or backward; "" if none runs."""
        return self._stack[-1] if self._stack else self.in_backward()[0]

    def models(self) -> list[nn.Module]:
        """Return the outermost modules that were called and still exist."""
        models = [reference() for reference in [*self._models.values()]]
        return [model for model in models if model is not None]

    def owner_of(self, parameter: Any) -> str:
        """Return the path of the module that has `parameter`; "" if no called model has it."""
        return self._path_by_parameter.get(id(parameter), "")

    def path_of(self, module: nn.Module) -> str:
        """Return the path of `module`; "" if no called model has it."""
        entry = self._path_by_module.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else ""

    def note_line(self, line: str) -> None:
        """Record that the running forward executes `line` of the script, such as `train.py:12`."""
        is_recorded = self._number != (number := torch._C._autograd._get_sequence_nr())
        self._number = number
        if line != self._line:
            self._line = line
            self._record_owner(-is_recorded)

    def in_backward(self) -> tuple[str, str]:
        """Return (path of the module, script's line) of the forward that made the running autograd
        node. Both are "" if no node runs; one is "" if it is unknown."""
        node = torch._C._current_autograd_node()
        if node is None:
            return "", ""
        if (variable := getattr(node, "variable", None)) is not None:
            return self.owner_of(variable), ""
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[index] if index >= 0 else ("", "")

    def forget(self) -> None:
        """Drop the oldest records of autograd nodes, if there are more than `2 * MAX_NOTES`."""
        if len(self._starts) > 2 * self.MAX_NOTES:
            del self._starts[: -self.MAX_NOTES], self._owners[: -self.MAX_NOTES]

    def _record_owner(self, offset: int = 0) -> None:
        """Record the running module and line as the origin of the autograd nodes that follow. The
        origin holds from a sequence number on: autograd's next number plus `offset`. `offset` is -1
        while an operator with a node runs, since the node already has its number. Otherwise
        `offset` is 0."""
        start = torch._C._autograd._get_sequence_nr() + offset
        owner = self._stack[-1] if self._stack else "", self._line
        owner = self._unique_owners.setdefault(owner, owner)
        if self._starts and self._starts[-1] >= start:
            self._owners[-1] = owner
            return
        self._starts.append(start)
        self._owners.append(owner)

    def _enter(self, module: nn.Module, args: Any) -> None:
        module = getattr(module, "_orig_mod", module)  # unwrap torch.compile's OptimizedModule
        if not self._stack:
            self._record_call(module)
        path = self.path_of(module)
        # a module that no called model has, as one in a list, counts for its caller, but not a loss
        if not path and self._stack and not isinstance(module, nn.modules.loss._Loss):
            path = self._stack[-1]
        self._stack.append(path)
        self._record_owner()

    def _record_call(self, module: nn.Module) -> None:
        """Record the call of an outermost `module`; at its first call, the paths of its modules."""
        if len(self._starts) > 4 * self.MAX_NOTES:
            self.forget()  # a script that only generates takes no optimizer steps
        is_new = not self.path_of(module)
        if is_new:
            root, owners = type(module).__name__, dict[int, str]()
            paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
            self._models[id(module)] = weakref.ref(module)
            for name, child in module.named_modules():
                path = f"{root}.{name}" if name else root
                paths[id(child)] = weakref.ref(child), path
                for parameter in child._parameters.values():
                    owners.setdefault(id(parameter), path)
            others = {
                path
                for key, (reference, path) in self._path_by_module.items()
                if key not in paths and reference() is not None
            }
            self._path_by_module |= paths  # in place of those of children that were called alone
            by_id = self._path_by_parameter
            by_id |= {key: path for key, path in owners.items() if by_id.get(key) not in others}
        self.is_evaluating = not module.training
        callers = (frame.f_code.co_name for frame, _ in walk_stack(sys._getframe(1)))
        self.is_generating = not torch.is_grad_enabled() and "generate" in callers
        if self.on_call is not None:
            self.on_call(module, is_new)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._record_owner()


class Attribution:
    """Finder of the origin (`Site`) of each allocation: module, phase, operator and line.

    The `label` methods correct what `memory.storages`, the table of all storages, has about a
    tensor. They set the kind, such as gradient, and add the module if it is missing.
    """

    def __init__(self, memory: Memory, lines: ScriptLines) -> None:
        self.lines = lines
        self.modules = LiveModules()
        self.phase_given = ""  # set by a hook, such as `optimizer`; if empty, autograd decides
        self.has_closure = False  # True if the running optimizer step calls a closure of the script
        self.has_started = False  # True if a module or a backward has run
        self._history: History = memory.history
        self._storages, self._live = memory.storages, memory.live
        self._sites: dict[Any, Site] = {}
        self._owned: dict[Site, Site] = {}  # sites to which labels have added a module

    def site(self, func: Any) -> Site:
        """Return the `Site` (module, phase, operator and line) of memory that `func` allocates.
        `func` is an operator, or a name in place of one. Equal sites are one object."""
        module, phase = self.modules.current(), self.phase()
        line = running_line = self.lines.current()
        caller = ""
        if phase in ("setup", "forward"):
            self.modules.note_line(line)
        elif phase == "backward":
            _, forward_line = self.modules.in_backward()
            if forward_line not in ("", running_line):
                line, caller = forward_line, running_line
        key = (func if isinstance(func, str) else id(func), module, phase, line, caller)
        site = self._sites.get(key)
        if site is None:
            name = func if isinstance(func, str) else str(func).removesuffix(".default")
            site = self._sites[key] = Site(name, module, phase, line, caller)
        return site

    def phase(self) -> str:
        """Return the phase: setup, forward, backward, optimizer, evaluation or generation."""
        if torch._C._current_graph_task_id() != -1:
            self.has_started = True
            return "backward"
        is_running, has_grad = self.modules.is_running, torch.is_grad_enabled()
        if self.phase_given and not (is_running or (has_grad and self.has_closure)):
            return self.phase_given
        self.has_started |= is_running
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
        """Return the exception to raise after the operator `func` raised `error`. It is an
        `UnsupportedError` if `func` cannot be simulated, else `error`."""
        _, _, module = self.modules.current().partition(".")
        location = self.lines.current() or (f"`{module}`" if module else "the script")
        return refusal(func, error, location)

    # --- labels

    def label_optimizer(self, optimizer: Any, *, with_grads: bool) -> None:
        """Set kind and module of memory of `optimizer`: of its parameters, and of their gradients
        (if `with_grads`, or a closure makes them) or of its states (if not `with_grads`)."""
        owner_of, has_grad = self.modules.owner_of, with_grads or self.has_closure
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._label_parameter(parameter, owner_of(parameter), with_grads=has_grad)
        if not with_grads:
            for parameter, state in optimizer.state.items():
                for tensor in tensors_in(state.values() if isinstance(state, dict) else ()):
                    if is_meta(tensor):
                        self._label(tensor, MemKind.OPTIMIZER, owner_of(parameter))

    def label_models(self) -> None:
        """Set memory kind and owning module of the tensors of all models that have run."""
        for model in self.modules.models():
            self.label_model(model)

    def label_model(self, model: nn.Module) -> None:
        """Set memory kind and owning module of parameters, gradients and buffers of `model`."""
        for module in model.modules():
            path = self.modules.path_of(module)
            for parameter in module._parameters.values():
                if parameter is not None and not is_lazy(parameter):
                    self._label_parameter(parameter, path)
            for buffer in module._buffers.values():
                if isinstance(buffer, Tensor) and not is_lazy(buffer) and is_meta(buffer):
                    self._label(buffer, MemKind.BUFFERS, path)

    def _label_parameter(self, parameter: Any, owner: str, *, with_grads: bool = True) -> None:
        if is_meta(parameter):
            self._label(parameter, MemKind.PARAMS, owner)
            if with_grads and parameter.grad is not None:
                self._label(parameter.grad, MemKind.GRADS, owner)

    def _label(self, tensor: Tensor, kind: MemKind, owner: str) -> None:
        """Set the kind of the storage of `tensor`; also its module, to `owner`, if it has none."""
        try:
            index = self._live.get(storage_key(local_part(tensor)))
        except (NotImplementedError, RuntimeError):  # a subclass without a storage
            return
        if index is None:
            return
        if kind is MemKind.PARAMS and self._storages.kinds[index] is MemKind.GATHERED:
            return  # an unsharded parameter among sharded ones
        self._storages.kinds[index] = kind
        site = self._storages.sites[index]
        if owner and not site.module:
            owned = replace(site, module=owner)
            self._storages.sites[index] = self._owned.setdefault(owned, owned)
