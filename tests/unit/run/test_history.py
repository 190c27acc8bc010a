"""A run's history is bounded, and its peaks are true whatever is forgotten."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memest
from memest.estimator.gpu import history
from memest.estimator.replay.recording import chrome_trace, torch_snapshot
from memest.report import RunReport
from memest.run.session import Session
from memest.run.summary import record_run_of, run_of


def train(num_steps: int, *, peak_at: int = -1) -> Session:
    with memest.virtual_gpu("a100-40gb") as gpu:
        model = nn.Linear(256, 256).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(num_steps):
            rows = 4096 if step == peak_at else 64
            model(torch.ones(rows, 256, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                torch.cuda.empty_cache()
    return gpu


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_EVENTS", 200)
    monkeypatch.setattr(history, "WINDOW", 64)


def key_figures(report: RunReport) -> object:
    return report.peak_allocated_bytes, report.peak_reserved_bytes, report.peak, report.terms


def test_what_is_forgotten_changes_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(60, peak_at=50)
    monkeypatch.setattr(history, "MAX_EVENTS", 200)
    monkeypatch.setattr(history, "WINDOW", 64)
    short = train(60, peak_at=50)

    assert short.virtual.mode.memory.log.is_full
    assert not whole.virtual.mode.memory.log.is_full
    assert key_figures(short.report()) == key_figures(whole.report())
    assert short.report().steps == whole.report().steps
    assert short.virtual.mode.memory.log.num_events == whole.virtual.mode.memory.log.num_events
    assert short.report().peak.step == 50


@pytest.mark.usefixtures("short_memory")
def test_a_long_run_takes_no_more_memory_than_a_short_one() -> None:
    sizes = []
    for num_steps in (60, 240):
        mode = train(num_steps).virtual.mode
        sizes.append((len(mode.memory.storages.num_bytes), len(mode.memory.log.events)))
        assert len(mode.memory.log.marks) < 200

    assert sizes[0] == sizes[1]


@pytest.mark.usefixtures("short_memory")
def test_a_report_says_what_was_forgotten() -> None:
    report = train(60).report()

    assert any("optimizer steps, were kept" in line for line in report.assumptions)


@pytest.fixture(scope="module")
def run() -> Session:
    return train(6, peak_at=4)


def test_a_replay_is_what_happened(run: Session) -> None:
    again = run_of(run.virtual).on(None)

    assert again.peak_allocated_bytes == run.peak_allocated_bytes
    assert again.peak_reserved_bytes == run.peak_reserved_bytes


def test_a_replay_ends_where_memory_does(run: Session) -> None:
    limit = run.peak_reserved_bytes - 1
    again = run_of(run.virtual).on(limit)

    assert again.failed is not None
    assert again.peak_reserved_bytes <= limit


def test_streams_that_share_blocks_replay_alike() -> None:
    with memest.virtual_gpu() as gpu:
        cuda: Any = torch.cuda
        side = cuda.Stream()
        for _ in range(4):
            x = torch.ones(1 << 20, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x * 2
                x.record_stream(side)
            del x, y
    again = run_of(gpu.virtual).on(None)

    assert again.peak_allocated_bytes == gpu.peak_allocated_bytes
    assert again.peak_reserved_bytes == gpu.peak_reserved_bytes


def test_a_refused_request_replays_as_it_went() -> None:
    with memest.virtual_gpu(memory_limit="64MiB") as gpu:
        torch.ones(8 << 20, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(20 << 20, device="cuda")
        assert gpu.reserved_bytes == 0
        kept = torch.ones(4 << 20, device="cuda")
    recording = record_run_of(gpu.virtual, gpu.report())
    del kept

    assert [action.action for action in recording.actions].count("segment_alloc") == 2
    assert run_of(gpu.virtual).on(64 << 20).failed is None


def test_a_recording_is_for_other_tools(run: Session) -> None:
    recording = record_run_of(run.virtual, run.report())
    trace = torch_snapshot(recording)["device_traces"][0]
    frames = {(f["filename"], f["name"]) for e in trace for f in e["frames"]}
    names = {row["name"] for row in chrome_trace(recording)["traceEvents"]}

    assert recording.result.peak_allocated_bytes == run.peak_allocated_bytes
    assert recording.result.peak.step == 4
    assert (Path(__file__).name, "forward") in frames
    assert {"forward (step 1)", "backward (step 5)", "optimizer step (step 6)"} <= names


def test_the_chrome_trace_has_a_track_of_script_lines(run: Session) -> None:
    rows = chrome_trace(record_run_of(run.virtual, run.report()))["traceEvents"]
    slices = [row for row in rows if row["ph"] == "X" and row["tid"] == 1]
    file = Path(__file__).name

    assert any(row["name"] == "thread_name" and row["tid"] == 1 for row in rows if row["ph"] == "M")
    assert all(row["name"].startswith(f"{file}:") for row in slices)
    assert len({row["name"] for row in slices}) == 2
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(slices))
