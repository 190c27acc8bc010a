"""Rough kernel times: enough to decide whether the GPU or the host is behind.

    time = max(operations / peak rate of the type, bytes read and written / memory bandwidth)

Only the free timing of blocks used by two streams depends on these times, and so the reserved bytes
of parallel strategies.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.work import written
from memest.estimator.tensors.placement import tensors_in
from memest.plan.reading import read_table

LAUNCH_US = 15.6
"""Host microseconds of an operator in an eager training step: `scripts/measure_pace.py` on the host
of an H200, torch 2.11."""

SEGMENT_US = ((2, 63), (64, 68), (256, 75), (512, 100), (1024, 131), (4096, 295), (8192, 510))
"""(MiB, microseconds): shortest of eleven host times of a `cudaMalloc`: `scripts/measure_pace.py`
on the host of an H100. On another host it took up to eight times as long."""

LOAD_US = 2500.0
"""Least host microseconds of an operator's first launch, which loads kernels. 0 where the GPU is
assumed to lag most. In scripts on two H100s of validation/scripts/ the first step of AdamW, with
its dozen operators, took 33 to 300 ms longer than the next. `scripts/measure_pace.py` measures it
too.
"""

LAUNCH_QUEUE = 1022
"""Launches that a stream queues before the GPU has run the first of them; the next launch blocks
the host. `scripts/measure_pace.py` on an H100, driver 580."""

PAGEABLE_GB_S = 7.4
"""GB/s of a copy from pageable memory, which the driver stages in its own pinned memory:
`scripts/measure_pace.py` on an H100. It measured 2.7 for copies to new pageable memory."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Peak rates of one kind of chip, dense."""

    tflops_16bit: float
    tflops_32bit: float
    link_gb_s: float  # bandwidth to the other GPUs of a node, one direction
    host_gb_s: float  # bandwidth to the host, one direction

    @property
    def pageable_gb_s(self) -> float:
        """Rate of a copy between pageable memory and the GPU."""
        return min(self.host_gb_s, PAGEABLE_GB_S)


_BY_CAPABILITY = {
    tuple(map(int, capability.split("."))): Speed(*rates)
    for capability, rates in read_table(__file__, "kinds.json")["rates"].items()
}
"""Rates by compute capability, from NVIDIA's data sheets of V100 SXM2, T4, A100 80GB SXM, A10,
RTX 4090, H200 SXM, B200 and RTX 5090."""


def speed_of(gpu: Gpu) -> Speed:
    """Return the rates of the GPU's chip, or of the newest older chip in the table.

    An instance under MIG computes with its share of the chip.
    """
    known = [c for c in _BY_CAPABILITY if c <= gpu.capability]
    whole = _BY_CAPABILITY[max(known, default=min(_BY_CAPABILITY))]
    share = gpu.sm_share
    if share == 1:
        return whole
    return replace(
        whole, tflops_16bit=whole.tflops_16bit * share, tflops_32bit=whole.tflops_32bit * share
    )


def segment_us(num_bytes: int) -> float:
    """Return microseconds of the host for a `cudaMalloc` of `num_bytes`."""
    mib, cost = zip(*SEGMENT_US, strict=True)
    return float(np.interp(num_bytes / 2**20, mib, cost))


def kernel_us(gpu: Gpu, speed: Speed, func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return microseconds of the kernels of one call; 0 for a view."""
    if func.is_view:
        return 0.0
    # an in-place operator returns what it writes, which would count twice
    positions = () if func._schema.returns else written(func)
    unreturned = [args[i] for i in positions if i < len(args)]
    num_bytes = sum(t.nbytes for t in tensors_in((*args, *unreturned, out)))
    moved = num_bytes / gpu.memory_gb_s * 1e-3
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return moved
    first = next(tensors_in(args), None)
    is_16bit = first is not None and first.dtype in (torch.bfloat16, torch.float16)
    rate = speed.tflops_16bit if is_16bit else speed.tflops_32bit
    if "scaled_dot_product" in func._schema.name:
        args = _with_all_heads(args)
    args = [value for value in args if not isinstance(value, torch.dtype)]  # `mm` with `out_dtype`
    operations: int = count(*args, **kwargs, out_val=out)
    return max(moved, operations / rate * 1e-6)


def _with_all_heads(args: Any) -> list[Any]:
    """Return shapes in which keys have as many heads as queries, as torch 2.11's counters need."""
    shapes = [getattr(value, "shape", value) for value in args]
    heads = max(shape[1] for shape in shapes if isinstance(shape, torch.Size) and len(shape) == 4)
    return [
        torch.Size((shape[0], heads, *shape[2:]))
        if isinstance(shape, torch.Size) and len(shape) == 4
        else shape
        for shape in shapes
    ]
