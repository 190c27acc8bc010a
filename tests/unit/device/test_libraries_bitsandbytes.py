"""bitsandbytes runs on the virtual GPU as it is, and asks for what the measured mirrors ask for."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memest.estimator.device.virtual_gpu import VirtualGpu
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.optimizers.bitsandbytes import BlockwiseOptimizer
from memest.models_meta.quantized import int8, nf4
from memest.models_meta.quantized.fused_gemm import FusedGemmRule

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

# Shapes: N out_features, K in_features; M rows of the input.
N, K = 2304, 1024


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


class Requests:
    """What is asked of the allocator of `gpu`, in order: bytes, below 0 where they are freed."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self.seen: list[int] = []
        allocator: Any = gpu.allocator
        malloc, free = allocator.malloc, allocator.free

        def asked(num_bytes: int, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(num_bytes)
            return malloc(num_bytes, *args, **kwargs)

        def freed(block: Any) -> Any:
            self.seen.append(-block.num_bytes)
            return free(block)

        allocator.malloc, allocator.free = asked, freed

    def of(self, run: Callable[[], Any]) -> tuple[list[int], int]:
        """The requests of `run`, and what is allocated more at the end while its result lives.

        What is freed between two requests has no order among itself.
        """
        self.gpu.recorder.settle()
        self.seen.clear()
        before = self.gpu.allocator.allocated_bytes
        result = run()
        self.gpu.recorder.settle()
        grown = self.gpu.allocator.allocated_bytes - before
        seen = [
            number
            for is_freed, run_of in itertools.groupby(self.seen, lambda n: n < 0)
            for number in (sorted(run_of) if is_freed else run_of)
        ]
        del result
        return seen, grown


def _step(layer: nn.Module, rows: int, dtype: torch.dtype) -> Tensor:
    x = torch.empty(1, rows, K, device="cuda", dtype=dtype, requires_grad=True)
    layer(x).backward(torch.empty(1, rows, N, device="cuda", dtype=dtype))
    assert x.grad is not None
    return x.grad


def _linear(dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(K, N, dtype=dtype)


@pytest.mark.parametrize("rows", [3, 700, 2000])
@pytest.mark.parametrize("double_quant", [False, True])
def test_a_4_bit_layer_asks_for_what_its_mirror_asks_for(
    gpu: VirtualGpu, double_quant: bool, rows: int
) -> None:
    import bitsandbytes as bnb

    requests = Requests(gpu)
    real = bnb.nn.Linear4bit(
        K, N, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=double_quant
    ).to(torch.bfloat16)
    nested: list[Tensor] = []
    quantised = _linear(torch.bfloat16)

    def mirrored() -> nn.Module:
        with torch.no_grad():
            on_card = quantised.cuda()
        return nf4.Linear4bit(
            on_card, compute_dtype=torch.bfloat16, double_quant=double_quant,
            rule=FusedGemmRule(), nested_map=nested,
        )  # fmt: skip

    mirror = mirrored()
    real = real.cuda().requires_grad_(False)
    assert real.weight.dtype is torch.uint8
    assert real.weight.device.type == "cuda"
    for _ in range(2):  # the first step takes cuBLAS's workspaces
        got = requests.of(lambda: _step(real, rows, torch.bfloat16))
        expected = requests.of(lambda: _step(mirror, rows, torch.bfloat16))
    assert got == expected


def test_an_8_bit_layer_asks_for_what_its_mirror_asks_for(gpu: VirtualGpu) -> None:
    import bitsandbytes as bnb

    requests = Requests(gpu)
    real = bnb.nn.Linear8bitLt(K, N, has_fp16_weights=False, threshold=int8.THRESHOLD)
    real = real.to(torch.bfloat16).cuda().requires_grad_(False)
    mirror = int8.Linear8bitLt(_linear(torch.bfloat16).cuda())
    assert real.weight.dtype is torch.int8
    for _ in range(2):
        got = requests.of(lambda: _step(real, 700, torch.bfloat16))
        expected = requests.of(lambda: _step(mirror, 700, torch.bfloat16))
    assert got == expected


@pytest.mark.parametrize(
    ("name", "num_moments", "is_paged", "num_bits"),
    [
        ("AdamW8bit", 2, False, 8),
        ("PagedAdamW8bit", 2, True, 8),
        ("PagedAdamW32bit", 2, True, 32),
        ("Lion8bit", 1, False, 8),
    ],
)
def test_an_optimizer_asks_for_what_its_mirror_asks_for(
    gpu: VirtualGpu, name: str, num_moments: int, is_paged: bool, num_bits: int
) -> None:
    import bitsandbytes as bnb

    requests = Requests(gpu)
    grown = []
    for make in (
        getattr(bnb.optim, name),
        lambda params, lr: BlockwiseOptimizer(
            params, lr=lr, num_moments=num_moments, is_paged=is_paged, num_bits=num_bits
        ),
    ):
        model = nn.Sequential(nn.Linear(640, 320), nn.Linear(320, 7)).cuda()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer = make(list(model.parameters()), lr=1e-3)
        grown.append(requests.of(optimizer.step)[1])
        assert requests.of(optimizer.step)[1] == 0
    assert grown[0] == grown[1] > 0


def test_a_quantised_parameter_keeps_its_class_where_it_moves(gpu: VirtualGpu) -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(128, 64).cuda()
    layer.cpu()
    assert type(layer.weight) is bnb.nn.Params4bit
    assert layer.weight.device.type == "cpu"
    layer.cuda()
    assert type(layer.weight) is bnb.nn.Params4bit
    assert layer.weight.is_cuda


def test_paged_states_lie_outside_of_the_allocator(gpu: VirtualGpu) -> None:
    import bitsandbytes as bnb

    weight = nn.Parameter(torch.empty(1024, 1024, device="cuda"))
    weight.grad = torch.empty_like(weight)
    optimizer = bnb.optim.PagedAdamW32bit([weight])
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.memory_allocated() == before
    assert gpu.recorder.host_bytes >= 2 * 4 * 1024 * 1024
