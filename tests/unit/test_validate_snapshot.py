"""What `memest validate --snapshots` writes: a table for replays, a snapshot for PyTorch."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.cuda import _memory_viz

from memest.estimator.predict import record_plan
from memest.estimator.replay.recording import torch_snapshot
from memest.plan import TrainingPlan
from memest.validate.experiment import ACTIONS, snapshot_path, write_recording


def test_a_recording_is_a_table_and_what_torch_itself_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form of a snapshot is the same whether it was recorded or predicted."""
    plan = TrainingPlan(model_name="gpt2", seq_len=8, gpu=("t4",))
    snapshot = torch_snapshot(record_plan(plan))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    path = tmp_path / "runs" / "one.npy.gz"

    write_recording(path)

    assert sorted(p.name for p in path.parent.iterdir()) == ["one.npy.gz", "one.pickle"]
    with gzip.open(path) as file:
        table = np.load(file, allow_pickle=False)
    (trace,) = snapshot["device_traces"]
    assert table.shape == (4, sum(entry["action"] in ACTIONS for entry in trace))
    dumped = pickle.loads(snapshot_path(path).read_bytes())
    assert dumped == snapshot
    assert "Active Memory Timeline" in _memory_viz.trace_plot(dumped)
