"""Files that a simulated script changes or deletes are put back at its end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from memest.run import kept_files as module
from memest.run.kept_files import FOLDER, kept_files
from memest.writing import write_whole
from tests import forked

OLD = b"weights of a real training"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user in the folder in which the script begins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "runs" / "model.pt"
    path.parent.mkdir()
    path.write_bytes(OLD)
    return path


def _write(path: Path) -> None:
    path.write_bytes(b"zeros")


def _append(path: Path) -> None:
    with path.open("ab") as content:
        content.write(b" and a line")


def _change_in_place(path: Path) -> None:
    with path.open("r+b") as content:
        content.write(b"zeros")


def _save(path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, path)


def _save_in_one_go(path: Path) -> None:
    path.with_suffix(".tmp").write_bytes(b"zeros")
    path.with_suffix(".tmp").replace(path)


def _rotate(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.write_bytes(b"zeros")
    _append(path.with_suffix(".old"))


@pytest.mark.parametrize(
    "change",
    [
        _write, _append, _change_in_place, _save_in_one_go, _rotate,
        lambda path: os.remove(path), lambda path: os.truncate(path, 3),
        lambda path: shutil.rmtree(path.parent),
        lambda path: path.parent.rename(path.parent.with_name("other")),
    ],
)  # fmt: skip
def test_a_file_that_was_there_is_put_back(file: Path, change: object) -> None:
    with kept_files() as kept:
        change(file)  # type: ignore[operator]
        assert not file.exists() or file.read_bytes() != OLD
        assert kept.paths == [str(file)] or change is _rotate

    assert file.read_bytes() == OLD
    assert not [p for p in file.parents[1].iterdir() if "memest" in p.name]
    assert FOLDER not in os.environ


def test_files_that_the_script_makes_stay(file: Path) -> None:
    made = file.with_name("made.pt")

    with kept_files() as kept:
        for _ in range(2):
            _write(made)
        file.read_bytes()
        assert kept.paths == []

    assert made.read_bytes() == b"zeros"


def test_a_checkpoint_that_the_script_has_made_and_renamed_stays(file: Path) -> None:
    made, folder = file.with_name("made.pt"), file.with_name("checkpoint-1")

    with kept_files() as kept:
        for text in (b"first", b"second"):
            file.with_name("partial").write_bytes(text)
            file.with_name("partial").replace(made)
        file.with_name("tmp").mkdir()
        _write(file.with_name("tmp") / "model.pt")
        file.with_name("tmp").rename(folder)
        _append(folder / "model.pt")
        assert kept.paths == []

    assert made.read_bytes() == b"second"
    assert (folder / "model.pt").read_bytes() == b"zeros and a line"


def test_a_temporary_file_that_becomes_a_checkpoint_is_the_scripts(file: Path) -> None:
    """Ignite's `DiskSaver` writes so."""
    made = file.with_name("best.pt")

    with kept_files() as kept:
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as partial:
            partial.write(b"zeros")
        os.rename(partial.name, made)
        with pytest.raises(FileExistsError):
            os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        assert kept.paths == []

    assert made.read_bytes() == b"zeros"
    assert sorted(os.listdir(file.parent)) == [made.name, file.name]


def test_a_link_is_put_back_and_its_target_is_kept(file: Path) -> None:
    link = file.with_name("last.pt")
    link.symlink_to(file)

    with kept_files():
        _write(link)
        link.unlink()
        link.write_bytes(b"zeros")

    assert link.is_symlink()
    assert file.read_bytes() == OLD


def test_a_rank_leaves_the_file_to_the_process_that_began(file: Path) -> None:
    code = (
        "from memest.run.kept_files import kept_files\n"
        f"with kept_files(): open({str(file)!r}, 'w').write('zeros')\n"
    )

    with kept_files():
        subprocess.run([sys.executable, "-c", code], check=True)
        assert file.read_bytes() == b"zeros"
        _write(file)

    assert file.read_bytes() == OLD


def test_ranks_that_write_at_the_same_time_lose_nothing(file: Path) -> None:
    files = [file.with_name(f"{number}.pt") for number in range(40)]
    for each in files:
        each.write_bytes(OLD)
    code = (
        "import glob\n"
        "from memest.run.kept_files import kept_files\n"
        "with kept_files():\n"
        f"    for name in sorted(glob.glob({str(file.parent)!r} + '/*.pt')):\n"
        "        open(name, 'w').write('zeros')\n"
    )

    with kept_files() as kept:
        ranks = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        assert [rank.wait() for rank in ranks] == [0, 0]
        assert len(kept.paths) == 41

    assert {each.read_bytes() for each in files} == {OLD}
    assert not [p for p in file.parents[1].iterdir() if "memest" in p.name]


def test_a_killed_run_is_made_good_by_the_next(file: Path) -> None:
    code = (
        "import os\n"
        "from memest.run.kept_files import kept_files\n"
        f"with kept_files():\n    open({str(file)!r}, 'w').write('zeros')\n    os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert file.read_bytes() == b"zeros"

    with kept_files() as kept:
        assert kept.paths == []
        assert file.read_bytes() == OLD

    assert not [p for p in file.parents[1].iterdir() if "memest" in p.name]


def test_a_file_that_cannot_return_stays_where_it_is(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with kept_files():
        file.unlink()
        file.mkdir()
        (file / "part").touch()

    (kept,) = file.parents[1].glob(".memest-kept-*")
    assert kept.read_bytes() == OLD
    assert f"warning: `{file}` is not put back, but in `{kept}`" in capsys.readouterr().err
    shutil.rmtree(file)


def test_a_large_file_that_is_changed_in_place_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_COPIED_BYTES", 3)

    with kept_files() as kept:
        _change_in_place(file)

    assert kept.not_kept == [str(file)]
    assert file.read_bytes().startswith(b"zeros")


def test_a_cache_that_cannot_be_written_to_does_not_matter(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")

    with kept_files() as kept:
        _write(file)

    assert file.read_bytes() == OLD
    assert not kept.journal.exists()


def test_a_file_of_memests_own_cache_is_no_file_of_the_script(file: Path) -> None:
    """Two runs at once write the same table of cuDNN's workspaces."""
    table = file.parent.parent / "cache" / "memest" / "cudnn.json"
    table.parent.mkdir(parents=True)
    table.write_text("old")

    with kept_files() as kept:
        write_whole(table, "new")

    assert table.read_text() == "new"
    assert not kept.paths


def test_a_system_without_hard_links_copies(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*args: object, **kwargs: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(os, "link", link)

    with kept_files():
        file.unlink()

    assert file.read_bytes() == OLD


def test_a_file_that_cannot_move_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with kept_files() as kept:
        _append(file)

    assert kept.not_kept == [str(file)]
    assert file.read_bytes().startswith(OLD)


def test_an_error_of_the_call_is_that_of_python(file: Path) -> None:
    with kept_files(), pytest.raises(FileNotFoundError):
        os.remove(file.with_name("nothing"))
    with kept_files(), pytest.raises(FileExistsError):
        file.open("x")

    assert file.read_bytes() == OLD


def test_a_run_puts_back_what_its_script_has_saved(file: Path) -> None:
    script = file.with_name("train.py")
    script.write_text(
        "import torch\n"
        "layer = torch.nn.Linear(8, 8, device='cuda')\n"
        f"torch.save(layer.state_dict(), {str(file)!r})\n",
        encoding="utf-8",
    )
    report = file.with_name("report.json")
    report.write_text("old", encoding="utf-8")
    command = [sys.executable, "-m", "memest", "run", "--gpu", "h100-80gb", "--json", str(report)]

    for ranks in ((), ("--nproc-per-node", "2")):
        ran = forked.run(
            [*command, *ranks, str(script)], capture_output=True, text=True, check=True
        )
        assert "put back: `model.pt`, which the script has changed or deleted" in ran.stdout
        assert file.read_bytes() == OLD
        assert json.loads(report.read_text(encoding="utf-8"))["kind"] == "run"


def test_what_is_not_a_file_is_left_alone(file: Path) -> None:
    with kept_files() as kept:
        with open(os.devnull, "w", encoding="utf-8") as nothing:
            nothing.write("zeros")
        descriptor = os.open(file, os.O_RDONLY)
        with open(descriptor, "rb") as content:
            assert content.read() == OLD
        assert kept.paths == []

    assert Path(os.devnull).exists()
