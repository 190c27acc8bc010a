"""Which command a process runs, as it was typed."""

from __future__ import annotations

import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from memest.run.preflight import Command, typed_command


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PWD", raising=False)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def process(
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    *,
    file: Path | None = None,
    module: str = "",
    argv: str = "",
) -> None:
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = str(file)
    main.__spec__ = ModuleSpec(module, None) if module else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", typed.split())
    monkeypatch.setattr(sys, "argv", argv.split())


@pytest.mark.parametrize(
    "typed", ["python train.py --bs 8", "python -u -X dev ./train.py --bs 8", "python {} --bs 8"]
)
def test_a_script_is_found_with_what_was_typed_after_it(
    typed: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(monkeypatch, typed.format(folder / "train.py"), file=folder / "train.py", argv="gone")

    command = typed_command()

    assert command is not None
    assert command.words[1:] == ("--bs", "8")
    assert command.label == "train.py --bs 8"
    assert command.folder == str(folder)


def test_a_script_that_has_changed_the_folder_runs_from_where_it_was_typed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(monkeypatch, "python train.py", file=folder / "train.py")
    (folder / "outputs").mkdir()
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.chdir(folder / "outputs")

    assert typed_command() == Command(("train.py",), str(folder))


def test_a_script_under_a_debugger_runs_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "train.py"
    process(monkeypatch, "python -m pdb other.py", file=file, argv="train.py --lr 1")

    assert typed_command() == Command((str(file), "--lr", "1"), str(folder))


@pytest.mark.parametrize("spec", ["package.train", "package.train.__main__"])
def test_a_module_is_found(spec: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "python -m package.train --lr 1"
    process(monkeypatch, typed, file=folder / "train.py", module=spec, argv="gone")

    assert typed_command() == Command(("-m", "package.train", "--lr", "1"), str(folder))


@pytest.mark.parametrize(
    "typed", ["python", "python -c pass", "python -m ipykernel_launcher -f x.json"]
)
def test_a_session_has_no_script(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process(monkeypatch, typed)

    assert typed_command(sys._getframe()) is None


def test_pytest_is_no_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process(monkeypatch, "python -m pytest", file=folder / "train.py", module="pytest.__main__")

    assert typed_command() is None


ASKS = "import sys\nfrom memest.run.preflight import typed_command\n"


@pytest.mark.parametrize(
    ("rest", "run_name", "words"),
    [
        ("found = typed_command(sys._getframe())", "__main__", ("{}", "-f")),
        (
            "found = typed_command(sys._getframe())\nif __name__ == '__main__':\n    pass",
            "package.train",
            ("-m", "package.train"),
        ),
        ("found = typed_command(sys._getframe())", "package.train", None),
    ],
    ids=["started from the session", "a module that runs by itself", "one that does not"],
)
def test_a_session_runs_the_module_of_the_cell_if_it_can(
    rest: str,
    run_name: str,
    words: tuple[str, ...] | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = folder / "train.py"
    file.write_text(ASKS + rest)
    process(monkeypatch, "python -m ipykernel_launcher", argv="launcher -f")

    found = runpy.run_path(str(file), run_name=run_name)["found"]

    words = words and tuple(word.format(file) for word in words)
    assert found == (None if words is None else Command(words, str(folder)))
