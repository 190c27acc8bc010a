"""`memest run --python`: memest in one environment, the script in another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from memest.errors import PlanError
from memest.run.target import active_environment, run_elsewhere

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """\
import sys, torch, memest
torch.nn.Linear(8, 8).cuda()(torch.ones(1, 8, device="cuda")).sum().backward()
print("PREFIX", sys.prefix)
print("MEMEST", memest.__file__)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with torch and without memest."""
    folder = tmp_path_factory.mktemp("script") / "env"
    venv.create(folder, with_pip=False)
    ours = sysconfig.get_path("purelib")
    theirs = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(theirs, "libraries.pth").write_text(ours + "\n", encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `memest run` with this environment's interpreter on a script in `folder`."""
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "memest", "run", *arguments, "train.py"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder), **variables},
    )  # fmt: skip


def test_the_script_runs_in_its_own_environment(environment: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "--gpu", "h200", "--python", str(environment / "bin" / "python"))

    assert done.returncode == 0, done.stderr
    assert f"PREFIX {environment}" in done.stdout
    assert f"MEMEST {tmp_path / 'memest'}" in done.stdout
    assert "fits h200" in done.stdout
    assert "train.py:2 " in done.stdout  # the script's line, and no line of memest


def test_the_named_environment_wins_over_the_active_one(environment: Path, tmp_path: Path) -> None:
    shutil.copytree(environment, tmp_path / "active", symlinks=True)
    python = str(environment / "bin" / "python")
    done = run(tmp_path, "--gpu=h200", f"--python={python}", VIRTUAL_ENV=str(tmp_path / "active"))

    assert done.returncode == 0, done.stderr
    assert f"PREFIX {environment}" in done.stdout


def test_an_active_environment_is_found(environment: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "--gpu", "h200", VIRTUAL_ENV=str(environment))

    assert done.returncode == 0, done.stderr
    assert f"PREFIX {environment}" in done.stdout


def test_an_active_environment_without_torch_is_noted(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)

    done = run(tmp_path, "--gpu", "h200", VIRTUAL_ENV=str(tmp_path / "bare"))

    assert done.returncode == 0, done.stderr
    assert "note: VIRTUAL_ENV is not used" in done.stderr
    assert "has no torch" in done.stderr
    assert f"PREFIX {sys.prefix}" in done.stdout


def test_the_own_environment_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)

    assert active_environment() is None
    assert run_elsewhere(Path(sys.executable), ["train.py"]) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("none", "is not a Python interpreter"), ("lists", "does not run as a Python interpreter")],
)
def test_an_interpreter_that_does_not_run_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    lists.write_text("#!/bin/sh\necho nothing\n", encoding="utf-8")
    lists.chmod(0o755)

    with pytest.raises(PlanError, match=text):
        run_elsewhere(tmp_path / name, ["train.py"])


def test_an_old_python_is_an_error(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\necho \'[[3, 9], "/usr", ["torch"], []]\'\n', encoding="utf-8")
    old.chmod(0o755)

    with pytest.raises(PlanError, match=r"is Python 3\.9; memest needs 3\.11 or later"):
        run_elsewhere(old, ["train.py"])


def test_python_2_is_an_old_python(tmp_path: Path) -> None:
    """The probe runs without `importlib.util.find_spec`, as under Python 2."""
    old = tmp_path / "python"
    shim = "import sys, importlib.util as u; del u.find_spec; sys.version_info = (2, 7, 18)"
    old.write_text(
        f'#!/bin/sh\nshift; code="$1"; shift\nexec {sys.executable} -c "{shim}\n$code" "$@"\n',
        encoding="utf-8",
    )
    old.chmod(0o755)

    with pytest.raises(PlanError, match=r"is Python 2\.7; memest needs 3\.11 or later"):
        run_elsewhere(old, ["train.py"])


def test_an_environment_with_parts_of_torch_is_an_error(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    theirs = sysconfig.get_path("purelib", vars={"base": str(tmp_path)})
    Path(theirs, "torch").mkdir()

    with pytest.raises(PlanError, match="has only parts of torch") as caught:
        run_elsewhere(tmp_path, ["train.py"])
    assert (
        caught.value.hint == f"{tmp_path / 'bin' / 'python'} -m pip install --force-reinstall torch"
    )
