"""4-bit layers allocate what bitsandbytes allocates."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memest.errors import PlanError
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import StorageTable
from memest.estimator.hardware.gpus import find_gpu
from memest.models_meta.quantized.fused_gemm import FusedGemmRule
from memest.models_meta.quantized.nf4 import (
    Linear4bit,
    Params4bit,
    modules_to_skip,
    prepare_for_kbit_training,
    quant_state_tensors,
    quantize_nf4,
)

N, K = 320, 192  # 61 440 weights: 960 blocks of 64, 3.75 blocks of 256 of these


def layers(*, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(K, N, bias=bias), nn.LayerNorm(N)).to(dtype)


def test_a_weight_becomes_half_a_byte_per_element_in_one_column() -> None:
    model = quantize_nf4(layers(), compute_dtype=torch.bfloat16)

    weight = model[0].weight  # type: ignore[index]

    assert type(weight) is Params4bit
    assert (tuple(weight.shape), weight.dtype) == ((N * K // 2, 1), torch.uint8)
    assert not weight.requires_grad


def test_its_state_is_a_scale_per_64_elements_and_a_code_of_16() -> None:
    model = quantize_nf4(layers(), compute_dtype=torch.bfloat16)

    assert [t.nbytes for t in quant_state_tensors(model)] == [960 * 4, 16 * 4]


def test_double_quantisation_keeps_its_scales_in_bytes_and_one_map_for_all() -> None:
    model = quantize_nf4(layers(), compute_dtype=torch.bfloat16, double_quant=True)

    sizes = sorted(t.nbytes for t in quant_state_tensors(model))

    # offset, 4 nested scales, code, scales as bytes, the layer's map and the one that all share
    assert sizes == [4, 4 * 4, 64, 960, 1024, 1024]


def test_double_quantisation_asks_in_the_order_of_bitsandbytes() -> None:
    """960 scales; the weight; a code, its absolute values and their maximum; the mean of the
    scales and their distance from it; at the first layer the map of all; nested scales; bytes; a
    map of its own.
    """
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K)).bfloat16()
    recorder = Recorder(find_gpu("h200"), StorageTable())

    with recorder:
        quantize_nf4(model, compute_dtype=torch.bfloat16, double_quant=True)

    before, after = [3840, N * K // 2, 64, 64, 4, 4, 3840], [16, 960, 1024]
    made = [recorder.storages.num_bytes[event] for event in recorder.events if event >= 0]
    assert made == [*before, 1024, *after, *before, *after]


def test_the_bias_takes_the_compute_dtype_for_good_at_the_first_call() -> None:
    model = quantize_nf4(layers(), compute_dtype=torch.bfloat16)
    prepare_for_kbit_training(model, use_gradient_checkpointing=False)
    layer = model[0]  # type: ignore[index]
    before = layer.bias.dtype

    output = layer(torch.empty(2, 7, K, device="meta"))

    assert (before, layer.bias.dtype) == (torch.float32, torch.bfloat16)
    assert (output.shape, output.dtype) == ((2, 7, N), torch.float32)


def test_preparing_casts_all_but_4bit_weights_to_fp32_and_freezes_them() -> None:
    model = quantize_nf4(layers(), compute_dtype=torch.bfloat16)

    prepare_for_kbit_training(model, use_gradient_checkpointing=False)

    found = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    assert found == {
        "0.weight": (torch.uint8, False),
        "0.bias": (torch.float32, False),
        "1.weight": (torch.float32, False),
        "1.bias": (torch.float32, False),
    }


class EmptyLog(TorchDispatchMode):
    """What `torch.empty` makes, and which of it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.storages: list[weakref.ref[Any]] = []

    @property
    def num_alive(self) -> int:
        return sum(storage() is not None for storage in self.storages)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.made.append((tuple(out.shape), out.dtype))
            self.storages.append(weakref.ref(out.untyped_storage()))
        return out


def test_a_layer_keeps_neither_its_input_nor_a_dequantised_weight() -> None:
    """700 rows are too many for the fused kernel, so the weight is dequantised, twice."""
    layer = quantize_nf4(layers(), compute_dtype=torch.float32)[0]  # type: ignore[index]
    x = torch.zeros(700, K, device="meta", requires_grad=True)

    with EmptyLog() as log:
        hidden = x * 2
        storage = weakref.ref(hidden.untyped_storage())
        output = layer(hidden)
        del hidden
        forward, num_alive, input_is_dead = list(log.made), log.num_alive, storage() is None
        output.sum().backward()

    assert forward == [((N, K), torch.float32)]
    assert num_alive == 0
    assert input_is_dead
    # back in the dtype in which the weight was loaded, and cast from there
    assert log.made[1:] == [((N, K), torch.bfloat16)]
    assert x.grad is not None


def test_a_fused_product_dequantises_nothing() -> None:
    layer = quantize_nf4(layers(), compute_dtype=torch.bfloat16)[0]  # type: ignore[index]
    x = torch.zeros(4, K, dtype=torch.bfloat16, device="meta")

    with EmptyLog() as log:
        output = layer(x)

    assert log.made == []
    assert output.shape == (4, N)


@pytest.mark.parametrize(
    ("capability", "num_sms", "rows", "shape", "dtype", "fused"),
    [
        ((9, 0), 132, 4, (4096, 4096), torch.float32, True),  # four rows always
        ((9, 0), 132, 8, (4096, 4096), torch.float32, False),  # fp32 has no tensor core kernel
        ((9, 0), 132, 1537, (2048, 512), torch.bfloat16, False),  # beyond 1536 never
        ((9, 0), 132, 4, (4096, 100), torch.bfloat16, False),  # 100 is no multiple of 64
        ((9, 0), 132, 512, (2048, 512), torch.bfloat16, True),  # small weight, 32 tiles of 132
        ((9, 0), 132, 513, (2048, 512), torch.bfloat16, False),
        ((9, 0), 132, 64, (32000, 4096), torch.bfloat16, True),  # 500 tiles: over three waves
        ((9, 0), 132, 65, (32000, 4096), torch.bfloat16, False),
        ((9, 0), 132, 8, (4096, 4096), torch.bfloat16, False),  # 64 tiles: below half a wave
        ((8, 0), 108, 16, (4096, 4096), torch.bfloat16, False),  # square, 64 tiles: below 0.6
        ((8, 9), 128, 8, (4096, 4096), torch.bfloat16, True),
        ((8, 9), 128, 9, (4096, 4096), torch.bfloat16, False),
        ((10, 0), 148, 32, (32000, 4096), torch.bfloat16, True),
        ((7, 5), 40, 8, (4096, 4096), torch.bfloat16, False),  # there fp16 only
    ],
)
def test_the_fused_kernel_runs_where_bitsandbytes_measured_it_faster(
    capability: tuple[int, int],
    num_sms: int,
    rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    fused: bool,
) -> None:
    rule = FusedGemmRule(capability=capability, num_sms=num_sms)

    assert rule.applies(rows, shape, dtype) is fused


def test_named_modules_are_left_alone() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"wo": nn.Linear(K, N), "wi": nn.Linear(K, N)})

    quantize_nf4(model, compute_dtype=None, skip=["wo"])

    assert [type(module) for module in model.values()] == [nn.Linear, Linear4bit]


def test_a_model_without_a_layer_to_quantise_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("`LayerNorm` has no linear layer")):
        quantize_nf4(nn.LayerNorm(8, device="meta"), compute_dtype=None)


def test_transformers_keeps_the_output_embedding_and_wo_of_t5() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    assert {"lm_head", "wo"} <= set(modules_to_skip(model))

    quantize_nf4(model, compute_dtype=torch.bfloat16)

    left = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is nn.Linear}
    # per block: q, k, v, o, wi_0, wi_1; the decoder has a second attention
    assert left == {"lm_head", "wo"}
    assert sum(isinstance(m, Linear4bit) for m in model.modules()) == 2 * (4 + 2) + 2 * (8 + 2)


def test_the_transposed_layers_of_gpt2_are_quantised_the_right_way_round() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96))

    quantize_nf4(model, compute_dtype=torch.bfloat16)

    layer = model.transformer.h[0].attn.c_attn
    assert (layer.in_features, layer.out_features) == (64, 192)


def test_a_transposed_weight_is_copied_until_it_is_packed() -> None:
    """64 x 192 in bf16, before 192 scales, half a byte per weight and a code with its maximum."""
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = nn.Sequential(Conv1D(192, 64), nn.Linear(192, 64)).bfloat16()
    recorder = Recorder(find_gpu("h200"), StorageTable())

    with recorder:
        quantize_nf4(model, compute_dtype=torch.bfloat16)

    sizes = recorder.storages.num_bytes
    events = [sizes[e] if e >= 0 else -sizes[~e] for e in recorder.events]
    first, second = events[:9], [size for size in events[9:] if size > 0]
    assert first == [2 * 64 * 192, 4 * 192, 64 * 192 // 2, 64, 64, 4, -64, -4, -2 * 64 * 192]
    assert second == [4 * 192, 64 * 192 // 2, 64, 64, 4]


def test_checkpointing_lets_gradients_into_the_frozen_model() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96))
    quantize_nf4(model, compute_dtype=torch.bfloat16)

    prepare_for_kbit_training(model, use_gradient_checkpointing=True)

    ids = torch.zeros(2, 3, dtype=torch.long, device="meta")
    assert model.get_input_embeddings()(ids).requires_grad
    assert model.is_gradient_checkpointing
