"""The scripts by which CI tests the README's commands and a CUDA build."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from memest.cli import main

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import check_readme
    import smoke
finally:
    sys.path.pop(0)


def test_every_command_of_the_readme_is_found() -> None:
    blocks = check_readme.blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = [command for block in blocks for command in block.commands]
    named = {command.split()[1] for command in commands if command.startswith("memest ")}

    assert "pip install" in commands[0]
    assert len(commands) >= 18
    assert named <= set(main.list_commands(click.Context(main)))
    assert {"run", "predict", "validate", "compare", "chart", "explore"} <= named


def test_a_command_has_no_comment() -> None:
    block = check_readme.Block("sh", "memest gpus      # and which\n# a line\nmemest models\n")
    assert block.commands == ["memest gpus", "memest models"]


def test_a_line_of_the_sample_that_is_not_printed_is_found() -> None:
    output = "params   1 GiB\na long line of text\n"
    assert check_readme.missing_lines("params 1 GiB\n...\na long line...\n", output) == []
    assert check_readme.missing_lines("params 2 GiB", output) == ["params 2 GiB"]
    assert check_readme.missing_lines("a long line", output) == ["a long line"]


def test_every_case_of_the_smoke_test_has_expected_peaks() -> None:
    stored = json.loads(smoke.STORED.read_text(encoding="utf-8"))
    for name, case in smoke.CASES.items():
        assert bool(smoke.measured_peaks(case.measured)) != (name in stored), name
        assert case.arguments[0] in main.list_commands(click.Context(main))
