"""Triton's kernels launch into nothing, with Triton installed or not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.hardware.work import Work
from memest.estimator.integrations import triton
from memest.estimator.virtual_gpu import VirtualGpu

IS_INSTALLED = importlib.util.find_spec("triton") is not None


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb")) as virtual:
        yield virtual


def test_launches_of_every_kind_do_nothing(gpu: VirtualGpu) -> None:
    import triton

    def double(x, n, BLOCK, IS_EVEN):  # type: ignore[no-untyped-def]
        raise AssertionError("a kernel ran")

    if IS_INSTALLED:  # which reads the source
        pytest.skip("the kernels of this test are for the stand-in")
    kernel = triton.jit(double)
    tuned = triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=4)], key=["n"])(
        triton.heuristics({"IS_EVEN": lambda given: given["n"] % 2 == 0})(kernel)
    )
    x = torch.zeros(1000, device="cuda")
    before = torch.cuda.memory_allocated()
    tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, 1000)
    kernel[(8,)](x, 1000, BLOCK=128, IS_EVEN=True, num_warps=4)
    kernel.run(x, 1000, grid=(1,), warmup=False)
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(RuntimeError, match=r"@triton\.jit"):
        kernel(x)


def _double(x, n, BLOCK):  # type: ignore[no-untyped-def]
    raise AssertionError("a kernel ran")


@pytest.mark.usefixtures("gpu")
def test_the_configs_of_a_kernel_are_timed_at_the_first_call_of_each_kind() -> None:
    """Timing clears an array of 256 MiB, and copies the tensors that it restores."""
    import triton

    def add_one(x, n, BLOCK):  # type: ignore[no-untyped-def]
        pass

    configs = [triton.Config({"BLOCK": size}) for size in (64, 128)]
    tuned = triton.autotune(configs=configs, key=["n"], restore_value=["x"])(triton.jit(add_one))
    x = torch.zeros(2**20, device="cuda")
    peaks = []
    for n in (2**20, 2**20, 2**19):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        tuned[(8,)](x, n)
        peaks.append(torch.cuda.max_memory_allocated() - before)

    timing_bytes = 256 * 2**20 + x.nbytes
    assert peaks == [timing_bytes, 0, timing_bytes]


def test_launches_take_the_time_of_their_tensors(gpu: VirtualGpu) -> None:
    import triton

    x = torch.zeros(1000, device="cuda")
    triton.jit(_double)[(8,)](x, 1000, BLOCK=128)
    assert gpu.mode.work.works[-1] == Work("fused 4", (4000,), "", 0, 4000)


def test_the_helpers_on_the_host_compute(gpu: VirtualGpu) -> None:
    import triton

    assert triton.cdiv(10, 3) == 4
    assert [triton.next_power_of_2(n) for n in (1, 2, 3, 1000)] == [1, 2, 4, 1024]
    calls: list[int] = []
    assert triton.testing.do_bench(lambda: calls.append(1)) == 1.0
    assert calls == [1, 1]
    assert triton.testing.do_bench(int, 25, 100, None, [0.2, 0.8]) == [1.0, 1.0]
    assert triton.runtime.driver.active.get_current_target().arch == 80


def test_libraries_find_triton_on_the_virtual_gpu_alone() -> None:
    from transformers.utils import is_triton_available

    with VirtualGpu(find_gpu("a100-80gb")):
        assert is_triton_available()
        if not IS_INSTALLED:
            assert importlib.metadata.version("triton") == triton.VERSION
    assert is_triton_available() == IS_INSTALLED
    assert ("triton" in sys.modules) <= IS_INSTALLED


@pytest.mark.skipif(IS_INSTALLED, reason="Triton itself is installed")
def test_the_stand_in_has_the_names_of_the_language_and_no_others(gpu: VirtualGpu) -> None:
    import triton.language as tl
    from triton.language.extra import libdevice

    assert tl.constexpr(4).value == 4
    assert not hasattr(tl, "no_such_name")
    assert libdevice.tanh.name == "tanh"
    with pytest.raises(UnsupportedError, match=r"`triton\.language\.load` is called outside"):
        tl.load(0)


def test_the_stand_in_has_the_names_of_its_types(gpu: VirtualGpu) -> None:
    """`torch-optimi` reads them at import, which `optim="stable_adamw"` does."""
    import triton.language as tl

    names = tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES + tl.dtype.FP_TYPES
    assert {"int32", "uint8", "bf16"} < set(names)
    assert tl.dtype("int32") is not None


def test_an_operator_written_in_python_is_recorded_by_what_it_calls(gpu: VirtualGpu) -> None:
    @torch.library.custom_op("memest_tests::halves", mutates_args=())
    def halves(x: Tensor) -> Tensor:
        torch.empty(1 << 20, device=x.device)
        return torch.empty_like(x)

    x = torch.zeros(256, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    out = halves(x)
    assert out.is_cuda
    assert out.shape == x.shape
    assert torch.cuda.max_memory_allocated() == 1024 + (4 << 20)  # freed before `out` is made


def test_inference_mode_runs_the_parts_of_composite_operators(gpu: VirtualGpu) -> None:
    layer = torch.nn.Linear(64, 32).cuda()
    with torch.inference_mode():
        flag = torch.tensor(5, device="cuda")
        out = layer(torch.zeros(8, 64, device="cuda"))
        assert flag.is_cuda
        assert flag == 5
    assert out.is_inference()
    assert out.is_cuda
    assert not gpu.mode.kernels.coverage.unmodelled
