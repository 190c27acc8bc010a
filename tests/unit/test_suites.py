"""The shipped suites hold the lab's tables, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from memest.errors import PlanError
from memest.plan.training_plan import read_suite
from memest.validate.results import find_suite, list_suites, suite_for_device

OPT_3, OPT_7, XXL = "blip2-opt-2.7b", "blip2-opt-6.7b", "blip2-flan-t5-xxl"

# The listing: model, batch, accumulation, precision, optimizer, strategy, verdict on 80 GB.
LAB_A100 = [
    (OPT_3, 32, 1, "32-true", "adamw", "auto", "oom"),
    (OPT_3, 16, 1, "32-true", "adamw", "auto", "fits"),
    (OPT_3, 16, 4, "32-true", "adamw", "auto", "fits"),
    (OPT_3, 16, 4, "32-true", "adamw", "auto", "fits"),
    (OPT_3, 16, 4, "bf16-true", "adamw", "auto", "fits"),
    (OPT_3, 16, 4, "bf16-mixed", "adamw", "auto", "fits"),
    (OPT_7, 16, 4, "bf16-true", "adamw", "auto", "fits"),
    (XXL, 16, 4, "bf16-true", "adamw", "auto", "oom"),
    (XXL, 1, 1, "bf16-true", "adamw", "auto", "oom"),
    (XXL, 16, 4, "bf16-true", "sgd", "auto", "fits"),
    (XXL, 2, 2, "bf16-true", "adam_8bit", "auto", "fits"),
    (XXL, 2, 2, "bf16-true", "adam_8bit", "auto", "fits"),
    (XXL, 16, 4, "bf16-true", "deepspeed_cpu", "deepspeed_stage_2_offload", "fits"),
    (XXL, 32, 2, "32-true", "adamw", "auto", "fits"),
    (XXL, 64, 1, "32-true", "adamw", "auto", "fits"),
]
# The same but baseline 64/1, opt-6.7b 32/2, xxl adamw 32/2, xxl sgd 32/2, offload 32/2.
LAB_H100 = [
    (
        row[0],
        *{0: (64, 1), 6: (32, 2), 7: (32, 2), 9: (32, 2), 12: (32, 2)}.get(i, row[1:3]),
        *row[3:],
    )
    for i, row in enumerate(LAB_A100)
]


def _listing(name: str) -> list[dict[str, Any]]:
    suite = yaml.safe_load(find_suite(name).read_text(encoding="utf-8"))
    return [{"strategy": "auto", "accumulate_grad_batches": 1, **suite["defaults"], **e}
            for e in suite["experiments"]]  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), [("lab-a100", LAB_A100), ("lab-h100", LAB_H100)])
def test_a_suite_holds_the_rows_of_the_lab(name: str, expected: list[tuple[Any, ...]]) -> None:
    keys = ("model_name", "batch_size", "accumulate_grad_batches", "precision", "optim", "strategy")

    rows = [(*(row[k] for k in keys), row["expected"]) for row in _listing(name)]

    assert expected == rows


@pytest.mark.parametrize("name", ["lab-a100", "lab-h100"])
def test_every_row_is_a_plan_of_25_tokens(name: str) -> None:
    plans = read_suite(find_suite(name), {})

    assert len(plans) == 15
    assert {plan.seq_len for plan in plans} == {25}
    assert [plan.label for plan in plans if plan.act_ckpt] == ["flan-t5-xxl adam_8bit, act_ckpt"]


@pytest.mark.parametrize("name", ["lab-a100", "lab-h100"])
def test_the_adapters_are_those_of_the_lab(name: str) -> None:
    rows = read_suite(find_suite(name), {})

    lora, qlora = (row for row in rows if row.uses_adapters)
    assert (lora.use_lora, qlora.use_qlora) == (True, True)
    for plan in (lora, qlora):
        assert (plan.lora_r, plan.lora_alpha, plan.lora_dropout) == (16, 32, 0.05)
        assert plan.lora_target_modules == ("q", "v")


def test_overrides_reach_every_row() -> None:
    rows = read_suite(find_suite("lab-a100"), {"memory_limit": 78 * 2**30})

    assert {row.memory_limit for row in rows} == {78 * 2**30}


def test_a_suite_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text("experiments:\n- {name: a, model_name: gpt2}\n- {name: a, model_name: gpt2}\n")

    with pytest.raises(PlanError, match="names two experiments `a`"):
        read_suite(path, {})


@pytest.mark.parametrize(
    ("name", "mebibytes", "suite"),
    [
        ("NVIDIA A100-SXM4-80GB", 81_153, "lab-a100"),
        ("NVIDIA H100 80GB HBM3", 81_090, "lab-h100"),
        ("NVIDIA H200", 143_155, "lab-h100"),
        ("NVIDIA GeForce RTX 4090", 24_210, "lab-a100"),
        ("NVIDIA H100 MIG 3g.40gb", 40_000, "lab-h100"),
    ],
)
def test_a_hopper_gets_the_suite_of_the_h100(name: str, mebibytes: int, suite: str) -> None:
    assert suite_for_device(name, mebibytes * 2**20) == suite


def test_an_unknown_suite_names_those_that_ship() -> None:
    assert {"lab-a100", "lab-h100"} <= set(list_suites())
    with pytest.raises(PlanError, match="no suite and no file `lab-b200`") as caught:
        find_suite("lab-b200")
    assert "`lab-h100`" in caught.value.hint
