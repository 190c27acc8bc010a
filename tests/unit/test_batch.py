"""One micro-batch: shapes, values, padding, bytes; and that each model takes its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from memest.errors import PlanError, UnsupportedError
from memest.models_meta.batch import IGNORE_INDEX, Batch, make_batch
from memest.models_meta.build import build_model
from memest.models_meta.registry import parse_config, resolve_config

B, T = 3, 11


def batch_of(name: str, **changes: Any) -> Batch:
    built = build_model(resolve_config(name), dtype=torch.bfloat16)
    return make_batch(built.module, **{"batch_size": B, "seq_len": T} | changes)


def shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(v.shape) for name, v in batch.inputs.items() if isinstance(v, Tensor)}


def num_bytes(batch: Batch) -> int:
    return sum(v.nbytes for v in batch.inputs.values() if isinstance(v, Tensor))


def test_text_is_ids_mask_and_labels() -> None:
    batch = batch_of("gpt2")

    assert shapes(batch) == {
        "input_ids": (B, T), "attention_mask": (B, T), "labels": (B, T)
    }  # fmt: skip
    assert batch.inputs["attention_mask"].sum() == B * T
    assert torch.equal(batch.inputs["labels"], batch.inputs["input_ids"])
    assert num_bytes(batch) == 3 * B * T * 8
    assert batch.loss_output == "loss"


def test_labels_are_a_tensor_of_their_own() -> None:
    """They are moved to the GPU beside the ids, so they take their own memory there."""
    kwargs = batch_of("gpt2").inputs

    assert kwargs["labels"].data_ptr() != kwargs["input_ids"].data_ptr()


def test_the_same_request_gives_the_same_ids() -> None:
    assert torch.equal(batch_of("gpt2").inputs["input_ids"], batch_of("gpt2").inputs["input_ids"])


@pytest.mark.parametrize("name", ["gpt2", "opt-125m", "roberta-large", "t5-small"])
def test_a_padded_batch_masks_the_last_quarter_of_every_row_but_the_first(name: str) -> None:
    batch = batch_of(name, padded=True)
    mask = batch.inputs["attention_mask"]

    assert mask.tolist() == [[1] * T, [1] * (T - 2) + [0] * 2, [1] * (T - 2) + [0] * 2]
    assert torch.equal(batch.inputs["labels"], batch.inputs["input_ids"])


def test_one_row_is_never_padded() -> None:
    assert batch_of("gpt2", batch_size=1, padded=True).inputs["attention_mask"].sum() == T


def test_padding_holds_the_padding_id_and_the_rest_does_not() -> None:
    """RoBERTa counts positions by comparing ids with its padding id, which is 1."""
    ids = batch_of("roberta-large", padded=True).inputs["input_ids"]

    assert (ids == 1).sum() == 2 * 2
    assert (ids[1:, -2:] == 1).all()


def test_ids_are_in_the_vocabulary_even_when_every_id_is_special() -> None:
    raw = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 4, "n_head": 2,
        "n_layer": 1, "vocab_size": 2, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    built = build_model(parse_config(raw, name="x"), dtype=torch.float32)

    ids = make_batch(built.module, batch_size=B, seq_len=T).inputs["input_ids"]

    assert set(ids.flatten().tolist()) <= {0, 1}


def test_integers_are_real_and_floats_are_meta() -> None:
    batch = batch_of("blip2-opt-2.7b")

    assert {name: not tensor.is_meta for name, tensor in batch.inputs.items()} == {
        "pixel_values": False, "input_ids": True, "attention_mask": True, "labels": True
    }  # fmt: skip


def test_blip2_sees_an_image_and_no_placeholder() -> None:
    batch = batch_of("blip2-opt-2.7b")

    assert batch.inputs["pixel_values"].shape == (B, 3, 224, 224)
    assert batch.inputs["pixel_values"].dtype == torch.float32
    assert (batch.inputs["input_ids"] == 50265).sum() == 0
    assert num_bytes(batch) == 4 * B * 3 * 224 * 224 + 3 * 8 * B * T
    assert any("no image placeholders" in note for note in batch.notes)


def test_another_image_size_is_interpolated_where_the_model_can() -> None:
    batch = batch_of("blip2-opt-2.7b", image_size=364)

    assert batch.inputs["interpolate_pos_encoding"] is True
    assert (batch.image_size, batch.inputs["pixel_values"].shape[-1]) == (364, 364)


def test_another_image_size_is_a_plan_error_where_the_model_cannot() -> None:
    with pytest.raises(PlanError, match=re.escape("takes images of 336 pixels, not 224")):
        batch_of("llava-1.5-7b-hf", seq_len=700, image_size=224)


def test_llava_has_a_token_for_each_patch_within_seq_len() -> None:
    """336 / 14 = 24 patches a side, 576 in all."""
    batch = batch_of("llava-1.5-7b-hf", seq_len=600)

    assert batch.inputs["input_ids"].shape == (B, 600)
    assert (batch.inputs["input_ids"] == 32000).sum(dim=1).tolist() == [576] * B


def test_text_shorter_than_the_image_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match=re.escape("`seq_len` 50 has no room for text")) as raised:
        batch_of("llava-1.5-7b-hf", seq_len=50)

    assert "more than 576" in raised.value.hint


def test_padding_spares_the_image_tokens() -> None:
    """A quarter of 580 is 145, but only 4 tokens are text."""
    kwargs = batch_of("llava-1.5-7b-hf", seq_len=580, padded=True).inputs

    assert (kwargs["attention_mask"] == 0).sum(dim=1).tolist() == [0, 4, 4]
    assert (kwargs["input_ids"] == 32000).sum(dim=1).tolist() == [576] * B


def test_gemma3_has_256_image_tokens_between_its_marks() -> None:
    kwargs = batch_of("gemma-3-4b-it", seq_len=300).inputs

    assert kwargs["pixel_values"].shape == (B, 3, 896, 896)
    assert kwargs["input_ids"][0, [0, 1, 256, 257]].tolist() == [255999, 262144, 262144, 256000]
    assert kwargs["token_type_ids"].sum(dim=1).tolist() == [256] * B


def test_qwen2_vl_has_flat_patches_and_their_grid() -> None:
    """56 / 14 = 4 patches a side, 16 an image, merged 2 x 2 to 4 tokens; 3 x 2 x 14 x 14 values."""
    batch = batch_of("Qwen2-VL-7B-Instruct", image_size=56)
    kwargs = batch.inputs

    assert kwargs["pixel_values"].shape == (B * 16, 3 * 2 * 14 * 14)
    assert kwargs["image_grid_thw"].tolist() == [[1, 4, 4]] * B
    assert kwargs["input_ids"][0, [0, 5]].tolist() == [151652, 151653]
    assert (kwargs["input_ids"] == 151655).sum(dim=1).tolist() == [4] * B
    assert kwargs["mm_token_type_ids"].sum(dim=1).tolist() == [4] * B


def test_qwen2_vl_takes_multiples_of_28_pixels() -> None:
    with pytest.raises(PlanError, match="no multiple of 28"):
        batch_of("Qwen2-VL-7B-Instruct", image_size=100)


def test_images_have_class_labels() -> None:
    batch = batch_of("vit-base-patch16-224")

    assert shapes(batch) == {"pixel_values": (B, 3, 224, 224), "labels": (B,)}


def test_speech_is_thirty_seconds_and_labels() -> None:
    batch = batch_of("whisper-large-v3", padded=True)

    assert shapes(batch) == {"input_features": (B, 128, 3000), "labels": (B, T)}
    assert (batch.inputs["labels"] == IGNORE_INDEX).sum(dim=1).tolist() == [0, 2, 2]


def test_clip_computes_its_own_loss() -> None:
    batch = batch_of("clip-vit-large-patch14")

    assert batch.inputs["return_loss"] is True
    assert list(shapes(batch)) == ["input_ids", "attention_mask", "pixel_values"]


def test_a_model_without_a_head_is_differentiated_through_its_output_and_says_so() -> None:
    batch = batch_of("dinov2-large")

    assert batch.loss_output == "last_hidden_state"
    assert any("has no loss" in note for note in batch.notes)


@pytest.mark.parametrize(
    ("cls", "labels"),
    [
        ("BertForSequenceClassification", (B,)),
        ("BertForTokenClassification", (B, T)),
        ("BertForMaskedLM", (B, T)),
    ],
)
def test_a_head_has_the_labels_of_its_task(cls: str, labels: tuple[int, ...]) -> None:
    raw = {"architectures": [cls], "model_type": "bert", "hidden_size": 8, "num_labels": 5,
           "num_attention_heads": 2, "num_hidden_layers": 1}  # fmt: skip
    built = build_model(parse_config(raw, name="x"), dtype=torch.float32)

    value = make_batch(built.module, batch_size=B, seq_len=T).inputs["labels"]

    assert tuple(value.shape) == labels
    assert value.max() < (30522 if cls == "BertForMaskedLM" else 5)


def test_inputs_that_memest_does_not_know_are_unsupported() -> None:
    raw = {"architectures": ["Wav2Vec2ForCTC"], "model_type": "wav2vec2", "hidden_size": 16,
           "num_attention_heads": 2, "num_hidden_layers": 1}  # fmt: skip
    built = build_model(parse_config(raw, name="x"), dtype=torch.float32)

    with pytest.raises(UnsupportedError, match="has no recipe for the inputs of `Wav2Vec2ForCTC`"):
        make_batch(built.module, batch_size=B, seq_len=T)


def test_sizes_below_one_are_plan_errors() -> None:
    for name in ("batch_size", "seq_len"):
        with pytest.raises(PlanError, match=f"`{name}` is 0"):
            batch_of("gpt2", **{name: 0})


@pytest.mark.parametrize(
    "raw",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 12,
         "intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 3,
         "num_hidden_layers": 2, "vocab_size": 31},
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 12,
         "d_ff": 20, "d_kv": 4, "num_heads": 3, "num_layers": 2, "vocab_size": 31,
         "decoder_start_token_id": 0},
        {"architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 12,
         "intermediate_size": 20, "num_attention_heads": 3, "num_hidden_layers": 2,
         "image_size": 32, "patch_size": 16, "num_labels": 5},
        {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
         "d_model": 12, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
         "decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20,
         "vocab_size": 60000, "max_source_positions": 15},
    ],
    ids=lambda raw: raw["model_type"],
)  # fmt: skip
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_computes_a_finite_loss_and_gradients_from_its_batch(
    raw: dict[str, Any], padded: bool
) -> None:
    """On the CPU with real values, every trainable parameter gets a gradient."""
    built = build_model(parse_config(raw, name="x"), dtype=torch.float32, device="cpu")
    for tensor in [*built.module.parameters(), *built.module.buffers()]:
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.02)
    batch = make_batch(built.module, batch_size=B, seq_len=T, padded=padded)
    kwargs: dict[str, Any] = dict(batch.inputs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            kwargs[name] = torch.randn(value.shape)

    loss = built.module(**kwargs).loss
    loss.backward()

    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in built.module.parameters() if p.requires_grad)
