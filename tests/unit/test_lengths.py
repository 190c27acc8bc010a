"""Lengths that change from micro-batch to micro-batch, and the allocator's settings in a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memest import TrainingPlan, predict, virtual_gpu
from memest.cli import main
from memest.errors import PlanError
from memest.estimator.replay.virtual_run import canonical, shortened
from memest.estimator.search.many_plans import Growth, growths
from memest.plan.keys import MAX_LENGTHS, read_lengths
from memest.plots import plot_fragmentation
from memest.report import Outcome, Prediction
from memest.units import MIB

LENGTHS = (96, 1000, 40, 700, 96, 850)
PLAN = TrainingPlan.from_dict(
    {
        "model_name": "gpt2", "precision": "32-true", "loop": "plain", "batch_size": 2,
        "lengths": LENGTHS, "gpu": ["h100-80gb"],
    }
)  # fmt: skip


LAYERS = 4


@pytest.fixture(scope="module")
def plan(shallow: Callable[..., str]) -> TrainingPlan:
    """`PLAN` with few layers."""
    return replace(PLAN, model_name=shallow("gpt2", LAYERS))


@pytest.fixture(scope="module")
def report(plan: TrainingPlan) -> Prediction:
    return predict(plan)


@pytest.fixture(scope="module")
def grown(plan: TrainingPlan) -> tuple[Prediction, list[Growth]]:
    return growths(plan)


def test_lengths_come_from_a_list_a_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("96\n512\n\n40\n")
    (tmp_path / "list.json").write_text("[96, 512, 40]")

    assert read_lengths([96, 512, 40]) == (96, 512, 40)
    assert read_lengths("96,512, 40") == (96, 512, 40)
    assert read_lengths(str(tmp_path / "lines.txt")) == (96, 512, 40)
    assert read_lengths(tmp_path / "list.json") == (96, 512, 40)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([96, 0], "`lengths` has `0`"),
        ("96,-3", "`lengths` has `-3`"),
        ([96, 1.5], "`lengths` has `1.5`"),
        ([True], "`lengths` has `True`"),
        ([[8]], r"`lengths` has `\[8\]`"),
        ([1] * (MAX_LENGTHS + 1), "has 10001 numbers"),
        ({"a": 1}, "`lengths` is"),
        ("no-such-file.txt", "cannot be read"),
    ],
)
def test_what_are_no_lengths_is_refused(value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        TrainingPlan(model_name="gpt2", lengths=value)
    assert caught.value.hint


def test_a_list_as_seq_len_is_lengths_and_says_how_many_steps() -> None:
    plan = TrainingPlan.from_dict(
        {"model_name": "gpt2", "seq_len": [8, 16, 24, 32], "accumulate_grad_batches": 2}
    )

    assert (plan.lengths, plan.seq_len, plan.steps) == ((8, 16, 24, 32), None, 2)
    assert TrainingPlan.from_dict(plan.to_dict()) == plan
    with pytest.raises(PlanError, match="both given"):
        TrainingPlan(model_name="gpt2", seq_len=8, lengths=(8, 16))


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(PlanError, match="`lengths` 1025 is beyond the 1024 positions of `gpt2`"):
        predict(replace(PLAN, lengths=(8, 1025)))


def test_every_micro_batch_is_run(report: Prediction, plan: TrainingPlan) -> None:
    assert shortened(canonical(PLAN)) == (replace(PLAN, gpu=()), 0)
    assert PLAN.steps == len(LENGTHS)
    forwards = [row for row in report.phases if row.phase == "after_forward"]
    assert [row.step for row in forwards] == list(range(6))
    order = sorted(range(1, 6), key=lambda step: forwards[step].activations_bytes)
    assert order == sorted(range(1, 6), key=LENGTHS.__getitem__)
    assert report.assumptions[0] == "6 micro-batches of 40 to 1000 tokens"
    assert "6 lengths from 40 to 1000 tokens" in str(report)
    assert TrainingPlan.from_dict(report.plan) == replace(plan, padded=True)


def test_the_plan_reserves_what_a_script_that_does_the_same_would(report: Prediction) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with virtual_gpu("h100-80gb"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS)).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for length in LENGTHS:
            ids = torch.ones(2, length, dtype=torch.int64).cuda()
            mask = torch.ones(2, length, dtype=torch.int64)
            mask[1, -max(1, length // 4) :] = 0
            loss = model(input_ids=ids, attention_mask=mask.cuda(), labels=ids.clone()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    assert found[0] == pytest.approx(report.peak_allocated_bytes, rel=1e-3)
    assert found[1] == pytest.approx(report.peak_reserved_bytes, rel=1e-2)


def test_settings_of_the_allocator_change_what_is_reserved(
    report: Prediction, plan: TrainingPlan
) -> None:
    grows, splits = (
        predict(replace(plan, alloc_conf=text))
        for text in ("expandable_segments:True", "max_split_size_mb:64")
    )

    assert grows.peak_reserved_bytes < report.peak_reserved_bytes < splits.peak_reserved_bytes
    assert any("expandable_segments:True" in line for line in grows.assumptions)
    half = predict(replace(plan, alloc_conf="per_process_memory_fraction:0.5"))
    assert half.verdicts["h100-80gb"].limit_bytes == 85_017_493_504 // 2


def test_a_setting_that_torch_refuses_is_refused_with_its_words() -> None:
    with pytest.raises(PlanError, match="Unrecognized key 'expandable' in CUDA allocator config"):
        predict(replace(PLAN, alloc_conf="expandable:yes"))


def test_growth_by_setting_is_that_of_each_prediction(
    grown: tuple[Prediction, list[Growth]], report: Prediction, plan: TrainingPlan
) -> None:
    found, runs = grown

    assert replace(found, elapsed_s=0) == replace(report, elapsed_s=0)
    assert [run.label for run in runs] == [
        "PyTorch's defaults", "expandable_segments:True", "max_split_size_mb:64",
    ]  # fmt: skip
    for run in runs:
        alone = predict(replace(plan, alloc_conf=run.alloc_conf))
        assert max(run.reserved) == alone.peak_reserved_bytes
        assert max(run.allocated) == alone.peak_allocated_bytes
        assert len(run.rows()) == PLAN.steps
        assert list(run.reserved) == sorted(run.reserved)


def test_the_step_that_runs_out_of_memory_is_marked(
    grown: tuple[Prediction, list[Growth]], plan: TrainingPlan
) -> None:
    _, runs = grown
    limit = runs[1].reserved[-1] + 8 * MIB
    found, capped = growths(replace(plan, memory_limit=limit))
    figure = plot_fragmentation(found, capped, gpu_limit_bytes=limit)

    assert found.verdict is Outcome.OOM
    assert [run.failed_step is None for run in capped] == [False, True, False]
    marks = {line.get_gid() for axes in figure.axes for line in axes.lines}
    assert {"oom:", "oom:max_split_size_mb:64", "limit", "reserved:expandable_segments:True"} <= (
        marks
    )
    assert "oom:expandable_segments:True" not in marks
    step = capped[0].failed_step
    assert step is not None
    assert f"out of memory in step {step + 1}" in figure.texts[0].get_text()
    reasons = {text.get_gid(): text.get_text() for text in figure.texts}
    assert f"n step {step + 1}" in reasons["reason"]
    assert "not enough" in reasons["reason"]
    for run in capped:
        assert max(run.on_gpu) <= limit
        assert len(run.on_gpu) == (PLAN.steps if run.failed_step is None else run.failed_step)


def test_the_command_draws_the_chart_and_its_data(
    tmp_path: Path, shallow: Callable[..., str]
) -> None:
    name = shallow("gpt2")
    args = ["chart", "fragmentation", "--model", name, "--lengths", "16,64,8", "--gpu", "t4"]
    ran = CliRunner().invoke(
        main, [*args, "--setting", "default", "--out", str(tmp_path), "--format", "svg"]
    )
    many = CliRunner().invoke(main, [*args, *(5 * ["--setting", "default"])])

    assert ran.exit_code == 0, ran.output
    rows = [
        json.loads(line) for line in (tmp_path / "fragmentation.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(
        row["fragmentation_bytes"] == row["reserved_bytes"] - row["allocated_bytes"] for row in rows
    )
    assert (tmp_path / "fragmentation.svg").exists()
    assert many.exit_code == 2
