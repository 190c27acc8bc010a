"""CUDA graphs: pools of their own, and nothing asked for by a replay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu
from memest.units import MIB


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
