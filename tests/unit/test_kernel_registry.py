"""Kernels that users describe."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import memest
from memest.errors import PlanError
from memest.estimator.kernels.registry import KernelCall
from memest.estimator.kernels.tables import SCRATCH
from memest.report import RunReport

MIB = 1 << 20


@pytest.fixture(scope="module")
def fused() -> Iterator[object]:
    library = torch.library.Library("memest_test", "FRAGMENT")
    library.define("fused(Tensor x, int factor=2, *, bool twice=False) -> Tensor")
    library.impl("fused", lambda x, factor=2, *, twice=False: x.clone(), "Meta")
    yield torch.ops.memest_test.fused.default
    SCRATCH.pop(torch.ops.memest_test.fused.default, None)


def run(fused: object) -> RunReport:
    with memest.virtual_gpu("a100-40gb") as gpu:
        x = torch.empty(MIB, device="cuda")
        torch.ops.memest_test.fused(x, 3)
    return gpu.report()


def test_an_operator_of_one_s_own_is_reported_until_it_is_described(fused: object) -> None:
    before = run(fused)
    calls: list[KernelCall] = []

    @memest.register_kernel("memest_test::fused")
    def rule(call: KernelCall) -> memest.Scratch:
        calls.append(call)
        x: Tensor = call["x"]
        return memest.Scratch(after=(x.numel() * x.itemsize * call["factor"],))

    after = run(fused)

    assert list(before.coverage["unmodelled"]) == ["memest_test.fused"]
    assert before.peak_allocated_bytes == 8 * MIB  # the input and the output
    assert not after.coverage["unmodelled"]
    assert after.peak_allocated_bytes == (8 + 3 * 4) * MIB
    assert dict(calls[0]) == {"x": calls[0]["x"], "factor": 3, "twice": False}
    assert calls[0].gpu.name == "a100-40gb"
    assert calls[0].out.shape == (MIB,)


def test_an_operator_that_does_not_exist_is_named() -> None:
    with pytest.raises(PlanError, match=re.escape("there is no operator `nobody::op`")):
        memest.register_kernel("nobody::op")
