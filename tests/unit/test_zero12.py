"""ZeRO 1 and 2 on one rank: what is kept, what passes, what lies on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memest.estimator.device.storages import MemKind
from memest.estimator.parallel.zero12 import Zero12
from memest.plan import TrainingPlan
from tests.ranks import ZeroRun

# Shapes: B rows, D width in, F width out, H heads of the loss. Pairwise different.
B, D, F, H = 3, 5, 7, 2
BODY, HEAD = D * F, F * H
TRAINED = BODY + HEAD
W = 4
PADDED = 56
"""49 elements, to the next multiple of 2 * W."""

PART = PADDED // W
BUCKET = 64


class Model(nn.Module):
    """Two linear layers, 35 and 14 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, F, bias=False)
        self.head = nn.Linear(F, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out.sum()


class Run(ZeroRun):
    """One rank of a plan with this strategy."""

    def __init__(
        self,
        strategy: str,
        *,
        rank: int = 0,
        prepare: Callable[[Model], Any] = lambda model: None,
        **options: Any,
    ) -> None:
        options = {"devices": W, "reduce_bucket_size": BUCKET, "optim": "sgd"} | options
        plan = TrainingPlan(model_name="m", strategy=strategy, **options)
        super().__init__(Zero12, plan, Model, (B, D), rank=rank, prepare=prepare)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No rank is left open."""
    yield
    ZeroRun.close()


def test_parameters_are_one_flat_tensor_padded_to_twice_the_ranks() -> None:
    """49 elements are padded to 56; the parameters are views of them and the old ones are gone."""
    run = Run("deepspeed_stage_2")

    assert run.zero.flat.numel() == PADDED
    assert run.alive()[MemKind.PARAMS] == 2 * PADDED
    assert run.alive()[MemKind.OPTIMIZER] == 4 * PART


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_the_fragments_of_all_ranks_are_the_trained_elements(world_size: int) -> None:
    """What the ranks update sums to the whole; partitions sum to the whole and its padding."""
    runs = [Run("deepspeed_stage_2", devices=world_size, rank=r) for r in range(world_size)]

    fragments = [f.numel for run in runs for f in run.zero._fragments.values()]
    assert sum(fragments) == TRAINED
    padded = -(-TRAINED // (2 * world_size)) * 2 * world_size
    assert sum(run.zero.partition_numel for run in runs) == padded


def test_frozen_parameters_stay_as_they_are() -> None:
    """Only the head's 14 elements are flattened, to 16."""
    run = Run("deepspeed_stage_2", prepare=lambda m: m.body.requires_grad_(False))

    assert run.zero.flat.numel() == 16
    assert run.alive()[MemKind.PARAMS] == 2 * 16 + 2 * BODY


def test_mixed_precision_casts_every_parameter() -> None:
    """`bf16-mixed` keeps no 32-bit copy but the master, frozen parameters included."""
    run = Run(
        "deepspeed_stage_2",
        precision="bf16-mixed",
        prepare=lambda m: m.float().body.requires_grad_(False),
    )

    assert run.model.body.weight.dtype is torch.bfloat16
    assert run.alive()[MemKind.PARAMS] == 2 * 16 + 2 * BODY


def test_two_buckets_live_through_the_backward_alone() -> None:
    """Two of `reduce_bucket_size` 16-bit elements; the second takes over when the first is full."""
    run = Run("deepspeed_stage_2")

    made = run.sizes(run.micro_batch()[1], MemKind.BUCKETS)

    assert made[:2] == [2 * BUCKET, 2 * BUCKET]
    assert run.alive()[MemKind.BUCKETS] == 0


def test_a_bucket_of_several_ranks_is_joined_for_its_reduction() -> None:
    """All 49 gradients belong to four ranks, so they are copied; those of one rank are not."""
    four = Run("deepspeed_stage_2")
    assert four.sizes(four.micro_batch()[1], MemKind.BUCKETS)[2:] == [2 * TRAINED]

    one = Run("deepspeed_stage_2", devices=1)
    assert one.sizes(one.micro_batch()[1], MemKind.BUCKETS)[2:] == []


@pytest.mark.parametrize(
    ("rank", "whole", "fragment"),
    [(0, BODY, PART), (1, BODY, PART), (2, TRAINED, PART), (3, HEAD, TRAINED - 3 * PART)],
)
def test_a_rank_keeps_the_gradients_that_overlap_its_partition(
    rank: int, whole: int, fragment: int
) -> None:
    """Whole gradients are copied out of the bucket; fragments of them, padded, make the partition.

    The body has elements 0 to 34, the head 35 to 48; rank 2 has 28 to 41 and so both.
    """
    run = Run("deepspeed_stage_2", rank=rank)

    run.micro_batch()

    padding = PART - fragment
    assert run.alive()[MemKind.GRADS] == 2 * whole + 2 * padding
    pieces = run.zero.zero.averaged_gradients[0]
    assert pieces is not None
    assert sum(piece.numel() for piece in pieces) == PART
    assert all(p.grad is None for p in run.model.parameters())


def test_the_step_frees_gradients_and_makes_32_bit_ones_in_passing() -> None:
    """A partition of 14 gradients in 32 bits comes and goes."""
    run = Run("deepspeed_stage_2")
    run.micro_batch()

    made = run.sizes(run.step(), MemKind.GRADS)

    assert made == [4 * PART]
    assert run.alive()[MemKind.GRADS] == 0


def test_stage_1_keeps_whole_gradients_until_the_last_micro_batch() -> None:
    """Nothing is reduced before; the buckets stay through the next forward."""
    run = Run("deepspeed_stage_1", accumulate_grad_batches=2)

    run.micro_batch(is_last=False)

    assert run.alive()[MemKind.GRADS] == 2 * TRAINED
    assert run.alive()[MemKind.BUCKETS] == 2 * 2 * BUCKET
    run.micro_batch()
    assert all(p.grad is None for p in run.model.parameters())
    assert run.alive()[MemKind.BUCKETS] == 0


def test_stage_2_sums_micro_batches_into_the_first_ones_buffer() -> None:
    """The second buffer is there while it is added, and goes."""
    run = Run("deepspeed_stage_2", accumulate_grad_batches=2)

    run.micro_batch(is_last=False)
    assert run.alive()[MemKind.GRADS] == 2 * BODY
    run.micro_batch()
    assert run.alive()[MemKind.GRADS] == 2 * BODY


def test_a_gradient_beyond_the_bucket_is_reduced_where_it_is() -> None:
    """35 elements do not fit a bucket of 20; one rank keeps all, and one element of padding."""
    run = Run("deepspeed_stage_2", devices=1, reduce_bucket_size=20)

    made = run.sizes(run.micro_batch()[1], MemKind.BUCKETS)

    assert made == [2 * 20, 2 * 20]
    assert run.alive()[MemKind.GRADS] == 2 * (TRAINED + 1)


def test_adagrads_first_state_is_never_freed() -> None:
    """The engine keeps the optimizer that it was given; another one is made for the master."""
    run = Run("deepspeed_stage_2", optim="adagrad")

    assert run.alive()[MemKind.OPTIMIZER] == 2 * TRAINED + 4 * PART
    run.micro_batch()
    run.step()
    state = run.zero.zero.state.values()
    assert [s["sum"].numel() for s in state] == [PART]


def test_offload_leaves_weights_and_one_gradients_buffer_on_the_gpu() -> None:
    """The buffer is of the size of the largest parameter."""
    run = Run("deepspeed_stage_2_offload", optim="deepspeed_cpu")

    run.micro_batch()
    run.step()

    alive = run.alive()
    assert alive[MemKind.PARAMS] == 2 * PADDED
    assert alive[MemKind.BUCKETS] == 2 * BODY
    assert alive[MemKind.OPTIMIZER] == 0
    assert alive[MemKind.GRADS] == 0


def test_offload_puts_18_bytes_an_element_and_its_buffers_on_the_host() -> None:
    """Masters, gradients, two moments and a 16-bit copy; with several micro-batches their sum."""
    run = Run("deepspeed_stage_2_offload", optim="deepspeed_cpu", accumulate_grad_batches=2)

    terms = {term.what: term.num_bytes for term in run.zero.host_terms()}

    assert terms == {
        "fp32 master weights": 4 * PART,
        "fp32 gradients": 4 * PART,
        "Adam moments": 8 * PART,
        "copy of the weights for the GPU": 2 * PART,
        "staging buffer of the largest gradient": 2 * BODY,
        "gradients summed over micro-batches": 2 * BODY,
    }


def test_full_precision_needs_no_second_gradient() -> None:
    """In `32-true` buckets, gradients and masters have 32 bits, and the norm is taken once."""
    run = Run("deepspeed_stage_2", precision="32-true")

    made = run.sizes(run.micro_batch()[1], MemKind.BUCKETS)

    assert made == [4 * BUCKET, 4 * BUCKET, 4 * TRAINED]
    assert run.alive()[MemKind.PARAMS] == 4 * PADDED
    assert run.alive()[MemKind.OPTIMIZER] == 4 * PART
