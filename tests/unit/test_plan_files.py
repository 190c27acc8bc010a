"""Lab configs and suites as files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memest.errors import PlanError
from memest.plan.training_plan import read_config, read_suite


def write(folder: Path, text: str) -> Path:
    path = folder / "plans.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_lab_config_is_a_plan_and_flags_override_it(tmp_path: Path) -> None:
    path = write(tmp_path, "model_name: gpt2\nbatch_size: 4\nlr: 1.0e-5\nnum_workers: 8\n")

    plan = read_config(path, {"batch_size": 2})

    assert (plan.model_name, plan.batch_size) == ("gpt2", 2)


def test_a_suite_keeps_its_order_and_applies_its_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "defaults: {model_name: gpt2, seq_len: 64}\n"
        "experiments:\n- {name: b, batch_size: 3}\n- {name: a, seq_len: 32}\n",
    )

    plans = read_suite(path, {})

    assert [(p.name, p.batch_size, p.seq_len) for p in plans] == [("b", 3, 64), ("a", 1, 32)]


def test_json_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({"experiments": [{"name": "x", "model_name": "gpt2"}]}))

    assert read_suite(path, {})[0].name == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no mapping"),
        ("- a\n- b\n", "holds no mapping"),
        ("a: [1\n", "is not valid YAML"),
        ("experiments: []\n", "lists no `experiments`"),
        ("experiments: {a: 1}\n", "lists no `experiments`"),
        ("experiments: [1]\n", "experiment 1 in"),
        ("experiments: [{model_name: gpt2}]\n", "has no `name`"),
        ("experiments: [{name: a, model_name: gpt2}]\nextra: 1\n", "has the key `extra`"),
        ("defaults: 3\nexperiments: [{name: a, model_name: gpt2}]\n", "`defaults` in"),
        (
            "experiments: [{name: a, model_name: gpt2}, {name: a, model_name: gpt2}]\n",
            "names two experiments `a`",
        ),
        (
            "experiments: [{name: a, model_name: gpt2, batch_size: 0}]\n",
            "experiment `a`: `batch_size` is",
        ),
        ("experiments: [{name: a, model_name: gpt2, bath_size: 1}]\n", "`bath_size` is not a key"),
    ],
)
def test_a_bad_suite_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        read_suite(path, {})
    assert caught.value.hint


def test_a_missing_file_and_a_binary_one_are_errors(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")

    with pytest.raises(PlanError, match="cannot be read"):
        read_config(tmp_path / "none.yaml", {})
    with pytest.raises(PlanError, match="is not text"):
        read_config(binary, {})


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a" * (1 << 20))

    with pytest.raises(PlanError, match="larger than 512 KiB"):
        read_config(path, {})


def test_a_plan_and_a_suite_in_toml(tmp_path: Path) -> None:
    config, suite = tmp_path / "plan.toml", tmp_path / "suite.toml"
    config.write_text('model_name = "gpt2"\nbatch_size = 3\n')
    suite.write_text(
        '[defaults]\nmodel_name = "gpt2"\n[[experiments]]\nname = "a"\nbatch_size = 2\n'
    )

    assert read_config(config, {}).batch_size == 3
    assert [(plan.name, plan.batch_size) for plan in read_suite(suite, {})] == [("a", 2)]

    config.write_text("model_name = gpt2\n")
    with pytest.raises(PlanError, match="not valid TOML"):
        read_config(config, {})
