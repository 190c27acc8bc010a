"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memest.errors import PlanError
from memest.writing import write_output, write_whole


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
