"""Files are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memest.errors import PlanError
from memest.writing import why_not_writable, write_output, write_whole


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match="cannot be written: No space left on device"):
        write_output(path, b"new")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    link, real = tmp_path / "latest.json", tmp_path / "real.json"
    link.symlink_to(real.name)

    write_whole(link, "new")

    assert link.is_symlink()
    assert real.read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    assert why_not_writable(pipe) == ""
    write_whole(pipe, "new")

    assert os.read(reader, 9) == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    os.close(reader)


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_stdout_that_is_a_file_goes_on_after_an_output(tmp_path: Path) -> None:
    lines = "print(1); write_output(Path('/dev/stdout'), 'two\\n'); print(3)"
    script = f"from pathlib import Path; from memest.writing import write_output; {lines}"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True)

    assert (tmp_path / "out").read_text() == "1\ntwo\n3\n"
