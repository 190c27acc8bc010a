"""DDP on one rank: which gradients share a bucket, and when the buckets are made anew."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memest.errors import PlanError
from memest.estimator.device.storages import MemKind, StorageTable
from memest.estimator.device.streams import StreamRecorder
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.optimizers.specs import make_optimizer
from memest.estimator.parallel.ddp import Ddp, assign_buckets
from memest.estimator.parallel.step import StepwiseProgram, StrategyTracer
from memest.plan import TrainingPlan

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


class Run:
    """The traced steps of a rank."""

    def __init__(self, make: type[Model] = Model, *, num_micro_batches: int = 1, **options: Any):
        given = {"strategy": "ddp", "devices": 4, "optim": "sgd", "precision": "32-true"} | options
        self.recorder = StreamRecorder(find_gpu("h200"), StorageTable())
        self.strategy = Ddp(TrainingPlan(model_name="m", **given), self.recorder)
        tracer = StrategyTracer(
            self.strategy, autocast_dtype=None, num_micro_batches=num_micro_batches
        )
        model = tracer.setup(make)
        x = torch.empty(B, D, device="meta")
        build = partial(make_optimizer, "sgd")
        program = tracer.run_steps(model, lambda module: module(x), build, None, 2)
        assert isinstance(program, StepwiseProgram)
        self.program = program

    def made(self, events: Any, kind: MemKind) -> list[int]:
        """Bytes of what `events` made for `kind`, in order."""
        table = self.program.storages
        return [table.num_bytes[e] for e in events if e >= 0 and table.kinds[e] is kind]

    def alive(self) -> Counter[MemKind]:
        """Bytes by kind at the end of the second backward."""
        table = self.program.storages
        events = list(self.program.setup)
        for played in (*self.program.steps[0], *self.program.steps[1][:-1]):
            for stream in played.streams():
                events += stream
        last = self.program.steps[1][-1]
        events += [*last.forward, *last.zero_grad, *last.backward]
        living: dict[int, None] = {}
        for event in events:
            if event >= 0:
                living[event] = None
            else:
                living.pop(~event, None)
        found: Counter[MemKind] = Counter()
        for index in living:
            found[table.kinds[index]] += table.num_bytes[index]
        return found


def sized(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tensors of so many bytes."""
    return [torch.empty(n // dtype.itemsize, dtype=dtype, device="meta") for n in sizes]


def numbers(tensors: list[Tensor], limits: list[int]) -> list[list[int]]:
    order = {id(t): i for i, t in enumerate(tensors)}
    return [[order[id(t)] for t in bucket] for bucket in assign_buckets(tensors, limits)]


def test_a_bucket_closes_with_the_tensor_that_reaches_its_limit() -> None:
    """40 + 60 reach 100; 120 alone does; 20 is left."""
    assert numbers(sized(40, 60, 120, 20), [100]) == [[0, 1], [2], [3]]


def test_the_first_limit_holds_once_and_the_last_one_from_there_on() -> None:
    assert numbers(sized(40, 40, 40, 40, 40, 40), [40, 80]) == [[0], [1, 2], [3, 4], [5]]


def test_each_type_has_its_own_bucket_and_its_own_limits() -> None:
    """In the order of their first members."""
    a, c = sized(40, 80)
    b, d = sized(40, 80, dtype=torch.bfloat16)

    assert numbers([a, b, c, d], [200]) == [[0, 2], [1, 3]]
    assert numbers([a, b, c, d], [40, 100]) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("limits", [[1], [100], [100, 300], [1 << 40]])
def test_every_tensor_is_in_one_bucket(limits: list[int]) -> None:
    tensors = sized(*(4 * n for n in range(1, 40))) + sized(8, 6, dtype=torch.bfloat16)

    assert sorted(i for bucket in numbers(tensors, limits) for i in bucket) == list(range(41))


def test_one_bucket_holds_all_gradients_in_the_first_step() -> None:
    """Torch starts with one without limit where no parameter is looked for."""
    run = Run()

    assert run.made(run.program.setup, MemKind.BUCKETS) == [WHOLE]


def test_the_buckets_are_made_anew_in_the_order_in_which_gradients_arrived() -> None:
    """Head first, until 1 MiB: with the layer below it. Then up to 25 MiB: the rest."""
    run = Run()

    assert run.made(run.program.steps[1][0].forward, MemKind.BUCKETS) == [HEAD + DOWN, UP]
    assert run.alive()[MemKind.BUCKETS] == WHOLE


def test_a_cap_holds_for_the_first_bucket_too() -> None:
    run = Run(bucket_cap_mb=3)

    assert run.made(run.program.steps[1][0].forward, MemKind.BUCKETS) == [HEAD + DOWN + UP]


def test_the_old_buckets_go_as_the_new_ones_come() -> None:
    run = Run()
    [first] = [e for e in run.program.setup if run.program.storages.kinds[e] is MemKind.BUCKETS]

    assert ~first in run.program.steps[1][0].forward


def test_the_first_buckets_are_from_another_stream() -> None:
    """Lightning makes the wrapper on a stream of its own; the later ones are made on the main."""
    run = Run()
    table = run.program.storages
    buckets = [i for i, kind in enumerate(table.kinds) if kind is MemKind.BUCKETS]

    assert [i in table.streams for i in buckets] == [True, False, False]


def test_gradients_lie_beside_the_buckets() -> None:
    """The extra memory of DDP: as much as the gradients once more."""
    alive = Run().alive()

    assert alive[MemKind.GRADS] == alive[MemKind.BUCKETS] == WHOLE


def test_a_bucket_view_keeps_gradients_in_the_buckets_alone() -> None:
    """The gradients are there, and take nothing beside the buckets."""
    run = Run(gradient_as_bucket_view=True)

    assert run.program.steps[1][0].states[2].grads == WHOLE
    assert run.alive()[MemKind.BUCKETS] + run.alive()[MemKind.GRADS] == WHOLE


def test_buckets_wait_for_the_micro_batch_that_sums() -> None:
    """Under accumulation the second step makes them anew, the first micro-batches do not."""
    run = Run(num_micro_batches=3)
    made = [
        run.made(played.forward, MemKind.BUCKETS) for step in run.program.steps for played in step
    ]

    assert made == [[], [], [], [HEAD + DOWN, UP], [], []]


def test_a_parameter_without_gradient_is_refused() -> None:
    """As torch raises in the second forward; the message says what to do."""
    with pytest.raises(
        PlanError, match=re.escape("1 trained parameters get no gradient")
    ) as caught:
        Run(Unused)

    assert str(caught.value) == (
        "plain `ddp` cannot train this: 1 trained parameters get no gradient, such as one of shape"
        f" (2, {D})"
    )
    assert caught.value.hint == (
        "use `strategy: ddp_find_unused_parameters_true`, or `freeze` them"
    )


def test_unused_parameters_may_be_looked_for() -> None:
    """Two limits from the start, in the order of the model, and never made anew; a word says for
    each parameter whether it was used."""
    run = Run(Unused, strategy="ddp_find_unused_parameters_true")

    assert run.made(run.program.setup, MemKind.BUCKETS) == [UP, DOWN + HEAD, 4 * 3]
    assert run.made(run.program.steps[1][0].forward, MemKind.BUCKETS) == []
