"""Experts of a mixture on each generation: one fused kernel, torch's loop, transformers' loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memest.estimator.device.cuda_semantics import cuda_semantics
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import StorageTable
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.kernels.grouped_mm import experts_as_on
from memest.estimator.kernels.tables import is_partly_modelled

GROUPS, ROWS, D, F = 3, 64, 16, 24


def meta(*shape: int, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=grad)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    from transformers.integrations import moe

    offsets = torch.empty(GROUPS, dtype=torch.int32, device="meta")
    out: Tensor = moe._grouped_mm(left, right, offsets)
    return out


def operators(name: str) -> list[str]:
    recorder = Recorder(find_gpu(name), StorageTable())
    with recorder, cuda_semantics(recorder.gpu):
        left, right = meta(ROWS, D, grad=True), meta(GROUPS, D, F)
        torch.autograd.grad(multiply(left, right), left, meta(ROWS, F))
    return [site.op for site in recorder.storages.sites]


@pytest.mark.parametrize(
    ("name", "is_modelled"),
    [("a100-80gb", True), ("l4", True), ("rtx-5090", True), ("h100-80gb", False), ("b200", False)],
)
def test_the_fused_kernel_of_hopper_and_b200_is_reported(name: str, is_modelled: bool) -> None:
    args = (meta(ROWS, D), meta(GROUPS, D, F), torch.empty(GROUPS, dtype=torch.int32))
    func = torch.ops.aten._grouped_mm.default

    assert is_partly_modelled(func, args, {}, find_gpu(name)) is not is_modelled


@pytest.mark.parametrize("name", ["v100-32gb", "t4"])
def test_before_ampere_transformers_multiplies_expert_by_expert(name: str) -> None:
    """Forward: the result. Backward: gradients of rows and of weights, wanted or not."""
    made = [op for op in operators(name) if "zeros" in op]

    assert made == ["aten.zeros", "aten.zeros_like", "aten.zeros_like"]


def test_from_ampere_on_torch_is_asked() -> None:
    assert "aten._grouped_mm" in operators("a100-80gb")


def test_the_loop_keeps_both_factors_and_has_the_shapes_of_the_product() -> None:
    left, right = meta(ROWS, D, grad=True), meta(GROUPS, D, F, grad=True)
    with experts_as_on(find_gpu("t4")):
        out = multiply(left, right)

    kept = out.grad_fn.saved_tensors
    grads = torch.autograd.grad(out, (left, right), meta(ROWS, F))

    assert (out.shape, out.dtype) == ((ROWS, F), torch.bfloat16)
    assert kept[0] is left
    assert kept[1] is right
    assert [grad.shape for grad in grads] == [left.shape, right.shape]


def test_the_patch_is_gone_afterwards() -> None:
    from transformers.integrations import moe

    before = moe._grouped_mm
    with experts_as_on(find_gpu("t4")):
        assert moe._grouped_mm is not before

    assert moe._grouped_mm is before
