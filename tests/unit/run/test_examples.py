"""The scripts of docs/run.md run as they stand there, and print what it says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = {name: text for text, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", PAGE, re.S)}


def memest_run(folder: Path, name: str, *options: str) -> str:
    (folder / name).write_text(SCRIPTS[name])
    command = [sys.executable, "-m", "memest", "run", *options, name]
    if name == "block.py":
        command = [sys.executable, name]
    done = forked.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_an_example_of_each_kind() -> None:
    assert set(SCRIPTS) == {"fp16.py", "bf16.py", "lit.py", "hf.py", "largest.py", "block.py"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16.py", "lit.py", "hf.py"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    out = memest_run(tmp_path, name, "--gpu", "a100-40gb")

    assert "ran to its end; 4 optimizer steps on a100-40gb: fits" in out


@pytest.mark.slow
def test_the_report_of_four_ranks_is_the_one_shown(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "torchrun.md").read_text(encoding="utf-8")
    (tmp_path / "ddp.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    options = ("--nproc-per-node", "4", "--gpu", "a100-80gb")

    out, tight = (
        forked.run(
            [sys.executable, "-m", "memest", "run", *options, *more, "ddp.py"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ).stdout.splitlines()
        for more in ((), ("--memory-limit", "1.9GiB"))
    )  # fmt: skip

    shown, verdict = re.findall(r"\n\n```\n(.*?)\n```", page, re.S)
    assert len(shown.splitlines()) > 10
    assert [line for line in shown.splitlines() if line not in out] == []
    assert [line for line in verdict.splitlines() if line not in tight] == []


@pytest.mark.slow
def test_the_report_of_an_example_is_the_one_shown(tmp_path: Path) -> None:
    out = memest_run(tmp_path, "bf16.py", "--gpu", "a100-40gb").splitlines()
    shown = PAGE.partition("(some lines left out):\n\n```\n")[2].partition("\n```")[0].splitlines()
    first = README.partition("(shortened):\n\n```\n")[2].partition("\n```")[0].splitlines()

    assert len(shown) > 30
    assert [line for line in shown if line not in out] == []
    assert len(first) > 10
    starts = [line.removesuffix("...") for line in first]
    assert [start for start in starts if not any(line.startswith(start) for line in out)] == []


@pytest.mark.slow
def test_the_largest_batch_is_the_one_shown(tmp_path: Path) -> None:
    out = memest_run(tmp_path, "largest.py", "--gpu", "rtx-4090")
    shown = re.search(r"`(largest batch \d+)`", PAGE)

    assert shown is not None
    assert shown[1] in out


@pytest.mark.slow
def test_the_block_of_code_runs(tmp_path: Path) -> None:
    assert memest_run(tmp_path, "block.py") == "fits block.py:7\n"
