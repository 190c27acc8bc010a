"""One process per GPU: however one of them ends, the experiment is one result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from memest.estimator.gpu.worlds import Rank
from memest.loops.job import RunOptions
from memest.plan import TrainingPlan
from memest.report import Measurement, Outcome
from memest.validate import runner
from memest.validate.experiment import Device
from memest.validate.runner import validate
from memest.writing import write_whole

TWO_GPUS = Device(
    name="NVIDIA H200", memory_bytes=143_155 << 20, capability=(9, 0), num_sms=132,
    driver="580.65", num_devices=2,
)  # fmt: skip


def plan(name: str, **values: Any) -> TrainingPlan:
    return TrainingPlan(model_name="gpt2", **{"name": name, "devices": 2, **values})


def report(of: TrainingPlan, rank: int, **values: Any) -> Measurement:
    """Rank 1 has reserved more; each rank holds 30 bytes in host memory, and its own number."""
    given: dict[str, Any] = {
        "name": of.label, "plan": of.to_dict(), "model": {"class": "Tiny"}, "gpu": "h200",
        "peak_allocated_bytes": 19 - rank, "peak_reserved_bytes": 23 + rank, "process_bytes": 29,
        "host_bytes": 30 + rank, "phases": (), "verdict": Outcome.FITS, "versions": {},
        "elapsed_s": 0.5, "context_bytes": 6,
        "device": {"rank": rank, "host_samples": [{"moment": "m"}]}, **values,
    }  # fmt: skip
    return Measurement(**given)


def by_name(of: TrainingPlan, options: RunOptions, deliver: Callable[[Measurement], Any]) -> None:
    """A rank of two, in a group over gloo, that ends as the plan's name says."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if of.name == "crashes" and rank == 1:
        raise ValueError("the seventh wrong thing")
    if of.name == "hangs" and rank == 1:
        time.sleep(60)
    if of.name == "is too large" and rank == 1:
        deliver(report(of, rank, verdict=Outcome.OOM, note="no memory on rank 1"))
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)  # the others wait here for a rank that does not come
    deliver(report(of, rank, note=f"sum {total.item()}"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Measurement]:
    """One experiment of two ranks, from the runner down."""

    def run(name: str, **options: Any) -> Measurement:
        (measured,) = validate(
            [plan(name)], results=tmp_path / "results.jsonl", device=TWO_GPUS,
            start=partial(runner.start_experiment, experiment=by_name),
            **options,
        )  # fmt: skip
        return measured

    return run


Run = Callable[..., Measurement]


def test_the_ranks_meet_and_their_reports_are_one(run: Run, tmp_path: Path) -> None:
    measured = run("fits")

    assert (measured.verdict, measured.note) == (Outcome.FITS, "sum 3")
    assert measured.peak_reserved_bytes == 24  # of rank 1, the worst
    assert measured.host_bytes == 30 + 31
    assert [r["rank"] for r in measured.ranks] == [0, 1]
    assert not (tmp_path / "results.logs").exists()


def test_out_of_memory_on_one_rank_is_the_verdict_of_all(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for it in a collective, for ever: it is given a moment and ended."""
    monkeypatch.setattr(runner, "OOM_GRACE_S", 0.2)

    measured = run("is too large", timeout_s=30.0)

    assert (measured.verdict, measured.note) == (Outcome.OOM, "no memory on rank 1")
    assert [r["rank"] for r in measured.ranks] == [1]


def test_the_error_of_a_rank_is_in_the_log_and_the_others_are_ended(run: Run) -> None:
    measured = run("crashes", timeout_s=30.0)

    assert measured.verdict is Outcome.FAILED
    assert measured.note.startswith("failed with exit code 1: ")
    assert "ValueError: the seventh wrong thing" in measured.note
    assert "rank 1 ended without a report" in measured.note


def test_ranks_that_hang_are_ended_by_the_time_limit(run: Run) -> None:
    started = time.monotonic()

    measured = run("hangs", timeout_s=1.0)

    assert time.monotonic() - started < 5
    assert measured.verdict is Outcome.FAILED
    assert measured.note.startswith("ended after 1 s, the time limit: ")


def test_more_gpus_than_there_are_is_a_reason_to_skip(tmp_path: Path) -> None:
    (skipped,) = validate(
        [plan("large", devices=4)], results=tmp_path / "results.jsonl", device=TWO_GPUS,
        start=partial(runner.start_experiment, experiment=by_name),
    )  # fmt: skip

    assert skipped.note == "skipped: it needs 4 GPUs, and the machine has 2"


def test_no_rank_is_left_once_the_reports_are_in(tmp_path: Path) -> None:
    """Each waits for its end, since the others may still read what it holds."""

    def deliver(path: Path) -> Any:
        measured = report(plan("a"), int(os.environ["RANK"]), note=str(os.getpid()))
        write_whole(path, measured.to_json())
        runner.wait_for_the_end()

    found = runner.run_ranks(3, deliver, tmp_path)

    assert sorted(m.device["rank"] for m in found) == [0, 1, 2]
    for measured in found:
        with pytest.raises(ProcessLookupError):
            os.kill(int(measured.note), 0)


def test_the_environment_is_that_of_torchrun() -> None:
    given = runner.rank_environment(2, 4, 12345)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        environment = TorchElasticEnvironment()

        assert environment.detect()
        assert (environment.local_rank(), environment.global_rank()) == (2, 2)
        assert (environment.world_size(), environment.main_port) == (4, 12345)
    simulated = Rank(rank=2, world_size=4, num_local=4).environment(12345)
    changed = {name for name in simulated if given[name] != simulated[name]}
    assert changed == {"TORCHELASTIC_USE_AGENT_STORE"}  # no agent holds the store of a measured run


def test_the_worst_rank_is_out_of_memory_or_has_reserved_most() -> None:
    of = plan("a")
    first, second = report(of, 0), report(of, 1)
    failed = report(of, 0, verdict=Outcome.OOM, peak_reserved_bytes=2)

    merged = runner.merge([second, first])

    assert merged.device["rank"] == 1
    assert runner.merge([failed, second]).verdict is Outcome.OOM
    assert [(r["rank"], r["peak_allocated_bytes"], r["host_bytes"]) for r in merged.ranks] == [
        (0, 19, 30), (1, 18, 31),
    ]  # fmt: skip
    assert "host_samples" not in merged.device
    assert all(r["host_samples"] == [{"moment": "m"}] for r in merged.ranks)


def test_a_merged_report_reads_back_as_it_was() -> None:
    of = plan("a")
    merged = runner.merge([report(of, 0), report(of, 1)])

    assert Measurement.from_dict(merged.to_dict()) == merged
