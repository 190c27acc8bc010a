"""peft's own LoRA layers, on the meta device."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from memest.errors import PlanError
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import MemKind, StorageTable
from memest.estimator.hardware.gpus import find_gpu
from memest.models_meta.adapters import LoraLinear4bit, apply_lora, linear_names
from memest.models_meta.quantized.nf4 import quantize_nf4
from memest.units import MIB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 128, bias=False)
        self.v_proj = nn.Linear(64, 192, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.cat([self.q_proj(x), self.v_proj(x)], -1)


def block(dtype: torch.dtype = torch.bfloat16) -> Block:
    with torch.device("meta"):
        return Block().to(dtype)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adapters_are_fp32_and_on_meta_whatever_the_base(dtype: torch.dtype) -> None:
    model = apply_lora(block(dtype), r=4, alpha=8, dropout=0.05, target_modules=["q_proj"])

    assert [(p.dtype, p.device.type) for p in trainable(model)] == [(torch.float32, "meta")] * 2
    assert sum(p.numel() for p in trainable(model)) == 4 * (64 + 128)


def births(model: nn.Module, **values: bool) -> list[int]:
    """Bytes of what is made on the GPU while `q_proj` gets adapters of rank 4, in its order."""
    recorder = Recorder(find_gpu("h200"), StorageTable())
    for parameter in model.parameters():
        recorder.adopt(parameter, MemKind.PARAMS)
    recorder.take_events()
    with recorder:
        adapted = apply_lora(model, r=4, alpha=8, dropout=0.0, target_modules=["q_proj"], **values)
    made = [recorder.storages.num_bytes[event] for event in recorder.events if event >= 0]
    del adapted
    return made


def test_adapters_come_in_the_dtype_of_the_base_and_are_cast_once_all_are_there() -> None:
    """A (4, 64) and B (128, 4), 2 bytes per element and then 4."""
    as_base, as_fp32 = [4 * 64 * 2, 128 * 4 * 2], [4 * 64 * 4, 128 * 4 * 4]

    assert births(block(torch.bfloat16)) == as_base + as_fp32
    assert births(block(torch.float32)) == as_fp32
    assert torch.get_default_dtype() is torch.float32


def test_dora_takes_its_first_norms_on_the_gpu_in_the_dtype_of_the_base() -> None:
    """The product of the adapters, with a workspace of cuBLAS; that times the scale; the sum with
    the weight; a norm per output. Then all are cast to fp32, in the order of peft's dictionaries.
    """
    weight, norms = 128 * 64 * 2, 128 * 2

    made = births(block(torch.bfloat16), use_dora=True)

    assert made[:2] == [4 * 64 * 2, 128 * 4 * 2]
    assert made[2:7] == [weight, 32 * MIB, weight, weight, norms]
    assert made[7:] == [4 * 64 * 4, 128 * 4 * 4, 128 * 4]


def test_only_the_targets_named_train() -> None:
    model = apply_lora(
        block(), r=4, alpha=8, dropout=0.0, target_modules=["q_proj", "v_proj", "elsewhere"]
    )

    assert sum(p.numel() for p in trainable(model)) == 4 * (64 + 128) + 4 * (64 + 192)


def test_a_step_through_adapters_gives_gradients_to_them_alone() -> None:
    model = apply_lora(block(), r=4, alpha=8, dropout=0.1, target_modules=".*_proj").train()

    model(torch.empty(3, 5, 64, dtype=torch.bfloat16, device="meta")).float().sum().backward()

    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_a_4bit_base_gets_the_layer_that_clones_its_output() -> None:
    base = quantize_nf4(block(), compute_dtype=torch.bfloat16)
    model = apply_lora(base, r=4, alpha=8, dropout=0.0, target_modules=["q_proj"])

    layers = [module for module in model.modules() if isinstance(module, LoraLinear4bit)]

    assert len(layers) == 1
    output = layers[0](torch.empty(3, 64, dtype=torch.bfloat16, device="meta"))
    assert (output.shape, output.dtype) == ((3, 128), torch.bfloat16)


def test_names_that_match_nothing_are_answered_with_those_that_exist() -> None:
    with pytest.raises(
        PlanError, match=re.escape("`lora_target_modules` `query`, `value` does not fit `Block`")
    ) as caught:
        apply_lora(block(), r=4, alpha=8, dropout=0.0, target_modules=["query", "value"])

    assert caught.value.hint == "its linear layers are called `q_proj`, `v_proj`"


def test_peft_must_know_the_model_to_choose_its_targets() -> None:
    with pytest.raises(PlanError, match=re.escape("Please specify `target_modules`")):
        apply_lora(block(), r=4, alpha=8, dropout=0.0, target_modules=None)


def test_a_target_that_cannot_carry_an_adapter_is_refused() -> None:
    with pytest.raises(PlanError, match="is not supported"):
        apply_lora(block(), r=4, alpha=8, dropout=0.0, target_modules=["norm"])


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("`lora_r` is 0")):
        apply_lora(block(), r=0, alpha=8, dropout=0.0, target_modules=["q_proj"])


def test_bitsandbytes_is_not_imported_even_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing it would open the GPU; this one cannot be imported at all."""
    from peft import import_utils

    (tmp_path / "bitsandbytes.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    import_utils.is_bnb_available.cache_clear()
    import_utils.is_bnb_4bit_available.cache_clear()

    try:
        apply_lora(block(), r=4, alpha=8, dropout=0.0, target_modules=["q_proj"])
        with pytest.raises(RuntimeError, match="imported"):
            import_utils.is_bnb_4bit_available()
    finally:
        import_utils.is_bnb_available.cache_clear()
        import_utils.is_bnb_4bit_available.cache_clear()


def test_linear_names_are_given_once_and_in_order() -> None:
    assert linear_names(nn.ModuleList([block(), block()])) == ["q_proj", "v_proj"]
