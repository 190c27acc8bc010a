"""Engines return the results of one process, and a dead worker costs its own task alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memest import engines
from memest.child import DiedError
from memest.cli import main
from memest.engines import Engine, Event, Local, Ray, Slurm, find_engine, watched
from memest.errors import PlanError, UnsupportedError
from memest.estimator.search.sweep import SweepPoint, sweep
from memest.plan import TrainingPlan
from tests.engine_tasks import first_gpu, refuse, stumble, work

NUMBERS = [3, 1, 2, 5]
ENGINES: dict[str, Callable[[], Engine]] = {
    "local": lambda: Local(workers=2),
    "ray": lambda: Ray(workers=2),
    "slurm": lambda: Slurm(workers=2, cluster="local"),
}
PACKAGES = {"ray": "ray", "slurm": "submitit"}


def the_error(task: Any, error: DiedError) -> DiedError:
    return error


@pytest.fixture(params=ENGINES)
def engine(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    """Each engine whose package is installed; Slurm is submitit's executor of this machine."""
    if request.param in PACKAGES:
        package = pytest.importorskip(PACKAGES[request.param])
        if request.param == "slurm":  # a result may come late over a network; not here
            monkeypatch.setattr(package.Job, "_results_timeout_s", 0.2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(engines.__file__).parents[1]))
    return ENGINES[request.param]()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_a_killed_worker_is_replaced_and_its_task_is_tried_once_more(
    engine: Engine, tmp_path: Path
) -> None:
    events: list[Event] = []
    with watched(events.append):
        found = engine.map(
            partial(work, folder=tmp_path), NUMBERS, died=the_error, label=lambda n: f"plan {n}"
        )
    with pytest.raises(PlanError, match="7 is not a plan") as refused:
        engine.map(refuse, [7, 7], died=the_error)

    assert [found[0], found[1], found[3]] == [9, 1, 25]
    assert isinstance(found[2], DiedError)
    assert str(found[2]).startswith("`plan 2` has no result: its worker died 2 times, ")
    assert found[2].hint == "give each worker more memory, or use fewer with `--workers`"
    assert [e.label for e in events if not e.is_done] == [f"plan {n}" for n in NUMBERS]
    assert sorted(e.label for e in events if e.is_done) == [f"plan {n}" for n in (1, 2, 3, 5)]
    assert refused.value.hint == "take three"
    if isinstance(engine, Local):
        assert str(found[2]).endswith("killed by SIGKILL")


def test_each_worker_sees_a_gpu_of_its_own_first() -> None:
    found = Local(workers=2, visible=("4", "6", "7")).map(first_gpu, [0, 1], died=the_error)

    assert sorted(found) == ["4,6,7", "6,4,7"]


def test_an_unexpected_error_has_the_lines_of_the_worker() -> None:
    with pytest.raises(ValueError, match="1 came unexpectedly") as raised:
        Local(workers=2).map(stumble, [1, 1], died=the_error)

    assert "in stumble" in raised.value.__notes__[0]


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
@pytest.mark.parametrize("command", ["sweep --model gpt2", "explore", "validate"])
def test_a_missing_package_is_one_line_of_pip(
    command: str,
    name: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("memest.packages.is_installed", lambda name: name != package)
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--engine", name])

    assert ended.value.code == 3
    assert f"hint: pip install 'memest-gpu[{name}]'" in capsys.readouterr().err


def test_slurm_is_refused_where_nothing_can_be_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "require", lambda *packages: None)
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)

    with pytest.raises(UnsupportedError, match="there is no `sbatch` on this machine"):
        find_engine("slurm")


def test_a_sweep_gives_its_groups_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(Ray):
        def _outcomes(self, one: Any, tasks: Any, begins: Any, again: bool) -> Any:
            seen.append((self.workers, [len(plans) for plans in tasks]))
            yield 0, engines._Death("killed by SIGKILL")
            if len(tasks) > 1:
                yield 1, [[SweepPoint(plan=plan, gpu="t4", verdict=None)] for plan in tasks[1]]

    seen: list[tuple[int | None, list[int]]] = []
    monkeypatch.setattr(engines, "require", lambda *packages: None)
    monkeypatch.setitem(engines.ENGINES, "ray", Dead)
    plans = [
        TrainingPlan(model_name="gpt2", act_ckpt=is_ckpt, batch_size=size, gpu=("t4",))
        for is_ckpt in (False, True)
        for size in (1, 2)
    ]
    points = sweep(plans, jobs=3, engine="ray")

    assert seen == [(3, [2, 2]), (3, [2])]
    died = (
        "`gpt2 bf16-true adamw 2 of batch size` has no result: its worker died 2 times, killed by "
        "SIGKILL"
    )
    assert [point.error for point in points] == ["", "", died, died], "the longer task is first"


@pytest.mark.parametrize(("gpus", "started"), [(0, 2), (1, 9)])
def test_a_local_cluster_has_no_more_workers_than_cores(
    gpus: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that use GPUs wait for these, so they may share cores."""
    asked: list[int] = []
    cluster = SimpleNamespace(
        is_initialized=lambda: False, init=lambda *args, num_cpus, **others: asked.append(num_cpus)
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(engines.os, "cpu_count", lambda: 2)
    Ray(workers=9, gpus=gpus)._connect(cluster)

    assert asked == [started]
