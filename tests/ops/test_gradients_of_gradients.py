"""Gradients of gradients: the order in which autograd runs them, and those of convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu
from tests.requested import Requests


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as session:
        yield session


def operators(session: VirtualGpu, start: int) -> list[str]:
    """The operators that asked for memory since there were `start` storages."""
    session.mode.memory.settle()
    return [site.op.removeprefix("aten.") for site in session.mode.memory.storages.sites[start:]]


def order_of_backward(loss: torch.Tensor) -> list[str]:
    """The nodes of a backward in the order in which they run."""
    ran: list[str] = []
    todo: list[Any] = [loss.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node.next_functions:
            name = node.name().removesuffix("Backward0")
            node.register_prehook(lambda grads, name=name: ran.append(name))
        below = {next_ for next_, _ in node.next_functions if next_ is not None} - seen
        todo += below
        seen |= below
    loss.backward()
    return ran


@pytest.mark.parametrize(
    ("num_grads", "then"),
    [
        # the thread of the GPU numbers sin, neg, mul, cos, mul from 0, the script's exp is 3:
        # the last mul is 4, and runs before it, which in one row of numbers it would not
        (1, ["Mul"]),
        # the third gradient's are 10 to 14, all of them before exp
        (3, ["Mul", "Cos", "Mul", "Neg", "Sin", "Exp", "Sin"]),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_what_a_backward_makes_is_numbered_by_the_thread_of_the_gpu(
    num_grads: int, then: list[str]
) -> None:
    x = torch.ones(4, device="cuda", requires_grad=True)
    total = x.sin().cos().sum()
    for _ in range(num_grads):
        (grad,) = torch.autograd.grad(total, x, create_graph=True)
    loss = x.exp()
    loss = grad.sum() + loss.sum()

    assert order_of_backward(loss)[: 3 + len(then)] == ["Add", "Sum", "Sum", *then]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.usefixtures("gpu")
def test_a_gradient_that_is_kept_is_numbered_so_too() -> None:
    """As above, with `backward(create_graph=True)`, which copies it: the copy is the device's."""
    x = torch.ones(4, device="cuda", requires_grad=True)
    x.sin().cos().sum().backward(create_graph=True)
    grad, x.grad = x.grad, None
    loss = x.exp()
    assert grad is not None
    loss = grad.sum() + loss.sum()

    assert order_of_backward(loss)[:4] == ["Add", "Sum", "Sum", "torch::autograd::CopyBackwards"]


def test_the_second_gradient_of_a_convolution_is_of_contiguous_gradients(
    gpu: VirtualGpu,
) -> None:
    """`gOt.contiguous()` of `_convolution_double_backward`, before the input's own copy."""
    x = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, device="cuda", requires_grad=True)
    out = F.conv2d(x, weight, padding=1)
    given = torch.ones_like(out, requires_grad=True)
    (grad,) = torch.autograd.grad(out, x, given, create_graph=True)
    start = len(gpu.mode.memory.storages.sites)
    of_weight, of_given = torch.autograd.grad(grad, (weight, given), torch.ones_like(grad))

    made = operators(gpu, start)
    assert made[0] == "ones_like"
    assert made.index("clone") > made.index("convolution")  # after the gradient of `given`
    assert "convolution" in made[made.index("clone") :]
    assert of_weight.shape == weight.shape
    assert of_given.shape == given.shape


@pytest.mark.parametrize(
    ("groups", "transposed", "stride"), [(1, False, 2), (2, False, 1), (1, True, 2), (2, True, 2)]
)
@pytest.mark.usefixtures("gpu")
def test_second_gradients_have_the_shapes_of_what_they_are_of(
    groups: int, transposed: bool, stride: int
) -> None:
    x = torch.randn(2, 4, 9, 9, device="cuda", requires_grad=True)
    weight = torch.randn(4, 4 // groups, 3, 3, device="cuda", requires_grad=True)
    bias = torch.randn(4, device="cuda", requires_grad=True)
    run = F.conv_transpose2d if transposed else F.conv2d
    out = run(x, weight, bias, stride, 1, groups=groups)
    grads = torch.autograd.grad(out.square().sum(), (x, weight, bias), create_graph=True)
    torch.stack([grad.square().sum() for grad in grads]).sum().backward()

    for leaf in (x, weight, bias):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape


def test_vmap_takes_the_batch_norm_that_cuda_takes(gpu: VirtualGpu) -> None:
    x = torch.randn(8, 10, 32, 5, 5, device="cuda")
    weight, bias = torch.ones(2, 8, 32, device="cuda")
    start = len(gpu.mode.memory.storages.sites)
    vmap(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True))(x, weight, bias)

    assert "cudnn_batch_norm" in operators(gpu, start)


def test_dropout_under_vmap_is_the_fused_one(gpu: VirtualGpu) -> None:
    """An H100's requests in a step of DP-SGD: the mask has a byte for each element."""
    x = torch.ones(80, 64, 1024, device="cuda")
    drop = vmap(partial(F.dropout, p=0.1), randomness="different")

    assert Requests(gpu).made(lambda: drop(x)) == [5_242_880, 20_971_520]


def test_vmap_elsewhere_is_as_it_was() -> None:
    x, weight = torch.randn(3, 4, 5, 6, 6), torch.ones(3, 5)
    made = vmap(lambda x, w: F.batch_norm(x, None, None, w, w, training=True))(x, weight)
    each = [
        F.batch_norm(a, None, None, w, w, training=True) for a, w in zip(x, weight, strict=True)
    ]

    torch.testing.assert_close(made, torch.stack(each))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_zeros_of_the_forward_mode_take_no_memory(gpu: VirtualGpu) -> None:
    """`torch.func.hessian` pushes zero tangents and primitives of `torch._prims` forward."""
    layer = torch.nn.Linear(8, 8).cuda()
    x = torch.ones(6, 8, device="cuda")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.layer_norm(layer(x), (8,))).sum()

    assert torch.func.hessian(loss)(x).shape == (6, 8, 6, 8)
    start = torch.cuda.memory_allocated()
    zeros = torch._efficientzerotensor((1000, 1000), device="cuda")
    assert (torch.cuda.memory_allocated(), zeros.shape) == (start, (1000, 1000))
    assert not gpu.mode.kernels.coverage.unmodelled
