"""Python collects a script's garbage as it would without the recorder's objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from memest.estimator.device.garbage import PER_STORAGE, GarbagePace


@pytest.fixture
def pace() -> Iterator[GarbagePace]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    made = GarbagePace()
    yield made
    made.stop()
    gc.set_threshold(*before)


def test_the_threshold_moves_by_the_recorder_s_own_objects(pace: GarbagePace) -> None:
    pace.made(5 * PER_STORAGE)
    pace.made(-2 * PER_STORAGE)

    assert gc.get_threshold() == (700 + 3 * PER_STORAGE, 10, 10)


def test_after_a_look_it_is_as_before(pace: GarbagePace) -> None:
    pace.made(100)

    gc.collect(0)

    assert gc.get_threshold() == (700, 10, 10)
    assert pace.num_looks == 1


def test_a_script_s_own_threshold_counts(pace: GarbagePace) -> None:
    pace.made(100)
    gc.set_threshold(50, 5, 5)

    pace.made(3)

    assert gc.get_threshold() == (53, 5, 5)


def test_a_script_that_switches_it_off_keeps_it_off(pace: GarbagePace) -> None:
    gc.set_threshold(0, 10, 10)

    pace.made(10)

    assert gc.get_threshold()[0] == 0
