"""A script runs as Python would run it, and what ends it is told as Python would tell it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from memest.errors import PlanError, UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.report import Ending, Outcome
from memest.run.session import RunResult, Session, run_target
from memest.run.target import find_module, find_script

USE = "import torch\nx = torch.zeros(1 << 20, device='cuda')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(source: str, *args: str, memory_limit: int | None = None) -> RunResult:
    path = Path("script.py")
    path.write_text(source)
    session = Session(find_gpu("h200"), memory_limit=memory_limit, max_steps=3)
    return run_target(find_script(str(path), args), session)


def test_a_script_sees_its_own_arguments_and_folder(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.argv, sys.path[:]
    ran = run("import sys\nprint(sys.argv[1:], __name__, sys.path[0], __file__)", "--gpu", "x")

    here = os.getcwd()
    assert capsys.readouterr().out == (
        f"['--gpu', 'x'] __main__ {here} {os.path.join(here, 'script.py')}\n"
    )
    assert (sys.argv, sys.path) == before
    assert (ran.exit_code, ran.report) == (0, None)


@pytest.mark.parametrize(
    ("argument", "code", "text"),
    [("", 0, ""), ("7", 7, ""), ("'no data'", 1, "no data\n"), ("None", 0, "")],
)
def test_sys_exit_gives_its_code(argument: str, code: int, text: str) -> None:
    ran = run(f"{USE}import sys\nsys.exit({argument})")

    assert (ran.exit_code, ran.error_text) == (code, text)
    assert ran.report is not None
    assert ran.report.ending == Ending.FINISHED


def test_an_exit_without_teardown_has_a_report() -> None:
    before = os._exit
    ran = run(f"{USE}import os\nif os.fork() == 0:\n    os._exit(9)\nos.wait()\nos._exit(3)")

    assert (ran.exit_code, ran.error_text, os._exit) == (3, "", before)
    assert ran.report is not None
    assert ran.report.error == "SystemExit: 3"


def test_a_crash_has_its_own_traceback_and_a_report() -> None:
    ran = run(f"{USE}def f():\n    return x @ x[:3]\nf()")

    assert ran.exit_code == 1
    assert ran.error_text.startswith("Traceback (most recent call last):\n")
    assert "return x @ x[:3]" in ran.error_text
    assert "memest" not in ran.error_text
    assert "torch/_ops.py" not in ran.error_text
    assert ran.report is not None
    assert ran.report.ending == Ending.CRASHED
    assert ran.report.peak_allocated_bytes == 4 << 20


def test_an_error_that_was_raised_from_another_is_told_with_it() -> None:
    ran = run(
        f"{USE}try:\n    x @ x[:3]\nexcept RuntimeError as e:\n    raise ValueError(1) from e"
    )

    assert "direct cause of the following exception" in ran.error_text
    assert ran.error_text.endswith("ValueError: 1\n")


def test_out_of_memory_is_a_verdict() -> None:
    ran = run("import torch\nx = [torch.zeros(1 << 20, device='cuda') for _ in range(9)]",
              memory_limit=20 << 20)  # fmt: skip

    assert ran.exit_code == 1
    assert "torch.OutOfMemoryError: CUDA out of memory." in ran.error_text
    assert ran.report is not None
    assert ran.report.verdict == Outcome.OOM
    assert ran.report.peak_reserved_bytes <= 20 << 20


def test_what_cannot_be_simulated_has_its_own_exit_code() -> None:
    ran = run(f"{USE}x.nonzero()\nx.view(1, -1).to_sparse_bsr((1, 1))")

    assert ran.exit_code == UnsupportedError.exit_code
    assert ran.refusal is not None
    assert ran.report is not None
    assert ran.report.ending == Ending.UNSUPPORTED


def test_ctrl_c_reports_so_far() -> None:
    ran = run(f"{USE}raise KeyboardInterrupt")

    assert ran.exit_code == 130
    assert ran.report is not None
    assert ran.report.ending == Ending.INTERRUPTED


def test_a_script_may_delete_itself_and_leave() -> None:
    ran = run(f"{USE}import os\nos.remove(__file__)\nos.chdir('/')\n1 / 0  # gone")

    assert "1 / 0  # gone" in ran.error_text
    assert ran.report is not None
    assert ran.report.lines[0].source == "x = torch.zeros(1 << 20, device='cuda')"


def test_steps_are_limited() -> None:
    ran = run(
        "import torch\nw = torch.zeros(9, device='cuda', requires_grad=True)\n"
        "o = torch.optim.SGD([w])\nwhile True:\n    w.sum().backward()\n    o.step()"
    )

    assert ran.exit_code == 0
    assert ran.report is not None
    assert (ran.report.num_steps, ran.report.ending) == (3, Ending.STOPPED)


def test_a_module_runs_from_the_current_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = folder / "a_package_to_run"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(f"{USE}import sys\nprint(sys.argv[1:], __package__)")
    target = find_module("a_package_to_run.train", ("-x",))
    ran = run_target(target, Session(find_gpu("h200")))

    assert capsys.readouterr().out == "['-x'] a_package_to_run\n"
    assert ran.report is not None
    assert ran.report.lines[0].name == "train.py:2"
    absent = find_module("a_package_to_run.eval", ())
    with pytest.raises(PlanError, match=r"no such module: `a_package_to_run\.eval`"):
        run_target(absent, Session(find_gpu("h200")))
