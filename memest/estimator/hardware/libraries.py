"""What libraries hold beside the caching allocator and the CUDA context: NCCL, int8 kernels.

Measured: process bytes less reserved less the context of one process, in 54 runs on four H200 of
one host (NCCL as torch 2.11 brings it, NVLink, multicast off); `results/h200-multi.jsonl`. Equal on
every rank and for every model to 18 MiB. NCCL takes more on machines with more GPUs, and less where
it finds fewer links: there it is an estimate, as the report says.
"""

from __future__ import annotations

from memest.plan import TrainingPlan

MIB = 1 << 20

COMMUNICATOR_BYTES = 846 * MIB
"""The first communicator of a process, with NCCL's kernels."""

FURTHER_COMMUNICATOR_BYTES = 388 * MIB
"""Another one over the same GPUs: the device mesh of FSDP2."""

COMMUNICATOR_OF_ONE_BYTES = 564 * MIB
"""The first communicator of a single rank: an H100, torch 2.11, after its first `all_reduce`."""

SUBGROUP_BYTES = 485 * MIB
"""Another one over some of the GPUs: shards and replicas of a hybrid mesh have one each."""

DEEPSPEED_BYTES = 486 * MIB
"""What DeepSpeed 0.19.8 opens beside the first communicator."""

DEEPSPEED_ALONE_BYTES = 952 * MIB
"""What DeepSpeed opens on a single GPU, the first communicator included."""


DEEPSPEED_HOST_BYTES = 1160 * MIB
"""Host memory of one process under DeepSpeed beside what it offloads: CUDA, NCCL, modules. Median
of 14 runs without offload (1071 to 1259 MiB); `results/h200-multi.jsonl` and its neighbour."""

INT8_BYTES = 64 * MIB
"""cuBLAS's int8 kernels, which LLM.int8 loads: `results/h200-variants.jsonl`, five runs of six."""


def libraries_bytes(plan: TrainingPlan) -> int:
    """Bytes on each GPU for the communicators and kernels of `plan`."""
    int8_bytes = INT8_BYTES if plan.use_qlora and plan.quant == "int8" else 0
    return int8_bytes + _communicators_bytes(plan)


def _communicators_bytes(plan: TrainingPlan) -> int:
    if not plan.is_distributed:
        return 0
    if plan.is_deepspeed:
        is_alone = plan.world_size == 1
        return DEEPSPEED_ALONE_BYTES if is_alone else COMMUNICATOR_BYTES + DEEPSPEED_BYTES
    if plan.is_fsdp and plan.sharding_strategy == "HYBRID_SHARD":
        return COMMUNICATOR_BYTES + 2 * SUBGROUP_BYTES
    if plan.strategy == "fsdp2":
        return COMMUNICATOR_BYTES + FURTHER_COMMUNICATOR_BYTES
    return COMMUNICATOR_BYTES
