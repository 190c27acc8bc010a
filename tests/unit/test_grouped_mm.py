"""Experts of a mixture on each generation: one fused kernel, torch's loop, transformers' loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memest.estimator.device.virtual_gpu import VirtualGpu
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.kernels.tables import is_partly_modelled

GROUPS, ROWS, D, F = 3, 64, 16, 24


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def operators(name: str) -> list[str]:
    """Of a product through transformers and its backward on the virtual GPU."""
    from transformers.integrations import moe

    with VirtualGpu(find_gpu(name)) as gpu:
        left = torch.empty(ROWS, D, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        right = torch.empty(GROUPS, D, F, dtype=torch.bfloat16, device="cuda")
        offsets = torch.zeros(GROUPS, dtype=torch.int32, device="cuda")
        out = moe._grouped_mm(left, right, offsets)
        torch.autograd.grad(out, left, torch.empty_like(out))
        return [site.op for site in gpu.mode.memory.storages.sites]


@pytest.mark.parametrize(
    ("name", "is_modelled"),
    [("a100-80gb", True), ("l4", True), ("rtx-5090", True), ("h100-80gb", True), ("b200", False)],
)
def test_a_kernel_that_was_not_recorded_is_reported(name: str, is_modelled: bool) -> None:
    args = (meta(ROWS, D), meta(GROUPS, D, F), torch.empty(GROUPS, dtype=torch.int32))
    func = torch.ops.aten._grouped_mm.default

    assert is_partly_modelled(func, args, {}, find_gpu(name)) is not is_modelled


@pytest.mark.parametrize("name", ["v100-32gb", "t4"])
def test_before_ampere_transformers_multiplies_expert_by_expert(name: str) -> None:
    """Forward: the result. Backward: gradients of rows and of weights, wanted or not."""
    made = [op for op in operators(name) if "zeros" in op]

    _offsets, *of_products = made
    assert of_products == ["aten.zeros", "aten.zeros_like", "aten.zeros_like"]


def test_from_ampere_on_torch_is_asked() -> None:
    assert "aten._grouped_mm" in operators("a100-80gb")
