"""Guessed conditions of branches and of loops."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import memest
from memest.estimator.gpu.branches import STEADY_ROUNDS

LOOPS = """
import torch

def halve(x):
    taken = []
    while x > torch.zeros((), device="cuda"):
        x = x * 0.5
        assert not torch.isnan(x)
        taken.append(bool(x <= 0.3))
    return taken

def retry(x):
    rounds = 0
    while True:
        rounds += 1
        if x < 0.3:
            break
    return rounds

def retry_at_most(x, limit):
    rounds = 0
    while True:
        rounds += 1
        if x < 0.3:
            break
        if rounds == limit:
            return rounds

def solve(x, most, grows):
    kept = []
    for rounds in range(1, most + 1):
        y = x * 2
        if grows:
            kept.append(torch.ones(1000 * rounds, device="cuda"))
        if rounds > 9 and y.mean() < 0.3:
            break
    return rounds

def integrate(x, end):
    '''An adaptive step is refused as long as its error is too large.'''
    now = torch.zeros((), device="cuda")
    while now < end:
        if x <= 0.3:
            now = now + x * 2
    return now
"""


@pytest.fixture
def loops(tmp_path: Path) -> ModuleType:
    (tmp_path / "waiting.py").write_text(LOOPS)
    spec = importlib.util.spec_from_file_location("waiting", tmp_path / "waiting.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unknown() -> torch.Tensor:
    layer = torch.nn.Linear(1000, 1000, device="cuda")
    return layer(torch.randn(1000, 1000, device="cuda")).detach().sum()


def test_a_loop_that_waits_for_an_unknown_value_runs_twice(loops: ModuleType) -> None:
    """Its second round takes the branches that the first does not."""
    with memest.virtual_gpu("h100-80gb") as gpu:
        assert loops.halve(unknown()) == [False, True]
        assert loops.halve(unknown()) == [False, True]
        assert loops.retry(unknown()) == 3

    assert gpu.report().notes[-2:] == (
        "waiting.py:6 waits for an unknown value: each loop is assumed to end after 2 rounds",
        "waiting.py:16 waits for an unknown value: each loop is assumed to end after 2 rounds",
    )


def test_a_loop_with_a_largest_number_of_rounds_runs_as_many(loops: ModuleType) -> None:
    with memest.virtual_gpu("h100-80gb"):
        assert loops.retry_at_most(unknown(), 7) == 7


def test_a_loop_with_a_largest_number_of_rounds_ends_when_its_memory_stays_the_same(
    loops: ModuleType,
) -> None:
    """The solver of conjugate gradients reads its residual in each round but the first."""
    with memest.virtual_gpu("h100-80gb") as gpu:
        x = unknown()
        assert loops.solve(x, 1000, grows=False) == 10 + 1 + STEADY_ROUNDS
        assert loops.solve(x, 100, grows=True) == 100
        assert loops.solve(x, 50, grows=False) == 50

    assert gpu.report().notes[-1:] == (
        "waiting.py:35 waits for an unknown value: ended after 64 rounds of equal memory",
    )


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_adds_to_its_history_in_each_iteration(search: str | None) -> None:
    with memest.virtual_gpu("h100-80gb") as gpu:
        layer = torch.nn.Linear(1000, 1000, device="cuda")
        x = torch.randn(10, 1000, device="cuda")
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=5, line_search_fn=search)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        state = optimizer.state[layer.weight]

    assert len(state["old_dirs"]) == len(state["old_stps"]) == 2 * 5 - 1
    kinds = {row.name: row.num_bytes for row in gpu.report().terms}
    assert kinds["optimizer"] > 2 * 8 * 4 * 1000 * 1001
    has_note = (
        "line searches of L-BFGS are assumed to end with their first step" in gpu.report().notes
    )
    assert has_note == (search is not None)


SCIPY = """
def minimize(loss, x):
    loss(x)
    return {"success": False, "status": 2, "message": "ABNORMAL"}
"""


def test_a_minimum_is_found_where_values_are_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BoTorch's `fit_gpytorch_mll` raises an error if SciPy finds none. SciPy is not installed for
    the tests: a package of its name has a `minimize` that fails, as SciPy's does there."""
    (tmp_path / "scipy").mkdir()
    (tmp_path / "scipy/__init__.py").touch()
    (tmp_path / "scipy/optimize.py").write_text(SCIPY)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    with memest.virtual_gpu("h100-80gb") as gpu:
        optimize = importlib.import_module("scipy.optimize")
        weight = torch.ones(3, device="cuda")

        guessed = optimize.minimize(lambda x: (weight @ unknown().expand(3)).exp().item(), 1.0)
        known = optimize.minimize(lambda x: x * x, 1.0)
    for name in ("scipy", "scipy.optimize"):
        del sys.modules[name]  # `monkeypatch` would put it back

    assert (guessed["success"], known["success"]) == (True, False)
    assert "`scipy.optimize.minimize` is assumed to succeed" in gpu.report().notes


def test_a_loop_on_a_known_value_takes_both_ways(loops: ModuleType) -> None:
    """The steps of an adaptive solver are refused at first, so that the time stays known."""
    with memest.virtual_gpu("h100-80gb"):
        end = torch.ones((), device="cuda")
        assert loops.integrate(unknown(), end).shape == ()


def test_an_unknown_number_is_less_than_infinity() -> None:
    with memest.virtual_gpu("h100-80gb"):
        x, infinity = unknown(), torch.tensor(float("inf"), device="cuda")

        assert not x > infinity
        assert not infinity < x
        assert x <= infinity
        assert x > -infinity
