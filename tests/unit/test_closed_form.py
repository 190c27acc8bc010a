"""The textbook's formula beside the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memest.estimator.predict import predict
from memest.plan import TrainingPlan
from memest.report import ClosedForm, Prediction
from memest.report.text import render_text

# s tokens, b samples, h width, a heads
S, B, H, A = 96, 2, 768, 12


def predicted(model: str, **values: Any) -> Prediction:
    return predict(TrainingPlan(model_name=model, **{"seq_len": S, "batch_size": B, **values}))


def found(model: str, **values: Any) -> ClosedForm:
    form = predicted(model, **values).closed_form
    assert form is not None
    return form


def rows(form: ClosedForm) -> dict[str, int]:
    return {t.kind: t.num_bytes for t in form.differences}


def test_the_textbook_holds_for_bert_with_its_own_attention() -> None:
    """BERT is the layer of the textbook: dropout everywhere, GELU, 4h; two norms keep 8 bytes a
    token of statistics more each, and some float32 of one token or head beside.
    """
    form = found("bert-base-uncased", attn_implementation="eager")

    assert form.textbook_bytes == 34 * S * B * H + 5 * A * S**2 * B
    assert form.num_layers == 12
    assert list(rows(form)) == ["this model's code"]
    assert 0 < rows(form)["this model's code"] < form.textbook_bytes / 500


def test_fused_attention_takes_the_matrix_away() -> None:
    form = found("bert-base-uncased", padded=False)

    assert rows(form)["fused attention"] == -5 * A * S**2 * B
    # left: the sums of the softmax, fp32 per head and token, and the norms' statistics
    assert 4 * A * S * B <= rows(form)["this model's code"] < 34 * S * B * H / 100


def test_relu_needs_its_output_alone() -> None:
    form = found("opt-125m")

    assert rows(form)["ReLU"] == -8 * S * B * H


def test_llama_layers_are_explained_by_their_config() -> None:
    """No dropout, key heads shared, gate, RMS norms in Python: h 576, f 1536, a 9, k 3, d 64."""
    form = found("SmolLM2-135M", batch_size=1)

    tokens, h, f = S, 576, 1536
    explained = rows(form)
    left = explained.pop("this model's code")
    assert explained == {
        "fused attention": -5 * 9 * S * tokens,
        "no dropout": -2 * tokens * h,
        "grouped heads": -4 * tokens * 64 * (9 - 3),
        "gated MLP": tokens * (8 * f - 16 * h),
        "RMS norms": 8 * tokens * h,
    }
    assert abs(left) < form.traced_bytes / 50


def test_recomputed_layers_keep_their_inputs() -> None:
    form = found("gpt2", act_ckpt=True)

    assert form.formula == "2 s b h"
    assert form.textbook_bytes == 2 * S * B * H == form.traced_bytes


def test_autocast_keeps_a_copy_of_every_matrix() -> None:
    """Q, K, V and the projection are h x h, the MLP's two h x 4h."""
    form = found("bert-base-uncased", precision="bf16-mixed")

    assert rows(form)["autocast"] == 2 * 12 * H * H


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("gpt2", {"precision": "32-true"}),
        ("gpt2", {"use_lora": True}),
        ("gpt2", {"freeze": ("transformer.wte.*",)}),
        ("t5-small", {}),
        ("vit-base-patch16-224", {"seq_len": None}),
    ],
)
def test_it_is_left_out_where_it_does_not_apply(
    model: str, values: dict[str, Any], shallow: Callable[..., str]
) -> None:
    prediction = predicted(shallow(model), **values)

    assert prediction.closed_form is None
    assert "textbook" not in render_text(prediction)


def test_the_rows_add_up_and_are_printed() -> None:
    prediction = predicted("gpt2")
    form = prediction.closed_form
    assert form is not None

    text = render_text(prediction)

    assert form.textbook_bytes + sum(rows(form).values()) == form.traced_bytes
    assert "Korthikanti et al. 2022" in text
    assert f"34 s b h + 5 a s^2 b, s = {S}, b = {B}, h = {H}, a = {A}" in text
    assert prediction.to_dict()["closed_form"]["traced_bytes"] == form.traced_bytes
