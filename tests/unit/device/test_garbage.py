"""Python collects a script's garbage as it would without the mode's objects."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memest
from memest.estimator.gpu.memory import OBJECTS_PER_STORAGE, GarbagePace

pytestmark = pytest.mark.usefixtures("usual_thresholds")


@pytest.fixture
def usual_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def pace() -> Iterator[GarbagePace]:
    made = GarbagePace()
    made.start()
    yield made
    made.stop()


def looks_while(make: Callable[[], Any], count: int) -> list[int]:
    """How many calls of `make` were before each look of Python for garbage."""
    looks: list[int] = []
    num_made = 0

    def looked(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            looks.append(num_made)

    for _ in range(300):  # lists of free tuples fill
        make()
    gc.collect()
    gc.callbacks.append(looked)
    for _ in range(count):
        make()
        num_made += 1
    gc.callbacks.remove(looked)
    return looks


class Ring:
    """Holds a tensor in a cycle: two containers in a real run."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.empty(1000, device="cuda")


def test_a_cycle_with_a_tensor_counts_as_its_two_objects() -> None:
    with memest.virtual_gpu("h100-80gb"):
        looks = looks_while(Ring, 1500)

    assert all(abs(look - 350 * n) < 0.05 * 350 * n for n, look in enumerate(looks, 1))
    assert len(looks) == 4


@pytest.mark.parametrize("operator", ["empty", "add", "add_", "host", "linear"])
def test_what_dies_at_once_is_no_reason_to_look(operator: str) -> None:
    with memest.virtual_gpu("h100-80gb"):
        tensor, layer = torch.empty(1000, device="cuda"), torch.nn.Linear(300, 300, device="cuda")
        rows = torch.empty(3, 300, device="cuda")
        calls = {
            "empty": lambda: torch.empty(1000, device="cuda"),
            "add": lambda: tensor + 1,
            "add_": lambda: tensor.mul_(2),
            "host": lambda: torch.empty(100_000),
            "linear": lambda: layer(rows),
        }
        assert not looks_while(calls[operator], 1500)


def test_a_storage_has_so_many_objects() -> None:
    with memest.virtual_gpu("h100-80gb"):
        kept = [torch.empty(1000, device="cuda") for _ in range(10)]
        gc.collect()
        gc.disable()
        try:
            before = gc.get_count()[0]
            for _ in range(200):
                kept.append(torch.empty(1000, device="cuda"))
            made = gc.get_count()[0] - before
        finally:
            gc.enable()

    assert made // 200 == 1 + OBJECTS_PER_STORAGE  # and the tensor itself


def test_the_threshold_moves_by_the_recorder_s_own_objects(pace: GarbagePace) -> None:
    pace.add_objects(5 * OBJECTS_PER_STORAGE)
    pace.add_objects(-2 * OBJECTS_PER_STORAGE)

    assert gc.get_threshold() == (700 + 3 * OBJECTS_PER_STORAGE, 10, 10)


def test_after_a_look_it_is_as_before(pace: GarbagePace) -> None:
    pace.add_objects(100)

    gc.collect(0)

    assert gc.get_threshold() == (700, 10, 10)


def test_a_script_s_own_threshold_counts(pace: GarbagePace) -> None:
    pace.add_objects(100)
    gc.set_threshold(50, 5, 5)

    pace.add_objects(3)

    assert gc.get_threshold() == (53, 5, 5)


def test_a_script_that_switches_it_off_keeps_it_off(pace: GarbagePace) -> None:
    gc.set_threshold(0, 10, 10)

    pace.add_objects(10)

    assert gc.get_threshold()[0] == 0
