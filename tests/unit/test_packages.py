"""Packages that only some plans need."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from memest import child, packages
from memest.cli import main
from memest.errors import UnsupportedError
from memest.estimator import predict
from memest.plan import TrainingPlan


@pytest.mark.parametrize(
    ("changes", "package"),
    [
        ({"optim": "adam_8bit"}, "bitsandbytes"),
        ({"strategy": "deepspeed_stage_2", "devices": 2}, "deepspeed"),
    ],
)
def test_a_missing_package_of_a_plan_is_named_before_a_model_is_built(
    changes: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: name != package)
    monkeypatch.setattr(predict, "import_libraries", pytest.fail)

    with pytest.raises(UnsupportedError, match=f"needs the package `{package}`"):
        predict.predict(TrainingPlan(model_name="gpt2", **changes))


@pytest.mark.parametrize(
    "command", ["explore --model gpt2", "max-batch --model gpt2 --gpu t4", "sweep --model gpt2"]
)
def test_a_missing_package_is_named_before_a_process_starts(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: name != "transformers")
    monkeypatch.setattr(child, "fork", pytest.fail)

    done = CliRunner().invoke(main, command.split())

    assert done.exit_code == 3
    assert "this needs the package `transformers`" in done.stderr
