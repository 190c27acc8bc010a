"""Largest batches and sweeps: what they say is what single predictions say."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memest.cli import main
from memest.errors import MemestError, PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.predict import predict
from memest.estimator.replay.reuse import with_value
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.search import related_plans
from memest.estimator.search.largest import TECHNIQUES, largest, peak_requested, technique_values
from memest.estimator.search.sweep import MIN_PARALLEL_POINTS, make_grid, parse_values, sweep
from memest.plan import TrainingPlan
from memest.report import Outcome
from memest.units import GIB


def verdict(plan: TrainingPlan, **changes: int) -> Outcome:
    for key, value in changes.items():
        plan = with_value(plan, key, value)
    return predict(with_value(plan, "gpu", ("h200",))).verdict


@pytest.mark.parametrize("use_qlora", [False, True])
def test_the_largest_batch_fits_and_the_next_does_not(
    use_qlora: bool, shallow: Callable[..., str]
) -> None:
    plan = TrainingPlan(
        model_name=shallow("opt-125m"), seq_len=64, use_qlora=use_qlora, memory_limit=3 * GIB
    )

    found = largest(plan, [find_gpu("h200")], "batch_size")[0]

    assert found.value is not None
    assert verdict(plan, batch_size=found.value) == Outcome.FITS
    assert verdict(plan, batch_size=found.value + 1) == Outcome.OOM
    single = predict(with_value(found.plan, "gpu", ("h200",)))
    assert found.peak_reserved_bytes == single.peak_reserved_bytes
    assert found.verdict.margin_bytes == single.verdicts["h200"].margin_bytes


def test_the_longest_sequence_stops_at_the_models_positions(shallow: Callable[..., str]) -> None:
    found = largest(TrainingPlan(model_name=shallow("gpt2")), [find_gpu("h200")], "seq_len")[0]

    assert found.value == 1024
    assert "positions" in found.ceiling


def test_where_nothing_fits_there_is_no_value(shallow: Callable[..., str]) -> None:
    plan = TrainingPlan(model_name=shallow("gpt2"), memory_limit=GIB // 4)

    found = largest(plan, [find_gpu("h200")], "batch_size")[0]

    assert found.value is None
    assert found.verdict.margin_bytes < 0
    assert found.to_dict()["max_batch_size"] is None


def test_a_sweep_says_what_single_predictions_say(shallow: Callable[..., str]) -> None:
    name = shallow("gpt2")
    plans = [
        TrainingPlan(model_name=name, seq_len=256, batch_size=n, gpu=("t4", "a100-40gb"))
        for n in (1, 2, 3, 4, 5, 6, 90)
    ]

    points = sweep(plans, jobs=1)

    assert len(points) == 14
    for point in points:
        single = predict(point.plan)
        assert point.verdict == single.verdicts[point.gpu]
    assert {str(p.verdict.verdict) for p in points if p.verdict} == {"fits", "oom"}


def test_optimizers_share_the_traces_of_the_first(
    shallow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adafactor adds a note, and Adagrad makes its state before the first step."""
    traced: list[TrainingPlan] = []
    trace = related_plans._run_if_allowed

    def counted(run: Any, plan: TrainingPlan, *args: Any, **kwargs: Any) -> Any:
        traced.append(plan)
        return trace(run, plan, *args, **kwargs)

    monkeypatch.setattr(related_plans, "_run_if_allowed", counted)
    plan = TrainingPlan(model_name=shallow("gpt2"), seq_len=64, gpu=("a100-40gb",))
    optimizers = ("adamw", "sgd", "adafactor", "adagrad")
    plans = [replace(plan, optim=o, batch_size=n) for o in optimizers for n in range(2, 10)]

    points = sweep(plans, jobs=1)

    assert [(each.optim, each.batch_size) for each in traced] == [
        ("adamw", 2), ("adamw", 3), ("adamw", 9), ("sgd", 2), ("adafactor", 2), ("adagrad", 2),
    ]  # fmt: skip
    for point in points[::3]:
        single = predict(point.plan)
        assert point.verdict == single.verdicts["a100-40gb"], point.plan
        assert point.peak_allocated_bytes == single.peak_allocated_bytes


def test_an_optimizer_that_fails_leaves_the_others(shallow: Callable[..., str]) -> None:
    plan = TrainingPlan(model_name=shallow("gpt2"), seq_len=64, gpu=("a100-40gb",))

    broken, fine = sweep([replace(plan, optim="muon"), plan], jobs=1)

    assert "2D parameters" in broken.error
    assert fine.verdict == predict(plan).verdicts["a100-40gb"]


def test_points_replayed_in_several_processes_are_those_of_one(
    shallow: Callable[..., str],
) -> None:
    """Enough points to be shared out; a batch of one, which is traced by itself, among them."""
    name = shallow("opt-125m")
    plans = [
        TrainingPlan(model_name=name, seq_len=64, batch_size=n, gpu=("t4",))
        for n in range(1, MIN_PARALLEL_POINTS + 2)
    ]

    assert sweep(plans, jobs=2) == sweep(plans, jobs=1)


def test_no_allocator_reserves_less_than_is_requested_at_once(shallow: Callable[..., str]) -> None:
    plan = TrainingPlan(model_name=shallow("gpt2"), seq_len=64, accumulate_grad_batches=3)
    requested_bytes = peak_requested(trace_plan(plan, find_gpu("h200")).program, 3)

    peak_bytes = predict(replace(plan, gpu=("h200",))).peak_allocated_bytes
    assert 0.95 * peak_bytes < requested_bytes <= peak_bytes


def test_every_technique_is_a_plan() -> None:
    plan = TrainingPlan(model_name="gpt2", freeze=("wte*",), optim="sgd", momentum=0.5)

    made = {name: TrainingPlan(**values) for name, values in technique_values(plan).items()}

    assert list(made) == list(TECHNIQUES)
    assert made["fp32"].optim == "adamw"
    assert made["fp32"].freeze == ("wte*",)


def test_techniques_without_qlora_leave_its_keys_out() -> None:
    plan = TrainingPlan(
        model_name="gpt2", use_qlora=True, quant_skip=("lm_head",), quant_load="in_place"
    )

    made = {name: TrainingPlan(**values) for name, values in technique_values(plan).items()}

    assert made["LoRA bf16"].quant_skip == ()
    assert made["QLoRA bf16"].quant_skip == ("lm_head",)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("batch_size", "", "has an empty value"),
        ("batch_size", "1,,2", "has an empty value"),
        ("batch_size", "5:1", "ends before it begins"),
        ("batch_size", "1:1000000000000", "more than 1,048,576 values"),
        ("batch_size", "1:9:0", "`batch_size` is `1:9:0`"),
        ("batch_size", "1:2:3:4", "`batch_size` is `1:2:3:4`"),
        ("batch_size", "x", "`batch_size` is `x`"),
        ("act_ckpt", "maybe", "`act_ckpt` is `maybe`"),
        ("bath_size", "1", "is not a key"),
    ],
)
def test_bad_values_say_what_is_wrong(key: str, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        parse_values(key, text)
    assert caught.value.hint


def test_more_points_than_allowed_are_refused() -> None:
    with pytest.raises(PlanError, match="the sweep has 6 points, more than 5"):
        make_grid(
            {"model_name": "gpt2"}, {"batch_size": [1, 2, 3], "seq_len": [8, 16]}, max_points=5
        )


def test_a_combination_that_is_no_plan_is_a_point_with_an_error() -> None:
    grid = make_grid({"model_name": "gpt2", "freeze": ["*.wte.*"]}, {"use_qlora": [False, True]})

    assert isinstance(grid[0][1], TrainingPlan)
    assert isinstance(grid[1][1], MemestError)


def test_the_command_line_writes_csv_and_json_lines(
    tmp_path: Path, shallow: Callable[..., str]
) -> None:
    name = shallow("gpt2")
    arguments = ["sweep", "--model", name, "--bs", "1:3", "--seq-len", "32", "--gpu", "t4", "-o"]
    for name in ("a.csv", "a.jsonl"):
        assert CliRunner().invoke(main, [*arguments, str(tmp_path / name)]).exit_code == 0

    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]

    assert [row["batch_size"] for row in rows] == ["1", "2", "3"]
    assert [str(line["peak_reserved_bytes"]) for line in lines] == [
        row["peak_reserved_bytes"] for row in rows
    ]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["sweep", "--model", "gpt2", "-o", "a.xyz"], 2),
        (["sweep", "--model", "gpt2", "--json", "-o", "a.csv"], 2),
        (["sweep", "--model", "gpt2", "-o", "/nowhere/a.csv"], 2),
        (["sweep", "--bs", "1:4"], 2),
        (["sweep", "--model", "gpt2", "--vary", "lora_r"], 2),
        (["max-batch", "--model", "gpt2", "--bs", "4"], 2),
    ],
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == code


@pytest.mark.parametrize(("more", "code"), [([], 0), (["--check"], 5)])
def test_a_batch_that_never_fits_fails_if_checked(
    more: list[str], code: int, shallow: Callable[..., str]
) -> None:
    arguments = ["max-batch", "--model", shallow("gpt2"), "--memory-limit", "256MiB", *more]
    assert CliRunner().invoke(main, [*arguments, "--gpu", "t4"]).exit_code == code
