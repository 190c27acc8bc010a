"""DistributedDataParallel: buckets that gradients are copied into, summed in, and copied out of.

Mirrors `torch/nn/parallel/distributed.py` and `torch/csrc/distributed/c10d/reducer.cpp` (torch
2.11) as Lightning's DDPStrategy uses them. In the first step every gradient of a dtype shares one
bucket (without `find_unused_parameters`); the forward after the first summed backward makes the
buckets anew, in the order in which gradients arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from memest.errors import PlanError
from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import MAIN
from memest.estimator.parallel.strategy import StepModule, Strategy

T = TypeVar("T", bound=Tensor)

MIB = 1 << 20

DEFAULT_BUCKET_MIB = 25
"""`_DEFAULT_BUCKET_CAP_MB` of `DistributedDataParallel`."""

FIRST_BUCKET_BYTES = MIB
"""`kDefaultFirstBucketBytes` (`reducer.hpp`)."""

BROADCAST_BYTES = 250 * MIB
"""`broadcast_bucket_size` of `DistributedDataParallel`."""

BROADCASTS_IN_FLIGHT = 2
"""`max_in_flight` of `broadcast_coalesced` (`comm.cpp`)."""


class Ddp(Strategy):
    """Every rank holds the whole model.

    Lightning makes the wrapper on a stream of its own (`DDPStrategy._setup_model`). The first
    buckets come from its pool, and autograd accumulates gradients on it, as the accumulators were
    made there: their blocks count as used by both streams.
    """

    def setup(self, step: StepModule) -> None:
        """Broadcast the states of rank 0, then make the first buckets."""
        self._side = self.recorder.accumulates_on = self.recorder.new_stream()
        with self.recorder.on_stream(self._side):
            self._wrap(step)

    def _wrap(self, step: StepModule) -> None:
        super().setup(step)
        self._finds_unused = self.plan.strategy == "ddp_find_unused_parameters_true"
        self._params = [p for p in step.parameters() if p.requires_grad]
        self._ready: list[nn.Parameter] = []
        self._has_rebuilt = False
        self._is_synced = False
        self._syncs_buffers = True
        self._broadcast([*step.parameters(), *step.buffers()])
        limits = [FIRST_BUCKET_BYTES, self._cap_bytes()] if self._finds_unused else [1 << 62]
        self._make_buckets(assign_buckets(self._params, limits))
        if self._finds_unused:
            self._used = torch.empty(len(self._params), dtype=torch.int32, device="meta")
            self.recorder.label(self._used, MemKind.BUCKETS)
        for parameter in self._params:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def forward(self, *, is_last: bool) -> Tensor:
        """Rebuild the buckets once, sync the buffers, run the module."""
        if self._ready and not self._has_rebuilt and not self._finds_unused:
            self._rebuild()
        if self._syncs_buffers:
            self._broadcast(self.module.buffers())
        loss = super().forward(is_last=is_last)
        self._syncs_buffers = is_last
        return loss.clone() if self._finds_unused and is_last else loss  # `_DDPSink`

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Sum the gradients as their buckets fill, in the micro-batch that ends with a step."""
        self._is_synced = is_last
        super().backward(loss, is_last=is_last)
        self.recorder.stream_waits(MAIN, self.recorder.event(self._side))
        if not is_last:
            return
        missing = [p for p in self._params if p.grad is None]
        if missing and not self._finds_unused:
            raise PlanError(
                f"plain `ddp` cannot train this: {len(missing)} trained parameters get no gradient,"
                f" such as one of shape {tuple(missing[0].shape)}",
                hint="use `strategy: ddp_find_unused_parameters_true`, or `freeze` them",
            )
        if not self.plan.gradient_as_bucket_view:
            for parameter in self._params:
                if parameter.grad is not None:
                    parameter.grad.copy_(self._views[id(parameter)])

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter) -> None:
        """As `mark_variable_ready_dense`."""
        self._note_stream(parameter)
        if not self._is_synced:
            return
        if not self._has_rebuilt:
            self._ready.append(parameter)
        view = self._views[id(parameter)]
        assert parameter.grad is not None
        torch.mul(parameter.grad, 1 / self.world_size, out=view)
        if self.plan.gradient_as_bucket_view:
            parameter.grad = view

    def _note_stream(self, parameter: nn.Parameter) -> None:
        """The accumulator's stream waits for the model's, and uses the gradient."""
        recorder = self.recorder
        recorder.stream_waits(self._side, recorder.event(MAIN))
        assert parameter.grad is not None
        recorder.record_stream(parameter.grad, self._side)

    def _rebuild(self) -> None:
        self._has_rebuilt = True
        first = FIRST_BUCKET_BYTES if self.plan.bucket_cap_mb is None else self._cap_bytes()
        buckets = assign_buckets(self._ready, [first, self._cap_bytes()])
        counts = (len(self._ready) + 1, len(buckets))
        sent = [torch.empty(n, dtype=torch.int32, device="meta") for n in counts]
        del sent  # `sync_bucket_indices` sends the order of rank 0
        self._ready = []
        self._views.clear()
        self._make_buckets(buckets)

    def _cap_bytes(self) -> int:
        return (self.plan.bucket_cap_mb or DEFAULT_BUCKET_MIB) * MIB

    def _make_buckets(self, buckets: Iterable[Sequence[nn.Parameter]]) -> None:
        """One flat tensor a bucket, with a view of each parameter's shape."""
        self._views: dict[int, Tensor] = {}
        for members in buckets:
            numel = sum(p.numel() for p in members)
            flat = torch.empty(numel, dtype=members[0].dtype, device="meta")
            self.recorder.label(flat, MemKind.BUCKETS)
            start = 0
            for parameter in members:
                view = flat[start : start + parameter.numel()]
                self._views[id(parameter)] = view.view(parameter.shape)
                start += parameter.numel()

    @torch.no_grad()
    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """As `broadcast_coalesced`: buckets are flattened, sent, and copied back, two in flight."""
        on_gpu = [t.detach() for t in tensors if t.device.type == "meta"]
        in_flight: list[tuple[Tensor, Sequence[Tensor]]] = []
        for members in assign_buckets(on_gpu, [BROADCAST_BYTES]):
            flat = members[0].reshape(-1)
            if len(members) > 1:
                flat = torch.cat([t.contiguous().view(-1) for t in members])
            if len(in_flight) >= BROADCASTS_IN_FLIGHT:
                in_flight.pop(0)
            in_flight.append((flat, members))


def assign_buckets(tensors: Sequence[T], limits: Sequence[int]) -> list[list[T]]:
    """As `compute_bucket_assignment_by_size`: in order, by dtype, each closed at its limit.

    The limits are used one after another, the last one from there on.
    """
    open_: dict[torch.dtype, tuple[list[T], int]] = {}
    used: dict[torch.dtype, int] = {}
    closed: list[tuple[int, list[T]]] = []
    first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    for tensor in tensors:
        members, size = open_.pop(tensor.dtype, ([], 0))
        members.append(tensor)
        size += tensor.numel() * tensor.element_size()
        index = used.get(tensor.dtype, 0)
        if size >= limits[min(index, len(limits) - 1)]:
            closed.append((first[id(members[0])], members))
            used[tensor.dtype] = index + 1
        else:
            open_[tensor.dtype] = (members, size)
    closed += [(first[id(members[0])], members) for members, _ in open_.values()]
    return [members for _, members in sorted(closed, key=lambda item: item[0])]
