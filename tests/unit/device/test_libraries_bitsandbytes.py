"""bitsandbytes runs on the virtual GPU as it is, without its library of kernels.

What its layers and optimizers ask for: tests/unit/test_quantization.py and test_optimizers.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def test_a_quantised_parameter_keeps_its_class_where_it_moves(gpu: VirtualGpu) -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(128, 64).cuda()
    layer.cpu()
    assert type(layer.weight) is bnb.nn.Params4bit
    assert layer.weight.device.type == "cpu"
    layer.cuda()
    assert type(layer.weight) is bnb.nn.Params4bit
    assert layer.weight.is_cuda


def test_paged_states_lie_outside_of_the_allocator(gpu: VirtualGpu) -> None:
    import bitsandbytes as bnb

    weight = nn.Parameter(torch.empty(1024, 1024, device="cuda"))
    weight.grad = torch.empty_like(weight)
    optimizer = bnb.optim.PagedAdamW32bit([weight])
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.memory_allocated() == before
    assert gpu.mode.host.num_bytes >= 2 * 4 * 1024 * 1024
