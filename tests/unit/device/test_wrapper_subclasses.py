"""Tensors that wrap other tensors: on the GPU for the script, trained as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_wrapper_is_where_its_parts_are_and_has_gradients(is_compiled: bool) -> None:
    """C++ ends the process if autograd reads the stream of a GPU that is not there."""
    with VirtualGpu(find_gpu("h100-80gb")):
        layer = nn.Linear(256, 256, device="cuda")
        rows = TwoTensor(*(torch.randn(64, 256, device="cuda") for _ in range(2)))
        rows.requires_grad_()
        before = torch.cuda.memory_allocated()
        out = (torch.compile(layer) if is_compiled else layer)(rows)
        held = torch.cuda.memory_allocated() - before
        out.sum().backward()

        assert {str(t.device) for t in (rows, rows.a, out, rows.grad)} == {"cuda:0"}
        assert rows.is_cuda
        assert not rows.is_meta
        assert type(rows.grad) is type(layer.weight.grad) is TwoTensor
        assert held >= 2 * out.a.nbytes
