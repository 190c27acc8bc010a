"""Streams of a traced run: whose pool a storage is from, and when a freed one comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memest.estimator.gpu.timeline import MAIN
from memest.estimator.replay.replay import Part, Program, Run
from memest.estimator.tensors.storages import RETURNED, MemKind, Site, StorageTable
from tests.sim import SimGpu

MIB = 1 << 20
LONG = 450 * 10**6
"""Bytes that an H200 sends in a millisecond."""


@pytest.fixture
def sim() -> Iterator[SimGpu]:
    sim = SimGpu()
    with sim, torch.device("meta"):
        yield sim


def stream_of(sim: SimGpu, tensor: Tensor) -> int:
    return sim.storages.streams.get(sim.id_of(tensor), MAIN)


def test_a_storage_is_from_the_pool_of_the_stream_that_made_it(sim: SimGpu) -> None:
    side = sim.timeline.new_stream()
    before = torch.empty(2)
    with sim.timeline.on_stream(side):
        inside = torch.empty(3)
        sums = before + 1
    after = inside + 1

    streams = [stream_of(sim, tensor) for tensor in (before, inside, sums, after)]
    assert streams == [MAIN, side, side, MAIN]


def test_what_no_other_stream_uses_returns_at_once(sim: SimGpu) -> None:
    index = sim.id_of(used := torch.empty(5))
    del used

    assert sim.take_events() == [index, ~index]
    assert not sim.storages.deferred


def test_a_block_in_use_elsewhere_returns_when_the_host_has_waited(
    sim: SimGpu,
) -> None:
    """Freed while the side stream sends: it is looked at before each request, and is back after
    the wait."""
    side = sim.timeline.new_stream()
    index = sim.id_of(used := torch.empty(5))
    with sim.timeline.on_stream(side):
        sim.timeline.transfer(LONG, side)
    sim.memory.record_stream(used, side)
    del used
    first = torch.empty(7)
    sim.timeline.host_waits(sim.timeline.event(side))
    second = torch.empty(11)

    assert sim.take_events() == [
        index, ~index, sim.id_of(first), RETURNED - index, sim.id_of(second),
    ]  # fmt: skip
    assert sim.storages.deferred == {index}


def test_a_stream_that_is_done_holds_nothing_back(sim: SimGpu) -> None:
    side = sim.timeline.new_stream()
    index = sim.id_of(used := torch.empty(5))
    with sim.timeline.on_stream(side):
        sim.timeline.transfer(LONG, side)
    sim.memory.record_stream(used, side)
    sim.timeline.host_waits(sim.timeline.event(side))
    del used

    assert sim.take_events() == [index, ~index]
    assert not sim.storages.deferred


def test_blocks_come_back_in_the_order_in_which_their_streams_finish(
    sim: SimGpu,
) -> None:
    slow, quick = sim.timeline.new_stream(), sim.timeline.new_stream()
    late, soon = torch.empty(2), torch.empty(3)
    for stream, tensor, num_bytes in ((slow, late, 2 * LONG), (quick, soon, LONG)):
        with sim.timeline.on_stream(stream):
            sim.timeline.transfer(num_bytes, stream)
        sim.memory.record_stream(tensor, stream)
    ids = sim.id_of(late), sim.id_of(soon)
    del late, soon, tensor
    sim.take_events()
    sim.timeline.host_waits(sim.timeline.event(slow))
    torch.empty(7)

    assert sim.take_events()[:2] == [RETURNED - ids[1], RETURNED - ids[0]]


def test_a_wait_for_a_stream_does_not_hold_the_host(sim: SimGpu) -> None:
    """`stream_waits` moves the waiting stream to the end of the other, `host_waits` the host."""
    timeline, side = sim.timeline, sim.timeline.new_stream()
    with timeline.on_stream(side):
        timeline.transfer(LONG, side)
    end, start = timeline.event(side), timeline.host_time
    timeline.stream_waits(MAIN, end)

    assert timeline.event(MAIN) == end > start == timeline.host_time
    timeline.host_waits(end)
    assert timeline.host_time == end


class Doubled(torch.autograd.Function):
    """Says what its backward returned."""

    made: Tensor

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        Doubled.made = grad * 2
        return Doubled.made


@pytest.mark.parametrize("is_on_side", [False, True])
def test_a_node_of_the_backward_runs_on_the_stream_of_its_forward(
    sim: SimGpu, is_on_side: bool
) -> None:
    side = sim.timeline.new_stream()
    x = torch.empty(3, requires_grad=True)
    with sim.timeline.on_stream(side if is_on_side else MAIN):
        y = Doubled.apply(x)
    loss = y.sum()
    loss.backward()

    assert stream_of(sim, y) == stream_of(sim, Doubled.made) == side * is_on_side
    assert stream_of(sim, loss) == MAIN
    del Doubled.made


def test_gradients_that_meet_are_summed_on_the_stream_that_takes_them(
    sim: SimGpu,
) -> None:
    """Of a parameter: on that of its accumulator; its other gradient lies where it was made."""
    sim.timeline.accumulates_on = side = sim.timeline.new_stream()
    twice, once = nn.Parameter(torch.empty(5, 3)), nn.Parameter(torch.empty(3, 3))
    ids = torch.empty(2, dtype=torch.int64)
    (F.embedding(ids, twice) @ once @ twice.t()).sum().backward()

    assert twice.grad is not None
    assert once.grad is not None
    assert stream_of(sim, twice.grad) == side
    assert stream_of(sim, once.grad) == MAIN


HERE = Site("", "", "")


def test_a_resized_storage_is_freed_and_taken_anew(sim: SimGpu) -> None:
    """As FSDP does with flat parameters: another block, of the stream that is current."""
    side = sim.timeline.new_stream()
    flat = torch.empty(5)
    first = sim.id_of(flat)
    sim.memory.resize(flat, 0, HERE, MemKind.ACTIVATIONS)
    with sim.timeline.on_stream(side):
        sim.memory.resize(flat, 20, HERE, MemKind.ACTIVATIONS)
    second = sim.id_of(flat)

    events = sim.take_events()  # a storage of 0 bytes is one, and asks for nothing
    asked = [e for e in events if sim.storages.num_bytes[max(e, ~e)]]
    assert asked == [first, ~first, second]
    assert stream_of(sim, flat) == side


WAITING, OTHER = 0, 1


def stepwise(events: list[list[int]], streams: dict[int, int]) -> Program:
    """A step whose micro-batches have these events in their forward, in blocks of 20 MiB."""
    storages = StorageTable(streams=streams, deferred={WAITING})
    for _ in range(2):
        storages.add(20 * MIB, Site("", "", ""), MemKind.ACTIVATIONS)
    return Program(storages, steps=[[[Part(e)] for e in events]])


def test_a_block_that_waits_is_not_allocated_and_not_free() -> None:
    """The second request cannot have it: two segments; after its return a third request can."""
    made = stepwise([[WAITING, ~WAITING, OTHER, RETURNED - WAITING]], {})

    result = Run(made, 1, 1).on()

    assert result.peak_allocated_bytes == 20 * MIB
    assert result.peak_reserved_bytes == 40 * MIB


@pytest.mark.parametrize(("stream", "reserved"), [(MAIN, 20 * MIB), (1, 40 * MIB)])
def test_a_stream_does_not_use_the_free_blocks_of_another(stream: int, reserved: int) -> None:
    made = stepwise([[OTHER, ~OTHER, WAITING]], {WAITING: stream})

    assert Run(made, 1, 1).on().peak_reserved_bytes == reserved


def test_a_micro_batch_that_is_repeated_gets_back_what_it_left_waiting() -> None:
    """Its blocks return in the one that was traced after it, so nothing piles up."""
    first = [WAITING, ~WAITING]
    made = stepwise([first, [RETURNED - WAITING, *first], [RETURNED - WAITING, *first]], {})

    assert Run(made, 1, 9).on().peak_reserved_bytes == 20 * MIB
