"""Whatever is given as a plan, the answer is a plan or an error with a hint."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from memest.errors import MemestError
from memest.plan import TrainingPlan
from memest.plan.keys import (
    ATTENTIONS,
    IGNORED_KEYS,
    PRECISIONS,
    STRATEGIES,
)
from memest.plan.optimizers import OPTIMIZERS
from memest.plan.training_plan import PLAN_KEYS
from memest.units import format_bytes, parse_bytes

KEYS = sorted({field.name for field in dataclasses.fields(TrainingPlan)} | IGNORED_KEYS)
ALIASES = PLAN_KEYS["precision"].aliases

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers()
    | st.integers(10**300, 10**600)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from([*PRECISIONS, *ALIASES, *OPTIMIZERS, *STRATEGIES, *ATTENTIONS])
    | st.sampled_from(["24GiB", "0b", "1e5GiB", "999999TiB", "80 gb", "gpt2", "q,v", ","])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
likely = {
    "batch_size": st.integers(1, 9), "accumulate_grad_batches": st.integers(1, 5),
    "precision": st.sampled_from([*PRECISIONS, *ALIASES, 16, 32]),
    "optim": st.sampled_from(sorted(OPTIMIZERS)), "act_ckpt": st.booleans(),
    "use_lora": st.booleans(),
    "use_qlora": st.booleans(), "double_quant": st.booleans(), "lora_dropout": st.floats(0, 1),
    "lora_alpha": st.floats(0, 100), "momentum": st.sampled_from([0, 0.0, 0.9]),
    "lora_target_modules": st.lists(st.text(max_size=5), max_size=3) | st.text(max_size=9),
    "freeze": st.lists(st.text(min_size=1, max_size=5), max_size=2),
    "gpu": st.lists(st.sampled_from(["h200", "a100, h100-80gb"]), max_size=2),
    "gpu_memory": st.integers(1, 2**50) | st.sampled_from(["8GiB", "80GB"]),
    "seq_len": st.none() | st.integers(1, 99), "padded": st.none() | st.booleans(),
    "steps": st.integers(1, 5), "name": st.text(max_size=5), "lr": st.floats(),
}  # fmt: skip
likely_plans = st.fixed_dictionaries({"model_name": st.just("gpt2")}, optional=likely)


def made_from(raw: Any) -> TrainingPlan | None:
    """The plan, or None where it was refused with a message and a hint."""
    try:
        return TrainingPlan.from_dict(raw)
    except MemestError as error:
        assert str(error).strip()
        assert error.hint.strip()
        assert "\n" not in f"{error}{error.hint}"
        return None


@given(values)
def test_any_value_is_a_plan_or_refused(raw: Any) -> None:
    made_from(raw)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), values, max_size=5))
def test_any_value_under_any_key_is_a_plan_or_refused(raw: dict[str, Any]) -> None:
    made_from({"model_name": "gpt2", **raw})


@given(st.text(max_size=60) | values.map(lambda v: json.dumps({"model_name": "gpt2", "freeze": v})))
def test_any_yaml_is_a_plan_or_refused(text: str) -> None:
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return
    made_from(raw)


@settings(max_examples=300)
@given(likely_plans)
def test_a_plan_comes_back_from_its_dictionary_and_its_json(raw: dict[str, Any]) -> None:
    made = made_from(raw)
    if made is not None:
        assert TrainingPlan.from_dict(made.to_dict()) == made
        assert TrainingPlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
        assert hash(made) == hash(TrainingPlan.from_dict(made.to_dict()))


@given(st.integers() | st.text() | st.from_regex(r"\s*[0-9.]{1,400}\s*[a-zA-Z]{0,3}\s*"))
def test_any_text_is_a_size_or_refused(text: Any) -> None:
    try:
        num_bytes = parse_bytes(text)
    except MemestError:
        return
    assert type(num_bytes) is int
    assert 1 <= num_bytes <= 2**50


@given(st.integers(1, 2**20 - 1), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_whole_binary_sizes_are_exact(num: int, unit: str) -> None:
    factor = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]

    assert parse_bytes(f"{num}{unit}") == num * factor
    assert parse_bytes(num * factor) == num * factor
    assert format_bytes(num * factor)
