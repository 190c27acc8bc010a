"""DDP on one rank: which gradients share a bucket, and when the buckets are made anew."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn

from memest.estimator.replay.replay import Program
from memest.estimator.tensors.storages import MemKind
from memest.estimator.torch_api.distributed.ddp import NotFinished
from memest.report import Phase
from tests.ranks import alive_after, events_until, made, run_rank

MIB = 1 << 20

# Shapes: B rows, D width, F width between; a layer of each alone is above a bucket of 1 MiB.
B, D, F = 3, 512, 1024
UP, DOWN = 4 * D * F, 4 * F * D
"""Bytes of the two weights in 32 bits: 2 MiB each."""

HEAD = 4 * 2 * D
WHOLE = UP + DOWN + HEAD


class Model(nn.Module):
    """Two wide layers and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=False)
        self.head = nn.Linear(D, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.up(x)))
        return out.sum()


class Unused(Model):
    """Never runs its head."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out.sum()


@cache
def run(make: type[Model] = Model, **options: Any) -> Program:
    """The steps of a rank of four."""
    given = {"strategy": "ddp", "devices": 4, "optim": "sgd", "precision": "32-true", "steps": 2}
    return run_rank(make, (B, D), **given | options)


def made_in(program: Program, step: int, micro_batch: int = 0) -> list[int]:
    """Bytes of the buckets that a forward made."""
    before, forward = program.steps[step][micro_batch][:2]
    return made(program, [*before.events, *forward.events], MemKind.BUCKETS)


def alive(program: Program) -> Counter[MemKind]:
    """At the end of the second backward."""
    last = len(program.steps[1]) - 1
    return alive_after(program, events_until(program, 1, last, Phase.AFTER_BACKWARD))


def test_one_bucket_holds_all_gradients_in_the_first_step() -> None:
    """Torch starts with one without limit where no parameter is looked for."""
    program = run()

    assert made(program, program.setup, MemKind.BUCKETS) == [WHOLE]


def test_the_buckets_are_made_anew_in_the_order_in_which_gradients_arrived() -> None:
    """Head first, until 1 MiB: with the layer below it. Then up to 25 MiB: the rest."""
    program = run()

    assert made_in(program, 1) == [HEAD + DOWN, UP]
    assert alive(program)[MemKind.BUCKETS] == WHOLE


def test_a_cap_holds_for_the_first_bucket_too() -> None:
    assert made_in(run(bucket_cap_mb=3), 1) == [HEAD + DOWN + UP]


def test_the_old_buckets_go_as_the_new_ones_come() -> None:
    program = run()
    kinds = program.storages.kinds
    [first] = [e for e in program.setup if e >= 0 and kinds[e] is MemKind.BUCKETS]

    assert ~first in program.steps[1][0][1].events


def test_the_first_buckets_are_from_another_stream() -> None:
    """Lightning makes the wrapper on a stream of its own; the later ones are made on the main."""
    table = run().storages
    buckets = [i for i, kind in enumerate(table.kinds) if kind is MemKind.BUCKETS]

    assert [i in table.streams for i in buckets] == [True, False, False]


def test_gradients_lie_beside_the_buckets() -> None:
    """The extra memory of DDP: as much as the gradients once more."""
    held = alive(run())

    assert held[MemKind.GRADS] == held[MemKind.BUCKETS] == WHOLE


def test_a_bucket_view_keeps_gradients_in_the_buckets_alone() -> None:
    """The gradients are there, and take nothing beside the buckets."""
    program = run(gradient_as_bucket_view=True)

    assert program.steps[1][0][2].state.grads == WHOLE
    assert alive(program)[MemKind.BUCKETS] + alive(program)[MemKind.GRADS] == WHOLE


def test_gradients_in_the_old_buckets_move_to_the_new_ones() -> None:
    """So that the old ones are gone when the model runs forward again."""
    program = run(gradient_as_bucket_view=True)
    kinds, events = program.storages.kinds, list(program.steps[1][0][1].events)
    held_for = (MemKind.BUCKETS, MemKind.GRADS)  # the latter, once gradients are views of it
    [first] = [e for e in program.setup if e >= 0 and kinds[e] in held_for]

    runs = [e for e in events if e >= 0 and program.storages.sites[e].module == "body.up"]
    assert events.index(~first) < events.index(runs[0])


def test_buckets_wait_for_the_micro_batch_that_sums() -> None:
    """Under accumulation the second step makes them anew, the first micro-batches do not."""
    program = run(accumulate_grad_batches=3)

    found = [made_in(program, step, micro) for step in range(2) for micro in range(3)]
    assert found == [[], [], [], [HEAD + DOWN, UP], [], []]


def test_a_parameter_without_gradient_is_refused() -> None:
    """In the second forward, as by torch, whose words Lightning replaces with its own advice."""
    with pytest.raises(NotFinished, match="parameters that were not used") as caught:
        run(Unused)

    assert caught.value.missing_shapes == [(2, D)]


def test_unused_parameters_may_be_looked_for() -> None:
    """Two limits from the start, the last layers first, and never made anew; a word says for each
    parameter whether it was used."""
    program = run(Unused, strategy="ddp_find_unused_parameters_true")

    assert made(program, program.setup, MemKind.BUCKETS) == [DOWN + HEAD, UP, 4 * 3]
    assert made_in(program, 1) == []
