"""Streams of a traced run: whose pool a storage is from, and when a freed one comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memest.estimator.device.storages import RETURNED, MemKind, Site, StorageTable
from memest.estimator.device.streams import MAIN, Event, Stream, StreamRecorder
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.trace.program import Part, Program
from memest.estimator.trace.replay import replay

MIB = 1 << 20
LONG = 450 * 10**6
"""Bytes that an H200 sends in a millisecond."""


@pytest.fixture
def recorder() -> Iterator[StreamRecorder]:
    recorder = StreamRecorder(find_gpu("h200"), StorageTable())
    with recorder, torch.device("meta"):
        yield recorder


def id_of(recorder: StreamRecorder, tensor: Tensor) -> int:
    index = recorder.id_of(tensor)
    assert index is not None
    return index


def stream_of(recorder: StreamRecorder, tensor: Tensor) -> int:
    return recorder.storages.streams.get(id_of(recorder, tensor), MAIN)


def test_a_storage_is_from_the_pool_of_the_stream_that_made_it(recorder: StreamRecorder) -> None:
    side = recorder.new_stream()
    before = torch.empty(2)
    with recorder.on_stream(side):
        inside = torch.empty(3)
        sums = before + 1
    after = inside + 1

    streams = [stream_of(recorder, tensor) for tensor in (before, inside, sums, after)]
    assert streams == [MAIN, side, side, MAIN]


def test_what_no_other_stream_uses_returns_at_once(recorder: StreamRecorder) -> None:
    index = id_of(recorder, used := torch.empty(5))
    del used

    assert recorder.take_events() == [index, ~index]
    assert not recorder.storages.deferred


def test_a_block_in_use_elsewhere_returns_when_the_host_has_waited(
    recorder: StreamRecorder,
) -> None:
    """Freed while the side stream sends: it is looked at before each request, and is back after
    the wait."""
    side = recorder.new_stream()
    index = id_of(recorder, used := torch.empty(5))
    with recorder.on_stream(side):
        recorder.transfer(LONG)
    recorder.record_stream(used, side)
    del used
    first = torch.empty(7)
    recorder.host_waits(recorder.event(side))
    second = torch.empty(11)

    assert recorder.take_events() == [
        index, ~index, id_of(recorder, first), RETURNED - index, id_of(recorder, second),
    ]  # fmt: skip
    assert recorder.storages.deferred == {index}


def test_a_stream_that_is_done_holds_nothing_back(recorder: StreamRecorder) -> None:
    side = recorder.new_stream()
    index = id_of(recorder, used := torch.empty(5))
    with recorder.on_stream(side):
        recorder.transfer(LONG)
    recorder.record_stream(used, side)
    recorder.host_waits(recorder.event(side))
    del used

    assert recorder.take_events() == [index, ~index]
    assert not recorder.storages.deferred


def test_blocks_come_back_in_the_order_in_which_their_streams_finish(
    recorder: StreamRecorder,
) -> None:
    slow, quick = recorder.new_stream(), recorder.new_stream()
    late, soon = torch.empty(2), torch.empty(3)
    for stream, tensor, num_bytes in ((slow, late, 2 * LONG), (quick, soon, LONG)):
        with recorder.on_stream(stream):
            recorder.transfer(num_bytes)
        recorder.record_stream(tensor, stream)
    ids = id_of(recorder, late), id_of(recorder, soon)
    del late, soon, tensor
    recorder.take_events()
    recorder.host_waits(recorder.event(slow))
    torch.empty(7)

    assert recorder.take_events()[:2] == [RETURNED - ids[1], RETURNED - ids[0]]


def test_a_wait_for_a_stream_does_not_hold_the_host(recorder: StreamRecorder) -> None:
    """`wait_stream` moves the waiting stream to the end of the other; `synchronize` the host."""
    side = Stream(recorder, recorder.new_stream())
    with recorder.on_stream(side.number):
        recorder.transfer(LONG)
    end = recorder.event(side.number)
    start = recorder._host
    Stream(recorder, MAIN).wait_stream(side)

    assert recorder.event(MAIN) == end > start == recorder._host
    side.synchronize()
    assert recorder._host == end


def test_an_event_marks_what_a_stream_has_been_given(recorder: StreamRecorder) -> None:
    """A stream that waits for it does not wait for what comes later."""
    side = Stream(recorder, recorder.new_stream())
    with recorder.on_stream(side.number):
        recorder.transfer(LONG)
        event = Event(recorder)
        event.record()
        recorder.transfer(LONG)
    Stream(recorder, MAIN).wait_event(event)

    assert recorder.event(MAIN) == event.time < recorder.event(side.number)
    assert not event.query()


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
    recorder: StreamRecorder, is_on_side: bool
) -> None:
    side = recorder.new_stream()
    x = torch.empty(3, requires_grad=True)
    with recorder.on_stream(side if is_on_side else MAIN):
        y = Doubled.apply(x)
    loss = y.sum()
    loss.backward()

    assert stream_of(recorder, y) == stream_of(recorder, Doubled.made) == side * is_on_side
    assert stream_of(recorder, loss) == MAIN
    del Doubled.made


def test_gradients_that_meet_are_summed_on_the_stream_that_takes_them(
    recorder: StreamRecorder,
) -> None:
    """Of a parameter: on that of its accumulator; its other gradient lies where it was made."""
    recorder.accumulates_on = side = recorder.new_stream()
    twice, once = nn.Parameter(torch.empty(5, 3)), nn.Parameter(torch.empty(3, 3))
    ids = torch.empty(2, dtype=torch.int64)
    (F.embedding(ids, twice) @ once @ twice.t()).sum().backward()

    assert twice.grad is not None
    assert once.grad is not None
    assert stream_of(recorder, twice.grad) == side
    assert stream_of(recorder, once.grad) == MAIN


def test_a_resized_storage_is_freed_and_taken_anew(recorder: StreamRecorder) -> None:
    """As FSDP does with flat parameters: another block, of the stream that is current."""
    side = recorder.new_stream()
    flat = torch.empty(5)
    first = id_of(recorder, flat)
    recorder.resize(flat, 0)
    with recorder.on_stream(side):
        recorder.resize(flat, 20)
    second = id_of(recorder, flat)

    assert recorder.take_events() == [first, ~first, second]
    assert stream_of(recorder, flat) == side


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

    result = replay(made, num_steps=1, num_micro_batches=1)

    assert result.peak_allocated_bytes == 20 * MIB
    assert result.peak_reserved_bytes == 40 * MIB


@pytest.mark.parametrize(("stream", "reserved"), [(MAIN, 20 * MIB), (1, 40 * MIB)])
def test_a_stream_does_not_use_the_free_blocks_of_another(stream: int, reserved: int) -> None:
    made = stepwise([[OTHER, ~OTHER, WAITING]], {WAITING: stream})

    assert replay(made, num_steps=1, num_micro_batches=1).peak_reserved_bytes == reserved


def test_a_micro_batch_that_is_repeated_gets_back_what_it_left_waiting() -> None:
    """Its blocks return in the one that was traced after it, so nothing piles up."""
    first = [WAITING, ~WAITING]
    made = stepwise([first, [RETURNED - WAITING, *first], [RETURNED - WAITING, *first]], {})

    assert replay(made, num_steps=1, num_micro_batches=9).peak_reserved_bytes == 20 * MIB
