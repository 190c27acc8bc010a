"""ZeRO 3's parameters: a partition of each on every rank, gathered whole where it is used.

Mirrors DeepSpeed 0.19.8, runtime/zero/partition_parameters.py: `_partition_param`, `free_param`,
`all_gather_coalesced`, `AllGatherHandle`, `AllGatherCoalescedHandle`, `_allgather_params_coalesced`
and `_allgather_params_sequential`; the last two as they are called outside of a module's forward.

Left out: hpZ, quantised weights, gathers by all-reduce, NVMe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import StreamRecorder
from memest.estimator.parallel.zero import GPU, on_host, send


class Status(Enum):
    """Where the whole parameter is."""

    AWAY = 0
    IN_FLIGHT = 1
    THERE = 2


class Partitioned:
    """One parameter: its partition, and whether it is gathered (`_convert_to_deepspeed_param`)."""

    __slots__ = (
        "index", "is_persistent", "module_ids", "numel", "param", "part", "part_numel", "shape",
        "status",
    )  # fmt: skip

    def __init__(self, param: nn.Parameter, index: int, world_size: int) -> None:
        self.param = param
        self.index = index
        self.shape = param.shape
        self.numel = param.numel()
        self.part_numel = -(-self.numel // world_size)
        self.part: Tensor
        """This rank's partition, on the GPU or on the host."""

        self.status = Status.THERE
        self.is_persistent = False
        self.module_ids: set[int] = set()
        """The modules that need it now."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter and its partition."""
        return self.param.dtype

    def hold(self, whole: Tensor) -> None:
        """Let the parameter be the start of `whole`."""
        self.param.data = whole.narrow(0, 0, self.numel).view(self.shape)


class Handle:
    """A gather that is under way."""

    def wait(self) -> None:
        """On the stream that is current: the parameters are there from here on."""
        raise NotImplementedError


class ParameterStore:
    """All parameters of a model, and how they come and go.

    Args:
        recorder: says on which stream.
        world_size: ranks that share the parameters.
        offloads: whether partitions lie on the host.
    """

    def __init__(self, recorder: StreamRecorder, world_size: int, *, offloads: bool) -> None:
        self.recorder = recorder
        self.world_size = world_size
        self.offloads = offloads
        self.params: list[Partitioned] = []
        self._of: dict[int, Partitioned] = {}
        self._empty = {
            dtype: torch.empty(0, dtype=dtype, device=GPU)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }

    def find(self, param: Any) -> Partitioned | None:
        """The partitioned parameter that `param` is, if it is one."""
        return self._of.get(id(param))

    def partition_all(self, params: Iterable[nn.Parameter]) -> None:
        """`Init._convert_to_zero_parameters`: cut this rank's part out of each, free the rest."""
        for index, param in enumerate(params):
            one = Partitioned(param, index, self.world_size)
            self.params.append(one)
            self._of[id(param)] = one
            self.set_part(one, self._new_part(one))
            self.free(one)

    def _new_part(self, one: Partitioned) -> Tensor:
        if self.offloads:
            return on_host(one.part_numel, one.dtype)
        part = torch.empty(one.part_numel, dtype=one.dtype, device=GPU)
        self.recorder.label(part, MemKind.PARAMS)
        return part

    def set_part(self, one: Partitioned, part: Tensor) -> None:
        """Let `part` be the partition; `ds_tensor` is where DeepSpeed has it."""
        one.part = part
        one.param.ds_tensor = part  # type: ignore[attr-defined]

    def free(self, one: Partitioned) -> None:
        """`free_param`: the stream that is current may still use it."""
        self.recorder.record_stream(one.param.data, self.recorder.stream)
        one.param.data = self._empty[one.dtype]
        one.status = Status.AWAY

    def gather(self, params: Iterable[Partitioned]) -> Handle:
        """`all_gather_coalesced`, on the stream that is current."""
        ordered = sorted(params, key=lambda one: one.index)
        for one in ordered:
            one.status = Status.IN_FLIGHT
        if self.world_size == 1:
            return _Copies(self, ordered)
        if len(ordered) == 1:
            return _Whole(self, ordered[0])
        by_dtype: dict[torch.dtype, list[Partitioned]] = {}
        for one in ordered:
            by_dtype.setdefault(one.dtype, []).append(one)
        return _Several([_Coalesced(self, same) for same in by_dtype.values()])

    def gather_now(self, params: Sequence[Partitioned]) -> None:
        """`_all_gather`: each into a buffer of its own, and everything is waited for."""
        away = [one for one in params if one.status is Status.AWAY]
        if not away:
            return
        if len(away) == 1 or self.world_size > 1:
            self._gather_each(away)
        else:
            self.gather(away).wait()
        for one in away:
            one.status = Status.THERE

    def _gather_each(self, params: Sequence[Partitioned]) -> None:
        parts: list[Tensor] = []
        wholes: list[Tensor] = []
        if len(params) > 1:  # coalesced: all partitions are brought first
            parts = [self.bring(one) for one in params]
        for one in params:
            whole = self.new_whole(one.part_numel * self.world_size, one.dtype)
            if len(params) == 1:
                parts = [self.bring(one)]
            send(self.recorder, whole, self.world_size)
            wholes.append(whole)
        for one, whole in zip(params, wholes, strict=True):
            one.hold(whole)
        last = parts[-1]  # a loop's variable still holds it
        del parts
        del last
        recorder = self.recorder
        recorder.host_waits(recorder.event(recorder.stream))

    def bring(self, one: Partitioned) -> Tensor:
        """`ds_tensor.to(device)`: the partition itself, or its copy from the host."""
        if not self.offloads:
            return one.part
        brought = self.new_whole(one.part_numel, one.dtype)
        self.recorder.copy_from_host(brought.numel() * brought.element_size())
        return brought

    def new_whole(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor for gathered parameters."""
        whole = torch.empty(numel, dtype=dtype, device=GPU)
        self.recorder.label(whole, MemKind.GATHERED)
        return whole


class _Several(Handle):
    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


class _Copies(Handle):
    """`NoGatherCoalescedHandle`: one rank has all; a partition on the host is copied."""

    def __init__(self, store: ParameterStore, params: Sequence[Partitioned]) -> None:
        self._store = store
        self._params = params
        self._is_done = False
        for one in params:
            one.param.data = store.bring(one).view(one.shape)

    def wait(self) -> None:
        if self._is_done:
            return
        recorder = self._store.recorder
        recorder.host_waits(recorder.event(recorder.stream))
        for one in self._params:
            one.status = Status.THERE
        self._is_done = True


class _Whole(Handle):
    """`AllGatherHandle`: a single parameter, gathered in place.

    NCCL's work keeps its input until it is waited for (`TensorShelf` of ProcessGroupNCCL).
    """

    def __init__(self, store: ParameterStore, one: Partitioned) -> None:
        self._one = one
        whole = store.new_whole(one.part_numel * store.world_size, one.dtype)
        self._input: Tensor | None = store.bring(one)
        send(store.recorder, whole, store.world_size)
        one.hold(whole)

    def wait(self) -> None:
        self._input = None
        self._one.status = Status.THERE


class _Coalesced(Handle):
    """`AllGatherCoalescedHandle`: partitions joined, gathered, copied out parameter by parameter.

    The joined tensor lives until the last of its parameters was waited for.
    """

    def __init__(self, store: ParameterStore, params: Sequence[Partitioned]) -> None:
        self._store = store
        self._params = params
        self._is_done = False
        numel = sum(one.part_numel for one in params)
        self._joined = store.new_whole(numel * store.world_size, params[0].dtype)
        copies = [store.bring(one) for one in params]
        del copies  # joined, by now
        send(store.recorder, self._joined, store.world_size)

    def wait(self) -> None:
        if self._is_done:
            return
        for one in self._params:
            one.param.data = self._store.new_whole(one.numel, one.dtype).view(one.shape)
            one.status = Status.THERE
        self._is_done = True
