"""CUDA graphs: pools of their own, and nothing asked for by a replay."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.hardware.work import NUM_HOSTS
from memest.estimator.virtual_gpu import VirtualGpu
from memest.units import MIB

GRAPH_TREES = Path(__file__).resolve().parents[3] / "validation" / "scripts" / "graph_trees.py"
MEASURED = json.loads(GRAPH_TREES.with_suffix(".json").read_text(encoding="utf-8"))["measured"]


@pytest.fixture
def virtual() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        yield gpu


def captured(num_bytes: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph whose result, and a temporary before it, have so many bytes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") + 1
    return graph, made


def test_a_replay_asks_for_nothing(virtual: VirtualGpu) -> None:
    graph, _made = captured(32 * MIB)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    graph.replay()

    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert before == (32 * MIB + 1024, 66 * MIB)  # beside it a seed and an offset


def test_the_pool_of_a_graph_outlives_an_emptied_cache_and_not_the_graph(
    virtual: VirtualGpu,
) -> None:
    graph, made = captured(32 * MIB)
    del made
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 66 * MIB

    del graph
    torch.cuda.empty_cache()

    assert torch.cuda.memory_reserved() == 0


def test_what_is_freed_in_a_capture_serves_no_other_request(virtual: VirtualGpu) -> None:
    _graph, made = captured(32 * MIB)

    another = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")

    assert torch.cuda.memory_reserved() == 98 * MIB
    assert another.numel() == made.numel()


def test_graphs_of_one_pool_share_it(virtual: VirtualGpu) -> None:
    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda").add_(1)

    assert torch.cuda.memory_reserved() == 34 * MIB
    assert graphs[0].pool() == graphs[1].pool() == pool


def test_a_value_is_not_read_while_it_is_captured(virtual: VirtualGpu) -> None:
    ones = torch.ones(3, device="cuda")

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert torch.cuda.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            ones.sum().item()

    assert not torch.cuda.is_current_stream_capturing()
    assert ones.sum().item() == 3


def test_a_graphed_callable_trains(virtual: VirtualGpu) -> None:
    layer = nn.Linear(64, 64).cuda()
    graphed = torch.cuda.make_graphed_callables(layer, (torch.randn(8, 64, device="cuda"),))

    graphed(torch.randn(8, 64, device="cuda")).sum().backward()

    assert layer.weight.grad is not None
    assert layer.weight.grad.is_cuda


@pytest.mark.parametrize("kind", ["gpt", "gpt-evaluated", "gpt-by-block"])
def test_graph_trees_hold_what_a_gpu_held(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of an H200 with torch 2.11.0: allocated, at the peak, and reserved.

    The other kinds that were measured depend on the fusions of the installed torch's Inductor.
    """
    with VirtualGpu(find_gpu("h200")) as gpu:
        torch.manual_seed(0)
        runpy.run_path(str(GRAPH_TREES))["KINDS"][kind]()

    assert gpu.mode.notes.warnings == []
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert found == [[str(part) for part in row] for row in MEASURED[kind]]


def test_a_tensor_that_a_replay_overwrites_is_refused(virtual: VirtualGpu) -> None:
    """An H200 raised the same error in the second backward of an accumulated step."""
    model = nn.Linear(64, 64).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")

    def train() -> None:
        for _ in range(2):
            compiled(torch.randn(8, 64, device="cuda")).sum().backward()

    with pytest.raises(RuntimeError, match="has been overwritten by a subsequent run"):
        train()


def test_a_function_between_a_replay_and_its_backward_gets_room_of_its_own(
    virtual: VirtualGpu,
) -> None:
    """The pool's state after the capture is restored, so live tensors are not overwritten."""
    layers, other = nn.Linear(512, 512).cuda(), nn.Linear(512, 256).cuda()
    compiled = torch.compile(layers, mode="reduce-overhead")
    late = torch.compile(other, mode="reduce-overhead")
    for step in range(6):
        out = compiled(torch.randn(4096, 512, device="cuda"))
        if step >= 3:
            with torch.no_grad():
                made = late(out.detach())
            assert abs(made.data_ptr() - out.data_ptr()) >= out.nbytes // 2
            del made
        out.sum().backward()
        layers.zero_grad()
        del out
    assert virtual.mode.notes.warnings == []


def test_a_replayed_graph_takes_the_time_of_its_kernels(virtual: VirtualGpu) -> None:
    graph, _made = captured(32 * MIB)
    work = virtual.mode.work
    assert len(work.events) == 0

    graph.replay()

    (event,) = work.events
    assert len(work.works[event // NUM_HOSTS].more) == 1  # `zeros`, and `add` after it
