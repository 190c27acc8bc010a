"""Where ZeRO 3 hooks into modules: before and after each one's forward and backward.

Mirrors DeepSpeed 0.19.8, runtime/zero/parameter_offload.py (`_register_deepspeed_module`,
`ZeROOrderedDict`). The backward hooks are autograd functions around the outputs and the positional
inputs of every module, so they are nodes of the graph here as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memest.estimator.parallel.zero3_coordinator import Coordinator
from memest.estimator.parallel.zero3_parameters import Status


class Hooks:
    """The hooks of a model, and the stack of modules whose forward runs."""

    def __init__(self, root: nn.Module, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._stack: list[nn.Module] = [root]
        self._is_forward = False
        self._num_outputs: dict[nn.Module, int] = {}
        self._num_inputs: dict[nn.Module, int] = {}
        root.register_forward_pre_hook(lambda module, args: coordinator.begin())
        for module in root.modules():
            module._parameters = _Watched(module._parameters, self._external)
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)
            module.register_forward_hook(self._mark_outputs)
            module.register_forward_pre_hook(self._mark_inputs)

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Around the forward of the whole: parameters of other modules are noticed."""
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False

    @torch.no_grad()
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)
        self._coordinator.fetch(module, forward=True)

    @torch.no_grad()
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        self._coordinator.release(module, forward=True)

    def _external(self, parameter: Any) -> None:
        """A parameter is read while another module runs: gather it, and remember who uses it."""
        one = self._coordinator.store.find(parameter)
        if self._is_forward and one is not None and one.status is Status.AWAY:
            self._coordinator.register(self._stack[-1], one)
            with torch.no_grad():
                self._coordinator.store.gather_now([one])

    def _mark_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        mark: Any = _BeforeBackward.apply
        return _on_tensors(output, lambda tensor: mark(tensor, self, module))

    def _mark_inputs(self, module: nn.Module, args: Any) -> Any:
        self._num_inputs[module] = 0
        mark: Any = _AfterBackward.apply
        return _on_tensors(args, lambda tensor: mark(tensor, self, module))

    def _output_marked(self, module: nn.Module) -> None:
        self._num_outputs[module] = self._num_outputs.get(module, 0) + 1

    @torch.no_grad()
    def _output_reached(self, module: nn.Module) -> None:
        if self._num_outputs[module] > 0:
            self._coordinator.fetch(module, forward=False)
            self._num_outputs[module] -= 1

    def _input_marked(self, module: nn.Module) -> None:
        self._num_inputs[module] += 1

    @torch.no_grad()
    def _input_reached(self, module: nn.Module) -> None:
        self._num_inputs[module] -= 1
        if self._num_inputs[module] == 0:
            self._coordinator.release(module, forward=False)


class _BeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, hooks: Hooks, module: nn.Module) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.hooks, ctx.module = inputs
        ctx.hooks._output_marked(ctx.module)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.hooks._output_reached(ctx.module)
        return grad, None, None


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, hooks: Hooks, module: nn.Module) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensor, ctx.hooks, ctx.module = inputs
        if tensor.requires_grad:
            ctx.hooks._input_marked(ctx.module)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.hooks._input_reached(ctx.module)
        return grad, None, None


class _Watched(dict[str, Any]):
    """The parameters of a module; reading one tells `on_read`."""

    def __init__(self, params: dict[str, Any], on_read: Callable[[Any], None]) -> None:
        super().__init__(params)
        self._on_read = on_read

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._on_read(parameter)
        return parameter


def _on_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`apply_to_tensors_only`: in tuples, lists and dictionaries, the last in place."""
    if isinstance(value, tuple | list):
        touched = [_on_tensors(item, function) for item in value]
        if hasattr(value, "_fields"):
            return value.__class__(*touched)
        return value.__class__(touched)
    if isinstance(value, dict):
        for key in value:
            value[key] = _on_tensors(value[key], function)
        return value
    return function(value) if isinstance(value, Tensor) else value
