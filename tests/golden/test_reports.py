"""Reports as a user sees them. Rewritten by `pytest --update-golden`; read the difference before
committing it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from decimal import Decimal

import pytest

from memest import Prediction, TrainingPlan, predict
from memest.report import Outcome
from memest.report.page import fragment
from memest.report.text import render_suite, render_text

Golden = Callable[[str, str], None]

PLANS = {
    "gpt2-adamw": TrainingPlan(model_name="gpt2", batch_size=4, seq_len=256),
    "tinyllama-lora-mixed-a100": TrainingPlan(
        model_name="tinyllama-1.1b",
        batch_size=2,
        accumulate_grad_batches=4,
        seq_len=128,
        precision="bf16-mixed",
        use_lora=True,
        gpu=("a100-40gb",),
    ),
    "opt-125m-qlora-paged": TrainingPlan(
        model_name="opt-125m", use_qlora=True, optim="paged_adamw_8bit", gpu=("t4",), act_ckpt=True
    ),
    "bert-does-not-fit": TrainingPlan(
        model_name="bert-base-uncased", batch_size=8, precision="32-true", memory_limit=2 << 30
    ),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Prediction]:
    """Every plan predicted once, without what differs from run to run."""
    return {
        name: dataclasses.replace(predict(plan), elapsed_s=0.0, versions={}, name=name)
        for name, plan in PLANS.items()
    }


@pytest.mark.parametrize("name", PLANS)
def test_text_report(name: str, reports: dict[str, Prediction], golden: Golden) -> None:
    golden(f"{name}.txt", render_text(reports[name]) + "\n")


@pytest.mark.parametrize("name", PLANS)
def test_json_report(name: str, reports: dict[str, Prediction], golden: Golden) -> None:
    golden(f"{name}.json", json.dumps(reports[name].to_dict(), indent=1) + "\n")


def test_suite_table(reports: dict[str, Prediction], golden: Golden) -> None:
    golden("suite.txt", render_suite(list(reports.values())) + "\n")


def test_notebook_table(reports: dict[str, Prediction], golden: Golden) -> None:
    golden("notebook.html", fragment(reports["gpt2-adamw"]) + "\n")


@pytest.mark.parametrize("name", PLANS)
def test_printed_terms_add_up_to_the_peak(name: str, reports: dict[str, Prediction]) -> None:
    report = reports[name]

    assert sum(term.num_bytes for term in report.terms) == report.peak_allocated_bytes
    assert all(term.num_bytes >= 0 for term in report.terms)
    text = render_text(report).split("held at the peak")[1].split("\n\n")[0]
    found = [re.search(r"([\d.]+) GiB +([\d.]+) %", line) for line in text.splitlines()[1:]]
    *terms, peak = [tuple(map(Decimal, row.groups())) for row in found if row]
    assert tuple(map(sum, zip(*terms, strict=True))) == peak


def test_a_plan_that_does_not_fit_stops_where_memory_ended(reports: dict[str, Prediction]) -> None:
    report = reports["bert-does-not-fit"]

    assert report.verdict == Outcome.OOM
    assert report.peak_reserved_bytes <= 2 << 30 < report.unlimited_reserved_bytes


def test_the_phases_of_a_step_are_in_order(reports: dict[str, Prediction]) -> None:
    rows = reports["tinyllama-lora-mixed-a100"].phases

    one_micro_batch = ["before_forward", "after_forward", "after_backward"]
    assert [str(r.phase) for r in rows[:13]] == one_micro_batch * 4 + ["after_optimizer_step"]
    assert [r.micro_batch for r in rows[:13]] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_json_reads_back(reports: dict[str, Prediction]) -> None:
    report = reports["gpt2-adamw"]

    plan = TrainingPlan.from_dict(json.loads(report.to_json())["plan"])

    assert plan.model_name == "gpt2"
    assert plan.seq_len == 256
