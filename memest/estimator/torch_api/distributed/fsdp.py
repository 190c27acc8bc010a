"""FSDP on the virtual GPU: storages that it resizes, and shapes of DTensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import CPU, META, local_part
from memest.estimator.tensors.storages import MemKind


def install_dtensors(patches: Patches, mode: CudaSimMode) -> None:
    """Make DTensor infer shapes on meta tensors, and `isfinite` return True for guessed values."""
    from torch.distributed.tensor import DTensor, _sharding_prop

    patches.set(_sharding_prop, "FakeTensorMode", _on_meta)
    patches.set(_sharding_prop, "detect_fake_mode", lambda *args: None)
    for owner in (torch, Tensor):
        patches.wrap(owner, "isfinite")(partial(_isfinite, DTensor, mode))


def _isfinite(dtensor: type, mode: CudaSimMode, isfinite: Any, tensor: Tensor) -> Tensor:
    """Return torch's `isfinite(tensor)`, or all True if the result is a DTensor (class `dtensor`)
    of guessed values. torch's function first compares `tensor == tensor`. Equality is assumed if
    both operands are the same tensor. Up to torch 2.9 the norm of gradients is partial, that is,
    not yet summed over ranks. DTensor then sums the left and the right operand separately. So two
    tensors are compared, and their equality is unknown."""
    out: Tensor = isfinite(tensor)
    part = local_part(out)
    if isinstance(out, dtensor) and mode.values.is_guessed([part]):
        mode.values.overwrite(part, torch.ones(part.shape, dtype=torch.bool, device=CPU))
    return out


class _OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which factory functions make meta tensors, whatever `device` they get."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs or func is torch.ops.aten.empty_strided.default:
            kwargs = {**kwargs, "device": META}
        return func(*args, **kwargs)


@contextmanager
def _on_meta() -> Iterator[None]:
    with _disable_current_modes(), _OnMeta():  # type: ignore[no-untyped-call]
        yield


def _install_states(patches: Patches) -> None:
    """Add optimizer states of parameters that are only on other ranks to checkpoints of FSDP1. With
    `use_orig_params` a rank has no state for a parameter of which it has no part."""
    from torch.distributed.fsdp import _optim_utils as utils

    @patches.wrap(utils, "_map_param_key_to_optim_keys")
    def keys_of_all(
        keys_of: Any, states: Any, group: Any, params: Any, names: Any, infos: Any, merge_keys: Any
    ) -> Any:
        keys, local = keys_of(states, group, params, names, infos, merge_keys)
        if merge_keys and keys:
            empty = [names[p] for p in params.values() if p.requires_grad and not p.numel()]
            missing = {utils._OptimStateKey(tuple(fqns), fqns[0] in infos) for fqns in empty}
            keys = sorted({*keys, *missing})
        return keys, local

    @patches.wrap(utils, "_allgather_state_info")
    def gather_all(gather: Any, fsdp_state: Any, states: Any) -> Any:
        gathered = gather(fsdp_state, states)
        own_infos = gathered[fsdp_state.rank]
        sample = next((own_infos[name] for name, state in states.items() if state), None)
        if sample is not None:
            filled = {name: info if states[name] else sample for name, info in own_infos.items()}
            gathered = [own_infos if r == fsdp_state.rank else filled for r in range(len(gathered))]
        return gathered


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Label FSDP's gathered parameters; run FSDP1's hooks on `AccumulateGrad` nodes' streams."""
    from torch.distributed.fsdp import _flat_param, _runtime_utils

    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
    except ModuleNotFoundError:  # torch 2.5
        from torch.distributed._composable.fsdp import (  # type: ignore[attr-defined,no-redef]
            _fsdp_param,
            _fsdp_param_group,
        )

    def alloc_gathered(alloc: Any, tensor: Tensor, *size: Any) -> None:
        mode.memory.label(tensor, MemKind.GATHERED)
        alloc(tensor, *size)

    patches.wrap(_flat_param, "_alloc_storage")(alloc_gathered)
    for module in (_fsdp_param, _fsdp_param_group):
        patches.wrap(module, "alloc_storage")(alloc_gathered)

    def on_stream_of_node(state: Any, handle: Any, *args: Any) -> Any:
        """Return the context in which FSDP1's `_post_backward_hook(state, handle, *args)` runs. In
        it, the current stream is that of the `AccumulateGrad` node of `handle.flat_param`. `state`
        and `args` have no effect."""
        timeline = mode.timeline
        return timeline.on_stream(timeline.leaf_streams.get(handle.flat_param, timeline.stream))

    handle_type = _flat_param.FlatParamHandle

    @patches.wrap(handle_type, "_use_unsharded_views")
    def use_views(use_unsharded_views: Any, handle: Any, as_params: bool) -> None:
        """Call torch's `use_unsharded_views`, and record the current stream for the
        `AccumulateGrad` node."""
        mode.timeline.leaf_streams[handle.flat_param] = mode.timeline.stream
        use_unsharded_views(handle, as_params)

    patches.within(_runtime_utils, "_post_backward_hook", on_stream_of_node)
    # outside of inference mode, where torch refuses the data of the views on meta
    patches.within(handle_type, "_use_sharded_views", lambda handle: torch.no_grad())
    patches.within(handle_type, "_use_sharded_views", lambda handle: torch.inference_mode(False))
    _install_states(patches)
