"""ZeRO 1 and 2: one flat tensor of the trained parameters, of which each rank updates a part.

Mirrors DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (`DeepSpeedZeroOptimizer`); the name of the
method it stands for is in each docstring. With P trained elements, W ranks, 16-bit floats:

    parameters     2 * padded(P), padded to a multiple of 2 * W
    masters        4 * padded(P) / W          (on the host with offload)
    buckets        2 * 2 * reduce_bucket_size (during the backward)

Left out: expert parallelism, Muon, ZenFlow; parameters flattened on the host, as DeepSpeed does
where the GPU has no room for a second copy while it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import StreamRecorder
from memest.estimator.parallel.zero import (
    GPU,
    LOSS_SCALE,
    HostTerm,
    Zero,
    has_inf_or_nan,
    mask_invalid,
    partitions_of,
    send,
    split,
    when_grad_arrives,
)
from memest.plan import TrainingPlan

START_ALIGNMENT = 2
"""`nccl_start_alignment_factor`: elements to which each partition's start is aligned."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """What of a parameter lies in this rank's partition."""

    offset: int
    """In the parameter."""

    numel: int


@dataclass(slots=True, eq=False)
class Bucket:
    """`IPGBucket`: gradients that are reduced together."""

    buffers: list[Tensor] = field(default_factory=list)
    index: int = 0
    numel: int = 0
    params: list[nn.Parameter] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the gradients, keep the buffers."""
        self.params.clear()
        self.numel = 0


class Zero12(Zero):
    """Stage 1 (optimizer state divided) and stage 2 (gradients too), on the GPU or offloaded."""

    def __init__(self, plan: TrainingPlan, recorder: StreamRecorder, rank: int = 0) -> None:
        super().__init__(plan, recorder, rank)
        self.divides_grads = not plan.strategy.startswith("deepspeed_stage_1")
        self.bucket = Bucket()
        self._extra_large: nn.Parameter | None = None
        self._is_ready = False
        self._micro_step = -1
        self._grads_in_partition: Tensor | None = None
        self._grads_offset = 0
        self._kept: list[Tensor] | None = None
        self._norms: dict[int, Tensor] = {}

    def divide(self) -> None:
        """`__init__`: flatten, cut the partition out, make the masters and the hooks."""
        plan, recorder = self.plan, self.recorder
        self._flatten()
        numel = self.flat.numel() // self.world_size
        self.partition_numel = numel
        self._place_params()
        part = self.flat.narrow(0, self.rank * numel, numel)
        master = part.detach().clone()
        if not plan.offloads:
            master = master.to(torch.float32)
            recorder.label(master, MemKind.OPTIMIZER)
        else:
            master = torch.empty(0, device="cpu")
        self._master = master.requires_grad_()
        inner = self.zero.optimizer
        inner.param_groups[0]["params"] = [self._master]
        self._reduction = recorder.new_stream()
        if plan.offloads:
            largest = max(p.numel() for p in self.trained)
            self._largest_numel = largest
            self._temporary = torch.zeros(largest, device=GPU, dtype=self.dtype)
            recorder.label(self._temporary, MemKind.BUCKETS)
        for parameter in self.trained:
            when_grad_arrives(parameter, self._arrived)
        if not plan.offloads:
            zeros = torch.zeros(numel, dtype=torch.float32, device=GPU)
            self._master.grad = zeros
            self.replace_adagrad([self._master])
            self._master.grad = None

    def _flatten(self) -> None:
        """`flatten_dense_tensors_aligned`, `_update_model_bit16_weights`."""
        alignment = START_ALIGNMENT * self.world_size
        numel = sum(p.numel() for p in self.trained)
        parts: list[Tensor] = [p.detach() for p in self.trained]
        if numel % alignment:
            pad = torch.zeros(alignment - numel % alignment, dtype=self.dtype, device=GPU)
            parts.append(pad)
        self.flat = _flatten_dense_tensors(parts).detach()  # type: ignore[no-untyped-call]
        del parts
        self.recorder.label(self.flat, MemKind.PARAMS)
        start = 0
        self._starts: dict[int, int] = {}
        for parameter in self.trained:
            self._starts[id(parameter)] = start
            view = self.flat.narrow(0, start, parameter.numel()).view(parameter.shape)
            parameter.data = view
            start += parameter.numel()

    def _place_params(self) -> None:
        """`get_partition_info`, `get_grad_position`: what of which parameter this rank updates."""
        size = self.partition_numel
        first, end = self.rank * size, (self.rank + 1) * size
        self._fragments: dict[int, Fragment] = {}
        self._mine: list[nn.Parameter] = []
        for parameter in self.trained:
            start = self._starts[id(parameter)]
            low, high = max(start, first), min(start + parameter.numel(), end)
            if low < high:
                self._mine.append(parameter)
                self._fragments[id(parameter)] = Fragment(low - start, high - low)

    # the backward

    def _arrived(self, parameter: nn.Parameter) -> None:
        """`process_gradients`: a gradient is there."""
        self._make_buffers()
        if self.divides_grads or self.is_boundary:
            self._add_to_bucket(parameter)

    def _make_buffers(self) -> None:
        """`setup_buckets`: two buffers, so that one fills while the other is reduced."""
        if self._is_ready:
            return
        self._micro_step += 1
        bucket = self.bucket
        bucket.buffers.clear()
        for _ in range(2):
            buffer = torch.empty(self.plan.reduce_bucket_size, dtype=self.dtype, device=GPU)
            self.recorder.label(buffer, MemKind.BUCKETS)
            bucket.buffers.append(buffer)
        bucket.index = 0
        self._is_ready = True

    def _add_to_bucket(self, parameter: nn.Parameter) -> None:
        """`reduce_independent_p_g_buckets_and_remove_grads`."""
        bucket, numel = self.bucket, parameter.numel()
        if bucket.numel + numel > self.plan.reduce_bucket_size:
            self._reduce()
            bucket.index = 1 - bucket.index
        grad = parameter.grad
        assert grad is not None
        self.recorder.label(grad, MemKind.GRADS)
        if numel > self.plan.reduce_bucket_size:
            if self.plan.offloads:
                grad.data = grad.detach().clone(memory_format=torch.contiguous_format)
            self._extra_large = parameter
        else:
            place = bucket.buffers[bucket.index].narrow(0, bucket.numel, numel)
            place.copy_(grad.view(-1))
            grad.data = place.view_as(grad)
        bucket.numel += numel
        bucket.params.append(parameter)

    def _reduce(self) -> None:
        """`reduce_ipg_grads`: average the bucket, keep this rank's part, drop the rest."""
        bucket, recorder = self.bucket, self.recorder
        if self._extra_large is not None:
            grad = self._extra_large.grad
            assert grad is not None
            flat = grad.view(-1)
            self._extra_large = None
        else:
            flat = bucket.buffers[bucket.index].narrow(0, 0, bucket.numel)
        recorder.stream_waits(self._reduction, recorder.event(recorder.stream))
        recorder.stream_waits(recorder.stream, recorder.event(self._reduction))
        with recorder.on_stream(self._reduction):
            if bucket.params:
                self._average(flat)
            for parameter in bucket.params:
                if id(parameter) in self._fragments:
                    self._keep(parameter)
                elif self.divides_grads:
                    parameter.grad = None
        bucket.clear()

    def _average(self, flat: Tensor) -> None:
        """`average_tensor`, `allreduce_and_copy_with_multiple_ranks`: slices by the ranks that own
        them, joined for one all-reduce unless a single rank owns all.
        """
        if self.plan.offloads:
            self.record_use(flat, self._reduction)
        flat.div_(self.world_size)
        slices = self._slices()
        pieces = split(flat, [numel for _, numel in slices])
        joined = _flatten_dense_tensors(pieces)  # type: ignore[no-untyped-call]
        if len(pieces) > 1:
            self.recorder.label(joined, MemKind.BUCKETS)
        send(self.recorder, joined, self.world_size)
        self.record_use(joined, self._reduction)
        if any(owner == self.rank for owner, _ in slices):
            self.record_use(flat, self._reduction)

    def _slices(self) -> list[tuple[int, int]]:
        """(rank, elements) of the bucket, neighbours of one rank merged."""
        size = self.partition_numel
        slices: list[tuple[int, int]] = []
        for parameter in self.bucket.params:
            start, numel = self._starts[id(parameter)], parameter.numel()
            for owner in partitions_of(start, numel, size):
                low, high = max(start, owner * size), min(start + numel, (owner + 1) * size)
                if slices and slices[-1][0] == owner:
                    slices[-1] = (owner, slices[-1][1] + high - low)
                else:
                    slices.append((owner, high - low))
        return slices

    def _keep(self, parameter: nn.Parameter) -> None:
        """`copy_grads_in_partition`: into a buffer of this micro-batch, or to the host."""
        if self.plan.offloads:
            self._keep_on_host(parameter)
            return
        if self._grads_in_partition is None:
            total = sum(p.numel() for p in self._mine)
            self._grads_in_partition = torch.empty(total, dtype=self.dtype, device=GPU)
            self.recorder.label(self._grads_in_partition, MemKind.GRADS)
            self._grads_offset = 0
        grad, numel = parameter.grad, parameter.numel()
        assert grad is not None
        place = self._grads_in_partition.narrow(0, self._grads_offset, numel)
        place.copy_(grad.view(-1))
        grad.data = place.view_as(grad)
        self._grads_offset += numel

    def _keep_on_host(self, parameter: nn.Parameter) -> None:
        """`async_accumulate_grad_in_cpu_via_gpu`, `set_norm_for_param_grad_in_gpu`,
        `async_inplace_copy_grad_to_fp32_buffer_from_gpu`.

        Host memory is pageable, so each copy to it is waited for. The sum over micro-batches goes
        through a buffer that is there already.
        """
        if self._micro_step > 0 or not self.is_boundary:
            self.wait(self._reduction)
        if not self.is_boundary:
            return
        fragment, grad = self._fragments[id(parameter)], parameter.grad
        assert grad is not None
        part = grad.view(-1).narrow(0, fragment.offset, fragment.numel)
        self._norms[id(parameter)] = part.to(torch.float64).norm(2)
        overflows = has_inf_or_nan(grad)
        self.wait(self._reduction)
        del overflows
        if part.dtype is not torch.float32:
            part = part.to(torch.float32)
        self.wait(self._reduction)
        del part
        self.record_use(grad, self._reduction)
        del grad
        parameter.grad = None

    def after_backward(self) -> None:
        """`allreduce_gradients`, `independent_gradient_partition_epilogue`."""
        if not self.divides_grads and not self.is_boundary:
            return
        self._reduce()
        self.wait_for_all()
        if not self.plan.offloads:
            self._collect()
        self.bucket.buffers.clear()
        self._grads_in_partition = None
        self._is_ready = False
        self.zero_grad()

    def _collect(self) -> None:
        """The gradients of this rank's parameters, summed over micro-batches; at the last as the
        fragments of the partition (`get_all_grad_tensors`, `get_flat_partition`).
        """
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._mine]
        if self._kept is None:
            self._kept = grads
        else:
            for kept, new in zip(self._kept, grads, strict=True):
                kept.add_(new)
        self.label(self._kept, MemKind.GRADS)
        self.zero.all_grad_tensors[0] = self._kept
        if not self.is_boundary:
            return
        self.zero.all_grad_tensors[0] = None
        pieces = [self._fragment_of(p, g) for p, g in zip(self._mine, self._kept, strict=True)]
        self._kept = None
        missing = self.partition_numel - sum(p.numel() for p in pieces)
        if missing:
            pieces.append(torch.zeros(missing, dtype=self.dtype, device=GPU))
            self.recorder.label(pieces[-1], MemKind.GRADS)
        self.zero.averaged_gradients[0] = pieces

    def _fragment_of(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        fragment = self._fragments[id(parameter)]
        if fragment.numel == grad.numel():
            return grad
        return grad.contiguous().view(-1).narrow(0, fragment.offset, fragment.numel)

    # the step

    def update(self) -> None:
        """`step`."""
        self._micro_step = -1
        if self.plan.offloads:
            self._update_on_host()
        else:
            self._update_on_gpu()
        send(self.recorder, self.flat, self.world_size)

    def _update_on_gpu(self) -> None:
        grads = self.zero.averaged_gradients[0]
        assert grads is not None
        if self.dtype is not torch.float32:
            self._check_overflow(grads)
        norm = self.keep_norm(self._norm_of(grads))
        flat = _flatten_dense_tensors(grads)  # type: ignore[no-untyped-call]
        del grads
        grad = flat.to(torch.float32)
        del flat
        self.recorder.label(grad, MemKind.GRADS)
        self._master.grad = grad
        self.zero.averaged_gradients[0] = None
        if self.dtype is torch.float16:
            grad.mul_(1.0 / LOSS_SCALE)
        self.zero.optimizer.step()
        self._master.grad = None
        del grad, norm

    def _check_overflow(self, grads: Sequence[Tensor]) -> None:
        """`has_overflow`."""
        overflow = _num_overflowing(grads).bool()
        flag = overflow.byte()
        self.wait()
        del overflow, flag

    def _norm_of(self, grads: Sequence[Tensor]) -> Tensor:
        """`get_grad_norm_direct`: every gradient once in 64 bits."""
        norms = [
            torch.linalg.vector_norm(grad.to(torch.float64).detach(), ord=2.0)
            for grad, _ in zip(grads, self._mine, strict=False)
        ]
        if norms:
            total = torch.stack(norms).pow(2.0).sum().float()
        else:
            total = torch.tensor(0.0, dtype=torch.float32, device=GPU)
        total = total.pow(0.5)
        mask_invalid(total)
        return total

    def _update_on_host(self) -> None:
        """The host has the gradients; only scalars are made on the GPU."""
        self.wait(self._reduction)
        if self.dtype is not torch.float32:
            flag = torch.tensor([0], dtype=torch.uint8, device=GPU)
            self.wait()
            del flag
        for _ in self._norms:
            self.wait(self._reduction)
        total = torch.tensor([0.0], dtype=torch.float, device=GPU)
        self.wait()
        del total
        self._norms = {}

    def host_terms(self) -> list[HostTerm]:
        """Masters, their gradients and moments, and what stands between them and the GPU."""
        if not self.plan.offloads:
            return []
        numel, item = self.partition_numel, self.dtype.itemsize
        of = f"{self.flat.numel():,} elements / {self.world_size}"
        terms = [
            HostTerm("fp32 master weights", 4 * numel, f"4 B x {of}"),
            HostTerm("fp32 gradients", 4 * numel, f"4 B x {of}"),
            HostTerm("Adam moments", 8 * numel, f"2 x 4 B x {of}"),
            HostTerm("copy of the weights for the GPU", item * numel, f"{item} B x {of}"),
            HostTerm(
                "staging buffer of the largest gradient",
                item * self._largest_numel,
                f"{item} B x {self._largest_numel:,} elements",
            ),
        ]
        if self.plan.accumulate_grad_batches > 1 and self.divides_grads:
            total = sum(p.numel() for p in self._mine)
            terms.append(
                HostTerm(
                    "gradients summed over micro-batches",
                    item * total,
                    f"{item} B x {total:,} elements of the parameters in the partition",
                )
            )
        return terms


def _num_overflowing(grads: Sequence[Tensor]) -> Tensor:
    """`has_overflow_partitioned_grads_serial`."""
    count = torch.zeros([1], dtype=torch.float, device=GPU)
    for grad in grads:
        count += has_inf_or_nan(grad)
    return count
