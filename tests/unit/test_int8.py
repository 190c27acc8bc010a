"""8-bit layers allocate what LLM.int8 of bitsandbytes allocates."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from memest.errors import PlanError
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import StorageTable
from memest.estimator.hardware.gpus import find_gpu
from memest.models_meta.adapters import LoraLinear8bit, apply_lora
from memest.models_meta.quantized.int8 import (
    Int8Params,
    Linear8bitLt,
    dequantize_int8,
    quantize_int8,
)
from memest.models_meta.quantized.nf4 import prepare_for_kbit_training, quant_state_tensors
from memest.plan import TrainingPlan

# Shapes: M = B * T rows of the input, N out_features, K in_features.
B, T, N, K = 2, 7, 320, 192
M = B * T


def layers(*, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(K, N, bias=bias), nn.LayerNorm(N)).to(dtype)


def quantised(*, bias: bool = True, width: int = K) -> Linear8bitLt:
    with torch.device("meta"):
        return Linear8bitLt(nn.Linear(width, N, bias=bias, dtype=torch.bfloat16))


def births(recorder: Recorder) -> list[int]:
    """Bytes of the storages of the last events, in the order of their birth."""
    return [recorder.storages.num_bytes[e] for e in recorder.take_events() if e >= 0]


def recorder() -> Recorder:
    return Recorder(find_gpu("h200"), StorageTable())


def test_a_weight_becomes_a_byte_per_element_with_a_scale_per_row() -> None:
    model = quantize_int8(layers())

    weight = model[0].weight  # type: ignore[index]

    assert type(weight) is Int8Params
    assert (tuple(weight.shape), weight.dtype) == ((N, K), torch.int8)
    assert not weight.requires_grad
    assert [t.nbytes for t in quant_state_tensors(model)] == [N * 4]


def test_it_is_made_from_a_copy_in_fp16_that_came_from_the_host() -> None:
    with torch.device("meta"):
        linear = nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    log = recorder()

    with log:
        layer = Linear8bitLt(linear)

    assert births(log) == [2 * N * K, 4 * N, N * K]
    assert layer.weight.nbytes == N * K


def test_the_conv1d_of_transformers_is_transposed() -> None:
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        layer = Linear8bitLt(Conv1D(N, K))

    assert tuple(layer.weight.shape) == (N, K)


def test_preparing_leaves_int8_weights_alone() -> None:
    model = quantize_int8(layers())

    prepare_for_kbit_training(model, use_gradient_checkpointing=False)

    assert {n: p.dtype for n, p in model.named_parameters()} == {
        "0.weight": torch.int8,
        "0.bias": torch.float32,
        "1.weight": torch.float32,
        "1.bias": torch.float32,
    }


def test_the_forward_passes_through_fp16_int8_and_int32() -> None:
    """Input in fp16; scales, int8; |x|, mask, its `any`; int32 and fp16 products; the output."""
    layer = quantised(bias=False)
    x = torch.empty(B, T, K, dtype=torch.bfloat16, device="meta", requires_grad=True)
    log = recorder()

    with log:
        out = layer(x)

    seen = [n for n in births(log) if n > 8]  # beside results of one value and empty ones
    assert seen == [
        2 * M * K, 4 * M, M * K, 2 * M * K, M * K, 4 * M * N, 2 * M * N, 2 * M * N,
    ]  # fmt: skip
    assert (out.shape, out.dtype) == ((B, T, N), torch.bfloat16)


def test_in_fp16_neither_input_nor_output_is_cast() -> None:
    layer = quantised(bias=False)
    x = torch.empty(B, T, K, dtype=torch.float16, device="meta", requires_grad=True)
    log = recorder()

    with log:
        layer(x)

    seen = [n for n in births(log) if n > 8]
    assert seen == [4 * M, M * K, 2 * M * K, M * K, 4 * M * N, 2 * M * N]


def test_a_width_that_4_does_not_divide_is_multiplied_in_fp32() -> None:
    width = 190
    layer = quantised(bias=False, width=width)
    x = torch.empty(M, width, dtype=torch.float16, device="meta", requires_grad=True)
    log = recorder()

    with log:
        layer(x)

    sizes = births(log)
    assert 4 * M * width in sizes
    assert 4 * N * width in sizes


def test_the_input_is_kept_where_it_needs_a_gradient() -> None:
    """As an attribute of the graph, so it outlives the backward, as long as the output does."""
    layer = quantised()

    def held(*, requires_grad: bool) -> int:
        x = torch.empty(B, T, K, dtype=torch.bfloat16, device="meta")
        log = recorder()
        with log:
            y = (x.requires_grad_(requires_grad) * 2) if requires_grad else x * 2
            out = layer(y)
            del y
        events = log.take_events()
        alive = {e for e in events if e >= 0} - {~e for e in events if e < 0}
        assert out is not None
        return sum(log.storages.num_bytes[i] for i in alive)

    assert held(requires_grad=True) - held(requires_grad=False) == 2 * M * K


def test_the_backward_dequantises_the_weight_in_the_dtype_of_the_input() -> None:
    layer = quantised(bias=False)
    x = torch.empty(B, T, K, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = layer(x)
    grad = torch.empty_like(out)
    log = recorder()

    with log:
        out.backward(grad)

    sizes = births(log)
    assert sizes[:2] == [2 * N * K, 4 * N]
    assert 2 * M * K in sizes


def test_the_bias_takes_the_dtype_of_the_input_for_good() -> None:
    model = quantize_int8(layers())
    prepare_for_kbit_training(model, use_gradient_checkpointing=False)

    model[0](torch.empty(B, T, K, dtype=torch.bfloat16, device="meta"))  # type: ignore[index]

    assert model[0].bias.dtype is torch.bfloat16  # type: ignore[index]


def test_a_trained_bias_has_a_gradient_of_its_shape() -> None:
    layer = quantised()
    assert layer.bias is not None
    layer.bias.requires_grad_(True)

    layer(torch.empty(B, T, K, dtype=torch.bfloat16, device="meta")).sum().backward()

    assert layer.bias.grad is not None
    assert tuple(layer.bias.grad.shape) == (N,)


def test_dequantising_for_dora_gives_fp32() -> None:
    layer = quantised()

    weight = dequantize_int8(layer.weight, layer.state.SCB)

    assert (tuple(weight.shape), weight.dtype) == ((N, K), torch.float32)


def test_adapters_go_onto_8bit_layers_without_a_clone() -> None:
    with torch.device("meta"):
        model = quantize_int8(nn.Sequential(nn.Linear(K, N), nn.Linear(N, K)).bfloat16())

    adapted = apply_lora(model, r=4, alpha=8, dropout=0.0, target_modules=["0"])

    layer = adapted.get_submodule("base_model.model.0")
    assert type(layer) is LoraLinear8bit
    assert not layer.clones


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("`LayerNorm` has no linear layer to quantise")):
        quantize_int8(nn.LayerNorm(5, device="meta"), skip=[])


def test_layers_of_a_class_of_their_own_are_named_where_nothing_else_can_be_quantised() -> None:
    """As `FalconLinear`: transformers converts layers whose class is `nn.Linear` itself."""

    class OwnLinear(nn.Linear):
        pass

    with pytest.raises(PlanError) as raised:
        quantize_int8(nn.Sequential(OwnLinear(8, 8, device="meta")), skip=[])

    assert raised.value.hint.startswith("transformers converts no `OwnLinear`; ")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"quant": "int8"}, "`quant` is given without QLoRA"),
        ({"quant": "int4", "use_qlora": True}, "`quant` cannot be `int4`"),
        (
            {"quant": "int8", "use_qlora": True, "double_quant": True},
            "`double_quant` does not go with `quant` `int8`",
        ),
    ],
)
def test_plans_that_contradict_themselves_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(text)):
        TrainingPlan.from_dict({"model_name": "gpt2", **values})


def test_a_prediction_says_that_outliers_are_left_out() -> None:
    from memest.estimator.predict import predict

    prediction = predict(
        TrainingPlan(model_name="gpt2", use_qlora=True, quant="int8", batch_size=1, seq_len=32)
    )

    assert any("no activation reaches 6.0" in line for line in prediction.assumptions)
    assert prediction.coverage["unmodelled"] == {}
