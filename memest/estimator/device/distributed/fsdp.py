"""FSDP on the virtual GPU: torch's own code; storages that it frees and takes again are told of.

`FullyShardedDataParallel` and `fully_shard` decide which parameters there are, what is padded,
gathered, freed and reduced, in which order and on which streams. They free memory by resizing the
storage of a tensor that lives on, which no operator tells of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.storages import MemKind, Site
from memest.estimator.device.tensors import Place


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let FSDP1 and FSDP2 free and take storages of the card."""
    _install_first(patches, mode)
    _install_second(patches, mode)


def _resizer(mode: CudaSimMode) -> Any:
    def resize(tensor: Tensor, num_bytes: int) -> None:
        """Let the storage of `tensor`, which lies on the card, have `num_bytes`."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == num_bytes:
            return
        if mode.host.place(tensor) is Place.CARD or not storage.nbytes():
            site = Site("", "", mode.attribution.phase())
            mode.memory.resize(tensor, num_bytes, site, MemKind.GATHERED)
        else:
            storage.resize_(num_bytes)

    return resize


def _install_first(patches: Patches, mode: CudaSimMode) -> None:
    """FSDP1: flat parameters."""
    from torch.distributed.fsdp import _flat_param, _init_utils, _runtime_utils

    resize = _resizer(mode)

    def record_stream(tensor: Tensor, stream: Any) -> None:
        mode.memory.record_stream(tensor, stream.number)

    def take(tensor: Tensor, size: torch.Size) -> None:
        resize(tensor, size.numel() * tensor.element_size())

    def free(tensor: Tensor) -> None:
        resize(tensor, 0)

    def needs_to_be_made(
        module: nn.Module, ignored: set[Any], ignored_modules: set[nn.Module]
    ) -> tuple[bool, bool]:
        """As `_need_to_materialize_module`: whether `module` lies on the meta device itself."""
        tensors: list[Tensor] = [*_init_utils._get_orig_params(module, ignored)]
        for submodule in module.modules():
            if submodule not in ignored_modules:
                tensors += submodule.buffers(recurse=False)
        return any(mode.host.place(tensor) is Place.META for tensor in tensors), False

    patches.set(_init_utils, "_need_to_materialize_module", needs_to_be_made)
    _install_handle(patches, mode, _flat_param.FlatParamHandle, free)
    post_backward_hook = _runtime_utils._post_backward_hook

    def after_backward(state: Any, handle: Any, *args: Any) -> None:
        """Hooks of a node run on the node's stream."""
        with mode.timeline.on_stream(
            mode.timeline.leaf_streams.get(handle.flat_param, mode.timeline.stream)
        ):
            post_backward_hook(state, handle, *args)

    patches.set(_runtime_utils, "_post_backward_hook", after_backward)
    for owner in (_flat_param, _runtime_utils):
        patches.set(owner, "_no_dispatch_record_stream", record_stream)
    patches.set(_flat_param, "_alloc_storage", take)
    patches.set(_flat_param, "_free_storage", free)
    patches.set(_flat_param, "_data_ptr_allocated", lambda t: t.untyped_storage().nbytes() > 0)
    patches.set(_flat_param, "_same_storage", same_storage)


def _install_handle(
    patches: Patches, mode: CudaSimMode, handle_type: Any, free: Callable[[Tensor], None]
) -> None:
    """What a handle does by means that no operator tells of."""
    get_shard, use_sharded_views = handle_type._get_shard, handle_type._use_sharded_views
    use_unsharded_views = handle_type._use_unsharded_views

    def own_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """As `_get_shard`; what `shard` divides it frees next, by its `_typed_storage`."""
        found: tuple[Tensor, int] = get_shard(tensor, rank, world_size)
        if sys._getframe(1).f_code.co_name == "shard":
            free(tensor)
        return found

    def views(handle: Any, as_params: bool) -> None:
        """Views of a flat parameter make the node that adds to its gradient, in each forward."""
        mode.timeline.leaf_streams[handle.flat_param] = mode.timeline.stream
        use_unsharded_views(handle, as_params)

    def sharded_views(handle: Any) -> None:
        """A tensor of the meta device that inference made cannot be the data of one it did not."""
        with torch.inference_mode(False), torch.no_grad():
            use_sharded_views(handle)

    patches.set(handle_type, "_get_shard", staticmethod(own_shard))
    patches.set(handle_type, "_use_sharded_views", sharded_views)
    patches.set(handle_type, "_use_unsharded_views", views)


def _install_second(patches: Patches, mode: CudaSimMode) -> None:
    """FSDP2: buffers of gathered parameters."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    resize = _resizer(mode)

    def take(tensor: Tensor) -> None:
        resize(tensor, tensor.numel() * tensor.itemsize)

    def free(tensor: Tensor) -> None:
        resize(tensor, 0)

    patches.set(_fsdp_param, "alloc_storage", take)
    patches.set(_fsdp_param_group, "alloc_storage", take)
    patches.set(_fsdp_param, "free_storage", free)


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
