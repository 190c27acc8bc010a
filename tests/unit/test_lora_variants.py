"""What peft offers beside plain LoRA, through a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from memest.errors import PlanError
from memest.estimator.predict import predict
from memest.plan import TrainingPlan
from memest.report import Prediction

LAYERS, WIDTH, VOCABULARY, RANK = 2, 768, 50257, 8  # gpt2, except its number of layers
QKV, MLP = 3 * WIDTH, 4 * WIDTH
OF_QKV = LAYERS * RANK * (WIDTH + QKV)  # c_attn holds q and v


@pytest.fixture(scope="module")
def predicted(shallow: Callable[..., str]) -> Callable[..., Prediction]:
    """`predicted(**values)`: the prediction of a plan with LoRA."""

    def made(layers: int = LAYERS, **values: Any) -> Prediction:
        keys = {"use_lora": True, "lora_r": RANK, "batch_size": 1, "seq_len": 32, **values}
        return predict(TrainingPlan.from_dict({"model_name": shallow("gpt2", layers), **keys}))

    return made


@pytest.fixture(scope="module")
def num_trained(predicted: Callable[..., Prediction]) -> Callable[..., int]:
    """`num_trained(**values)`: the number of parameters that such a plan trains."""
    return lambda **values: int(predicted(**values).model["num_trainable_params"])


def test_all_linear_adapts_every_layer_but_the_head(num_trained: Callable[..., int]) -> None:
    attention = (WIDTH + QKV) + (WIDTH + WIDTH)
    mlp = (WIDTH + MLP) + (MLP + WIDTH)

    found = num_trained(lora_target_modules="all-linear")

    assert found == LAYERS * RANK * (attention + mlp)


def test_dora_trains_a_magnitude_per_output(num_trained: Callable[..., int]) -> None:
    assert num_trained(use_dora=True) == OF_QKV + LAYERS * QKV


def test_dora_keeps_the_weight_it_dequantises_until_the_backward(
    predicted: Callable[..., Prediction],
) -> None:
    """Behind a dropout it multiplies by the whole weight once more, and keeps it in fp32, the
    dtype of its input; without quantisation that weight is the parameter itself in another dtype.
    """
    layers = 12  # so many that they outweigh what else differs
    plain, dora = (
        predicted(layers, use_qlora=True, kbit_ckpt=False, use_dora=flag) for flag in (False, True)
    )

    grown = dora.phases[1].activations_bytes - plain.phases[1].activations_bytes
    assert grown > layers * QKV * WIDTH * 2


def test_rslora_changes_no_byte(predicted: Callable[..., Prediction]) -> None:
    plain, scaled = (predicted(use_rslora=flag) for flag in (False, True))

    assert scaled.phases == plain.phases


def test_a_saved_module_is_copied_and_trained_whole(predicted: Callable[..., Prediction]) -> None:
    plain, saved = predicted(), predicted(lora_modules_to_save=["lm_head"])

    copy = VOCABULARY * WIDTH
    assert saved.model["num_trainable_params"] == OF_QKV + copy
    before = [p.phases[0].params_bytes for p in (plain, saved)]
    assert before[1] - before[0] == 2 * copy


def test_a_saved_module_that_is_not_there_is_refused(
    predicted: Callable[..., Prediction],
) -> None:
    with pytest.raises(PlanError, match=re.escape("`lora_modules_to_save` names `classifier`")):
        predicted(lora_modules_to_save=["classifier"])


def test_all_biases_or_those_of_adapted_layers_train(num_trained: Callable[..., int]) -> None:
    """Per layer: c_attn, c_proj, c_fc, c_proj of the MLP, two norms; and the last norm."""
    per_layer = QKV + WIDTH + MLP + WIDTH + 2 * WIDTH

    assert num_trained(lora_bias="all") == OF_QKV + LAYERS * per_layer + WIDTH
    assert num_trained(lora_bias="lora_only") == OF_QKV + LAYERS * QKV


@pytest.mark.parametrize(
    "values",
    [
        {"lora_modules_to_save": ["lm_head"]},
        {"lora_bias": "all"},
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_target_modules": "all-linear"},
    ],
)
def test_keys_of_adapters_need_adapters(values: dict[str, object]) -> None:
    (key,) = values
    with pytest.raises(PlanError, match=re.escape(f"`{key}` is given for a full fine-tune")):
        TrainingPlan.from_dict({"model_name": "gpt2", **values})


def test_all_linear_stands_alone() -> None:
    with pytest.raises(PlanError, match=re.escape("names `all-linear` and other modules")):
        TrainingPlan(model_name="gpt2", use_lora=True, lora_target_modules=("all-linear", "c_attn"))


def test_an_unknown_bias_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("`lora_bias` cannot be `some`")):
        TrainingPlan(model_name="gpt2", use_lora=True, lora_bias="some")


def test_flash_attention_2_takes_16_bit_precisions_alone() -> None:
    with pytest.raises(PlanError, match="`flash_attention_2` takes fp16 or bf16") as raised:
        TrainingPlan(
            model_name="gpt2", precision="32-true", attn_implementation="flash_attention_2"
        )
    assert "`attn_implementation: sdpa`" in raised.value.hint
