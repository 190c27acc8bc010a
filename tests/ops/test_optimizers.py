"""Kernels over lists of tensors."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.temporaries import Scratch
from memest.estimator.virtual_gpu import VirtualGpu
from tests.op_calls import meta, scratch

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_norms_of_many_tensors_share_one_table_of_chunks() -> None:
    """ForeachReduceOp.cu: 2 tensors * ceil(524288 / 65536) chunks * 4 B."""
    tensors = [meta(524_288, dtype=torch.bfloat16), meta(3, dtype=torch.bfloat16)]

    assert scratch(aten._foreach_norm.Scalar, tensors) == Scratch(before=(2 * 8 * 4,))


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
]
OPTIONS = ("foreach", "fused", "capturable", "maximize", "amsgrad", "centered", "nesterov")


def options_of(kind: type) -> list[dict[str, object]]:
    """Each option of an optimizer on its own, and `capturable` without lists of tensors."""
    names = [name for name in OPTIONS if name in inspect.signature(kind).parameters]
    momentum = {"momentum": 0.9} if "nesterov" in names and kind is torch.optim.SGD else {}
    found = [{**momentum, name: True} for name in names]
    return [
        {},
        *found,
        *([{"capturable": True, "foreach": False}] if "capturable" in names else []),
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_steps_with_each_of_its_options(kind: type) -> None:
    with VirtualGpu(find_gpu("h100-80gb")):
        for options in options_of(kind):
            weights = [nn.Parameter(torch.empty(8, 4, device="cuda")) for _ in range(2)]
            optimizer = kind(weights, **options)
            for _ in range(2):
                for weight in weights:
                    weight.grad = torch.empty_like(weight)
                optimizer.step()
