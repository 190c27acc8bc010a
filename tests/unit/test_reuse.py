"""Programs made from the traces of other sizes, against the trace of each size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.reuse import with_value
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.search.related_plans import TraceSeries, runs_of_one_spacing
from memest.plan import TrainingPlan

PLANS: dict[str, dict[str, Any]] = {
    "full": {"model_name": "gpt2", "seq_len": 48},
    "mixed, accumulating": {
        "model_name": "opt-125m", "precision": "bf16-mixed", "seq_len": 40,
        "accumulate_grad_batches": 3,
    },
    "lora, ckpt": {
        "model_name": "Qwen2.5-0.5B", "use_lora": True, "act_ckpt": True, "seq_len": 65,
    },
    "qlora": {"model_name": "opt-125m", "use_qlora": True, "seq_len": 64},
    "dora": {"model_name": "opt-125m", "use_lora": True, "use_dora": True, "seq_len": 32},
    "scaler": {"model_name": "bert-base-uncased", "precision": "16-mixed", "seq_len": 33},
    "contrastive": {"model_name": "clip-vit-large-patch14"},
    "blockwise": {"model_name": "flan-t5-base", "optim": "adam_8bit", "seq_len": 24},
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "gpu"),
    [(values, ("h200", "a100-40gb")[i % 2]) for i, values in enumerate(PLANS.values())],
    ids=PLANS,
)
def test_what_a_series_makes_is_what_a_trace_says(
    values: dict[str, Any], gpu: str, shallow: Callable[..., str]
) -> None:
    """Past the thresholds of reductions, of split keys and of the fused 4-bit product."""
    name = shallow(values["model_name"])
    plan, card = TrainingPlan(**{**values, "model_name": name}), find_gpu(gpu)
    series = TraceSeries(plan, card)
    series.cover(range(1, 65))

    for batch_size in sorted({5, 8, 23, 50} - series._traces.keys()):
        alone = trace_plan(with_value(plan, "batch_size", batch_size), card)
        assert series.at(batch_size) == alone, batch_size


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_sixty_four_sizes_of_one_form_cost_four_traces(
    precision: str, shallow: Callable[..., str]
) -> None:
    """Attention in float32 frees the older of two temporaries first."""
    plan = TrainingPlan(model_name=shallow("gpt2"), seq_len=48, precision=precision)
    series = TraceSeries(plan, find_gpu("h200"))
    series.cover(range(1, 65))

    for batch_size in range(1, 65):
        series.at(batch_size)
    assert series.num_traces == 4


def test_lengths_agree_with_single_traces_as_well(shallow: Callable[..., str]) -> None:
    plan = TrainingPlan(model_name=shallow("opt-125m"), batch_size=2)
    card = find_gpu("h200")
    series = TraceSeries(plan, card, "seq_len")
    series.cover(range(64, 1025, 64))

    for seq_len in (320, 512, 960):
        made = series.at(seq_len)
        assert seq_len not in series._traces
        assert made == trace_plan(with_value(plan, "seq_len", seq_len), card), seq_len


def test_a_guess_is_made_below_its_samples_too(shallow: Callable[..., str]) -> None:
    plan, card = TrainingPlan(model_name=shallow("gpt2"), seq_len=48), find_gpu("h200")
    series = TraceSeries(plan, card)
    series.interpolation(20)

    assert series.guess(7) == trace_plan(with_value(plan, "batch_size", 7), card)
    assert series.num_traces == 2


def test_lengths_are_guessed_at_multiples_of_what_attention_pads_to(
    shallow: Callable[..., str],
) -> None:
    plan, card = TrainingPlan(model_name=shallow("gpt2"), batch_size=2), find_gpu("h200")
    series = TraceSeries(plan, card, "seq_len")

    made = {n: series.guess(n) for n in (64, 256, 960, 100)}

    assert sorted(series._traces) == [64, 100, 128, 192]
    for seq_len in (256, 960):
        assert made[seq_len] == trace_plan(with_value(plan, "seq_len", seq_len), card), seq_len


def test_values_are_cut_into_runs_from_the_left() -> None:
    assert runs_of_one_spacing([]) == []
    assert runs_of_one_spacing([2, 4, 6, 7, 8]) == [[2, 4, 6], [7, 8]]
