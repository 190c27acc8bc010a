"""Kernels that Inductor writes are loaded, whether Triton is installed or not."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memest
from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.integrations.inductor import compiler
from memest.estimator.integrations.inductor.compiler import _load
from memest.estimator.virtual_gpu import VirtualGpu
from memest.report import RunReport
from memest.report.page import render_page


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
    assert gpu.mode.notes.warnings == []


def test_a_tensor_that_a_compiled_kernel_updates_is_read_and_written(gpu: VirtualGpu) -> None:
    x = torch.zeros(1024, 1024, device="cuda")
    made = torch.compile(lambda x: torch.relu(x @ x))(x)

    fused = [work for work in gpu.mode.work.works if work.kind == "fused 4"]
    assert [work.num_bytes for work in fused] == [2 * made.nbytes]


@pytest.mark.usefixtures("gpu")
def test_the_kernels_of_a_graph_that_is_compiled_again_are_not_timed_again() -> None:
    x = torch.zeros(1024, 1024, device="cuda")
    before, peaks = torch.cuda.memory_allocated(), []
    for _ in range(2):
        torch._dynamo.reset()
        torch.cuda.reset_peak_memory_stats()
        torch.compile(lambda x: torch.exp(x) + 1)(x)
        peaks.append(torch.cuda.max_memory_allocated() - before)

    cleared_bytes = 50 * 2**20  # of an array as large as the L2 cache
    assert peaks == [2 * x.nbytes + cleared_bytes - x.nbytes, x.nbytes]


@pytest.mark.parametrize(
    ("given", "registers", "timed"),
    [
        ([2048], {2048: 32}, [2048]),
        ([2048], {2048: 33, 1024: 32}, [2048, 1024]),
        ([2048], {2048: 64, 1024: 40, 512: 32}, [2048, 1024, 512]),
        ([2048, 1024], {2048: 40, 1024: 32}, [2048, 1024]),  # the half is timed already
        ([64], {}, [64]),  # too small to be halved
    ],
)
def test_a_reduction_of_many_registers_is_timed_with_halves_of_its_block(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch, given: Any, registers: Any, timed: Any
) -> None:
    """The largest number of registers with which all threads of an SM run is 32."""
    kernel = compiler.Declaration(size_hints={"x": 4096, "r0_": 4096}, is_reduction=True)
    configs = [
        SimpleNamespace(kwargs={"XBLOCK": 1, "R0_BLOCK": size}, num_warps=16) for size in given
    ]

    def num_registers(kernel: Any, config: Any, gpu: Any) -> int:
        found: int = registers[config.kwargs["R0_BLOCK"]]
        return found

    monkeypatch.setattr(compiler, "num_registers", num_registers)
    found = compiler.timed_configs(kernel, configs, gpu.mode.gpu)

    assert [config.kwargs["R0_BLOCK"] for config in found] == timed


@pytest.mark.parametrize(
    "signature",
    [
        {0: "*fp32", 1: "*fp32", 2: "i32"},  # positions, in torch 2.5
        {"in_out_ptr0": "*fp32", "in_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"},
    ],
)
def test_tensors_of_a_kernel_have_the_names_of_its_arguments(signature: Any) -> None:
    def function(in_out_ptr0: Any, in_ptr0: Any, xnumel: Any, XBLOCK: Any) -> None: ...

    kernel = compiler.Declaration(
        function=function,
        triton_meta={"signature": signature},
        inductor_meta={"mutated_arg_names": ["in_out_ptr0"]},
    )

    assert kernel.names == ["in_out_ptr0", "in_ptr0"]
    assert kernel.changes == [0]


def test_registers_are_read_from_the_section_of_a_cubin() -> None:
    """Two attributes: one without data after its head, and the number of registers."""
    info = struct.pack("<BBH", 3, 0x37, 130) + struct.pack("<BBHII", 4, 0x2F, 8, 1, 40)
    names = b"\0.nv.info\0"
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, 64 + len(info) + len(names))
    struct.pack_into("<HHH", head, 0x3A, 64, 2, 1)
    sections = [(1, 64, len(info)), (0, 64 + len(info), len(names))]
    table = b"".join(
        struct.pack("<IIQQQQ", name, 0, 0, 0, offset, size).ljust(64, b"\0")
        for name, offset, size in sections
    )

    assert compiler._registers_of(bytes(head) + info + names + table) == 40


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


def test_hyperparameters_may_be_tensors_on_the_host(gpu: VirtualGpu) -> None:
    """As in the compiled steps of nanochat's AdamW and Muon."""

    @torch.compile(dynamic=False, fullgraph=True)
    def step(p: Any, grad: Any, mean: Any, square: Any, lr: Any, beta: Any) -> None:
        p.mul_(1 - lr * 0.1)
        mean.lerp_(grad, 1 - beta)
        square.lerp_(grad.square(), 1 - beta)
        p.add_(mean / (square.sqrt() + 1e-8), alpha=-lr)
        p.addcmul_(mean, square, value=lr).addcdiv_(mean, square, value=lr)

    tensors = [torch.zeros(1024, 1024, device="cuda") for _ in range(4)]
    factors = torch.tensor(0.01), torch.tensor(0.9)
    step(*tensors, *factors)  # the kernel is timed
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(*tensors, *factors)

    assert gpu.mode.notes.warnings == []
    assert torch.cuda.max_memory_allocated() - before < 4096


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.fixture
def inductor_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no such kernel")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of modules that its compiler imports
        from torch._inductor import compile_fx
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)


@pytest.mark.usefixtures("inductor_fails")
def test_code_that_is_not_compiled_is_a_warning_above_the_figures() -> None:
    with memest.virtual_gpu("h100-80gb") as session:
        torch.compile(_double, fullgraph=True)(torch.zeros(4, device="cuda"))
    report = session.report()

    assert [text.partition(",")[0] for text in report.warnings] == [
        "`torch.compile` ran _double as it is written"
    ]
    assert str(report).startswith("warning: `torch.compile` ran _double")
    assert "NotImplementedError: no such kernel" in report.warnings[0]
    page = render_page([report])
    assert page.index("warning: ") < page.index("What fills the GPU")
    assert RunReport.from_dict(json.loads(report.to_json())).warnings == report.warnings


@pytest.mark.usefixtures("inductor_fails")
def test_strict_refuses_code_that_is_not_compiled() -> None:
    with (
        pytest.raises(UnsupportedError, match="ran _double as it is written"),
        memest.virtual_gpu("h100-80gb", strict=True),
    ):
        torch.compile(_double, fullgraph=True)(torch.zeros(4, device="cuda"))


def test_a_compiled_function_trains_the_model_that_it_captures(gpu: VirtualGpu) -> None:
    model = nn.Linear(64, 64).cuda()

    @torch.compile
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    loss_of(torch.zeros(4, 64, device="cuda")).backward()

    assert model.weight.grad is not None
    assert gpu.mode.notes.warnings == []


def test_a_step_of_an_optimizer_is_compiled(gpu: VirtualGpu) -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step)
    for _ in range(2):
        model(torch.zeros(4, 64, device="cuda")).sum().backward()
        step()

    assert optimizer.state[model.weight]["exp_avg"].is_cuda
    assert gpu.mode.notes.warnings == []


def test_a_script_may_reset_dynamo(gpu: VirtualGpu) -> None:
    """torch then imports its module of CUDA graphs, which asks for a build with CUDA."""
    import torch._dynamo

    double = torch.compile(_double)
    double(torch.zeros(4, device="cuda"))
    torch._dynamo.reset()

    assert double(torch.zeros(4, device="cuda")).is_cuda
    assert gpu.mode.notes.warnings == []


def test_an_encoder_of_torch_is_compiled(gpu: VirtualGpu) -> None:
    """Dynamo guards on the defaults of the function that makes its masks."""
    layer = nn.TransformerEncoderLayer(32, 2, batch_first=True).cuda()
    torch.compile(layer)(torch.zeros(2, 8, 32, device="cuda")).sum().backward()

    assert gpu.mode.notes.warnings == []
