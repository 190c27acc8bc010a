"""Kernels that users describe."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import memest
from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops import registry
from memest.estimator.ops.registry import (
    OUTPUTS_ONLY,
    KernelCall,
    load_families,
    op_of,
    register,
    rules_by_op,
)
from memest.report import RunReport

aten = torch.ops.aten

MIB = 1 << 20


@pytest.fixture(scope="module")
def fused() -> Iterator[object]:
    library = torch.library.Library("memest_test", "FRAGMENT")
    library.define("fused(Tensor x, int factor=2, *, bool twice=False) -> Tensor")
    library.impl("fused", lambda x, factor=2, *, twice=False: x.clone(), "Meta")
    yield torch.ops.memest_test.fused.default
    registry._parts_by_overload.pop(torch.ops.memest_test.fused.default)
    registry._op_by_id.pop(id(torch.ops.memest_test.fused.default), None)


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


def test_a_rule_of_a_user_replaces_the_rule_of_an_operator_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    func = torch.ops.aten.topk.default
    monkeypatch.setattr(
        registry, "_parts_by_overload", {f: {**p} for f, p in registry._parts_by_overload.items()}
    )
    monkeypatch.setattr(registry, "_op_by_id", {})

    memest.register_kernel(func)(lambda call: memest.Scratch(after=(call["k"],)))

    args = (torch.empty(8, 4000, device="meta"), 2000)
    op, gpu = op_of(func), find_gpu("h100-80gb")
    assert op.is_modelled(args, {}, gpu), "memest's own rule knows fewer than 1024"
    assert op.requests is not None
    assert op.requests(op.call(args, {}, None, gpu)) == memest.Scratch(after=(2000,))


def test_an_operator_cannot_have_two_rules_for_one_part() -> None:
    with pytest.raises(ValueError, match=r"aten\.topk\.default has two rules for requests"):
        register(torch.ops.aten.topk.default, requests=lambda *args: memest.Scratch())


@pytest.mark.parametrize(
    "func",
    [
        aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.add.Tensor,
        aten.gelu.default, aten.zeros_like.default, aten.cat.default,
        aten._foreach_sqrt.default, aten._foreach_addcdiv_.ScalarList, aten.copy_.default,
        aten.mm.default, aten.glu.default, aten._local_scalar_dense.default,
    ],
)  # fmt: skip
def test_views_elementwise_ops_and_copies_have_no_scratch(func: torch._ops.OpOverload) -> None:
    assert op_of(func).has_outputs_only


def test_an_op_that_nobody_compared_is_not_called_scratch_free() -> None:
    for func in (
        aten.median.default,
        aten._foreach_max.default,
    ):
        assert op_of(func).requests is None
        assert not op_of(func).has_outputs_only


def test_declared_names_are_operators_without_a_rule() -> None:
    load_families()

    assert all(hasattr(aten, name.partition(".")[0]) for name in OUTPUTS_ONLY)
    with_rule = {str(func).removeprefix("aten.") for func in rules_by_op("requests")}
    assert with_rule & {n if "." in n else f"{n}.default" for n in OUTPUTS_ONLY} == set()


def test_an_operator_in_place_needs_what_the_operator_needs() -> None:
    """torch tags `gt` and not `gt_` as elementwise, and `leaky_relu` since 2.13 only."""
    for name in ("leaky_relu", "leaky_relu_", "hardswish_", "elu_", "gelu_", "abs_"):
        assert op_of(getattr(aten, name).default).has_outputs_only
    assert op_of(aten.gt_.Scalar).has_outputs_only
    assert not op_of(aten.cumsum_.default).has_outputs_only
