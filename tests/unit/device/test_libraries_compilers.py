"""What would be compiled runs as it is written; what needs a GPU's compiler is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memest.errors import UnsupportedError
from memest.estimator.device.libraries.compilers import COMPILED, SCRIPTED
from memest.estimator.device.virtual_gpu import VirtualGpu
from memest.estimator.hardware.gpus import find_gpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def test_torch_compile_gives_back_what_it_is_given_and_says_so(gpu: VirtualGpu) -> None:
    layer = nn.Linear(4, 4).cuda()

    @torch.compile(mode="max-autotune", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    compiled: Any = torch.compile(layer)
    layer.compile()
    out = double(layer(torch.zeros(2, 4, device="cuda")))
    assert out.is_cuda
    assert compiled._orig_mod is layer
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert gpu.notes.count(COMPILED) == 1


def test_scripted_and_traced_functions_run_as_they_are(gpu: VirtualGpu) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    x = torch.zeros(3, device="cuda")
    assert torch.jit.script(double)(x).is_cuda
    assert torch.jit.trace(double, x)(x).is_cuda
    assert SCRIPTED in gpu.notes
    with pytest.raises(UnsupportedError, match="`save` of a scripted module"):
        torch.jit.script(nn.Linear(2, 2)).save("model.pt")


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("load", {"name": "my_kernels", "sources": ["bind.cpp", "kernels.cu"]}),
        ("load_inline", {"name": "my_kernels", "cpp_sources": "", "cuda_sources": "x"}),
        ("CUDAExtension", {"name": "my_kernels", "sources": ["kernels.cu"]}),
    ],
)
def test_an_extension_in_cuda_is_refused_by_its_name(
    gpu: VirtualGpu, function: str, arguments: dict[str, Any]
) -> None:
    from torch.utils import cpp_extension

    with pytest.raises(UnsupportedError, match=r"`my_kernels` is an extension in CUDA"):
        getattr(cpp_extension, function)(**arguments)


def test_a_script_that_imports_flash_attn_finds_the_mirror(gpu: VirtualGpu) -> None:
    from flash_attn import flash_attn_func

    q = torch.zeros(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    flash_attn_func(q, q, q, causal=True).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    assert any("flash_attn" in note for note in gpu.notes)


def test_transformers_finds_flash_attention_2_where_it_asks_for_it(gpu: VirtualGpu) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="flash_attention_2", dtype=torch.bfloat16
    ).cuda()
    ids = torch.zeros(2, 40, dtype=torch.int64, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.config._attn_implementation == "flash_attention_2"


def test_modules_go_to_a_device_by_its_number(gpu: VirtualGpu) -> None:
    assert nn.Linear(2, 2).to(0).weight.is_cuda
    assert nn.Linear(2, 2).to(device=0, dtype=torch.float16).weight.dtype is torch.float16
    with torch.device("cuda"):
        assert torch.tensor([1, 2]).is_cuda


def test_a_count_of_classes_is_as_long_as_the_script_says(gpu: VirtualGpu) -> None:
    predicted = torch.randn(1 << 20, 5, device="cuda").argmax(-1)
    assert torch.bincount(predicted, minlength=5).shape == (5,)


def test_the_buffer_of_log_sigmoid_is_not_allocated_on_a_gpu(gpu: VirtualGpu) -> None:
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = nn.functional.logsigmoid(x)
    assert torch.cuda.memory_allocated() - before == out.numel() * 4
