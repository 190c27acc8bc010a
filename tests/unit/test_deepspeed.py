"""DeepSpeed's own engine on one rank of several virtual GPUs: what each stage keeps, and where."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memest import virtual_gpu
from memest.estimator.integrations.deepspeed import _buckets
from memest.estimator.predict import predict
from memest.estimator.replay.replay import Program
from memest.estimator.replay.simulated_plan import candidate_ranks
from memest.estimator.tensors.storages import MemKind
from memest.plan import TrainingPlan
from memest.report import Phase
from tests.ranks import alive_after, events_until, made, run_rank

# Shapes: B rows, D width in, F width out, H heads of the loss. Pairwise different.
B, D, F, H = 3, 5, 7, 2
BODY, HEAD = D * F, F * H
TRAINED = BODY + HEAD
W = 4
PADDED = 56
"""49 elements, to the next multiple of 2 * W (`nccl_start_alignment_factor`)."""

PART = PADDED // W
BUCKET = 64


class Model(nn.Module):
    """Two linear layers, 35 and 14 elements."""

    def __init__(self, *, is_body_frozen: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(D, F, bias=False)
        self.head = nn.Linear(F, H, bias=False)
        self.body.requires_grad_(not is_body_frozen)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.to(self.body.weight.dtype)))
        return out.sum()


def run(strategy: str, *, rank: int = 0, is_body_frozen: bool = False, **options: Any) -> Program:
    given = {
        "devices": W, "reduce_bucket_size": BUCKET, "optim": "adamw", "precision": "bf16-true"
    }  # fmt: skip
    make = partial(Model, is_body_frozen=is_body_frozen)
    return run_rank(make, (B, D), rank=rank, strategy=strategy, **(given | options))


def alive(program: Program, phase: Phase, *, step: int = 1, micro_batch: int = 0) -> Any:
    """Bytes by kind at a probe of the second step."""
    return alive_after(program, events_until(program, step, micro_batch, phase))


def test_stage_1_and_2_keep_all_weights_and_a_part_of_the_rest() -> None:
    """Weights are one flat tensor; 4 B of master and 8 B of moments an element of the part."""
    for stage in (1, 2):
        held = alive(run(f"deepspeed_stage_{stage}"), Phase.AFTER_OPTIMIZER_STEP)

        assert held[MemKind.PARAMS] == 2 * PADDED
        assert held[MemKind.OPTIMIZER] - (4 + 8) * PART in range(64)  # AdamW counts its steps
        assert held[MemKind.GRADS] == 0


def test_frozen_parameters_stay_as_they_are() -> None:
    """Only the head's 14 elements are flattened, to 16."""
    held = alive(run("deepspeed_stage_2", is_body_frozen=True), Phase.AFTER_OPTIMIZER_STEP)

    assert held[MemKind.PARAMS] == 2 * 16 + 2 * BODY


def test_mixed_precision_casts_every_parameter() -> None:
    """`bf16-mixed` keeps no 32-bit copy but the master, frozen parameters included."""
    program = run("deepspeed_stage_2", precision="bf16-mixed", is_body_frozen=True)

    assert alive(program, Phase.AFTER_OPTIMIZER_STEP)[MemKind.PARAMS] == 2 * 16 + 2 * BODY


@pytest.mark.parametrize(("rank", "kept"), [(0, BODY), (1, BODY), (2, TRAINED), (3, HEAD)])
def test_a_rank_keeps_the_gradients_that_overlap_its_partition(rank: int, kept: int) -> None:
    """The body has elements 0 to 34, the head 35 to 48; rank 2 has 28 to 41 and so both.

    The last rank's part is padded by the 7 elements that are left of it.
    """
    padding = PADDED - TRAINED if rank == W - 1 else 0

    held = alive(run("deepspeed_stage_2", rank=rank), Phase.AFTER_BACKWARD)

    assert held[MemKind.GRADS] == 2 * (kept + padding)


def test_stage_1_keeps_whole_gradients_until_the_last_micro_batch() -> None:
    program = run("deepspeed_stage_1", accumulate_grad_batches=2)

    assert alive(program, Phase.AFTER_BACKWARD)[MemKind.GRADS] == 2 * TRAINED
    assert alive(program, Phase.AFTER_BACKWARD, micro_batch=1)[MemKind.GRADS] == 2 * BODY


def test_stage_3_keeps_a_part_of_everything() -> None:
    """Each weight is cut by itself, to the next element, and gathered in passing."""
    program = run("deepspeed_stage_3")
    parts = -(-BODY // W) + -(-HEAD // W)

    held = alive(program, Phase.AFTER_OPTIMIZER_STEP)

    assert held[MemKind.OPTIMIZER] - (4 + 8) * parts in range(64)
    persistent = 2 * TRAINED  # both are below `stage3_param_persistence_threshold`
    assert held[MemKind.PARAMS] + held[MemKind.GATHERED] >= persistent


def test_buckets_are_of_the_size_that_the_plan_says() -> None:
    """Two of `reduce_bucket_size` 16-bit elements (`overlap_comm`), for the backward alone."""
    program = run("deepspeed_stage_2")
    backward = program.steps[1][0][2].events

    assert made(program, backward, MemKind.BUCKETS).count(2 * BUCKET) == 2


def test_offload_leaves_no_optimizer_on_the_gpu() -> None:
    for stage in (2, 3):
        program = run(f"deepspeed_stage_{stage}_offload", optim="deepspeed_cpu")

        assert alive(program, Phase.AFTER_OPTIMIZER_STEP)[MemKind.OPTIMIZER] == 0


def test_a_prediction_says_what_offload_takes_on_the_host() -> None:
    """18 B an element: masters, their gradients, two moments, a 16-bit copy; and buffers."""
    values = {
        "model_name": "gpt2", "strategy": "deepspeed_stage_2_offload", "optim": "deepspeed_cpu",
        "devices": 2, "batch_size": 1, "seq_len": 16, "precision": "bf16-true", "gpu": ["h200"],
    }  # fmt: skip

    predicted = predict(TrainingPlan.from_dict(values))

    held = {term.kind: term.num_bytes for term in predicted.host_terms}
    assert held["tensors"] / (18 * predicted.model["num_params"]) == pytest.approx(1, abs=0.25)
    assert predicted.host_bytes == sum(held.values())


def test_one_prediction_leaves_nothing_behind_for_the_next(shallow: Callable[..., str]) -> None:
    """DeepSpeed keeps groups, contexts and accelerators in global variables."""
    values = {
        "model_name": shallow("gpt2"), "batch_size": 1, "seq_len": 16, "devices": 2,
        "gpu": ["h200"], "precision": "bf16-true",
    }  # fmt: skip
    plans = [TrainingPlan.from_dict(values | {"strategy": f"deepspeed_stage_{s}"}) for s in (3, 2)]
    alone = TrainingPlan.from_dict(values | {"devices": 1})

    before = predict(alone).peak_reserved_bytes
    first = [predict(plan).peak_reserved_bytes for plan in plans]
    from memest.estimator.replay import simulated_plan

    simulated_plan._cached_traces.cache_clear()

    assert [predict(plan).peak_reserved_bytes for plan in plans] == first
    assert predict(alone).peak_reserved_bytes == before


def test_the_ranks_that_differ_are_run() -> None:
    plan = partial(TrainingPlan, model_name="gpt2", devices=4)

    assert list(candidate_ranks(plan(strategy="deepspeed_stage_2"))) == [0, 1, 2, 3]
    assert list(candidate_ranks(plan(strategy="deepspeed_stage_3"))) == [0]


def test_gradients_are_finite_in_releases_that_compare_large_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed 0.17 takes the maximum of a mask as large as the gradients."""
    stage = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")

    def has_inf_or_nan(x: Tensor, j: Any = None) -> Tensor:
        return x.isnan().logical_or(x.isinf()).float().max()

    monkeypatch.setattr(stage.DeepSpeedZeroOptimizer, "_has_inf_or_nan", has_inf_or_nan)
    with virtual_gpu("h200"):
        grads = torch.empty(1 << 24, device="cuda")

        assert stage.DeepSpeedZeroOptimizer._has_inf_or_nan(grads).item() == 0


def test_buckets_of_releases_before_0_17_5_are_one_list() -> None:
    buffers = [torch.empty(2), torch.empty(3)]

    assert list(_buckets(SimpleNamespace(ipg_buffer=buffers))) == buffers
    assert list(_buckets(SimpleNamespace(ipg_buffer=None))) == []


def test_a_step_of_the_engine_calls_its_optimizer_once_per_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training takes one step, whose log of launches holds those of all groups."""
    module = pytest.importorskip("deepspeed.runtime.engine")

    def step(engine: Any) -> None:
        for _ in range(2):
            engine.inner.step()

    monkeypatch.setattr(module.DeepSpeedEngine, "step", step)
    with virtual_gpu("h200") as gpu:
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        engine = SimpleNamespace(optimizer=None, inner=torch.optim.SGD([weight]))
        for _ in range(3):
            (weight * 2).sum().backward()
            module.DeepSpeedEngine.step(engine)
        steps = gpu.virtual.mode.work.steps
        engine.inner.step()

    assert gpu.num_steps == 4
    assert len(steps) == 3
