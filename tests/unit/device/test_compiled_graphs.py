"""Dynamo breaks no graph at a function of memest, and every such break is a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memest.estimator.gpu.attribution import LiveModules
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.integrations.inductor import compiler
from memest.estimator.ops.attention import cudnn_output
from memest.estimator.virtual_gpu import VirtualGpu
from tests import forked


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def _compiled(function: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of modules that Dynamo imports
        torch._dynamo.reset()  # type: ignore[attr-defined]
    return torch.compile(function, fullgraph=True)(*args)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: x.type_as(weight) * weight,
        lambda x, weight: (x * 2).type_as(x) * weight,
        lambda x, weight: (x * 2).to(x) * weight,
        lambda x, weight: weight.type(torch.bfloat16) * 2,
        lambda x, weight: x.new_tensor([1.0, 2.0]) * 2,
        lambda x, weight: x.new(3).zero_(),
        lambda x, weight: x * 2 if x.get_device() == 0 else weight,
        lambda x, weight: Tensor.to(x, torch.float16) * 2,
        lambda x, weight: Tensor.type_as(x, weight) * 2,
        lambda x, weight: x * torch.cuda.get_device_properties(0).major,
    ],
    ids="type_as again to_tensor type new_tensor new device unbound type_as_of properties".split(),
)
def test_a_call_stays_in_the_graph(gpu: VirtualGpu, function: Callable[..., Any]) -> None:
    """`fullgraph=True` raises at a break, and a fallback is a warning."""
    x = torch.randn(8, 8, device="cuda")
    weight = nn.Parameter(torch.randn(8, 8, device="cuda"))

    assert _compiled(function, x, weight).is_cuda
    assert gpu.mode.notes.warnings == []


def test_functions_stay_in_the_graph_after_dynamo_has_cleared_its_tables(gpu: VirtualGpu) -> None:
    """`torch.distributed.init_process_group` clears them."""
    torch.compile(lambda x: x + 1)(torch.ones(2, device="cuda"))
    torch._dynamo.trace_rules.clear_lru_cache()  # type: ignore[no-untyped-call]

    steps = _compiled(lambda x: torch.arange(8, device=x.device) + x, torch.ones(8, device="cuda"))

    assert steps.is_cuda
    assert gpu.mode.notes.warnings == []


def test_a_graph_break_at_memest_is_a_warning(gpu: VirtualGpu) -> None:
    def own(x: Tensor) -> Tensor:
        return x

    namespace: dict[str, Any] = {"__name__": "memest.estimator.of_a_test"}
    code = compile("def broken(x):\n    return x\n", find_gpu.__code__.co_filename, "exec")
    exec(code, namespace)
    broken = namespace["broken"]
    torch.compile(lambda x: broken(x * 2) + own(x))(torch.ones(2, device="cuda"))

    assert len(gpu.mode.notes.warnings) == 1
    assert "broke a graph" in gpu.mode.notes.warnings[0]


_FLEX = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
import memest

def mask(b, h, q, k):
    return (q >= k) & (documents[q] == documents[k])

with memest.virtual_gpu("h100-80gb", strict=True):
    documents = torch.arange(256, device="cuda") // 64
    blocks = create_block_mask(mask, None, None, 256, 256, device="cuda")
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3))
    for autocast in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = torch.compile(flex_attention)(q, k, v, block_mask=blocks)
        out.sum().backward()
        print(out.dtype, q.grad.dtype)
"""


def test_flex_attention_is_compiled() -> None:
    """As in modded-nanogpt: causal attention within documents, forward and backward."""
    command = [sys.executable, "-c", _FLEX]
    done = forked.run(command, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == [
        "torch.float32 torch.float32",
        "torch.bfloat16 torch.float32",
    ], done.stderr


def test_inductor_that_was_imported_without_triton_compiles() -> None:
    """bitsandbytes imports it, and a notebook may have imported that before."""
    code = f"import torch._inductor.runtime.triton_heuristics\n{_FLEX}"
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == [
        "torch.float32 torch.float32",
        "torch.bfloat16 torch.float32",
    ], done.stderr


_EAGER_FLEX = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
import memest

with memest.virtual_gpu("h100-80gb", strict=True):
    bias = torch.randn(4, device="cuda", requires_grad=True)
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device="cuda")
    q, k, v = (torch.randn(2, 4, 1024, 64, device="cuda", requires_grad=True) for _ in range(3))
    for options in ({}, {"block_mask": blocks, "score_mod": lambda s, b, h, q, k: s + bias[h]}):
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        flex_attention(q, k, v, **options).sum().backward()
        scores = 2 * 4 * 1024 * 1024 * 4
        print((torch.cuda.max_memory_allocated() - held) // scores > 6, q.grad.shape == q.shape)
    print(bias.grad.shape)
"""


def test_flex_attention_runs_uncompiled() -> None:
    """torch then allocates the matrix of scores, several times."""
    command = [sys.executable, "-c", _EAGER_FLEX]
    done = forked.run(command, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == ["True True", "True True", "torch.Size([4])"], done.stderr


_BLOCK_MASK = """
import torch
from torch.nn.attention.flex_attention import create_block_mask
import memest

def mask(b, h, q, k):
    return (q >= k) & (documents[q] == documents[k])

with memest.virtual_gpu("h100-80gb", strict=True):
    documents = torch.arange(1024, device="cuda") // 256
    for compiles in (True, False):
        made = create_block_mask(mask, None, None, 1024, 1024, device="cuda", _compile=compiles)
        print(made.kv_indices.shape, made.kv_num_blocks.device)
"""


def test_a_block_mask_is_made_by_compiled_code() -> None:
    """modded-nanogpt passes `_compile=True`: the mask mode is traced under `torch.vmap`."""
    command = [sys.executable, "-c", _BLOCK_MASK]
    done = forked.run(command, capture_output=True, text=True, check=False)

    expected = "torch.Size([1, 1, 8, 8]) cuda:0"
    assert done.stdout.splitlines() == [expected, expected], done.stderr


def test_a_small_tensor_may_be_created_in_pinned_memory(gpu: VirtualGpu) -> None:
    size = torch.tensor(3, dtype=torch.int32, pin_memory=True)

    assert size.is_pinned()
    assert size.cuda(non_blocking=True).is_cuda


def test_attention_has_the_strides_of_cuda_where_the_meta_kernel_has_others(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.6 makes a contiguous output there, and compiled code asserts strides."""
    calls = []

    def counted(args: Any, out: Any) -> Any:
        calls.append(out)
        return cudnn_output(args, out)

    name = "meta__scaled_dot_product_cudnn_attention"
    monkeypatch.setattr(torch._meta_registrations, name, lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(compiler, "cudnn_output", counted)
    query = torch.randn(2, 16, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    out = _compiled(nn.functional.scaled_dot_product_attention, query, query, query)

    assert calls
    assert out.stride() == query.stride()
    assert gpu.mode.notes.warnings == []


def test_hooks_of_modules_return_after_nested_blocks_without_them() -> None:
    modules, calls = LiveModules(), list[str]()
    handles = modules.hooks()
    try:
        with modules.without_hooks(), modules.without_hooks():
            nn.Identity()(torch.zeros(1))
        modules.on_call = lambda module, is_first: calls.append(type(module).__name__)
        nn.Identity()(torch.zeros(1))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["Identity"]
