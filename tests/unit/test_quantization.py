"""What bitsandbytes' layers ask of the allocator, in the order and the sizes of its own Python."""

from __future__ import annotations

import gc
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memest.errors import PlanError, UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.predict import predict
from memest.estimator.virtual_gpu import VirtualGpu
from memest.loops.job import Job, Listener, _build_model
from memest.loops.probe import CudaMemory, PhaseRecorder
from memest.models_meta.assemble import _prepare_for_kbit_training
from memest.models_meta.quantized import quant_state_tensors, quantize
from memest.models_meta.registry import resolve_config
from memest.plan import TrainingPlan
from memest.report import read_measurements
from memest.validate.compare import plan_of
from tests.requested import Requests, without_workspaces

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

# Shapes: N out_features, K in_features; M rows of the input, which is above 1 MiB: the virtual GPU
# keeps no values of it.
N, K, M = 320, 192, 3000  # 61 440 weights: 960 blocks of 64, 3.75 blocks of 256 of these
BF16 = torch.bfloat16


@pytest.fixture
def requests() -> Iterator[Requests]:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        yield Requests(gpu)


def prepare_model_for_kbit_training(model: nn.Module, **options: bool) -> None:
    from peft import prepare_model_for_kbit_training

    prepare_model_for_kbit_training(model, **options)


def layers(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, N, bias=bias), nn.LayerNorm(N)).to("cuda", BF16)


IN_4_BITS = TrainingPlan(model_name="any", use_qlora=True, precision="bf16-true")
IN_8_BITS = replace(IN_4_BITS, quant="int8")


def in_4_bits(model: nn.Module, *, double_quant: bool = False) -> None:
    quantize(model, replace(IN_4_BITS, double_quant=double_quant))


def in_8_bits(model: nn.Module) -> None:
    quantize(model, IN_8_BITS)


def kinds(model: nn.Module) -> dict[str, tuple[torch.dtype, str, bool]]:
    named = model.named_parameters()
    return {name: (p.dtype, p.device.type, p.requires_grad) for name, p in named}


# --- 4 bits


def test_a_weight_becomes_half_a_byte_per_element_in_one_column(requests: Requests) -> None:
    import bitsandbytes

    model = layers()
    in_4_bits(model)
    weight = model[0].weight

    assert type(weight) is bitsandbytes.nn.Params4bit
    assert (tuple(weight.shape), weight.dtype) == ((N * K // 2, 1), torch.uint8)
    assert kinds(model)["0.weight"] == (torch.uint8, "cuda", False)


def test_4_bits_ask_for_scales_the_weight_and_a_code_with_its_maximum(requests: Requests) -> None:
    """A scale of 4 bytes for 64 elements; a code of 16 values, their absolute values, the largest.
    The loop holds the weights themselves to its end.
    """
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K)).to("cuda", BF16)

    asked = requests.of(lambda: in_4_bits(model))

    layer = [960 * 4, N * K // 2, 64, 64, 4]
    assert asked[:5] == layer
    assert asked[7:12] == layer
    assert sorted(asked[12:]) == [-2 * N * K, -2 * N * K, -64, -4]
    assert [t.nbytes for t in quant_state_tensors(model)] == [960 * 4, 16 * 4] * 2


def test_double_quantisation_asks_for_the_scales_of_scales(requests: Requests) -> None:
    """The mean of the scales and their distance from it; at the first layer the map of all; a scale
    of 4 bytes for 256 scales; a byte for each; a map of its own.
    """
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K)).to("cuda", BF16)

    made = requests.made(lambda: in_4_bits(model, double_quant=True))

    before, after = [3840, N * K // 2, 64, 64, 4, 4, 3840], [16, 960, 1024]
    assert made == [*before, 1024, *after, *before, *after]
    kept = [t.nbytes for t in quant_state_tensors(model[:1])]
    assert sorted(kept) == [4, 4 * 4, 64, 960, 1024]


def test_a_transposed_weight_is_copied_until_it_is_packed(requests: Requests) -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(192, 64), nn.Linear(192, 64)).to("cuda", BF16)

    asked = requests.of(lambda: in_4_bits(model))

    assert asked[:6] == [2 * 64 * 192, 4 * 192, 64 * 192 // 2, 64, 64, 4]
    assert sorted(asked[6:9]) == [-2 * 64 * 192, -64, -4]
    assert asked[9:14] == [4 * 192, 64 * 192 // 2, 64, 64, 4]
    assert (model[0].in_features, model[0].out_features) == (64, 192)


def test_preparing_casts_what_is_not_quantised_to_fp32(requests: Requests) -> None:
    for quantise, dtype in ((in_4_bits, torch.uint8), (in_8_bits, torch.int8)):
        model = layers()
        quantise(model)

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

        assert kinds(model) == {
            "0.weight": (dtype, "cuda", False),
            "0.bias": (torch.float32, "cuda", False),
            "1.weight": (torch.float32, "cuda", False),
            "1.bias": (torch.float32, "cuda", False),
        }


@pytest.mark.parametrize("double_quant", [False, True])
def test_a_4_bit_layer_dequantises_its_weight_twice_and_keeps_none(
    requests: Requests, double_quant: bool
) -> None:
    """M rows are too many for the fused kernel. With double quantisation the scales come first, and
    with the mean that was taken from them; the backward has the weight in the dtype in which it was
    loaded, and casts from there.
    """
    model = layers(bias=False)
    in_4_bits(model, double_quant=double_quant)
    model[0].compute_dtype = torch.float32
    x = torch.empty(M, K, device="cuda", requires_grad=True)
    out: list[torch.Tensor] = []

    forward = without_workspaces(requests.of(lambda: out.append(model[0](x))))
    grad = torch.empty_like(out[0])
    backward = without_workspaces(requests.of(lambda: out[0].backward(grad)))

    scales = [4 * 960, 4 * 960] if double_quant else []
    made = [n for n in forward if n > 0]
    assert made == [*scales, 4 * N * K, 4 * M * N]
    assert sorted(n for n in forward if n < 0) == sorted(-n for n in made[:-1])
    scales = scales[:1]
    assert [n for n in backward if n > 0] == [*scales, 2 * N * K, 4 * N * K, 4 * M * K]
    assert sum(backward) == 4 * M * K  # the gradient of x alone stays


def test_a_bias_takes_the_dtype_of_the_product_for_good(requests: Requests) -> None:
    for quantise in (in_4_bits, in_8_bits):
        model = layers()
        quantise(model)
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        before = model[0].bias.dtype

        output = model[0](torch.zeros(2, 7, K, device="cuda", dtype=BF16))

        assert (before, model[0].bias.dtype) == (torch.float32, BF16)
        assert (output.shape, output.dtype) == ((2, 7, N), BF16)


@pytest.mark.parametrize(
    ("gpu", "rows", "shape", "fused"),
    [
        ("h100-80gb", 4, (4096, 4096), True),  # four rows always
        ("h100-80gb", 4, (4096, 100), False),  # 100 is no multiple of 64
        ("h100-80gb", 512, (2048, 512), True),  # small weight, 32 tiles of 132
        ("h100-80gb", 513, (2048, 512), False),
        ("h100-80gb", 64, (32000, 4096), True),  # 500 tiles: over three waves
        ("h100-80gb", 65, (32000, 4096), False),
        ("a100-80gb", 16, (4096, 4096), False),  # square, 64 tiles: below 0.6 of a wave
        ("rtx-4090", 8, (4096, 4096), True),
        ("rtx-4090", 9, (4096, 4096), False),
        ("b200", 32, (32000, 4096), True),
    ],
)
@pytest.mark.filterwarnings("ignore:inner dimension")
def test_the_fused_kernel_runs_where_bitsandbytes_takes_it_on_that_gpu(
    gpu: str, rows: int, shape: tuple[int, int], fused: bool
) -> None:
    n, k = shape
    with VirtualGpu(find_gpu(gpu)) as virtual:
        model = nn.Sequential(nn.Linear(k, n, bias=False)).to("cuda", BF16)
        in_4_bits(model)
        x = torch.empty(rows, k, device="cuda", dtype=BF16)

        made = Requests(virtual).made(lambda: model(x))

    output, dequantised = 2 * rows * n, 2 * n * k
    assert (made == [output]) is fused
    assert fused or made[0] == dequantised


# --- 8 bits


def test_8_bits_ask_for_a_copy_in_fp16_that_comes_from_the_host(requests: Requests) -> None:
    import bitsandbytes

    model = layers()

    asked = requests.of(lambda: in_8_bits(model))

    assert asked == [2 * N * K, 4 * N, N * K, -2 * N * K, -2 * N * K]
    assert type(model[0].weight) is bitsandbytes.nn.Int8Params
    assert (tuple(model[0].weight.shape), model[0].weight.dtype) == ((N, K), torch.int8)
    assert [t.nbytes for t in quant_state_tensors(model)] == [4 * N]


def test_the_conv1d_of_transformers_is_transposed(requests: Requests) -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(N, K)).to("cuda", BF16)
    in_8_bits(model)

    assert tuple(model[0].weight.shape) == (N, K)


def eight_bits(requests: Requests, dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """Of a forward and its backward what is asked for, but for what one block holds (results of
    one value, their partial ones) and cuBLAS's workspaces.
    """
    model = layers(bias=False)
    in_8_bits(model)
    x = torch.empty(M, K, device="cuda", dtype=dtype, requires_grad=True)
    out: list[torch.Tensor] = []
    forward = requests.made(lambda: out.append(model[0](x)))
    grad = torch.empty_like(out[0])
    backward = requests.made(lambda: out[0].backward(grad))
    return [n for n in forward if n > 512], without_workspaces(backward)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_the_forward_passes_through_fp16_int8_and_int32(requests: Requests) -> None:
    """Input in fp16; scales, int8; |x|, mask, its `any`; int32 and fp16 products; the output. The
    backward dequantises the weight in the dtype of the input.
    """
    forward, backward = eight_bits(requests, BF16)

    looked_at = [4 * M, M * K, 2 * M * K, M * K]
    assert forward == [2 * M * K, *looked_at, 4 * M * N, 2 * M * N, 2 * M * N]
    assert backward == [2 * N * K, 4 * N, 2 * M * K]


def test_in_fp16_neither_input_nor_output_is_cast(requests: Requests) -> None:
    forward, _ = eight_bits(requests, torch.float16)

    assert forward == [4 * M, M * K, 2 * M * K, M * K, 4 * M * N, 2 * M * N]


# --- which layers


def test_named_modules_are_left_alone(requests: Requests) -> None:
    import bitsandbytes

    model = nn.ModuleDict({"wo": nn.Linear(K, N), "wi": nn.Linear(K, N)}).to("cuda", BF16)

    quantize(model, IN_4_BITS, skip=["wo"])

    assert [type(m) for m in model.values()] == [nn.Linear, bitsandbytes.nn.Linear4bit]


def test_a_model_without_a_layer_to_quantise_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("`LayerNorm` has no linear layer to quantise")):
        quantize(nn.LayerNorm(8), IN_4_BITS)


def test_layers_of_a_class_of_their_own_are_named_where_nothing_else_can_be_quantised() -> None:
    """As `FalconLinear`: transformers converts layers whose class is `nn.Linear` itself."""

    class OwnLinear(nn.Linear):
        pass

    with pytest.raises(PlanError) as raised:
        quantize(nn.Sequential(OwnLinear(8, 8)), IN_8_BITS)

    assert raised.value.hint.startswith("transformers converts no `OwnLinear`; ")
    assert "use_lora" in raised.value.hint


def test_a_plan_whose_model_has_no_linear_layer_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "resnet", "architectures": ["ResNetModel"], "depths": [1, 1, 1, 1]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    with pytest.raises(PlanError) as raised:
        predict(TrainingPlan(model_name=str(path), use_qlora=True))

    assert str(raised.value) == "`ResNetModel` has no linear layer to quantise"
    assert "leave `use_qlora` out" in raised.value.hint


def test_a_plan_leaves_the_output_embedding_and_wo_of_t5(requests: Requests) -> None:
    import bitsandbytes
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).to("cuda", BF16)

    quantize(model, IN_4_BITS, skip=["lm_head", "wo"])

    left = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is nn.Linear}
    packed = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    # per block: q, k, v, o, wi_0, wi_1; the decoder has a second attention
    assert left == {"lm_head", "wo"}
    assert len(packed) == 2 * (4 + 2) + 2 * (8 + 2)


def test_checkpointing_lets_gradients_into_the_frozen_model(requests: Requests) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96)
    model = GPT2LMHeadModel(config).to("cuda", BF16)
    in_4_bits(model)

    prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)

    ids = torch.zeros(2, 3, dtype=torch.long, device="cuda")
    assert model.get_input_embeddings()(ids).requires_grad
    assert model.is_gradient_checkpointing


# --- plans


def base_of(**keys: Any) -> nn.Module:
    """The quantised base of a small T5, on the H100, as a plan's loop makes it."""
    plan = TrainingPlan(model_name="t5-small", use_qlora=True, **keys)
    recorder = PhaseRecorder(CudaMemory(), 1)
    return _build_model(
        Job(plan, recorder, Listener(on_end=lambda: None)), resolve_config("t5-small")
    )


def test_a_base_is_loaded_by_from_pretrained_and_checkpoints_as_peft_has_it(
    requests: Requests,
) -> None:
    """What T5 keeps in fp32 and its head stay as the checkpoint has them; nothing is in bf16."""
    model = base_of(precision="32-true")

    base = model.get_base_model()
    assert base.hf_quantizer.quantization_config.bnb_4bit_quant_type == "nf4"
    assert base.is_gradient_checkpointing
    left = {n.rpartition(".")[2] for n, m in base.named_modules() if type(m) is nn.Linear}
    assert left >= {"lm_head", "wo"}
    assert {p.dtype for p in base.parameters()} == {torch.uint8, torch.float32}


def test_kbit_ckpt_leaves_checkpointing_off(requests: Requests) -> None:
    assert not base_of(kbit_ckpt=False).get_base_model().is_gradient_checkpointing


def test_in_place_means_that_the_model_was_whole_on_the_gpu(requests: Requests) -> None:
    peaks = []
    for quant_load in ("in_place", "from_pretrained"):
        torch.cuda.reset_peak_memory_stats()
        base_of(quant_load=quant_load)
        gc.collect()
        peaks.append(torch.cuda.max_memory_allocated())

    whole = 2 * 60_506_624  # t5-small in bf16
    assert peaks[0] > whole > peaks[1] / 2
    assert peaks[0] > 1.3 * peaks[1]


def test_a_plan_says_that_peft_turns_checkpointing_on(shallow: Callable[..., str]) -> None:
    name = shallow("opt-125m", 4)
    keys: dict[str, Any] = {"model_name": name, "use_qlora": True, "seq_len": 32}
    on, off = (
        predict(TrainingPlan(**keys, kbit_ckpt=kbit_ckpt, batch_size=8))
        for kbit_ckpt in (None, False)
    )

    said = "`prepare_model_for_kbit_training` of peft turns activation checkpointing on"
    assert any(line.startswith(said) for line in on.assumptions)
    assert not any(line.startswith(said) for line in off.assumptions)
    assert on.peak_allocated_bytes < off.peak_allocated_bytes


def test_a_model_without_checkpointing_is_refused_with_the_key_to_turn_it_off() -> None:
    plan = TrainingPlan(model_name="opt-125m", use_qlora=True)
    model = nn.Sequential(nn.Linear(2, 2))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    model.enable_input_require_grads = lambda: None  # type: ignore[assignment]

    def enable(**options: Any) -> None:
        raise ValueError("Sequential does not support gradient checkpointing.")

    model.gradient_checkpointing_enable = enable  # type: ignore[assignment]

    with pytest.raises(UnsupportedError, match="which `opt-125m` does not offer") as raised:
        _prepare_for_kbit_training(model, plan)

    assert raised.value.hint == "add `kbit_ckpt: false` (`--no-kbit-ckpt`)"


@pytest.mark.parametrize(
    ("results", "name"),
    [
        ("h200-lab-h100", "flan-t5-xxl QLoRA"),
        pytest.param("lab-h200", "lab-xl-qlora-b64", id="a report without `quant_skip`"),
    ],
)
def test_qlora_of_older_reports_has_the_defaults_of_its_time(results: str, name: str) -> None:
    path = Path(__file__).resolve().parents[2] / "validation" / "runs" / f"{results}.jsonl"
    plans = {m.name: plan_of(m) for m in read_measurements(path)}

    qlora = plans.pop(name)
    assert (qlora.quant_load, qlora.kbit_ckpt) == ("in_place", False)
    assert qlora.quant_skip == ("lm_head", "wo")
    assert {plan.kbit_ckpt for plan in plans.values()} == {None}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"quant": "int8"}, "`quant` is given without QLoRA"),
        ({"kbit_ckpt": True}, "`kbit_ckpt` is given without QLoRA"),
        ({"quant_load": "in_place"}, "`quant_load` is given without QLoRA"),
        ({"quant_load": "later", "use_qlora": True}, "`quant_load` cannot be `later`"),
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


def test_a_prediction_says_that_outliers_are_left_out(shallow: Callable[..., str]) -> None:
    name = shallow("gpt2")
    prediction = predict(
        TrainingPlan(model_name=name, use_qlora=True, quant="int8", batch_size=1, seq_len=32)
    )

    assert any("no activation reaches 6.0" in line for line in prediction.assumptions)
    assert prediction.coverage["unmodelled"] == {}
