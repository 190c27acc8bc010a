"""A plan's later steps, repeated from the first one, are what a run of them would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertEncoder

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.repeat import StepRepeater
from memest.estimator.replay.replay import TracedPlan
from memest.estimator.replay.virtual_run import logged_trace
from memest.plan import TrainingPlan

H100 = find_gpu("h100-80gb")
REPEATED: dict[str, dict[str, Any]] = {
    "bf16": {"model_name": "SmolLM2-135M"},
    "autocast frees its weights": {"model_name": "gpt2", "precision": "bf16-mixed"},
    "a scaler": {"model_name": "gpt2", "precision": "16-mixed", "gradient_clip_val": 1.0},
    "micro-batches": {"model_name": "gpt2", "accumulate_grad_batches": 3},
    "checkpointing": {"model_name": "SmolLM2-135M", "act_ckpt": True},
    "padded rows": {"model_name": "SmolLM2-135M", "padded": True},
    "LoRA": {"model_name": "SmolLM2-135M", "use_lora": True},
    "QLoRA": {"model_name": "SmolLM2-135M", "use_qlora": True},
    "convolutions": {"model_name": "vit-base-patch16-224", "optim": "sgd"},
    "frozen weights": {"model_name": "flan-t5-base", "freeze": ["encoder"], "optim": "adafactor"},
    "a loop of the user": {"model_name": "bert-base-uncased", "loop": "plain"},
    "the Trainer": {"model_name": "bert-base-uncased", "loop": "transformers"},
    "the Trainer's micro-batches": {
        "model_name": "gpt2",
        "loop": "transformers",
        "accumulate_grad_batches": 4,
        "precision": "bf16-mixed",
    },
}


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each forward that is repeated."""
    found: list[int] = []
    again = StepRepeater._repeat_forward

    def counted(self: StepRepeater, *args: Any) -> Any:
        found.append(1)
        return again(self, *args)

    monkeypatch.setattr(StepRepeater, "_repeat_forward", counted)
    return found


@pytest.fixture
def runs(
    shallow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Any]], tuple[TracedPlan, TracedPlan]]:
    """`runs(values)`: a plan's trace, and the trace in which each step ran."""

    def made(values: dict[str, Any]) -> tuple[TracedPlan, TracedPlan]:
        given = {"batch_size": 2, "seq_len": 48, "precision": "bf16-true"} | values
        given["model_name"] = shallow(given["model_name"])
        plan = TrainingPlan.from_dict(given)
        found = logged_trace(plan, H100)
        monkeypatch.setattr(StepRepeater, "_can_repeat", lambda *args: False)
        return found, logged_trace(plan, H100)

    return made


def same(found: TracedPlan, whole: TracedPlan) -> bool:
    """Compare two traces, with their calls and the work of each step."""
    assert found.work is not None
    assert whole.work is not None
    assert found.work.steps == whole.work.steps
    assert found.work.works == whole.work.works
    return replace(found, work=None) == replace(whole, work=None)


@pytest.mark.parametrize("values", REPEATED.values(), ids=REPEATED)
def test_a_repeated_step_is_as_one_that_ran(
    values: dict[str, Any], runs: Callable[..., Any], count: list[int]
) -> None:
    found, whole = runs(values)

    assert len(count) == min(2, values.get("accumulate_grad_batches", 1)) or (
        values.get("loop") == "transformers" and len(count) == 3
    )
    assert same(found, whole)


def with_more(monkeypatch: pytest.MonkeyPatch, more: Callable[[nn.Module], None]) -> None:
    """Let BERT's encoder call `more` in its forward, which has what they need."""
    init, forward = BertEncoder.__init__, BertEncoder.forward

    def init_with_more(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.register_buffer("flag", torch.zeros(1, dtype=torch.bool))
        self.gate = nn.Parameter(torch.zeros(1))
        self.spare = [torch.empty(1 << 20, device="cuda")]
        self.num_calls = 0

    def forward_with_more(self: Any, *args: Any, **kwargs: Any) -> Any:
        more(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(BertEncoder, "__init__", init_with_more)
    monkeypatch.setattr(BertEncoder, "forward", forward_with_more)


def keep(module: nn.Module) -> None:
    """Make a table in the first forward, from a temporary."""
    if not hasattr(module, "table"):
        module.table = torch.arange(1 << 20, device="cuda").float() * 2


def draw(module: nn.Module) -> None:
    """Skip work at random, by a number of the host."""
    if torch.rand(()) < 0.5:
        torch.empty(1 << 22, device="cuda")


def guess(module: nn.Module) -> None:
    """Read a value that is not known."""
    if torch.randn(1 << 20, device="cuda").exp().sum().item() > 0:
        torch.empty(1 << 22, device="cuda")


def test_the_first_step_prepares_int8_weights(runs: Callable[..., Any], count: list[int]) -> None:
    found, whole = runs({"model_name": "SmolLM2-135M", "use_qlora": True, "quant": "int8"})

    assert not count
    assert same(found, whole)


def prepare_once(module: nn.Module) -> None:
    """Make something in the first forward only, by a flag."""
    if not module.flag:
        torch.empty(1 << 22, device="cuda")
        module.flag.fill_(True)


def count_calls(module: nn.Module) -> None:
    """Make something in the first forward only, by a count in Python."""
    if not module.num_calls:
        torch.empty(1 << 22, device="cuda")
    module.num_calls += 1


def release(module: nn.Module) -> None:
    """Free a tensor that was there before the first forward."""
    module.spare.clear()


def read_weight(module: nn.Module) -> None:
    """Branch on a weight, which is zero before the first step."""
    if module.gate.item() == 0:
        torch.empty(1 << 22, device="cuda")


@pytest.mark.parametrize(
    "more", [keep, draw, guess, prepare_once, read_weight, release, count_calls]
)
def test_steps_that_can_differ_run(
    more: Callable[[nn.Module], None],
    runs: Callable[..., Any],
    count: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_more(monkeypatch, more)

    found, whole = runs({"model_name": "bert-base-uncased"})

    assert not count
    assert same(found, whole)
