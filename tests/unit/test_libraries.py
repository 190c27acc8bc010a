"""What NCCL and DeepSpeed hold on a GPU beside the allocator."""

from __future__ import annotations

from typing import Any

import pytest

from memest.estimator.hardware.gpus import libraries_bytes
from memest.estimator.predict import predict
from memest.plan import TrainingPlan

MIB = 1 << 20


def plan(**values: Any) -> TrainingPlan:
    if values.get("strategy", "").endswith("_offload"):
        values["optim"] = "deepspeed_cpu"
    return TrainingPlan.from_dict({"model_name": "gpt2", "devices": 4, **values})


def test_one_gpu_opens_no_communicator() -> None:
    assert libraries_bytes(plan(devices=1)) == 0


@pytest.mark.parametrize(
    ("values", "mib"),
    [
        ({}, 846),  # `auto` on several GPUs is DDP
        ({"strategy": "ddp"}, 846),
        ({"strategy": "ddp_find_unused_parameters_true"}, 846),
        ({"strategy": "fsdp"}, 846),
        ({"strategy": "fsdp2"}, 846 + 388),
        ({"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"}, 846 + 2 * 485),
        ({"strategy": "fsdp2", "sharding_strategy": "HYBRID_SHARD"}, 846 + 2 * 485),
        ({"strategy": "deepspeed_stage_1"}, 846 + 486),
        ({"strategy": "deepspeed_stage_2"}, 846 + 486),
        ({"strategy": "deepspeed_stage_3_offload"}, 846 + 486),
        ({"strategy": "deepspeed_stage_2_offload", "devices": 1}, 952),
    ],
)
def test_each_strategy_opens_its_communicators(values: dict[str, Any], mib: int) -> None:
    assert libraries_bytes(plan(**values)) == mib * MIB


def test_they_are_part_of_the_process_and_not_of_the_allocator() -> None:
    """Process bytes: reserved, the CUDA context, and the communicators of DDP."""
    one = predict(plan(devices=1, seq_len=16, gpu="h200"))
    four = predict(plan(seq_len=16, gpu="h200"))

    beside = [p.process_bytes - p.peak_reserved_bytes for p in (one, four)]
    assert beside[1] - beside[0] == 846 * MIB
