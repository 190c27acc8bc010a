"""The command line: exit codes, streams and files. Predictions themselves are tested elsewhere."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tests import forked
from tests.command import memest_here


def memest(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memest", *args]
    return forked.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=300)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["predict"], 2, "Error: the plan names no model"),
        (["predict", "--model", "gpt2", "--bs", "0"], 2, "Error: `batch_size` is `0`"),
        (["predict", "--model", "gpt2", "--bs", "many"], 2, "Error: Invalid value for '--bs'"),
        (["predict", "--model", "gpt2", "--optim", "adamv"], 2, "Error: `optim` cannot be `adamv`"),
        (["predict", "--model", "no-such"], 2, "Error: `no-such` is no bundled model"),
        (["predict", "--model", "gpt2", "--gpu", "a10000"], 2, "Error: `a10000` is not in the"),
        (["predict", "--model", "gpt2", "--memory-limit", "-4"], 2, "Error: `-4` is not a memory"),
        (
            ["predict", "--model", "t5-small", "--attn", "flash_attention_2"],
            2,
            "Error: `T5ForConditionalGeneration` has no `flash_attention_2`",
        ),
        (["predict", "--config", "a", "--suite", "b"], 2, "Error: `--config` and `--suite`"),
        (["predict", "--config", "no.yaml"], 2, "Error: `no.yaml` cannot be read"),
        (["predict", "--model", "gpt2", "-o", "no/such/folder"], 2, "cannot be written"),
        (["predict", "--model", "gpt2", "--resume"], 2, "Error: `--resume` needs `--suite`"),
        (["predict", "--model", "gpt2", "--json", "--emit", "sky"], 2, "`--json` and `--emit`"),
        (["predict", "--model", "gpt2", "--json", "--price", "2"], 2, "hours and prices are not"),
        (["predict", "--suite", "a.yaml", "--train-steps", "9"], 2, "not part of `--suite`"),
        (["predict", "--model", "gpt2", "--lora-r", "8"], 2, "`lora_r` is given for a full"),
        (["max-batch", "--model", "gpt2", "--lora-alpha", "8"], 2, "`lora_alpha` is given for a"),
        (["sweep", "--model", "gpt2", "--resume"], 2, "Error: `--resume` needs `-o`"),
        (["frobnicate"], 2, "Error: No such command 'frobnicate'"),
        (["predit"], 2, "Error: No such command 'predit'. Did you mean 'predict'?"),
        (["advise", "train.py"], 2, "hint: `memest run SCRIPT` simulates a script"),
        (["compare", "no.jsonl"], 2, "Error: `no.jsonl` cannot be read"),
        (["compare", "no.jsonl", "--tolerance", "x"], 2, "Error: `--tolerance x` is not"),
    ],
)  # fmt: skip
def test_a_usage_error_is_two_lines_on_stderr(args: list[str], code: int, message: str) -> None:
    done = (memest_here if "--attn" in args else memest)(*args)  # `--attn` imports transformers

    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 2
    assert message in done.stderr
    assert "\nhint: " in done.stderr


@pytest.mark.parametrize("args", [(), ("chart",)])
def test_without_a_command_the_help_is_as_with_help(args: tuple[str, ...]) -> None:
    bare, asked = memest(*args), memest(*args, "--help")

    assert (bare.stdout + bare.stderr).strip() == asked.stdout.strip()


def test_models_and_gpus_list_what_is_there() -> None:
    models, gpus = memest("models"), memest("gpus")

    assert "blip2-flan-t5-xxl" in models.stdout
    assert "a100-80gb" in gpus.stdout
    assert models.returncode == gpus.returncode == 0


def test_an_experiment_that_cannot_be_predicted_costs_the_suite_no_other(
    tmp_path: Path, shallow: Callable[..., str]
) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "defaults: {seq_len: 8}\nexperiments:\n"
        "  - {name: flash-t5, model_name: t5-small, attn_implementation: flash_attention_2}\n"
        f"  - {{name: plain, model_name: {shallow('gpt2')}}}\n"
    )

    done = memest_here("predict", "--suite", str(suite), "--json")

    assert done.returncode == 2
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == ["plain"]
    assert done.stderr.splitlines() == [
        "Error: experiment `flash-t5`: `T5ForConditionalGeneration` has no `flash_attention_2` in"
        " transformers",
        "hint: leave `attn_implementation` out, which takes what the model has",
    ]


def test_a_suite_is_json_lines_in_its_order(tmp_path: Path, shallow: Callable[..., str]) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        f"defaults: {{model_name: {shallow('gpt2')}, seq_len: 16, gpu: [t4]}}\n"
        "experiments: [{name: two, batch_size: 2}, {name: one}]\n"
    )

    done = memest("predict", "--suite", str(suite), "--json")

    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["name"] for r in reports] == ["two", "one"]
    assert {r["schema"] for r in reports} == {"memest.report/1"}
    assert {r["kind"] for r in reports} == {"predicted"}
    assert reports[0]["verdict"] == "fits"
    assert list(reports[0]["verdicts"]) == ["t4"]


def test_a_plan_that_does_not_fit_is_a_result_unless_checked(
    tmp_path: Path, shallow: Callable[..., str]
) -> None:
    name = shallow("gpt2")
    args = ("predict", "--model", name, "--seq-len", "16", "--memory-limit", "200MiB")
    output = tmp_path / "report.txt"

    result = memest_here(*args, "-o", str(output))
    checked = memest_here(*args, "--check", "--json")

    assert result.returncode == 0
    assert "OOM" in output.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["report.txt"]
    assert checked.returncode == 5


def test_a_local_config_is_a_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    done = memest_here("predict", "--model", str(tmp_path), "--seq-len", "8", "--json")

    embeddings, attention, mlp, norms = 2 * 128 * 64, 4 * 64 * 64, 3 * 64 * 96, 2 * 64
    assert json.loads(done.stdout)["model"]["num_params"] == (
        embeddings + 2 * (attention + mlp + norms) + 64
    )


def completed(*words: str) -> list[str]:
    env = {
        **os.environ,
        "_MEMEST_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["memest", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = forked.run(
        [sys.executable, "-m", "memest"], capture_output=True, text=True, check=False, env=env
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["predict", "--optim", "adafactor"], {"adafactor", "adafactor_foreach"}),
        (["predict", "--gpu", "a100"], {"a100-40gb", "a100-80gb"}),
        (["run", "--gpu", "h2"], {"h200"}),
        (["predict", "--model", "blip2-opt"], {"blip2-opt-2.7b", "blip2-opt-6.7b"}),
        (["sweep", "--precision", "32-true,bf16"], {"32-true,bf16-true", "32-true,bf16-mixed"}),
        (["chart", "lab", "--suite", "lab-"], {"lab-a100", "lab-h100", "lab-multi"}),
        (["mod"], {"models"}),
    ],
)
def test_a_shell_completes_values(words: list[str], expected: set[str]) -> None:
    assert expected <= set(completed(*words))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_names_memest(shell: str) -> None:
    done = memest("completion", shell)

    assert "_MEMEST_COMPLETE" in done.stdout
    assert done.returncode == 0


def test_lists_are_json_lines_too() -> None:
    models = [json.loads(line) for line in memest("models", "--json").stdout.splitlines()]
    gpus = [json.loads(line) for line in memest("gpus", "--json").stdout.splitlines()]

    assert "blip2-flan-t5-xxl" in {model["name"] for model in models}
    assert {gpu["name"] for gpu in gpus if gpu["evidence"] == "measured"} == {"h100-80gb", "h200"}
    assert all(gpu["limit_bytes"] == gpu["memory_bytes"] - gpu["context_bytes"] for gpu in gpus)


def test_every_command_is_in_a_section_of_the_help() -> None:
    from memest import cli
    from memest.cli import main

    for module in pkgutil.iter_modules(cli.__path__):
        importlib.import_module(f"memest.cli.{module.name}")
    assert sorted(main.commands) == main.list_commands(click.Context(main))
    out = memest("--help").stdout
    assert [line for line in out.splitlines() if line.startswith(("Predict:", "Search:"))]
    assert "Adapters and quantisation:" in memest("predict", "--help").stdout


def test_the_source_of_every_figure_is_a_flag_away() -> None:
    assert "chiemon" not in memest("gpus").stdout
    assert "chiemon" in memest("gpus", "--verbose").stdout
