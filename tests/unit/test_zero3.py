"""ZeRO 3 on one rank: partitions between steps, whole parameters while they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from memest.estimator.device.storages import MemKind
from memest.estimator.device.streams import MAIN
from memest.estimator.parallel.zero3 import Zero3
from memest.estimator.parallel.zero3_coordinator import PERSISTENCE_NUMEL, PREFETCH_NUMEL
from memest.plan import TrainingPlan
from tests.ranks import ZeroRun

# Shapes: B rows, D width in, E width between, H heads of the loss. Pairwise different.
B, D, E, H = 3, 401, 307, 2
BODY, HEAD, BIAS = D * E, E * H, H
W = 4
PARTS = {"body": 30777, "head": 154, "bias": 1}
"""Of 123 107, 614 and 2 elements on 4 ranks, rounded up."""

KEPT = sum(PARTS.values())
BUCKET = 200_000


class Model(nn.Module):
    """A layer above the size that stays gathered, and a small one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, E, bias=False)
        self.head = nn.Linear(E, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out.sum()


class Peeking(Model):
    """Reads the head's weight before the head runs."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).to(self.head.weight.dtype))
        return out.sum()


class Run(ZeroRun):
    """One rank of a plan with this strategy."""

    def __init__(
        self,
        strategy: str = "deepspeed_stage_3",
        *,
        rank: int = 0,
        make: Callable[[], nn.Module] = Model,
        freeze: Sequence[str] = (),
        **options: Any,
    ) -> None:
        optim = "deepspeed_cpu" if strategy.endswith("offload") else "sgd"
        options = {"devices": W, "reduce_bucket_size": BUCKET, "optim": optim} | options
        plan = TrainingPlan(model_name="m", strategy=strategy, **options)

        def prepare(model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in freeze)

        super().__init__(Zero3, plan, make, (B, D), rank=rank, prepare=prepare)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No rank is left open."""
    yield
    ZeroRun.close()


def test_a_rank_keeps_a_part_of_each_parameter() -> None:
    """Partitions, a 32-bit master, gradients and one bucket; no whole parameter."""
    run = Run()

    alive = run.alive()
    assert alive[MemKind.PARAMS] == 2 * KEPT
    assert alive[MemKind.OPTIMIZER] == 4 * KEPT
    assert alive[MemKind.GRADS] == 2 * KEPT
    assert alive[MemKind.BUCKETS] == 2 * BUCKET
    assert alive[MemKind.GATHERED] == 0
    assert [p.numel() for p in run.model.parameters()] == [0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_partitions_sum_to_the_parameters_and_their_padding(world_size: int) -> None:
    """Each parameter is padded to a multiple of the ranks."""
    run = Run(devices=world_size)

    total = sum(world_size * one.part_numel for one in run.zero._mine)

    assert total == sum(-(-n // world_size) * world_size for n in (BODY, HEAD, BIAS))


def test_32_bit_masters_are_copies_too() -> None:
    """DeepSpeed means to share them and does not."""
    run = Run(precision="32-true")

    assert run.alive()[MemKind.PARAMS] == 4 * KEPT
    assert run.alive()[MemKind.OPTIMIZER] == 4 * KEPT


def test_frozen_parameters_are_divided_and_have_no_master() -> None:
    """Only the trained ones share the flat tensors."""
    run = Run(freeze=["body.weight"])

    assert run.alive()[MemKind.PARAMS] == 2 * KEPT
    assert run.alive()[MemKind.OPTIMIZER] == 4 * (PARTS["head"] + PARTS["bias"])


def test_the_first_micro_batch_gathers_module_by_module() -> None:
    """The body alone in place; the head's two together, then each by itself. All are let go."""
    run = Run()

    forward, backward = run.micro_batch()

    joined = 2 * W * (PARTS["head"] + PARTS["bias"])
    assert run.sizes(forward, MemKind.GATHERED) == [
        2 * W * PARTS["body"], joined, 2 * HEAD, 2 * BIAS
    ]  # fmt: skip
    assert run.sizes(backward, MemKind.GATHERED) == [
        joined, 2 * HEAD, 2 * BIAS, 2 * W * PARTS["body"]
    ]  # fmt: skip
    assert run.alive()[MemKind.GATHERED] == 0


def test_small_parameters_stay_gathered_after_a_step() -> None:
    """Those of at most 100 000 elements, each in a tensor of its own."""
    run = Run()
    run.micro_batch()

    run.step()

    assert HEAD <= PERSISTENCE_NUMEL < BODY
    assert run.alive()[MemKind.GATHERED] == 2 * W * (PARTS["head"] + PARTS["bias"])


def test_later_micro_batches_gather_ahead_and_keep_what_comes_again() -> None:
    """What the record says comes next is there before its module runs, and not gathered twice."""
    run = Run()
    run.micro_batch()
    run.step()

    forward, backward = run.micro_batch()

    assert BODY < PREFETCH_NUMEL
    assert run.sizes(forward, MemKind.GATHERED) == [2 * W * PARTS["body"]]
    assert run.sizes(backward, MemKind.GATHERED) == []


def test_parameters_are_gathered_on_a_stream_of_their_own() -> None:
    """In the forward; gradients are joined on another."""
    run = Run()

    forward, _ = run.micro_batch()

    table = run.recorder.storages
    streams = {
        table.streams.get(e, MAIN) for e in forward if e >= 0 and table.kinds[e] is MemKind.GATHERED
    }
    assert streams == {run.zero._coordinator.stream}
    assert run.zero._coordinator.stream != MAIN


def test_a_parameter_that_another_module_reads_is_gathered_for_it() -> None:
    """First at once, in a tensor of its own; from then on before the reader runs."""
    run = Run(make=Peeking)

    forward, _ = run.micro_batch()

    assert run.sizes(forward, MemKind.GATHERED)[:2] == [
        2 * W * PARTS["body"], 2 * W * PARTS["head"]
    ]  # fmt: skip
    own = run.zero._coordinator._own[run.model]
    assert [one.numel for one in own.values()] == [HEAD]


def test_gradients_are_interleaved_by_rank_beside_their_padding() -> None:
    """614 elements on 4 ranks lack 2, 2 elements lack 2 of one each, 123 107 lack 1."""
    run = Run()

    _, backward = run.micro_batch()

    assert run.sizes(backward, MemKind.BUCKETS) == [2, 2 * 1, 2 * 2, 2 * 1, 2 * W * KEPT]


def test_a_gradient_that_divides_evenly_is_reduced_in_place() -> None:
    """Alone in its reduction and without padding, it is not copied."""
    run = Run(devices=1, freeze=["head.weight", "head.bias"])

    _, backward = run.micro_batch()

    assert run.sizes(backward, MemKind.BUCKETS) == []


def test_offload_leaves_the_bucket_and_what_is_gathered_on_the_gpu() -> None:
    """And nothing but small parameters between steps."""
    run = Run("deepspeed_stage_3_offload")

    run.micro_batch()
    run.step()

    alive = run.alive()
    assert alive[MemKind.PARAMS] == 0
    assert alive[MemKind.OPTIMIZER] == 0
    assert alive[MemKind.GRADS] == 0
    assert alive[MemKind.BUCKETS] == 2 * BUCKET
    assert alive[MemKind.GATHERED] == 2 * W * (PARTS["head"] + PARTS["bias"])


def test_offload_puts_all_states_on_the_host() -> None:
    """Trained parameters are pinned, by the power of two; frozen ones are not."""
    run = Run("deepspeed_stage_3_offload", freeze=["head.weight"])

    numel = PARTS["body"] + PARTS["bias"]
    terms = {term.what: (term.num_bytes, term.is_pinned) for term in run.zero.host_terms()}

    assert 2 * numel == 61_556
    assert terms == {
        "trained parameters": (65_536, True),
        "fp32 master weights": (4 * numel, False),
        "fp32 gradients": (4 * numel, False),
        "gradients": (2 * numel, False),
        "Adam moments": (8 * numel, False),
        "frozen parameters": (2 * PARTS["head"], False),
    }


def test_the_linear_layer_is_put_back() -> None:
    """DeepSpeed replaces `F.linear` for good; a trace does so for its own time."""
    original = F.linear

    run = Run()
    with run.zero.linear_layers():
        assert F.linear is not original

    assert F.linear is original
