"""FSDP2 (`fully_shard`) as a module under Lightning's ModelParallelStrategy uses it.

torch's own code runs on the meta device, as in `fsdp.py`: which parameters are gathered together,
in what buffers and streams, is decided by it. The optimizer works on the local shards, on its
multi-tensor path as for plain parameters: `torch.distributed.tensor` adds DTensor to the types that
the path accepts (`_foreach_supported_types`, torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)

from memest.estimator.device.collectives import process_group
from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import DeviceHandle, StreamRecorder
from memest.estimator.parallel.strategy import BuildOptimizer, StepModule, Strategy
from memest.models_meta.sharding import fully_shard_layers, hybrid_shape


@contextmanager
def fsdp2_on_meta(recorder: StreamRecorder, num_devices: int) -> Iterator[None]:
    """Inside, FSDP2 takes the meta device for a GPU."""
    handle = DeviceHandle(recorder, num_devices)

    def take(tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.itemsize
        if tensor.untyped_storage().nbytes() != num_bytes:
            recorder.resize(tensor, num_bytes, MemKind.GATHERED)

    def free(tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes():
            recorder.resize(tensor, 0)

    users = (_fsdp_collectives, _fsdp_param_group, _fsdp_state)
    replaced: list[tuple[Any, str, Any]] = [
        (_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device("meta")),
        (_fsdp_param, "alloc_storage", take),
        (_fsdp_param_group, "alloc_storage", take),
        (_fsdp_param, "free_storage", free),
        (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
    ]
    replaced += [(user, "_get_device_handle", lambda kind: handle) for user in users]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class Fsdp2(Strategy):
    """Parameters divided one by one along their first dimension, gathered layer by layer."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """A process group, and the meta device in place of a GPU."""
        with (
            process_group(self.recorder, self.world_size, self.rank),
            fsdp2_on_meta(self.recorder, self.world_size),
        ):
            yield

    def setup(self, step: StepModule) -> None:
        """`fully_shard` on each layer to wrap, then on the model."""
        super().setup(step)
        shape = hybrid_shape(self.plan)
        names = ("data_parallel", "tensor_parallel") if shape else None
        mesh = init_device_mesh("cpu", shape or (self.plan.world_size,), mesh_dim_names=names)
        fully_shard_layers(step.model, self.plan, mesh)

    def make_optimizer(self, build: BuildOptimizer) -> None:
        """Over the local shards."""
        shards: list[Any] = [p for p in self.module.parameters() if p.requires_grad]
        self._pairs = [(shard, nn.Parameter(shard._local_tensor)) for shard in shards]
        for _, local in self._pairs:
            self.recorder.label(local, MemKind.PARAMS)
        self.optimizer = build([local for _, local in self._pairs])

    def zero_grad(self) -> None:
        """Drop the local gradients."""
        for shard, _ in self._pairs:
            shard.grad = None

    def optimizer_step(self, scaler: Any, *, is_last: bool) -> None:
        """The update of the local shards."""
        for shard, local in self._pairs:
            local.grad = None if shard.grad is None else shard.grad._local_tensor
        super().optimizer_step(scaler, is_last=is_last)
        for _, local in self._pairs:
            local.grad = None
