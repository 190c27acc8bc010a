"""Modules whose parameters get their shapes from the first input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.tensors.placement import is_meta, is_on_real_gpu, true_device
from memest.estimator.virtual_gpu import VirtualGpu


def test_lazy_modules_move_to_the_gpu_before_they_have_a_shape() -> None:
    with VirtualGpu(find_gpu("h100-80gb")):
        model = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.LazyLinear(4)).cuda()
        x = torch.ones(8, 16, device="cuda")

        model(x).sum().backward()

        assert model[0].weight.shape == (32, 16)
        assert model[0].weight.grad.is_cuda
        assert model[1].running_mean.is_cuda
        assert nn.LazyLinear(5).to("cuda").half()(x.half()).dtype is torch.half


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lazy_modules_move_under_a_default_device(device: str) -> None:
    with VirtualGpu(find_gpu("h100-80gb")):
        torch.set_default_device(device)
        try:
            model = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d()).cuda()
            x = torch.ones(8, 16).cuda()
            model(x).sum().backward()
        finally:
            torch.set_default_device(None)
        assert model[0].weight.shape == (32, 16)
        assert model[0].weight.grad.is_cuda


def test_a_tensor_of_the_gpu_has_no_data_under_a_default_device() -> None:
    with VirtualGpu(find_gpu("h100-80gb")), torch.device("cpu"):
        x = torch.ones(2, device="cuda")
        assert x.is_cuda
        assert is_meta(x)
        assert not is_on_real_gpu(x)
        assert true_device(x).type == "meta"
