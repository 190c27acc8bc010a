"""Whatever a config.json holds, the answer is a config or an error with a hint, never a crash."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memest.errors import MemestError
from memest.models_meta.batch import make_batch
from memest.models_meta.build import build_model, default_image_size, num_positions
from memest.models_meta.registry import parse_config, resolve_config

VALID: list[dict[str, Any]] = [
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 12,
     "intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 3,
     "num_hidden_layers": 2, "vocab_size": 31, "max_position_embeddings": 64, "hidden_act": "silu",
     "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
     "tie_word_embeddings": False, "torch_dtype": "float16", "pad_token_id": 0},
    {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "hidden_size": 12,
     "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 31, "num_labels": 3,
     "id2label": {"0": "a", "1": "b", "2": "c"}, "pad_token_id": 0},
    {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
     "image_token_index": 30, "vision_feature_layer": -1,
     "text_config": {"model_type": "llama", "hidden_size": 12, "intermediate_size": 20,
                     "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 31},
     "vision_config": {"model_type": "clip_vision_model", "hidden_size": 12, "image_size": 28,
                       "patch_size": 14, "intermediate_size": 20, "num_attention_heads": 3,
                       "num_hidden_layers": 1}},
]  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 40)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama", "bert", "t5", "clip", "AutoModel", "BertModel", "eager", "gelu"])
)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
keys = st.sampled_from(
    sorted(
        {key for config in VALID for key in config}
        | {"auto_map", "quantization_config", "num_experts", "layer_types", "head_dim", "dtype",
           "attn_implementation", "_attn_implementation", "gradient_checkpointing", "pruned_heads",
           "is_decoder", "is_encoder_decoder", "return_dict", "sliding_window", "attention_bias"}
    )
)  # fmt: skip


@contextmanager
def hinted() -> Iterator[None]:
    """Lets a `MemestError` pass when it says what to do about it."""
    try:
        yield
    except MemestError as error:
        if not error.hint:
            raise


fuzz = settings(deadline=None, suppress_health_check=list(HealthCheck))


@fuzz
@given(text=json_values.map(json.dumps) | st.text(max_size=40))
def test_any_text_in_a_file_is_answered(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        with hinted():
            resolve_config(folder)


@fuzz
@given(content=st.binary(max_size=60))
def test_any_bytes_in_a_file_are_answered(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(content)
        with hinted():
            resolve_config(folder)


@settings(fuzz, max_examples=150)
@given(
    valid=st.sampled_from(VALID),
    changes=st.dictionaries(keys, json_values, max_size=3),
    inner=st.dictionaries(keys, json_values, max_size=2),
    removed=st.sets(keys, max_size=2),
)
def test_any_change_to_a_valid_config_builds_or_is_answered(
    valid: dict[str, Any], changes: dict[str, Any], inner: dict[str, Any], removed: set[str]
) -> None:
    raw = json.loads(json.dumps(valid)) | changes
    for part in ("text_config", "vision_config"):
        if isinstance(raw.get(part), dict):
            raw[part] |= inner
    raw = {key: value for key, value in raw.items() if key not in removed}

    with hinted():
        config = parse_config(raw, name="fuzz")
        num_positions(config.pretrained)
        default_image_size(config.pretrained)
        built = build_model(config, dtype=torch.bfloat16)
        make_batch(built.module, batch_size=2, seq_len=9, padded=True)
