"""Operators that CUDA runs as one kernel, formulas that write in place, and layouts refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as session:
        yield session


def operators(session: VirtualGpu, start: int) -> list[str]:
    """The operators that asked for memory since there were `start` storages."""
    session.mode.memory.settle()
    return [site.op.removeprefix("aten.") for site in session.mode.memory.storages.sites[start:]]


def started(session: VirtualGpu) -> int:
    return len(session.mode.memory.storages.sites)


def test_an_rms_norm_is_one_kernel_each_way(gpu: VirtualGpu) -> None:
    x = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    start = started(gpu)
    F.rms_norm(x, (1000,), weight).backward(torch.ones_like(x))

    assert operators(gpu, start) == [
        *["_fused_rms_norm"] * 2, "ones_like", *["_fused_rms_norm_backward"] * 2,
    ]  # fmt: skip
    assert x.grad is not None
    assert weight.grad is not None


def test_the_gradient_of_mish_is_one_kernel(gpu: VirtualGpu) -> None:
    x = torch.randn(64, 100, device="cuda", requires_grad=True)
    start = started(gpu)
    F.mish(x).backward(torch.ones_like(x))

    assert operators(gpu, start) == ["mish", "ones_like", "mish_backward"]


def test_the_gradient_of_a_loss_of_logits_is_written_in_place(gpu: VirtualGpu) -> None:
    x = torch.randn(64, 100, device="cuda", requires_grad=True)
    target = torch.rand(64, 100, device="cuda")
    loss = F.binary_cross_entropy_with_logits(x, target, pos_weight=torch.ones(100, device="cuda"))
    start = started(gpu)
    loss.backward()

    assert operators(gpu, start) == ["ones_like", "mul.Tensor", "add.Scalar", "sigmoid"]


def test_the_gradient_of_a_product_looks_for_zeros_and_divides(gpu: VirtualGpu) -> None:
    """`prod_backward`: what is zero, how many by row and in all, then the quotient."""
    x = torch.rand(64, 1000, device="cuda", requires_grad=True)
    out = x.prod(1)
    given = torch.ones_like(out)
    start = started(gpu)
    out.backward(given)

    made = [op for op in operators(gpu, start) if op in ("eq.Scalar", "div.Tensor", "mul.Tensor")]
    assert made == ["eq.Scalar", "div.Tensor", "mul.Tensor"]
    assert x.grad is not None
    assert x.prod().grad_fn is not None
    assert torch.func.grad(lambda values: values.prod())(x).shape == x.shape


def test_a_ctc_loss_takes_lengths_of_the_host(gpu: VirtualGpu) -> None:
    log_probs = torch.randn(50, 8, 20, device="cuda", requires_grad=True).log_softmax(-1)
    lengths = torch.full((8,), 50), torch.full((8,), 20)
    F.ctc_loss(log_probs, torch.ones(8, 20, dtype=torch.int64).cuda(), *lengths).backward()


@pytest.mark.parametrize(
    ("on_host", "blank", "length", "is_cudnn"),
    [(True, 0, 50, True), (False, 0, 50, False), (True, 1, 50, False), (True, 0, 49, False)],
)
def test_int32_targets_of_the_host_go_to_cudnns_ctc_loss(
    gpu: VirtualGpu, on_host: bool, blank: int, length: int, is_cudnn: bool
) -> None:
    """CRNN's training; the workspace of cuDNN is not known, and counts as not modelled."""
    log_probs = torch.randn(50, 8, 20, device="cuda", requires_grad=True)
    targets = torch.ones(160, dtype=torch.int32, device="cpu" if on_host else "cuda")

    lengths = torch.full((8,), length), torch.full((8,), 20)
    F.ctc_loss(log_probs, targets, *lengths, blank=blank).backward()

    assert log_probs.grad is not None
    assert ("_cudnn_ctc_loss" in str(gpu.mode.kernels.coverage.unmodelled)) == is_cudnn


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse")
def test_nested_and_block_sparse_tensors_are_refused_by_name(gpu: VirtualGpu) -> None:
    blocks = torch.eye(8).to_sparse_bsr((2, 2))
    for make in (torch.eye(8, device="cuda").to_sparse_bsr, torch.eye(8).cuda().to_sparse_bsc):
        with pytest.raises(UnsupportedError, match="to_sparse_bs"):
            make((2, 2))
    with pytest.raises(UnsupportedError, match="sparse_bsr"):
        blocks.cuda()
    with pytest.raises(UnsupportedError, match="sparse_bsr"):
        torch.eye(8, device="cuda").to_sparse_csr().to_sparse_bsr((2, 2))
    rows = [torch.randn(5, 16, device="cuda"), torch.randn(7, 16, device="cuda")]
    with pytest.raises(UnsupportedError, match=r"torch\.nested\.nested_tensor"):
        torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(UnsupportedError, match=r"torch\.nested\.nested_tensor"):
        torch.nested.nested_tensor(rows, device="cuda")
    for layout in (torch.jagged, torch.strided):
        on_host = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
        for move in (on_host.cuda, lambda made=on_host: made.to("cuda")):
            with pytest.raises(UnsupportedError, match="layout nested"):
                move()
    parts = blocks.crow_indices(), blocks.col_indices(), blocks.values()
    with pytest.raises(UnsupportedError, match=r"torch\.sparse_bsr_tensor"):
        torch.sparse_bsr_tensor(*parts, device="cuda")
