"""The file of cuDNN's answers: read back, bounded, and safe from other files and processes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memest.estimator.ops import convolution
from memest.estimator.ops.convolution import Answers


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_answers_are_read_back() -> None:
    first = Answers("91900-h100")
    key = first.key((1, 2, 3), "forward", True)
    assert first.stored.get(key) is None
    first.put(key, (512, 1))
    first.write()
    assert Answers("91900-h100").stored.get(key) == (512, 1)
    assert Answers("90800-h100").stored.get(key) is None, "another cuDNN"
    assert key != first.key((1, 2, 3), "forward", False)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": ["x"]}', "\x00\x01"])
def test_a_foreign_file_is_ignored_and_replaced(text: str) -> None:
    answers = Answers("x")
    answers.path.parent.mkdir()
    answers.path.write_text(text)
    answers = Answers("x")
    answers.put("key", (7,))
    answers.write()
    assert json.loads(answers.path.read_text()) == {"key": [7]}


def test_a_folder_that_cannot_be_written_is_passed_over(folder: Path) -> None:
    (folder / "memest").write_text("a file")
    answers = Answers("x")
    answers.put("key", (7,))
    answers.write()
    assert answers.stored.get("key") == (7,)


def test_the_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "MAX_ANSWERS", 10)
    answers = Answers("x")
    for i in range(25):
        answers.put(str(i), (i,))
    answers.write()
    kept = json.loads(answers.path.read_text())
    assert list(kept) == [str(i) for i in range(15, 25)]
    assert answers.stored.get("0") == (0,), "in the process every answer stays"


def test_writers_at_the_same_time_leave_a_whole_file() -> None:
    def write(number: int) -> None:
        answers = Answers("x")
        for i in range(50):
            answers.put(f"{number}-{i}", (i,))
            answers.write()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    path = Answers("x").path
    assert 50 <= len(json.loads(path.read_text())) <= 200
    assert os.listdir(path.parent) == [path.name], "no temporary file is left"
