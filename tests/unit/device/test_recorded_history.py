"""`torch.cuda.memory._record_memory_history` and `_snapshot` on the virtual GPU."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu

MIB = 1 << 20
memory = torch.cuda.memory


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def actions() -> list[tuple[str, int]]:
    return [(e["action"], e["size"]) for e in entries()]


def entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = memory._snapshot()["device_traces"][0]
    return found


def empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def test_every_action_is_recorded_in_its_order(gpu: VirtualGpu) -> None:
    memory._record_memory_history()
    held = empty(30 * MIB - 3)
    del held
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    with pytest.raises(torch.OutOfMemoryError):
        empty(100)
    first = entries()

    assert [(e["action"], e["size"]) for e in first] == [
        ("segment_alloc", 30 * MIB),
        ("alloc", 30 * MIB - 3),
        ("free_requested", 30 * MIB - 3),
        ("free_completed", 30 * MIB - 3),
        ("segment_free", 30 * MIB),
        ("oom", 512),
    ]
    assert len({e["addr"] for e in first[:-1]}) == 1
    assert first[-1]["device_free"] == gpu.gpu.limit_bytes
    assert "addr" not in first[-1]
    assert [e["time_us"] for e in first] == sorted(e["time_us"] for e in first)
    assert actions()[-1] == ("snapshot", 0)


def test_frames_are_those_of_the_script(gpu: VirtualGpu) -> None:
    memory._record_memory_history(stacks="python")
    held = empty(100)
    frames = entries()[1]["frames"]
    del held
    freed = entries()[-1]["frames"]

    assert frames[0]["filename"] == freed[0]["filename"] == __file__
    assert frames[0]["name"] == "empty"
    assert frames[1]["name"] == freed[0]["name"] == "test_frames_are_those_of_the_script"
    assert freed[0]["line"] == frames[1]["line"] + 2
    assert not any("/memest/estimator/" in frame["filename"] for frame in frames)


def test_all_stacks_begin_with_the_operator(gpu: VirtualGpu) -> None:
    memory._record_memory_history(stacks="all")
    held = torch.zeros(3, device="cuda")

    assert entries()[1]["frames"][0] == {"filename": "??", "line": 0, "name": "aten::zeros"}
    if hasattr(memory, "_allocation_traceback"):  # torch 2.11 has none
        assert memory._allocation_traceback(held.data_ptr())[0]["name"] == "aten::zeros"


@pytest.mark.parametrize(
    ("context", "of_alloc", "of_block"),
    [(None, False, False), ("state", False, True), ("alloc", True, True), ("all", True, True)],
)
def test_context_says_what_has_frames(
    gpu: VirtualGpu, context: Any, of_alloc: bool, of_block: bool
) -> None:
    memory._record_memory_history(context=context)
    held = empty(100)
    snapshot = memory._snapshot()
    block = snapshot["segments"][0]["blocks"][0]

    assert bool(snapshot["device_traces"][0][1].get("frames")) == of_alloc
    assert bool(block["frames"]) == of_block
    assert block["requested_size"] == held.numel()


def test_only_the_last_entries_are_kept(gpu: VirtualGpu) -> None:
    memory._record_memory_history(max_entries=2)
    held = [empty(100 + i) for i in range(5)]

    assert actions() == [("alloc", 103), ("alloc", 104)]
    assert len(held) == 5


def test_state_keeps_no_history(gpu: VirtualGpu) -> None:
    memory._record_memory_history("state")
    held = empty(100)
    snapshot = memory._snapshot()

    assert len(snapshot["device_traces"][0]) == 1
    assert snapshot["segments"][0]["blocks"][0]["frames"]
    assert held.is_cuda


def test_actions_can_be_left_out_and_the_history_be_cleared_or_ended(gpu: VirtualGpu) -> None:
    memory._record_memory_history(skip_actions=["free_requested", "segment_alloc"])
    empty(100)
    skipped = actions()
    memory._record_memory_history(clear_history=True)
    cleared = actions()
    memory._record_memory_history(enabled=None)
    empty(100)

    assert skipped == [("alloc", 100), ("free_completed", 100)]
    assert cleared == []
    assert actions() == []
    assert not torch._C._cuda_isHistoryEnabled()


def test_the_legacy_form_takes_a_bool(gpu: VirtualGpu) -> None:
    memory._record_memory_history(
        True, trace_alloc_max_entries=100, trace_alloc_record_context=True
    )
    held = empty(100)
    assert actions()[-1] == ("alloc", held.numel())
    memory._record_memory_history(False)
    assert actions() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enabled": "some"}, "expected state to be"),
        ({"context": "some"}, "expected context to be"),
        ({"stacks": "some"}, "expected stacks to be"),
    ],
)
def test_unknown_words_are_refused_as_torch_refuses_them(
    gpu: VirtualGpu, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        memory._record_memory_history(**options)


def test_metadata_is_attached_to_what_follows(gpu: VirtualGpu) -> None:
    memory._record_memory_history()
    memory._set_memory_metadata("step 1")
    held = empty(100)

    assert entries()[-1]["user_metadata"] == "step 1" == memory._get_memory_metadata()
    assert held.is_cuda


def test_segments_are_tiled_and_agree_with_the_statistics(gpu: VirtualGpu) -> None:
    held = [empty(size * MIB) for size in (1, 2, 3, 4, 12)]
    del held[1], held[2]
    segments = torch.cuda.memory_snapshot()
    stats = torch.cuda.memory_stats()

    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
    for name, key in (
        ("total_size", "reserved_bytes"),
        ("allocated_size", "allocated_bytes"),
        ("active_size", "active_bytes"),
        ("requested_size", "requested_bytes"),
    ):
        assert sum(s[name] for s in segments) == stats[f"{key}.all.current"]
    assert [s["address"] for s in segments] == sorted(s["address"] for s in segments)


def test_torch_s_own_tools_read_a_dumped_snapshot(gpu: VirtualGpu, tmp_path: Path) -> None:
    memory._record_memory_history()
    model = nn.Linear(300, 300).cuda()
    model(torch.zeros(7, 300, device="cuda")).sum().backward()
    memory._dump_snapshot(str(tmp_path / "dump.pickle"))
    snapshot = pickle.loads((tmp_path / "dump.pickle").read_bytes())

    assert "alloc" in _memory_viz.trace(snapshot)
    assert "segments" in _memory_viz.segsum(snapshot)
    assert "</body>" in _memory_viz.trace_plot(snapshot)
    assert "</body>" in _memory_viz.segment_plot(snapshot)


def test_the_norm_of_all_gradients_is_one_kernel_for_many(gpu: VirtualGpu) -> None:
    """As recorded on an H100: one buffer of all partial sums, and not one for each tensor."""
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4))).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory._record_memory_history()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    sizes = [size for action, size in actions() if action == "alloc"]

    assert sizes[1:9] == [4] * 8  # the norms follow the buffer
    assert sizes[0] >= 8 * 4
    assert 2112 not in sizes


def test_groups_keep_tensors_of_the_host_apart(gpu: VirtualGpu) -> None:
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    on_gpu = [torch.zeros(3, device="cuda") for _ in range(2)]
    on_host = [torch.zeros(3), nn.Parameter(torch.zeros(5))]
    mixed = [on_gpu[0], on_host[0], on_gpu[1], on_host[1]]
    groups = _group_tensors_by_device_and_dtype([list(mixed), [None] * 4], with_indices=True)
    found = {str(device): indices for (device, _), (_, indices) in groups.items()}

    assert found["cuda:0"] == [0, 2]
    assert sorted(found["cpu"]) == [1, 3]
