"""Names, paths and Hub ids to configs; every wrong one to an error with a hint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memest.errors import PlanError, UnknownModelError, UnsupportedError
from memest.models_meta import registry
from memest.models_meta.registry import find_entry, list_models, parse_config, resolve_config

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 31,
}
NAMES = [entry.name for entry in list_models()]


def write(folder: Path, value: object) -> Path:
    path = folder / "config.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_listing_the_models_imports_neither_torch_nor_transformers() -> None:
    """`memest models` answers at once."""
    code = (
        "import sys; from memest.models_meta.registry import list_models; assert list_models();"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_every_bundled_file_says_where_it_comes_from(name: str) -> None:
    data = json.loads((registry.CONFIG_DIR / f"{name}.json").read_text())

    assert set(data) == {
        "hub_id", "aliases", "family", "modality", "num_params", "num_params_published",
        "source", "note", "config",
    }  # fmt: skip
    assert data["modality"] in ("text", "image", "image-text", "audio")
    assert data["source"]["count"]
    assert data["source"]["config"]
    assert len(data["config"]["architectures"]) == 1
    assert data["num_params"] == data["num_params_published"] or data["note"]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("blip2-flan-t5-xxl", "blip2-flan-t5-xxl"),
        ("Salesforce/blip2-flan-t5-xxl", "blip2-flan-t5-xxl"),
        ("SALESFORCE/BLIP2-FLAN-T5-XXL", "blip2-flan-t5-xxl"),
        ("tinyllama-1.1b", "TinyLlama-1.1B-Chat-v1.0"),
        ("openllama-7b", "open_llama_7b"),
        ("open-llama-7b", "open_llama_7b"),
        ("llama-2-7b", "Llama-2-7b-hf"),
        ("llama-3-8b", "Meta-Llama-3-8B"),
        ("llama-3.1-8b", "Llama-3.1-8B"),
        ("mistral-7b", "Mistral-7B-v0.1"),
        (" gpt2 ", "gpt2"),
    ],
)
def test_a_model_goes_by_the_names_that_people_type(typed: str, name: str) -> None:
    entry = find_entry(typed)

    assert entry is not None
    assert entry.name == name


def test_a_separator_between_digits_counts() -> None:
    """`llama-3-18b` is not `llama-31-8b`, so neither may become the other by folding."""
    assert find_entry("llama-31-8b") is None
    assert find_entry("llama-3-18b") is None


@pytest.mark.parametrize("entry", list_models(), ids=NAMES)
def test_every_name_of_a_bundled_model_finds_it(entry: registry.ModelEntry) -> None:
    for name in (entry.name, entry.hub_id, *entry.aliases):
        assert find_entry(name) is entry


def test_a_bundled_name_resolves_to_its_config_and_entry() -> None:
    config = resolve_config("openllama-7b")

    assert (config.name, config.source) == ("open_llama_7b", "bundled")
    assert (config.model_type, config.architecture) == ("llama", "LlamaForCausalLM")
    assert config.pretrained.hidden_size == 4096
    assert config.entry is find_entry("open_llama_7b")


def test_a_folder_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    path = write(tmp_path, TINY)

    for given in (tmp_path, path):
        config = resolve_config(str(given))
        assert config.pretrained.hidden_size == 12
        assert (config.name, config.entry) == (tmp_path.name, None)


def test_an_unknown_name_lists_the_three_closest() -> None:
    with pytest.raises(UnknownModelError, match=re.escape("`lama-3.1-8b` is no bundled")) as raised:
        resolve_config("lama-3.1-8b")

    assert raised.value.hint.startswith("closest: `Llama-3.1-8B`, ")
    assert raised.value.hint.count("`") == 2 * 3 + 2
    assert raised.value.hint.endswith("`memest models` lists all")


def test_a_hub_id_without_a_connection_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_hub_is_reachable", lambda hub_id: False)

    with pytest.raises(UnknownModelError, match="the Hub cannot be reached") as raised:
        resolve_config("memest-tests/no-such-model")

    assert "config.json" in raised.value.hint


def test_of_a_hub_repository_only_the_config_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []

    def download(repo: str, filename: str, **_: object) -> str:
        asked.append((repo, filename))
        return str(write(tmp_path, TINY))

    monkeypatch.setattr(registry, "_hub_is_reachable", lambda hub_id: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    config = resolve_config("memest-tests/tiny")

    assert asked == [("memest-tests/tiny", "config.json")]
    assert (config.name, config.source) == ("tiny", "hub:memest-tests/tiny")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("", "is not JSON"),
        ([], "is a JSON array, not an object"),
        ("null", "is a JSON null, not an object"),
        ({}, "lacks `model_type`"),
        (TINY | {"model_type": 3}, "has `model_type` 3"),
        (TINY | {"model_type": "lama"}, "`model_type` `lama`"),
        (TINY | {"architectures": "LlamaForCausalLM"}, "not a list of class names"),
        (TINY | {"architectures": ["LamaForCausalLM"]}, "which is no model class"),
        (TINY | {"architectures": ["AutoConfig"]}, "which is no model class"),
        (TINY | {"architectures": ["BertForMaskedLM"]}, "does not take a `llama` config"),
        (TINY | {"num_hidden_layers": 10**9}, "`num_hidden_layers`"),
        (TINY | {"num_hidden_layers": 1e300}, "`num_hidden_layers`"),
        (TINY | {"num_labels": 10**9}, "`num_labels`"),
        (TINY | {"hidden_size": "wide"}, "transformers cannot read the config"),
    ],
)
def test_a_wrong_config_is_a_plan_error_that_says_what(
    tmp_path: Path, value: object, message: str
) -> None:
    write(tmp_path, value)

    with pytest.raises(PlanError, match=re.escape(message)) as raised:
        resolve_config(str(tmp_path))

    assert raised.value.hint


def test_an_unknown_family_names_the_closest(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as raised:
        parse_config(TINY | {"model_type": "lama"}, name="x")

    assert "`llama`" in raised.value.hint


def test_a_missing_file_and_an_empty_folder_are_plan_errors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no file"):
        resolve_config(str(tmp_path / "absent.json"))
    with pytest.raises(PlanError, match=re.escape("has no config.json")):
        resolve_config(str(tmp_path))


def test_a_file_that_is_not_text_is_a_plan_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x80")

    with pytest.raises(PlanError, match="is not text"):
        resolve_config(str(tmp_path))


def test_a_name_that_no_path_can_have_is_an_unknown_model() -> None:
    for name in ("a" * 10_000, "nul\0byte", ""):
        with pytest.raises(UnknownModelError):
            resolve_config(name)


def test_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """`auto_map` names Python files beside the config, which would be run."""
    write(tmp_path, TINY | {"auto_map": {"AutoConfig": "configuration_x.XConfig"}})

    with pytest.raises(UnsupportedError, match=re.escape("`auto_map`")) as raised:
        resolve_config(str(tmp_path))

    assert "trust_remote_code" in raised.value.hint


def test_a_quantised_checkpoint_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=re.escape("`quantization_config`")):
        parse_config(TINY | {"quantization_config": {"quant_method": "gptq"}}, name="x")
