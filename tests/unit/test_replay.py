"""Replay of small programs whose every byte is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memest.estimator.replay import replay as replay_module
from memest.estimator.replay.replay import Moment, Program, Replayed, Run, StateBytes, live_at
from memest.estimator.tensors.storages import MemKind, Site, StorageTable
from memest.report import Phase
from tests.programs import lightning_program

MIB = 1 << 20
PARAM, BATCH, ACTIVATION, LOSS, GRAD, STATE, TEMPORARY, WORKSPACE = range(8)
SIZES = [4096, 512, 8192, 512, 4096, 2048, 1024, 16384]


def program(
    sizes: Sequence[int] = SIZES,
    *,
    accumulates: bool = False,
    optimizer_first: Sequence[int] = (STATE, TEMPORARY, ~TEMPORARY),
    optimizer_next: Sequence[int] = (TEMPORARY, ~TEMPORARY),
) -> Program:
    """One parameter, one activation, one gradient, one state; a workspace that is made once.

    forward: workspace, batch, activation, loss. backward: gradient; activation and batch die.
    """
    storages = StorageTable()
    for size in sizes:
        storages.add(size, Site("", "", ""), MemKind.ACTIVATIONS)
    forward = [WORKSPACE, BATCH, ACTIVATION, LOSS]
    return lightning_program(
        storages,
        setup=[PARAM],
        first=(forward, [GRAD, ~ACTIVATION, ~BATCH], [~LOSS]),
        accumulating=(
            [BATCH, ACTIVATION, LOSS],
            [TEMPORARY, ~TEMPORARY, ~ACTIVATION, ~BATCH],
            [~LOSS],
        )
        if accumulates
        else None,
        optimizer_first=optimizer_first,
        optimizer_next=optimizer_next,
        grads=[GRAD],
        before=StateBytes(4096, 0, 0),
        after=StateBytes(4096, 4096, 2048),
    )


def run(made: Program, steps: int = 1, micro_batches: int = 1, **kwargs: Any) -> Replayed:
    return Run(made, steps, micro_batches).on(**kwargs)


def test_a_step_is_read_at_four_moments() -> None:
    """Sums of the sizes alive at each; the peak is the highest since the row before."""
    rows = run(program()).rows

    assert [(row.step, row.micro_batch, row.phase) for row in rows] == [
        (0, 0, Phase.BEFORE_FORWARD),
        (0, 0, Phase.AFTER_FORWARD),
        (0, 0, Phase.AFTER_BACKWARD),
        (0, 0, Phase.AFTER_OPTIMIZER_STEP),
    ]
    after_forward = 4096 + 16384 + 512 + 8192 + 512
    after_backward = 4096 + 16384 + 512 + 4096
    assert [row.allocated_bytes for row in rows] == [
        4096,
        after_forward,
        after_backward,
        after_backward + 2048,
    ]
    assert [row.peak_allocated_bytes for row in rows] == [
        4096,
        after_forward,
        after_forward + 4096,
        after_backward + 2048 + 1024,
    ]
    assert {row.reserved_bytes for row in rows} == {2 * MIB}


def test_activations_are_what_is_neither_params_nor_grads_nor_optimizer() -> None:
    rows = run(program()).rows

    assert [(row.params_bytes, row.grads_bytes, row.optimizer_bytes) for row in rows] == [
        (4096, 0, 0),
        (4096, 0, 0),
        (4096, 4096, 0),
        (4096, 4096, 2048),
    ]
    for row in rows:
        parts = row.params_bytes + row.grads_bytes + row.optimizer_bytes + row.activations_bytes
        assert parts == row.allocated_bytes


def test_gradients_live_through_the_next_forward_and_die_before_its_backward() -> None:
    """Lightning's order: forward, zero_grad, backward."""
    rows = run(program(), steps=2).rows[4:]

    kept = 4096 + 16384 + 4096 + 2048  # parameter, workspace, gradient, state
    assert rows[0].allocated_bytes == kept
    assert rows[0].grads_bytes == 4096
    assert rows[1].peak_allocated_bytes == kept + 512 + 8192 + 512
    assert rows[1].allocated_bytes == kept - 4096 + 512 + 8192 + 512
    assert rows[1].grads_bytes == 0
    assert rows[2].grads_bytes == 4096


def test_what_is_made_once_stays_and_is_made_once() -> None:
    """The workspace of the first forward is not allocated again by the second."""
    rows = run(program(), steps=3).rows
    before = [row.allocated_bytes for row in rows if row.phase is Phase.BEFORE_FORWARD]

    assert before == [4096, 4096 + 16384 + 4096 + 2048, 4096 + 16384 + 4096 + 2048]


def test_the_peak_is_a_moment_that_names_its_storage() -> None:
    """Events count from 1: parameter, four of the forward, one of zero_grad, the gradient."""
    result = run(program())

    assert result.peak_allocated_bytes == 4096 + 16384 + 512 + 8192 + 512 + 4096
    assert result.peak == Moment(index=7, step=0, storage=GRAD)
    assert live_at(program(), 1, result.peak) == [PARAM, WORKSPACE, BATCH, ACTIVATION, LOSS, GRAD]


def test_what_is_alive_at_a_moment_of_a_later_step_includes_the_state() -> None:
    result = run(program(), steps=2)

    assert result.peak.step == 1
    assert result.peak.storage == LOSS  # the old gradient is still there
    assert sorted(live_at(program(), 1, result.peak)) == [
        PARAM, BATCH, ACTIVATION, LOSS, GRAD, STATE, WORKSPACE,
    ]  # fmt: skip


def test_micro_batches_after_the_first_add_to_the_gradients() -> None:
    rows = run(program(accumulates=True), micro_batches=3).rows

    assert [(row.micro_batch, row.phase.value) for row in rows] == [
        *((micro, phase) for micro in range(3) for phase in list(Phase)[:3]),
        (2, "after_optimizer_step"),
    ]
    kept = 4096 + 16384 + 4096  # after the first: parameter, workspace, gradient
    assert [row.allocated_bytes for row in rows[3:9]] == [
        kept,
        kept + 512 + 8192 + 512,
        kept + 512,
    ] * 2
    assert {row.grads_bytes for row in rows[3:]} == {4096}
    assert {row.optimizer_bytes for row in rows[:9]} == {0}


def test_the_cache_is_emptied_between_setup_and_the_first_step() -> None:
    """What building the model left behind is no part of the peaks."""
    sizes = [4096, 512, 8192, 512, 4096, 2048, 64 * MIB, 16384]
    made = program(sizes, optimizer_first=[STATE], optimizer_next=[])
    made.setup = [TEMPORARY, PARAM, ~TEMPORARY]

    result = run(made)

    assert result.rows[0].reserved_bytes == 2 * MIB
    assert result.peak_reserved_bytes == 2 * MIB
    assert result.peak.storage == GRAD


def test_a_storage_of_no_bytes_takes_no_block() -> None:
    made = program([4096, 0, 8192, 0, 4096, 2048, 1024, 16384])

    assert run(made).rows[1].allocated_bytes == 4096 + 16384 + 8192


def test_requests_are_rounded_where_they_are_allocated() -> None:
    made = program([4095, 1, 8191, 4, 4095, 2047, 1023, 16383])

    assert [r.allocated_bytes for r in run(made).rows] == [
        r.allocated_bytes for r in run(program()).rows
    ]


def test_a_run_that_does_not_fit_ends_at_the_request_that_failed() -> None:
    """Under 40 MiB: 12 (parameter) and 20 (activation) fit, and 12 for the gradient do not."""
    made = program([12 * MIB, 512, 20 * MIB, 512, 12 * MIB, 2048, 1024, 16384])

    result = run(made, steps=2, limit_bytes=40 * MIB)

    assert result.failed == Moment(index=7, step=0, storage=GRAD)
    assert result.failed_bytes == 12 * MIB
    assert [row.phase for row in result.rows] == [Phase.BEFORE_FORWARD, Phase.AFTER_FORWARD]
    assert result.peak_reserved_bytes == (12 + 2 + 20) * MIB
    assert result.num_retries == 1


def test_a_run_that_fits_has_not_failed() -> None:
    result = run(program(), limit_bytes=2 * MIB)

    assert (result.failed, result.failed_bytes, result.num_retries) == (None, 0, 0)


def test_at_the_limit_cached_segments_make_room() -> None:
    """20 MiB die in the backward; the optimizer's 24 fit under 60 only if they are given back."""
    made = program([12 * MIB, 512, 20 * MIB, 512, 12 * MIB, 24 * MIB, 1024, 16384])

    free, limited = run(made), run(made, limit_bytes=60 * MIB)

    assert free.peak_reserved_bytes == (12 + 2 + 20 + 12 + 24) * MIB
    assert limited.peak_reserved_bytes == (12 + 2 + 12 + 24) * MIB
    assert (limited.failed, limited.num_retries) == (None, 1)
    assert limited.peak_allocated_bytes == free.peak_allocated_bytes


def without_shortcut(made: Program, *args: Any, **kwargs: Any) -> Replayed:
    """Every step and micro-batch one by one: no two states compare equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module._Replay, "_state", lambda self: (object(),))
        return run(made, *args, **kwargs)


@pytest.mark.parametrize(("steps", "micro_batches"), [(1, 1), (2, 1), (5, 1), (1, 7), (4, 6)])
def test_copied_steps_and_micro_batches_equal_those_that_are_run(
    steps: int, micro_batches: int
) -> None:
    made = program(accumulates=True)

    assert run(made, steps, micro_batches) == without_shortcut(made, steps, micro_batches)


def test_steps_that_repeat_are_copied() -> None:
    """A thousand steps take the time of a few."""
    made = program()
    calls: list[int] = []
    play = replay_module.Player.play
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            replay_module.Player, "play", lambda self, e: (calls.append(1), play(self, e))[1]
        )
        rows = run(made, steps=1000).rows

    assert len(rows) == 4000
    assert len(calls) < 40
    assert [row.step for row in rows[-4:]] == [999] * 4


sizes = st.lists(
    st.sampled_from([0, 512, 4096, MIB, 3 * MIB, 9 * MIB, 11 * MIB, 24 * MIB])
    | st.integers(1, 30 * MIB),
    min_size=8,
    max_size=8,
)


@settings(max_examples=200)
@given(sizes, st.integers(1, 6), st.integers(1, 6), st.none() | st.integers(20 * MIB, 200 * MIB))
@example([0, 0, MIB + 1, 15 * MIB - 1023, 0, 3 * MIB, 0, MIB + 1], 3, 1, None)  # the open peak
def test_copies_equal_runs_whatever_the_sizes(
    num_bytes: list[int], steps: int, micro_batches: int, limit: int | None
) -> None:
    made = program(num_bytes, accumulates=micro_batches > 1)

    quick = run(made, steps, micro_batches, limit_bytes=limit)
    full = without_shortcut(made, steps, micro_batches, limit_bytes=limit)

    assert quick.rows == full.rows
    assert (quick.failed, quick.peak, quick.peak_allocated_bytes, quick.peak_reserved_bytes) == (
        full.failed, full.peak, full.peak_allocated_bytes, full.peak_reserved_bytes,
    )  # fmt: skip
    if full.failed is None:
        assert quick.peak_allocated_bytes == max(row.peak_allocated_bytes for row in quick.rows)


@given(sizes, st.integers(1, 3), st.integers(1, 3))
def test_what_is_alive_at_the_peak_adds_up_to_it(
    num_bytes: list[int], steps: int, micro_batches: int
) -> None:
    """Requests of what is alive, rounded, are the peak but for unsplit blocks."""
    made = program(num_bytes, accumulates=micro_batches > 1)

    result = run(made, steps, micro_batches)

    alive = live_at(made, micro_batches, result.peak)
    requested = sum(num_bytes[index] for index in alive)
    assert 0 <= result.peak_allocated_bytes - requested <= len(alive) * (MIB + 512)


def test_later_steps_run_the_stream_of_later_steps() -> None:
    """A temporary of the first optimizer step alone does not come back in the second."""
    made = program(optimizer_next=[])

    first, second = (row for row in run(made, steps=2).rows if row.phase == "after_optimizer_step")

    assert first.peak_allocated_bytes == first.allocated_bytes + 1024
    assert second.peak_allocated_bytes == second.allocated_bytes
