"""FSDP1, as Lightning's FSDPStrategy wraps a model: torch's own code, on the meta device.

`torch.distributed.fsdp.FullyShardedDataParallel` runs as it is: which flat parameters there are,
what is padded, gathered, freed and reduced, and in which order, is decided by it. Replaced is only
what touches a device: streams and events, storages that are freed and taken again, collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    _common_utils,
    _flat_param,
    _init_utils,
    _runtime_utils,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from memest.estimator.device.collectives import process_group
from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import DeviceHandle, Stream, StreamRecorder
from memest.estimator.parallel.strategy import StepModule, Strategy
from memest.models_meta.sharding import checkpoint_layers, hybrid_shape
from memest.models_meta.wrapping import classes_named, wrap_class_names
from memest.plan import TrainingPlan


@contextmanager
def fsdp_on_meta(recorder: StreamRecorder, num_devices: int) -> Iterator[None]:
    """Inside, FSDP1 takes the meta device for a GPU."""
    handle = DeviceHandle(recorder, num_devices)

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        recorder.record_stream(tensor, stream.number)

    def take(tensor: Tensor, size: torch.Size) -> None:
        num_bytes = size.numel() * tensor.element_size()
        if tensor.untyped_storage().nbytes() != num_bytes:
            recorder.resize(tensor, num_bytes, MemKind.GATHERED)

    def free(tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes():
            recorder.resize(tensor, 0)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (_common_utils._FSDPDeviceHandle, "from_device", lambda device: handle),
        (torch._C, "_get_accelerator", lambda *args: torch.device("meta")),
        (_init_utils, "_need_to_materialize_module", lambda *args: (False, False)),
        (_flat_param, "_no_dispatch_record_stream", record_stream),
        (_runtime_utils, "_no_dispatch_record_stream", record_stream),
        (_flat_param, "_alloc_storage", take),
        (_flat_param, "_free_storage", free),
        (_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0),
        (_flat_param, "_same_storage", _same_storage),
        (_flat_param, "_warn_skip_writeback_check", lambda *args: None),
        (_runtime_utils, "_catch_all_reshard", _catch_all_reshard),
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", {"FSDP_SKIP_WRITEBACK_CHECK": "1"}))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class Fsdp(Strategy):
    """Flat parameters, gathered unit by unit."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """A process group, and the meta device in place of a GPU."""
        with (
            process_group(self.recorder, self.world_size, self.rank),
            fsdp_on_meta(self.recorder, self.world_size),
        ):
            yield

    def setup(self, step: StepModule) -> None:
        """As Lightning 2.6 wraps the LightningModule (`FSDPStrategy._setup_model`)."""
        plan = self.plan
        options: dict[str, Any] = {}
        shape = hybrid_shape(plan)
        if shape:
            options["device_mesh"] = init_device_mesh("cpu", shape)
        names = wrap_class_names(step.model, plan)
        self.module: FullyShardedDataParallel = FullyShardedDataParallel(
            step,
            mixed_precision=mixed_precision(plan),
            sharding_strategy=ShardingStrategy[plan.sharding_strategy],
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy(classes_named(step.model, names)),
            **options,
        )
        checkpoint_layers(step.model, plan)
        for unit in FullyShardedDataParallel.fsdp_modules(self.module):
            if unit._handle is not None:
                self.recorder.label(unit._handle.flat_param, MemKind.PARAMS)

    def forward(self, *, is_last: bool) -> Tensor:
        """Lightning sums no gradients before the last micro-batch: `no_sync` keeps them whole."""
        with nullcontext() if is_last else self.module.no_sync():
            return super().forward(is_last=is_last)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Likewise."""
        with nullcontext() if is_last else self.module.no_sync():
            super().backward(loss, is_last=is_last)


def mixed_precision(plan: TrainingPlan) -> MixedPrecision:
    """As `FSDPPrecision.mixed_precision_config`."""
    dtype = {"3": torch.float32, "b": torch.bfloat16, "1": torch.float16}[plan.precision[0]]
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _catch_all_reshard(state: Any) -> None:
    """As torch's, with storages compared instead of addresses, which meta tensors lack."""
    handle = state._handle
    if not handle:
        return
    flat = handle.flat_param
    if _same_storage(flat, flat._local_shard) and not handle._skipped_use_sharded_views:
        return
    _runtime_utils._reshard(state, handle, _runtime_utils._should_free_in_backward(state, handle))
