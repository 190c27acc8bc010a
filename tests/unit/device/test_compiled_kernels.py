"""Kernels that Inductor writes are loaded, whether Triton is installed or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memest.estimator.device.libraries.inductor.kernels import _load
from memest.estimator.device.virtual_gpu import VirtualGpu
from memest.estimator.hardware.gpus import find_gpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def test_a_decorator_can_read_the_source_of_a_kernel() -> None:
    """`triton.jit` does, and fails where there is none."""
    _load(
        "import inspect\n"
        "def jit(function):\n"
        "    assert inspect.getsourcelines(function)[0][-1] == '    return 1\\n'\n"
        "    return function\n"
        "@jit\n"
        "def kernel():\n"
        "    return 1\n"
    )


def test_a_function_is_compiled_in_this_environment(gpu: VirtualGpu) -> None:
    """Also by a CUDA build of torch, with Triton."""
    x = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    torch.compile(lambda x: torch.sigmoid(torch.exp(x * 2) + 1).sum())(x).backward()

    assert x.grad is not None
    assert ["as one graph" in note for note in gpu.notes] == [True]


@pytest.mark.usefixtures("gpu")
def test_a_compiled_backward_overwrites_what_was_saved_for_it() -> None:
    """The gradient of the logits is written over the logits (donated buffers)."""
    x = torch.zeros(1024, 64, device="cuda")
    weight = torch.zeros(8192, 64, device="cuda", requires_grad=True)
    target = torch.zeros(1024, dtype=torch.int64, device="cuda")
    loss_of = torch.compile(
        lambda x, weight, target: nn.functional.cross_entropy(x @ weight.T, target)
    )
    for _ in range(2):  # kernels are timed in the first step
        loss = loss_of(x, weight, target)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()

    logits_bytes = 4 * 1024 * 8192
    assert torch.cuda.max_memory_allocated() - before < logits_bytes // 2
