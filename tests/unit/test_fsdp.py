"""What a rank holds under FSDP1, FSDP2 and ZeRO: shards and their padding are the whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memest import report
from memest.estimator.replay.replay import Program, StateBytes
from tests.ranks import alive_after, events_until, run_rank

B = 2
WORD = 4
"""Bytes of an element; everything here is in 32 bits."""

ALIGNED = 4
"""Elements: FSDP1 begins each parameter of a flat one at 16 bytes."""

Widths = Sequence[int]


class Layer(nn.Module):
    """A weight and a bias that FSDP wraps."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Tower(nn.Module):
    """Layers of these widths one after another, and a head that is wrapped with the model."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.ModuleList([Layer(a, b) for a, b in pairs])
        self.head = nn.Linear(widths[-1], 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out.sum()


def units(widths: Widths) -> list[list[tuple[int, ...]]]:
    """Shapes of what is divided together: each layer, then the head."""
    pairs = pairwise(widths)
    return [[(b, a), (b,)] for a, b in pairs] + [[(2, widths[-1])]]


def numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def traced(widths: Widths, *, rank: int = 0, num_steps: int = 1, **options: Any) -> Program:
    """The steps of one rank."""
    values = {"optim": "adamw", "precision": "32-true", "steps": num_steps} | options
    if values["strategy"].startswith("fsdp"):
        values["wrap_classes"] = ("Layer",)
    return run_rank(partial(Tower, widths), (B, widths[0]), rank=rank, **values)


def states(program: Program, phase: report.Phase) -> list[StateBytes]:
    """What the first step's probes of this phase read."""
    parts = [part for batch in program.steps[0] for part in batch]
    return [part.state for part in parts if part.phase is phase]


def after_backward(program: Program) -> StateBytes:
    return states(program, report.Phase.AFTER_BACKWARD)[-1]


def after_step(program: Program) -> StateBytes:
    return states(program, report.Phase.AFTER_OPTIMIZER_STEP)[-1]


def kept(widths: Widths, world_size: int, **options: Any) -> list[tuple[int, int, int]]:
    """Elements of parameters, gradients and moments on each rank."""
    ranks = [traced(widths, devices=world_size, rank=r, **options) for r in range(world_size)]
    read = [(after_backward(p), after_step(p)) for p in ranks]
    return [(s.params // WORD, b.grads // WORD, s.optimizer // WORD) for b, s in read]


some_widths = st.lists(st.integers(1, 23), min_size=2, max_size=3)
some_worlds = st.integers(1, 5)
few = settings(
    max_examples=4, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


def flat_numel(shapes: Sequence[Sequence[int]], world_size: int) -> int:
    """Of a flat parameter of FSDP1: each begins aligned; the sum goes to a multiple of ranks."""
    total = 0
    for shape in shapes:
        total = up_to(total, ALIGNED) + numel(shape)
    return up_to(total, world_size)


@few
@given(widths=some_widths, world_size=st.integers(2, 5))
def test_flat_shards_and_padding_sum_to_the_whole(widths: list[int], world_size: int) -> None:
    """FSDP1, which divides nothing on one GPU: all ranks have the same, gradients too. The
    optimizer sees no padding, so its two moments sum to twice the elements.
    """
    ranks = kept(widths, world_size, strategy="fsdp")

    whole = sum(flat_numel(shapes, world_size) for shapes in units(widths))
    part = whole // world_size
    elements = sum(numel(shape) for shapes in units(widths) for shape in shapes)
    assert [rank[:2] for rank in ranks] == [(part, part)] * world_size
    assert sum(moments for _, _, moments in ranks) == 2 * elements <= 2 * whole


@few
@given(widths=some_widths, world_size=some_worlds)
def test_rows_of_all_ranks_are_the_whole_parameter(widths: list[int], world_size: int) -> None:
    """FSDP2 divides rows, so the last ranks may have fewer, or none; nothing is counted twice."""
    ranks = kept(widths, world_size, strategy="fsdp2")

    shapes = [shape for unit in units(widths) for shape in unit]
    for rank, (params, grads, moments) in enumerate(ranks):
        rows = [-(-shape[0] // world_size) for shape in shapes]
        mine = [
            max(0, min(n, shape[0] - rank * n)) * numel(shape[1:])
            for shape, n in zip(shapes, rows, strict=True)
        ]
        assert (params, grads, moments) == (sum(mine), sum(mine), 2 * sum(mine))
    assert sum(params for params, _, _ in ranks) == sum(map(numel, shapes))


@few
@given(widths=some_widths, world_size=some_worlds)
def test_partitions_of_zero_3_sum_to_the_whole(widths: list[int], world_size: int) -> None:
    """Each parameter is divided by itself and rounded up; on the last rank lies its padding."""
    ranks = kept(widths, world_size, strategy="deepspeed_stage_3", reduce_bucket_size=4096)

    shapes = [shape for unit in units(widths) for shape in unit]
    part = sum(-(-numel(shape) // world_size) for shape in shapes)
    assert {params for params, _, _ in ranks} == {part}
    assert 0 <= world_size * part - sum(map(numel, shapes)) < world_size * len(shapes)


@few
@given(widths=some_widths, world_size=some_worlds, stage=st.sampled_from([1, 2]))
def test_moments_of_zero_1_and_2_sum_to_the_whole(
    widths: list[int], world_size: int, stage: int
) -> None:
    """Parameters are whole on every rank, in one flat tensor padded to twice the ranks; a
    partition has two moments, and a master copy where the parameters are not 32-bit ones."""
    strategy = f"deepspeed_stage_{stage}"
    ranks = kept(widths, world_size, strategy=strategy, reduce_bucket_size=4096)

    whole = sum(numel(shape) for unit in units(widths) for shape in unit)
    part = up_to(whole, 2 * world_size) // world_size
    assert {params for params, _, _ in ranks} == {whole}
    assert len({moments for _, _, moments in ranks}) == 1
    assert ranks[0][2] in (2 * part, 3 * part)


def test_uneven_rows_leave_the_last_rank_less() -> None:
    """Seven rows on four ranks are 2, 2, 2 and 1; the bias likewise, the head 1, 1, 0 and 0."""
    ranks = kept((5, 7), 4, strategy="fsdp2")

    assert [params for params, _, _ in ranks] == [
        2 * 5 + 2 + 7, 2 * 5 + 2 + 7, 2 * 5 + 2, 5 + 1,
    ]  # fmt: skip


WIDTHS = (6, 8, 8, 8)


def alive_after_forward(program: Program) -> int:
    events = events_until(program, 0, 0, report.Phase.AFTER_FORWARD)
    return sum(alive_after(program, events).values())


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_what_full_shard_frees_grad_op_keeps(strategy: str) -> None:
    """After the forward: every layer's gathered parameters. The head stays gathered in both."""
    full, grad_op = (
        alive_after_forward(traced(WIDTHS, strategy=strategy, devices=4, sharding_strategy=name))
        for name in ("FULL_SHARD", "SHARD_GRAD_OP")
    )

    layers = units(WIDTHS)[:-1]
    assert grad_op - full == WORD * sum(flat_numel(shapes, 4) for shapes in layers)


def test_gradients_stay_whole_until_the_last_micro_batch() -> None:
    """Lightning's `no_sync` under FSDP1: whole flat gradients beside nothing; then shards."""
    program = traced(WIDTHS, strategy="fsdp", devices=4, accumulate_grad_batches=3)
    whole = WORD * sum(flat_numel(shapes, 4) for shapes in units(WIDTHS))

    grads = [state.grads for state in states(program, report.Phase.AFTER_BACKWARD)]
    assert grads == [whole, whole, whole // 4]


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
def test_no_shard_keeps_everything_on_every_gpu() -> None:
    program = traced(WIDTHS, strategy="fsdp", devices=4, sharding_strategy="NO_SHARD")
    whole = WORD * sum(flat_numel(shapes, 1) for shapes in units(WIDTHS))

    assert after_step(program).params == whole
    assert after_step(program).optimizer == 2 * whole


def test_a_hybrid_divides_among_the_gpus_of_a_replica() -> None:
    """Two replicas of two: shards as of two GPUs."""
    for strategy in ("fsdp", "fsdp2"):
        two = traced(WIDTHS, strategy=strategy, devices=2)
        hybrid = traced(
            WIDTHS, strategy=strategy, devices=4, sharding_strategy="HYBRID_SHARD", shard_size=2
        )
        assert after_step(hybrid) == after_step(two)
