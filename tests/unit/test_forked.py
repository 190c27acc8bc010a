"""Work in a copy of the process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pytest

from memest import TrainingPlan, predict
from memest.child import forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system makes no such copies")


def test_the_work_is_done_beside() -> None:
    with forked(os.getpid) as result:
        assert result() not in (None, os.getpid())


def test_what_fails_there_is_nothing_here(capfd: pytest.CaptureFixture[str]) -> None:
    with forked(lambda: 1 // 0) as result:
        assert result() is None
    assert capfd.readouterr() == ("", "")


def test_work_that_nobody_asked_about_is_given_up() -> None:
    started = time.monotonic()
    with pytest.raises(KeyError), forked(lambda: time.sleep(60)):
        raise KeyError
    assert time.monotonic() - started < 20


def test_several_processes_predict_what_one_does(shallow: Callable[..., str]) -> None:
    """Here autograd may have run, and then one does it all."""
    gpus = ("a100-40gb", "t4", "h100-80gb")
    plan = TrainingPlan(model_name=shallow("opt-125m"), strategy="fsdp", devices=2, gpu=gpus)

    one, several = predict(plan), predict(plan, jobs=3)

    assert several.verdicts == one.verdicts
    assert several.intervals == one.intervals
