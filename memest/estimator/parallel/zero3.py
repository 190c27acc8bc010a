"""ZeRO 3: parameters, gradients and optimizer state are divided, parameter by parameter.

Mirrors DeepSpeed 0.19.8, runtime/zero/stage3.py (`DeepSpeedZeroOptimizer_Stage3`); the name of the
method it stands for is in each docstring. How parameters come and go is in `zero3_parameters`,
`zero3_coordinator` and `zero3_hooks`. With N the sum of ceil(numel / W) over the trained parameters
of W ranks, 16-bit floats:

    parameters     2 * N       (frozen ones likewise; on the host with offload)
    gradients      2 * N       (on the host with offload)
    masters        4 * N       (on the host with offload)
    bucket         2 * reduce_bucket_size

Left out: hpZ, quantised weights or gradients, NVMe, leaf modules, Muon, ZenFlow, experts in
parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import MAIN, StreamRecorder, Time
from memest.estimator.parallel.zero import (
    GPU,
    LOSS_SCALE,
    HostTerm,
    Zero,
    mask_invalid,
    on_host,
    send,
    split,
    when_grad_arrives,
)
from memest.estimator.parallel.zero3_coordinator import PERSISTENCE_NUMEL, Coordinator
from memest.estimator.parallel.zero3_hooks import Hooks
from memest.estimator.parallel.zero3_linear import keeping_parameters
from memest.estimator.parallel.zero3_parameters import ParameterStore, Partitioned
from memest.plan import TrainingPlan

MAX_REDUCE_EVENTS = 2
"""`max_param_reduce_events`: reductions that the host may be ahead of."""

NORM_CHUNK = 250_000_000
"""`_constant_buffered_norm2`: elements whose norm is taken at once."""


class Zero3(Zero):
    """Stage 3, on the GPU or with parameters and optimizer offloaded."""

    def __init__(self, plan: TrainingPlan, recorder: StreamRecorder, rank: int = 0) -> None:
        super().__init__(plan, recorder, rank)
        self.store: ParameterStore | None = None
        self._hooks: Hooks
        self._micro_step = 0
        self._has_reduced = False
        self._norms: dict[int, Tensor] = {}
        self._bucketed: list[Partitioned] = []
        self._num_bucketed = 0
        self._events: deque[Time] = deque()

    def divide(self) -> None:
        """`__init__`: partition all, make the masters, the bucket and the hooks."""
        recorder, plan = self.recorder, self.plan
        store = ParameterStore(recorder, self.world_size, offloads=plan.offloads)
        store.partition_all(self.module.parameters())
        for one in store.params:
            one.is_persistent = one.numel <= PERSISTENCE_NUMEL
        self._persistent = [one for one in store.params if one.is_persistent]
        self._coordinator = Coordinator(store, self.module, recorder.new_stream())
        self._hooks = Hooks(self.module, self._coordinator)
        device = "cpu" if plan.offloads else GPU
        self._overflow = torch.zeros(1, dtype=torch.bool, device=device)
        self._reduction = recorder.new_stream()
        found = (store.find(p) for p in self.trained)
        self._mine = [one for one in found if one is not None]
        self._numel = sum(one.part_numel for one in self._mine)
        self._join_partitions(store)
        self._make_masters()
        bucket = torch.empty(plan.reduce_bucket_size, dtype=self.dtype, device=GPU)
        recorder.label(bucket, MemKind.BUCKETS)
        self._bucket = bucket
        self._make_gradients()
        for one in self._mine:
            store.gather_now([one])
            when_grad_arrives(one.param, self._arrived)
            store.free(one)
        self.store = store

    def _join_partitions(self, store: ParameterStore) -> None:
        """`_create_fp16_partitions_with_defragmentation`: one flat tensor of the trained ones.

        On the GPU by way of the host (`defragment`), so that the old partitions are gone first;
        with offload it is pinned.
        """
        for one in self._mine:
            store.set_part(one, on_host(0, self.dtype))
        if self.plan.offloads:
            self._flat = on_host(self._numel, self.dtype)
            for one in self._mine:
                store.set_part(one, on_host(one.part_numel, self.dtype))
            return
        self._flat = torch.empty(self._numel, dtype=self.dtype, device=GPU)
        self.recorder.label(self._flat, MemKind.PARAMS)
        self._set_parts(store)

    def _set_parts(self, store: ParameterStore) -> None:
        parts = split(self._flat, [one.part_numel for one in self._mine])
        for one, part in zip(self._mine, parts, strict=True):
            store.set_part(one, part)

    def _make_masters(self) -> None:
        """`_create_fp32_partitions`, `initialize_optimizer_states`.

        Masters are copies in 32-bit runs too: whether a flat tensor can stand for them is asked by
        comparing its device with a string, which no device equals.
        """
        if self.plan.offloads:
            self._master = torch.empty(0, device="cpu").requires_grad_()
            self.zero.optimizer.param_groups[0]["params"] = []
            return
        converted = self._flat.to(torch.float32)
        self._master = converted.clone().detach()
        del converted
        self.recorder.label(self._master, MemKind.OPTIMIZER)
        self._master.requires_grad_()
        self.zero.optimizer.param_groups[0]["params"] = []
        self.zero.fp32_partitioned_groups_flat = [self._master]
        zeros = torch.zeros(self._numel, dtype=torch.float32, device=GPU)
        self._master.grad = zeros
        self.replace_adagrad([self._master])
        self._master.grad = None

    def _make_gradients(self) -> None:
        """`_setup_for_real_optimizer`: a flat buffer of this rank's gradients."""
        if self.plan.offloads:
            flat = on_host(self._numel, self.dtype)
        else:
            flat = torch.zeros(self._numel, dtype=self.dtype, device=GPU)
            self.recorder.label(flat, MemKind.GRADS)
        self.zero.grad_partitions_flat_buffer = flat
        parts = split(flat, [one.part_numel for one in self._mine])
        self._grads = {one.index: part for one, part in zip(self._mine, parts, strict=True)}

    # the micro-batch

    def begin_forward(self) -> None:
        """`clear_backward_seen_flag`."""
        if self._has_reduced:
            self._micro_step += 1
        self._has_reduced = False

    @contextmanager
    def linear_layers(self) -> Iterator[None]:
        """DeepSpeed's own."""
        with keeping_parameters(lambda: self.store):
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Also notices parameters that modules read of each other."""
        with super().forward(), self._hooks.in_forward():
            yield

    def zero_grad(self) -> None:
        """Also begins to count micro-batches anew."""
        self._micro_step = 0
        self._has_reduced = False
        for parameter in self.trained:
            if parameter.grad is not None:
                self.record_use(parameter.grad, self.recorder.stream)
            parameter.grad = None

    def _arrived(self, parameter: nn.Parameter) -> None:
        """`reduce_independent_p_g_buckets_and_remove_grads`, `__add_grad_to_ipg_bucket`."""
        assert self.store is not None
        one, recorder = self.store.find(parameter), self.recorder
        grad = parameter.grad
        assert one is not None
        assert grad is not None
        recorder.label(grad, MemKind.GRADS)
        size = self.plan.reduce_bucket_size
        if self._num_bucketed + one.numel > size and self._num_bucketed:
            self._reduce()
        recorder.stream_waits(self._reduction, recorder.event(recorder.stream))
        if self._num_bucketed + one.numel <= size:
            with recorder.on_stream(self._reduction):
                place = self._bucket.narrow(0, self._num_bucketed, one.numel).view_as(grad)
                place.copy_(grad, non_blocking=True)
                self.record_use(grad, self._reduction)
                grad.data = place
        self._bucketed.append(one)
        self._num_bucketed += one.numel

    def _reduce(self) -> None:
        """`__reduce_and_partition_ipg_grads`."""
        if not self._bucketed:
            return
        recorder = self.recorder
        if len(self._events) > MAX_REDUCE_EVENTS:
            recorder.host_waits(self._events.popleft())
        with recorder.on_stream(self._reduction):
            self._bucketed.sort(key=lambda one: one.index)
            parts = self._reduce_scatter(self._bucketed)
            self._keep(self._bucketed, parts)
            del parts
            self._bucketed = []
            self._num_bucketed = 0
            self._events.append(recorder.event(self._reduction))

    def _reduce_scatter(self, params: Sequence[Partitioned]) -> list[Tensor]:
        """`reduce_scatter_coalesced` (runtime/comm/coalesced_collectives.py): partitions of all
        gradients are interleaved by rank in a fresh tensor, padding beside it; what this rank gets
        is views of it. A single gradient without padding needs no copy.
        """
        world = self.world_size
        if len(params) == 1 and params[0].numel % world == 0:
            grad = params[0].param.grad
            assert grad is not None
            joined = grad.view(-1)
        else:
            padding = [
                torch.empty(missing, dtype=self.dtype, device=GPU)
                for rank in range(world)
                for one in params
                if (missing := one.part_numel - _share(one, rank)) > 0
            ]
            numel = world * sum(one.part_numel for one in params)
            joined = torch.empty(numel, dtype=self.dtype, device=GPU)
            self.label([*padding, joined], MemKind.BUCKETS)
        send(self.recorder, joined, world)
        mine = torch.chunk(joined, world)[self.rank]
        parts, start = [], 0
        for one in params:
            parts.append(mine.narrow(0, start, _share(one, self.rank)))
            start += one.part_numel
        return parts

    def _keep(self, params: Sequence[Partitioned], parts: Sequence[Tensor]) -> None:
        """`partition_grads`: into the flat buffer, on the GPU or the host."""
        on_gpu = None
        for one, part in zip(params, parts, strict=True):
            if part.numel():
                if self.plan.offloads:
                    if not self._micro_step:
                        on_gpu = None  # a sum is made while the one before it is still there
                    on_gpu = self._bring_back(part.numel())
                    self._keep_on_host(one, on_gpu)
                else:
                    kept = self._grads[one.index].narrow(0, 0, part.numel())
                    kept.add_(part) if self._micro_step else kept.copy_(part)
                grad = one.param.grad
                if grad is not None:
                    self.record_use(grad, self._reduction)
                del grad
            one.param.grad = None

    def _bring_back(self, numel: int) -> Tensor:
        """What the host has of a gradient, on the GPU: after the first one went there, or to add
        the next one to it. Host memory is pageable, so a copy to it is waited for.
        """
        if not self._micro_step:
            self.wait(self._reduction)
        on_gpu = torch.empty(numel, dtype=self.dtype, device=GPU)
        self.recorder.label(on_gpu, MemKind.BUCKETS)
        if self._micro_step:
            self.wait(self._reduction)
        return on_gpu

    def _keep_on_host(self, one: Partitioned, grad: Tensor) -> None:
        """`_offload_grad_partition_at_boundary`: its norm, and a copy in 32 bits."""
        if self.is_boundary:
            self._norms[one.index] = _buffered_norm(grad)
            wide = grad if self.dtype is torch.float32 else grad.to(torch.float32)
            self.wait(self._reduction)
            del wide

    def after_backward(self) -> None:
        """`independent_gradient_partition_epilogue`, `backward_epilogue`."""
        self._reduce()
        self.wait(self._reduction)
        if not self.plan.offloads:
            self.zero.averaged_gradients[0] = [self._grads[one.index] for one in self._mine]
        self._has_reduced = True
        self._coordinator.release_leftovers()

    # the step

    def update(self) -> None:
        """`step`."""
        self._micro_step = 0
        self._has_reduced = False
        self._coordinator.release_all()
        if self.dtype is torch.float16:
            self._check_overflow()
        norm = combined = None
        scale = LOSS_SCALE if self.dtype is torch.float16 else 1.0
        if self.plan.offloads:
            self._norm_on_host()
        else:
            norm = self._norm_of(self._averaged())
            combined = self.keep_norm(norm, scale)
            self.zero_grad()
            self._update_on_gpu(scale)
        assert self.store is not None
        self.store.gather_now(self._persistent)
        del norm, combined

    def _averaged(self) -> list[Tensor]:
        grads = self.zero.averaged_gradients[0]
        assert grads is not None
        return grads

    def _update_on_gpu(self, scale: float) -> None:
        """`_prepare_fp32_grad_for_sub_group`, `_optimizer_step`, `_release_sub_group`."""
        flat = _flatten_dense_tensors(self._averaged())  # type: ignore[no-untyped-call]
        grad = flat.to(torch.float32)
        del flat
        self.recorder.label(grad, MemKind.GRADS)
        self._master.grad = grad
        self.zero.averaged_gradients[0] = None
        grad.mul_(1.0 / scale)
        del grad
        group = self.zero.optimizer.param_groups[0]
        group["params"] = [self._master]
        self.zero.optimizer.step()
        group["params"] = []
        self._master.grad = None

    def _check_overflow(self) -> None:
        """`has_overflow`, of 16-bit floats."""
        with self.recorder.on_stream(self._reduction):
            flat = self.zero.grad_partitions_flat_buffer
            assert flat is not None
            if not self.plan.offloads:
                self._overflow.logical_or_(torch.isinf(flat).any())
                self._overflow.logical_or_(torch.isnan(flat).any())
            flag = torch.empty(1, dtype=torch.bool, device=GPU).to(torch.uint8)
        self.recorder.stream_waits(MAIN, self.recorder.event(self._reduction))
        self.wait()
        del flag

    def _norm_of(self, grads: Sequence[Tensor]) -> Tensor:
        """`get_grad_norm_direct`: every partition once in 64 bits."""
        norms = [grad.to(torch.float64).norm(2.0) for grad in grads]
        summed = torch.sum(torch.pow(torch.stack(norms), 2.0))
        total = summed**0.5
        is_inf, is_nan = total.isinf(), total.isnan()
        invalid = is_nan.logical_or(is_inf)
        minus_one = torch.tensor(-1.0, device=GPU, dtype=torch.float)
        return torch.where(invalid, minus_one, total)

    def _norm_on_host(self) -> None:
        """`complete_grad_norm_calculation_for_cpu_offload`."""
        total: Any = 0.0
        for norm in self._norms.values():
            total += norm**2.0
        self.wait()
        summed = torch.tensor([0.0], dtype=torch.float, device=GPU)
        total = summed[0] ** 0.5
        mask_invalid(total)
        self.wait()
        del total, summed
        self._norms = {}

    def host_terms(self) -> list[HostTerm]:
        """With offload: all that ZeRO 3 keeps between steps."""
        if not self.plan.offloads:
            return []
        numel, item = self._numel, self.dtype.itemsize
        of = f"{numel:,} elements of the partitions of trained parameters"
        pinned = 1 << (item * numel - 1).bit_length()
        terms = [
            HostTerm(
                "trained parameters",
                pinned,
                f"{item} B x {of}, to the next power of two",
                is_pinned=True,
            ),
            HostTerm("fp32 master weights", 4 * numel, f"4 B x {of}"),
            HostTerm("fp32 gradients", 4 * numel, f"4 B x {of}"),
            HostTerm("gradients", item * numel, f"{item} B x {of}"),
            HostTerm("Adam moments", 8 * numel, f"2 x 4 B x {of}"),
        ]
        assert self.store is not None
        trained = {one.index for one in self._mine}
        frozen = [one for one in self.store.params if one.index not in trained]
        if frozen:
            num_bytes = sum(one.part_numel * one.dtype.itemsize for one in frozen)
            count = sum(one.part_numel for one in frozen)
            what = f"{item} B x {count:,} elements of their partitions"
            terms.append(HostTerm("frozen parameters", num_bytes, what))
        return terms


def _share(one: Partitioned, rank: int) -> int:
    """Elements of a parameter, without padding, that `rank` has."""
    return max(0, min(one.part_numel, one.numel - rank * one.part_numel))


def _buffered_norm(tensor: Tensor) -> Tensor:
    """`_constant_buffered_norm2`."""
    parts: Any = torch.split(tensor.view(-1), NORM_CHUNK)
    total: Tensor = parts[0].to(torch.float64).norm(2) ** 2.0
    for part in parts[1:]:
        total += part.to(torch.float64).norm(2) ** 2.0
    return total**0.5
