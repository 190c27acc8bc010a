"""One process per experiment: whatever becomes of it, the suite goes on and nothing is lost."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from memest import packages
from memest.child import Child
from memest.cli import main
from memest.engines import Event, watched
from memest.errors import MemestError, PlanError, UnsupportedError
from memest.estimator.hardware.gpus import DEEPSPEED_HOST_BYTES
from memest.loops.job import RunOptions
from memest.packages import require
from memest.plan import TrainingPlan
from memest.report import Measurement, Outcome, Phase, PhaseRow, read_measurements
from memest.validate import experiment as device_module
from memest.validate import results, runner
from memest.validate.experiment import Device
from memest.validate.runner import table_row, validate
from tests.engine_tasks import experiment

H200 = Device(
    name="NVIDIA H200", memory_bytes=143_155 << 20, capability=(9, 0), num_sms=132, driver="580.65"
)
ROW = PhaseRow(
    step=0, micro_batch=0, phase=Phase.BEFORE_FORWARD, params_bytes=2, grads_bytes=3,
    optimizer_bytes=5, activations_bytes=7, allocated_bytes=17, peak_allocated_bytes=19,
    reserved_bytes=23,
)  # fmt: skip


def plan(name: str, **values: Any) -> TrainingPlan:
    return TrainingPlan(model_name="gpt2", name=name, **values)


def report(of: TrainingPlan, verdict: Outcome = Outcome.FITS, note: str = "") -> Measurement:
    return Measurement(
        name=of.label, plan=of.to_dict(), model={"class": "Tiny"}, gpu="h200",
        peak_allocated_bytes=19, peak_reserved_bytes=23, process_bytes=29, host_bytes=31,
        phases=(ROW,), verdict=verdict, versions={}, elapsed_s=0.5, device=H200.to_dict(),
        context_bytes=6, note=note,
    )  # fmt: skip


def by_name(of: TrainingPlan, options: RunOptions, deliver: Callable[[Measurement], Any]) -> None:
    """An experiment that ends as its name says."""
    if of.name == "crashes":
        faulthandler.disable()  # pytest's, which would print this as a crash of the tests
        os.kill(os.getpid(), signal.SIGSEGV)
    if of.name == "hangs":
        time.sleep(60)
    if of.name == "raises":
        raise ValueError("the seventh wrong thing")
    if of.name == "is refused":
        raise PlanError("nothing is left to train", hint="narrow `freeze`")
    if of.name == "says nothing":
        return
    deliver(report(of, Outcome.OOM if of.name == "is too large" else Outcome.FITS))


fork = partial(runner.start_experiment, experiment=by_name)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[Measurement]]:
    def run(rows: Any, **options: Any) -> list[Measurement]:
        options = {
            "results": tmp_path / "results.jsonl", "device": H200, "start": fork, **options,
        }  # fmt: skip
        return validate(rows, **options)

    return run


Run = Callable[..., list[Measurement]]


def test_every_ending_is_a_result_and_the_suite_goes_on(run: Run, tmp_path: Path) -> None:
    names = ["raises", "crashes", "is too large", "says nothing", "is refused", "fits"]

    measured = run([plan(name) for name in names])

    assert [m.name for m in measured] == names
    assert [str(m.verdict) for m in measured] == [
        "failed", "failed", "oom", "failed", "failed", "fits",
    ]  # fmt: skip
    raised, crashed, _, silent, refused, _ = (m.note for m in measured)
    assert raised.startswith("failed with exit code 1: ")
    assert "ValueError: the seventh wrong thing" in raised
    assert crashed.startswith("killed by SIGSEGV")
    assert "the training ended without a report" in silent
    assert "Error: nothing is left to train (hint: narrow `freeze`)" in refused
    assert read_measurements(tmp_path / "results.jsonl") == measured


def test_the_log_of_a_failure_stays_beside_the_results_and_others_go(
    run: Run, tmp_path: Path
) -> None:
    run([plan("raises"), plan("fits")])

    (log,) = (tmp_path / "results.logs").iterdir()
    assert log.name == "raises.log"
    assert "ValueError: the seventh wrong thing" in log.read_text()


def test_a_time_out_ends_the_experiment(run: Run) -> None:
    started = time.monotonic()

    hung, after = run([plan("hangs"), plan("fits")], timeout_s=0.5)

    assert time.monotonic() - started < 10
    assert hung.verdict is Outcome.FAILED
    assert hung.note.startswith("ended after 0.5 s, the time limit: ")
    assert after.verdict is Outcome.FITS


def test_resume_runs_what_is_missing_or_failed_and_keeps_the_rest(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for measurement in (report(plan("a")), report(plan("b"), Outcome.FAILED)):
        results.append(path, measurement)
    started: list[str] = []

    def start(of: TrainingPlan, options: RunOptions, **paths: Path) -> Child:
        started.append(of.name)
        return fork(of, options, **paths)

    measured = run([plan("a"), plan("b"), plan("c")], resume=True, start=start)

    assert started == ["b", "c"]
    assert [m.name for m in read_measurements(path)] == ["a", "b", "c"]
    assert [m.verdict for m in measured] == [Outcome.FITS] * 3


def test_results_are_not_added_to_without_resume(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, report(plan("a")))

    with pytest.raises(PlanError, match="holds results already") as caught:
        run([plan("a")])

    assert "`--resume`" in caught.value.hint
    assert len(read_measurements(path)) == 1


def test_resume_refuses_a_name_that_ran_with_another_plan(run: Run, tmp_path: Path) -> None:
    results.append(tmp_path / "results.jsonl", report(plan("a", batch_size=3)))

    with pytest.raises(PlanError, match="`a` is in the results with `batch_size` 3, not 4"):
        run([plan("a", batch_size=4)], resume=True)


@pytest.mark.parametrize(
    "cut", ['{"schema": "memest.report/1", "ki', '{"schema": "memest.report/1"\n', "\0\0\0\n"]
)
def test_a_line_cut_short_by_a_kill_is_dropped_by_resume(
    cut: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, report(plan("a")))
    with path.open("a") as file:
        file.write(cut)

    run([plan("a"), plan("b")], resume=True)

    assert [m.name for m in read_measurements(path)] == ["a", "b"]


def test_only_the_last_line_is_taken_for_cut(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("not JSON\n" + report(plan("a")).to_json() + "\n")

    assert not results.drop_cut_line(path)
    with pytest.raises(PlanError, match="line 1, is no JSON"):
        results.prepare(path, resume=True)


def test_results_of_another_schema_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"schema": "memest.report/0"}\n')

    with pytest.raises(PlanError, match=r"has the schema `memest\.report/0`"):
        results.prepare(path, resume=True)

    assert path.read_text() == '{"schema": "memest.report/0"}\n'


def test_lines_of_two_writers_do_not_mix(tmp_path: Path) -> None:
    """A line is one write in append mode: two processes, forty lines, every one whole."""
    path = tmp_path / "results.jsonl"

    def write() -> None:
        for number in range(20):
            results.append(path, report(plan(f"{os.getpid()} {number}")))

    pid = os.fork()
    if not pid:
        write()
        os._exit(0)
    write()
    os.waitpid(pid, 0)

    assert len({m.name for m in read_measurements(path)}) == 40


def test_results_that_cannot_be_written_are_an_error(run: Run, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written"):
        run([plan("a")], results=tmp_path)


def test_the_folder_of_the_results_is_made(run: Run, tmp_path: Path) -> None:
    run([plan("fits")], results=tmp_path / "new" / "results.jsonl")

    assert len(read_measurements(tmp_path / "new" / "results.jsonl")) == 1


def test_other_processes_cannot_be_measured(run: Run, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="`beside` of `a` cannot be measured"):
        run([plan("a", beside=1 << 30)])

    assert not (tmp_path / "results.jsonl").exists()


def test_two_experiments_of_one_name_are_refused_before_any_runs(run: Run, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="two experiments are named `a`"):
        run([plan("a"), plan("a")])

    assert not (tmp_path / "results.jsonl").exists()


def test_a_run_beyond_the_hosts_memory_is_refused_with_both_sizes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"fits": 2 * 2**30, "small": 2**30}
    monkeypatch.setattr(runner, "predicted_host_bytes", lambda of: needs[of.name])
    monkeypatch.setattr(runner, "host_memory_bytes", lambda: 3 * 2**29)

    refused, small = run([plan("fits"), plan("small")])

    assert refused.verdict is Outcome.FAILED
    assert refused.note == (
        "skipped: it holds 2.00 GiB in host memory, and the machine has 1.50 GiB"
    )
    assert small.verdict is Outcome.FITS


@pytest.mark.parametrize(
    ("package", "values"),
    [
        ("bitsandbytes", {"use_qlora": True}),
        ("bitsandbytes", {"optim": "paged_adamw_32bit"}),
        ("deepspeed", {"strategy": "deepspeed_stage_2", "devices": 2}),
        ("flash_attn", {"attn_implementation": "flash_attention_2"}),
    ],
)
def test_a_row_whose_package_is_missing_is_skipped_and_the_others_run(
    package: str, values: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "is_installed", lambda name: name != package)
    monkeypatch.setattr(packages, "is_installed", lambda name: name != package)
    two = Device(**{f.name: getattr(H200, f.name) for f in fields(H200)} | {"num_devices": 2})

    skipped, ran = run([plan("needs it", **values), plan("fits")], device=two, workers=1)

    assert skipped.verdict is Outcome.FAILED
    assert skipped.note.startswith(f"skipped: it needs `{package}` (pip install ")
    assert ran.verdict is Outcome.FITS
    with pytest.raises(UnsupportedError, match=f"this needs the package `{package}`"):
        run([plan("alone", **values)], device=two, results=tmp_path / "others.jsonl")


def test_of_plain_runs_only_paged_optimizers_hold_host_memory() -> None:
    assert runner.predicted_host_bytes(plan("a", optim="adam_8bit")) == 0
    # Two moments of one byte for each element of the large parameters, out of 124e6 in all.
    paged = runner.predicted_host_bytes(plan("a", optim="paged_adam_8bit", seq_len=8))
    assert 0.99 * 2 * 124_439_808 < paged <= 2 * 124_439_808


def test_offload_is_asked_of_the_prediction_too() -> None:
    """Masters, fp32 gradients, two moments: 16 B of each of gpt2's 124e6 parameters and more."""
    offload = plan(
        "a", strategy="deepspeed_stage_2_offload", optim="deepspeed_cpu", devices=2, seq_len=8
    )

    held = runner.predicted_host_bytes(offload) - 2 * DEEPSPEED_HOST_BYTES

    assert 18 * 124_439_808 <= held < 20 * 124_439_808


def test_a_row_of_the_table_has_the_totals_or_the_reason(run: Run) -> None:
    fits, raises = run([plan("fits"), plan("raises")])

    sizes = ["19", "B", "23", "B", "29", "B", "31", "B"]
    assert table_row(fits).split() == ["fits", "fits", *sizes, "0.5", "s"]
    assert "  failed   failed with exit code 1" in table_row(raises)


def test_every_gpu_of_the_machine_measures_and_the_file_has_the_order_of_the_suite(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = [plan("paged", optim="paged_adam_8bit"), *map(plan, ("fits", "raises", "is too large"))]
    seen: list[Event] = []

    with watched(seen.append):
        found = run(
            rows, device=replace(H200, num_devices=2),
            start=partial(runner.start_experiment, experiment=experiment),
        )  # fmt: skip

    stored = read_measurements(tmp_path / "results.jsonl")
    assert [m.name for m in stored] == [row.label for row in rows] == [m.name for m in found]
    assert [m.verdict for m in found[1:]] == [Outcome.FITS, Outcome.FAILED, Outcome.OOM]
    assert "the seventh wrong thing" in found[2].note
    assert {found[1].device["visible"], found[3].device["visible"]} <= {"0,1", "1,0"}
    assert [event.label for event in seen if event.is_done][-1] == "paged"
    assert (tmp_path / "results.logs" / "raises.log").exists()


def test_more_workers_than_gpus_are_refused(run: Run) -> None:
    with pytest.raises(PlanError, match="`--workers 2` is more than the 1 GPUs"):
        run([plan("fits")], workers=2)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_command_prints_a_row_for_each_result(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(runner, "detect_device", lambda: H200)
    run_all = partial(validate, start=fork)
    monkeypatch.setattr(runner, "validate", run_all)
    monkeypatch.chdir(tmp_path)
    arguments = ["validate", "--model", "gpt2", "--results", "results.jsonl"]

    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 0
    assert "  fits  " in shown.getvalue()
    assert ("gpt2  is running" in shown.getvalue()) == is_terminal


def test_the_suite_of_the_gpu_is_taken_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[list[str], dict[str, Any]]] = []

    def record(rows: Any, **options: Any) -> list[Measurement]:
        calls.append(([row.label for row in rows], options))
        return [report(plan("a"))]

    monkeypatch.setattr(runner, "detect_device", lambda: H200)
    monkeypatch.setattr(runner, "validate", record)
    monkeypatch.chdir(tmp_path)
    for arguments in (
        [],
        ["--memory-limit", "78.66GiB", "--json"],
        ["--model", "gpt2", "--bs", "2"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["validate", *arguments])
        assert ended.value.code == 0

    (suite, whole), (_, capped), (single, one) = calls
    assert (len(suite), single) == (15, ["gpt2"])
    assert [str(options["results"]) for options in (whole, capped, one)] == [
        "results/h200-lab-h100.jsonl",
        "results/h200-lab-h100-capped-78.66GiB.jsonl",
        "results/h200-gpt2.jsonl",
    ]
    assert json.loads(capsys.readouterr().out)["kind"] == "measured"


def test_a_gpu_of_the_catalogue_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["validate", "--gpu", "a100"])

    assert ended.value.code == 2
    assert "`--gpu` does not apply" in capsys.readouterr().err


def test_what_a_child_returns_or_raises_comes_back() -> None:
    def refuse() -> None:
        raise UnsupportedError("no CUDA device", hint="elsewhere")

    def fail() -> None:
        raise KeyError("k")

    assert runner.call_in_child(lambda: H200) == H200
    with pytest.raises(UnsupportedError, match="no CUDA device") as caught:
        runner.call_in_child(refuse)
    assert caught.value.hint == "elsewhere"
    with pytest.raises(MemestError, match="KeyError: 'k'"):
        runner.call_in_child(fail)
    with pytest.raises(MemestError, match="ended without a result"):
        runner.call_in_child(lambda: os._exit(3))


def test_a_spawned_experiment_reads_its_request_and_leaves_a_log(tmp_path: Path) -> None:
    """Without a GPU it ends with the reason in its log."""
    child = runner.start_experiment(
        plan("a"), RunOptions(data=Path("d")), report=tmp_path / "report", log=tmp_path / "log",
        is_copy=False,
    )  # fmt: skip
    while (code := child.poll()) is None:
        time.sleep(0.05)

    assert code in (0, 1)
    assert code == 0 or "Error: " in (tmp_path / "log").read_text()


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(UnsupportedError, match="needs the package `no_such_package`") as caught:
        require("torch", "no_such_package")
    assert caught.value.hint == "pip install 'memest-gpu[validate]'"


@pytest.mark.parametrize(
    ("cuda", "error", "message"),
    [
        (None, "", "is built without CUDA"),
        ("13.0", "The NVIDIA driver on your system is too old (found version 11040).", "too old"),
        ("13.0", "Found no NVIDIA driver on your system.", "no CUDA device can be used"),
        ("13.0", "No CUDA GPUs are available", "no CUDA device can be used"),
    ],
)
def test_a_machine_without_a_usable_gpu_is_said_so(
    cuda: str | None, error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def fail() -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", fail)

    with pytest.raises(UnsupportedError, match=message) as caught:
        device_module.query_device()
    assert caught.value.exit_code == 3
    assert error in str(caught.value)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_capped_gpu_runs_out_of_memory_in_its_own_process(tmp_path: Path) -> None:
    """gpt2 in fp32 with AdamW holds 16 B a weight, 1.99e9 B: 1 GiB does not do, 4 GiB do."""
    rows = [
        TrainingPlan(model_name="gpt2", name=name, precision="32-true", memory_limit=limit)
        for name, limit in (("capped", 2**30), ("not", 4 * 2**30))
    ]

    capped, whole = validate(
        rows, results=tmp_path / "results.jsonl", device=runner.detect_device()
    )

    assert (capped.verdict, whole.verdict) == (Outcome.OOM, Outcome.FITS)
    assert capped.peak_reserved_bytes <= 2**30
    assert whole.peak_allocated_bytes > 16 * 124_439_808
    assert json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])["verdict"] == "oom"


def test_a_kill_of_the_runner_loses_the_running_experiment_alone(tmp_path: Path) -> None:
    """And the experiment itself ends with it."""
    path, started = tmp_path / "results.jsonl", tmp_path / "pid"

    def experiment(of: TrainingPlan, options: RunOptions, deliver: Callable[..., Any]) -> None:
        if of.name == "second":
            started.write_text(str(os.getpid()))
        by_name(of if of.name == "first" else plan("hangs"), options, deliver)

    pid = os.fork()
    if not pid:
        start = partial(runner.start_experiment, experiment=experiment)
        validate(
            [plan("first"), plan("second")], results=path, device=H200, start=start,
        )  # fmt: skip
        os._exit(0)
    deadline = time.monotonic() + 20
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    assert [m.name for m in read_measurements(path)] == ["first"]
    child = int(started.read_text())
    while time.monotonic() < deadline and _is_running(child):
        time.sleep(0.02)
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    """Whether it is there and no zombie that waits for a reaper."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
