"""LoRA as peft itself puts it on a model of the virtual GPU."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu
from memest.models_meta.assemble import apply_lora, linear_names
from memest.models_meta.quantized import quantize
from memest.plan import TrainingPlan
from tests.requested import WORKSPACE, Requests

IN_4_BITS = TrainingPlan(model_name="any", use_qlora=True, precision="bf16-true")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 128, bias=False)
        self.v_proj = nn.Linear(64, 192, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.cat([self.q_proj(x), self.v_proj(x)], -1)


@pytest.fixture
def requests() -> Iterator[Requests]:
    with VirtualGpu(find_gpu("h200")) as gpu:
        yield Requests(gpu)


def block(dtype: torch.dtype = torch.bfloat16) -> Block:
    return Block().to("cuda", dtype)


def on_meta() -> Block:
    with torch.device("meta"):
        return Block()


def adapted_model(model: nn.Module, targets: list[str] | str | None, **values: Any) -> nn.Module:
    """`model` with adapters of rank 4, by default without dropout."""
    values = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **values}
    plan = TrainingPlan(model_name="gpt2", use_lora=True, **values)
    return apply_lora(model, plan, targets)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adapters_are_fp32_and_on_the_gpu_whatever_the_base(
    requests: Requests, dtype: torch.dtype
) -> None:
    model = adapted_model(block(dtype), ["q_proj"], lora_dropout=0.05)

    assert [(p.dtype, p.device.type) for p in trainable(model)] == [(torch.float32, "cuda")] * 2
    assert sum(p.numel() for p in trainable(model)) == 4 * (64 + 128)


def births(requests: Requests, model: nn.Module, **values: bool) -> list[int]:
    """Bytes of what is made on the GPU while `q_proj` gets adapters of rank 4, in its order."""
    return requests.made(lambda: adapted_model(model, ["q_proj"], **values))


def test_adapters_come_in_the_dtype_of_the_base_and_are_cast_once_all_are_there(
    requests: Requests,
) -> None:
    """A (4, 64) and B (128, 4), 2 bytes per element and then 4."""
    as_base, as_fp32 = [4 * 64 * 2, 128 * 4 * 2], [4 * 64 * 4, 128 * 4 * 4]

    assert births(requests, block(torch.bfloat16)) == as_base + as_fp32
    assert births(requests, block(torch.float32)) == as_fp32


def test_dora_takes_its_first_norms_on_the_gpu_in_the_dtype_of_the_base(requests: Requests) -> None:
    """The product of the adapters, with a workspace of cuBLAS; that times the scale; the sum with
    the weight; a norm per output. Then all are cast to fp32, in the order of peft's dictionaries.
    """
    weight, norms = 128 * 64 * 2, 128 * 2

    made = births(requests, block(torch.bfloat16), use_dora=True)

    assert made[:2] == [4 * 64 * 2, 128 * 4 * 2]
    assert made[2:7] == [weight, WORKSPACE, weight, weight, norms]
    assert made[7:] == [4 * 64 * 4, 128 * 4 * 4, 128 * 4]


def test_only_the_targets_named_train(requests: Requests) -> None:
    model = adapted_model(block(), ["q_proj", "v_proj", "elsewhere"])

    assert sum(p.numel() for p in trainable(model)) == 4 * (64 + 128) + 4 * (64 + 192)


def test_a_step_through_adapters_gives_gradients_to_them_alone(requests: Requests) -> None:
    model = adapted_model(block(), ".*_proj", lora_dropout=0.1).train()

    model(torch.empty(3, 5, 64, dtype=torch.bfloat16, device="cuda")).float().sum().backward()

    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(
    ("quant", "layer", "num_outputs"), [("nf4", "Linear4bit", 2), ("int8", "Linear8bitLt", 1)]
)
def test_a_quantised_base_gets_pefts_layer_for_it(
    requests: Requests, quant: str, layer: str, num_outputs: int
) -> None:
    """That of 4 bits adds to a clone of the base layer's output."""
    from peft.tuners.lora import bnb

    base = nn.Sequential(nn.Linear(64, 136, bias=False)).to("cuda", torch.bfloat16)
    quantize(base, replace(IN_4_BITS, quant=quant))
    model = adapted_model(base, ["0"])
    adapted = model.get_submodule("base_model.model.0")
    x = torch.zeros(300, 64, dtype=torch.bfloat16, device="cuda")

    made = requests.made(lambda: adapted(x))

    assert type(adapted) is getattr(bnb, layer)
    assert all(p.dtype is torch.float32 for p in trainable(model))
    before_adapters = made[: made.index(300 * 64 * 4)]  # which take the input in fp32
    # the fp16 product of 8 bits is cast to bf16
    num_products = num_outputs if quant == "nf4" else num_outputs + 1
    assert before_adapters.count(300 * 136 * 2) == num_products


@needs_bitsandbytes
def test_dora_runs_on_a_4_bit_base(requests: Requests) -> None:
    base = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).to("cuda", torch.bfloat16)
    quantize(base, IN_4_BITS, skip=["1"])

    adapted = adapted_model(base, ["0"], lora_dropout=0.1, use_dora=True).train()
    adapted(torch.empty(3, 64, dtype=torch.bfloat16, device="cuda")).sum().backward()

    trained = trainable(adapted)
    assert sorted(tuple(p.shape) for p in trained) == [(4, 64), (128,), (128, 4)]
    assert all(p.grad is not None for p in trained)


# --- what does not fit


def test_names_that_match_nothing_are_answered_with_those_that_exist() -> None:
    with pytest.raises(
        PlanError, match=re.escape("`lora_target_modules` `query`, `value` does not fit `Block`")
    ) as caught:
        adapted_model(on_meta(), ["query", "value"])

    assert caught.value.hint == "its linear layers are called `q_proj`, `v_proj`"


def test_peft_must_know_the_model_to_choose_its_targets() -> None:
    with pytest.raises(PlanError, match=re.escape("Please specify `target_modules`")):
        adapted_model(on_meta(), None)


def test_a_target_that_cannot_carry_an_adapter_is_refused() -> None:
    with pytest.raises(PlanError, match="is not supported"):
        adapted_model(on_meta(), ["norm"])


def test_linear_names_are_given_once_and_in_order() -> None:
    assert linear_names(nn.ModuleList([on_meta(), on_meta()])) == ["q_proj", "v_proj"]
