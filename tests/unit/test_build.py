"""The module on the meta device: its class, count, dtype, attention and freezing."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memest.errors import PlanError
from memest.models_meta.build import (
    BuiltModel,
    build_model,
    default_image_size,
    freeze,
    num_positions,
)
from memest.models_meta.registry import list_models, parse_config, resolve_config

H, F, L, V = 12, 20, 2, 31
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": F,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": L,
    "vocab_size": V,
    "tie_word_embeddings": False,
}


def tiny(**changes: Any) -> BuiltModel:
    return build_model(parse_config(TINY | changes, name="tiny"), dtype=torch.bfloat16)


def num_params(built: BuiltModel) -> int:
    """A tied tensor counts once."""
    return sum(parameter.numel() for parameter in built.module.parameters())


def test_a_llama_has_the_parameters_that_its_sizes_say() -> None:
    """Per layer 4 attention and 3 MLP matrices and 2 norms; two vocabulary matrices, one norm."""
    per_layer = 4 * H * H + 3 * H * F + 2 * H

    assert num_params(tiny()) == L * per_layer + 2 * V * H + H


def test_a_tied_head_counts_once() -> None:
    assert num_params(tiny()) - num_params(tiny(tie_word_embeddings=True)) == V * H


def test_every_parameter_has_the_dtype_and_nothing_has_memory() -> None:
    """Even where the config names another dtype for a sub-model."""
    built = build_model(resolve_config("blip2-opt-2.7b"), dtype=torch.bfloat16)

    assert {p.dtype for p in built.module.parameters()} == {torch.bfloat16}
    tensors = [*built.module.parameters(), *built.module.buffers()]
    assert {t.device.type for t in tensors} == {"meta"}
    assert built.module.training


def test_building_leaves_the_given_config_alone() -> None:
    config = parse_config(TINY, name="tiny")
    before = config.pretrained.to_dict()

    build_model(config, dtype=torch.float16, attn_implementation="eager")

    assert config.pretrained.to_dict() == before


@pytest.mark.parametrize(
    "name", ["bert-base-uncased", "t5-small", "gpt2", "clip-vit-large-patch14"]
)
def test_a_bundled_model_has_exactly_the_recorded_parameters(name: str) -> None:
    config = resolve_config(name)

    assert config.entry is not None
    assert num_params(build_model(config, dtype=torch.float32)) == config.entry.num_params


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in list_models()])
def test_every_bundled_model_builds_with_exactly_the_recorded_parameters(name: str) -> None:
    config = resolve_config(name)
    built = build_model(config, dtype=torch.bfloat16)

    assert config.entry is not None
    assert num_params(built) == config.entry.num_params


def test_seventy_billion_parameters_take_seconds() -> None:
    config = resolve_config("Llama-3.1-70B")
    started = time.process_time()

    assert num_params(build_model(config, dtype=torch.bfloat16)) == 70_553_706_496
    assert time.process_time() - started < 5


def test_a_tied_t5_head_is_told_with_the_difference_to_the_checkpoint() -> None:
    """flan-t5-xxl: 32128 x 4096 weights that transformers 5 shares with the embeddings."""
    notes = build_model(resolve_config("blip2-flan-t5-xxl"), dtype=torch.bfloat16).notes

    assert 32128 * 4096 == 131_596_288
    assert any("tied" in note and "131,596,288 more" in note for note in notes)


def test_attention_is_sdpa_unless_eager_is_asked() -> None:
    config = parse_config(TINY, name="tiny")

    for asked, got in ((None, "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")):
        built = build_model(config, dtype=torch.float32, attn_implementation=asked)
        assert (built.module.config._attn_implementation, built.notes) == (got, ())


def test_a_model_without_sdpa_falls_back_to_eager_and_says_so() -> None:
    config = resolve_config("bloom-560m")

    for asked in (None, "sdpa"):
        built = build_model(config, dtype=torch.float32, attn_implementation=asked)
        assert built.module.config._attn_implementation == "eager"
        assert any("no sdpa" in note and "BloomForCausalLM" in note for note in built.notes)


def test_without_architectures_the_class_follows_from_the_family() -> None:
    built = tiny(architectures=None)

    assert type(built.module).__name__ == "LlamaForCausalLM"
    assert any("`architectures` is missing" in note for note in built.notes)


def test_sizes_that_do_not_go_together_are_a_plan_error() -> None:
    with pytest.raises(PlanError, match="cannot be built from the config of `tiny`"):
        tiny(vocab_size=-7)


REMOTE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
class XConfig(PreTrainedConfig):
    model_type = "memest-x"
class XModel(PreTrainedModel):
    config_class = XConfig
    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(5, 3)
        self.post_init()
"""


def test_trusted_code_beside_the_config_makes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "code_x.py").write_text(REMOTE)
    (tmp_path / "config.json").write_text(
        '{"model_type": "memest-x", "auto_map":'
        ' {"AutoConfig": "code_x.XConfig", "AutoModel": "code_x.XModel"}}'
    )

    config = resolve_config(str(tmp_path), trust_remote_code=True)
    built = build_model(config, dtype=torch.float32)

    assert num_params(built) == 5 * 3
    assert any("code of" in note for note in built.notes)


@pytest.mark.parametrize(
    ("name", "positions", "image_size"),
    [
        ("gpt2", 1024, None),
        ("t5-small", None, None),
        ("bloom-560m", None, None),
        ("roberta-large", 512, None),
        ("whisper-small", 448, None),
        ("blip2-opt-2.7b", 2048, 224),
        ("blip2-flan-t5-xl", None, 224),
        ("clip-vit-large-patch14", 77, 224),
        ("llava-1.5-7b-hf", 4096, 336),
        ("Qwen2-VL-7B-Instruct", 32768, 448),
        ("vit-base-patch16-224", None, 224),
    ],
)
def test_positions_and_image_size_of_a_config(
    name: str, positions: int | None, image_size: int | None
) -> None:
    pretrained = resolve_config(name).pretrained

    assert num_positions(pretrained) == positions
    assert default_image_size(pretrained) == image_size


def test_freezing_matches_globs_and_whole_modules() -> None:
    """One layer by its name, the MLPs of the other by a glob; nothing is counted twice."""
    model = tiny().module
    per_layer = 4 * H * H + 3 * H * F + 2 * H

    assert freeze(model, ["model.layers.0", "*.mlp.*"]) == per_layer + 3 * H * F
    assert not model.get_parameter("model.layers.0.self_attn.q_proj.weight").requires_grad
    assert not model.get_parameter("model.layers.1.mlp.up_proj.weight").requires_grad
    assert model.get_parameter("model.layers.1.self_attn.q_proj.weight").requires_grad


def test_a_tied_parameter_freezes_by_either_name() -> None:
    model = tiny(tie_word_embeddings=True).module

    assert freeze(model, ["lm_head"]) == V * H
    assert not model.get_parameter("model.embed_tokens.weight").requires_grad


def test_a_pattern_that_matches_nothing_lists_the_modules() -> None:
    model = nn.ModuleDict({"vision_model": nn.Linear(2, 3), "head": nn.Linear(3, 5)})

    with pytest.raises(PlanError, match=re.escape("`vison_model` matches no parameter")) as raised:
        freeze(model, ["vison_model"])

    assert raised.value.hint == ("its modules are `vision_model`, `head`; closest: `vision_model`")
