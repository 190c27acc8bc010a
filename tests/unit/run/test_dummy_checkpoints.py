"""Stand-in checkpoints: kilobytes that load as the model would, and that overwrite nothing real."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer

from memest.cli import main
from memest.errors import PlanError, UnknownModelError, UnsupportedError
from memest.models_meta.registry import list_models, resolve_config
from memest.run import dummy_checkpoints
from memest.run.dummy_checkpoints import (
    MARKER,
    Vocabulary,
    vocabulary_of,
    write_checkpoint,
    write_tokenizer,
)
from memest.run.session import virtual_gpu

PROSE = (
    "Give three tips for staying healthy, and explain why they help most people. Eat a balanced "
    "diet with plenty of fruit and vegetables, because they hold the vitamins that your body "
    "needs. Farmers in the valley often celebrate the harvest with music and a large dinner."
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_checkpoint("bert-base-uncased", folder, layout="hf")
    return folder


def test_a_stand_in_is_kilobytes_and_says_what_it_is(bert: Path) -> None:
    assert sum(path.stat().st_size for path in bert.iterdir()) < 1 << 20
    text = (bert / MARKER).read_text()
    assert text.startswith("# Not a model: a dummy checkpoint written by memest\n")
    assert "`memest checkpoint bert-base-uncased --format hf`" in text
    assert "- pytorch_model.bin\n" in text


def test_plain_torch_reads_zeros_of_the_right_shapes(bert: Path) -> None:
    weights = torch.load(bert / "pytorch_model.bin", weights_only=True)

    table = weights["bert.embeddings.word_embeddings.weight"]
    assert (table.shape, table.dtype, table.any().item()) == ((30522, 768), torch.float32, False)
    assert table.untyped_storage().nbytes() == 4


def test_from_pretrained_takes_on_the_gpu_what_the_model_takes(bert: Path) -> None:
    from transformers import AutoModelForMaskedLM

    with virtual_gpu("a100-40gb") as gpu:
        model = AutoModelForMaskedLM.from_pretrained(bert, dtype=torch.bfloat16)
        assert gpu.allocated_bytes == 0
        model.cuda()
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        assert {p.stride() for p in model.parameters() if p.dim() == 2} != {(0, 0)}
        assert num_bytes <= gpu.allocated_bytes < num_bytes * 1.1


def test_the_tokenizer_has_the_models_vocabulary_and_ends(bert: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(bert)

    assert len(tokenizer) == 30522
    ids = tokenizer(["a long sentence of words", "short"], padding=True)["input_ids"]
    assert ids[1][-1] == tokenizer.pad_token_id == 0
    assert {row[0] for row in ids} == {tokenizer.cls_token_id}
    assert max(map(max, ids)) < 30522


def test_english_has_four_characters_a_token(tmp_path: Path) -> None:
    write_tokenizer(Vocabulary(size=32000, family="llama", max_length=2048), tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)

    num_tokens = len(tokenizer(PROSE)["input_ids"])
    assert 3.6 < len(PROSE) / num_tokens < 4.6


def test_a_vocabulary_smaller_than_the_pieces_still_tokenizes(tmp_path: Path) -> None:
    vocabulary = Vocabulary(size=100, family="", max_length=64, ids={"eos": 3})
    write_tokenizer(vocabulary, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)

    assert len(tokenizer) == 100
    assert tokenizer.eos_token_id == 3
    assert max(tokenizer(PROSE)["input_ids"]) < 100


def test_every_bundled_model_has_its_vocabulary() -> None:
    modalities = {"text", "image-text", "audio"}
    for entry in list_models():
        vocabulary = vocabulary_of(resolve_config(entry.name).pretrained)
        assert (vocabulary is not None) == (entry.modality in modalities), entry.name


def test_a_stand_in_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    write_checkpoint("vit-base-patch16-224", tmp_path, layout="hf")
    write_checkpoint("vit-base-patch16-224", tmp_path, layout="hf")
    (tmp_path / "model.safetensors").write_text("weights")

    with pytest.raises(
        PlanError, match=r"holds `model\.safetensors`, which is not of a dummy checkpoint"
    ):
        write_checkpoint("vit-base-patch16-224", tmp_path, layout="hf")
    assert (tmp_path / "pytorch_model.bin").is_file()


def test_a_real_checkpoint_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "lit_model.pth").write_text("weights")
    (tmp_path / MARKER).write_text("# notes of somebody\n\n- lit_model.pth\n")

    with pytest.raises(PlanError, match="nothing was written"):
        write_checkpoint("bert-base-uncased", tmp_path, layout="hf")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="is a file"):
        write_checkpoint("bert-base-uncased", tmp_path / "file", layout="hf")


def test_an_image_processor_comes_with_a_model_of_images(tmp_path: Path) -> None:
    write_checkpoint("blip2-opt-2.7b", tmp_path, layout="hf")

    processor: Any = AutoProcessor.from_pretrained(tmp_path)
    assert type(processor).__name__ == "Blip2Processor"
    assert processor.image_processor.size["height"] == 224
    assert processor.tokenizer.pad_token_id == 1


def test_a_tokenizer_of_its_own_is_copied(bert: Path, tmp_path: Path) -> None:
    write_checkpoint("bert-base-uncased", tmp_path / "made", layout="hf", tokenizer=bert)

    here, there = (path / "tokenizer.json" for path in (tmp_path / "made", bert))
    assert here.read_bytes() == there.read_bytes()
    with pytest.raises(PlanError, match="has no tokenizer"):
        write_checkpoint("bert-base-uncased", tmp_path / "no", layout="hf", tokenizer=tmp_path)
    assert not (tmp_path / "no").exists()


def test_an_unknown_model_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="`bret-base`"):
        write_checkpoint("bret-base", tmp_path / "made", layout="hf")
    assert not (tmp_path / "made").exists()


def test_without_litgpt_its_layout_is_refused_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy_checkpoints, "find_spec", lambda name: None)

    with pytest.raises(UnsupportedError, match="LitGPT is not installed") as refused:
        write_checkpoint("open-llama-7b", tmp_path / "made", layout="litgpt")
    assert "--no-deps litgpt==0.5.13" in refused.value.hint


def test_the_layout_of_litgpt_does_not_need_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"org": "EleutherAI", "name": "pythia-1b"}
    config = {"name": "pythia-1b", "hf_config": source, "vocab_size": 50254, "block_size": 2048}
    for name, attributes in {
        "litgpt": {},
        "litgpt.config": {"configs": [config], "Config": SimpleNamespace},
        "litgpt.model": {"GPT": lambda config: torch.nn.Linear(4, config.vocab_size)},
        "litgpt.utils": {"save_config": lambda config, folder: None},
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "transformers", None)

    made = write_checkpoint("pythia-1b", tmp_path / "made", layout="litgpt")

    assert made.stands_for_bytes == 5 * 50254 * 2  # the file has float16
    ids = json.loads((tmp_path / "made" / "generation_config.json").read_text("utf-8"))
    assert ids == {"bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.skipif(importlib.util.find_spec("litgpt") is None, reason="LitGPT is not installed")
@pytest.mark.filterwarnings("ignore")
def test_litgpt_finds_what_it_asks_a_folder_for(tmp_path: Path) -> None:
    made = write_checkpoint("tinyllama-1.1b-base", tmp_path / "made", layout="litgpt")

    from litgpt.tokenizer import Tokenizer
    from litgpt.utils import check_valid_checkpoint_dir

    check_valid_checkpoint_dir(tmp_path / "made")
    assert made.stands_for_bytes == 1_100_048_384 * 4
    tokenizer = Tokenizer(tmp_path / "made")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.use_bos) == (1, 2, True)
    with pytest.raises(PlanError, match=re.escape("LitGPT has no config of `bert-base-uncased`")):
        write_checkpoint("bert-base-uncased", tmp_path / "other", layout="litgpt")


def test_the_command_says_what_it_has_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "vit-base-patch16-224", str(tmp_path / "vit"), "--format", "hf"])

    assert not ended.value.code
    assert "a dummy checkpoint of vit-base-patch16-224, 200 tensors" in capsys.readouterr().out
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    assert config["model_type"] == "vit"


def test_one_that_failed_midway_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(dummy_checkpoints, "save_weights", full)
        with pytest.raises(PlanError, match="cannot be written: No space left on device"):
            write_checkpoint("vit-base-patch16-224", tmp_path, layout="hf")
    write_checkpoint("vit-base-patch16-224", tmp_path, layout="hf")

    assert (tmp_path / "pytorch_model.bin").is_file()
