"""A replayed run, action by action, and as other tools read it: every byte is known."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from memest.errors import PlanError
from memest.estimator.predict import record_plan
from memest.estimator.replay.recording import (
    PhaseSpan,
    Recording,
    chrome_trace,
    record_run,
    timeline,
    torch_snapshot,
    write_chrome_trace,
    write_snapshot,
)
from memest.estimator.replay.replay import Program, Run, StateBytes
from memest.estimator.tensors.storages import MemKind, Site, StorageTable
from memest.plan import TrainingPlan
from tests.programs import lightning_program

MIB = 1 << 20
PARAM, BATCH, ACTIVATION, GRAD, STATE, TEMPORARY, WORKSPACE = range(7)
STORAGES = [
    (4000, Site("", "net.fc", "setup"), MemKind.PARAMS),
    (512, Site("aten.empty", "", "forward"), MemKind.ACTIVATIONS),
    (3 * MIB, Site("aten.addmm", "net.fc", "forward"), MemKind.ACTIVATIONS),
    (4096, Site("aten.mm", "net.fc", "backward"), MemKind.GRADS),
    (2048, Site("aten.zeros_like", "", "optimizer"), MemKind.OPTIMIZER),
    (1024, Site("aten.sqrt", "", "optimizer"), MemKind.ACTIVATIONS),
    (8192, Site("aten.addmm", "net.fc", "forward"), MemKind.WORKSPACE),
]
STEPS, SETUP = 2, 4096  # 4000 requested bytes are a block of 4096


def program() -> Program:
    storages = StorageTable()
    for size, site, kind in STORAGES:
        storages.add(size, site, kind)
    return lightning_program(
        storages,
        setup=[PARAM],
        first=([WORKSPACE, BATCH, ACTIVATION], [GRAD, ~ACTIVATION], [~BATCH]),
        optimizer_first=[STATE, TEMPORARY, ~TEMPORARY],
        optimizer_next=[TEMPORARY, ~TEMPORARY],
        grads=[GRAD],
        before=StateBytes(4000, 0, 0),
        after=StateBytes(4000, 4096, 2048),
    )


def recorded(steps: int = STEPS, limit_bytes: int | None = None) -> Recording:
    return record_run(Run(program(), steps), limit_bytes)


def test_a_recorded_run_is_the_replayed_one() -> None:
    """Seeing a run changes nothing of it, and leaves none of its repetitions out."""
    seen = recorded(steps=5)

    assert seen.result == Run(program(), 5, 1).on()
    assert [mark.step for mark in seen.marks] == [step for step in range(5) for _ in range(4)]


def test_every_birth_and_death_is_an_action_in_its_order() -> None:
    actions = [(a.action, a.stack, a.block_bytes) for a in recorded(steps=1).actions]

    assert actions == [
        ("segment_alloc", PARAM, 2 * MIB),
        ("alloc", PARAM, 4096),
        ("alloc", WORKSPACE, 8192),
        ("alloc", BATCH, 512),
        ("segment_alloc", ACTIVATION, 20 * MIB),
        ("alloc", ACTIVATION, 3 * MIB),
        ("alloc", GRAD, 4096),
        ("free_requested", ACTIVATION, 3 * MIB),
        ("free_completed", ACTIVATION, 3 * MIB),
        ("alloc", STATE, 2048),
        ("alloc", TEMPORARY, 1024),
        ("free_requested", TEMPORARY, 1024),
        ("free_completed", TEMPORARY, 1024),
        ("free_requested", BATCH, 512),
        ("free_completed", BATCH, 512),
    ]


def test_a_block_is_freed_where_it_was_made_although_it_merges_with_its_neighbour() -> None:
    live: dict[int, int] = {}
    for action in recorded().actions:
        if action.action == "alloc":
            live[action.stack] = action.address
        elif action.action == "free_requested":
            assert live.pop(action.stack) == action.address


def test_the_timeline_is_one_step_by_what_it_is_held_for() -> None:
    line = timeline(recorded(), step=1)

    kept = {"params": 4096, "grads": 4096, "optimizer": 2048, "workspace": 8192}
    assert {kind: values[0] for kind, values in line.kinds.items() if values[0]} == kept
    forward, backward, step = line.spans
    assert [s.name for s in line.spans] == ["forward", "backward", "step"]
    assert forward == PhaseSpan("forward", 0, 3)  # batch, activation, zero_grad
    assert backward == PhaseSpan("backward", 3, 5)  # gradient, activation
    assert step == PhaseSpan("step", 5, 7)
    assert line.kinds["temporaries"][6] == 1024
    assert line.kinds["batch"] == [0, 512, 512, 512, 512, 512, 512, 512, 0]
    assert line.kinds["activations"] == [0, 0, 3 * MIB, 3 * MIB, 3 * MIB, 0, 0, 0, 0]


def test_the_timeline_peaks_where_the_prediction_does() -> None:
    recording = recorded()
    line = timeline(recording)

    assert line.step == recording.result.peak.step
    assert line.total(line.peak) == recording.result.peak_allocated_bytes
    assert line.where == "net.fc, aten.addmm"
    assert line.refused_bytes == 0
    assert max(line.reserved) == recording.result.peak_reserved_bytes


def test_a_run_out_of_memory_ends_in_its_phase() -> None:
    recording = recorded(limit_bytes=4 * MIB)
    line = timeline(recording)

    assert recording.actions[-1].action == "oom"
    assert recording.actions[-1].num_bytes == line.refused_bytes == 3 * MIB
    assert line.spans == (PhaseSpan("forward", 0, 2),)  # the workspace and the batch
    entry = torch_snapshot(recording)["device_traces"][0][-1]
    assert entry["action"] == "oom"
    assert entry["device_free"] == 2 * MIB
    assert "addr" not in entry
    assert "OutOfMemoryError" in _memory_viz.trace(torch_snapshot(recording))


def test_a_storage_is_of_the_kind_that_the_report_names() -> None:
    recording = recorded()
    categories = {e["category"] for e in torch_snapshot(recording)["device_traces"][0]}

    assert categories == {
        "params", "batch", "activations", "grads", "optimizer", "temporaries", "workspace",
        "unknown",
    }  # fmt: skip


def test_the_snapshot_has_the_segments_and_blocks_that_are_left() -> None:
    snapshot = torch_snapshot(recorded())

    small, large = sorted(snapshot["segments"], key=lambda s: s["total_size"])
    assert [b["size"] for b in small["blocks"] if b["state"] == "active_allocated"] == [
        4096, 8192, 4096, 2048,
    ]  # fmt: skip
    assert small["requested_size"] == 4000 + 8192 + 4096 + 2048
    assert small["allocated_size"] == small["active_size"] == 4096 + 8192 + 4096 + 2048
    assert (small["segment_type"], large["segment_type"]) == ("small", "large")
    assert [(b["state"], b["size"]) for b in large["blocks"]] == [("inactive", 20 * MIB)]
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]


def test_frames_are_operator_modules_and_phase_from_the_inside_out() -> None:
    trace = torch_snapshot(recorded())["device_traces"][0]
    (activation, *_) = [e for e in trace if e["category"] == "activations"]

    assert [(f["filename"], f["name"]) for f in activation["frames"]] == [
        ("operator", "aten.addmm"),
        ("module", "net.fc"),
        ("module", "net"),
        ("phase", "forward"),
        ("held for", "activations"),
    ]
    assert all(e["frames"] for e in trace if not e["action"].startswith("segment"))


def rewound(snapshot: dict[str, Any]) -> None:
    """Undo the events from the end, as the page does to show the allocator at a moment."""
    segments = {s["address"] for s in snapshot["segments"]}
    live = {
        b["address"]
        for s in snapshot["segments"]
        for b in s["blocks"]
        if b["state"] == "active_allocated"
    }
    for event in reversed(snapshot["device_traces"][0]):
        match event["action"]:
            case "free_completed":
                live.add(event["addr"])
            case "alloc":
                live.remove(event["addr"])
            case "segment_free":
                segments.add(event["addr"])
            case "segment_alloc":
                segments.remove(event["addr"])
    assert not live
    assert not segments


def test_the_events_lead_from_nothing_to_the_segments() -> None:
    rewound(torch_snapshot(recorded()))


OPCODES_OF_THE_PAGE = set(
    "APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK"
    " MEMOIZE PROTO SETITEMS SHORT_BINUNICODE STOP TUPLE2 APPEND NEWFALSE BINPUT BINUNICODE"
    " EMPTY_TUPLE NEWTRUE NONE BINFLOAT TUPLE TUPLE1 TUPLE3 LONG_BINPUT LIST DICT SETITEM".split()
)
"""What `unpickle` in torch/utils/viz/MemoryViz.js (2025) reads; it takes protocols 2 to 4."""


def test_the_pickle_is_of_what_the_page_can_read(tmp_path: Path) -> None:
    """Plain values alone: no class, and no opcode that its reader does not know."""
    path = tmp_path / "step.pickle"
    write_snapshot(recorded(), path)

    opcodes = list(pickletools.genops(path.read_bytes()))
    assert {opcode.name for opcode, _, _ in opcodes} <= OPCODES_OF_THE_PAGE
    assert opcodes[0][1] in (2, 3, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["step.pickle"]


def test_the_page_needs_one_category_to_be_unknown() -> None:
    """It adds the name otherwise, to a list whose name it misspells."""
    trace = torch_snapshot(recorded())["device_traces"][0]

    assert {e["category"] for e in trace if e["action"].startswith("segment")} == {"unknown"}


def embedded(page: str) -> Any:
    """The snapshot in a page of `_memory_viz`."""
    import base64

    files = re.search(r"const local_files = (\[.*\])", page)
    assert files is not None
    (file,) = json.loads(files[1])
    return pickle.load(io.BytesIO(base64.b64decode(file["base64"])))


@pytest.mark.parametrize("plot_segments", [False, True], ids=["active", "cached"])
def test_pytorch_makes_its_timelines_of_the_snapshot(plot_segments: bool) -> None:
    snapshot = torch_snapshot(recorded())

    page = _memory_viz.trace_plot(snapshot, plot_segments=plot_segments)

    assert embedded(page) == snapshot


def test_pytorch_makes_its_history_of_the_snapshot() -> None:
    snapshot = torch_snapshot(recorded())

    assert embedded(_memory_viz.segment_plot(snapshot)) == snapshot


def test_pytorch_reads_the_segments_and_the_flame_graph() -> None:
    """Its own checks of sums are in `segsum`; the flame graph's lines end in bytes."""
    snapshot = torch_snapshot(recorded())
    lines: list[str] = []

    def keep(text: str) -> str:
        lines.extend(text.splitlines())
        return text

    assert "segments: 2" in _memory_viz.segsum(snapshot)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    _memory_viz.memory(snapshot, format_flamegraph=keep)
    assert any("module:0:net.fc" in line and line.endswith(" 8192") for line in lines)


def test_the_snapshot_of_a_model_has_the_peak_of_its_prediction() -> None:
    from memest import predict

    plan = TrainingPlan(model_name="gpt2", seq_len=16, gpu=("t4",))
    recording, report = record_plan(plan), predict(plan)
    allocated = highest = 0
    sizes = {index: 0 for index in range(len(recording.storages.num_bytes))}
    for action in recording.actions:
        if action.action == "alloc":
            sizes[action.stack] = action.block_bytes
            allocated += action.block_bytes
        elif action.action == "free_requested":
            allocated -= sizes[action.stack]
        highest = max(highest, allocated)

    assert highest == report.peak_allocated_bytes
    assert recording.result.rows == list(report.phases)
    assert recording.gpu == "t4"
    rewound(torch_snapshot(recording))


def counters(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, int]]:
    return [row["args"] for row in rows if row["ph"] == "C" and row["name"] == name]


def test_the_chrome_trace_counts_by_kind_and_slices_by_phase(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    recording = recorded()
    write_chrome_trace(recording, path)

    rows = json.loads(path.read_text())["traceEvents"]
    assert rows == chrome_trace(recording)["traceEvents"]
    slices = {row["name"]: (row["ts"], row["dur"]) for row in rows if row["ph"] == "X"}
    assert slices["setup"] == (0, 2)
    assert slices["forward (step 1)"] == (2, 4)  # two small blocks, a segment, an activation
    assert slices["backward (step 1)"] == (6, 3)
    assert list(slices) == [
        "setup",
        *(
            f"{name} (step {step})"
            for step in (1, 2)
            for name in ("forward", "backward", "optimizer step")
        ),
        "unfinished",
    ]
    allocated = counters(rows, "allocated bytes")
    assert max(sum(args.values()) for args in allocated) == recording.result.peak_allocated_bytes
    assert max(args["activations"] for args in allocated) == 3 * MIB
    assert counters(rows, "reserved bytes")[-1] == {"reserved": 22 * MIB}


def test_a_folder_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written"):
        write_snapshot(recorded(), tmp_path / "no" / "step.pickle")
    assert list(tmp_path.iterdir()) == []


def test_a_run_too_long_to_be_written_down_is_refused_before_it_is_replayed() -> None:
    """A step is five births (two in backward and optimizer) and four deaths; the setup is one."""
    with pytest.raises(PlanError, match=re.escape(f"{1 + 10**6 * 9} events are too many")):
        record_run(Run(program(), 10**6))
