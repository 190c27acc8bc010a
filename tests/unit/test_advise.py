"""Advice: each answer is a prediction that fits, cheapest in kind first, with nothing to spare."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from memest.cli import main
from memest.errors import PlanError
from memest.estimator.hardware.gpus import custom_gpu, find_gpu
from memest.estimator.predict import predict
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.search.advise import Advice, advise
from memest.estimator.search.changes import (
    LAST_RESORTS,
    Change,
    Cost,
    apply,
    least_bytes,
    techniques_for,
)
from memest.estimator.search.commands import ModelFacts, predict_command, training_lines
from memest.plan import TrainingPlan
from memest.report import Outcome, Prediction
from memest.report.text import render_advice
from memest.units import GIB, MIB
from tests import forked
from tests.command import memest_here

PLAN = TrainingPlan(model_name="gpt2", batch_size=6, seq_len=128, precision="32-true")
FACTS = ModelFacts(
    class_name="GPT2LMHeadModel",
    vision_modules=("vision_model",),
    lora_targets=("q", "v"),
    seq_len=128,
    image_size=224,
)
A100 = find_gpu("a100-80gb")


@pytest.fixture(scope="module")
def light(shallow: Callable[..., str]) -> TrainingPlan:
    """`PLAN` with one layer."""
    return replace(PLAN, model_name=shallow("gpt2", 1))


@pytest.fixture(scope="module")
def short(light: TrainingPlan) -> Advice:
    """A plan that has 7/8 of its memory: single changes do."""
    return short_of(light, 0.875)


@pytest.fixture(scope="module")
def narrow() -> Advice:
    """The same where nothing that keeps the training as it is does alone."""
    return advise(replace(PLAN, memory_limit=900 * MIB), A100)


def titles(advice: Advice) -> list[str]:
    return [option.title for option in advice.options]


def all_changes(plan: TrainingPlan, gpu: str = "a100-80gb") -> dict[str, Change]:
    techniques = techniques_for(plan, FACTS, find_gpu(gpu))
    return {change.title: change for technique in techniques for change in technique.changes}


def parsed(command: str) -> TrainingPlan:
    """The plan that the command line makes of `command`."""
    program, name, *args = shlex.split(command)
    assert program == "memest"
    with click.Context(main) as parent:
        subcommand = main.get_command(parent, name)
        assert subcommand is not None
        params = subcommand.make_context(name, args, parent=parent).params
    keys = PLAN.to_dict()
    return TrainingPlan.from_dict(
        {k: v for k, v in params.items() if k in keys and v is not None and v != ()}
    )


def test_a_plan_that_fits_gets_its_margin_and_one_prediction() -> None:
    advice = advise(PLAN, "a100-80gb")

    assert advice.fits
    assert advice.options == advice.not_enough == ()
    assert advice.num_predictions == 1
    assert (
        advice.current.verdict.margin_bytes == A100.limit_bytes - advice.current.verdict.needs_bytes
    )
    assert "fits as it is" in render_advice(advice)


def test_every_answer_is_what_its_plan_predicts(short: Advice) -> None:
    assert short.options
    for option in (*short.options, *short.not_enough):
        verdict = predict(option.plan).verdicts["a100-80gb"]

        assert option.fits is (verdict.verdict is Outcome.FITS)
        assert option.verdict == verdict


def test_answers_fit_and_the_others_do_not(short: Advice) -> None:
    assert all(option.fits and option.verdict.margin_bytes >= 0 for option in short.options)
    assert all(not option.fits and option.verdict.margin_bytes < 0 for option in short.not_enough)


def test_the_cheapest_in_kind_comes_first(short: Advice) -> None:
    for found in (short.options, short.not_enough):
        costs = [option.cost for option in found]

        assert costs == sorted(costs)


def test_a_command_to_paste_is_the_plan(short: Advice, narrow: Advice) -> None:
    for option in (*short.options, *narrow.options, short.current):
        assert parsed(option.command) == option.plan


@pytest.mark.parametrize(
    "keys",
    [
        {"freeze": ("a.*", "b[0-9]"), "gpu_memory": 24 * GIB, "memory_limit": 12345},
        {"use_qlora": True, "double_quant": True, "quant_skip": ("x", "y"), "lora_alpha": 8},
        {"padded": False, "tie_word_embeddings": False, "attn_implementation": "eager"},
        {"optim": "sgd", "momentum": 0.9, "steps": 3, "image_size": 112, "gpu": ("t4", "h200")},
        {"use_lora": True, "lora_target_modules": ("q", "v"), "lora_dropout": 0.0, "lora_r": 4},
    ],
)
def test_every_key_of_a_plan_but_its_name_has_a_flag(keys: dict[str, Any]) -> None:
    plan = TrainingPlan(model_name="gpt2", batch_size=2, **keys)

    assert parsed(predict_command(plan)) == plan


def test_accumulation_keeps_the_samples_of_a_step() -> None:
    plan = replace(PLAN, batch_size=6, accumulate_grad_batches=2)
    sizes = [c.updates for t, c in all_changes(plan).items() if t.startswith("micro-batch")]

    assert [(s["batch_size"], s["accumulate_grad_batches"]) for s in sizes] == [
        (4, 3),
        (3, 4),
        (2, 6),
        (1, 12),
    ]


def test_the_largest_micro_batch_that_fits_is_found(shallow: Callable[..., str]) -> None:
    """Activations are most of this plan, so that smaller is less."""
    plan = replace(PLAN, model_name=shallow("gpt2"), batch_size=8, seq_len=1024)
    needed = predict(plan).peak_reserved_bytes
    plan = replace(plan, memory_limit=int(0.6 * needed))
    options = advise(plan, A100, max_predictions=8).options
    found = next(option for option in options if option.title.startswith("micro-batch"))
    size = found.plan.batch_size

    assert size in (1, 2, 4)
    larger = replace(plan, batch_size=2 * size, accumulate_grad_batches=8 // (2 * size))
    assert predict(replace(larger, gpu=("a100-80gb",))).verdict is Outcome.OOM


def test_a_combination_has_nothing_that_could_be_left_out(narrow: Advice) -> None:
    combined = [option for option in narrow.options if len(option.changes) > 1]
    assert combined
    for option in combined:
        for change in option.changes:
            rest = [other for other in option.changes if other is not change]
            plan = apply(narrow.current.plan, rest)

            assert predict(plan).verdicts["a100-80gb"].verdict is Outcome.OOM


def test_a_combination_is_sought_only_where_nothing_cheaper_in_kind_fits(narrow: Advice) -> None:
    cheapest = narrow.options[0]

    assert all(o.cost <= cheapest.cost for o in narrow.options if len(o.changes) > 1)


def test_nothing_on_this_gpu_is_an_answer(light: TrainingPlan) -> None:
    """The smallest that was found has several changes, QLoRA among them."""
    advice = advise(replace(light, memory_limit=40 * MIB), A100)

    assert advice.options == ()
    assert advice.is_complete
    assert len(advice.smallest.changes) > 1
    assert advice.smallest.plan.use_qlora
    assert not advice.smallest.fits
    assert all(
        advice.smallest.verdict.needs_bytes <= o.verdict.needs_bytes for o in advice.not_enough
    )
    assert "nothing on this GPU: the smallest found needs" in render_advice(advice)


@pytest.mark.parametrize(
    "plan",
    [
        TrainingPlan(model_name="opt-125m", batch_size=2, seq_len=64, precision="bf16-true"),
        TrainingPlan(model_name="opt-125m", batch_size=4, seq_len=64, optim="adam_fused"),
    ],
)
def test_no_change_needs_less_than_is_thought_before_it_is_predicted(
    plan: TrainingPlan, shallow: Callable[..., str]
) -> None:
    plan = replace(plan, gpu=(A100.name,), model_name=shallow(plan.model_name))
    traced = trace_plan(plan, A100)
    least = [(change, least_bytes(change, traced)) for change in all_changes(plan).values()]

    bounds = [(change, num_bytes) for change, num_bytes in least if num_bytes > 0]
    assert len(bounds) > len(least) / 2
    for change, num_bytes in bounds:
        with suppress(PlanError):
            assert num_bytes <= predict(apply(plan, [change])).peak_allocated_bytes, change.title


@pytest.mark.parametrize("max_predictions", [1, 2, 5])
def test_the_number_of_predictions_is_a_limit(max_predictions: int, light: TrainingPlan) -> None:
    plan = replace(light, memory_limit=40 * MIB)

    advice = advise(plan, A100, max_predictions=max_predictions)

    assert advice.num_predictions == max_predictions
    assert not advice.is_complete
    assert "--max-predictions" in render_advice(advice)
    with pytest.raises(PlanError, match=re.escape("`max_predictions` is 0")):
        advise(plan, A100, max_predictions=0)


def test_a_change_that_cannot_be_predicted_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, light: TrainingPlan
) -> None:
    """As QLoRA of Falcon, whose layers are no `nn.Linear` and stay as they are."""

    def without_qlora(plan: TrainingPlan, **options: Any) -> Prediction:
        if plan.use_qlora:
            raise PlanError("it has no linear layer to quantise", hint="use LoRA")
        return predict(plan, **options)

    monkeypatch.setattr("memest.estimator.search.advise.predict", without_qlora)

    advice = advise(replace(light, memory_limit=40 * MIB), A100, max_predictions=14)

    reasons = {r.title: r.reason for r in advice.refused}
    assert reasons["QLoRA, rank 16"] == "it has no linear layer to quantise"


def test_a_gpu_outside_the_catalogue_is_asked_about_by_its_size() -> None:
    advice = advise(PLAN, custom_gpu(24 * GIB))

    assert advice.gpu == "24.00GiB"
    assert "--gpu-memory 24GiB" in advice.current.command


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ("adamw", ["adamw_fused", "adamw_8bit", "paged_adamw_8bit", "sgd"]),
        ("adamw_single", ["adamw_fused", "adamw_8bit", "paged_adamw_8bit", "sgd"]),
        ("adam_fused", ["adam_8bit", "paged_adam_8bit", "sgd"]),
        ("adam_8bit", ["paged_adam_8bit", "sgd"]),
        ("paged_adamw_8bit", ["sgd"]),
        ("lion_8bit", ["sgd"]),
        ("sgd", []),
    ],
)
def test_an_optimizer_is_followed_by_smaller_ones_of_its_kind(
    optim: str, expected: list[str]
) -> None:
    changes = all_changes(replace(PLAN, optim=optim)).values()

    made = [c for c in changes if "optim" in c.updates and "strategy" not in c.updates]
    assert [c.updates["optim"] for c in made] == expected


def test_offload_and_sharding_are_last_resorts_of_a_plain_plan(light: TrainingPlan) -> None:
    changes = all_changes(PLAN)
    last = {title: c for title, c in changes.items() if c.cost in LAST_RESORTS}

    assert list(last) == [
        "the optimizer on the host (DeepSpeed)",
        *(f"sharded over {number} GPUs (FSDP2)" for number in (2, 4, 8)),
    ]
    plan = apply(replace(light, precision="bf16-true"), [last["sharded over 2 GPUs (FSDP2)"]])
    assert (plan.strategy, plan.devices) == ("fsdp2", 2)
    assert parsed(predict_command(plan)) == plan
    assert predict(plan).verdict is Outcome.FITS
    for other in ({"use_lora": True}, {"optim": "sgd"}, {"loop": "plain"}):
        titles = all_changes(replace(PLAN, **other))
        assert "the optimizer on the host (DeepSpeed)" not in titles


def test_expandable_segments_are_tried_first_and_said_to_a_script() -> None:
    change = all_changes(replace(PLAN, alloc_conf="max_split_size_mb:64"))["expandable segments"]
    plan = apply(PLAN, [change])

    assert change.cost is Cost.NOTHING
    assert plan.alloc_conf == "max_split_size_mb:64,expandable_segments:True"
    assert "expandable segments" not in all_changes(plan)
    assert training_lines(PLAN, plan, FACTS)[0].startswith('os.environ["PYTORCH_ALLOC_CONF"] = ')
    assert parsed(predict_command(plan)) == plan


@pytest.mark.parametrize(
    ("precision", "gpu", "expected"),
    [
        ("32-true", "a100-80gb", ["bf16-mixed", "bf16-true"]),
        ("32-true", "t4", ["16-mixed", "bf16-true"]),
        ("bf16-mixed", "a100-80gb", ["bf16-true"]),
        ("bf16-true", "a100-80gb", []),
        ("16-true", "a100-80gb", []),
    ],
)
def test_precision_goes_down_as_the_gpu_can(precision: str, gpu: str, expected: list[str]) -> None:
    changes = all_changes(replace(PLAN, precision=precision), gpu).values()

    assert [c.updates["precision"] for c in changes if "precision" in c.updates] == expected


def test_what_the_plan_has_already_is_not_offered() -> None:
    plan = replace(PLAN, use_qlora=True, double_quant=True, act_ckpt=True, batch_size=1)

    offered = " ".join(all_changes(plan))

    for word in ("LoRA", "checkpointing", "micro-batch", "vision", "sdpa"):
        assert word not in offered


def test_texts_are_halved_to_an_eighth_and_images_once() -> None:
    updates = [c.updates for c in all_changes(PLAN).values() if c.cost is Cost.INPUTS]

    assert updates == [{"seq_len": 64}, {"seq_len": 32}, {"seq_len": 16}, {"image_size": 112}]


def test_what_contradicts_a_change_goes() -> None:
    changes = all_changes(replace(PLAN, optim="rmsprop", momentum=0.9))
    plan = replace(PLAN, optim="rmsprop", momentum=0.9, padded=True, freeze=("wte.*",))

    changed = apply(
        plan,
        [
            changes["LoRA, rank 16"],
            changes["SGD without momentum"],
            changes["micro-batch 1, accumulated 6 times"],
        ],
    )

    assert changed.freeze == ()
    assert changed.momentum == 0.0
    assert changed.padded is None


def test_the_lines_of_a_script_follow_the_changes() -> None:
    changes = all_changes(replace(PLAN, attn_implementation="eager"))
    eager = replace(PLAN, attn_implementation="eager")

    def lines(*names: str) -> tuple[str, ...]:
        return training_lines(eager, apply(eager, [changes[n] for n in names]), FACTS)

    assert lines() == ()
    assert lines("activation checkpointing", "micro-batch 3, accumulated 2 times") == (
        "model.gradient_checkpointing_enable()",
        "DataLoader(dataset, batch_size=3)",
        "L.Trainer(accumulate_grad_batches=2)",
    )
    assert lines("sdpa attention instead of eager", "fused optimizer", "precision bf16-true") == (
        'model = GPT2LMHeadModel.from_pretrained(name, attn_implementation="sdpa")',
        "optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), "
        "lr=lr, fused=True)",
        'L.Trainer(precision="bf16-true")',
    )
    assert lines("LoRA, rank 16", "activation checkpointing") == (
        "model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, "
        'target_modules=["q", "v"]))',
        "model.gradient_checkpointing_enable()",
        "model.enable_input_require_grads()",
    )
    assert lines("vision tower frozen") == ("model.vision_model.requires_grad_(False)",)


def test_the_lines_of_qlora_quantise_the_base_first() -> None:
    changes = all_changes(PLAN)
    qlora = changes["QLoRA, rank 16, double quantisation"]
    plan = apply(PLAN, [qlora])

    lines = training_lines(PLAN, plan, FACTS)

    assert [line.partition("(")[0] for line in lines] == [
        "quantization = BitsAndBytesConfig",
        "model = GPT2LMHeadModel.from_pretrained",
        "model = prepare_model_for_kbit_training",
        "model = get_peft_model",
    ]
    assert "bnb_4bit_use_double_quant=True" in lines[0]
    assert lines[2] == "model = prepare_model_for_kbit_training(model)"


def test_the_lines_of_qlora_say_what_differs_from_the_defaults_of_the_libraries() -> None:
    plan = replace(PLAN, use_qlora=True, kbit_ckpt=False, quant_skip=("x",), act_ckpt=True)

    lines = training_lines(PLAN, plan, FACTS)

    assert lines[0].endswith('llm_int8_skip_modules=["x"])')
    assert lines[2].endswith("(model, use_gradient_checkpointing=False)")
    assert "model.gradient_checkpointing_enable()" in lines


def test_advice_as_a_reader_sees_it(narrow: Advice, golden: Callable[[str, str], None]) -> None:
    golden("advice.txt", render_advice(narrow) + "\n")


def test_advice_as_json_has_every_figure(narrow: Advice) -> None:
    values = json.loads(json.dumps(narrow.to_dict()))

    assert values["schema"] == "memest.advice/1"
    assert values["current"]["time"]["seconds"] > 0
    assert values["fits"] is False
    assert [o["margin_bytes"] for o in values["options"]] == [
        o.verdict.margin_bytes for o in narrow.options
    ]
    assert TrainingPlan.from_dict(values["options"][0]["plan"]) == narrow.options[0].plan
    assert any("offload" in what for what in values["not_tried"])


def short_of(plan: TrainingPlan, share: float) -> Advice:
    """Advice for `plan` where there is but this share of what it reserves."""
    needed = predict(plan).peak_reserved_bytes
    return advise(replace(plan, memory_limit=int(share * needed)), A100)


def test_a_little_too_much_has_an_answer_of_every_kind(shallow: Callable[..., str]) -> None:
    name = shallow("blip2-opt-2.7b", 1)
    advice = short_of(TrainingPlan(model_name=name, precision="32-true", batch_size=8), 0.95)

    assert {option.cost for option in advice.options} == set(Cost).difference(LAST_RESORTS)
    assert {"activation checkpointing", "precision bf16-true"} <= set(titles(advice))
    frozen = next(o for o in advice.options if o.title == "vision tower frozen")
    assert frozen.plan.freeze == ("vision_model.*",)


def test_weights_that_are_too_many_need_other_states_or_adapters(
    shallow: Callable[..., str],
) -> None:
    advice = short_of(TrainingPlan(model_name=shallow("flan-t5-xxl", 1)), 0.6)

    assert titles(advice) == [
        "paged 8-bit optimizer states", "SGD without momentum", "LoRA, rank 16",
    ]  # fmt: skip


def memest(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memest", *args]
    return forked.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=300)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "gpt2"], "Error: advice is for one GPU"),
        (
            ["--model", "gpt2", "--gpu", "t4", "--gpu", "h200"],
            "Error: advice is for one GPU, not 2",
        ),
        (
            ["--model", "gpt2", "--gpu", "t4", "--gpu-memory", "24GiB"],
            "Error: advice is for one GPU, not 2",
        ),
        (["--model", "gpt2", "--gpu", "a10000"], "Error: `a10000` is not in the"),
        (["--model", "no-such", "--gpu", "t4"], "Error: `no-such` is no bundled model"),
        (["--gpu", "t4"], "Error: the plan names no model"),
        (["--model", "gpt2", "--gpu", "t4", "-o", "no/such/folder"], "cannot be written"),
        (["--model", "gpt2", "--gpu", "t4", "--max-predictions", "0"], "Error: Invalid value"),
    ],
)
def test_a_usage_error_is_two_lines_on_stderr(args: list[str], message: str) -> None:
    done = memest("advise", *args)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 2
    assert message in done.stderr


def test_the_command_answers_in_json_and_by_its_exit_code(
    tmp_path: Path, shallow: Callable[..., str]
) -> None:
    name = shallow("opt-125m")
    args = ("advise", "--model", name, "--seq-len", "16", "--gpu", "t4", "--check")
    output = tmp_path / "advice.json"

    fits = memest_here(*args, "--json", "-o", str(output))
    nothing = memest_here(*args, "--memory-limit", "8MiB", "--max-predictions", "2")

    assert fits.returncode == 0
    assert json.loads(output.read_text())["fits"] is True
    assert list(tmp_path.iterdir()) == [output]
    assert nothing.returncode == 5
    assert "nothing on this GPU among what was tried" in nothing.stdout


def test_changes_of_a_kind_are_listed_by_the_time_of_a_step(narrow: Advice) -> None:
    order = [(o.cost, o.time.seconds) for o in narrow.options if o.time]

    assert order
    assert order == sorted(order)
