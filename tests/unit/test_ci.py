"""`memest diff`, `memest ci`, the Action and the pre-commit hook, in small git repositories."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import memest
from memest.cli import main
from memest.report import Ending, HeldRow, RunReport
from memest.report.difference import Difference, changes, differences, markdown, read_reports, sarif

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "repository"
GIT = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")

TRAIN = """
import torch

x = torch.ones({size} << 18, device="cuda")
y = x + 1
"""


def row(name: str, num_bytes: int, source: str = "") -> HeldRow:
    return HeldRow(name=name, num_bytes=num_bytes, num_tensors=1, kinds={}, source=source)


def report_of(size: int, line: int = 4) -> RunReport:
    with memest.virtual_gpu("t4") as gpu:
        torch_ones(size)
    rows = (row(f"train.py:{line}", size << 20, "x = torch.ones()"), row("train.py:9", 8))
    return replace(gpu.report(), name="train.py", lines=rows, ending=Ending.FINISHED)


def torch_ones(size: int) -> None:
    import torch

    torch.ones(size << 18, device="cuda")


def test_a_line_that_moves_is_the_same_line() -> None:
    before = [row("train.py:4", 10, "x = f()"), row("train.py:5", 7, "y = g()"), row("params", 1)]
    after = [row("train.py:6", 14, "x = f()"), row("train.py:7", 7, "y = g()"), row("params", 0)]

    found = changes(before, after)

    assert [(c.name, c.before_bytes, c.after_bytes) for c in found] == [
        ("train.py:6", 10, 14),
        ("params", 1, 0),
    ]


def test_a_difference_has_peaks_lines_and_versions() -> None:
    before, after = report_of(4), report_of(6, line=5)
    before = replace(before, versions={**before.versions, "torch": "2.9.0"})
    found = Difference(before=before, after=after)

    assert found.has_grown
    assert "allocated 4.00 MiB -> 6.00 MiB (+2.00 MiB)" in str(found)
    assert "  +2.00 MiB  train.py:5  x = torch.ones()  (4.00 MiB before)" in str(found)
    assert "note: the first report is of torch 2.9.0; this run is of torch 2." in str(found)
    assert "| allocated | 4.00 MiB | 6.00 MiB | 2.00 MiB |" in markdown(after, found, "main")
    assert "| train.py:5 | 2.00 MiB | `x = torch.ones()` |" in markdown(after, found, "main")


def test_sarif_names_the_line_in_the_repository(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "train.py").touch()
    after = report_of(6, line=5)
    at = "step 0, forward, aten.ones, train.py:3"
    verdict = replace(after.verdicts["t4"], verdict=memest.report.Outcome.OOM, at=at)
    after = replace(after, verdicts={"t4": verdict})

    pair = (after, Difference(before=report_of(4), after=after))
    log = sarif([pair, (report_of(4), None)], tmp_path)

    found = [
        (r["ruleId"], r["level"], r["locations"][0]["physicalLocation"])
        for r in log["runs"][0]["results"]
    ]
    place = {"artifactLocation": {"uri": "src/train.py"}}
    assert found == [
        ("out-of-memory", "error", {**place, "region": {"startLine": 3}}),
        ("memory-grew", "warning", {**place, "region": {"startLine": 5}}),
    ]


def test_diff_names_reports_without_a_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = replace(report_of(4), name="a.py"), replace(report_of(4), name="b.py")
    (tmp_path / "a.json").write_text(f"{one.to_json()}\n{two.to_json()}\n")
    three = replace(report_of(4), name="c.py")
    (tmp_path / "b.json").write_text(f"{two.to_json()}\n{three.to_json()}\n")
    with pytest.raises(SystemExit):
        main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")])

    printed = capsys.readouterr()
    assert printed.out.startswith("b.py\n")
    assert printed.err == (
        "note: not compared, only in the first file: a.py\n"
        "note: not compared, only in the second file: c.py\n"
    )


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (
            '{"schema": "memest.report/9"}',
            (),
            "has the schema `memest.report/9`, not `memest.report/1`",
        ),
        ('{"schema": "memest.report/1", "kind": "run"}', (), "is not a whole report: "),
        ("", ("--json", "--markdown"), "`--json` and `--markdown` are given together"),
    ],
)
def test_diff_refuses_another_schema_and_two_forms(
    content: str, more: tuple[str, ...], message: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(path), str(path), *more])

    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_diff_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "a.json", tmp_path / "diff.html"
    path.write_text(report_of(4).to_json())
    arguments = ["diff", str(path), str(path), "--html"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, str(page)])
    assert ended.value.code == 0
    assert "what changed" in page.read_text()
    with pytest.raises(SystemExit) as ended:
        main([*arguments, str(tmp_path / "no" / "diff.html")])
    assert ended.value.code == 2
    assert "cannot be written" in capsys.readouterr().err


def test_diff_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    for file, size in zip(files, (4, 6), strict=True):
        Path(file).write_text(report_of(size).to_json() + "\n")

    codes = []
    for order in (files, files[::-1]):
        with pytest.raises(SystemExit) as ended:
            main(["diff", *order, "--json", "--check"])
        codes.append(ended.value.code)

    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert codes == [4, 0]
    assert first["peaks"]["allocated"] == {"before_bytes": 4 << 20, "after_bytes": 6 << 20}
    assert second["changes"][0]["after_bytes"] == 4 << 20


@pytest.mark.parametrize("text", ["", "{", '{"schema": "memest.report/1", "kind": "run"}', "[1]"])
def test_a_file_without_reports_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)

    with pytest.raises(memest.MemestError, match=r"a\.json"):
        read_reports(path)


def test_plans_are_compared_by_name() -> None:
    reports = [replace(report_of(4), name=name) for name in "ab"]

    assert [d.after.name for d in differences(reports, reports[1:])] == ["b"]
    with pytest.raises(memest.MemestError, match="no plan in common"):
        differences(reports, [replace(reports[0], name="c"), replace(reports[0], name="d")])


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *GIT, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The sample repository, with a branch of a larger batch."""
    folder = tmp_path / "repository"
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    git(folder, "init", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "a")
    git(folder, "checkout", "-b", "larger")
    script = folder / "train.py"
    script.write_text(script.read_text().replace("BATCH = 16", "BATCH = 24"))
    git(folder, "commit", "-am", "b")
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment of an Action's step, with the command `memest` of this checkout."""
    command = tmp_path / "bin" / "memest"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memest "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return {
        **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
        "PATH": path, "PYTHONPATH": str(ROOT), "RUNNER_TEMP": str(tmp_path),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }  # fmt: skip


def step(name: str) -> dict[str, Any]:
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    return next(each for each in steps if name in each.get("run", ""))


def run_step(
    name: str, folder: Path, environment: dict[str, str], **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-e", "-c", step(name)["run"]], cwd=folder, env={**environment, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_action_compares_with_the_base_branch(
    repository: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    done = run_step(
        "memest ci", repository, environment, BASE="main", COMMAND="", INCREASE="--fail-on-increase"
    )
    run_step("GITHUB_STEP_SUMMARY", repository, environment)

    assert done.returncode == 4, done.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert "| peak | main | now | change |" in summary
    assert "| allocated | 597.93 MiB | 835.57 MiB | 237.63 MiB |" in summary
    assert "| train.py:13 | 142.44 MiB | `logits = model(tokens)` |" in summary
    log = json.loads((tmp_path / "memest.sarif").read_text())
    places = [
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for r in log["runs"][0]["results"]
    ]
    assert set(places) == {"train.py"}
    trees = subprocess.run(
        ["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True
    )
    assert len(trees.stdout.splitlines()) == 1


def test_the_sample_is_run_by_its_workflow(repository: Path, environment: dict[str, str]) -> None:
    """The branch of the larger batch fails; steps of other tools are left out."""
    workflow = yaml.safe_load((repository / ".github" / "workflows" / "memory.yml").read_text())
    commands = [s["run"] for job in workflow["jobs"].values() for s in job["steps"] if "run" in s]
    action = workflow["jobs"]["action"]["steps"][-1]
    (pytest_line,) = [c for c in commands if not c.startswith("pip install ")]
    python = pytest_line.replace("python", sys.executable, 1)
    done = subprocess.run(
        shlex.split(python), cwd=repository, env=environment, capture_output=True, text=True
    )

    assert "the peak grew: allocated 596.93 MiB -> 835.57 MiB" in done.stdout, done.stdout
    assert "train.py:13  logits = model(tokens)" in done.stdout
    assert set(action["with"]) <= set(yaml.safe_load((ROOT / "action.yml").read_text())["inputs"])


def test_the_action_does_without_git(environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN.format(size=4))
    command = "--gpu t4 --memory-limit 4MiB train.py"

    done = run_step(
        "memest ci", folder, environment, BASE="main", COMMAND=command, INCREASE="",
        GIT_CEILING_DIRECTORIES=str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 5, done.stderr
    assert "note: git finds no repository here" in done.stderr
    assert "(OOM) on t4, out of memory in " in (tmp_path / "memest.md").read_text()


def test_a_branch_that_is_not_there_is_named(repository: Path, environment: dict[str, str]) -> None:
    (repository / "train.py").write_text(TRAIN.format(size=4))
    done = run_step("memest ci", repository, environment, BASE="none", COMMAND="", INCREASE="")

    assert done.returncode == 0, done.stderr
    assert "note: git has no branch or commit `none`" in done.stderr


def test_the_action_passes_its_inputs() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    text = json.dumps(action["runs"])

    assert set(action["inputs"]) == {n for n in action["inputs"] if f"inputs.{n}" in text}


def test_the_hook_runs_the_projects_command(repository: Path, environment: dict[str, str]) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())

    done = subprocess.run(
        hook["entry"].split(), cwd=repository, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("memest: 0.87 of 14.6 GiB (fits) on t4, peak in step 2 ")
