"""`from_pretrained` with weights, without, and with stand-ins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its weights: whole, in shards, as a .bin, and its config alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("models")
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=5000, n_positions=64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.save_pretrained(path / "whole")
    model.save_pretrained(path / "shards", max_shard_size="500KB")
    config.save_pretrained(path / "bin")
    torch.save(model.state_dict(), path / "bin" / "pytorch_model.bin")
    config.save_pretrained(path / "bare")
    config.save_pretrained(path / "stand-ins")
    stand_ins = {name: torch.zeros(1).expand(t.shape) for name, t in model.state_dict().items()}
    torch.save(stand_ins, path / "stand-ins" / "pytorch_model.bin")
    return path


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def load(path: Any, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **options)


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_an_adapter_is_loaded_into_a_model_by_its_state(folder: Path) -> None:
    """`load_adapter` of transformers names the arguments of `_load_pretrained_model`."""
    from peft import LoraConfig, get_peft_model_state_dict

    model, config = (
        load(folder / "whole").cuda(),
        LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),
    )
    model.add_adapter(config)
    state = get_peft_model_state_dict(model)
    model.load_adapter(adapter_state_dict=state, peft_config=config, adapter_name="other")

    assert sum("other" in name for name, _ in model.named_parameters()) == len(state)


@pytest.mark.parametrize("device_map", ["cuda", "auto", {"": 0}])
@pytest.mark.parametrize("kind", ["whole", "shards", "bin", "bare", "stand-ins"])
def test_all_kinds_of_weights_take_the_same(
    gpu: VirtualGpu, folder: Path, kind: str, device_map: Any
) -> None:
    model = load(folder / kind, device_map=device_map, dtype=torch.bfloat16)
    assert model.device == torch.device("cuda", 0)
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight is model.transformer.wte.weight
    held = sum((p.numel() * 2 + 511) // 512 * 512 for p in model.parameters())
    assert torch.cuda.memory_allocated() - held <= 2048  # and what transformers keeps of its own
    assert any("no weights" in note for note in gpu.notes) == (kind == "bare")


def test_a_model_is_loaded_on_the_host_and_moved(gpu: VirtualGpu, folder: Path) -> None:
    model = load(folder / "bare", dtype="auto")
    assert model.device.type == "cpu"
    assert torch.cuda.memory_allocated() == 0
    assert gpu.mode.host.num_bytes >= sum(p.numel() * 4 for p in model.parameters())
    model.to("cuda").train()
    loss = model(torch.zeros(2, 8, dtype=torch.long).cuda(), labels=torch.ones(2, 8).long().cuda())
    loss.loss.backward()
    assert model.lm_head.weight.grad.is_cuda


def test_a_bundled_config_stands_for_a_hub_id(gpu: VirtualGpu) -> None:
    model = load("openai-community/gpt2", device_map="cuda", dtype=torch.bfloat16)
    assert model.num_parameters() == 124_439_808
    assert any("bundled config" in note for note in gpu.notes)


def test_an_unknown_hub_id_fails_as_ever(gpu: VirtualGpu) -> None:
    with pytest.raises(OSError, match=r"couldn't connect|is not a local folder"):
        load("nobody/nothing")


def test_a_folder_with_other_weights_fails_as_ever(gpu: VirtualGpu, tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    (tmp_path / "other.safetensors").touch()
    with pytest.raises(OSError, match="no file named"):
        load(tmp_path)


def test_what_is_saved_is_loaded(gpu: VirtualGpu, folder: Path, tmp_path: Path) -> None:
    model = load(folder / "whole", device_map="cuda")
    model.save_pretrained(tmp_path)
    assert load(tmp_path).lm_head.weight.shape == (5000, 64)


def test_experts_are_loaded_as_they_are_published(gpu: VirtualGpu, tmp_path: Path) -> None:
    from transformers import MixtralConfig

    MixtralConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    ).save_pretrained(tmp_path)  # fmt: skip
    model = load(tmp_path, device_map="cuda")
    assert all(parameter.is_cuda for parameter in model.parameters())
    cats = [
        site.op for site in gpu.mode.memory.storages.sites if site.op in ("aten.stack", "aten.cat")
    ]
    assert len(cats) == 4  # gates, ups, the two beside each other, downs


def test_a_script_without_transformers_does_not_import_it() -> None:
    code = (
        "import sys; from memest.estimator.virtual_gpu import VirtualGpu; "
        "from memest.estimator.hardware.gpus import find_gpu\n"
        "with VirtualGpu(find_gpu('h100-80gb')): pass\n"
        "assert not {'transformers', 'safetensors.torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
