"""What storages of the card are held for, where a script's models and optimizers say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memest.estimator.device.memory import Memory
from memest.estimator.device.modules import LiveModules
from memest.estimator.device.storages import MemKind, Site
from memest.estimator.device.tensors import is_meta, local_part, storage_key


class Labels:
    """Writes what storages are held for, and which module owns them, into their table.

    Args:
        memory: of the simulated GPU.
        modules: the modules that have run.
    """

    def __init__(self, memory: Memory, modules: LiveModules) -> None:
        self._storages = memory.storages
        self._live = memory.live
        self._modules = modules
        self._sites: dict[Site, Site] = {}

    def of_optimizer(self, optimizer: Any, *, with_grads: bool) -> None:
        """Parameters and gradients of `optimizer`, or without gradients its state."""
        owner_of = self._modules.owner_of
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not is_meta(parameter):
                    continue
                owner = owner_of(parameter)
                self._label(parameter, MemKind.PARAMS, owner)
                if with_grads and parameter.grad is not None:
                    self._label(parameter.grad, MemKind.GRADS, owner)
        if not with_grads:
            for parameter, tensor in _state_tensors(optimizer):
                if is_meta(tensor):
                    self._label(tensor, MemKind.OPTIMIZER, owner_of(parameter))

    def of_models(self) -> None:
        """Those of all models that have run."""
        for model in self._modules.models():
            self.of_model(model)

    def of_model(self, model: nn.Module) -> None:
        """Parameters, gradients and buffers of `model`."""
        for module in model.modules():
            path = self._modules.path_of(module)
            for parameter in module._parameters.values():
                if parameter is None or is_lazy(parameter) or not is_meta(parameter):
                    continue
                self._label(parameter, MemKind.PARAMS, path)
                if parameter.grad is not None:
                    self._label(parameter.grad, MemKind.GRADS, path)
            for buffer in module._buffers.values():
                if isinstance(buffer, Tensor) and not is_lazy(buffer) and is_meta(buffer):
                    self._label(buffer, MemKind.BUFFERS, path)

    def _label(self, tensor: Tensor, kind: MemKind, owner: str) -> None:
        try:
            index = self._live.get(storage_key(local_part(tensor)))
        except (NotImplementedError, RuntimeError):  # a subclass without a storage
            return
        if index is None:
            return
        if kind is MemKind.PARAMS and self._storages.kinds[index] is MemKind.GATHERED:
            return  # a parameter that stays whole where others are divided
        self._storages.kinds[index] = kind
        site = self._storages.sites[index]
        if owner and not site.module:
            owned = replace(site, module=owner)
            self._storages.sites[index] = self._sites.setdefault(owned, owned)


def _state_tensors(optimizer: Any) -> Iterator[tuple[Any, Tensor]]:
    for parameter, state in optimizer.state.items():
        if isinstance(state, dict):
            yield from ((parameter, v) for v in state.values() if isinstance(v, Tensor))
